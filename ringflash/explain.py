"""What a call would do, before it does: kernel, transport, schedule, and work and bytes per step, with the reasons."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ringflash import checks
from ringflash.auto import Facts, route
from ringflash.layout import Layout
from ringflash.mask import Mask
from ringflash.options import Options
from ringflash.plan import Course, Plan, make_plan
from ringflash.schedules import Transfer
from ringflash.tile import Inputs, choose, pick


@dataclass(frozen=True)
class StepReport:
    """One step of one rank: the blocks attended, their visible pairs per head, and bytes that set out meanwhile and come in.

    grad_bytes_*: what backward sends and receives in that step besides, as float32 dK and dV.
    """

    attends: tuple[int, ...]
    pairs: int
    bytes_sent: int
    bytes_received: int
    grad_bytes_sent: int
    grad_bytes_received: int


@dataclass(frozen=True)
class Explanation:
    """A call, explained for one rank; str() is the report. flops: forward, of this rank (backward is 2.5 times that).

    steps: of a forward pass, and of a backward pass unless backward_steps has others. buffer_bytes: what a rank holds of
    others' blocks at most, or, with a transport that gathers, all that it keeps for that (Options.max_buffer_bytes).
    border_bytes: K and V of all ranks that cross host borders, in forward and again in backward; grad_border_bytes: what
    backward moves across them besides, as float32 dK and dV.
    """

    rank: int
    size: int
    layout: str
    mask: str
    kernel: str
    transport: str
    schedule: str
    steps: tuple[StepReport, ...]
    backward_steps: tuple[StepReport, ...]
    pairs_per_rank: tuple[int, ...]
    flops: int
    buffer_bytes: int
    hosts: tuple[int, ...]
    border_bytes: int
    grad_border_bytes: int

    @property
    def imbalance(self) -> float:
        """Work of the busiest rank over the mean: 1.0 is perfect balance."""
        mean = sum(self.pairs_per_rank) / self.size
        return max(self.pairs_per_rank) / mean if mean else 1.0

    def __str__(self) -> str:
        flops = _count(self.flops, 1000, ("", "k", "M", "G", "T", "P"))
        lines = [
            f"rank {self.rank} of {self.size}: {self.layout}, {self.mask}",
            f"kernel     {self.kernel}",
            f"transport  {self.transport}",
            f"schedule   {self.schedule}",
            f"work       {flops}FLOP forward on this rank; busiest rank {self.imbalance:.3f} x the mean",
            f"buffers    {_size(self.buffer_bytes)} for blocks of others",
            *self._borders(),
            *_table(self.steps, "step"),
        ]
        return "\n".join([*lines, *(_table(self.backward_steps, "back") if self.backward_steps else ())])

    def _borders(self) -> list[str]:
        """What crosses host borders, where there are any."""
        if len(set(self.hosts)) == 1:
            return []
        home = f"in backward {_size(self.grad_border_bytes)} of dK and dV besides"
        return [f"hosts      {len(set(self.hosts))}; {_size(self.border_bytes)} of K and V cross their borders, {home}"]


def _table(steps: Sequence[StepReport], name: str) -> list[str]:
    """Steps, one a line under a head."""
    lines = [f"{name}  attends  visible pairs    sends  receives  backward also sends  receives"]
    for t, s in enumerate(steps):
        going_home = not s.attends and s.grad_bytes_sent + s.grad_bytes_received > 0
        blocks = "home" if going_home else ",".join(map(str, s.attends)) or "-"
        lines.append(
            f"{t:>4}  {blocks:>7}  {s.pairs:>13,}  {_size(s.bytes_sent):>7}  {_size(s.bytes_received):>8}"
            f"  {_size(s.grad_bytes_sent):>19}  {_size(s.grad_bytes_received):>8}"
        )
    return lines


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Layout | str,
    mask: Mask = Mask(),
    kv_layout: Layout | str | None = None,
    size: int | None = None,
    rank: int = 0,
    hosts: Sequence[int] | None = None,
    options: Options = Options(),
) -> Explanation:
    """What ring_attention would do with such tensors on `rank` of a ring of `size`. Local only; meta tensors are welcome.

    size: taken from the layout unless that is a name. hosts: the number of each rank's host (default: all on one). Raises the
    errors ring_attention would raise.
    """
    given = checks.Given(layout, kv_layout, mask, None, options)
    checks.kinds(given)
    if size is None and not isinstance(layout, Layout):
        raise ValueError(f"size must be given where layout is a name: layout={layout!r}")
    size = layout.size if size is None and isinstance(layout, Layout) else size
    for name, value, least in (("size", size, 1), ("rank", rank, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be an int of at least {least}: {name}={value!r}")
    assert isinstance(size, int)
    if rank >= size:
        raise ValueError(f"rank must be in 0 ... size-1: rank={rank}, size={size}")
    (q, k, v), call = checks.prepare(q, k, v, given, rank=rank, size=size, meta=True)
    places = checks.hosts(hosts, size)
    facts = Facts.of(k, v, call.kv_layout.lengths, hosts=places, shares_memory=len(set(places)) == 1)
    found = route(options, facts._replace(device="cuda") if k.device.type == "meta" else facts)
    plan = make_plan(call.layout, call.mask, call.kv_layout, schedule=found.schedule, hosts=places)
    report = _report(plan, call, (q, k, v), rank)
    if size == 1:
        return report
    buffers = report.buffer_bytes if found.transport == "p2p" else facts.buffer_bytes
    return replace(report, transport=f"{found.transport} ({found.why})", buffer_bytes=buffers)


def _report(plan: Plan, call: checks.Call, qkv: tuple[Tensor, Tensor, Tensor], rank: int) -> Explanation:
    q, k, v = qkv
    work = [plan.work(r) for r in range(plan.size)]
    pairs, rows = int(work[rank].sum()), len(plan.rows)
    per_token = k.shape[0] * k.shape[2] * (k.shape[3] + v.shape[3])
    crossing, partials = _crossing(plan)
    return Explanation(
        rank=rank,
        size=plan.size,
        layout=repr(call.layout),
        mask=checks.mask_words(plan.mask),
        kernel=_kernel(q, v, call.options),
        transport="none (one rank)",
        schedule=f"{plan.schedule} ({plan.why})",
        steps=_steps(plan, plan.forward, rank, per_token * k.element_size(), per_token * 4),
        backward_steps=()
        if plan.backward is plan.forward
        else _steps(plan, plan.backward, rank, per_token * k.element_size(), per_token * 4),
        pairs_per_rank=tuple(int(w.sum()) // rows for w in work),
        flops=2 * q.shape[0] * q.shape[2] * pairs * (q.shape[3] + v.shape[3]) // rows,
        buffer_bytes=_most_held(plan, rank) * per_token * k.element_size(),
        hosts=plan.hosts,
        border_bytes=crossing * per_token * k.element_size(),
        grad_border_bytes=partials * per_token * 4,
    )


def _crossing(plan: Plan) -> tuple[int, int]:
    """Tokens whose K and V, and whose partial dK and dV, cross host borders."""
    hosts, lengths = plan.hosts, plan.kv_layout.lengths

    def tokens(moves: Iterable[tuple[Transfer, int]]) -> int:
        return sum(lengths[x.block] for x, _ in moves if hosts[x.source] != hosts[x.target])

    return sum(tokens(step.blocks) for step in plan.forward.steps), sum(tokens(step.partials) for step in plan.backward.steps)


def _kernel(q: Tensor, v: Tensor, options: Options) -> str:
    """Which kernel runs and why; meta tensors may go to any GPU."""
    if q.device.type != "meta":
        tile = pick(options.kernel, q, v, deterministic=options.deterministic)
        return f"{tile.name} ({tile.why})"
    tile = choose(options.kernel, Inputs("sm_90", q.dtype, q.shape[-1], v.shape[-1]), deterministic=options.deterministic)
    if options.kernel == "auto" and tile.name.startswith("hopper"):
        return f"{tile.name} on an sm_90 GPU, triton on another (meta tensors)"
    return f"{tile.name} ({tile.why}; meta tensors: as on an sm_90 GPU)"


def _most_held(plan: Plan, rank: int) -> int:
    """The most tokens of other ranks' keys that a rank holds at a time."""
    held: set[int] = set()
    most = 0
    for turn in plan.forward.turns[rank]:
        held |= {block for block, _ in turn.departing.recvs}
        most = max(most, sum(plan.kv_layout.lengths[block] for block in held))
        held -= set(turn.drop)
    return most


def _steps(plan: Plan, course: Course, rank: int, per_token: int, grads_per_token: int) -> tuple[StepReport, ...]:
    """The steps of a pass; per_token: bytes of K and V, and of float32 dK and dV."""
    work, rows = plan.work(rank), len(plan.rows)

    def moved(hops: tuple[tuple[int, int], ...], nbytes: int) -> int:
        return sum(plan.kv_layout.lengths[block] * nbytes for block, _ in hops)

    return tuple(
        StepReport(
            attends=turn.attend,
            pairs=sum(int(work[block]) for block in turn.attend) // rows,
            bytes_sent=moved(turn.departing.sends, per_token),
            bytes_received=moved(turn.departing.recvs, per_token),
            grad_bytes_sent=moved(turn.departing.grad_sends, grads_per_token),
            grad_bytes_received=moved(turn.departing.grad_recvs, grads_per_token),
        )
        for turn in course.turns[rank]
    )


def _size(n: int) -> str:
    return _count(n, 1024, ("B", "KiB", "MiB", "GiB"))


def _count(n: float, base: int, units: tuple[str, ...]) -> str:
    """A number in the unit that keeps it short."""
    power = 0
    while n >= base and power < len(units) - 1:
        n, power = n / base, power + 1
    return f"{n:.4g} {units[power]}"

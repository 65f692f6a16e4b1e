"""What a call would do, before it does: kernel, transport, schedule, and work and bytes per step, with the reasons."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ringflash import checks
from ringflash.layout import Layout
from ringflash.mask import Mask
from ringflash.options import Options
from ringflash.plan import Plan, make_plan
from ringflash.schedules import Transfer
from ringflash.tile import Inputs, choose, pick


@dataclass(frozen=True)
class StepReport:
    """One step of one rank: the block attended, its visible pairs per head, and bytes that set out meanwhile and come in.

    grad_bytes_*: what backward sends and receives in that step besides, as float32 dK and dV.
    """

    attends: int | None
    pairs: int
    bytes_sent: int
    bytes_received: int
    grad_bytes_sent: int
    grad_bytes_received: int


@dataclass(frozen=True)
class Explanation:
    """A call, explained for one rank; str() is the report. flops: forward, of this rank (backward is 2.5 times that).

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
            f"buffers    {_size(self.buffer_bytes)} for blocks in flight, forward",
            *self._borders(),
            "step  attends  visible pairs    sends  receives  backward also sends  receives",
        ]
        for t, s in enumerate(self.steps):
            going_home = s.attends is None and s.grad_bytes_sent + s.grad_bytes_received > 0
            block = "home" if going_home else "-" if s.attends is None else str(s.attends)
            lines.append(
                f"{t:>4}  {block:>7}  {s.pairs:>13,}  {_size(s.bytes_sent):>7}  {_size(s.bytes_received):>8}"
                f"  {_size(s.grad_bytes_sent):>19}  {_size(s.grad_bytes_received):>8}"
            )
        return "\n".join(lines)

    def _borders(self) -> list[str]:
        """What crosses host borders, where there are any."""
        if len(set(self.hosts)) == 1:
            return []
        home = f"in backward {_size(self.grad_border_bytes)} of dK and dV besides"
        return [f"hosts      {len(set(self.hosts))}; {_size(self.border_bytes)} of K and V cross their borders, {home}"]


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
    plan = make_plan(call.layout, call.mask, call.kv_layout, schedule=options.schedule, hosts=checks.hosts(hosts, size))
    return _report(plan, call, (q, k, v), rank)


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
        transport="none (one rank)" if plan.size == 1 else "p2p (the only one; NCCL for GPU tensors, gloo for CPU tensors)",
        schedule=f"{plan.schedule} ({plan.why})",
        steps=_steps(plan, rank, per_token, k.element_size()),
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

    return sum(tokens(step.blocks) for step in plan.steps), sum(tokens(step.partials) for step in plan.steps)


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
    for turn in plan.turns[rank]:
        held |= {block for block, _ in turn.departing.recvs}
        most = max(most, sum(plan.kv_layout.lengths[block] for block in held))
        held -= set(turn.drop)
    return most


def _steps(plan: Plan, rank: int, per_token: int, itemsize: int) -> tuple[StepReport, ...]:
    work, rows = plan.work(rank), len(plan.rows)

    def moved(hops: tuple[tuple[int, int], ...], itemsize: int) -> int:
        return sum(plan.kv_layout.lengths[block] * per_token * itemsize for block, _ in hops)

    return tuple(
        StepReport(
            attends=turn.attend,
            pairs=0 if turn.attend is None else int(work[turn.attend]) // rows,
            bytes_sent=moved(turn.departing.sends, itemsize),
            bytes_received=moved(turn.departing.recvs, itemsize),
            grad_bytes_sent=moved(turn.departing.grad_sends, 4),
            grad_bytes_received=moved(turn.departing.grad_recvs, 4),
        )
        for turn in plan.turns[rank]
    )


def _size(n: int) -> str:
    return _count(n, 1024, ("B", "KiB", "MiB", "GiB"))


def _count(n: float, base: int, units: tuple[str, ...]) -> str:
    """A number in the unit that keeps it short."""
    power = 0
    while n >= base and power < len(units) - 1:
        n, power = n / base, power + 1
    return f"{n:.4g} {units[power]}"

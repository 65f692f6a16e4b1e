"""What a call would do, before it does: kernel, transport, schedule, and work and bytes per step, with the reasons."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ringflash import checks
from ringflash.heads import inner_plan
from ringflash.layout import Layout
from ringflash.mask import Mask
from ringflash.options import Options
from ringflash.plan import Plan
from ringflash.schedules import Transfer
from ringflash.shares import Share, are_shared, shares
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
class HeadsReport:
    """What one rank does where ranks exchange sequence for heads: the heads it attends, and the bytes it sends.

    repeated_k: key heads as the tile gets them, more than nheads_k where groups are cut unevenly. border_bytes: what of
    bytes_sent crosses host borders. grad_*: what backward sends.
    """

    ranks: int
    nheads_q: int
    nheads_k: int
    repeated_k: int
    bytes_sent: int
    grad_bytes_sent: int
    border_bytes: int
    grad_border_bytes: int

    def lines(self) -> list[str]:
        """Its part of the report."""
        again = f", attended as {self.repeated_k}" if self.repeated_k != self.nheads_k else ""
        there, back, border, grad_border = map(
            _size, (self.bytes_sent, self.grad_bytes_sent, self.border_bytes, self.grad_border_bytes)
        )
        over = f"; of these {border} and {grad_border} cross host borders" if self.border_bytes else ""
        return [
            f"heads      {self.nheads_q} of queries, {self.nheads_k} of keys{again}",
            f"exchange   {there} sent to the other {self.ranks - 1} in forward, {back} in backward{over}",
        ]


@dataclass(frozen=True)
class Explanation:
    """A call, explained for one rank; str() is the report. flops: forward, of this rank (backward is 2.5 times that).

    pairs_per_rank: visible pairs per head; heads_per_rank: query heads that each rank attends. heads: where ranks exchange
    sequence for heads, how; steps are then those of the ring around the exchange, whose blocks are counted by mesh row.

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
    heads_per_rank: tuple[int, ...]
    flops: int
    buffer_bytes: int
    hosts: tuple[int, ...]
    border_bytes: int
    grad_border_bytes: int
    heads: HeadsReport | None = None

    @property
    def imbalance(self) -> float:
        """Work of the busiest rank over the mean: 1.0 is perfect balance."""
        work = [pairs * heads for pairs, heads in zip(self.pairs_per_rank, self.heads_per_rank, strict=True)]
        mean = sum(work) / self.size
        return max(work) / mean if mean else 1.0

    def __str__(self) -> str:
        flops = _count(self.flops, 1000, ("", "k", "M", "G", "T", "P"))
        lines = [
            f"rank {self.rank} of {self.size}: {self.layout}, {self.mask}",
            f"kernel     {self.kernel}",
            f"transport  {self.transport}",
            *(self.heads.lines() if self.heads else []),
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
    mesh: Sequence[int] | None = None,
    options: Options = Options(),
) -> Explanation:
    """What ring_attention would do with such tensors on `rank` of a ring of `size`. Local only; meta tensors are welcome.

    size: taken from the layout unless that is a name. hosts: the number of each rank's host (default: all on one). mesh: the
    shape (ring, heads) of the group where that is a 2-D DeviceMesh. Raises the errors ring_attention would raise.
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
    place = _Place(call, checks.hosts(hosts, size), rank, checks.heads_ranks(options.transport, checks.mesh(mesh, size)))
    return _report(place, (q, k, v))


@dataclass(frozen=True)
class _Place:
    """A rank in its mesh: `n` ranks that follow each other exchange sequence for heads."""

    call: checks.Call
    hosts: tuple[int, ...]
    rank: int
    n: int

    def plan(self, column: int) -> Plan:
        """The plan of the ring of one mesh column."""
        x = self.call
        return inner_plan(
            x.layout, x.mask, x.kv_layout, size=self.n, rank=column, schedule=x.options.schedule, hosts=self.hosts
        )


def _report(place: _Place, qkv: tuple[Tensor, Tensor, Tensor]) -> Explanation:
    q, k, v = qkv
    call, n = place.call, place.n
    row, column = divmod(place.rank, n)
    every = shares(q.shape[2], k.shape[2], n)
    plans, per_tokens = [place.plan(i) for i in range(n)], [_per_token(share, k, v) for share in every]
    plan, per_token = plans[column], per_tokens[column]
    work = [plan.work(r) for r in range(plan.size)]
    pairs, rows = int(work[row].sum()), len(plan.rows)
    crossing, partials = (
        sum(tokens * each for tokens, each in zip(moved, per_tokens, strict=True))
        for moved in zip(*map(_crossing, plans), strict=True)
    )
    return Explanation(
        rank=place.rank,
        size=len(place.hosts),
        layout=repr(call.layout),
        mask=checks.mask_words(plan.mask),
        kernel=_kernel(q, v, call.options),
        transport=_transport(plan.size, n),
        schedule=f"{plan.schedule} ({plan.why})",
        steps=_steps(plan, row, per_token, k.element_size()),
        pairs_per_rank=tuple(int(w.sum()) // rows for w in work for _ in range(n)),
        heads_per_rank=tuple(len(share.q) for share in every) * plan.size,
        flops=2 * q.shape[0] * len(every[column].q) * pairs * (q.shape[3] + v.shape[3]) // rows,
        buffer_bytes=_most_held(plan, row) * per_token * k.element_size(),
        hosts=place.hosts,
        border_bytes=crossing * k.element_size(),
        grad_border_bytes=partials * 4,
        heads=_heads(place, every, qkv) if n > 1 else None,
    )


def _per_token(share: Share, k: Tensor, v: Tensor) -> int:
    """Elements of K and V that a rank with these heads attends for one token."""
    return k.shape[0] * sum(share.repeats) * (k.shape[3] + v.shape[3])


def _transport(ring: int, n: int) -> str:
    over = "NCCL for GPU tensors, gloo for CPU tensors"
    if ring == n == 1:
        return "none (one rank)"
    if n == 1:
        return f"p2p (the only one; {over})"
    return f"ulysses (heads over {n} ranks; {over})" if ring == 1 else f"hybrid (heads over {n} ranks, ring of {ring}; {over})"


def _heads(place: _Place, every: Sequence[Share], qkv: tuple[Tensor, Tensor, Tensor]) -> HeadsReport:
    """What this rank sends to the others of its mesh row."""
    row, column = divmod(place.rank, place.n)
    sent = {i: _exchanged(place, every, qkv, to=i) for i in range(place.n) if i != column}
    away = [i for i in sent if place.hosts[row * place.n + i] != place.hosts[place.rank]]
    share = every[column]
    return HeadsReport(
        ranks=place.n,
        nheads_q=len(share.q),
        nheads_k=len(share.k),
        repeated_k=sum(share.repeats),
        bytes_sent=sum(there for there, _ in sent.values()),
        grad_bytes_sent=sum(back for _, back in sent.values()),
        border_bytes=sum(sent[i][0] for i in away),
        grad_border_bytes=sum(sent[i][1] for i in away),
    )


def _exchanged(place: _Place, every: Sequence[Share], qkv: tuple[Tensor, Tensor, Tensor], *, to: int) -> tuple[int, int]:
    """Bytes that this rank sends in forward and in backward to another of its mesh row: its own tokens with that one's heads,
    and results of that one's tokens with its own heads."""
    q, k, v = qkv
    row, column = divmod(place.rank, place.n)
    here, there, itemsize = place.rank, row * place.n + to, q.element_size()
    queries, keys = place.call.layout.lengths, place.call.kv_layout.lengths
    headdim, headdim_v = q.shape[3], v.shape[3]
    q_out, k_out = queries[here] * len(every[to].q), keys[here] * len(every[to].k)
    q_back, k_back = queries[there] * len(every[column].q), keys[there] * len(every[column].k)
    grads = 4 if are_shared(every, k.shape[2]) else itemsize
    inputs = (q_out * headdim + k_out * (headdim + headdim_v)) * itemsize
    forward = inputs + q_back * (headdim_v * itemsize + 4)
    rows = q_out * (headdim_v * itemsize + 8) + q_back * headdim * itemsize
    return q.shape[0] * forward, q.shape[0] * (inputs + rows + k_back * (headdim + headdim_v) * grads)


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

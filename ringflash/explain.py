"""What a call would do, before it does: kernel, transport, schedule, and work and bytes per step, with the reasons."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ringflash import checks
from ringflash.auto import Facts, Route, route
from ringflash.heads import inner_plan
from ringflash.layout import Layout
from ringflash.mask import Mask
from ringflash.options import Options
from ringflash.plan import Course, Plan, TokenBytes, Traffic
from ringflash.schedules import Transfer
from ringflash.shares import Share, are_shared, shares
from ringflash.steps import StepReport, in_bytes, links, reports, shortened, table, timed
from ringflash.tile import Inputs, choose, pick

MOST_LINKS = 3  # that a report names


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
            in_bytes, (self.bytes_sent, self.grad_bytes_sent, self.border_bytes, self.grad_border_bytes)
        )
        over = f"; of these {border} and {grad_border} cross host borders" if self.border_bytes else ""
        return [
            f"heads      over {self.ranks} ranks; here {self.nheads_q} of queries, {self.nheads_k} of keys{again}",
            f"exchange   {there} sent to the other {self.ranks - 1} in forward, {back} in backward{over}",
        ]


@dataclass(frozen=True)
class Explanation:
    """A call, explained for one rank; str() is the report. flops: forward, of this rank (backward is 2.5 times that).

    steps: of a forward pass, and of a backward pass unless backward_steps has others. buffer_bytes: what a rank holds of
    others' blocks at most, or, with a transport that gathers, all that it keeps for that (Options.max_buffer_bytes).
    links: bytes that this rank's blocks take to each other rank in a forward and in a backward pass, dK and dV included.
    pairs_per_rank: visible pairs per head; heads_per_rank: query heads that each rank attends. heads: where ranks exchange
    sequence for heads, how; steps are then those of the ring around the exchange, whose blocks are counted by mesh row.
    border_bytes: K and V of all ranks that cross host borders, in forward and again in backward; grad_border_bytes: what
    backward moves across them besides, as float32 dK and dV; all that it moves across them where rows travel.
    rows: whether in backward rows travel, and dQ, in place of keys, and dK and dV. traffic: why, in bytes of all ranks; None
    where keys do without counting (gathered keys, an exchange of heads).
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
    heads_per_rank: tuple[int, ...]
    flops: int
    buffer_bytes: int
    hosts: tuple[int, ...]
    border_bytes: int
    grad_border_bytes: int
    links: tuple[tuple[int, int, int], ...] = ()
    heads: HeadsReport | None = None
    rows: bool = False
    traffic: Traffic | None = None

    @property
    def imbalance(self) -> float:
        """Work of the busiest rank over the mean: 1.0 is perfect balance."""
        work = [pairs * heads for pairs, heads in zip(self.pairs_per_rank, self.heads_per_rank, strict=True)]
        mean = sum(work) / self.size
        return max(work) / mean if mean else 1.0

    def __str__(self) -> str:
        flops = shortened(self.flops, 1000, ("", "k", "M", "G", "T", "P"))
        lines = [
            f"rank {self.rank} of {self.size}: {self.layout}, {self.mask}",
            f"kernel     {self.kernel}",
            f"transport  {self.transport}",
            *(self.heads.lines() if self.heads else []),
            f"schedule   {self.schedule}",
            *self._backward(),
            f"work       {flops}FLOP forward on this rank; busiest rank {self.imbalance:.3f} x the mean",
            f"buffers    {in_bytes(self.buffer_bytes)} for blocks of others",
            *self._borders(),
            *self._links(),
            *table(self.steps, "step"),
        ]
        return "\n".join([*lines, *(table(self.backward_steps, "back") if self.backward_steps else ())])

    def _backward(self) -> list[str]:
        """What travels in backward, where anything does."""
        if self.traffic is None or not any(self.traffic[:2]):
            return []
        keys, rows = map(in_bytes, self.traffic[:2])
        if self.rows:
            return [f"backward   {rows} of rows and dQ travel; keys, dK and dV would be {keys}"]
        busier = f" but {self.traffic.work:.2f} x the work of the busiest rank" if self.traffic.rows < self.traffic.keys else ""
        return [f"backward   {keys} of keys, dK and dV travel; rows and dQ would be {rows}{busier}"]

    def _borders(self) -> list[str]:
        """What crosses host borders, where there are any."""
        if len(set(self.hosts)) == 1:
            return []
        home = f"in backward {in_bytes(self.grad_border_bytes)} of {'rows and dQ' if self.rows else 'dK and dV besides'}"
        return [f"hosts      {len(set(self.hosts))}; {in_bytes(self.border_bytes)} of K and V cross their borders, {home}"]

    def _links(self) -> list[str]:
        """What goes to whom, for the first few."""
        told = [f"to {rank} {in_bytes(there)}, in backward {in_bytes(back)}" for rank, there, back in self.links]
        more = [f"and {len(told) - MOST_LINKS} more"] if len(told) > MOST_LINKS else []
        return [f"links      {'; '.join([*told[:MOST_LINKS], *more])}"] if told else []


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
    places, n = checks.hosts(hosts, size), checks.heads_ranks(options.transport, checks.mesh(mesh, size))
    facts = Facts.of(k, v, call.kv_layout.lengths, hosts=places, heads=n)
    found = route(options, facts._replace(device="cuda") if k.device.type == "meta" else facts)
    report = _report(_Place(call, found, places, rank, TokenBytes.of(q, v)), (q, k, v))
    gathers = size > 1 and found.schedule == "gather"
    return replace(report, buffer_bytes=facts.buffer_bytes) if gathers else report


@dataclass(frozen=True)
class _Place:
    """A rank in its mesh, of which `n` that follow each other exchange sequence for heads."""

    call: checks.Call
    found: Route
    hosts: tuple[int, ...]
    rank: int
    token: TokenBytes

    @property
    def n(self) -> int:
        return self.found.heads

    def plan(self, column: int) -> Plan:
        """The plan of the ring of one mesh column."""
        x, how = self.call, {"schedule": self.found.schedule, "hosts": self.hosts, "token": self.token}
        return inner_plan(x.layout, x.mask, x.kv_layout, size=self.n, rank=column, **how)


def _report(place: _Place, qkv: tuple[Tensor, Tensor, Tensor]) -> Explanation:
    q, k, v = qkv
    call, n = place.call, place.n
    row, column = divmod(place.rank, n)
    every = shares(q.shape[2], k.shape[2], n)
    plans, per_tokens = [place.plan(i) for i in range(n)], [_per_token(share, k, v) for share in every]
    plan, per_token = plans[column], per_tokens[column]
    nbytes = {"per_token": per_token * k.element_size(), "grads_per_token": per_token * 4}
    of_rows = {"per_token": q.shape[0] * place.token.rows, "grads_per_token": q.shape[0] * place.token.dq}
    back_bytes = of_rows if plan.backward.rows else nbytes
    work = [plan.work(r) for r in range(plan.size)]
    pairs, rows = int(work[row].sum()), len(plan.rows)
    crossing = sum(_crossing(p, p.forward, each * k.element_size(), 0) for p, each in zip(plans, per_tokens, strict=True))
    partials = sum(_crossing(p, p.backward, 0, each * 4) for p, each in zip(plans, per_tokens, strict=True))
    kernel, flops = _kernel(q, v, call.options), 2 * q.shape[0] * len(every[column].q) * (q.shape[3] + v.shape[3])
    rated, every_block = kernel if n == 1 and _has_figures(q, v, call.options) else "", place.found.transport == "allgather"
    steps, back = (
        tuple(timed(step, rated, place.found.transport, flops=flops * step.pairs, away=away) for step, away in made)
        for made in (
            reports(plan, plan.forward, row, **nbytes, every=every_block),
            reports(plan, plan.backward, row, **back_bytes, every=every_block),
        )
    )
    told = links(plan, row, **nbytes, rows=(of_rows["per_token"], of_rows["grads_per_token"]), every=every_block)
    return Explanation(
        rank=place.rank,
        size=len(place.hosts),
        layout=repr(call.layout),
        mask=checks.mask_words(plan.mask),
        kernel=kernel,
        transport=_transport(place.found, plan.size),
        schedule=f"{plan.schedule} ({plan.why})",
        steps=steps,
        backward_steps=() if plan.backward is plan.forward else back,
        pairs_per_rank=tuple(int(w.sum()) // rows for w in work for _ in range(n)),
        heads_per_rank=tuple(len(share.q) for share in every) * plan.size,
        flops=flops * pairs // rows,
        buffer_bytes=max(
            _most_held(plan, plan.forward, row) * nbytes["per_token"],
            _most_held(plan, plan.backward, row) * back_bytes["per_token"],
        ),
        hosts=place.hosts,
        border_bytes=crossing,
        grad_border_bytes=_crossing(plan, plan.backward, *of_rows.values()) if plan.backward.rows else partials,
        links=tuple((to * n + column, there, home) for to, there, home in told),
        heads=_heads(place, every, qkv) if n > 1 else None,
        rows=plan.backward.rows,
        traffic=plan.traffic and plan.traffic.of(q.shape[0]),
    )


def _per_token(share: Share, k: Tensor, v: Tensor) -> int:
    """Elements of K and V that a rank with these heads attends for one token."""
    return k.shape[0] * sum(share.repeats) * (k.shape[3] + v.shape[3])


def _transport(found: Route, ring: int) -> str:
    """What moves, and why: blocks round a ring, or sequence for heads, or both."""
    if found.heads == 1:
        return f"{found.transport} ({found.why})"
    if ring == 1:
        return f"ulysses ({found.why if found.transport == 'ulysses' else 'a mesh of one row'})"
    return f"hybrid (ring of {ring} by {found.transport}: {found.why})"


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


def _crossing(plan: Plan, course: Course, per_token: int, grads_per_token: int) -> int:
    """Bytes of a course's blocks and partial gradients that cross host borders."""
    hosts, lengths = plan.hosts, plan.lengths(course)

    def tokens(moves: Iterable[tuple[Transfer, int]]) -> int:
        return sum(lengths[x.block] for x, _ in moves if hosts[x.source] != hosts[x.target])

    return sum(per_token * tokens(step.blocks) + grads_per_token * tokens(step.partials) for step in course.steps)


def _kernel(q: Tensor, v: Tensor, options: Options) -> str:
    """Which kernel runs and why; meta tensors may go to any GPU."""
    if q.device.type != "meta":
        tile = pick(options.kernel, q, v, **options.of_tile)
        return f"{tile.name} ({tile.why})"
    tile = choose(options.kernel, Inputs("sm_90", q.dtype, q.shape[-1], v.shape[-1]), **options.of_tile)
    if options.kernel == "auto" and tile.name.startswith("hopper"):
        return f"{tile.name} on an sm_90 GPU, triton on another (meta tensors)"
    return f"{tile.name} ({tile.why}; meta tensors: as on an sm_90 GPU)"


def _has_figures(q: Tensor, v: Tensor, options: Options) -> bool:
    """Whether rates.py tells of such calls: 16 bits, head dim 64 or 128, on an sm_90 GPU, as meta tensors are taken to be."""
    known = q.element_size() == 2 and q.shape[-1] == v.shape[-1] and q.shape[-1] in (64, 128)
    return (
        known
        and not options.reproducible
        and (q.is_meta or (q.is_cuda and torch.cuda.get_device_capability(q.device) == (9, 0)))
    )


def _most_held(plan: Plan, course: Course, rank: int) -> int:
    """The most tokens of other ranks' blocks that a rank holds at a time."""
    held: set[int] = set()
    most, lengths = 0, plan.lengths(course)
    for turn in course.turns[rank]:
        held |= {block for block, _ in turn.departing.recvs}
        most = max(most, sum(lengths[block] for block in held))
        held -= set(turn.drop)
    return most

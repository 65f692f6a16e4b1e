"""One problem laid out over the ranks as each contestant wants it: ours, our baseline, and what all must compute."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import cases
import timing
import torch
import torch.distributed as dist
from cases import HEADDIM, NHEADS_K, NHEADS_Q
from torch import Tensor

import ringflash as rf
from ringflash.plan import make_plan
from ringflash.tile import pick

NAMES = ("out", "dq", "dk", "dv")
LARGEST_DIFFERENCE = 0.02  # relative rms; rounding alone stays far below


class Problem:
    """Documents in a row, causal in each (one: a plain causal sequence), over all ranks of the default group.

    q, dout: bfloat16 (1, seqlen, NHEADS_Q, HEADDIM), k, v: (1, seqlen, NHEADS_K, HEADDIM): the same on every rank.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths, self.device = tuple(lengths), device
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.seqlen = sum(lengths)
        documents = (0, *itertools.accumulate(lengths))
        self.mask = rf.Mask(causal=True, documents=documents if len(lengths) > 1 else None)
        generator = torch.Generator(device=device).manual_seed(0)
        self.q, self.k, self.v, self.dout = (
            torch.randn(1, self.seqlen, n, HEADDIM, device=device, generator=generator).bfloat16()
            for n in (NHEADS_Q, NHEADS_K, NHEADS_K, NHEADS_Q)
        )

    @property
    def flops(self) -> float:
        """FLOPs of a forward per GPU, were the work even."""
        pairs = sum(n * (n + 1) // 2 for n in self.lengths)
        return timing.attention_flops(pairs, NHEADS_Q, HEADDIM) / self.size

    def layout(self, name: str) -> rf.Layout:
        """ "balanced", "per_document" (zigzag in each) or a name that rf.layouts knows."""
        if name == "balanced":
            return rf.layouts.balanced(self.mask, self.seqlen, self.size)
        if name == "per_document":
            return rf.layouts.per_document("zigzag", (0, *itertools.accumulate(self.lengths)), self.size)
        return rf.layouts.named(name, self.seqlen, self.size)

    def part(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, dout at positions, (1, tokens, nheads, headdim). Where those are -1: anything, and dout 0."""
        at = positions.clamp(min=0)
        q, k, v, dout = (x.index_select(1, at) for x in (self.q, self.k, self.v, self.dout))
        return q, k, v, dout * (positions >= 0)[None, :, None, None]


def lengths_of(kind: str, tokens: int) -> tuple[int, ...]:
    """Document lengths of a case "causal" or "packed" of that many tokens over all ranks. Raises ValueError for others."""
    if kind == "causal":
        return (tokens,)
    if kind != "packed" or tokens not in cases.PACKED:
        raise ValueError(
            f"cases are causal and, of {', '.join(map(str, cases.PACKED))} tokens, packed: {kind}, {tokens} tokens"
        )
    return cases.PACKED[tokens]


class Entry(NamedTuple):
    """A contestant set up on this rank.

    positions: int64 (tokens,), where its tokens lie in the whole sequence, -1 for padding. forward: its out. both: dq, dk, dv,
    or as many of them as it makes, by forward and backward. All (1, tokens, nheads, headdim).
    """

    positions: Tensor
    forward: Callable[[], Tensor]
    both: Callable[[], tuple[Tensor, ...]]


Contestant = Callable[[Problem], AbstractContextManager[Entry]]


def entry(
    problem: Problem,
    positions: Tensor,
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    *,
    heads_first: bool = False,
) -> Entry:
    """The entry of a differentiable attention of this rank's q, k, v. heads_first: it wants (1, nheads, tokens, headdim)."""

    def turned(x: Tensor) -> Tensor:
        return x.transpose(1, 2) if heads_first else x

    positions = positions.to(problem.device)
    q, k, v, dout = (turned(x).contiguous() for x in problem.part(positions))
    leaves = tuple(x.requires_grad_() for x in (q, k, v))

    def forward() -> Tensor:
        with torch.no_grad():
            return turned(attend(q, k, v))

    def both() -> tuple[Tensor, ...]:
        return tuple(map(turned, torch.autograd.grad(attend(q, k, v), leaves, dout)))

    return Entry(positions, forward, both)


@contextmanager
def ours(problem: Problem, layout: str, options: rf.Options) -> Iterator[Entry]:
    """The ring."""
    batch = rf.ContextParallel(options=options).batch(problem.seqlen, problem.mask, problem.layout(layout))
    yield entry(problem, batch.positions(), batch.attention)


@contextmanager
def baseline(problem: Problem, layout: str) -> Iterator[Entry]:
    """The same kernels over the same rows and intervals in one launch per pass, the keys of all ranks already here.

    Of the gradients dq alone is all of it; both returns that.
    """
    placed = problem.layout(layout)
    plan = make_plan(placed, problem.mask)
    positions = placed.positions(problem.rank).to(problem.device)
    q, _, v, dout = problem.part(positions)
    tile, scale = pick("auto", q, v), HEADDIM**-0.5
    intervals = plan.intervals(problem.rank, problem.device)
    segments = []
    for block in plan.attended(problem.rank):
        at = placed.positions(block).to(problem.device)
        segments.append(tile.segment(problem.k.index_select(1, at), problem.v.index_select(1, at), *intervals[block]))

    def both() -> tuple[Tensor, ...]:
        out, lse = tile.forward(q, segments, scale)
        delta = tile.delta(dout, out)
        dq = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        dkv = [tuple(torch.empty_like(x) for x in s[:2]) for s in segments]
        tile.backward(dout, q, segments, lse, delta, scale, dq, dkv, add=False, add_dq=False)
        return (dq.to(q.dtype),)

    yield Entry(positions, lambda: tile.forward(q, segments, scale)[0], both)


def expected(problem: Problem) -> dict[str, Tensor]:
    """out, dq, dk, dv of the whole sequence on every rank, by the ring over P2P. Collective."""
    cp = rf.ContextParallel(options=rf.Options(transport="p2p", check="never"))
    batch = cp.batch(problem.seqlen, problem.mask)
    one = entry(problem, batch.positions(), batch.attention)
    return {name: batch.unshard(x.contiguous()) for name, x in zip(NAMES, (one.forward(), *one.both()), strict=True)}


def differences(one: Entry, expected: dict[str, Tensor]) -> dict[str, float]:
    """Relative rms differences of what an entry computes, on this rank; RuntimeError where one is more than rounding."""
    real = one.positions >= 0
    at = one.positions[real]
    found = {}
    for name, x in zip(NAMES, (one.forward(), *one.both()), strict=False):
        whole = expected[name].index_select(1, at).float()
        found[name] = float((x.detach()[:, real].float() - whole).norm() / whole.norm())
        if not found[name] < LARGEST_DIFFERENCE:
            raise RuntimeError(f"computes something else: {name} is {found[name]:.1e} off")
    return found


def contestants(layouts: Sequence[str], transports: Sequence[str]) -> dict[str, Contestant]:
    """Baselines and rings by name: "baseline zigzag", "ringflash p2p zigzag"."""
    found: dict[str, Contestant] = {f"baseline {layout}": functools.partial(baseline, layout=layout) for layout in layouts}
    for layout, transport in itertools.product(layouts, transports):
        options = rf.Options(check="never", transport=transport)
        found[f"ringflash {transport} {layout}"] = functools.partial(ours, layout=layout, options=options)
    return found

"""The algorithm: attend one block while the plan's transfers bring the next; backward goes the same way.

Nothing here knows how a plan was made, what a tile runs on or what a transport moves bytes with.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ringflash.plan import Course, Plan, Turn
from ringflash.transport.blocks import Hops, Moving, Nothing, Pair, Shapes, Transport


class TileLike(Protocol):
    """What the loop needs of a tile (kernels/README.md)."""

    @property
    def segment(self) -> Callable[..., Any]:
        """Make a segment from (k, v, begin, end)."""
        ...

    @property
    def forward(self) -> Callable[..., tuple[Tensor, ...]]:
        """(q, segments, scale, state, finish) -> the next state, or (out, lse)."""
        ...

    @property
    def delta(self) -> Callable[..., Tensor]:
        """(dout, out, dlse) -> rowsum(dout * out) - dlse."""
        ...

    @property
    def backward(self) -> Callable[..., None]:
        """(dout, q, segments, lse, delta, scale, dq, dkv, add=, add_dq=): into dq and dkv, of which one may be None."""
        ...

    @property
    def fused_backward(self) -> bool:
        """Whether dq and dkv at once cost less than one after the other."""
        ...


@dataclass(frozen=True, eq=False)
class Ring:
    """One rank's way through a plan: its place, its tile, its transport (None: a ring of one) and the softmax scale.

    before_backward: run by backward first, where ranks compare what they are about to do.
    in_order: forward joins all keys in order of their positions and attends them as one segment, so that where they lay leaves
    no trace in any bit; the plan brings them all in one turn.
    """

    plan: Plan
    rank: int
    tile: TileLike
    transport: Transport | None
    scale: float
    before_backward: Callable[[], None] | None = None
    in_order: bool = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse) of this rank's queries over the keys of all ranks."""
        turns = self.plan.forward.turns[self.rank]
        here = self._start(self.plan.forward, k, v)
        state: tuple[Tensor, ...] | None = None
        segments = self._joined if self.in_order else self._segments
        for turn in turns:
            moving = here.post(turn)
            if turn.attend:
                state = self.tile.forward(q, segments(here, moving, turn.attend, q), self.scale, state, turn.last)
            here.land(moving, turn)
        assert state is not None  # the own block is always attended
        out, lse = state  # finished in the last turn that attends
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, *, parts: bool = False
    ) -> tuple[Tensor, Pair]:
        """float32 dq and (dk, dv) of this rank's tokens: the gradient of the sum over ranks of their local losses.

        dk and dv are float32 where other ranks' parts were added to them, or where the caller will add to them (`parts`), of
        k's and v's dtype otherwise: rounded once anyway.
        A tile that makes dQ and dK/dV apart makes the own block's dQ first, while the first keys arrive, and its dK/dV last,
        while the other ranks' come home: one float32 block less is held meanwhile.
        """
        turns, own = self.plan.backward.turns[self.rank], (self.rank,)
        here = self._start(self.plan.backward, k, v, partial={}, parts=parts)
        dq = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        started = next(turn for turn in turns if turn.attend)  # the own block is always attended
        (first, *_, closing) = turns * 2
        apart = first is not closing and first.attend == own and not self.tile.fused_backward
        add = functools.partial(self._add_gradients, (dout, q, lse, delta), here)
        for turn in turns:
            moving = here.post(turn)
            if turn.attend:
                add(moving, turn.attend, dq, keys=not (apart and turn.attend == own), add_dq=turn is not started)
            if apart and turn is closing:
                add(moving, own, None)
            here.land(moving, turn)
        return dq, here.grads[self.rank]

    def _start(
        self, course: Course, k: Tensor, v: Tensor, partial: dict[int, Pair] | None = None, *, parts: bool = False
    ) -> "_Held":
        """The blocks this rank holds: its own, contiguous if it is to be sent."""
        own = (k.contiguous(), v.contiguous()) if course.sends[self.rank] else (k, v)
        wide = torch.float32 if parts or course.shares[self.rank] else None
        return _Held(self.transport, self.rank, {self.rank: own}, partial, Shapes(*own, self.plan.kv_layout.lengths), wide)

    def _segments(self, here: "_Held", moving: Moving, blocks: tuple[int, ...], q: Tensor) -> list[Any]:
        """Of blocks that are here, or that arrive meanwhile."""
        intervals = self.plan.intervals(self.rank, q.device)
        return [self.tile.segment(*here.block(b, moving), *intervals[b], *moving.ready.get(b, ())) for b in blocks]

    def _joined(self, here: "_Held", moving: Moving, blocks: tuple[int, ...], q: Tensor) -> list[Any]:
        """All keys as one segment, in memory of its own whatever the number of ranks; what no row sees is left as it is."""
        order, seqlen = self.plan.in_order(self.rank, q.device), self.plan.kv_layout.seqlen
        k, v = (x.new_empty(x.shape[0], seqlen, *x.shape[2:]) for x in here.block(self.rank, moving))
        places = order.places.split([self.plan.kv_layout.lengths[block] for block in blocks])
        for block, at in zip(blocks, places, strict=True):
            for into, x in zip((k, v), here.block(block, moving), strict=True):
                into.index_copy_(1, at, x)
        return [self.tile.segment(k, v, order.begin, order.end)]

    def _add_gradients(
        self,
        rows: tuple[Tensor, ...],
        here: "_Held",
        moving: Moving,
        blocks: tuple[int, ...],
        dq: Tensor | None,
        *,
        keys: bool = True,
        add_dq: bool = True,
    ) -> None:
        """Add what the rows and some blocks give: into dq unless it is None, and with `keys` into the blocks' dK/dV."""
        dout, q, lse, delta = rows
        into, add = here.rooms(blocks) if keys else (None, True)
        segments = self._segments(here, moving, blocks, q)
        self.tile.backward(dout, q, segments, lse, delta, self.scale, dq, into, add=add, add_dq=add_dq)

    @contextmanager
    def running(self) -> Iterator[None]:
        """An error inside is left as word for the ranks that wait for this one."""
        try:
            yield
        except Exception as error:
            if self.transport is not None:
                self.transport.abandon(error)
            raise


class _Held:
    """What a rank has of others during a pass: blocks, partial dK/dV (in backward), and transfers under way."""

    def __init__(
        self,
        transport: Transport | None,
        rank: int,
        held: dict[int, Pair],
        partial: dict[int, Pair] | None,
        shapes: Shapes,
        grads: torch.dtype | None,
    ) -> None:
        self._transport, self._rank, self._held, self._partial, self._shapes = transport, rank, held, partial, shapes
        self._grads_dtype = grads  # of the own block; None: that of k and v
        self._flying = deque[Moving]()

    @property
    def grads(self) -> dict[int, Pair]:
        """The dK and dV that are here, by block."""
        assert self._partial is not None
        return self._partial

    def block(self, block: int, moving: Moving) -> Pair:
        """K and V of a block that is here or arrives meanwhile."""
        return moving.blocks[block] if block in moving.blocks else self._held[block]

    def rooms(self, blocks: tuple[int, ...]) -> tuple[list[Pair], bool]:
        """(where the dK and dV of the blocks go, whether they are added to what is there)."""
        add = blocks[0] in self.grads
        for block in blocks:
            if block not in self.grads:
                away = self._transport if block != self._rank else None
                self.grads[block] = away.room(block, self._shapes) if away else self._shapes.empty(block, self._grads_dtype)
        return [self.grads[block] for block in blocks], add

    def post(self, turn: Turn) -> Moving:
        """Start a turn's transfers; outer ones, which land in a later turn, join those in flight."""
        self._flying.extend([self._move(hops, outer=True) for hops in turn.outer])
        return self._move(turn.hops)

    def _move(self, hops: Hops, *, outer: bool = False) -> Moving:
        if self._transport is None or not (hops.moves or hops.grad_moves):
            return Moving({}, [], Nothing(), {})
        return self._transport.move(hops, self._held, self._partial, shapes=self._shapes, outer=outer)

    def land(self, moving: Moving, turn: Turn) -> None:
        """End a turn: take over what arrived, add partial dK/dV to what is here, drop blocks that have no more use."""
        for arrived in [moving, *(self._flying.popleft() for _ in range(turn.lands))]:
            arrived.pending.wait()
            self._held.update(arrived.blocks)
            while arrived.grads and self._partial is not None:
                block, grads = arrived.grads.pop()
                self._partial[block] = _add(self._partial.get(block), grads)
            arrived.blocks.clear()
        for block in turn.drop:
            del self._held[block]


def _add(into: Pair | None, grads: Pair) -> Pair:
    if into is None:
        return grads
    return into[0].add_(grads[0]), into[1].add_(grads[1])

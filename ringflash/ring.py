"""The algorithm: attend one block while the plan's transfers bring the next; backward goes the same way.

A block is one rank's keys, or in backward, where the plan has rows travel, one rank's rows: then dK and dV stay with their keys
and dQ comes home, in place of the other way about.

Nothing here knows how a plan was made, what a tile runs on or what a transport moves bytes with.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ringflash.plan import Course, Plan, Turn
from ringflash.transport.blocks import Hops, Moving, Nothing, Pair, Parts, Shapes, Transport


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
        here = self._start(self.plan.forward, (k, v), k.dtype)
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
        """dq and (dk, dv) of this rank's tokens: the gradient of the sum over ranks of their local losses.

        float32, or of q's, k's and v's dtype where what is last written of them can be rounded as it is written: once anyway,
        and not where the caller will add to dk and dv (`parts`).
        A tile that makes dQ and dK/dV apart makes first, of the own block, what stays, while the first blocks arrive, and last
        what travels, while the other ranks' comes home: one float32 block less is held meanwhile.
        """
        course, own = self.plan.backward, (self.rank,)
        turns = course.turns[self.rank]
        wide = torch.float32 if parts or course.shares[self.rank] else k.dtype
        rows, keys = _Side((q, dout, lse, delta), (q,), torch.float32), _Side((k, v), (k, v), wide)
        travels, stays = (rows, keys) if course.rows else (keys, rows)
        here, grads = self._start(course, travels.parts, travels.dtype, partial={}), stays.room()
        started = next(turn for turn in turns if turn.attend)  # the own block is always attended
        (first, *_, closing) = turns * 2
        apart = first is not closing and first.attend == own and not self.tile.fused_backward
        for turn in turns:
            moving = here.post(turn)
            if turn.attend:
                away = None if apart and turn.attend == own else here.rooms(turn.attend)
                self._add_gradients(stays.parts, here, moving, turn.attend, away, _Rooms([grads], turn is not started))
            if apart and turn is closing:
                self._add_gradients(stays.parts, here, moving, own, here.rooms(own), None)
            here.land(moving, turn, None if parts or turn is not closing else q.dtype)
        home = here.grads[self.rank]
        (dq,), (dk, dv) = (home, grads) if course.rows else (grads, home)
        return dq, (dk, dv)

    def _start(self, course: Course, own: Parts, grads: torch.dtype, partial: dict[int, Parts] | None = None) -> "_Held":
        """The blocks this rank holds: its own, contiguous if it is to be sent as it lies."""
        as_it_lies = course.sends[self.rank] and self.transport is not None and not self.transport.copies
        own = tuple(x.contiguous() for x in own) if as_it_lies else own
        shapes = Shapes(own, self.plan.lengths(course), n_grads=1 if course.rows else 2)
        return _Held(self.transport, self.rank, {self.rank: own}, partial, shapes, grads)

    def _segments(self, here: "_Held", moving: Moving, blocks: tuple[int, ...], q: Tensor) -> list[Any]:
        """Of blocks of keys that are here, or that arrive meanwhile."""
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
        self, own: Parts, here: "_Held", moving: Moving, blocks: tuple[int, ...], away: "_Rooms | None", stay: "_Rooms | None"
    ) -> None:
        """Add what the own rows and blocks of keys give, or own keys and a block of rows: into the gradients of the blocks
        (`away`) and those of `own` (`stay`), unless they are None.
        """
        if self.plan.backward.rows:
            (block,) = blocks
            rows, dq, dkv = here.block(block, moving), away, stay
            segments = [self.tile.segment(*own, *self.plan.row_intervals(self.rank, own[0].device)[block])]
        else:
            rows, dq, dkv = own, stay, away
            segments = self._segments(here, moving, blocks, own[0])
        q, dout, lse, delta = rows
        into_dq, into_dkv = dq and dq.into[0][0], dkv and dkv.into
        add_dq, add_dkv = (room is None or room.add for room in (dq, dkv))
        self.tile.backward(dout, q, segments, lse, delta, self.scale, into_dq, into_dkv, add=add_dkv, add_dq=add_dq)

    def running(self) -> "_Running":
        """An error inside is left as word for the ranks that wait for this one."""
        return _Running(self.transport)


class _Running:
    """A context as `Ring.running` says; a class costs the host less than a generator."""

    def __init__(self, transport: Transport | None) -> None:
        self._transport = transport

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._transport is not None:  # Ctrl-C too: whoever catches it may go on
            self._transport.abandon(error)


class _Side(NamedTuple):
    """This rank's rows, or its keys: what the tile needs of them in backward, and which have gradients, made in which dtype."""

    parts: Parts
    leaves: Parts
    dtype: torch.dtype

    def room(self) -> Parts:
        """For the gradients."""
        return tuple(torch.empty(x.shape, dtype=self.dtype, device=x.device) for x in self.leaves)


class _Rooms(NamedTuple):
    """Where gradients of blocks go, and whether they are added to what is there."""

    into: list[Parts]
    add: bool


class _Held:
    """What a rank has of others during a pass: blocks, partial gradients (in backward), and transfers under way."""

    def __init__(
        self,
        transport: Transport | None,
        rank: int,
        held: dict[int, Parts],
        partial: dict[int, Parts] | None,
        shapes: Shapes,
        grads: torch.dtype,
    ) -> None:
        self._transport, self._rank, self._held, self._partial, self._shapes = transport, rank, held, partial, shapes
        self._grads_dtype = grads  # of the own block
        self._flying = deque[Moving]()

    @property
    def grads(self) -> dict[int, Parts]:
        """The gradients that are here, by block."""
        assert self._partial is not None
        return self._partial

    def block(self, block: int, moving: Moving) -> Parts:
        """A block that is here or arrives meanwhile."""
        return moving.blocks[block] if block in moving.blocks else self._held[block]

    def rooms(self, blocks: tuple[int, ...]) -> _Rooms:
        """For the gradients of the blocks."""
        add = blocks[0] in self.grads
        for block in blocks:
            if block not in self.grads:
                away = self._transport if block != self._rank else None
                self.grads[block] = away.room(block, self._shapes) if away else self._shapes.empty(block, self._grads_dtype)
        return _Rooms([self.grads[block] for block in blocks], add)

    def post(self, turn: Turn) -> Moving:
        """Start a turn's transfers; outer ones, which land in a later turn, join those in flight."""
        for hops in turn.outer:
            self._flying.append(self._move(hops, outer=True))
        return self._move(turn.hops)

    def _move(self, hops: Hops, *, outer: bool = False) -> Moving:
        moves = hops.moves or (hops.grad_moves and self._partial is not None)
        if self._transport is None or not moves:
            return Moving({}, [], Nothing(), {})
        return self._transport.move(hops, self._held, self._partial, shapes=self._shapes, outer=outer)

    def land(self, moving: Moving, turn: Turn, dtype: torch.dtype | None = None) -> None:
        """End a turn: take over what arrived, add partial gradients to what is here, drop blocks that have no more use.

        dtype: what the last sum of the own block's gradients is rounded to.
        """
        landing = [moving, *(self._flying.popleft() for _ in range(turn.lands))]
        for arrived in landing:
            self._take(arrived, dtype if arrived is landing[-1] else None)
        for block in turn.drop:
            del self._held[block]

    def _take(self, arrived: Moving, dtype: torch.dtype | None) -> None:
        arrived.pending.wait()
        self._held.update(arrived.blocks)
        while arrived.grads and self._partial is not None:
            block, grads = arrived.grads.pop()
            last = dtype if block == self._rank and not arrived.grads else None
            self._partial[block] = _add(self._partial.get(block), grads, last)
        arrived.blocks.clear()


def _add(into: Parts | None, grads: Parts, dtype: torch.dtype | None) -> Parts:
    """The sums, in place of the first unless they are to have another dtype."""
    if into is None:
        return grads
    if dtype in (None, into[0].dtype):
        return tuple(x.add_(y) for x, y in zip(into, grads, strict=True))
    return tuple(torch.add(x, y, out=torch.empty_like(x, dtype=dtype)) for x, y in zip(into, grads, strict=True))

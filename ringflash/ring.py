"""The algorithm: attend one block while the plan's transfers bring the next; backward goes the same way.

Nothing here knows how a plan was made, what a tile runs on or what a transport moves bytes with.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ringflash.plan import Hops, Plan, Turn

Pair = tuple[Tensor, Tensor]  # (k, v) of a block, or its (dk, dv)


class _Pending(Protocol):
    def wait(self) -> None:
        """What was sent may be overwritten and what was received be used by work launched after this."""
        ...


class _Nothing:
    """No transfers."""

    def wait(self) -> None:
        pass


class _Moving(NamedTuple):
    """Transfers under way: the blocks and partial dK/dV that arrive, and their end."""

    blocks: dict[int, Pair]
    grads: list[tuple[int, Pair]]
    pending: _Pending


class Transport(Protocol):
    """What the loop needs of a transport."""

    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], recvs: Sequence[tuple[Tensor, int]], /, *, outer: bool = False
    ) -> _Pending:
        """Start all transfers, (contiguous tensor, other rank) each, in one batch.

        outer: they go between hosts and are waited for later than exchanges that start after them.
        """
        ...

    def abandon(self, error: BaseException, /) -> None:
        """Leave word for the other ranks that this one will not join their exchange."""
        ...


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
    """

    plan: Plan
    rank: int
    tile: TileLike
    transport: Transport | None
    scale: float
    before_backward: Callable[[], None] | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse) of this rank's queries over the keys of all ranks."""
        held, flying = self._own(k, v), deque[_Moving]()
        state: tuple[Tensor, ...] | None = None
        for turn in self.plan.turns[self.rank]:
            moving = self._post(turn, held, None, flying)
            if turn.attend is not None:
                state = self.tile.forward(q, [self._segment(held, turn.attend, q)], self.scale, state, turn.last)
            self._land(moving, turn, held, None, flying)
        assert state is not None  # the own block is always attended
        out, lse = state  # finished in the last turn that attends
        return out, lse

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor) -> tuple[Tensor, Pair]:
        """float32 dq and (dk, dv) of this rank's tokens: the gradient of the sum over ranks of their local losses.

        dk and dv are float32 where other ranks' parts were added to them, of k's and v's dtype otherwise: rounded once anyway.
        A tile that makes dQ and dK/dV apart makes the own block's dQ first, while the first keys arrive, and its dK/dV last,
        while the other ranks' come home: one float32 block less is held meanwhile.
        """
        held, partial, flying = self._own(k, v), {}, deque[_Moving]()
        dq = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        turns = self.plan.turns[self.rank]
        first = next(turn for turn in turns if turn.attend is not None)  # the own block is always attended
        closing, apart = turns[-1], len(turns) > 1 and not self.tile.fused_backward
        add = functools.partial(self._add_gradients, (dout, q, lse, delta), held)
        for turn in turns:
            moving = self._post(turn, held, partial, flying)
            if turn.attend == self.rank:
                add(self.rank, dq, None if apart else partial, add_dq=turn is not first)
            elif turn.attend is not None:
                add(turn.attend, dq, partial, add_dq=turn is not first)
            if turn is closing and apart:
                add(self.rank, None, partial)
            self._land(moving, turn, held, partial, flying)
        return dq, partial[self.rank]

    def _add_gradients(
        self,
        rows: tuple[Tensor, ...],
        held: dict[int, Pair],
        block: int,
        dq: Tensor | None,
        partial: dict[int, Pair] | None,
        *,
        add_dq: bool = True,
    ) -> None:
        """Add what the rows and a held block give: into dq, and into the partial dK/dV of the block. None: not now."""
        dout, q, lse, delta = rows
        into, add = None, True
        if partial is not None:
            add = block in partial
            if not add:
                partial[block] = self._room_for(block, held, torch.float32 if self._shares_gradients() else None)
            into = [partial[block]]
        segments = [self._segment(held, block, q)]
        self.tile.backward(dout, q, segments, lse, delta, self.scale, dq, into, add=add, add_dq=add_dq)

    def _shares_gradients(self) -> bool:
        """Whether any dK/dV travel to or from this rank."""
        turns = self.plan.turns[self.rank]
        return any(hops.grad_sends or hops.grad_recvs for turn in turns for hops in (turn.hops, *turn.outer))

    def _own(self, k: Tensor, v: Tensor) -> dict[int, Pair]:
        """The blocks this rank holds: its own, contiguous if it is to be sent."""
        sent = any(hops.sends for turn in self.plan.turns[self.rank] for hops in (turn.hops, *turn.outer))
        return {self.rank: (k.contiguous(), v.contiguous()) if sent else (k, v)}

    def _segment(self, held: dict[int, Pair], block: int, q: Tensor) -> Any:
        return self.tile.segment(*held[block], *self.plan.intervals(self.rank, q.device)[block])

    def _post(self, turn: Turn, held: dict[int, Pair], partial: dict[int, Pair] | None, flying: deque[_Moving]) -> _Moving:
        """Start a turn's transfers; outer ones, which land in a later turn, join those in flight."""
        flying.extend([self._start(hops, held, partial, outer=True) for hops in turn.outer])
        return self._start(turn.hops, held, partial)

    def _start(self, hops: Hops, held: dict[int, Pair], partial: dict[int, Pair] | None, *, outer: bool = False) -> _Moving:
        """Start transfers, K and V (and in backward dK and dV) in one batch."""
        blocks = {block: self._room_for(block, held) for block, _ in hops.recvs}
        grads: list[tuple[int, Pair]] = []
        sends = [(x, to) for block, to in hops.sends for x in held[block]]
        recvs = [(x, source) for block, source in hops.recvs for x in blocks[block]]
        if partial is not None:
            grads = [(block, self._room_for(block, held, torch.float32)) for block, _ in hops.grad_recvs]
            sends += [(x, to) for block, to in hops.grad_sends for x in partial.pop(block)]
            recvs += [(x, source) for (_, source), (_, pair) in zip(hops.grad_recvs, grads, strict=True) for x in pair]
        if not sends and not recvs:
            return _Moving(blocks, grads, _Nothing())
        assert self.transport is not None
        return _Moving(blocks, grads, self.transport.exchange(sends, recvs, outer=outer))

    def _land(
        self,
        moving: _Moving,
        turn: Turn,
        held: dict[int, Pair],
        partial: dict[int, Pair] | None,
        flying: deque[_Moving],
    ) -> None:
        """End a turn: take over what arrived, add partial dK/dV to what is here, drop blocks that have no more use."""
        for arrived in [moving, *(flying.popleft() for _ in range(turn.lands))]:
            arrived.pending.wait()
            held.update(arrived.blocks)
            while arrived.grads and partial is not None:
                block, grads = arrived.grads.pop()
                partial[block] = _add(partial.get(block), grads)
            arrived.blocks.clear()
        for block in turn.drop:
            del held[block]

    def _room_for(self, block: int, held: dict[int, Pair], dtype: torch.dtype | None = None) -> Pair:
        """Empty K and V (or dK and dV) of another rank's block: this rank's shapes, that rank's length."""
        length = self.plan.kv_layout.lengths[block]
        k, v = (x.new_empty(x.shape[0], length, *x.shape[2:], dtype=dtype) for x in held[self.rank])
        return k, v

    @contextmanager
    def running(self) -> Iterator[None]:
        """An error inside is left as word for the ranks that wait for this one."""
        try:
            yield
        except Exception as error:
            if self.transport is not None:
                self.transport.abandon(error)
            raise


def _add(into: Pair | None, grads: Pair) -> Pair:
    if into is None:
        return grads
    return into[0].add_(grads[0]), into[1].add_(grads[1])

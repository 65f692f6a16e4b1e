"""The algorithm: attend one block while the plan's transfers bring the next; backward goes the same way.

Nothing here knows how a plan was made, what a tile runs on or what a transport moves bytes with.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from ringflash.plan import Plan, Turn

Pair = tuple[Tensor, Tensor]  # (k, v) of a block, or its (dk, dv)


class _Pending(Protocol):
    def wait(self) -> None:
        """What was sent may be overwritten and what was received be used by work launched after this."""
        ...


class _Nothing:
    """A turn without transfers."""

    def wait(self) -> None:
        pass


class Transport(Protocol):
    """What the loop needs of a transport."""

    def exchange(self, sends: Sequence[tuple[Tensor, int]], recvs: Sequence[tuple[Tensor, int]], /) -> _Pending:
        """Start all transfers, (contiguous tensor, other rank) each, in one batch."""
        ...

    def abandon(self, error: BaseException, /) -> None:
        """Leave word for the other ranks that this one will not join their exchange."""
        ...


class TileLike(Protocol):
    """What the loop needs of a tile (kernels/README.md)."""

    @property
    def two_passes(self) -> bool:
        """Whether dQ and dK/dV are computed apart anyhow."""
        ...

    @property
    def segment(self) -> Callable[..., Any]:
        """Make a segment from (k, v, begin, end)."""
        ...

    @property
    def forward(self) -> Callable[..., tuple[Tensor, ...]]:
        """(q, segments, scale, state, finish) -> the next state, or (out, lse)."""
        ...

    @property
    def backward(self) -> Callable[..., None]:
        """(dout, q, segments, lse, delta, scale, dq, dkv): adds into dq and dkv, of which one may be None."""
        ...


class Ring:
    """One rank's way through a plan: its place, its tile and its transport."""

    def __init__(self, plan: Plan, rank: int, tile: TileLike, transport: Transport | None, scale: float) -> None:
        self.plan, self.rank, self.tile, self.transport, self.scale = plan, rank, tile, transport, scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse) of this rank's queries over the keys of all ranks."""
        held = self._own(k, v)
        state: tuple[Tensor, ...] | None = None
        for turn in self.plan.turns[self.rank]:
            arriving, _, pending = self._post(turn, held, {}, grads=False)
            if turn.attend is not None:
                state = self.tile.forward(q, [self._segment(held, turn.attend, q)], self.scale, state, turn.last)
            pending.wait()
            _turn_over(held, arriving, turn)
        assert state is not None  # the own block is always attended
        out, lse = state  # finished in the last turn that attends
        return out, lse

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor) -> tuple[Tensor, Pair]:
        """float32 dq and (dk, dv) of this rank's tokens: the gradient of the sum over ranks of their local losses."""
        held, partial = self._own(k, v), {}
        dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        turns = self.plan.turns[self.rank]
        owed: list = []  # the last block's dQ is computed while its dK/dV travel home
        for turn in turns:
            arriving, arriving_grads, pending = self._post(turn, held, partial, grads=True)
            if turn.attend is not None:
                partial[turn.attend] = partial.get(turn.attend) or _zeros_like(held[turn.attend])
                segments, into = [self._segment(held, turn.attend, q)], [partial[turn.attend]]
                owed = segments if self.tile.two_passes and turn.last and turn is not turns[-1] else []
                self.tile.backward(dout, q, segments, lse, delta, self.scale, None if owed else dq, into)
            elif owed:
                self.tile.backward(dout, q, owed, lse, delta, self.scale, dq, None)
                owed = []
            pending.wait()
            _turn_over(held, arriving, turn)
            for block, grads in arriving_grads:
                partial[block] = _add(partial.get(block), grads)
        return dq, partial[self.rank]

    @contextmanager
    def running(self) -> Iterator[None]:
        """An error inside is left as word for the ranks that wait for this one."""
        try:
            yield
        except Exception as error:
            if self.transport is not None:
                self.transport.abandon(error)
            raise

    def _own(self, k: Tensor, v: Tensor) -> dict[int, Pair]:
        """The blocks this rank holds: its own, contiguous if it is to be sent."""
        sent = any(turn.sends for turn in self.plan.turns[self.rank])
        return {self.rank: (k.contiguous(), v.contiguous()) if sent else (k, v)}

    def _segment(self, held: dict[int, Pair], block: int, q: Tensor) -> object:
        return self.tile.segment(*held[block], *self.plan.intervals(self.rank, q.device)[block])

    def _post(
        self, turn: Turn, held: dict[int, Pair], partial: dict[int, Pair], *, grads: bool
    ) -> tuple[dict[int, Pair], list[tuple[int, Pair]], _Pending]:
        """Start a turn's transfers, K and V (and dK and dV) in one batch: (arriving blocks, arriving dK/dV, their end)."""
        arriving = {block: self._room_for(block, held) for block, _ in turn.recvs}
        arriving_grads: list[tuple[int, Pair]] = []
        sends = [(x, to) for block, to in turn.sends for x in held[block]]
        recvs = [(x, source) for block, source in turn.recvs for x in arriving[block]]
        if grads:
            arriving_grads = [(block, self._room_for(block, held, torch.float32)) for block, _ in turn.grad_recvs]
            sends += [(x, to) for block, to in turn.grad_sends for x in partial.pop(block)]
            recvs += [(x, turn.grad_recvs[i][1]) for i, (_, pair) in enumerate(arriving_grads) for x in pair]
        if not sends and not recvs:
            return arriving, arriving_grads, _Nothing()
        assert self.transport is not None
        return arriving, arriving_grads, self.transport.exchange(sends, recvs)

    def _room_for(self, block: int, held: dict[int, Pair], dtype: torch.dtype | None = None) -> Pair:
        """Empty K and V (or dK and dV) of another rank's block: this rank's shapes, that rank's length."""
        length = self.plan.kv_layout.lengths[block]
        k, v = (x.new_empty(x.shape[0], length, *x.shape[2:], dtype=dtype) for x in held[self.rank])
        return k, v


def _turn_over(held: dict[int, Pair], arriving: dict[int, Pair], turn: Turn) -> None:
    held.update(arriving)
    for block in turn.drop:
        del held[block]


def _zeros_like(pair: Pair) -> Pair:
    k, v = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in pair)
    return k, v


def _add(into: Pair | None, grads: Pair) -> Pair:
    if into is None:
        return grads
    return into[0].add_(grads[0]), into[1].add_(grads[1])

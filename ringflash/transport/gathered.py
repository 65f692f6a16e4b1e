"""All-gather transport: every rank gets all blocks by one all-gather, and gradients go home by one reduce-scatter."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringflash.transport.blocks import Hops, Moving, Nothing, Pair, Parts, Shapes
from ringflash.transport.communicator import Communicator

# Newer torch has them under new names and warns of the old ones.
_ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class AllGather:
    """Few collectives and no pairs of transfers: for small shards, whose transfers' latency counts.

    All blocks move, also those that a rank does not need; shorter ones are padded to the longest.
    """

    copies = True

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._partials: Tensor | None = None  # float32 (size, elements): one row for each block

    def move(
        self, hops: Hops, held: Mapping[int, Parts], partial: dict[int, Parts] | None, *, shapes: Shapes, outer: bool = False
    ) -> Moving:
        """Bring all blocks, which are there when this returns, or take dK and dV home."""
        assert not outer
        if hops.moves:
            return Moving(self._bring(hops, held, shapes), [], Nothing(), {})
        assert partial is not None
        return self._take_home(hops, partial, shapes)

    def room(self, block: int, shapes: Shapes) -> Pair:
        """A row of what the reduce-scatter adds up; rows of blocks that this rank does not attend are zero."""
        if self._partials is None:
            self._partials = shapes.k.new_zeros(self._comm.size, shapes.elements, dtype=torch.float32)
        return shapes.pair(self._partials[self._place(block)], block)

    def abandon(self, error: BaseException) -> None:
        """Leave the reason for the ranks that wait; what a backward pass had begun is not for the next one."""
        self._partials = None
        self._comm.leave_word(error)

    def _bring(self, hops: Hops, held: Mapping[int, Parts], shapes: Shapes) -> dict[int, Parts]:
        mine = shapes.k.new_empty(shapes.elements)
        for into, x in zip(shapes.pair(mine, self._comm.rank), held[self._comm.rank], strict=True):
            into.copy_(x)
        rows = mine.new_empty(self._comm.size, shapes.elements)
        with self._comm.explained():
            _ALL_GATHER(rows.view(-1), mine, group=self._comm.group_for(mine.device.type))
        return {block: shapes.pair(rows[self._place(block)], block) for block, _ in hops.recvs}

    def _take_home(self, hops: Hops, partial: dict[int, Parts], shapes: Shapes) -> Moving:
        own = self._comm.rank
        self.room(own, shapes)
        partials, self._partials = self._partials, None
        assert partials is not None
        for block, _ in hops.grad_sends:
            del partial[block]
        total = partials.new_empty(shapes.elements)
        with self._comm.explained():
            work = _REDUCE_SCATTER(total, partials.view(-1), group=self._comm.group_for(total.device.type), async_op=True)
        home: list[tuple[int, Parts]] = [(own, shapes.pair(total, own))] if hops.grad_recvs else []
        return Moving({}, home, _Work(work, self._comm, partials), {})

    def _place(self, block: int) -> int:
        """A rank's place in the order of the group's collectives."""
        return sorted(self._comm.ranks).index(self._comm.ranks[block])


class _Work:
    """The end of a collective; keeps what it reads."""

    def __init__(self, work: Any, comm: Communicator, *kept: Tensor) -> None:
        self._work, self._comm, self._kept = work, comm, kept

    def wait(self) -> None:
        """Its result may be used by work launched after this."""
        with self._comm.explained():
            self._work.wait()

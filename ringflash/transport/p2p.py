"""Point-to-point transport: every step's sends and receives in one batched launch, over NCCL or gloo."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ringflash.transport.blocks import Hops, Moving, Nothing, Parts, Shapes
from ringflash.transport.communicator import Communicator, ExchangeError

__all__ = ["P2P", "ExchangeError", "Pending"]

_Op = tuple[object, Tensor, int]  # (isend or irecv, contiguous tensor, the other's global rank)


class Pending:
    """Transfers of one exchange; holds their tensors until `wait`.

    On a GPU they are handed to NCCL by `wait`, on a stream that goes on from where `exchange` was called: they run beside the
    kernel launched in between, which did not have to wait for the host to prepare them. at_once: by `exchange`, since several
    kernels come in between.
    """

    def __init__(self, ops: list[_Op], comm: Communicator, *, at_once: bool = False) -> None:
        self._ops, self._comm, self._works, self._begin = ops, comm, [], None
        if ops and not ops[0][1].is_cuda:
            comm.flying.add(self)  # until they end: gloo pairs them up with those of a later call if a call is left
        elif ops:
            self._begin = torch.accelerator.current_stream(ops[0][1].device.index).record_event()
        if ops and (at_once or self._begin is None):
            with comm.explained():
                self._works = self._launch()

    def wait(self) -> None:
        """Received data may be used and sent data overwritten: on a GPU by work that is launched after this (the host
        does not wait), on the CPU at once. Raises ExchangeError where a rank left the exchange, with its word."""
        with self._comm.explained():
            for work in self._works or self._launch():
                work.wait()
        self._comm.flying.discard(self)
        self._ops, self._works = [], []

    def _launch(self) -> list[dist.Work]:
        if not self._ops:
            return []
        group = self._comm.group_for(self._ops[0][1].device.type)
        ops = [dist.P2POp(kind, x, rank, group) for kind, x, rank in self._ops]  # pyright: ignore[reportArgumentType]
        if self._begin is None:
            return dist.batch_isend_irecv(ops)
        side = self._comm.side_stream()
        side.wait_event(self._begin)
        with side:
            return dist.batch_isend_irecv(ops)


class P2P:
    """Sends and receives between neighbours or any ranks of a communicator.

    among: only between the ranks of these places, which are then numbered 0, 1, ... in this order.
    """

    copies = False

    def __init__(self, comm: Communicator, among: Sequence[int] | None = None) -> None:
        self._comm = comm
        self._ranks = comm.ranks if among is None else tuple(comm.ranks[place] for place in among)

    def move(
        self, hops: Hops, held: Mapping[int, Parts], partial: dict[int, Parts] | None, *, shapes: Shapes, outer: bool = False
    ) -> Moving:
        """Blocks, and in backward their gradients, in one batch; see exchange."""
        blocks = {block: shapes.empty(block) for block, _ in hops.recvs}
        sends = [(x, to) for block, to in hops.sends for x in held[block]]
        recvs = [(x, source) for block, source in hops.recvs for x in blocks[block]]
        grads: list[tuple[int, Parts]] = []
        if partial is not None:
            grads = [(block, shapes.empty(block, torch.float32)) for block, _ in hops.grad_recvs]
            sends += [(x, to) for block, to in hops.grad_sends for x in partial.pop(block)]
            recvs += [(x, source) for (_, source), (_, parts) in zip(hops.grad_recvs, grads, strict=True) for x in parts]
        pending = self.exchange(sends, recvs, outer=outer) if sends or recvs else Nothing()
        return Moving(blocks, grads, pending, {})

    def room(self, block: int, shapes: Shapes) -> Parts:
        """New memory."""
        return shapes.empty(block, torch.float32)

    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], recvs: Sequence[tuple[Tensor, int]], *, outer: bool = False
    ) -> Pending:
        """All transfers of a step: (contiguous tensor, other rank) each. Between two ranks they pair up in order.

        outer: they take several steps. With gloo the transfers of those steps do not wait for them; with NCCL those of one
        communicator run in the order of their start, and a second communicator would have to be made by all ranks of the job.
        """
        for tensor, _ in (*sends, *recvs):
            assert tensor.is_contiguous()
        ops: list[_Op] = [(dist.isend, x, self._ranks[rank]) for x, rank in sends if x.numel()]
        ops += [(dist.irecv, x, self._ranks[rank]) for x, rank in recvs if x.numel()]
        return Pending(ops, self._comm, at_once=outer)

    def abandon(self, error: BaseException) -> None:
        """This rank will not join the exchanges that the others wait for: leave them the reason."""
        self._comm.leave_word(error)

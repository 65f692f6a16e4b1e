"""Point-to-point transport: every step's sends and receives in one batched launch, over NCCL or gloo."""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from ringflash.transport.communicator import Communicator


class Pending:
    """Transfers in flight; holds their tensors until `wait`."""

    def __init__(self, works: Sequence[dist.Work], tensors: Sequence[Tensor], comm: Communicator) -> None:
        self._works, self._tensors, self._comm = works, tensors, comm

    def wait(self) -> None:
        """Received data may be used and sent data overwritten: on a GPU by work that is launched after this (the host
        does not wait), on the CPU at once. Raises RuntimeError where the exchange failed, naming a rank that left it."""
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            word = self._comm.word_left()
            if word is None:
                raise
            raise RuntimeError(f"the ring's exchange failed because {word}") from error
        self._works, self._tensors = (), ()


class P2P:
    """Sends and receives between neighbours or any ranks of a communicator."""

    name = "p2p"

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def exchange(self, sends: Sequence[tuple[Tensor, int]], recvs: Sequence[tuple[Tensor, int]]) -> Pending:
        """Start all transfers: (contiguous tensor, other rank) each. Between two ranks they pair up in order."""
        for tensor, _ in (*sends, *recvs):
            assert tensor.is_contiguous()
        ops = [self._op(dist.isend, tensor, rank) for tensor, rank in sends if tensor.numel()]
        ops += [self._op(dist.irecv, tensor, rank) for tensor, rank in recvs if tensor.numel()]
        works = dist.batch_isend_irecv(ops) if ops else []
        return Pending(works, [op.tensor for op in ops], self._comm)

    def _op(self, kind: object, tensor: Tensor, rank: int) -> dist.P2POp:
        group = self._comm.group_for(tensor.device.type)
        return dist.P2POp(kind, tensor, self._comm.ranks[rank], group)  # pyright: ignore[reportArgumentType]

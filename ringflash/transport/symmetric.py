"""Memory that the GPUs of one host share over NVLink (torch symmetric memory), and the stream operations that go with it."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ringflash.transport.blocks import Shared


def connect(group: ProcessGroup, ranks: Sequence[int], *, timeout_ms: int) -> "Symmetric":
    """The link of a group's ranks, tried out."""
    link = Symmetric(group, ranks, timeout_ms=timeout_ms)
    link.meet(0)
    torch.accelerator.current_stream().synchronize()
    return link


class Symmetric:
    """The link of a group's ranks, in the order `ranks` (global ranks). A collective; raises RuntimeError where they have none.

    timeout_ms: a meeting that takes longer ends this process's use of the GPU with an error, instead of never.

    Streams are torch.Stream and not torch.cuda.Stream: the same streams, without several Python calls for each operation.
    """

    def __init__(self, group: ProcessGroup, ranks: Sequence[int], *, timeout_ms: int) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory
        from torch.distributed import _symmetric_memory

        self._memory, self._write, self._group, self._timeout_ms = _symmetric_memory, _SymmetricMemory, group, timeout_ms
        self._places = [dist.get_process_group_ranks(group).index(rank) for rank in ranks]
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.Stream(self._device, priority=-1)
        self._current = self._last = torch.accelerator.current_stream(self._device.index)
        self._meeting_room = self._room(1024)
        self._meeting = self._rendezvous(self._meeting_room)

    def shared(self, nbytes: int) -> Shared:
        """Make memory of that size on every rank, once nothing runs any more that could use what it replaces.

        Whatever uses it runs on the streams that are waited for. The GPU's others are not: what they run may itself wait for
        another rank, which waits here.
        """
        current = torch.accelerator.current_stream(self._device.index)
        for stream in (self._last, self._stream, current):
            stream.synchronize()
        dist.barrier(self._group)
        current.synchronize()
        mine = self._room(nbytes)
        handle = self._rendezvous(mine)
        return Shared(mine, [handle.get_buffer(place, (nbytes,), torch.uint8) for place in self._places], handle)

    def meet(self, channel: int) -> None:
        """On the current stream: go on when all ranks have come to this point of theirs."""
        self._meeting.barrier(channel, self._timeout_ms)

    def follow(self) -> None:
        """The current stream goes on behind the one that called this last; one that is captured cannot wait for others."""
        self._current = torch.accelerator.current_stream(self._device.index)
        if self._current != self._last and not self.captured:
            self._current.wait_stream(self._last)
            self._last = self._current

    def aside(self) -> AbstractContextManager[object]:
        """Inside, the current stream is the transfers' own, which goes on from where the one that called `follow` is."""
        self._stream.wait_stream(self._current)
        return self._stream

    def rejoin(self) -> None:
        """The current stream goes on when the transfers' own is done."""
        torch.accelerator.current_stream(self._device.index).wait_stream(self._stream)

    def count(self, words: Tensor, block: int, heads: int) -> None:
        """On the current stream: words[block] = heads, behind what came before; words is uint32."""
        self._write.stream_write_value32(words, block, heads)

    def late(self, size: int) -> Tensor:
        """int32 (size,) zeros in pinned memory."""
        return torch.zeros(size, dtype=torch.int32).pin_memory()

    @property
    def captured(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        return torch.cuda.is_current_stream_capturing()

    def _room(self, nbytes: int) -> Tensor:
        """Memory for work behind this point of the current stream: torch zeroes it, on the default stream."""
        memory = self._memory.empty(nbytes, dtype=torch.uint8, device=self._device)
        torch.accelerator.current_stream(self._device.index).wait_stream(torch.cuda.default_stream(self._device))
        return memory

    def _rendezvous(self, memory: Tensor) -> Any:
        return self._memory.rendezvous(memory, self._group.group_name)

"""What a ring asks of a transport: blocks and their float32 gradients, moved as one rank's part of a step says."""

import math
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]  # (k, v) of a block, or its (dk, dv)
Parts = tuple[Tensor, ...]  # what of a block travels together: a Pair; where rows travel (q, dout, lse, delta), or (dq,)
Hop = tuple[int, int]  # (block, other rank)


class Hops(NamedTuple):
    """One rank's part of transfers that set out and land together.

    moves, grad_moves: some rank sends or receives blocks, or gradients, so that all ranks take part in what a transport does
    together.
    """

    sends: tuple[Hop, ...]
    recvs: tuple[Hop, ...]
    grad_sends: tuple[Hop, ...]
    grad_recvs: tuple[Hop, ...]
    moves: bool = False
    grad_moves: bool = False


class Shapes(NamedTuple):
    """What travels of this rank's block, how many tokens each rank's has, and the first how many tensors have a gradient.

    parts: k and v (batch, seqlen_k, nheads_k, headdim | headdim_v), or, where rows travel, q, dout (batch, seqlen_q, nheads_q,
    headdim | headdim_v), lse and delta (batch, nheads_q, seqlen_q). Transports that gather take k and v.
    """

    parts: Parts
    lengths: tuple[int, ...]
    n_grads: int = 2

    @property
    def k(self) -> Tensor:
        """This rank's keys."""
        return self.parts[0]

    @property
    def v(self) -> Tensor:
        """This rank's values."""
        return self.parts[1]

    def empty(self, block: int, dtype: torch.dtype | None = None) -> Parts:
        """Room for a block; with a dtype, for its gradients."""
        parts = self.parts if dtype is None else self.parts[: self.n_grads]
        return tuple([x.new_empty(_resized(x, self.lengths[block]), dtype=dtype) for x in parts])

    @property
    def elements(self) -> int:
        """Of the longest block's K and V."""
        return max(map(self.elements_of, range(len(self.lengths))))

    @property
    def block_bytes(self) -> int:
        """Of the longest block's K and V, rounded up for alignment."""
        return _round_up(self.elements * self.k.element_size())

    @property
    def grads_bytes(self) -> int:
        """Of the longest block's float32 dK and dV, rounded up for alignment."""
        return _round_up(self.elements * 4)

    @property
    def buffer_bytes(self) -> int:
        """What a rank keeps that gathers: two published blocks, the others' blocks, the partial dK and dV made for them, and
        those that others made for its own.
        """
        return 2 * self.block_bytes + (len(self.lengths) - 1) * (self.block_bytes + 2 * self.grads_bytes)

    def elements_of(self, block: int) -> int:
        """Of a block's K and V."""
        return sum(map(math.prod, self._sizes(block)))

    def pair(self, memory: Tensor, block: int) -> Pair:
        """K and V, or dK and dV, of a block as contiguous views of a vector, one behind the other."""
        sizes = self._sizes(block)
        counts = [math.prod(size) for size in sizes]
        k, v = (x.view(size) for x, size in zip(memory[: sum(counts)].split(counts), sizes, strict=True))
        return k, v

    def _sizes(self, block: int) -> list[tuple[int, ...]]:
        return [_resized(x, self.lengths[block]) for x in (self.k, self.v)]


def _resized(x: Tensor, tokens: int) -> tuple[int, ...]:
    """The shape with so many tokens: they stand second, in lse and delta last."""
    return (*x.shape[:2], tokens) if x.ndim == 3 else (x.shape[0], tokens, *x.shape[2:])


def _round_up(nbytes: int) -> int:
    return -(-max(nbytes, 1) // 256) * 256


class Ready(NamedTuple):
    """ready int32 (1,): how many key heads of a block have arrived. late int32 (1,): set by a kernel that gave up waiting."""

    ready: Tensor
    late: Tensor


class Shared(NamedTuple):
    """uint8 memory that all ranks can read: this rank's, and each rank's as seen from here while `mapped` lives."""

    mine: Tensor
    of: list[Tensor]
    mapped: object = None


class Pending(Protocol):
    """The end of transfers."""

    def wait(self) -> None:
        """What was sent may be overwritten and what was received be used by work launched after this."""
        ...


class Nothing:
    """No transfers."""

    def wait(self) -> None:
        """Return at once."""


class Moving(NamedTuple):
    """Transfers under way: the blocks and partial gradients that arrive, and their end.

    ready: of blocks whose heads are counted in as they arrive. Blocks of an early step that have none are there already.
    """

    blocks: dict[int, Parts]
    grads: list[tuple[int, Parts]]
    pending: Pending
    ready: Mapping[int, Ready]


class Transport(Protocol):
    """What moves blocks between the ranks of a ring."""

    @property
    def copies(self) -> bool:
        """Whether it copies what it sends, however that lies; else `held` has contiguous tensors."""
        ...

    def move(
        self, hops: Hops, held: Mapping[int, Parts], partial: dict[int, Parts] | None, /, *, shapes: Shapes, outer: bool = False
    ) -> Moving:
        """Start all transfers of a step: blocks out of `held`, and in backward gradients out of `partial`, which loses them.
        Asked only where some rank moves something: blocks, or, with `partial`, gradients.

        outer: they go between hosts and are waited for later than transfers that start after them.
        """
        ...

    def room(self, block: int, shapes: Shapes, /) -> Parts:
        """Where the partial float32 gradients of another rank's block are made, contiguous, before they move."""
        ...

    def abandon(self, error: BaseException, /) -> None:
        """Leave word for the other ranks that this one will not join their exchange."""
        ...

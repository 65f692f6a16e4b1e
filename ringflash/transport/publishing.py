"""A rank's own K and V into memory that others read, head by head, by as few launches as torch has for it."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ringflash.transport.blocks import Pair

_WIDE = torch.complex128  # 16 bytes


class Target(NamedTuple):
    """Where k and v go: as they are, and in elements of 16 bytes; both at once, behind each other in the batch.

    What their shapes do not allow is None: rows may be no multiple of 16 bytes, k and v of different widths, batches larger.
    """

    plain: Pair
    wide: Pair | None
    both: Tensor | None


def target(k: Tensor, v: Tensor) -> Target:
    """Of k and v (batch, tokens, nheads, width) of one memory, the same number of bytes from each head's k to its v."""
    if k.numel() == 0 or v.numel() == 0 or not all(_is_wide(x) for x in (k, v)):
        return Target((k, v), None, None)
    wide = k.view(_WIDE), v.view(_WIDE)
    if k.shape != v.shape or k.shape[0] > 1:
        return Target((k, v), wide, None)
    apart = wide[1].storage_offset() - wide[0].storage_offset()
    return Target((k, v), wide, wide[0].as_strided((2, *wide[0].shape[1:]), (apart, *wide[0].stride()[1:])))


def publish(to: Target, k: Tensor, v: Tensor) -> None:
    """16 bytes at a time where rows allow it: torch copies what lies in another order element by element."""
    into = to.plain
    if to.wide is not None and _aligned(k) and _aligned(v):
        into, k, v = to.wide, k.view(_WIDE), v.view(_WIDE)
        if to.both is not None:
            torch.cat((k, v), out=to.both)  # one launch
            return
    into[0].copy_(k)
    into[1].copy_(v)


def _is_wide(x: Tensor) -> bool:
    return x.shape[-1] * x.element_size() % 16 == 0 and _aligned(x)


def _aligned(x: Tensor) -> bool:
    """Whether all rows begin at multiples of 16 bytes."""
    return x.data_ptr() % 16 == 0 and _steps_are_wide(x.stride(), x.storage_offset(), x.element_size())


@functools.lru_cache(maxsize=256)
def _steps_are_wide(strides: tuple[int, ...], offset: int, itemsize: int) -> bool:
    """Whether elements of 16 bytes can be counted so; those of a row must lie side by side."""
    return strides[-1] == 1 and all(n * itemsize % 16 == 0 for n in (*strides[:-1], offset))

"""How a rank's own K and V reach memory that others read: bits in their places, by one launch where torch has one for it."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ringflash.transport import publishing
from ringflash.transport.publishing import publish, target


class Launches(TorchDispatchMode):
    """Counts what writes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.cat.out):
            into = (kwargs or {}).get("out", args[0])
            self.found.append(f"{func.overloadpacket.__name__} {into.dtype}".replace("torch.", ""))
        return func(*args, **(kwargs or {}))


def by_head(sizes: tuple[int, int, int], widths: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(memory (nheads, elements), k, v): views of (batch, tokens, nheads, width) in it, a head's v behind its k."""
    batch, tokens, nheads = sizes
    memory = torch.full((nheads, batch * tokens * sum(widths)), -1.0, dtype=dtype)
    parts = memory.split([batch * tokens * width for width in widths], 1)
    k, v = (x.unflatten(1, (batch, tokens, width)).permute(1, 2, 0, 3) for x, width in zip(parts, widths, strict=True))
    return memory, k, v


def strided(x: Tensor, strides: str) -> Tensor:
    """The same values laid out otherwise."""
    if strides == "heads first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    room = x.new_zeros(*x.shape[:-1], x.shape[-1] + {"plain": 0, "off by three": 3}[strides])
    return room[..., room.shape[-1] - x.shape[-1] :].copy_(x)


@pytest.mark.parametrize("strides", ["plain", "heads first", "off by three"])
@pytest.mark.parametrize(
    ("batch", "widths", "dtype", "launches"),
    [
        (1, (16, 16), torch.bfloat16, ["cat complex128"]),
        (1, (8, 8), torch.float32, ["cat complex128"]),
        (2, (16, 16), torch.bfloat16, ["copy_ complex128"] * 2),
        (1, (16, 8), torch.float16, ["copy_ complex128"] * 2),
        (1, (12, 12), torch.float16, ["copy_ float16"] * 2),
        (0, (16, 16), torch.float32, ["copy_ float32"] * 2),
    ],
)
def test_what_is_published_has_the_same_bits(
    batch: int, widths: tuple[int, int], dtype: torch.dtype, launches: list[str], strides: str
) -> None:
    sizes = (batch, 5, 3)
    memory, *views = by_head(sizes, widths, dtype)
    k, v = (torch.randn(*sizes, width).to(dtype) for width in widths)
    to = target(*views)
    given = [strided(x, strides) for x in (k, v)]
    with Launches() as counted, torch.inference_mode():
        publish(to, *given)
    assert torch.equal(memory, torch.cat([x.permute(2, 0, 1, 3).flatten(1) for x in (k, v)], 1))
    wide = strides != "off by three"
    assert counted.found == (launches if wide else [f"copy_ {dtype}".replace("torch.", "")] * 2)


def test_memory_that_begins_anywhere_is_not_taken_for_aligned() -> None:
    room = bytearray(64)
    base = torch.frombuffer(room, dtype=torch.uint8).data_ptr()
    aligned, odd = (torch.frombuffer(room, dtype=torch.float16, count=8, offset=-base % 16 + off) for off in (0, 2))
    assert publishing._aligned(aligned[None])
    assert not publishing._aligned(odd[None])
    assert odd.storage_offset() == 0

"""The host side that the Hopper kernels share: tensors as descriptors, and what a launch is told."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

from ringflash.kernels import portable
from ringflash.kernels.reference import Segment

# What a spin on a segment's flag waits at most, where the segment says whom to tell that it gave up; forever elsewhere.
LIMIT_NS = 20_000_000_000
_FOREVER_NS = 1 << 58

# A launch: 4 warps of the default partition; 168 registers for each of the 12 that there are in the end.
LAUNCH = {"num_warps": 4, "maxnreg": 168, "enable_fp_fusion": True}

FLAT = {rank: gl.NVMMASharedLayout(0, 32, rank=rank) for rank in (2, 3)}  # vectors, as they are
ELEMENTS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


@functools.lru_cache(maxsize=64)
def layout(rows: int, headdim: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How `rows` rows of one head lie in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([1, rows, 1, headdim], ELEMENTS[dtype])


def loadable(x: Tensor) -> Tensor:
    """x (batch, seqlen, nheads, headdim), copied only if the copy engine cannot read it as it lies."""
    fits = x.data_ptr() % 16 == 0 and _readable(x.shape, x.stride(), 16 // x.element_size())
    return x if fits else x.clone(memory_format=torch.contiguous_format)


@functools.lru_cache(maxsize=1024)
def _readable(shape: tuple[int, ...], strides: tuple[int, ...], unit: int) -> bool:
    """Whether the copy engine can step like that; unit: elements in 16 bytes."""
    return strides[-1] == 1 and all(
        n == 1 or (0 < s < 1 << 38 and s % unit == 0) for n, s in zip(shape[:3], strides[:3], strict=True)
    )


def keys(segment: Segment, x: Tensor) -> Tensor:
    """A segment's k or v as `loadable` gives it; ValueError where that would copy what may not have arrived."""
    found = loadable(x)
    if found is not x and segment.ready is not None:
        raise ValueError(
            "k and v of a segment with `ready` must lie so that the copy engine reads them, last dimension contiguous and the "
            f"others at multiples of 16 bytes: strides={tuple(x.stride())}, dtype={x.dtype}; copy them first"
        )
    return found


def describe(x: Tensor, rows: int, headdim: int) -> TensorDescriptor:
    """Descriptor of x (batch, seqlen, nheads, headdim), read or written `rows` rows of one head at a time; columns past x's
    are zero.
    """
    return _made(x, _description(x.shape, x.stride(), x.dtype, rows, headdim))


def describe_as(x: Tensor, shape: tuple[int, ...], block: tuple[int, ...]) -> TensorDescriptor:
    """Descriptor of contiguous x as of that shape, read a block at a time, which lies in shared memory as it is."""
    return _made(x, _flat_description(x.dtype, shape, block))


def _made(x: Tensor, description: dict[str, Any]) -> TensorDescriptor:
    made = object.__new__(TensorDescriptor)  # its own checks, which take the host as long as all the rest, are made once
    made.__dict__ = {**description, "base": x}
    return made


@functools.lru_cache(maxsize=1024)
def _description(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, rows: int, headdim: int
) -> dict[str, Any]:
    """All of a descriptor but its tensor."""
    steps = [stride if n > 1 else shape[-1] for n, stride in zip(shape[:-1], strides[:-1], strict=True)]
    like = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    return vars(TensorDescriptor(like, list(shape), [*steps, 1], [1, rows, 1, headdim], layout(rows, headdim, dtype)))


@functools.lru_cache(maxsize=256)
def _flat_description(dtype: torch.dtype, shape: tuple[int, ...], block: tuple[int, ...]) -> dict[str, Any]:
    like = torch.empty(shape, dtype=dtype, device="meta")
    return vars(TensorDescriptor(like, list(shape), list(like.stride()), list(block), FLAT[len(shape)]))


@functools.lru_cache(maxsize=64)
def multiprocessors(device: torch.device) -> int:
    """How many the GPU has."""
    return torch.cuda.get_device_properties(device).multi_processor_count


_COUNTERS: dict[tuple[int, int], Tensor] = {}  # by device and stream, on which launches come one after the other


def counters(device: torch.device, *, own: bool) -> tuple[Tensor, bool]:
    """int32 (3,) zeros for a launch on the current stream, and whether the next one has the same, so that this one has to
    leave zeros. own: it has not, and the caller may read what was counted. Nor has a graph's launch, since graphs may be
    replayed beside anything.
    """
    if own or torch.cuda.is_current_stream_capturing():
        return torch.zeros(3, dtype=torch.int32, device=device), False
    key = device.index, driver.active.get_current_stream(device.index)  # pyright: ignore[reportAttributeAccessIssue]
    if key not in _COUNTERS:
        _COUNTERS[key] = torch.zeros(3, dtype=torch.int32, device=device)
    return _COUNTERS[key], True


def waits(segments: Sequence[Segment]) -> int:
    """One bit for each segment with a flag."""
    return sum([1 << i for i, segment in enumerate(segments) if segment.ready is not None])


Pointers = tuple[Tensor, ...]
Numbers = tuple[int, ...]


def flags(segments: Sequence[Segment]) -> tuple[Pointers, Pointers, int]:
    """(readys, lates, limit_ns): the segments' flags, where to say that one did not come, and after how long."""
    told = {segment.late is not None for segment in segments if segment.ready is not None}
    if len(told) > 1:
        raise ValueError("late must be given for all segments with `ready`, or for none: one clock serves a launch")
    return (
        tuple([segment.begin if segment.ready is None else segment.ready for segment in segments]),
        tuple([segment.begin if segment.late is None else segment.late for segment in segments]),
        portable.encode(_FOREVER_NS if told == {False} else LIMIT_NS)[0],
    )


def intervals(segments: Sequence[Segment]) -> tuple[Pointers, Pointers, Numbers]:
    """begins, ends and what lies between the batch rows' intervals."""
    return (
        tuple([segment.begin for segment in segments]),
        tuple([segment.end for segment in segments]),
        portable.encode(*[segment.begin.shape[1] if segment.begin.shape[0] > 1 else 0 for segment in segments]),
    )


def key_views(segments: Sequence[Segment], *, rows: int, headdim: int, headdim_v: int) -> tuple[Any, ...]:
    """Descriptors of all segments' k, then v, in the kernels' slots."""
    ks = tuple([describe(keys(segment, segment.k), rows, headdim) for segment in segments])
    vs = tuple([describe(keys(segment, segment.v), rows, headdim_v) for segment in segments])
    return (*portable.slots(ks), *portable.slots(vs))


def key_types(segments: int, k: str, v: str) -> tuple[dict[str, str], dict[str, None]]:
    """(signature, constants) of those slots, for compiling without tensors."""
    slots = [(f"{name}{i}", kind, i < segments) for name, kind in (("k", k), ("v", v)) for i in range(portable.MAX_SEGMENTS)]
    signature = {name: kind if filled else "constexpr" for name, kind, filled in slots}
    return signature, {name: None for name, _, filled in slots if not filled}


def descriptor_type(rows: int, headdim: int, dtype: torch.dtype) -> str:
    """A descriptor in a signature, for compiling without tensors."""
    name = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    return f"tensordesc<{name}[1, {rows}, 1, {headdim}],{layout(rows, headdim, dtype)!r}>"

"""The host side that forward and backward share: how segments, strides and descriptors become arguments of one launch."""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ringflash.kernels import config
from ringflash.kernels.reference import Segment

# Segments of one launch: a descriptor takes some 200 bytes of kernel parameters, of which 4 KB are sure to exist.
MAX_SEGMENTS = 8

# Heads are walked together while their keys (forward, dQ) or queries (dK/dV) fit in so much of the L2 cache.
CACHE_BYTES = 32 << 20


class Launcher:
    """A kernel's launches without Triton's binding of arguments, which takes the host longer than a short kernel runs.

    What a kernel was compiled for is told by a key; arguments that are pointers count as aligned to 16 bytes or not. So other
    arguments than pointers must be floats, of `encode`, or said by the key.
    """

    def __init__(self, kernel: Any, **options: Any) -> None:
        self._kernel, self._options = kernel, options
        self._compiled: dict[Any, Any] = {}

    def __call__(self, grid: int, args: Sequence[Any], *, key: Any, pointers: Sequence[Tensor]) -> None:
        """Launch on the current device, which is that of the first pointer, and stream, with all the kernel's arguments in
        their order.
        """
        aligned = tuple([x.data_ptr() % 16 == 0 for x in pointers])
        key = (key, aligned, pointers[0].device)
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[(grid, 1, 1)](*args)
            return
        compiled = self._kernel[(grid,)](*args, **self._options)  # None: the interpreter compiles nothing
        if not torch.version.hip:  # where it also counts how large the memory behind a pointer is
            self._compiled[key] = compiled


class Options(NamedTuple):
    """What a benchmark varies (None is the library's own choice), and whether the forward's key blocks lie at fixed places."""

    tile: config.Tile | None = None
    tma: bool | None = None
    chunk: int | None = None
    fixed: bool = False


class Arguments(NamedTuple):
    """Kernel arguments made of the segments, in the order of the kernels' signatures."""

    ks: tuple[Any, ...]
    vs: tuple[Any, ...]
    keys: tuple[Any, ...]  # k_strides, v_strides
    intervals: tuple[Any, ...]  # begins, ends, interval_strides, readys, waits
    constexprs: dict[str, Any]
    align: int


@functools.lru_cache(maxsize=4096)
def encode(*values: int) -> tuple[int, ...]:
    """Odd numbers past 2**40: Triton compiles anew when an integer is 1, or divisible by 16, or crosses 2**31; not so these."""
    return tuple(2 * value + 1 + (1 << 40) for value in values)


def slots(views: tuple[Any, ...]) -> tuple[Any, ...]:
    """Exactly MAX_SEGMENTS arguments: Triton 3.6 launches no descriptor inside a tuple."""
    return views + (None,) * (MAX_SEGMENTS - len(views))


def unit_stride(x: Tensor) -> Tensor:
    """x, copied only if its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def in_launches(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Segments that hold keys, in as many lists as launches are needed (at least one)."""
    held = [segment for segment in segments if segment.k.shape[1]]
    return [held[i : i + MAX_SEGMENTS] for i in range(0, max(len(held), 1), MAX_SEGMENTS)]


def strides(x: Tensor) -> tuple[int, int, int]:
    """(batch, row, head) strides in elements; 0 where the dimension has one entry, whose stride means nothing."""
    return tuple(stride if n > 1 else 0 for n, stride in zip(x.shape[:3], x.stride()[:3], strict=True))  # pyright: ignore[reportReturnType]


def alignment(tensors: Sequence[Tensor]) -> int:
    """Elements in 16 bytes if every row of every tensor begins on such a border, else 1."""
    unit = 16 // tensors[0].element_size()
    return unit if all(stride % unit == 0 for x in tensors for stride in strides(x)) else 1


def describable(x: Tensor) -> bool:
    """Whether every (batch, head) slice of x is a stretch of rows of one matrix of width stride(row)."""
    nheads, headdim = x.shape[2:]
    stride_b, width, stride_h = strides(x)
    bytes_each = x.element_size()
    if headdim != config.padded(headdim) or width < headdim or x.data_ptr() % 16 or width * bytes_each % 16 or stride_b % width:
        return False
    side_by_side = (nheads - 1) * stride_h + headdim <= width
    return (side_by_side or stride_h % width == 0) and _matrix_rows(x) < 1 << 31 and width * bytes_each < 1 << 31


def _matrix_rows(x: Tensor) -> int:
    batch, seqlen, nheads, _ = x.shape
    stride_b, width, stride_h = strides(x)
    return ((batch - 1) * stride_b + (nheads - 1) * stride_h) // width + seqlen


def describe(x: Tensor, block: int) -> TensorDescriptor:
    """Descriptor of x (batch, seqlen, nheads, headdim) as a matrix (rows, stride of a row), read in blocks of `block` rows."""
    width = strides(x)[1]
    return TensorDescriptor(x, [_matrix_rows(x), width], [width, 1], [block, x.shape[3]])


def describable_vectors(*tensors: Tensor) -> bool:
    """Whether `describe_vector` takes the tensors; a block must also begin at a multiple of 16 bytes (an illegal instruction on
    an H200 otherwise).
    """
    return all(x.numel() < 1 << 31 and x.data_ptr() % 16 == 0 for x in tensors)


def describe_vector(x: Tensor, block: int) -> TensorDescriptor:
    """Descriptor of a contiguous tensor as one vector, read in blocks."""
    return TensorDescriptor(x, [x.numel()], [1], [block])


def strides_of(x: Tensor, tma: bool, align: int) -> tuple[int, ...]:
    """What blocks.slice_at takes: strides (batch, head, row) in units of `align`, or (batch rows, head rows, head columns)."""
    stride_b, stride_n, stride_h = strides(x)
    if not tma:
        return encode(stride_b // align, stride_h // align, stride_n // align)
    return encode(stride_b // stride_n, stride_h // stride_n, stride_h % stride_n)


@functools.lru_cache(maxsize=64)
def _device_arch(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def arch(device: torch.device) -> str:
    """The key of config.TABLE for a device: "sm_90", "gfx942", or "cpu" (the interpreter)."""
    if device.type == "cpu":
        return "cpu"
    return _device_arch(torch.cuda.current_device() if device.index is None else device.index)


def has_descriptors(device: torch.device) -> bool:
    """Whether the GPU's copy engine reads blocks by descriptor."""
    return config.nearest(arch(device)) in ("sm_90", "sm_100")


def guard(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device: make it the tensors'."""
    here = device.type == "cpu" or device.index == torch.cuda.current_device()
    return contextlib.nullcontext() if here else torch.cuda.device(device)


def precision(x: Tensor) -> str:
    """How float32 operands are multiplied (16-bit operands do not care); the interpreter's detour for bfloat16."""
    if x.device.type == "cpu" and x.dtype == torch.bfloat16:
        return "upcast"
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def pads(headdim: int, headdim_v: int) -> dict[str, int]:
    """The constexprs that say to what the columns are padded."""
    return {"HEADDIM_PAD": config.padded(headdim), "HEADDIM_V_PAD": config.padded(headdim_v)}


def use_descriptors(tensors: Sequence[Tensor], options: Options) -> bool:
    """Whether the tensors' blocks are loaded by the copy engine."""
    if not tensors:
        return False
    wanted = has_descriptors(tensors[0].device) if options.tma is None else options.tma
    return wanted and all(describable(x) for x in tensors)


def keys_by_descriptor(segments: Sequence[Segment], options: Options) -> bool:
    """Whether k and v of the segments are loaded by the copy engine."""
    return use_descriptors([x for segment in segments for x in (segment.k, segment.v)], options)


def segment_arguments(segments: Sequence[Segment], others: Sequence[Tensor], block_k: int, *, tma: bool = False) -> Arguments:
    """Arguments for `segments`; `others` (q, dout) share the alignment promise; `tma`: k and v as descriptors."""
    ks = [unit_stride(segment.k) for segment in segments]
    vs = [unit_stride(segment.v) for segment in segments]
    align = alignment([*others, *ks, *vs])
    waits = sum(1 << i for i, segment in enumerate(segments) if segment.ready is not None)
    view = functools.partial(describe, block=block_k) if tma else (lambda x: x)
    return Arguments(
        ks=tuple(view(k) for k in ks),
        vs=tuple(view(v) for v in vs),
        keys=(tuple(strides_of(k, tma, align) for k in ks), tuple(strides_of(v, tma, align) for v in vs)),
        intervals=(
            tuple(segment.begin for segment in segments),
            tuple(segment.end for segment in segments),
            encode(*(segment.begin.shape[1] if segment.begin.shape[0] > 1 else 0 for segment in segments)),
            tuple(segment.begin if segment.ready is None else segment.ready for segment in segments),
            encode(waits)[0],
        ),
        constexprs={
            "SEGMENTS": len(segments),
            "WAIT": waits > 0,
            "ALIGN": align,
            "PRECISION": precision(others[0]),
        },
        align=align,
    )


def heads_together(bytes_per_head: int, group: int, heads: int, *, cache: int = CACHE_BYTES) -> int:
    """How many query heads a stretch of programs covers: whole groups whose shared data stay in the cache."""
    return min(heads, group * max(1, cache // max(bytes_per_head, 1)))


def key_bytes(segments: Sequence[Segment]) -> int:
    """Bytes of one key head's k and v."""
    return sum(
        segment.k.shape[1] * (segment.k.shape[3] + segment.v.shape[3]) * segment.k.element_size() for segment in segments
    )

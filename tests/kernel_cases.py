"""What the kernel tests share: random cases of the tile contract, and compiling a kernel for a GPU that is not there."""

import mmap
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ringflash.kernels import backward, config, forward
from ringflash.kernels.reference import Segment

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Triton decides when it decorates a function whether it is interpreted, so interpreted tests have a process of their own.
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's own process: test_in_interpreter")

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_LIMIT = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
KERNELS = {"forward": forward._kernel, "dq": backward._dq_kernel, "dkv": backward._dkv_kernel}

_POINTERS = {"acc_ptr", "max_ptr", "sum_ptr", "lse_ptr", "delta_ptr", "dq_ptr"}


def _types(name: str, element: str, n: int, views: dict[str, str]) -> object:
    """Signature of one run-time argument, n segments."""
    if slot := re.fullmatch(r"([kv])(\d)", name):
        return views[slot[1] + "s"] if int(slot[2]) < n else "constexpr"
    if name in ("ks", "vs"):
        return (views[name],) * n
    if name in ("q", "dout", "lse", "delta"):
        return views[name]
    if name in ("begins", "ends", "readys"):
        return ("*i32",) * n
    if name in ("dks", "dvs"):
        return ("*fp32",) * n
    if name in ("k_strides", "v_strides"):
        return (("i64",) * 3,) * n
    return {
        "q_ptr": f"*{element}",
        "dout_ptr": f"*{element}",
        "out_ptr": f"*{element}",
        "q_strides": ("i64",) * 3,
        "dout_strides": ("i64",) * 3,
        "interval_strides": ("i64",) * n,
        "seqlens_k": ("i64",) * n,
        "waits": "i64",
        "sizes": ("i64",) * 6,
        "scale": "fp32",
    }.get(name, "*fp32" if name in _POINTERS else None)


def _aligned(kind: object, path: tuple[int, ...]) -> dict[tuple[int, ...], list[list[object]]]:
    """The promise that every pointer is 16-byte aligned, as the launcher finds it at run time."""
    if isinstance(kind, tuple):
        return {k: v for i, part in enumerate(kind) for k, v in _aligned(part, (*path, i)).items()}
    return {path: [["tt.divisibility", 16]]} if isinstance(kind, str) and kind.startswith("*") else {}


def compile_kernel(
    which: str, arch: str, element: str, headdim: int, *, headdim_v: int = 0, segments: int = 1, tma: bool = False,
    tile: config.Tile | None = None, **flags: object,
) -> Any:  # fmt: skip
    """Compile kernel `which` (forward, dq, dkv) for an arch, element type (fp32, fp16, bf16) and head dims, without a GPU."""
    headdim_v = headdim_v or headdim
    size = 4 if element == "fp32" else 2
    pad, pad_v = config.padded(headdim), config.padded(headdim_v)
    if tile is None:
        tile = config.TABLE[arch, size, max(64, pad, pad_v)]._asdict()[which]
    assert tile is not None
    constexprs = {
        "SEGMENTS": segments, "CARRIED": False, "FINISH": True, "FIXED": False, "WAIT": False, "TMA": tma, "FENCE": False,
        "ALIGN": 16 // size, "PRECISION": "ieee", "HEADDIM": headdim, "HEADDIM_V": headdim_v, "BLOCK_Q": tile.block_q,
        "BLOCK_K": tile.block_k, "HEADDIM_PAD": pad, "HEADDIM_V_PAD": pad_v, "FANOUT": 256, "VECTORS": tma,
        **flags,
    }  # fmt: skip
    block = tile.block_q if which == "dkv" else tile.block_k
    descriptor = lambda columns: f"tensordesc<{element}[{block},{columns}]>"  # noqa: E731
    pointer = f"*{element}"
    by_descriptor = {"q", "dout"} if which == "dkv" else {"ks", "vs"}
    views: dict[str, str] = dict.fromkeys(("q", "dout", "ks", "vs"), pointer)
    views |= dict.fromkeys(["lse", "delta"], f"tensordesc<fp32[{block}]>" if constexprs["VECTORS"] else "*fp32")
    if tma:
        views |= {name: descriptor(pad if name in ("q", "ks") else pad_v) for name in by_descriptor}
    fn = KERNELS[which]
    signature = {n: "constexpr" if n in constexprs else _types(n, element, segments, views) for n in fn.arg_names}
    values = {(fn.arg_names.index(n),): v for n, v in constexprs.items() if n in fn.arg_names}
    values |= {(i,): None for i, n in enumerate(fn.arg_names) if signature[n] == "constexpr" and n not in constexprs}
    attrs = {k: v for i, n in enumerate(fn.arg_names) for k, v in _aligned(signature[n], (i,)).items()}
    source = ASTSource(fn, signature, values, attrs)
    return triton.compile(source, target=TARGETS[arch], options=config.launch_options(tile, arch))


def resources(compiled: Any) -> tuple[int, int]:
    """(registers, bytes of spill and stack) of a CUDA kernel, read out of its machine code."""
    tool = next(Path(str(triton.__file__)).parent.rglob("cuobjdump*"))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    counts = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return counts["REG"], counts["STACK"] + counts["LOCAL"]


def run_interpreted(path: str) -> None:
    """Run a test module again, in a process where Triton interprets kernels; fails with its report."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-W", "ignore", path]
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


class Case(NamedTuple):
    """Random inputs of the tile: monotone intervals with empty rows, keys that nobody sees, anything in those."""

    q: Tensor
    dout: Tensor
    segments: list[Segment]
    scale: float = 0.3


def intervals(seqlen_q: int, seqlen_k: int, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """begin, end int32 (rows, seqlen_q), non-decreasing; about a third of the rows empty."""
    cut = torch.randint(0, seqlen_k + 1, (2, rows, seqlen_q), generator=generator).sort(-1).values.int()
    begin, end = cut.amin(0), cut.amax(0)
    empty = torch.rand(rows, seqlen_q, generator=generator) < 0.3
    # An empty row keeps its begin; what follows must not end before it.
    return begin.contiguous(), torch.where(empty, begin, end).cummax(1).values.contiguous()


def poison(x: Tensor, begin: Tensor, end: Tensor) -> Tensor:
    """x (batch, seqlen_k, ...) in a longer buffer: NaN in the tail and at keys that no row of the batch row sees."""
    keys = torch.arange(x.shape[1])
    seen = ((keys >= begin[..., None]) & (keys < end[..., None])).any(1).expand(x.shape[0], -1)
    buffer = torch.full((x.shape[0], x.shape[1] + 40, *x.shape[2:]), torch.nan, dtype=x.dtype)
    buffer[:, : x.shape[1]] = torch.where(seen[..., None, None], x, torch.nan)
    return buffer[:, : x.shape[1]]


def random_case(seqlen_q: int, seqlens_k: tuple[int, ...], *, seed: int = 0, batch: int = 2, nheads: tuple[int, int] = (4, 2),
                headdims: tuple[int, int] = (16, 16), dtype: torch.dtype = torch.float32, shared: bool = False,
                causal: bool = False) -> Case:  # fmt: skip
    """A case; `shared` intervals have one row for the whole batch, `causal` ones end one key further from row to row."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    segments = []
    for seqlen_k in seqlens_k:
        begin, end = intervals(seqlen_q, seqlen_k, 1 if shared else batch, generator)
        if causal:
            rows = torch.arange(seqlen_q, dtype=torch.int32)
            begin, end = torch.zeros_like(begin), (rows + 1).clamp(max=seqlen_k).expand_as(end).contiguous()
        k, v = (numbers(batch, seqlen_k, nheads[1], d) for d in headdims)
        segments.append(Segment(poison(k, begin, end), poison(v, begin, end), begin, end))
    return Case(numbers(batch, seqlen_q, nheads[0], headdims[0]), numbers(batch, seqlen_q, nheads[0], headdims[1]), segments)


def spread(x: Tensor, row: int) -> Tensor:
    """x (1, seqlen, nheads, headdim) with `row` elements from row to row, in memory that exists only where it is written."""
    count = (x.shape[1] - 1) * row + x[0, 0].numel()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    flat = torch.frombuffer(mmap.mmap(-1, count * x.element_size(), flags=flags), dtype=x.dtype)
    wide = flat.as_strided(x.shape, (count, row, x.shape[3], 1))
    wide.copy_(x)
    return wide


def assert_close(x: Tensor, expected: Tensor, dtype: torch.dtype, name: str = "", *, floor: float = 0.0) -> None:
    """rms error within what rounding inputs of `dtype` once or twice explains, or `floor`; infinities in the same places."""
    finite = expected.isfinite()
    torch.testing.assert_close(x[~finite], expected.to(x.dtype)[~finite], msg=lambda m: f"{name}: {m}")
    error, size = (x.double() - expected.double())[finite].norm(), expected.double()[finite].norm()
    bound = torch.finfo(dtype).eps * (16 if dtype == torch.float32 else 1)
    allowed = bound * size + floor * x.numel() ** 0.5 + 1e-30
    assert error <= allowed, f"{name}: rms error {float(error / size):.2e} > {bound:.2e}"


SHAPES: dict[str, dict[str, Any]] = {
    "one": {"seqlen_q": 1, "seqlens_k": (1,), "nheads": (1, 1)},
    "small": {"seqlen_q": 7, "seqlens_k": (63,), "batch": 1, "nheads": (3, 3)},
    "gqa": {"seqlen_q": 63, "seqlens_k": (100,), "nheads": (4, 1), "headdims": (24, 16), "batch": 1},
    "shared": {"seqlen_q": 37, "seqlens_k": (50,), "shared": True, "headdims": (16, 24)},
    "segments": {"seqlen_q": 40, "seqlens_k": (33, 0, 7, 64), "batch": 1},
    "wide": {"seqlen_q": 33, "seqlens_k": (40,), "headdims": (80, 48), "batch": 1, "nheads": (2, 1)},
    "tiny": {"seqlen_q": 20, "seqlens_k": (40,), "headdims": (1, 3), "batch": 1, "nheads": (2, 2)},
    "half": {"seqlen_q": 50, "seqlens_k": (70,), "headdims": (64, 64), "batch": 1, "dtype": torch.float16},
    "bf16": {"seqlen_q": 50, "seqlens_k": (70, 20), "headdims": (64, 32), "batch": 1, "dtype": torch.bfloat16},
}

"""What the kernel tests share: random cases of the tile contract, and compiling a kernel for a GPU that is not there."""

import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ringflash.kernels import backward, config, forward

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
    if name in ("q", "dout"):
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
) -> object:  # fmt: skip
    """Compile kernel `which` (forward, dq, dkv) for an arch, element type (fp32, fp16, bf16) and head dims, without a GPU."""
    headdim_v = headdim_v or headdim
    size = 4 if element == "fp32" else 2
    pad, pad_v = config.padded(headdim), config.padded(headdim_v)
    tile = tile or getattr(config.TABLE[arch, size, max(64, pad, pad_v)], which)
    constexprs = {
        "SEGMENTS": segments, "CARRIED": False, "FINISH": True, "WAIT": False, "TMA": tma, "FENCE": False,
        "ALIGN": 16 // size, "PRECISION": "ieee", "HEADDIM": headdim, "HEADDIM_V": headdim_v, "BLOCK_Q": tile.block_q,
        "BLOCK_K": tile.block_k, "HEADDIM_PAD": pad, "HEADDIM_V_PAD": pad_v, "FANOUT": 256, **flags,
    }  # fmt: skip
    block = tile.block_q if which == "dkv" else tile.block_k
    descriptor = lambda columns: f"tensordesc<{element}[{block},{columns}]>"  # noqa: E731
    pointer = f"*{element}"
    by_descriptor = {"q", "dout"} if which == "dkv" else {"ks", "vs"}
    views = dict.fromkeys(("q", "dout", "ks", "vs"), pointer)
    if tma:
        views |= {name: descriptor(pad if name in ("q", "ks") else pad_v) for name in by_descriptor}
    fn = KERNELS[which]
    signature = {n: "constexpr" if n in constexprs else _types(n, element, segments, views) for n in fn.arg_names}
    values = {(fn.arg_names.index(n),): v for n, v in constexprs.items() if n in fn.arg_names}
    values |= {(i,): None for i, n in enumerate(fn.arg_names) if signature[n] == "constexpr" and n not in constexprs}
    attrs = {k: v for i, n in enumerate(fn.arg_names) for k, v in _aligned(signature[n], (i,)).items()}
    source = ASTSource(fn, signature, values, attrs)
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True}
    return triton.compile(source, target=TARGETS[arch], options=options)


def resources(compiled: object) -> tuple[int, int]:
    """(registers, bytes of spill and stack) of a CUDA kernel, read out of its machine code."""
    tool = next(Path(triton.__file__).parent.rglob("cuobjdump*"))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    counts = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return counts["REG"], counts["STACK"] + counts["LOCAL"]

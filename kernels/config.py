"""The frozen table of tile sizes, warps and stages, by (arch, bytes per element, padded headdim): no tuning at run time."""

from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """One kernel's block sizes and launch options; `register_usage`: how freely ptxas may use registers, 0 to 10."""

    block_q: int
    block_k: int
    warps: int
    stages: int
    register_usage: int | None = None


class Tiles(NamedTuple):
    """The three kernels of one headdim."""

    forward: Tile
    dq: Tile
    dkv: Tile


# (arch, itemsize, headdim padded to 64, 128 or 256). "cpu" is Triton's interpreter: small, so that tests see many blocks.
TABLE: dict[tuple[str, int, int], Tiles] = {
    ("sm_90", 2, 64): Tiles(Tile(128, 128, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3)),
    ("sm_90", 2, 128): Tiles(Tile(128, 128, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3, register_usage=0)),
    ("sm_90", 2, 256): Tiles(Tile(64, 32, 8, 2), Tile(32, 64, 8, 2), Tile(64, 32, 8, 2)),
    ("sm_90", 4, 64): Tiles(Tile(32, 32, 4, 2), Tile(32, 32, 4, 2), Tile(16, 32, 4, 2)),
    ("sm_90", 4, 128): Tiles(Tile(32, 32, 4, 2), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    ("sm_90", 4, 256): Tiles(Tile(16, 32, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    ("sm_100", 2, 64): Tiles(Tile(128, 128, 8, 3), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2)),
    ("sm_100", 2, 128): Tiles(Tile(128, 64, 8, 2), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2)),
    ("sm_100", 2, 256): Tiles(Tile(128, 64, 8, 1), Tile(64, 64, 8, 1), Tile(64, 64, 8, 1)),
    ("sm_80", 2, 64): Tiles(Tile(128, 64, 8, 2), Tile(64, 64, 4, 2), Tile(32, 64, 4, 2)),
    ("sm_80", 2, 128): Tiles(Tile(128, 64, 8, 2), Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)),
    ("sm_80", 2, 256): Tiles(Tile(64, 32, 8, 2), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    ("sm_80", 4, 64): Tiles(Tile(32, 32, 4, 2), Tile(32, 32, 4, 2), Tile(16, 32, 4, 2)),
    ("sm_80", 4, 128): Tiles(Tile(32, 32, 4, 2), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    ("sm_80", 4, 256): Tiles(Tile(16, 32, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    ("gfx942", 2, 64): Tiles(Tile(128, 64, 4, 1), Tile(64, 64, 4, 1), Tile(64, 64, 4, 1)),
    ("gfx942", 2, 128): Tiles(Tile(128, 64, 4, 1), Tile(64, 32, 4, 1), Tile(32, 64, 4, 1)),
    ("gfx942", 2, 256): Tiles(Tile(64, 32, 4, 1), Tile(32, 16, 4, 1), Tile(16, 32, 4, 1)),
    ("gfx942", 4, 64): Tiles(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    ("gfx942", 4, 128): Tiles(Tile(32, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
    ("gfx942", 4, 256): Tiles(Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
    **{("cpu", size, d): Tiles(*(Tile(16, 32, 4, 1),) * 3) for size in (2, 4) for d in (64, 128, 256)},
}


def padded(headdim: int) -> int:
    """The power of two, at least 16, that a block's columns are padded to."""
    return max(16, 1 << (headdim - 1).bit_length())


def launch_options(tile: Tile, arch: str) -> dict[str, int | str]:
    """What a launch, or triton.compile, is told beside the arguments."""
    options: dict[str, int | str] = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True}
    if tile.register_usage is not None and arch.startswith("sm_"):
        options["ptx_options"] = f"--register-usage-level={tile.register_usage}"
    return options


def nearest(arch: str) -> str:
    """The row of the table for an arch that has none of its own: the newest described NVIDIA chip not above it."""
    known = {key[0] for key in TABLE}
    if arch in known:
        return arch
    if arch.startswith("gfx"):
        return "gfx942"
    if not arch.startswith("sm_"):
        raise ValueError(f"arch must be sm_NN, gfxNNN or cpu: arch={arch!r}")
    number = int(arch.removeprefix("sm_"))
    if number >= 120 or number < 90:  # consumer Blackwell has neither tcgen05 nor the large shared memory of sm_100
        return "sm_80"
    return "sm_100" if number >= 100 else "sm_90"


def lookup(arch: str, dtype: torch.dtype, headdim: int, headdim_v: int) -> Tiles:
    """The tiles for an arch ("sm_90", "gfx942", "cpu"), a dtype and the two head dims (each 1 to 256).

    Raises ValueError for a headdim out of range and TypeError for a dtype no tile is made for.
    """
    if not (1 <= headdim <= 256 and 1 <= headdim_v <= 256):
        raise ValueError(f"headdim and headdim_v must be 1 to 256: headdim={headdim}, headdim_v={headdim_v}")
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"dtype must be float32, float16 or bfloat16: dtype={dtype}")
    row = nearest(arch)
    if row == "sm_100" and dtype.itemsize == 4:  # IEEE products use no matrix unit: nothing is new on this chip
        row = "sm_90"
    return TABLE[row, dtype.itemsize, max(64, padded(headdim), padded(headdim_v))]

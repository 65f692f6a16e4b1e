"""The table of tiles: what it holds, and what lookup makes of an arch, a dtype and head dims."""

import pytest
import torch

from ringflash.kernels import config


def test_every_arch_has_every_row():
    for arch in ("sm_80", "sm_90", "sm_100", "gfx942", "cpu"):
        for itemsize in (2, 4):
            for headdim in (64, 128, 256):
                if (arch, itemsize) != ("sm_100", 4):
                    assert (arch, itemsize, headdim) in config.TABLE


def test_blocks_are_powers_of_two_that_a_dot_takes():
    for tiles in config.TABLE.values():
        for tile in tiles:
            assert all(n >= 16 and n & (n - 1) == 0 for n in tile[:2])
            assert tile.warps in (4, 8)


@pytest.mark.parametrize(("headdim", "padded"), [(1, 16), (16, 16), (17, 32), (80, 128), (128, 128), (129, 256), (256, 256)])
def test_padded(headdim, padded):
    assert config.padded(headdim) == padded


@pytest.mark.parametrize(
    ("arch", "row"),
    [("sm_90", "sm_90"), ("sm_86", "sm_80"), ("sm_103", "sm_100"), ("sm_120", "sm_80"), ("gfx950", "gfx942")],
)
def test_nearest(arch, row):
    assert config.nearest(arch) == row


def test_lookup_takes_the_wider_headdim():
    for dtype in (torch.bfloat16, torch.float32):
        assert config.lookup("sm_90", dtype, 64, 128) is config.TABLE["sm_90", dtype.itemsize, 128]
    assert config.lookup("sm_100", torch.float32, 16, 16) == config.lookup("sm_90", torch.float32, 16, 16)


@pytest.mark.parametrize(("headdim", "headdim_v"), [(0, 16), (257, 16), (16, 300)])
def test_headdim_out_of_range(headdim, headdim_v):
    with pytest.raises(ValueError, match=f"headdim={headdim}, headdim_v={headdim_v}"):
        config.lookup("sm_90", torch.bfloat16, headdim, headdim_v)


def test_refused_dtype_and_arch():
    with pytest.raises(TypeError, match="float64"):
        config.lookup("sm_90", torch.float64, 16, 16)
    with pytest.raises(ValueError, match="arch='tpu'"):
        config.lookup("tpu", torch.bfloat16, 16, 16)

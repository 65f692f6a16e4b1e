"""How the Hopper backward shares its work out: what needs no GPU, the parts of items and the launch that prepares."""

import math
import types
from collections import Counter
from typing import Any

import kernel_cases
import pytest
import torch
from kernel_cases import interpreted, intervals

gluon = pytest.importorskip("triton.experimental.gluon._runtime")

from ringflash.kernels.hopper import backward, backward_copies, config  # noqa: E402
from ringflash.kernels.reference import LOG2E, Segment  # noqa: E402

WAVE = 132
D128 = config.BACKWARD[128]


def cuts(items: int, longest: int, **changes: Any) -> tuple[int, int, int]:
    return backward._cuts(items, WAVE, longest, config.of_launch(D128, **changes)[0])


def in_python(fn: Any) -> Any:
    """A Gluon function on torch tensors."""
    names = {"maximum": lambda x, y: x.clamp(min=y), "where": torch.where, "int32": torch.int32, "int64": torch.int64}
    return types.FunctionType(fn.fn.__code__, {"gl": types.SimpleNamespace(**names)})


def test_the_last_wave_is_cut_so_that_idle_multiprocessors_make_the_second_parts() -> None:
    whole = (0, 1, 1024)
    assert cuts(512, 512) == (116, 2, 915)  # 16 are idle: 8 second parts each, a first part takes about 8/9 of an item
    assert cuts(2048, 2048) == (68, 2, 683)
    assert cuts(2 * WAVE, 512) == whole  # nothing is left over
    assert cuts(256, 256) == whole  # second parts would be too short
    assert cuts(512, 512, DETERMINISTIC=True) == whole


def test_few_items_are_all_cut() -> None:
    assert cuts(128, 128) == (128, 2, 512)
    assert cuts(WAVE, 512) == (WAVE, 2, 512)
    assert cuts(64, 512) == (64, 8, 128)
    assert cuts(1, 512) == (1, 8, 128)
    assert cuts(64, 40) == (64, 2, 512)  # a part has 16 tiles at least
    assert cuts(1, 16) == (0, 1, 1024)
    assert cuts(64, 512, DETERMINISTIC=True) == (0, 1, 1024)


@pytest.mark.parametrize("items", [1, 7, 64, 128, 132, 133, 200, 512, 1024])
def test_parts_are_every_tile_of_every_item_once(items: int) -> None:
    """And each has a place of its own for its sums, and begins where a ring of places does."""
    part_at, part_begin = in_python(backward_copies._part_at), in_python(backward_copies._part_begin)
    cut, parts, share = cuts(items, 1 << 21)
    numbers = [torch.tensor(x) for x in (cut, parts, share)]
    found = list(zip(*(x.tolist() for x in part_at(torch.arange(items + cut * (parts - 1)), items, numbers)), strict=True))
    assert Counter(item for item, _ in found) == {i: parts if i >= items - cut else 1 for i in range(items)}
    assert len(set(found)) == len(found)
    for length in (0, 24, 100, 511, 1 << 21):
        for count in (1, parts):
            bounds = [int(part_begin(torch.tensor(i), torch.tensor(count), numbers[2], torch.tensor(length)))
                      for i in range(parts + 1)]  # fmt: skip
            assert bounds[0] == 0
            assert bounds[count:] == [length] * (parts + 1 - count)
            assert bounds == sorted(bounds)
            assert all(bound % 4 == 0 for bound in bounds[:count])


@pytest.mark.skipif(kernel_cases.INTERPRETED, reason="this is that process")
def test_in_interpreter() -> None:
    kernel_cases.run_interpreted(__file__)


@interpreted
@pytest.mark.parametrize("headdim", config.BACKWARD)
@pytest.mark.parametrize("new", [True, False])
def test_what_the_kernel_is_told(headdim: int, new: bool) -> None:
    """Rows that see each key, statistics, counters at zero, and a new dQ at zero."""
    generator = torch.Generator().manual_seed(headdim)
    begin, end = intervals(300, 500, 1, generator)
    k = torch.zeros(1, 500, 1, headdim)
    lse, delta = torch.randn(2, 1, 4, 300, generator=generator)
    dq = torch.full((1, 300, 4, headdim), torch.nan)
    told: Any = backward._prepared([Segment(k, k, begin, end)], (lse, delta), (0, (begin,), (begin,)), 4, 2.0,
                                   config.BACKWARD[headdim], dq if new else None)  # fmt: skip
    *described, records, counter = told
    rows, spans = (x.base for x in described)
    assert all(math.prod(x.shape) == x.base.numel() for x in described)
    assert not counter.any()
    assert bool((dq == 0).all() if new else dq.isnan().all())
    keys = torch.arange(500)
    sees = (keys >= begin[0, :, None]) & (keys < end[0, :, None])
    first, last = (x.flatten()[:500] for x in spans.view(-1, 2, 128).unbind(1))
    row = torch.arange(300)[:, None]
    assert torch.equal((row >= first) & (row < last), sees)
    assert records.shape == (4, 32)
    stats = rows.view(4, 2, -1)[:, :, :300]
    torch.testing.assert_close(stats[:, 0], -LOG2E * lse[0])
    torch.testing.assert_close(stats[:, 1], -2.0 * delta[0])

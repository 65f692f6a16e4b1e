"""Layouts: each position once, shards ascending, split and join, equality, balance, and the words of every refusal."""

import itertools
import pickle
import re

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ring_cases import LAYOUTS, NAMES, make_layout
from test_plan import masks

import ringflash as rf
from ringflash.plan import make_plan

# Document lengths of two packed training batches
PACKED = {
    16384: (2265, 2090, 56, 607, 1538, 1281, 193, 275, 1033, 148, 560, 80, 743, 130, 823, 4096, 466),
    65536: (
        *(3412, 76, 1544, 338, 121, 938, 1917, 14310, 504, 4285, 32, 438, 703, 300, 2978, 504, 2944, 3126, 177, 568, 641, 544),
        *(221, 230, 1360, 198, 335, 2320, 2063, 736, 126, 40, 865, 682, 2849, 2774, 378, 548, 711, 819, 1443, 5091, 1347),
    ),
}


@st.composite
def layouts(draw: st.DrawFn) -> rf.Layout:
    seqlen, size = draw(st.integers(0, 60)), draw(st.integers(1, 9))
    return make_layout(draw(st.sampled_from(LAYOUTS)), seqlen, size, draw(masks(seqlen)))


@given(layouts())
def test_every_position_lies_on_one_rank_and_shards_ascend(layout: rf.Layout) -> None:
    shards = [layout.positions(rank) for rank in range(layout.size)]
    assert sorted(torch.cat(shards).tolist()) == list(range(layout.seqlen))
    assert all(bool((shard.diff() > 0).all()) for shard in shards)
    assert all(shard.dtype == torch.int64 for shard in shards)
    assert layout.lengths == tuple(map(len, shards))


@given(layouts(), st.integers(0, 9))
def test_shift_moves_every_position(layout: rf.Layout, n: int) -> None:
    shifted = layout.shift(n)
    for rank in range(layout.size):
        assert torch.equal(shifted.positions(rank), layout.positions(rank) + n)
    assert (shifted.offset, shifted.end, shifted.seqlen) == (n, n + layout.seqlen, layout.seqlen)
    assert shifted.shift(-n) == layout
    assert shifted != layout or n == 0
    x = torch.arange(layout.seqlen)
    assert torch.equal(shifted.join(shifted.split(x, 0), 0), x)


@given(layouts(), st.integers(1, 4), st.integers(0, 9))
def test_merged_ranks_hold_what_theirs_held(layout: rf.Layout, n: int, offset: int) -> None:
    layout = layout.shift(offset)
    if layout.size % n:
        with pytest.raises(ValueError, match=f"merged must be given a divisor of the size: n={n}, size={layout.size}"):
            layout.merged(n)
        return
    merged = layout.merged(n)
    assert (merged.size, merged.seqlen, merged.offset) == (layout.size // n, layout.seqlen, offset)
    for rank in range(merged.size):
        ranks = range(rank * n, rank * n + n)
        positions = torch.cat([layout.positions(r) for r in ranks])
        assert torch.equal(merged.positions(rank), positions.sort().values)
        assert torch.equal(positions[torch.from_numpy(layout.order(ranks))], merged.positions(rank))


@given(layouts())
def test_all_ranks_merged_are_one(layout: rf.Layout) -> None:
    one = layout.merged(layout.size)
    assert one == rf.layouts.contiguous(layout.seqlen, 1)
    assert hash(one) == hash(rf.layouts.contiguous(layout.seqlen, 1))
    assert layout.merged(1) is layout
    assert layout.merged(layout.size) is one


def test_neighbours_of_plain_layouts_merge_into_plain_layouts() -> None:
    for name in ("contiguous", "zigzag"):
        assert getattr(rf.layouts, name)(64, 8).merged(2) == getattr(rf.layouts, name)(64, 4)


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
@given(layout=layouts())
def test_split_and_join_round_trip_along_any_dimension(layout: rf.Layout, dim: int) -> None:
    x = torch.arange(layout.seqlen).view([-1 if i == dim % 3 else 1 for i in range(3)]) + torch.zeros(1, dtype=torch.long)
    x = x.expand([layout.seqlen if i == dim % 3 else 2 for i in range(3)])
    parts = layout.split(x, dim)
    assert all(torch.equal(part, x.index_select(dim, layout.positions(r))) for r, part in enumerate(parts))
    assert torch.equal(layout.join(parts, dim), x)


@given(layout=layouts())
def test_gradients_return_to_their_positions(layout: rf.Layout) -> None:
    x = torch.randn(2, layout.seqlen, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, layout.seqlen, dtype=torch.float64)
    (layout.join(layout.split(x)) * weight).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, weight)


def test_e4_positions_of_several_axes_through_split_and_join() -> None:
    positions = torch.arange(33).expand(3, 33)
    layout = rf.layouts.zigzag(33, 4)
    assert torch.equal(layout.join(layout.split(positions)), positions)


def test_e1_documents_sharded_each() -> None:
    layout = rf.layouts.per_document("zigzag", (0, 4, 8), 2)
    assert [layout.positions(rank).tolist() for rank in range(2)] == [[0, 3, 4, 7], [1, 2, 5, 6]]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("contiguous", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("zigzag", [[0, 1, 6, 7], [2, 3, 4, 5]]),
        ("striped", [[0, 2, 4, 6], [1, 3, 5, 7]]),
    ],
)
def test_what_the_names_mean(name: str, expected: list[list[int]]) -> None:
    layout = getattr(rf.layouts, name)(8, 2)
    assert [layout.positions(rank).tolist() for rank in range(2)] == expected
    assert rf.layouts.named(name, 8, 2) == layout


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(
    ("seqlen", "size"),
    [(0, 8), (1, 8), (3, 8), (57, 8), (129, 2), (33, 4), (2999, 4), *((n, 1) for n in (1, 2, 7, 8, 15, 16, 17)), (8, 8)],
)
def test_c9_c10_c11_c14_any_length_is_held_whole(name: str, seqlen: int, size: int) -> None:
    layout = make_layout(name, seqlen, size, rf.Mask(causal=True))
    x = torch.randn(2, seqlen, 3)
    assert torch.equal(layout.join(layout.split(x)), x)
    assert sum(layout.lengths) == seqlen


@pytest.mark.parametrize("name", NAMES)
@given(seqlen=st.integers(0, 300), size=st.integers(1, 16))
def test_named_layouts_hold_equal_numbers_of_tokens(name: str, seqlen: int, size: int) -> None:
    lengths = rf.layouts.named(name, seqlen, size).lengths
    assert max(lengths) - min(lengths) <= (2 if name == "zigzag" else 1)


def test_layouts_hash_and_compare_by_positions() -> None:
    alike = {
        rf.layouts.zigzag(12, 2),
        rf.layouts.per_document("zigzag", (0, 12), 2),
        rf.layouts.per_document("zigzag", torch.tensor([0, 0, 12, 12]), 2),
    }
    assert len(alike) == 1
    assert rf.layouts.striped(8, 8) == rf.layouts.contiguous(8, 8)
    assert rf.layouts.zigzag(12, 2) not in (rf.layouts.zigzag(12, 3), rf.layouts.zigzag(13, 2), "zigzag")
    assert rf.layouts.contiguous(0, 2) != rf.layouts.contiguous(0, 3)
    assert repr(rf.layouts.zigzag(12, 2).shift(3)) == "Layout(zigzag, seqlen=12, size=2, offset=3)"


def work(layout: rf.Layout, mask: rf.Mask) -> np.ndarray:
    """Visible pairs of each rank."""
    rows = mask.row_work(layout.seqlen)
    return np.array([rows[layout.positions(rank).numpy()].sum() for rank in range(layout.size)])


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("seqlen", PACKED)
@pytest.mark.parametrize("window", [None, (512, 0)], ids=str)
def test_balanced_is_within_3_percent_on_packed_lengths(seqlen: int, size: int, window: tuple[int, int] | None) -> None:
    mask = rf.Mask(causal=True, window=window, documents=(0, *np.cumsum(PACKED[seqlen]).tolist()))
    layout = rf.layouts.balanced(mask, seqlen, size)
    shares = work(layout, mask)
    assert shares.max() / shares.mean() < 1.03
    assert max(layout.lengths) - min(layout.lengths) <= 256  # two chunks' rounding
    assert shares.tolist() == [make_plan(layout, mask).work(rank).sum() for rank in range(size)]


@pytest.mark.parametrize("mask", [rf.Mask(), rf.Mask(causal=True), rf.Mask(causal=True, prefix=3000)], ids=repr)
def test_balanced_serves_masks_without_documents(mask: rf.Mask) -> None:
    shares = work(rf.layouts.balanced(mask, 32768, 4), mask)
    assert shares.max() / shares.mean() < 1.03


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("seqlen", [1024, 2999, 4096])
def test_zigzag_balances_a_causal_mask(seqlen: int, size: int) -> None:
    shares = work(rf.layouts.zigzag(seqlen, size), rf.Mask(causal=True))
    assert shares.max() / shares.mean() < 1 + 4 * size / seqlen
    assert work(rf.layouts.contiguous(seqlen, size), rf.Mask(causal=True)).max() / shares.mean() > 1.4


@pytest.mark.parametrize("kind", NAMES)
def test_per_document_is_the_layout_of_each_document(kind: str) -> None:
    bounds = (0, 5, 5, 6, 23, 40)
    layout = rf.layouts.per_document(kind, bounds, 3)
    for rank in range(3):
        each = [rf.layouts.named(kind, b - a, 3).positions(rank) + a for a, b in itertools.pairwise(bounds)]
        assert torch.equal(layout.positions(rank), torch.cat(each))


def test_balanced_sees_documents_of_all_batch_rows() -> None:
    mask = rf.Mask(causal=True, documents=((0, 100, 4096), (0, 3000, 4096)))
    position = torch.arange(4096)
    expected = oracle.visible(mask, position, position).sum((0, 2))
    shares = [expected[rf.layouts.balanced(mask, 4096, 2).positions(rank)].sum() for rank in range(2)]
    assert max(shares) / (sum(shares) / 2) < 1.03


@pytest.mark.parametrize(
    ("kind", "call", "words"),
    [
        (ValueError, lambda: rf.layouts.zigzag(-1, 2), "seqlen must be in 0 ... 2**40: seqlen=-1"),
        (ValueError, lambda: rf.layouts.striped(4, 0), "size must be in 1 ... 2**40: size=0"),
        (TypeError, lambda: rf.layouts.named("zigzag", "4", 2), "seqlen must be an int: seqlen='4'"),  # pyright: ignore
        (TypeError, lambda: rf.layouts.contiguous(4, True), "size must be an int: size=True"),
        (
            ValueError,
            lambda: rf.layouts.named("ring", 4, 2),
            "layout must be one of 'contiguous', 'zigzag', 'striped' or an rf.",
        ),
        (
            ValueError,
            lambda: rf.layouts.per_document("ring", (0, 4), 2),
            "layout must be one of 'contiguous', 'zigzag', 'striped'",
        ),
        (ValueError, lambda: rf.layouts.per_document("zigzag", (1, 4), 2), "must start at 0"),
        (ValueError, lambda: rf.layouts.per_document("zigzag", ((0, 4), (0, 4)), 2), "cu_seqlens must be one list of lengths"),
        (ValueError, lambda: rf.layouts.balanced(rf.Mask(documents=(0, 4)), 8, 2), "documents must end at the sequence length"),
        (ValueError, lambda: rf.layouts.balanced(rf.Mask(), 8, 0), "size must be in 1 ... 2**40: size=0"),
        (ValueError, lambda: rf.layouts.zigzag(4, 2).positions(2), "rank must be in 0 ... size-1: rank=2, size=2"),
        (ValueError, lambda: rf.layouts.zigzag(4, 2).shift(-1), "shift must keep positions in 0 ... 2**40: shift=-1"),
        (ValueError, lambda: rf.layouts.zigzag(4, 2).part(torch.zeros(1, 5), 0), "x must hold the whole sequence along dim=1"),
        (
            ValueError,
            lambda: rf.layouts.zigzag(4, 2).join([torch.zeros(1, 2)]),
            "parts must have the layout's lengths along dim=1",
        ),
    ],
)
def test_refusals_are_worded(kind: type[Exception], call: object, words: str) -> None:
    assert callable(call)
    with pytest.raises(kind, match=re.escape(words)):
        call()


def test_layouts_are_frozen() -> None:
    with pytest.raises(AttributeError):
        rf.layouts.zigzag(4, 2).seqlen = 5  # pyright: ignore[reportAttributeAccessIssue]


def test_a_pickled_layout_is_hashed_anew() -> None:
    layout = rf.layouts.zigzag(21, 2).shift(3)
    object.__setattr__(layout, "_hash", 1)  # as another process had it
    twin = pickle.loads(pickle.dumps(layout))
    assert twin == layout
    assert hash(twin) == hash(rf.layouts.zigzag(21, 2).shift(3))

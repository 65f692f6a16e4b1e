"""Interval arithmetic: rows, key tables, local intervals and pairs against counting one by one."""

import numpy as np
import oracle
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_layout import layouts
from test_plan import masks

import ringflash as rf
from ringflash.intervals import SAMPLED, KeyTable, about_pairs, local_intervals, needed_blocks, row_pieces, visible_pairs


@given(layouts(), st.integers(0, 5), st.integers(0, 5))
def test_index_counts_the_keys_before_a_position(layout: rf.Layout, front: int, behind: int) -> None:
    layout = layout.shift(front)
    extent = layout.end + behind
    keys = KeyTable(layout.runs, extent)
    position = np.arange(extent + 1)
    for block in range(layout.size):
        expected = np.searchsorted(layout.positions(block).numpy(), position)
        assert keys.index(np.array(block), position).tolist() == expected.tolist()


@given(st.data(), layouts())
def test_row_pieces_are_the_masks_intervals_of_a_ranks_positions(data: st.DataObject, layout: rf.Layout) -> None:
    mask = data.draw(masks(layout.seqlen))
    position = torch.arange(layout.seqlen)
    for pieces, sees in zip(mask.pieces(layout.seqlen), oracle.visible(mask, position, position), strict=True):
        rows = row_pieces(layout.runs, pieces)
        assert rows.rank.tolist() == sorted(rows.rank.tolist())
        assert bool((rows.n > 0).all())
        for rank in range(layout.size):
            each = rows.of(rank).expand()
            begin, end = (torch.from_numpy(x)[:, None] for x in (each.begin, each.end))
            assert torch.equal((position >= begin) & (position < end), sees[layout.positions(rank)])


@given(st.data(), layouts())
def test_expand_leaves_whole_what_it_is_told_to(data: st.DataObject, layout: rf.Layout) -> None:
    rows = row_pieces(layout.runs, data.draw(masks(layout.seqlen)).pieces(layout.seqlen)[0])
    whole = np.array(data.draw(st.lists(st.booleans(), min_size=len(rows.n), max_size=len(rows.n))), dtype=bool)
    mixed, each = rows.expand(whole), rows.expand()
    assert mixed.n.sum() == each.n.sum() == layout.seqlen
    assert len(mixed.n) == np.where(whole, 1, rows.n).sum()
    assert all(a.tolist() == b.tolist() for a, b in zip(mixed.expand(), each, strict=True))


@given(st.data(), layouts())
def test_local_intervals_and_pairs_are_the_mask_cut_to_each_block(data: st.DataObject, layout: rf.Layout) -> None:
    mask = data.draw(masks(layout.seqlen))
    position = torch.arange(layout.seqlen)
    sees = oracle.visible(mask, position, position)
    keys = KeyTable(layout.runs, layout.seqlen)
    rows = [row_pieces(layout.runs, pieces) for pieces in mask.pieces(layout.seqlen)]
    needs = np.logical_or.reduce([needed_blocks(r, keys, layout.size) for r in rows])
    for rank in range(layout.size):
        mine, blocks = [r.of(rank) for r in rows], range(layout.size)
        found = local_intervals(mine, keys, seqlen_q=layout.lengths[rank], blocks=blocks, device=torch.device("cpu"))
        pairs = visible_pairs(mine, keys, layout.size)
        for block in blocks:
            cut = sees[:, layout.positions(rank)][:, :, layout.positions(block)]
            index = torch.arange(cut.shape[2])
            begin, end = found[block]
            assert begin.dtype == end.dtype == torch.int32
            assert begin.is_contiguous()
            assert end.is_contiguous()
            assert torch.equal((index >= begin[..., None]) & (index < end[..., None]), cut)
            assert int(pairs[block]) == int(cut.sum())
            assert bool(needs[rank, block]) == bool(cut.any())


def test_positions_past_32_bits() -> None:
    seqlen, size = 3 << 31, 4
    layout, mask = rf.layouts.zigzag(seqlen, size), rf.Mask(causal=True, window=(10, 0))
    keys = KeyTable(layout.runs, seqlen)
    rows = row_pieces(layout.runs, mask.pieces(seqlen)[0])
    needs = needed_blocks(rows, keys, size)
    assert needs.tolist() == [[abs(r - b) == 1 or r == b for b in range(size)] for r in range(size)]
    assert keys.index(np.array(0), np.array([seqlen, seqlen - 1])).tolist() == [seqlen // 4, seqlen // 4 - 1]


@given(st.data(), layouts())
def test_pairs_of_sampled_rows_are_about_all_pairs(data: st.DataObject, layout: rf.Layout) -> None:
    """Of fewer rows than are sampled, and so of each row about as often as any other."""
    mask = data.draw(masks(layout.seqlen))
    keys = KeyTable(layout.runs, layout.end)
    rows = [row_pieces(layout.runs, pieces) for pieces in mask.pieces(layout.end)]
    about = about_pairs(rows, keys, layout.size)
    for rank in range(layout.size):
        exact = visible_pairs([r.of(rank) for r in rows], keys, layout.size)
        assert np.abs(about[rank] - exact).sum() <= len(rows) * layout.seqlen * layout.lengths[rank] / SAMPLED * layout.seqlen

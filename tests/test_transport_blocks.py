"""Blocks: how large each rank's K and V are, and that they lie one behind the other without a gap."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringflash.transport.blocks import Hops, Moving, Nothing, Shapes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@st.composite
def shapes(draw: st.DrawFn) -> Shapes:
    """Of one rank of up to five, some of whose blocks may be empty."""
    lengths = tuple(draw(st.lists(st.integers(0, 30), min_size=1, max_size=5)))
    batch, nheads, headdim, headdim_v = draw(st.integers(0, 3)), *(draw(st.integers(1, 9)) for _ in range(3))
    rank, dtype = draw(st.integers(0, len(lengths) - 1)), draw(st.sampled_from(DTYPES))
    k, v = (torch.zeros(batch, lengths[rank], nheads, d, dtype=dtype) for d in (headdim, headdim_v))
    return Shapes((k, v), lengths)


@given(shapes())
def test_sizes(x: Shapes) -> None:
    per_token = x.k.shape[0] * x.k.shape[2] * (x.k.shape[3] + x.v.shape[3])
    assert [x.elements_of(block) for block in range(len(x.lengths))] == [per_token * n for n in x.lengths]
    assert x.elements == per_token * max(x.lengths)
    for nbytes, each in ((x.block_bytes, x.k.element_size()), (x.grads_bytes, 4)):
        assert nbytes % 256 == 0
        assert 0 <= nbytes - x.elements * each < 256 or (nbytes, x.elements) == (256, 0)


@given(shapes())
def test_all_ranks_find_the_same_sizes(x: Shapes) -> None:
    """Buffers that are made together must be of one size, whose block this rank's may be."""
    for n in x.lengths:
        other = x._replace(parts=tuple(y.new_zeros(y.shape[0], n, *y.shape[2:]) for y in (x.k, x.v)))
        assert (other.block_bytes, other.grads_bytes, other.elements) == (x.block_bytes, x.grads_bytes, x.elements)


@given(shapes(), st.sampled_from([None, torch.float32]))
def test_room_for_a_block(x: Shapes, dtype: torch.dtype | None) -> None:
    for block, n in enumerate(x.lengths):
        for room, like in zip(x.empty(block, dtype), (x.k, x.v), strict=True):
            assert room.shape == (like.shape[0], n, *like.shape[2:])
            assert (room.dtype, room.is_contiguous()) == (dtype or like.dtype, True)


@given(shapes())
def test_a_pair_is_a_view_without_a_gap(x: Shapes) -> None:
    memory = torch.arange(x.elements + 3, dtype=torch.float64)
    for block, n in enumerate(x.lengths):
        k, v = x.pair(memory, block)
        assert (k.shape[1], v.shape[1]) == (n, n)
        assert (k.is_contiguous(), v.is_contiguous()) == (True, True)
        flat = torch.cat([k.flatten(), v.flatten()])
        assert torch.equal(flat, memory[: x.elements_of(block)])
        if flat.numel():
            assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()


@pytest.mark.parametrize("lengths", [(100,), (7, 100), (7, 100, 0, 3, 99)])
def test_buffers_of_a_rank_that_gathers(lengths: tuple[int, ...]) -> None:
    """One head, 64 + 64 wide, bfloat16: two blocks for the others to read, theirs, and partial dK/dV both ways."""
    k = torch.zeros(1, lengths[0], 1, 64, dtype=torch.bfloat16)
    block, grads = 100 * 128 * 2, 100 * 128 * 4
    assert Shapes((k, k), lengths).buffer_bytes == 2 * block + (len(lengths) - 1) * (block + 2 * grads)


def test_nothing_to_wait_for() -> None:
    assert Hops((), (), (), ())[4:] == (False, False), "a rank that neither sends nor receives may still take part"
    moving = Moving({}, [], Nothing(), {})
    moving.pending.wait()

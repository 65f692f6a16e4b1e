"""How the Hopper forward shares its work out: what needs no GPU, how many programs there are and how many items each takes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

gluon = pytest.importorskip("triton.experimental.gluon._runtime")

from ringflash.kernels.hopper import config, forward  # noqa: E402

WAVE = 132
D128 = config.FORWARD[128, 128]


def shared_out(seqlen: int, nheads: int = 32) -> tuple[int, int, int]:
    """(programs, items, how many of them a program takes at most) where queries see as many keys."""
    grid, items, sizes = forward._sizes((1, seqlen, nheads, 128), nheads, (seqlen,), WAVE, D128)
    return grid, items, sizes[6]


def test_programs_take_more_items_where_keys_are_few() -> None:
    assert shared_out(1024) == (WAVE, 256, 16)
    assert shared_out(8192) == (256, 2048, 16)
    assert shared_out(16384) == (512 + WAVE, 4096, 8)
    assert shared_out(32768) == (2048 + WAVE, 8192, 4)
    assert shared_out(1 << 20, 1) == (2048 + WAVE, 8192, 4)
    assert shared_out(128, 5) == (5, 5, 16), "no program without an item"


@given(
    st.tuples(st.integers(1, 3), st.integers(1, 1 << 20), st.integers(1, 8)),
    st.integers(1, 5),
    st.lists(st.integers(1, 1 << 18), min_size=1, max_size=8),
    st.sampled_from(sorted(config.FORWARD)),
    st.booleans(),
)
def test_programs_have_room_for_all_items(
    shape: tuple[int, int, int], group: int, lengths: list[int], headdims: tuple[int, int], waits: bool
) -> None:
    (batch, seqlen_q, nheads_k), c = shape, replace(config.FORWARD[headdims], WAITS=int(waits))
    q_shape = batch, seqlen_q, nheads_k * group, headdims[0]
    grid, items, sizes = forward._sizes(q_shape, nheads_k, tuple(lengths), WAVE, c)
    *_, heads, chunk, also_items, most = sizes
    assert also_items == items == -(-seqlen_q // c.BLOCK_Q) * heads
    assert items <= grid * most, "the last item is somebody's"
    assert grid <= items
    assert most <= c.ITEMS, "what a program has room for"
    assert group <= chunk <= heads
    assert chunk % group == 0, "the rows of a key head go together"
    if waits:
        assert chunk <= group * -(-nheads_k // 2)

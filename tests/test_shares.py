"""Shares: every query head on one rank, even numbers, and groups as the tile wants them."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringflash.shares import Share, are_shared, shares


@given(st.integers(1, 12), st.integers(1, 9), st.integers(1, 17))
def test_every_query_head_has_a_rank_and_finds_its_key_head(group: int, nheads_k: int, size: int) -> None:
    every = shares(group * nheads_k, nheads_k, size)
    assert [head for share in every for head in share.q] == list(range(group * nheads_k))
    numbers = [len(share.q) for share in every]
    assert (len(every), max(numbers) - min(numbers) <= 1) == (size, True)
    for share in every:
        assert list(share.k) == sorted({head // group for head in share.q})
        attended = list(itertools.chain.from_iterable([head] * n for head, n in zip(share.k, share.repeats, strict=True)))
        if share.q:
            assert len(share.q) % len(attended) == 0
            each = len(share.q) // len(attended)
            assert [attended[i // each] for i in range(len(share.q))] == [head // group for head in share.q]
    holders = [sum(head in share.k for share in every) for head in range(nheads_k)]
    assert min(holders) >= 1
    assert are_shared(every, nheads_k) == (max(holders) > 1)


@given(st.integers(1, 12), st.integers(1, 9), st.integers(1, 6))
def test_keys_stand_once_where_sizes_divide(group: int, nheads_k: int, times: int) -> None:
    for n, size in ((nheads_k * times, times), (nheads_k, nheads_k * times)):
        for share in shares(group * n, n, size):
            assert set(share.repeats) <= {1}
    assert not are_shared(shares(group * nheads_k * times, nheads_k * times, times), nheads_k * times)


@pytest.mark.parametrize(
    ("heads", "size", "share"),
    [
        ((8, 2), 4, Share(range(2, 4), range(0, 1), (1,))),
        ((6, 3), 2, Share(range(3, 6), range(1, 3), (1, 2))),
        ((28, 4), 8, Share(range(3, 7), range(0, 1), (1,))),
        ((3, 3), 4, Share(range(0, 1), range(0, 1), (1,))),
        ((12, 2), 2, Share(range(6, 12), range(1, 2), (1,))),
        ((16, 2), 3, Share(range(5, 10), range(0, 2), (3, 2))),
    ],
)
def test_of_the_second_rank(heads: tuple[int, int], size: int, share: Share) -> None:
    assert shares(*heads, size)[1] == share


def test_of_more_ranks_than_heads_some_have_none() -> None:
    assert shares(3, 3, 4)[0] == Share(range(0), range(0), ())


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 5))
def test_summed_is_the_gradient_of_repeated(group: int, nheads_k: int, size: int) -> None:
    for share in shares(group * nheads_k, nheads_k, size):
        x = torch.randn(2, 3, len(share.k), 4, dtype=torch.float64, requires_grad=True)
        repeated = share.repeated(x) if share.q else x
        grad = torch.randn_like(repeated)
        (wanted,) = torch.autograd.grad(repeated, x, grad) if repeated is not x else (grad,)
        torch.testing.assert_close(share.summed(grad) if share.q else grad, wanted)

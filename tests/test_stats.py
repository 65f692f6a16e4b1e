"""The state algebra: identity, order, logarithms, rounding once; and the reference kernel's states are the same states."""

import itertools
import math

import oracle
import pytest
import torch
from torch import Tensor

from ringflash import stats
from ringflash.kernels import reference
from ringflash.stats import LN2, LOG2E, State

SHAPE = (2, 5, 4, 8)  # batch, seqlen_q, nheads_q, headdim_v


def state_of(q: Tensor, k: Tensor, v: Tensor, keys: slice = slice(None)) -> State:
    """The state of some keys, from its definition: x = log2(e) * q.k, unnormalised, float32."""
    x = torch.einsum("bqhd,bkhd->bhqk", q, k[:, keys]) * LOG2E
    top = x.amax(-1) if x.shape[-1] else torch.full(x.shape[:3], -math.inf)
    p = torch.exp2(x - top[..., None])
    return State(torch.einsum("bhqk,bkhd->bqhd", p, v[:, keys]), top, p.sum(-1))


def inputs(seqlen_k: int = 24, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    batch, seqlen_q, nheads, headdim = SHAPE
    shapes = ((batch, seqlen_q, nheads, headdim), *[(batch, seqlen_k, nheads, headdim)] * 2)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return q, k, v


def same(a: State, b: State, rtol: float = 1e-5) -> None:
    """Equal up to rounding, whatever their maxima."""
    for x, y in zip(stats.finish(a, torch.float32), stats.finish(b, torch.float32), strict=True):
        torch.testing.assert_close(x, y, rtol=rtol, atol=rtol)


def test_a1_two_empty_states_merge_to_an_empty_state() -> None:
    merged = stats.merge(stats.empty(SHAPE), stats.empty(SHAPE))
    assert all(torch.equal(x, y) for x, y in zip(merged, stats.empty(SHAPE), strict=True))
    out, lse = stats.finish(merged, torch.bfloat16)
    assert torch.equal(out, torch.zeros(SHAPE, dtype=torch.bfloat16))
    assert torch.equal(lse, torch.full((2, 4, 5), -math.inf))


@pytest.mark.parametrize("swap", [False, True])
def test_a2_the_empty_state_is_the_identity_bit_for_bit(swap: bool) -> None:
    a, b = state_of(*inputs()), stats.empty(SHAPE)
    merged = stats.merge(b, a) if swap else stats.merge(a, b)
    assert all(torch.equal(x, y) for x, y in zip(merged, a, strict=True))


def test_merge_is_commutative_and_associative_up_to_rounding() -> None:
    qkv = inputs()
    parts = [state_of(*qkv, slice(i, i + 8)) for i in (0, 8, 16)]
    whole = state_of(*qkv)
    for a, b, c in itertools.permutations(parts):
        same(stats.merge(stats.merge(a, b), c), whole)
        same(stats.merge(a, stats.merge(b, c)), whole)


@pytest.mark.parametrize("gain", [1e-3, 1.0, 1e3, 1e18])
def test_finite_inputs_never_make_nan_or_inf(gain: float) -> None:
    q, k, v = inputs()
    parts = [state_of(q * gain, k, v, slice(i, i + 8)) for i in (0, 8)]
    merged = stats.merge(stats.merge(parts[0], stats.empty(SHAPE)), parts[1])
    assert all(bool(x.isfinite().all()) for x in (*merged, *stats.finish(merged, torch.float32)))


def test_rows_are_merged_each_for_itself() -> None:
    a, b = state_of(*inputs(seed=1)), state_of(*inputs(seed=2))
    hole = State(a.acc.clone(), a.max.clone(), a.sum.clone())
    hole.acc[:, 3], hole.max[:, :, 3], hole.sum[:, :, 3] = 0.0, -math.inf, 0.0
    merged = stats.merge(hole, b)
    assert torch.equal(merged.acc[:, 3], b.acc[:, 3])
    assert torch.equal(merged.sum[:, :, 3], b.sum[:, :, 3])
    assert torch.equal(merged.acc[:, :3], stats.merge(a, b).acc[:, :3])


def test_a5_natural_at_the_border_and_base_2_inside() -> None:
    def partial(total: float, value: float) -> State:
        return stats.from_border(torch.full((1, 1, 1, 1), value), torch.full((1, 1, 1), math.log(total)))

    out, lse = stats.finish(stats.merge(partial(2.0, 1.0), partial(8.0, 0.0)), torch.float32)
    assert float(out) == pytest.approx(0.2)
    assert float(lse) == pytest.approx(math.log(10.0))
    assert partial(8.0, 0.0).max.item() == pytest.approx(3.0)
    assert pytest.approx(1.0) == LN2 * LOG2E


def test_from_border_is_the_inverse_of_finish_and_keeps_empty_rows_empty() -> None:
    a = state_of(*inputs())
    same(stats.from_border(*stats.finish(a, torch.float32)), a)
    out = torch.full(SHAPE, math.nan)  # whatever an empty row holds
    back = stats.from_border(out, torch.full((2, 4, 5), -math.inf))
    assert all(torch.equal(x, y) for x, y in zip(back, stats.empty(SHAPE), strict=True))


def test_states_are_float32_whatever_the_inputs() -> None:
    assert {x.dtype for x in stats.empty(SHAPE)} == {torch.float32}
    out, lse = stats.finish(state_of(*inputs()), torch.float16)
    assert (out.dtype, lse.dtype) == (torch.float16, torch.float32)


@pytest.mark.parametrize("parts", [2, 4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_unnormalised_float32_partials_have_the_single_kernels_rms(dtype: torch.dtype, parts: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 512, 4, 32, generator=generator).to(dtype) for _ in range(3))
    exact, _ = oracle.attention(q, k, v, torch.ones(1, 512, 512, dtype=torch.bool))

    def state(keys: slice) -> State:
        full = torch.full((1, 512), len(range(512)[keys]), dtype=torch.int32)
        segment = reference.Segment(k[:, keys], v[:, keys], torch.zeros_like(full), full)
        return State(*reference.forward(q, [segment], 32**-0.5, finish=False))

    length = 512 // parts
    merged = stats.empty((1, 512, 4, 32))
    for i in range(parts):
        merged = stats.merge(merged, state(slice(i * length, (i + 1) * length)))
    one = oracle.rms(stats.finish(state(slice(None)), dtype)[0], exact)
    assert oracle.rms(stats.finish(merged, dtype)[0], exact) <= 1.05 * one


def test_the_reference_kernels_states_are_these_states() -> None:
    q, k, v = inputs()
    full = torch.full((1, 5), 24, dtype=torch.int32)
    acc, row_max, row_sum = reference.forward(q, [reference.Segment(k, v, torch.zeros_like(full), full)], 1.0, finish=False)
    same(State(acc, row_max, row_sum), state_of(q, k, v))
    torch.testing.assert_close(row_max, state_of(q, k, v).max)
    for x, y in zip(reference.empty_state(q.shape, q.device), stats.empty(SHAPE), strict=True):
        assert torch.equal(x, y)
    for x, y in zip(
        reference.finish_state((acc, row_max, row_sum), q.dtype),
        stats.finish(State(acc, row_max, row_sum), q.dtype),
        strict=True,
    ):
        assert torch.equal(x, y)

"""The specification of the tile contract against dense float64: segments, carried state, poison, empty rows, linear memory."""

import math
import threading

import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Results
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ringflash.kernels import reference
from ringflash.kernels.reference import Segment


def intervals(rows: int, keys: int, batch: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random non-decreasing intervals, some empty."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(0, keys + 1, (batch, rows), generator=generator).sort(-1).values for _ in range(2))
    return torch.minimum(a, b).int(), torch.maximum(a, b).int()


def sees(begin: Tensor, end: Tensor, keys: int) -> Tensor:
    index = torch.arange(keys)
    return (index >= begin[..., None]) & (index < end[..., None])


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tile(q: Tensor, segments: list[Segment], dout: Tensor, dlse: Tensor, scale: float) -> tuple[Results, list]:
    """The reference's results for all segments in one call, gradients per segment side by side."""
    out, lse = reference.forward(q, segments, scale)
    dq = torch.zeros(q.shape)
    dkv = [(torch.zeros(s.k.shape), torch.zeros(s.v.shape)) for s in segments]
    reference.backward(dout, q, segments, lse, reference.delta(dout, out, dlse), scale, dq, dkv)
    return Results(out, lse, dq, *(torch.cat(x, 1) for x in zip(*dkv, strict=True))), dkv


def compare(found: Results, exact: Results, eps: float = 2**-23) -> None:
    for name, x, y in zip(Results._fields, found, exact, strict=True):
        assert oracle.rms(x, y) <= 16 * eps * max(oracle.norm(y), 1e-3), name


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1), (28, 7)], ids=str)
@pytest.mark.parametrize("headdim", [(16, 16), (1, 3), (24, 8), (8, 40)], ids=str)
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (7, 63), (300, 100), (100, 1025)])
def test_forward_and_backward_against_dense(heads: tuple[int, int], headdim: tuple[int, int], rows: int, keys: int) -> None:
    q, k = normal(2, rows, heads[0], headdim[0]), normal(2, keys, heads[1], headdim[0], seed=1)
    v, dout = normal(2, keys, heads[1], headdim[1], seed=2), normal(2, rows, heads[0], headdim[1], seed=3)
    dlse = normal(2, heads[0], rows, seed=4)
    begin, end = intervals(rows, keys, batch=2)
    found, _ = tile(q, [Segment(k, v, begin, end)], dout, dlse, 0.3)
    compare(found, oracle.results((q, k, v), (dout, dlse), sees(begin, end, keys), 0.3))


@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.integers(0, 20), st.integers(1, 2), st.integers(0, 99))
@settings(max_examples=50)
def test_segments_are_one_set_of_keys(keys: list[int], rows: int, batch: int, seed: int) -> None:
    q, dout, dlse = normal(2, rows, 4, 8), normal(2, rows, 4, 4, seed=3), normal(2, 4, rows, seed=4)
    k, v = normal(2, sum(keys), 2, 8, seed=1), normal(2, sum(keys), 2, 4, seed=2)
    cuts = [intervals(rows, n, batch, seed + i) for i, n in enumerate(keys)]
    segments = [Segment(k, v, *cut) for k, v, cut in zip(k.split(keys, 1), v.split(keys, 1), cuts, strict=True)]
    visible = torch.cat([sees(*cut, n) for cut, n in zip(cuts, keys, strict=True)], -1)
    found, _ = tile(q, segments, dout, dlse, 0.35)
    compare(found, oracle.results((q, k, v), (dout, dlse), visible, 0.35))


def test_one_segment_per_call_carrying_the_state_is_all_in_one_call_bit_for_bit() -> None:
    q, k, v = normal(1, 33, 4, 16), normal(1, 90, 2, 16, seed=1), normal(1, 90, 2, 8, seed=2)
    segments = [Segment(*x, *intervals(33, 30, seed=i)) for i, x in enumerate(zip(k.split(30, 1), v.split(30, 1), strict=True))]
    state = None
    for i, segment in enumerate(segments):
        state = reference.forward(q, [segment], 0.25, state, finish=i == 2)  # pyright: ignore[reportArgumentType]
    assert state is not None
    assert all(torch.equal(x, y) for x, y in zip(state, reference.forward(q, segments, 0.25), strict=True))


def test_the_storage_of_the_state_is_reused() -> None:
    q, k, v = normal(1, 5, 2, 8), normal(1, 9, 2, 8, seed=1), normal(1, 9, 2, 8, seed=2)
    state = reference.empty_state(q.shape, q.device)
    after = reference.forward(q, [Segment(k, v, *intervals(5, 9))], 0.3, state, finish=False)
    assert [x.data_ptr() for x in after] == [x.data_ptr() for x in state]


def test_a4_a_segment_that_no_row_sees_leaves_the_state_untouched() -> None:
    q, k, v = normal(1, 5, 2, 8), normal(1, 9, 2, 8, seed=1), normal(1, 9, 2, 8, seed=2)
    state = reference.forward(q, [Segment(k, v, *intervals(5, 9))], 0.3, finish=False)
    before = [x.clone() for x in state]
    nothing = torch.full((1, 5), 4, dtype=torch.int32)
    state = reference.forward(q, [Segment(k * math.nan, v * math.nan, nothing, nothing)], 0.3, state, finish=False)  # pyright: ignore[reportArgumentType]
    assert all(torch.equal(x, y) for x, y in zip(state, before, strict=True))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_keys_that_no_row_sees_have_no_influence_whatever_they_hold(poison: float) -> None:
    rows, keys = 40, 700
    q, dout, dlse = normal(1, rows, 2, 8), normal(1, rows, 2, 8, seed=3), normal(1, 2, rows, seed=4)
    k, v = normal(1, keys, 1, 8, seed=1), normal(1, keys, 1, 8, seed=2)
    i = torch.arange(rows, dtype=torch.int32)[None]
    begin, end = torch.where(i < 20, 5, 560) + i // 3, torch.where(i < 20, 30, 600) + i  # a gap between, a tail behind
    clean, _ = tile(q, [Segment(k, v, begin, end)], dout, dlse, 0.3)
    unseen = ~sees(begin, end, keys).any(1)[0]
    assert 0 < int(unseen.sum()) < keys
    k, v = k.clone(), v.clone()
    k[:, unseen] = v[:, unseen] = poison
    poisoned, (grads,) = tile(q, [Segment(k, v, begin, end)], dout, dlse, 0.3)
    assert all(torch.equal(x, y) for x, y in zip(clean, poisoned, strict=True))
    assert all(bool((x[:, unseen] == 0).all()) for x in grads)


def test_a3_rows_without_keys() -> None:
    q, k, v = normal(1, 6, 2, 8), normal(1, 9, 2, 8, seed=1), normal(1, 9, 2, 8, seed=2)
    begin, end = torch.tensor([[0, 2, 2, 3, 9, 9]]).int(), torch.tensor([[0, 2, 5, 7, 9, 9]]).int()
    found, _ = tile(q, [Segment(k, v, begin, end)], normal(1, 6, 2, 8, seed=3), normal(1, 2, 6, seed=4), 0.3)
    blind = torch.tensor([0, 1, 4, 5])
    assert bool((found.out[:, blind] == 0).all())
    assert bool((found.lse[..., blind] == -math.inf).all())
    assert bool((found.dq[:, blind] == 0).all())
    assert all(bool(x.isfinite().all()) for x in (found.out, *found[2:]))


@pytest.mark.parametrize("shape", [(0, 5, 9), (2, 0, 9), (2, 5, 0), (0, 0, 0)])
def test_nothing_of_something(shape: tuple[int, int, int]) -> None:
    batch, rows, keys = shape
    q, k, v = torch.zeros(batch, rows, 2, 8), torch.zeros(batch, keys, 1, 8), torch.zeros(batch, keys, 1, 4)
    everything = torch.zeros(1, rows, dtype=torch.int32), torch.full((1, rows), keys, dtype=torch.int32)
    found, _ = tile(q, [Segment(k, v, *everything)], torch.zeros(batch, rows, 2, 4), torch.zeros(batch, 2, rows), 0.3)
    assert [tuple(x.shape) for x in found[:2]] == [(batch, rows, 2, 4), (batch, 2, rows)]
    assert bool((found.out == 0).all())


def test_no_segments_at_all_give_empty_rows() -> None:
    out, lse = reference.forward(normal(1, 3, 2, 8), [], 0.3)
    assert bool((out == 0).all())
    assert bool((lse == -math.inf).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_outputs_have_the_inputs_dtype_and_are_rounded_once(dtype: torch.dtype) -> None:
    q, k, v = (
        normal(1, 50, 2, 16, dtype=dtype),
        normal(1, 70, 2, 16, dtype=dtype, seed=1),
        normal(1, 70, 2, 16, dtype=dtype, seed=2),
    )
    begin, end = torch.zeros(1, 50, dtype=torch.int32), torch.full((1, 50), 70, dtype=torch.int32)
    out, lse = reference.forward(q, [Segment(k, v, begin, end)], 0.25)
    exact, exact_lse = oracle.attention(q, k, v, sees(begin, end, 70), 0.25)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert oracle.rms(out, exact) <= 1.05 * oracle.rms(exact.to(dtype), exact)
    assert oracle.rms(lse, exact_lse) < 1e-6


def test_b7_large_logits_in_float16_stay_finite() -> None:
    q = torch.full((1, 1, 1, 16), 3.0, dtype=torch.float16)
    one = torch.tensor([[1]]).int()
    found, _ = tile(q, [Segment(q, q, one - 1, one)], torch.ones_like(q), torch.zeros(1, 1, 1), 1.0)
    assert all(bool(x.isfinite().all()) for x in found)


def test_any_strides_and_contributions_are_added() -> None:
    q, k, v = (
        normal(1, 2, 7, 8).transpose(1, 2),
        normal(1, 9, 3, 8)[:, :, :2],
        normal(1, 1, 9, 8).expand(1, 2, 9, 8).transpose(1, 2),
    )
    begin, end = intervals(7, 9)
    dout, dlse = normal(1, 7, 2, 8, seed=3), normal(1, 2, 7, seed=4)
    found, _ = tile(q, [Segment(k, v, begin, end)], dout, dlse, 0.3)
    exact = oracle.results((q, k, v), (dout, dlse), sees(begin, end, 9), 0.3)
    compare(found, exact)
    dq, dkv = torch.ones(q.shape), (torch.ones(k.shape), torch.ones(v.shape))
    reference.backward(dout, q, [Segment(k, v, begin, end)], found.lse, reference.delta(dout, found.out, dlse), 0.3, dq, [dkv])
    for x, y in zip((dq, *dkv), found[2:], strict=True):
        torch.testing.assert_close(x, y + 1)


def test_segments_are_waited_for_where_some_row_sees_them() -> None:
    q, dout, dlse = normal(1, 5, 2, 8), normal(1, 5, 2, 8, seed=3), normal(1, 2, 5, seed=4)
    k, v = normal(1, 9, 2, 8, seed=1), normal(1, 9, 2, 8, seed=2)
    one, nothing = torch.ones(1, 5).int(), torch.zeros(1, 5).int()
    late = [Segment(torch.full_like(k, math.nan), v.clone(), 0 * one, 9 * one, torch.zeros(1).int()) for _ in range(2)]
    never = Segment(k, v, nothing, nothing, torch.zeros(1).int())  # nobody would set this flag

    def arrive(segment: Segment) -> None:
        assert segment.ready is not None
        segment.k.copy_(k)
        segment.ready.fill_(2)

    exact, _ = tile(q, [Segment(k, v, 0 * one, 9 * one)], dout, dlse, 0.3)
    timer = threading.Timer(0.1, arrive, [late[0]])
    timer.start()
    out, lse = reference.forward(q, [never, late[0]], 0.3)
    timer.join()
    assert torch.equal(out, exact.out)
    timer = threading.Timer(0.1, arrive, [late[1]])
    timer.start()
    dq, dkv = torch.zeros(q.shape), [(torch.zeros(k.shape), torch.zeros(v.shape)) for _ in range(2)]
    reference.backward(dout, q, [never, late[1]], lse, reference.delta(dout, out, dlse), 0.3, dq, dkv)
    timer.join()
    for x, y in zip((dq, *dkv[1]), exact[2:], strict=True):
        assert torch.equal(x, y)


class _Largest(TorchDispatchMode):
    """The largest tensor, in elements, that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
        return result


@pytest.mark.parametrize("seqlen", [2048, 8192])
def test_memory_is_linear(seqlen: int) -> None:
    q, k, v = normal(1, seqlen, 1, 2), normal(1, seqlen, 1, 2), normal(1, seqlen, 1, 2)
    end = torch.arange(1, seqlen + 1, dtype=torch.int32)[None]
    with _Largest() as largest:
        tile(q, [Segment(k, v, torch.zeros_like(end), end)], normal(1, seqlen, 1, 2), normal(1, 1, seqlen), 0.7)
    assert largest.elements <= max(reference.BLOCK_Q * reference.BLOCK_K, 2 * seqlen)

"""The portable backward against the specification, in Triton's interpreter."""

import kernel_cases
import pytest
import torch
from kernel_cases import SHAPES, Case, assert_close, interpreted, random_case, spread
from torch import Tensor

from ringflash.kernels import backward, config, portable, reference


@pytest.mark.skipif(kernel_cases.INTERPRETED, reason="this is that process")
def test_in_interpreter():
    kernel_cases.run_interpreted(__file__)


def gradients(case: Case, lse: Tensor, delta: Tensor, options: portable.Options | None) -> list[Tensor]:
    """dq, dk, dv, ... added to ones, so that a plain store is noticed; options None: the specification in float32."""
    dq = torch.ones(case.q.shape)
    dkv = [(torch.ones(s.k.shape), torch.ones(s.v.shape)) for s in case.segments]
    if options is None:
        segments = [s._replace(k=s.k.float(), v=s.v.float()) for s in case.segments]
        reference.backward(case.dout.float(), case.q.float(), segments, lse, delta, case.scale, dq, dkv)
    else:
        held = [i for i, s in enumerate(case.segments) if s.k.shape[1]]
        segments = [case.segments[i] for i in held]
        backward.launch_dq(case.dout, case.q, segments, lse, delta, case.scale, dq, options=options)
        backward.launch_dkv(case.dout, case.q, segments, lse, delta, case.scale, [dkv[i] for i in held], options=options)
    return [x - 1 for x in (dq, *(y for pair in dkv for y in pair))]


def check(case: Case, options: portable.Options = portable.Options()) -> None:
    exact = [s._replace(k=s.k.float(), v=s.v.float()) for s in case.segments]
    out, lse = reference.forward(case.q.float(), exact, case.scale)
    delta = reference.delta(case.dout, out)
    for x, y in zip(gradients(case, lse, delta, options), gradients(case, lse, delta, None), strict=True):
        assert_close(x, y, case.q.dtype, floor=2.0**-22)  # what adding to ones rounds


@interpreted
@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_against_reference(shape, tma):
    check(random_case(**SHAPES[shape]), portable.Options(tma=tma))


@interpreted
@pytest.mark.parametrize("seed", range(6))
def test_random_intervals(seed):
    check(random_case(29 + seed, (60, 30), seed=seed, batch=1, nheads=(2, 1)), portable.Options(tma=seed % 2 == 0))


@interpreted
@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("which", ["dq", "dkv"])
def test_blocks_of_the_table(which, headdim):
    """The block shapes that GPUs get, with several blocks of each kind; the head dim does not matter here."""
    tile = config.TABLE["sm_90", 2, headdim]._asdict()[which]
    check(random_case(230, (270,), batch=1, nheads=(2, 1)), portable.Options(tile=tile, tma=True))
    causal = random_case(230, (270,), batch=1, nheads=(2, 1), causal=True)
    check(causal, portable.Options(tile=tile, tma=True))


@interpreted
def test_rows_behind_the_shard_have_no_influence():
    case = random_case(37, (40,), batch=2)
    q, dout = (torch.cat([x, torch.full_like(x, torch.nan)], 1)[:, :37] for x in (case.q, case.dout))
    check(case._replace(q=q, dout=dout), portable.Options(tma=True))


@interpreted
def test_offsets_past_two_to_the_31():
    case = random_case(36, (36,), batch=1, nheads=(1, 1), dtype=torch.float16)
    far = case.segments[0]._replace(k=spread(case.segments[0].k, 1 << 26), v=spread(case.segments[0].v, 1 << 26))
    check(Case(spread(case.q, 1 << 26), spread(case.dout, 1 << 26), [far]), portable.Options(tma=False))


@interpreted
def test_whole_backward_with_many_segments():
    case = random_case(17, (5,) * (portable.MAX_SEGMENTS + 2), batch=1, nheads=(2, 1))
    out, lse = reference.forward(case.q, case.segments, case.scale)
    delta = reference.delta(case.dout, out)
    results = []
    for tile in (backward, reference):
        dq, dkv = torch.zeros(case.q.shape), [(torch.zeros(s.k.shape), torch.zeros(s.v.shape)) for s in case.segments]
        tile.backward(case.dout, case.q, case.segments, lse, delta, case.scale, dq, dkv)
        results.append([dq, *(x for pair in dkv for x in pair)])
    for x, y in zip(*results, strict=True):
        assert_close(x, y, torch.float32)


@interpreted
@pytest.mark.parametrize("tile", [backward, reference])
def test_gradients_of_keys_are_added_or_stored(tile):
    case = random_case(17, (20, 7), batch=1)
    out, lse = reference.forward(case.q, case.segments, case.scale)
    delta = reference.delta(case.dout, out)
    results = []
    for add, fill in ((True, 0.0), (True, 1.0), (False, torch.nan)):
        dq = torch.zeros(case.q.shape)
        dkv = [(torch.full(s.k.shape, fill), torch.full(s.v.shape, fill)) for s in case.segments]
        tile.backward(case.dout, case.q, case.segments, lse, delta, case.scale, dq, dkv, add=add)
        results.append([dq, *(x - (1.0 if fill == 1.0 else 0.0) for pair in dkv for x in pair)])
    for x, more, stored in zip(*results, strict=True):
        assert torch.equal(x, stored)
        torch.testing.assert_close(more, x)


@interpreted
@pytest.mark.parametrize("tile", [backward, reference])
def test_gradients_of_keys_are_stored_in_16_bits_and_of_rows_stored(tile):
    """Rounded once, from the same sums; keys in several blocks, and rows."""
    case = random_case(600 if tile is reference else 70, (90, 30), batch=1, nheads=(2, 1))
    out, lse = reference.forward(case.q, case.segments, case.scale)
    delta = reference.delta(case.dout, out)
    results = []
    for dtype, add_dq in ((torch.float32, True), (torch.float16, False)):
        dq = torch.full(case.q.shape, 0.0 if add_dq else torch.nan)
        dkv = [(torch.full(s.k.shape, torch.nan).to(dtype), torch.full(s.v.shape, torch.nan).to(dtype)) for s in case.segments]
        tile.backward(case.dout, case.q, case.segments, lse, delta, case.scale, dq, dkv, add=False, add_dq=add_dq)
        results.append([dq, *(x for pair in dkv for x in pair)])
    assert torch.equal(results[0][0], results[1][0])
    for x, rounded in zip(results[0][1:], results[1][1:], strict=True):
        assert torch.equal(x.half(), rounded)


@interpreted
def test_gradients_of_the_last_dimension_expanded():
    case = random_case(17, (20,), batch=1)
    dout = torch.ones(1).expand(case.dout.shape)
    out, lse = reference.forward(case.q, case.segments, case.scale)
    delta = reference.delta(dout, out)
    results = []
    for tile in (backward, reference):  # backward makes the copy, the launches take unit strides
        dq, dkv = torch.zeros(case.q.shape), [(torch.zeros(s.k.shape), torch.zeros(s.v.shape)) for s in case.segments]
        tile.backward(dout, case.q, case.segments, lse, delta, case.scale, dq, dkv)
        results.append([dq, *dkv[0]])
    for x, y in zip(*results, strict=True):
        assert_close(x, y, torch.float32)


@interpreted
@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_delta(with_dlse, dtype):
    generator = torch.Generator().manual_seed(0)
    dout, out = (torch.randn(2, 70, 3, 24, generator=generator).to(dtype) for _ in range(2))
    dlse = torch.randn(2, 3, 70, generator=generator) if with_dlse else None
    assert_close(backward.delta(dout.transpose(0, 0), out, dlse), reference.delta(dout, out, dlse), torch.float32)
    assert backward.delta(dout[:, :0], out[:, :0]).shape == (2, 3, 0)

"""The portable forward against the specification, in Triton's interpreter."""

import kernel_cases
import pytest
import torch
from kernel_cases import SHAPES, Case, assert_close, interpreted, random_case, spread

from ringflash.kernels import forward, portable, reference
from ringflash.kernels.reference import Segment


@pytest.mark.skipif(kernel_cases.INTERPRETED, reason="this is that process")
def test_in_interpreter():
    kernel_cases.run_interpreted(__file__)


def check(case: Case, options: portable.Options = portable.Options()) -> None:
    expected = reference.forward(case.q.float(), [s._replace(k=s.k.float(), v=s.v.float()) for s in case.segments], case.scale)
    out, lse = forward.launch(case.q, case.segments, case.scale, options=options)
    assert out.dtype == case.q.dtype
    assert out.is_contiguous()
    assert_close(out, expected[0], case.q.dtype, "out")
    assert_close(lse, expected[1], torch.float32, "lse")


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
def test_views_of_any_stride():
    case = random_case(20, (40,), dtype=torch.float32)
    segment = case.segments[0]
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (segment.k, segment.v)]
    expanded = segment.k[:, :, :1].expand(-1, -1, 2, -1)
    for k, v in ((heads_first[0], heads_first[1]), (expanded, segment.v), (segment.k[..., ::1], heads_first[1])):
        for tma in (False, True):
            check(Case(case.q.transpose(1, 2).contiguous().transpose(1, 2), case.dout,
                       [segment._replace(k=k, v=v)]), portable.Options(tma=tma))  # fmt: skip


@interpreted
def test_offsets_past_two_to_the_31():
    case = random_case(36, (36,), batch=1, nheads=(1, 1), dtype=torch.float16)
    far = case.segments[0]._replace(k=spread(case.segments[0].k, 1 << 26), v=spread(case.segments[0].v, 1 << 26))
    check(Case(spread(case.q, 1 << 26), case.dout, [far]), portable.Options(tma=False))


@interpreted
def test_carried_state_gives_the_same():
    case = random_case(40, (33, 50))
    state = forward.forward(case.q, case.segments[:1], case.scale, finish=False)
    for x, y in zip(state, reference.forward(case.q, case.segments[:1], case.scale, finish=False), strict=True):
        assert_close(x, y, torch.float32)
    out, lse = forward.forward(case.q, case.segments[1:], case.scale, state=state)  # pyright: ignore[reportArgumentType]
    expected = reference.forward(case.q, case.segments, case.scale)
    assert_close(out, expected[0], torch.float32)
    assert_close(lse, expected[1], torch.float32)


@interpreted
def test_rows_that_see_nothing_keep_their_state():
    case = random_case(40, (33, 50))
    state = forward.forward(case.q, case.segments[:1], case.scale, finish=False)
    before = [x.clone() for x in state]
    after = forward.forward(case.q, case.segments[1:], case.scale, state=state, finish=False)  # pyright: ignore[reportArgumentType]
    empty = case.segments[1].begin == case.segments[1].end
    assert bool(empty.any())
    assert torch.equal(after[0][empty], before[0][empty])
    for x, y in zip(after[1:], before[1:], strict=True):
        assert torch.equal(x.transpose(1, 2)[empty], y.transpose(1, 2)[empty])
    assert after[0].data_ptr() == state[0].data_ptr()  # consumed, not copied


@interpreted
def test_nothing_to_see():
    q = torch.randn(1, 5, 2, 16)
    out, lse = forward.forward(q, [], 0.3)
    assert torch.equal(out, torch.zeros_like(q))
    assert bool((lse == -torch.inf).all())
    empty = torch.zeros(1, 0, dtype=torch.int32)
    k = torch.randn(1, 3, 2, 16)
    out, lse = forward.forward(q[:, :0], [Segment(k, k, empty, empty)], 0.3)
    assert out.shape == (1, 0, 2, 16)
    assert lse.shape == (1, 2, 0)


@interpreted
def test_more_segments_than_one_launch_takes():
    check(random_case(17, (5,) * (portable.MAX_SEGMENTS + 3), batch=1, nheads=(1, 1)))


@interpreted
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scales(scale):
    check(random_case(20, (40,), batch=1)._replace(scale=scale))


@interpreted
def test_ready_segments():
    case = random_case(20, (40, 40), batch=1)
    ready = torch.full((1,), case.segments[1].k.shape[2], dtype=torch.int32)
    check(case._replace(segments=[case.segments[0], case.segments[1]._replace(ready=ready)]))


@interpreted
@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_fixed_against_reference(shape, tma):
    check(random_case(**SHAPES[shape]), portable.Options(tma=tma, fixed=True))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("seed", range(4))
def test_fixed_rows_have_the_same_bits_whatever_rows_share_their_tile(seed, dtype):
    """Rows taken out, so that the others stand elsewhere, in tiles that begin at other keys and see other blocks whole."""
    case = random_case(90, (150,), seed=seed, batch=1, nheads=(2, 1), headdims=(24, 16), dtype=dtype, causal=seed == 3)
    segment = case.segments[0]
    out, lse = forward.forward(case.q, [segment], case.scale, fixed=True)
    for rows in ([89], range(30, 46), range(1, 90, 2), range(2, 90, 7)):
        at = torch.tensor(list(rows))
        some = segment._replace(begin=segment.begin[:, at].contiguous(), end=segment.end[:, at].contiguous())
        found = forward.forward(case.q[:, at], [some], case.scale, fixed=True)
        integers = torch.int32 if dtype == torch.float32 else torch.int16
        assert torch.equal(found[0].view(integers), out[:, at].view(integers))
        assert torch.equal(found[1].view(torch.int32), lse[..., at].contiguous().view(torch.int32))


@interpreted
def test_large_logits_stay_finite():
    case = random_case(20, (40,), batch=1, dtype=torch.float16)
    big = [s._replace(k=s.k * 100) for s in case.segments]
    check(case._replace(q=case.q * 100, segments=big))

"""Cases that broke other ring-attention code, by tag: merging and empty rows (A), backward (B), lengths (C), masks (D)."""

import itertools
import math
from dataclasses import replace

import oracle
import pytest
import torch
import torch.distributed as dist
from pool import Pools
from ring_cases import CAUSAL, LAYOUTS, NAMES, SCHEDULES, Case, alone, check, exact, make_layout, run_threads, verdict, whole
from torch import Tensor

import ringflash as rf
from ringflash import stats
from ringflash.kernels import reference

EPS = torch.finfo(torch.float32).eps


def every(*cases: Case) -> list[Case]:
    """The cases under both schedules."""
    return [replace(case, schedule=schedule) for case in cases for schedule in SCHEDULES]


def check_threads(case: Case, size: int) -> None:
    """As `check`, where a ring of that many processes would be slow."""
    assert not (wrong := verdict(case, run_threads(case, size))), wrong


# A: merging states, empty rows


def border(lse: list[float]) -> stats.State:
    """A state of one head and as many rows, out = 1 where a key was seen."""
    out = torch.tensor([0.0 if x == -math.inf else 1.0 for x in lse])
    return stats.from_border(out.view(1, -1, 1, 1), torch.tensor(lse).view(1, 1, -1))


def test_a1_two_empty_states_merge_to_an_empty_one() -> None:
    merged = stats.merge(border([-math.inf]), border([-math.inf]))
    out, lse = stats.finish(merged, torch.float32)
    assert out.item() == 0.0
    assert lse.item() == -math.inf
    assert merged.sum.item() == 0.0


@pytest.mark.parametrize("value", [-300.0, -1.0, 0.0, 2.5, 300.0])
def test_a2_an_empty_accumulator_merges_a_finite_tile(value: float) -> None:
    for pair in itertools.permutations([border([-math.inf]), border([value])]):
        out, lse = stats.finish(stats.merge(*pair), torch.float32)
        torch.testing.assert_close(lse.item(), value)
        torch.testing.assert_close(out.item(), 1.0)


def test_a2_far_block_first(pools: Pools) -> None:
    packed = rf.Mask(documents=(0, 3, 16))
    check(pools, 2, every(*(Case(packed, 16, layout) for layout in LAYOUTS)))
    check(pools, 4, every(*(Case(rf.Mask(causal=True, window=(3, 0)), 64, layout) for layout in NAMES)))


@pytest.mark.parametrize("size", [2, 4])
def test_a3_a_document_with_queries_and_no_keys(pools: Pools, size: int) -> None:
    """Keys end at 12, inside the second document: the third one's queries see none."""
    case = Case(rf.Mask(documents=(0, 5, 12, 16)), 16, "zigzag", behind=-4)
    assert torch.equal(exact(case).lse[..., 12:], torch.full((2, 4, 4), -math.inf))
    assert not exact(case).dq[:, 12:].any()
    check(pools, size, every(case))
    assert not alone(case).out[:, 12:].any()
    assert not alone(case).dq[:, 12:].any()


def test_a4_keys_after_the_queries_leave_the_state_untouched() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 9, 2, 8, generator=generator) for _ in range(3))
    nothing = torch.zeros(1, 9, dtype=torch.int32)
    seen = reference.Segment(k, v, nothing, nothing + 4)
    hidden = reference.Segment(torch.full_like(k, torch.nan), torch.full_like(v, torch.inf), nothing, nothing)
    before = reference.forward(q, [seen], 0.3, None, False)
    kept = [x.clone() for x in before]
    after = reference.forward(q, [hidden], 0.3, (before[0], before[1], before[2]), False)
    assert all(torch.equal(a, b) for a, b in zip(after, kept, strict=True))


def test_a5_sums_of_2_and_8_weigh_a_fifth_and_four() -> None:
    (small, large), one = (border([math.log(n)]) for n in (2.0, 8.0)), torch.float32
    merged = stats.merge(stats.State(small.acc * 10, small.max, small.sum), large)
    out, lse = stats.finish(merged, one)
    torch.testing.assert_close(out.item(), 0.2 * 10 + 0.8 * 1)
    torch.testing.assert_close(lse.item(), math.log(10.0))


def lse_mean(size: int) -> list[Tensor]:
    """Gradients of the sum over ranks of lse.mean()."""
    layout = rf.layouts.zigzag(20, size)
    (q, k, v), _ = Case(CAUSAL, 20).inputs()
    q, k, v = (layout.part(x, dist.get_rank()).clone().requires_grad_() for x in (q, k, v))
    _, lse = rf.ring_attention(q, k, v, layout=layout, mask=CAUSAL, return_lse=True)
    lse.mean().backward()
    return [q.grad, k.grad, v.grad]  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a8_gradient_of_lse_mean(pools: Pools, size: int) -> None:
    case = Case(CAUSAL, 20)
    qkv, (dout, dlse) = case.inputs()
    grads = torch.zeros_like(dout), torch.full_like(dlse, size / dlse.numel())
    at = torch.arange(20)
    right = oracle.results(qkv, grads, oracle.visible(CAUSAL, at, at))
    assert right.dq.any()
    layout = rf.layouts.zigzag(20, size)
    for rank, (dq, dk, dv) in enumerate(pools.run(size, lse_mean, size)):
        for x, z in ((dq, right.dq), (dk, right.dk)):
            assert oracle.rms(x, layout.part(z, rank)) < 16 * EPS * oracle.norm(z)
        assert not dv.any()


# B: backward (B9 to B12 are in test_autograd)


def test_b1_remote_blocks_are_differentiated_against_remote_keys(pools: Pools) -> None:
    check(pools, 2, every(Case(rf.Mask(), 256, "contiguous", heads=(4, 4), headdim=(64, 64), batch=1)))


@pytest.mark.parametrize("size", [2, 4])
def test_b3_every_backward_step_uses_its_own_lengths(pools: Pools, size: int) -> None:
    check(pools, size, every(Case(CAUSAL, 128, "zigzag"), Case(CAUSAL, 128 * size + 3, "zigzag", batch=1)))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_b5_every_optional_argument_given(pools: Pools, size: int) -> None:
    mask = rf.Mask(causal=True, window=(9, 0), documents=((0, 7, 36), (0, 20, 36)))
    check(pools, size, every(Case(mask, 33, "zigzag", "striped", scale=0.7, front=3)))


@pytest.mark.parametrize("size", [1, 2])
def test_b7_one_token_of_threes_in_fp16(pools: Pools, size: int) -> None:
    for grads in pools.run(size, threes, size):
        assert all(x.isfinite().all() for x in grads)
        assert all(x.dtype == torch.float16 for x in grads)


def threes(size: int) -> list[Tensor]:
    """One token [1, 1, 1, 16] on rank 0."""
    layout = rf.layouts.contiguous(1, size)
    q, k, v = (layout.part(torch.full((1, 1, 1, 16), 3.0).half(), dist.get_rank()).clone().requires_grad_() for _ in range(3))
    rf.ring_attention(q, k, v, layout=layout, mask=CAUSAL).sum().backward()  # pyright: ignore[reportAttributeAccessIssue]
    return [q.grad, k.grad, v.grad]  # pyright: ignore[reportReturnType]


# C: lengths


@pytest.mark.slow(sample=3)
@pytest.mark.parametrize(
    ("tag", "seqlen", "size", "layout"),
    [("c1", 2999, 4, "zigzag"), ("c2", 129, 2, "zigzag"), ("c3", 33, 4, "zigzag"), ("c2", 129, 2, "striped")],
)
def test_c1_c2_c3_uneven_shards(pools: Pools, tag: str, seqlen: int, size: int, layout: str) -> None:
    check(pools, size, every(Case(CAUSAL, seqlen, layout, batch=1, heads=(2, 1))))


@pytest.mark.parametrize("layout", NAMES)
def test_c4_padding_has_no_influence(pools: Pools, layout: str) -> None:
    """Tokens 0-3 hold 1, 4-6 hold 2; the padding, a document of its own, holds any finite number."""
    told = {padding: pools.run(2, padded, layout, padding) for padding in (100.0, 200.0, -3e4)}
    places = rf.layouts.__dict__[layout](8, 2)
    x = torch.tensor([1.0] * 4 + [2.0] * 3)[None, :, None, None].expand(1, 7, 2, 4)
    at = torch.arange(7)
    right = oracle.results((x, x, x), (torch.ones(1, 7, 2, 4), torch.zeros(1, 2, 7)), oracle.visible(CAUSAL, at, at))
    for ranks in told.values():
        for i, z in enumerate((right.out, right.dq, right.dk, right.dv)):
            joined = places.join([rank[i] for rank in ranks])
            assert not (i and joined[:, 7].any())
            torch.testing.assert_close(joined[:, :7].double(), z, atol=64 * EPS, rtol=0)


def padded(layout: str, padding: float) -> list[Tensor]:
    """out, and gradients where the loss takes the real rows only."""
    places = make_layout(layout, 8, 2, CAUSAL)
    x = torch.tensor([1.0] * 4 + [2.0] * 3 + [padding])[None, :, None, None].expand(1, 8, 2, 4)
    q, k, v = (places.part(x, dist.get_rank()).clone().requires_grad_() for _ in range(3))
    out = rf.ring_attention(q, k, v, layout=places, mask=rf.Mask(causal=True, documents=(0, 7, 8)))
    assert isinstance(out, Tensor)
    real = places.positions(dist.get_rank()) < 7
    out[:, real].sum().backward()
    grads = [x.grad for x in (q, k, v)]
    return [out.detach(), *grads]  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("seqlen", [0, 1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_c9_shorter_than_the_ring(pools: Pools, layout: str, seqlen: int) -> None:
    for case in every(Case(CAUSAL, seqlen, layout), Case(rf.Mask(), seqlen, layout)):
        check_threads(case, 8)
    check(pools, 4, every(Case(CAUSAL, seqlen, layout), Case(rf.Mask(), seqlen, layout)))


@pytest.mark.parametrize("size", [2, 4])
def test_c10_one_token_per_rank_striped(pools: Pools, size: int) -> None:
    check(pools, size, every(Case(CAUSAL, size, "striped"), Case(rf.Mask(), size, "striped")))


def unshard_57() -> bool:
    batch = rf.ContextParallel().batch(57, rf.Mask(causal=True))
    x = torch.arange(114.0).reshape(2, 57)
    return torch.equal(batch.unshard(batch.shard(x)), x)


def test_c11_unshard_returns_exactly_the_tokens(pools: Pools) -> None:
    assert all(pools.run(4, unshard_57))
    for layout in LAYOUTS:
        places, x = make_layout(layout, 57, 8, CAUSAL), torch.arange(114.0).reshape(2, 57)
        assert torch.equal(places.join(places.split(x)), x)


@pytest.mark.parametrize("seqlen", [1, 2, 7, 8, 15, 16, 17])
def test_c14_lengths_on_one_rank(pools: Pools, seqlen: int) -> None:
    for mask in (CAUSAL, rf.Mask()):
        for x, z in zip(alone(Case(mask, seqlen)), exact(Case(mask, seqlen)), strict=True):
            assert oracle.rms(x, z) <= 16 * EPS * oracle.norm(z)


# D: masks


@pytest.mark.parametrize("layout", LAYOUTS)
def test_d1_five_unaligned_documents(pools: Pools, layout: str) -> None:
    mask = rf.Mask(causal=True, documents=(0, 101, 333, 518, 777, 1024))
    check(pools, 2, every(Case(mask, 1024, layout, batch=1, heads=(2, 1))))


@pytest.mark.parametrize(("seqlen", "left", "size"), [(32, 5, 2), (32, 5, 4), (64, 20, 4)])
def test_d2_windows_by_global_distance(pools: Pools, seqlen: int, left: int, size: int) -> None:
    masks = [rf.Mask(causal=True, window=(left, 0)), rf.Mask(causal=True, window=(left, None)), rf.Mask(window=(left, left))]
    check(pools, size, every(*(Case(mask, seqlen, layout) for mask in masks for layout in NAMES)))


@pytest.mark.parametrize("layout", NAMES)
def test_d3_a_window_as_long_as_a_shard_stays(layout: str) -> None:
    for left in (7, 8, 9):
        check_threads(Case(rf.Mask(causal=True, window=(left, 0)), 64, layout), 8)


def alternating(size: int) -> Tensor:
    batch = rf.ContextParallel().batch(1024, CAUSAL)
    x = batch.shard(alternating_input())
    for mask in (rf.Mask(causal=True, window=(128, 0)), None) * 2:
        x = batch.attention(x, x, x, mask=mask)
    return x


def alternating_input() -> Tensor:
    return torch.randn(1, 1024, 2, 8, generator=torch.Generator().manual_seed(0))


def test_d4_windowed_and_full_layers_alternate(pools: Pools) -> None:
    x, at = alternating_input().double(), torch.arange(1024)
    for mask in (rf.Mask(causal=True, window=(128, 0)), CAUSAL) * 2:
        x = oracle.attention(x, x, x, oracle.visible(mask, at, at))[0]
    out = rf.layouts.zigzag(1024, 2).join(pools.run(2, alternating, 2))
    assert oracle.rms(out, x) <= 16 * EPS * oracle.norm(x)


@pytest.mark.parametrize("size", [2, 4])
def test_d7_g10_non_causal_on_every_layout(pools: Pools, size: int) -> None:
    """Forward and backward."""
    check(pools, size, every(*(Case(rf.Mask(), 65, layout) for layout in LAYOUTS)))


@pytest.mark.parametrize("size", [2, 4])
def test_d10_extra_keys_in_front_and_behind(pools: Pools, size: int) -> None:
    ends = [(10, 0), (0, 10), (64, 1)]
    check(pools, size, every(*(Case(m, 30, front=front, behind=behind) for m in (CAUSAL, rf.Mask()) for front, behind in ends)))


CELLS = list(
    itertools.product(
        ("auto", "p2p"), ("auto", *SCHEDULES), ("first", "always", "never"), (False, True), ("auto", "reference", "triton")
    )
)


def grid() -> list[Tensor | str]:
    """Each cell: the output, or the words it is refused with."""
    found: list[Tensor | str] = []
    rank, size = dist.get_rank(), dist.get_world_size()
    layout, _ = Case().layouts(size)
    q, k, v = (layout.part(x, rank) for x in Case().inputs()[0])
    groups = {check: dist.new_group() for check in ("first", "always", "never")}  # the mode is the group's
    for transport, schedule, checks, deterministic, kernel in CELLS:
        options = rf.Options(transport=transport, schedule=schedule, check=checks, deterministic=deterministic, kernel=kernel)
        try:
            found.append(rf.ring_attention(q, k, v, layout=layout, mask=CAUSAL, group=groups[checks], options=options))  # pyright: ignore
        except NotImplementedError as error:
            found.append(str(error))
    return found


def test_d11_every_option_is_honoured_or_refused(pools: Pools) -> None:
    right = exact(Case()).out
    layout, _ = Case().layouts(2)
    for cell, shards in zip(CELLS, zip(*pools.run(2, grid), strict=True), strict=True):
        if cell[-1] == "triton":
            assert all("kernel='triton'" in x for x in shards)
        else:
            assert oracle.rms(layout.join(shards), right) <= 16 * EPS * oracle.norm(right), cell


def test_whole_sees_every_position() -> None:
    """The verdict itself: a result in the wrong place does not pass."""
    shards = run_threads(Case(), 3)
    assert not verdict(Case(), shards)
    assert verdict(Case(), [s._replace(out=s.out.roll(1, 1)) for s in shards])
    assert torch.equal(whole(Case(), shards).lse == -math.inf, exact(Case()).lse == -math.inf)

"""Options(reproducible=True): out and lse have the same bits for every ring size and layout, gradients from run to run."""

import dataclasses
import random
import re
from collections.abc import Sequence

import pytest
import torch
from oracle import Results
from pool import Pools
from ring_cases import CAUSAL, LAYOUTS, Case, alone, check, masks, run_cases, whole
from torch import Tensor

import ringflash as rf
from ringflash.kernels import reference
from ringflash.layout import contiguous
from ringflash.plan import make_plan

SIZES = (2, 3, 4)
LENGTHS = (1, 7, 33, 100)
LONG = 2 * reference.BLOCK_K + 77  # several blocks of keys, and of rows on every rank of a small ring


def bits(x: Tensor) -> Tensor:
    """As integers: 0 and -0 differ, NaN is itself."""
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()])


def differing(case: Case, shards: Sequence[Results]) -> str:
    """How many numbers of out and lse are others than on one rank whose tokens lie in order."""
    found, right = whole(case, shards), alone(case)
    counts = [int((bits(x) != bits(y)).sum()) for x, y in ((found.out, right.out), (found.lse, right.lse))]
    return f"{case} on {len(shards)} ranks: {counts} of out and lse" if any(counts) else ""


def same_bits(pools: Pools, size: int, cases: Sequence[Case]) -> None:
    cases = [dataclasses.replace(case, reproducible=True) for case in cases]
    ranks = pools.run(size, run_cases, cases)
    wrong = [differing(case, shards) for case, shards in zip(cases, zip(*ranks, strict=True), strict=True)]
    assert not any(wrong), "\n".join(filter(None, wrong))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, *SIZES])
def test_the_same_bits_for_every_size_and_layout(pools: Pools, full: bool, size: int, layout: str, dtype: torch.dtype) -> None:
    """Every mask; without --full each at one length, another one in each cell."""
    draw = random.Random(f"{size}{layout}{dtype}")
    pairs = [(name, n) for name in masks(LENGTHS[0]) for n in (LENGTHS if full else [draw.choice(LENGTHS)])]
    same_bits(pools, size, [Case(masks(n)[name], n, layout, dtype=dtype, heads=(2, 1)) for name, n in pairs])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
def test_over_several_blocks_of_rows_and_keys(pools: Pools, size: int, layout: str) -> None:
    """Windows and documents that begin and end inside blocks."""
    documents = (0, 5, 300, 300, 513, 1000, LONG)
    some = [
        rf.Mask(),
        CAUSAL,
        rf.Mask(causal=True, window=(300, None)),
        rf.Mask(window=(20, 7), documents=documents),
        rf.Mask(causal=True, documents=documents),
        rf.Mask(causal=True, prefix=515),
    ]
    dtypes = torch.float32, torch.bfloat16
    same_bits(pools, size, [Case(m, LONG, layout, dtype=dtypes[i % 2], batch=1, heads=(2, 1)) for i, m in enumerate(some)])


SHAPES = [
    {"heads": (3, 3)},
    {"heads": (14, 7)},
    {"headdim": (1, 1)},
    {"headdim": (17, 3)},
    {"headdim": (24, 40)},
    {"headdim": (256, 256), "heads": (2, 2)},
    {"batch": 0},
    {"scale": 0.0},
    {"scale": -0.3},
    {"gain": 30.0},
    {"front": 13},
    {"behind": 9},
    {"behind": -20},
    {"front": 3, "kv_layout": "striped", "layout": "contiguous"},
]


@pytest.mark.parametrize("size", SIZES)
def test_shapes_scales_and_keys_that_lie_otherwise(pools: Pools, size: int) -> None:
    same_bits(pools, size, [Case(rf.Mask(causal=True, window=(11, 0)), 33, **shape) for shape in SHAPES])


@pytest.mark.parametrize("size", [1, *SIZES])
def test_results_and_gradients_are_exact(pools: Pools, size: int) -> None:
    every = [(mask, n) for n in (33, 100) for mask in masks(n).values()]
    cases = [Case(m, n, LAYOUTS[(i + size) % len(LAYOUTS)], reproducible=True) for i, (m, n) in enumerate(every)]
    check(pools, size, cases)


@pytest.mark.parametrize("size", [1, *SIZES])
def test_gradients_have_the_same_bits_from_run_to_run(pools: Pools, size: int) -> None:
    cases = [Case(m, 100, layout, reproducible=True) for m in (CAUSAL, rf.Mask()) for layout in ("zigzag", "striped")]
    first, second = (pools.run(size, run_cases, cases) for _ in range(2))
    for one, again in zip(first, second, strict=True):
        assert all(torch.equal(bits(x), bits(y)) for a, b in zip(one, again, strict=True) for x, y in zip(a, b, strict=True))


def test_without_it_bits_depend_on_the_ring(pools: Pools) -> None:
    """The comparison itself: it sees what the option is for."""
    case = Case(CAUSAL, LONG, "striped", batch=1)
    shards = tuple(rank[0] for rank in pools.run(3, run_cases, [case]))
    assert differing(case, shards)


@pytest.mark.parametrize("threads", [1, 2, 3, 5, 12])
def test_a_row_has_the_same_bits_whatever_rows_share_its_tile(threads: int) -> None:
    """However many threads share the work, too: one rank mostly has more of them than each of several."""
    few = [[0], [17, 600, 1100], range(300, 301), range(5, LONG, 2), range(3, LONG, 7)]
    ((out, lse),) = _some_rows(1, [range(LONG)])
    for rows, found in zip(few, _some_rows(threads, few), strict=True):
        at = torch.tensor(list(rows))
        assert torch.equal(bits(found[0]), bits(out[:, at]))
        assert torch.equal(bits(found[1]), bits(lse[..., at].contiguous()))


def _some_rows(threads: int, every: Sequence[Sequence[int]]) -> list[tuple[Tensor, ...]]:
    """(out, lse) of some rows at a time, by so many threads."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, LONG, heads, 24, generator=g) for heads in (4, 2, 2))
    begin = torch.arange(LONG, dtype=torch.int32)[None] // 3
    segment = reference.Segment(k, v, begin, (begin + 700).clamp(max=LONG))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        at = [torch.tensor(list(rows)) for rows in every]
        some = [segment._replace(begin=segment.begin[:, a], end=segment.end[:, a]) for a in at]
        return [reference.forward(q[:, a], [x], 0.2, fixed=True) for a, x in zip(at, some, strict=True)]
    finally:
        torch.set_num_threads(before)


# What is refused, what is taken, what is said


WORDS = "attends keys as ranks hold them, reproducible=True attends them in order of their positions; use transport='auto'"


@pytest.mark.parametrize(
    ("options", "mesh", "words"),
    [
        ({"transport": "p2p"}, None, f"transport='p2p' {WORDS}"),
        ({"transport": "nvlink"}, None, f"transport='nvlink' {WORDS}"),
        ({"transport": "ulysses"}, None, f"transport='ulysses' {WORDS}"),
        ({"schedule": "rotate"}, None, "schedule must be 'auto' or 'gather', schedule='rotate'; use schedule='auto'"),
        ({"kernel": "hopper"}, None, "kernel='hopper' has no key blocks at fixed places, which reproducible=True needs; use"),
        ({"max_buffer_bytes": 5}, None, "bytes of buffers: max_buffer_bytes=5; use a larger"),
        ({}, (2, 2), "transport 'allgather', which needs one ring of all ranks: the mesh is 2 x 2; use a group"),
    ],
)
def test_what_cannot_honour_it_is_refused(options: dict, mesh: tuple[int, int] | None, words: str) -> None:
    q, k, v = (torch.empty(1, 8, heads, 64, dtype=torch.bfloat16, device="meta") for heads in (4, 4, 4))
    with pytest.raises(NotImplementedError, match=re.escape(words)):
        rf.explain(q, k, v, layout="zigzag", size=4, mesh=mesh, options=rf.Options(reproducible=True, **options))


@pytest.mark.parametrize("transport", ["auto", "allgather"])
def test_explain_says_what_is_taken(transport: str) -> None:
    q, k, v = (torch.empty(1, 8, 4, 64, dtype=torch.bfloat16, device="meta") for _ in range(3))
    told = rf.explain(q, k, v, layout="zigzag", size=4, options=rf.Options(reproducible=True, transport=transport))
    why = {"auto": "brings all keys, which reproducible=True attends in order of their positions", "allgather": "asked for"}
    assert told.transport == f"allgather ({why[transport]})"
    assert told.schedule.startswith("gather")
    assert told.kernel.startswith("triton (hopper has no")
    assert max(map(len, str(told).splitlines())) <= 128


def test_keys_in_order_are_those_of_a_ring_of_one() -> None:
    """A plan's rows see the same keys by number in the whole sequence, wherever keys lie."""
    layout, kv_layout = rf.layouts.zigzag(30, 3).shift(7), rf.layouts.striped(45, 3)
    for name, mask in masks(45).items():
        plan, cpu = make_plan(layout, mask, kv_layout, schedule="gather"), torch.device("cpu")
        one = make_plan(contiguous(30, 1).shift(7), mask, contiguous(45, 1))
        ((begin, end),) = one.intervals(0, cpu).values()
        for rank in range(3):
            order = plan.in_order(rank, cpu)
            assert plan.in_order(rank, cpu) is order
            at = layout.positions(rank) - 7
            assert torch.equal(order.begin, begin[:, at]), name
            assert torch.equal(order.end, end[:, at]), name
            assert torch.equal(order.places, torch.cat([kv_layout.positions(block) for block in plan.attended(rank)]))

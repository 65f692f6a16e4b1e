"""Ring against the dense float64 oracle over gloo: layouts x masks x schedules, forward and backward, and what moves."""

import random
from typing import Any
from unittest import mock

import oracle
import pytest
import torch
from pool import Pools
from ring_cases import (
    CAUSAL,
    HOSTS,
    KEYS,
    LAYOUTS,
    LENGTHS,
    SCHEDULES,
    SIZES,
    Case,
    check,
    exact,
    make_layout,
    masks,
    masks_for,
    run_cases,
    run_threads,
    verdict,
)
from ring_traffic import count_sends, most_blocks, needs_of

import ringflash as rf
from ringflash.ring import Ring
from ringflash.transport.blocks import Shapes


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
def test_ring_equals_oracle(pools: Pools, full: bool, size: int, layout: str, schedule: str) -> None:
    """Every layout, mask and schedule at every size; without --full each mask at one length, another one in each cell."""
    draw = random.Random(f"{size}{layout}{schedule}")
    pairs = [(name, n) for name in masks(LENGTHS[0]) for n in (LENGTHS if full else [draw.choice(LENGTHS)])]
    check(pools, size, [Case(masks(n)[name], n, layout, schedule=schedule) for name, n in pairs])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("size", "hosts"), [(size, hosts) for size in SIZES for hosts in HOSTS[size]], ids=str)
def test_ring_over_hosts_equals_oracle(pools: Pools, full: bool, size: int, hosts: tuple[int, ...], layout: str) -> None:
    draw = random.Random(f"{hosts}{layout}")
    pairs = [(name, n) for name in masks(LENGTHS[0]) for n in (LENGTHS if full else [draw.choice(LENGTHS)])]
    check(pools, size, [Case(masks(n)[name], n, layout, schedule="hierarchical", hosts=hosts) for name, n in pairs])


@pytest.mark.parametrize("seqlen", LENGTHS)
def test_ring_of_one_equals_oracle(pools: Pools, seqlen: int) -> None:
    """Both ways to be one rank, without and with a process group; the floor alone is the bound here."""
    cases = [Case(mask, seqlen) for mask in masks(seqlen).values()]
    check(pools, 1, cases)
    for case in cases:
        for x, z in zip(run_cases([case])[0], exact(case), strict=True):
            assert oracle.rms(x, z) <= 16 * torch.finfo(torch.float32).eps * oracle.norm(z), case


def test_gradients_that_nothing_is_added_to_are_rounded_by_the_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """dK and dV of a ring of one are in the keys' dtype from the start: no float32 copy, no pass that rounds it."""
    made, empty = [], Shapes.empty

    def watch(self: Shapes, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        made.append(empty(self, *args))
        return made[-1]

    monkeypatch.setattr(Shapes, "empty", watch)
    run_cases([Case(rf.Mask(causal=True), 33, dtype=torch.bfloat16)])
    assert [x.dtype for pair in made for x in pair] == [torch.bfloat16] * 2


def dtypes_of_gradients(case: Case) -> list[torch.dtype]:
    """What the ring gives the autograd function, dk and dv last."""
    found, backward = [], Ring.backward

    def watch(self: Ring, *args: Any, **kwargs: Any) -> Any:
        dq, pair = backward(self, *args, **kwargs)
        found.extend(x.dtype for x in (dq, *pair))
        return dq, pair

    with mock.patch.object(Ring, "backward", watch):
        run_cases([case])
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("size", [2, 3])
def test_gradients_are_rounded_as_they_are_last_added(pools: Pools, size: int, schedule: str) -> None:
    case = Case(rf.Mask(causal=True), 33, "zigzag", schedule=schedule, dtype=torch.bfloat16)
    assert pools.run(size, dtypes_of_gradients, case) == [[torch.float32, torch.bfloat16, torch.bfloat16]] * size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", SIZES)
def test_dtypes(pools: Pools, size: int, dtype: torch.dtype) -> None:
    cases = [Case(mask, 100, "zigzag", schedule=s, dtype=dtype) for mask in masks(100).values() for s in SCHEDULES]
    check(pools, size, cases)


SHAPES = [
    {"heads": (4, 1)},
    {"heads": (3, 3)},
    {"heads": (14, 7)},
    {"headdim": (24, 40)},
    {"headdim": (1, 1)},
    {"headdim": (17, 3)},
    {"headdim": (256, 256)},
    {"batch": 1},
    {"batch": 0},
    {"scale": 1.0},
    {"scale": 0.0},
    {"scale": -0.3},
]


@pytest.mark.parametrize("size", SIZES)
def test_shapes_and_scales(pools: Pools, size: int) -> None:
    check(pools, size, [Case(rf.Mask(causal=True, window=(11, 0)), 33, **shape) for shape in SHAPES])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("size", SIZES)
def test_keys_that_lie_otherwise(pools: Pools, size: int, schedule: str) -> None:
    check(pools, size, [Case(m, schedule=schedule, **keys) for keys in KEYS for m in masks_for(Case(**keys))])


@pytest.mark.parametrize("size", SIZES)
def test_layouts_of_any_runs(pools: Pools, size: int) -> None:
    """Many documents, most shorter than the ring: shards of many runs, uneven and empty."""
    lengths = random.Random(size).choices((0, 1, 2, 3, 9), k=30)
    documents = (0, *(sum(lengths[: i + 1]) for i in range(30)))
    mask = rf.Mask(causal=True, documents=documents)
    check(pools, size, [Case(mask, documents[-1], layout, schedule=s) for layout in LAYOUTS for s in SCHEDULES])


@pytest.mark.slow(sample=3)
@pytest.mark.parametrize("size", [5, 8])
@pytest.mark.parametrize("schedule", [*SCHEDULES, "hierarchical"])
def test_more_ranks_than_cores(size: int, schedule: str) -> None:
    """The same loop in threads: masks x layouts in turn, so that each meets each over both sizes and schedules."""
    for i, (seqlen, mask) in enumerate((n, m) for n in (3, 33, 100) for m in masks(n).values()):
        hosts = HOSTS[size][i % len(HOSTS[size])]
        case = Case(mask, seqlen, LAYOUTS[(i + size) % len(LAYOUTS)], schedule=schedule, hosts=hosts)
        assert not (wrong := verdict(case, run_threads(case, size))), wrong


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_keys_gathered_by_copy_engines(size: int) -> None:
    """The same loop where one launch attends all blocks, in threads that share memory: masks x layouts in turn."""
    for i, (mask, seqlen) in enumerate((m, n) for n in (33, 5) for m in masks(n).values()):
        case = Case(mask, seqlen, LAYOUTS[(i + size) % len(LAYOUTS)], transport="nvlink")
        assert not (wrong := verdict(case, run_threads(case, size))), wrong


@pytest.mark.parametrize("size", [2, 3, 4])
def test_keys_gathered_by_collectives(pools: Pools, size: int) -> None:
    every = [(m, n) for n in (33, 5, 1) for m in masks(n).values()]
    cases = [Case(m, n, LAYOUTS[(i + size) % len(LAYOUTS)], transport="allgather") for i, (m, n) in enumerate(every)]
    check(pools, size, cases)


# What moves


def _block(case: Case, size: int, block: int, dtype: torch.dtype, to: int) -> list[tuple[int, int, torch.dtype]]:
    tokens = case.batch * case.layouts(size)[1].lengths[block] * case.heads[1]
    return [(to, tokens * headdim, dtype) for headdim in case.headdim]


@pytest.mark.parametrize("size", SIZES)
def test_direct_moves_exactly_the_blocks_that_are_needed(pools: Pools, size: int) -> None:
    """Forward: each needed block once, straight from its owner. Backward: again, and its float32 dK, dV straight home."""
    every = [(layout, mask) for layout in ("contiguous", "zigzag") for mask in masks(63).values()]
    cases = [Case(mask, 63, layout, schedule="direct", dtype=torch.bfloat16) for layout, mask in every]
    for rank, counted in enumerate(pools.run(size, count_sends, cases, True)):
        for case, (forward, backward) in zip(cases, counted, strict=True):
            needs = needs_of(case, size)
            others = [r for r in range(size) if r != rank]
            blocks = [x for r in others if needs[r, rank] for x in _block(case, size, rank, case.dtype, r)]
            grads = [x for b in others if needs[rank, b] for x in _block(case, size, b, torch.float32, b)]
            assert forward == sorted(blocks, key=str), case
            assert backward == sorted(blocks + grads, key=str), case


@pytest.mark.parametrize("size", SIZES)
def test_rotate_moves_each_block_to_its_last_reader(pools: Pools, size: int) -> None:
    cases = [Case(m, 63, lay, schedule="rotate") for lay in ("contiguous", "striped") for m in masks(63).values()]
    ranks = pools.run(size, count_sends, cases, False)
    for i, case in enumerate(cases):
        needs = needs_of(case, size)
        hops = [max((t for t in range(size) if needs[(b + t) % size, b]), default=0) for b in range(size)]
        for rank in range(size):
            passing = [b for b in range(size) if (rank - b) % size < hops[b]]
            blocks = [x for b in passing for x in _block(case, size, b, case.dtype, (rank + 1) % size)]
            assert ranks[rank][i][0] == sorted(blocks, key=str), case


@pytest.mark.parametrize("hosts", HOSTS[4], ids=str)
def test_hierarchical_sends_a_block_to_a_host_once(pools: Pools, hosts: tuple[int, ...]) -> None:
    """Forward: K and V go once to each other host that needs them. Backward: again, and float32 dK, dV back as often."""
    cases = [Case(m, 64, "contiguous", schedule="hierarchical", dtype=torch.bfloat16, hosts=hosts) for m in masks(64).values()]
    ranks = pools.run(4, count_sends, cases, True)
    for i, case in enumerate(cases):
        needs = needs_of(case, 4)
        away = {(b, hosts[r]) for r in range(4) for b in range(4) if needs[r, b] and hosts[r] != hosts[b]}
        forward, backward = ([(rank, x) for rank in range(4) for x in ranks[rank][i][way]] for way in (0, 1))
        for sends, dtypes in ((forward, [case.dtype]), (backward, [case.dtype, torch.float32])):
            over = [(n, dtype) for rank, (to, n, dtype) in sends if hosts[rank] != hosts[to]]
            blocks = [(n, dtype) for b, _ in away for dtype in dtypes for _, n, _ in _block(case, 4, b, dtype, 0)]
            assert sorted(over, key=str) == sorted(blocks, key=str), case


def test_nothing_moves_where_documents_are_local(pools: Pools) -> None:
    mask = rf.Mask(documents=(0, 8, 16))
    cases = [Case(mask, 16, "contiguous", schedule=s) for s in (*SCHEDULES, "auto")]
    assert pools.run(2, count_sends, cases, True) == [[([], [])] * 3] * 2


@pytest.mark.parametrize("size", SIZES)
def test_forward_hops_do_not_depend_on_gradients(pools: Pools, size: int) -> None:
    cases = [Case(m, 33, schedule=s) for m in masks(33).values() for s in SCHEDULES]
    with_grad, without = (pools.run(size, count_sends, cases, needed) for needed in (True, False))
    for a, b in zip(with_grad, without, strict=True):
        assert [forward for forward, _ in a] == [forward for forward, _ in b]


def test_auto_moves_no_more_than_either(pools: Pools) -> None:
    cases = [Case(m, 63, "contiguous", schedule=s) for m in masks(63).values() for s in (*SCHEDULES, "auto")]
    ranks = pools.run(4, count_sends, cases, False)
    moved = [sum(n for rank in ranks for _, n, _ in rank[i][0]) for i in range(len(cases))]
    for rotate, direct, auto in zip(moved[::3], moved[1::3], moved[2::3], strict=True):
        assert auto <= min(rotate, direct)


def test_balanced_layout_is_a_layout() -> None:
    layout = make_layout("balanced", 100, 3, CAUSAL)
    assert sorted(torch.cat([layout.positions(r) for r in range(3)]).tolist()) == list(range(100))


@pytest.mark.parametrize(("schedule", "fused", "grads"), [("rotate", False, 3), ("rotate", True, 4), ("direct", False, 4)])
def test_two_blocks_and_three_gradients_are_held_at_most(pools: Pools, schedule: str, fused: bool, grads: int) -> None:
    """rotate: dK/dV produced, arriving and leaving. direct: the sum that comes together at home besides. A tile that makes dQ
    and dK/dV at once: the own block's as well, from the start.
    """
    for most in pools.run(4, most_blocks, schedule, fused, (0, 0, 0, 0)):
        assert most == {"kv": 2, "grads": grads}


@pytest.mark.parametrize(
    ("hosts", "kv", "grads"), [((0, 0, 1, 1), 2, 4), ((0, 1, 0, 1), 2, 4), ((0, 1, 2, 3), 2, 4), ((0, 0, 0, 1), 3, 5)], ids=str
)
def test_hierarchical_holds_few_blocks_and_gradients(pools: Pools, hosts: tuple[int, ...], kv: int, grads: int) -> None:
    """schedules.py says which; four ranks need fewer."""
    most = pools.run(4, most_blocks, "hierarchical", True, hosts)
    assert [max(m[kind] for m in most) for kind in ("kv", "grads")] == [kv, grads]

"""Rings in whose backward pass rows travel: against the oracle, and what moves, is held and is told."""

import itertools
import math
import random
import sys

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
    masks,
    masks_for,
    plan_of,
    run_threads,
    verdict,
)
from ring_traffic import count_sends, most_blocks, needs_of

import ringflash as rf
from ringflash.heads import inner_plan
from ringflash.plan import TokenBytes

MHA = (4, 4)


def rows_travel(cases: list[Case], size: int) -> list[Case]:
    """The same cases, in many of which rows travel."""
    by_rows = [plan_of(case, size).backward.rows for case in cases]
    assert sum(by_rows) > len(cases) // 3
    return cases


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
def test_ring_equals_oracle(pools: Pools, full: bool, size: int, layout: str, schedule: str) -> None:
    draw = random.Random(f"{size}{layout}{schedule}rows")
    pairs = [(name, n) for name in masks(LENGTHS[0]) for n in (LENGTHS if full else [draw.choice(LENGTHS)])]
    cases = [Case(masks(n)[name], n, layout, schedule=schedule, heads=MHA) for name, n in pairs]
    check(pools, size, rows_travel(cases, size))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("size", SIZES)
def test_keys_that_lie_otherwise(pools: Pools, size: int, schedule: str) -> None:
    cases = [Case(m, schedule=schedule, heads=MHA, **keys) for keys in KEYS for m in masks_for(Case(**keys))]
    check(pools, size, rows_travel(cases, size))


@pytest.mark.parametrize("size", SIZES)
def test_layouts_of_any_runs(pools: Pools, size: int) -> None:
    """Many documents, most shorter than the ring: shards of many runs, uneven and empty."""
    lengths = random.Random(size).choices((0, 1, 2, 3, 9), k=30)
    documents = (0, *(sum(lengths[: i + 1]) for i in range(30)))
    mask = rf.Mask(causal=True, documents=documents)
    cases = [Case(mask, documents[-1], layout, schedule=s, heads=MHA) for layout in LAYOUTS for s in SCHEDULES]
    check(pools, size, rows_travel(cases, size))


SHAPES = [
    {"heads": (1, 1)},
    {"heads": (3, 3), "headdim": (24, 40)},
    {"headdim": (1, 1)},
    {"batch": 1},
    {"batch": 0},
    {"scale": -0.3},
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", SIZES)
def test_shapes_and_dtypes(pools: Pools, size: int, dtype: torch.dtype) -> None:
    check(pools, size, [Case(CAUSAL, 33, **{"heads": MHA, "dtype": dtype, **shape}) for shape in SHAPES])


@pytest.mark.slow(sample=3)
@pytest.mark.parametrize("size", [5, 8])
@pytest.mark.parametrize("schedule", [*SCHEDULES, "hierarchical"])
def test_more_ranks_than_cores(monkeypatch: pytest.MonkeyPatch, size: int, schedule: str) -> None:
    """The same loop in threads, on hosts of all kinds; rows travel however unevenly that leaves the work."""
    monkeypatch.setattr(sys.modules["ringflash.plan"], "MOST_WORK", math.inf)
    cases = []
    for i, (seqlen, mask) in enumerate((n, m) for n in (3, 33, 100) for m in masks(n).values()):
        hosts = HOSTS[size][i % len(HOSTS[size])]
        cases.append(Case(mask, seqlen, LAYOUTS[(i + size) % len(LAYOUTS)], schedule=schedule, hosts=hosts, heads=MHA))
    for case in rows_travel(cases, size):
        assert not (wrong := verdict(case, run_threads(case, size))), wrong


def some_gradients(case: Case) -> bool:
    """Each rank wants other gradients than the next, of out or lse alone in turn: the same bits as when all are wanted."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    layout, kv_layout = case.layouts(size)
    (q, k, v), (dout, dlse) = case.inputs()
    shards = layout.part(q, rank), kv_layout.part(k, rank), kv_layout.part(v, rank)
    grads = layout.part(dout, rank), layout.part(dlse, rank, 2)
    subsets = [x for n in (1, 2, 3) for x in itertools.combinations(range(3), n)]
    same = True
    for outputs in ((0,), (1,), (0, 1)):

        def gradients(wanted: tuple[int, ...], outputs: tuple[int, ...] = outputs) -> list[torch.Tensor]:
            leaves = [x.clone().requires_grad_(i in wanted) for i, x in enumerate(shards)]
            found = rf.ring_attention(*leaves, layout=layout, kv_layout=kv_layout, mask=case.mask, return_lse=True)
            torch.autograd.backward([found[i] for i in outputs], [grads[i] for i in outputs])
            return [leaves[i].grad for i in wanted]  # pyright: ignore[reportReturnType]

        every = gradients((0, 1, 2))
        for i in range(len(subsets)):
            wanted = subsets[(i + rank) % len(subsets)]
            same &= all(torch.equal(every[j], x) for j, x in zip(wanted, gradients(wanted), strict=True))
    return same


@pytest.mark.parametrize("size", SIZES)
def test_any_subset_of_gradients_and_the_same_bits_every_time(pools: Pools, size: int) -> None:
    case = Case(rf.Mask(causal=True), 33, "striped", heads=MHA)
    assert plan_of(case, size).backward.rows
    assert all(pools.run(size, some_gradients, case))


def test_a_rank_without_tokens_takes_part(pools: Pools) -> None:
    """One token on three ranks; two queries of which one lies where no key does."""
    plain = [rf.Mask(), CAUSAL, rf.Mask(window=(0, 0)), rf.Mask(window=(None, 4))]
    cases = [Case(m, n, "contiguous", "striped", heads=MHA, behind=behind) for m in plain for n, behind in ((1, 0), (2, -1))]
    check(pools, 3, cases)


def _rows(case: Case, size: int, block: int, to: int) -> list[tuple[int, int, torch.dtype]]:
    each = case.batch * case.layouts(size)[0].lengths[block] * case.heads[0]
    stats = [(to, each, torch.float32)] * 2
    return [*((to, each * headdim, case.dtype) for headdim in case.headdim), *stats]


def _dq(case: Case, size: int, block: int) -> tuple[int, int, torch.dtype]:
    return block, case.batch * case.layouts(size)[0].lengths[block] * case.heads[0] * case.headdim[0], torch.float32


@pytest.mark.parametrize("size", SIZES)
def test_direct_moves_rows_to_the_ranks_whose_keys_they_see_and_dq_home(pools: Pools, size: int) -> None:
    every = [(layout, mask) for layout in ("contiguous", "zigzag") for mask in masks(63).values()]
    cases = [Case(mask, 63, layout, schedule="direct", dtype=torch.bfloat16, heads=MHA) for layout, mask in every]
    cases = [case for case in rows_travel(cases, size) if plan_of(case, size).backward.rows]
    for rank, counted in enumerate(pools.run(size, count_sends, cases, True)):
        for case, (_, backward) in zip(cases, counted, strict=True):
            needs, others = needs_of(case, size), [r for r in range(size) if r != rank]
            blocks = [x for r in others if needs[rank, r] for x in _rows(case, size, rank, r)]
            grads = [_dq(case, size, b) for b in others if needs[b, rank]]
            assert backward == sorted(blocks + grads, key=str), case


def nbytes(sends: list[tuple[int, int, torch.dtype]]) -> int:
    return sum(elements * dtype.itemsize for _, elements, dtype in sends)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_fewer_bytes_than_keys_would_be_and_grouped_queries_leave_keys_to_travel(pools: Pools, schedule: str) -> None:
    cases = [Case(CAUSAL, 64, schedule=schedule, dtype=torch.bfloat16, heads=h, headdim=(16, 16)) for h in (MHA, (4, 1))]
    ranks = pools.run(4, count_sends, cases, True)
    many, grouped = (sum(nbytes(counted[i][1]) for counted in ranks) for i in range(2))
    for case, moved, by_rows in zip(cases, (many, grouped), (True, False), strict=True):
        plan = plan_of(case, 4)
        assert plan.traffic is not None
        assert plan.backward.rows == by_rows
        assert moved == min(plan.traffic[:2]) * case.batch
    keys = 2 * 12 * 16 * 2 * 16 * (2 + 4)  # batch, moves, tokens, K and V, headdim, bytes with those of gradients; per key head
    assert many == 2 * 12 * 16 * 4 * (2 * 16 * 2 + 8 + 16 * 4) < 4 * keys
    assert grouped == keys


@pytest.mark.parametrize(("schedule", "fused", "grads"), [("rotate", False, 3), ("rotate", True, 4), ("direct", False, 4)])
def test_two_blocks_and_three_gradients_are_held_at_most(pools: Pools, schedule: str, fused: bool, grads: int) -> None:
    """As where keys travel: rows, and dQ."""
    for most in pools.run(4, most_blocks, schedule, fused, (0, 0, 0, 0), 4):
        assert most == {"kv": 2, "grads": grads}


def test_around_an_exchange_of_heads_keys_travel() -> None:
    layout, token = rf.layouts.zigzag(64, 4), TokenBytes(9, 9, 1, 1)
    ring = inner_plan(layout, CAUSAL, layout, size=1, rank=0, schedule="auto", hosts=(0,) * 4, token=token)
    column = inner_plan(layout, CAUSAL, layout, size=2, rank=0, schedule="auto", hosts=(0,) * 4, token=token)
    assert (ring.backward.rows, column.backward.rows, column.traffic) == (True, False, None)


@pytest.mark.parametrize("hosts", [(0, 0, 0, 0), (0, 0, 1, 1)])
@pytest.mark.parametrize("schedule", ["rotate", "direct", "hierarchical"])
def test_explain_tells_what_travels(schedule: str, hosts: tuple[int, ...]) -> None:
    layout, options = rf.layouts.contiguous(38, 4), rf.Options(schedule=schedule, transport="p2p")
    told, per_row, per_dq = [], 2 * 4 * (2 * 16 * 2 + 8), 2 * 4 * 16 * 4
    for rank in range(4):
        x = [torch.empty(2, layout.lengths[rank], 4, 16, dtype=torch.bfloat16, device="meta")] * 3
        told.append(rf.explain(*x, layout=layout, mask=CAUSAL, rank=rank, hosts=hosts, options=options))
    for rank, one in enumerate(told):
        assert one.rows
        assert one.traffic is not None
        assert sum(step.pairs for step in one.backward_steps) == sum(
            sum(q >= k for q in range(38)) for k in layout.positions(rank).tolist()
        )
        assert sum(sent for _, _, sent in one.links) == sum(s.bytes_sent + s.grad_bytes_sent for s in one.backward_steps)
        assert not any(step.grad_bytes_sent for step in one.steps)
        assert "\nbackward   " in str(one)
        assert "of rows and dQ travel; keys, dK and dV would be" in str(one)
        assert max(map(len, str(one).splitlines())) <= 128
    steps = [step for one in told for step in one.backward_steps]
    sent = sum(step.bytes_sent + step.grad_bytes_sent for step in steps)
    assert sent == sum(step.bytes_received + step.grad_bytes_received for step in steps) == told[0].traffic.rows
    if schedule == "direct":  # every row block goes to the ranks before, and its dQ back
        assert sent == sum(rank * n for rank, n in enumerate(layout.lengths)) * (per_row + per_dq)
    if len(set(hosts)) > 1:
        assert 0 < told[0].grad_border_bytes < sent
        assert "of rows and dQ\n" in str(told[0])


def test_explain_tells_that_keys_travel() -> None:
    x = [torch.empty(1, 16, n, 16, dtype=torch.bfloat16, device="meta") for n in (4, 1, 1)]
    told = rf.explain(*x, layout="zigzag", size=4, mask=CAUSAL, options=rf.Options(transport="p2p"))
    assert "backward   36 KiB of keys, dK and dV travel; rows and dQ would be 102 KiB\n" in str(told)
    assert not told.rows
    assert told.backward_steps == ()
    mask = rf.Mask(causal=True, documents=(0, 1000, 1500, 7000, 7100, 7200, 7300, 16000))
    layout = rf.layouts.balanced(mask, 16000, 4)
    x = [torch.empty(1, layout.lengths[0], 4, 16, dtype=torch.bfloat16, device="meta")] * 3
    told = rf.explain(*x, layout=layout, mask=mask, options=rf.Options(transport="p2p"))
    assert told.traffic is not None
    assert told.traffic.rows < told.traffic.keys
    assert f"but {told.traffic.work:.2f} x the work of the busiest rank\n" in str(told)

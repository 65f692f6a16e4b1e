"""Plans, executed symbolically: every visible pair once and no other, with blocks and dK/dV where the transfers put them."""

import math
import random
import sys
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ring_cases import LAYOUTS, make_layout
from torch._subclasses.fake_tensor import FakeTensorMode

import ringflash as rf
from ringflash.plan import Course, Plan, TokenBytes, make_plan
from ringflash.schedules import SCHEDULES, Transfer

CPU = torch.device("cpu")
ROWS = TokenBytes(keys=10**6, dkv=10**6, rows=1, dq=1)  # rows travel where anything does


@st.composite
def documents(draw: st.DrawFn, seqlen: int) -> tuple[int, ...]:
    """Cumulative lengths, some documents empty."""
    return (0, *sorted(draw(st.lists(st.integers(0, seqlen), max_size=5))), seqlen)


@st.composite
def masks(draw: st.DrawFn, seqlen: int) -> rf.Mask:
    causal = draw(st.booleans())
    side = st.one_of(st.none(), st.integers(0, 9), st.just(50))
    left, right = draw(side), 0 if causal else draw(side)
    kind = draw(st.sampled_from(("plain", "documents", "rows", "prefix")))
    if kind == "prefix":
        return rf.Mask(causal, (None, right), prefix=draw(st.integers(0, seqlen + 3)))
    rows = {"plain": 0, "documents": 1, "rows": 2}[kind]
    cu = tuple(draw(documents(seqlen)) for _ in range(rows))
    return rf.Mask(causal, (left, right), documents=(cu if kind == "rows" else cu[0]) if cu else None)


@st.composite
def plans(
    draw: st.DrawFn,
    size: int = 6,
    schedules: Sequence[str] = (*SCHEDULES, "auto"),
    tokens: Sequence[TokenBytes | None] = (None,),
) -> Plan:
    """Queries anywhere among the keys, laid out alike or otherwise. size: of the largest ring."""
    size, seqlen_k = draw(st.integers(1, size)), draw(st.integers(0, 40))
    seqlen = seqlen_k if draw(st.booleans()) else draw(st.integers(0, seqlen_k))
    front = draw(st.integers(0, seqlen_k - seqlen))
    mask = draw(masks(seqlen_k))
    layout = _layout(draw(st.sampled_from(LAYOUTS)), seqlen, size, mask).shift(front)
    same = seqlen == seqlen_k and draw(st.booleans())
    kv_layout = None if same else _layout(draw(st.sampled_from(LAYOUTS)), seqlen_k, size, mask)
    hosts = tuple(draw(st.lists(st.integers(0, 3), min_size=size, max_size=size)))
    schedule, token = draw(st.sampled_from(schedules)), draw(st.sampled_from(tokens))
    with mock.patch.object(sys.modules["ringflash.plan"], "MOST_WORK", math.inf):
        return make_plan(layout, mask, kv_layout, schedule=schedule, hosts=hosts, token=token)


def either(**options: Any) -> st.SearchStrategy[Plan]:
    """Plans in whose backward pass keys travel, and such in which rows do."""
    return plans(tokens=(None, ROWS), **options)


def _layout(name: str, seqlen: int, size: int, mask: rf.Mask) -> rf.Layout:
    ends = {row[-1] for row in mask.document_rows(seqlen)}
    return make_layout(name, seqlen, size, mask if ends == {seqlen} else rf.Mask(mask.causal, mask.window))


def seen(plan: Plan) -> torch.Tensor:
    """uint8 (batch rows, queries, keys): what the mask's definition says."""
    keys = torch.arange(plan.kv_layout.seqlen)
    return oracle.visible(plan.mask, torch.arange(plan.layout.offset, plan.layout.end), keys).byte()


def arrivals(course: Course, moves: str) -> list[list[tuple[Transfer, int]]]:
    """What lands at the end of each step, with the step in which it set out. moves: "blocks" or "partials"."""
    landing: list[list[tuple[Transfer, int]]] = [[] for _ in course.steps]
    for t, step in enumerate(course.steps):
        for x, steps in getattr(step, moves):
            landing[t + steps - 1].append((x, t))
    return landing


def attended(plan: Plan, course: Course) -> torch.Tensor:
    """uint8 (batch rows, queries, keys): how often the plan computes each pair; a block is attended where it has been put."""
    done = torch.zeros_like(seen(plan))
    held = [{rank} for rank in range(plan.size)]
    coming: list[set[int]] = [set() for _ in range(plan.size)]
    for step, landing in zip(course.steps, arrivals(course, "blocks"), strict=True):
        for rank, block in ((rank, block) for rank, blocks in enumerate(step.attend) for block in blocks):
            assert block in held[rank] or (step.early and Transfer(block, block, rank) in step.transfers)
            begin, end = (plan.row_intervals if course.rows else plan.intervals)(rank, CPU)[block]
            rows_of, keys_of = (block, rank) if course.rows else (rank, block)
            keys = plan.kv_layout.positions(keys_of)
            index = torch.arange(len(keys))
            assert bool(((begin >= 0) & (begin <= end) & (end <= len(keys))).all())
            assert bool(((begin.diff() >= 0) & (end.diff() >= 0)).all())
            sees = (index >= begin[..., None]) & (index < end[..., None])
            queries = plan.layout.positions(rows_of) - plan.layout.offset
            done[:, queries[:, None], keys[None, :]] += sees.byte()
        for (block, source, target), _ in step.blocks:
            assert block in held[source], "sent by a rank that does not hold it"
            assert block not in held[target] | coming[target], "sent twice"
            coming[target].add(block)
        for (block, _, target), _ in landing:
            held[target].add(block)
            coming[target].remove(block)
    return done


@given(either())
def test_every_visible_pair_once_and_no_other(plan: Plan) -> None:
    assert torch.equal(attended(plan, plan.forward), seen(plan))
    assert plan.backward is plan.forward or torch.equal(attended(plan, plan.backward), seen(plan))


def pairs_per_block(plan: Plan) -> torch.Tensor:
    """int64 (size, size): visible pairs of each rank's queries with each block, summed over batch rows."""
    pairs = seen(plan).sum(0, dtype=torch.int32)
    rows = [pairs[plan.layout.positions(rank) - plan.layout.offset].sum(0) for rank in range(plan.size)]
    return torch.stack([torch.stack([row[plan.kv_layout.positions(b)].sum() for b in range(plan.size)]) for row in rows])


@given(plans())
def test_needs_and_work_are_exact(plan: Plan) -> None:
    work = pairs_per_block(plan)
    assert torch.equal(torch.from_numpy(plan.needs), work > 0)
    assert [plan.work(rank).tolist() for rank in range(plan.size)] == work.tolist()


@pytest.mark.parametrize("window", [(0, 0), (2, 0), (40, None)])
@pytest.mark.parametrize("layout", ["striped", "zigzag", "per_document(striped)"])
def test_needs_are_exact_where_there_are_too_many_rows_to_look_at_each(window: tuple[int, int | None], layout: str) -> None:
    seqlen, size = 4500, 5
    mask = rf.Mask(window=window, documents=(0, *sorted(random.Random(seqlen).sample(range(1, seqlen), 200)), seqlen))
    plan = make_plan(make_layout(layout, seqlen, size, mask), mask, rf.layouts.striped(seqlen, size))
    assert torch.equal(torch.from_numpy(plan.needs), pairs_per_block(plan) > 0)


@pytest.mark.parametrize("last", [0, 1, 2, 7])
def test_one_late_row_decides_what_is_needed(last: int) -> None:
    layout = rf.layouts.striped(12001, 2)
    kv_layout = rf.layouts.per_document("striped", (0, 12001 - last, 12001), 2)  # the last keys change places if last is even
    plan = make_plan(layout, rf.Mask(window=(0, 0)), kv_layout)
    changed = [len(set(layout.positions(r).tolist()) & set(kv_layout.positions(1 - r).tolist())) > 0 for r in range(2)]
    assert plan.needs.tolist() == [[True, changed[0]], [changed[1], True]]


@given(either())
def test_partial_gradients_travel_as_one_and_come_home_whole(plan: Plan) -> None:
    # partial[rank][block]: whose contributions to the block's dK/dV, or its dQ, lie on the rank
    partial: list[dict[int, list[int]]] = [{} for _ in range(plan.size)]
    moving: dict[tuple[Transfer, int], list[int]] = {}
    for t, (step, landing) in enumerate(zip(plan.backward.steps, arrivals(plan.backward, "partials"), strict=True)):
        moving |= {(x, t): partial[x.source].pop(x.block) for x, _ in step.partials}  # complete before this step
        for rank, blocks in enumerate(step.attend):
            for block in blocks:
                partial[rank].setdefault(block, []).append(rank)
        for x, begin in landing:
            partial[x.target].setdefault(x.block, []).extend(moving.pop((x, begin)))
        if plan.schedule == "rotate" and not plan.backward.rows:  # one partial per block, besides the owner's own share
            away = [block for rank, blocks in enumerate(partial) for block in blocks if block != rank]
            assert len(away) == len(set(away))
    assert not moving
    for rank, blocks in enumerate(partial):
        assert list(blocks) == [rank]
        needs = plan.needs.T if plan.backward.rows else plan.needs
        assert sorted(blocks[rank]) == sorted({rank, *(r for r in range(plan.size) if needs[r, rank])})


@given(either())
def test_turns_are_the_steps_and_both_ends_of_each_hop_agree(plan: Plan) -> None:
    for course in (plan.forward, plan.backward):
        for t, step in enumerate(course.steps):
            turns = [turns[t] for turns in course.turns]
            assert [turn.attend for turn in turns] == list(step.attend)
            _same_hops(step.transfers, step.grads, [turn.hops for turn in turns])
            departing = [turn.departing for turn in turns]
            _same_hops([x for x, _ in step.blocks], [x for x, _ in step.partials], departing)
            for turn in turns:  # also a rank that has no part in them knows that others have
                assert (turn.hops.moves, turn.hops.grad_moves) == (bool(step.transfers), bool(step.grads))


def _same_hops(transfers: Sequence[Transfer], grads: Sequence[Transfer], parts: Sequence[Any]) -> None:
    for hops, sends, recvs in ((transfers, "sends", "recvs"), (grads, "grad_sends", "grad_recvs")):
        expected = sorted(hops)
        assert sorted((b, r, to) for r, part in enumerate(parts) for b, to in getattr(part, sends)) == expected
        assert sorted((b, source, r) for r, part in enumerate(parts) for b, source in getattr(part, recvs)) == expected
        for x in hops:  # transfers between two ranks pair up in order
            mine = [b for b, to in getattr(parts[x.source], sends) if to == x.target]
            assert mine == [b for b, source in getattr(parts[x.target], recvs) if source == x.source]


@given(either())
def test_outer_transfers_land_in_the_order_in_which_they_set_out(plan: Plan) -> None:
    ends = [[(t + o.steps - 1, o) for o in step.outer] for t, step in enumerate(plan.backward.steps)]
    for rank, turns in enumerate(plan.backward.turns):
        flying: list[int] = []
        for t, turn in enumerate(turns):
            mine = [end for end, o in ends[t] if any(rank in (x.source, x.target) for x in (*o.transfers, *o.grads))]
            assert len(turn.outer) == len(mine)
            flying += mine
            for _ in range(turn.lands):
                assert flying.pop(0) == t
        assert not flying


@given(either(), st.booleans())
def test_blocks_are_dropped_after_their_last_use_and_never_pile_up(plan: Plan, backward: bool) -> None:
    most = {"hierarchical": 4, "gather": plan.size - 1}.get(plan.schedule, 2)  # one attended, one arriving; two that lie there
    course = plan.backward if backward and plan.backward.rows else plan.forward
    landing = arrivals(course, "blocks")
    for rank, turns in enumerate(course.turns):
        held: set[int] = set()
        sending = {
            (x.block, s) for t, xs in enumerate(landing) for x, begin in xs if x.source == rank for s in range(begin, t + 1)
        }
        for t, turn in enumerate(turns):
            arriving = {block for block, _ in turn.departing.recvs}
            assert not held & arriving
            held |= arriving
            assert len(held) <= most
            used = {block for x in turns[t + 1 :] for block in x.attend} | {block for block, s in sending if s > t}
            assert set(turn.drop) <= held
            held -= set(turn.drop)
            still = {x.block for s, xs in enumerate(landing) for x, begin in xs if x.target == rank and begin <= t < s}
            assert held == held & (used | still)
        assert not held
        attending = [t for t, turn in enumerate(turns) if turn.attend]
        assert [t for t, turn in enumerate(turns) if turn.last] == [attending[-1]]
        assert turns[0].attend[0] == rank


@given(either(size=8, schedules=("hierarchical",)))
def test_partial_gradients_of_the_hierarchical_schedule_never_pile_up(plan: Plan) -> None:
    """Blocks of float32 dK/dV on a rank, leaving and arriving ones and its own among them: schedules.py says which."""
    landing = arrivals(plan.backward, "partials")
    for rank, turns in enumerate(plan.backward.turns):
        here, under_way = {rank}, 0
        for turn, landed in zip(turns, landing, strict=True):
            hops = turn.departing
            here -= {block for block, _ in hops.grad_sends}
            under_way += len(hops.grad_sends) + len(hops.grad_recvs)
            here |= set(turn.attend)
            assert len(here) + under_way <= 9
            here |= {x.block for x, _ in landed if x.target == rank}
            under_way -= sum((x.source == rank) + (x.target == rank) for x, _ in landed)
        assert (here, under_way) == ({rank}, 0)


@pytest.mark.parametrize(
    ("heads", "rows"), [((1, 1), True), ((32, 32), True), ((4, 3), True), ((3, 2), False), ((32, 8), False), ((4, 1), False)]
)
def test_rows_travel_where_that_is_fewer_bytes(heads: tuple[int, int], rows: bool) -> None:
    q, v = (torch.empty(1, 0, n, 128, dtype=torch.bfloat16) for n in heads)
    token = TokenBytes.of(q, v)
    assert token == (heads[1] * 512, heads[1] * 1024, heads[0] * (512 + 8), heads[0] * 512)
    for schedule in ("rotate", "direct", "auto"):
        plan = make_plan(rf.layouts.zigzag(64, 4), rf.Mask(causal=True), schedule=schedule, token=token)
        assert plan.traffic is not None
        assert plan.traffic[:2] == (12 * 16 * sum(token[:2]), 12 * 16 * sum(token[2:]))
        assert plan.backward.rows == rows
        assert (plan.backward is plan.forward) == (not rows)


def test_what_is_counted_are_tokens_of_rows_and_of_keys() -> None:
    """A few queries at the end of many keys, heads that would have keys travel; and no token where nothing is counted."""
    layout, kv_layout, token = rf.layouts.zigzag(8, 4).shift(992), rf.layouts.zigzag(1000, 4), TokenBytes(10, 20, 50, 50)
    plan = make_plan(layout, rf.Mask(causal=True), kv_layout, token=token)
    assert plan.backward.rows
    assert plan.traffic is not None
    assert plan.traffic[:2] == (3 * 1000 * 30, 3 * 8 * 100)
    assert make_plan(layout, rf.Mask(causal=True), kv_layout).traffic is None
    assert not make_plan(layout, rf.Mask(causal=True), kv_layout, schedule="gather", token=token).backward.rows


@pytest.mark.parametrize("name", ["zigzag", "balanced"])
def test_a_layout_that_balances_rows_keeps_keys_travelling(name: str) -> None:
    documents = (0, *sorted(random.Random(1).sample(range(1, 20000), 12)), 20000)
    mask = rf.Mask(causal=True, documents=documents if name == "balanced" else None)
    plan = make_plan(make_layout(name, 20000, 4, mask), mask, token=ROWS)
    work = torch.tensor([plan.work(rank).tolist() for rank in range(4)])
    assert plan.traffic is not None
    assert plan.traffic.rows < plan.traffic.keys
    assert plan.traffic.work == pytest.approx(int(work.sum(0).max()) / int(work.sum(1).max()), rel=0.03)
    assert plan.backward.rows == (name == "zigzag")
    assert (plan.traffic.work > 1.3) == (name == "balanced")


def test_rotate_moves_rows_to_the_rank_before_and_stops_as_early_as_keys() -> None:
    plan = make_plan(rf.layouts.contiguous(32, 4), rf.Mask(causal=True), schedule="rotate", token=ROWS)
    moves = [x for step in plan.backward.steps for x in step.transfers]
    assert plan.backward.rows
    assert all(x.target == (x.source - 1) % 4 for x in moves)
    assert len(moves) == sum(len(step.transfers) for step in plan.forward.steps) == 6
    assert not any(step.grads for step in plan.forward.steps)


def test_plans_are_cached_by_value() -> None:
    mask = rf.Mask(causal=True, documents=(0, 5, 12))
    plan = make_plan(rf.layouts.per_document("zigzag", (0, 5, 12), 2), mask)
    assert make_plan(rf.layouts.per_document("zigzag", torch.tensor([0, 5, 12]), 2), rf.Mask(True, None, (0, 5, 12))) is plan
    one_document = rf.layouts.per_document("zigzag", (0, 12), 2)
    assert make_plan(rf.layouts.zigzag(12, 2), mask) is make_plan(one_document, mask)
    assert make_plan(rf.layouts.zigzag(12, 2), rf.Mask(window=(None, None))) is make_plan(one_document, rf.Mask())
    assert make_plan(one_document, mask, one_document) is make_plan(one_document, mask)
    assert make_plan(one_document, mask, hosts=(0, 0)) is make_plan(one_document, mask)
    assert make_plan(one_document, mask, hosts=(0, 1)) is not make_plan(one_document, mask)
    assert make_plan(one_document, mask).intervals(0, CPU) is make_plan(one_document, mask).intervals(0, CPU)


def test_the_cache_is_bounded() -> None:
    layout = rf.layouts.zigzag(100, 2)
    plan = make_plan(layout, rf.Mask())
    assert make_plan(layout, rf.Mask()) is plan
    for seqlen in range(64):
        make_plan(rf.layouts.zigzag(seqlen, 2), rf.Mask())
    assert make_plan(layout, rf.Mask()) is not plan


def new_batch(name: str, cu: tuple[int, ...]) -> float:
    """Seconds of host time of a batch whose documents nobody has seen before."""
    begin = time.perf_counter()
    mask = rf.Mask(causal=True, documents=cu)
    layout = rf.layouts.per_document(name[4:], cu, 8) if name.startswith("per ") else getattr(rf.layouts, name)(cu[-1], 8)
    make_plan(layout, mask)
    return time.perf_counter() - begin


@pytest.mark.parametrize("name", ["zigzag", "striped", "contiguous", "per zigzag"])
def test_a_new_packed_batch_of_100k_tokens_costs_under_a_millisecond(name: str) -> None:
    rng = random.Random(name)
    batches = [(0, *sorted(rng.sample(range(1, 100_000), 65)), 100_000) for _ in range(30)]
    assert min(new_batch(name, cu) for cu in batches) < 1e-3


def test_a_tracers_tensors_are_not_kept() -> None:
    """What a fake-tensor mode made must not serve a real call."""
    plan = make_plan(rf.layouts.striped(23, 2), rf.Mask(causal=True, window=(7, None)))
    with FakeTensorMode():
        plan.intervals(1, torch.device("cpu"))
    assert all(type(x) is torch.Tensor for pair in plan.intervals(1, torch.device("cpu")).values() for x in pair)

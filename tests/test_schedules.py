"""Schedules: how much each moves and where, what auto picks, and that no block crosses a host border twice."""

import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ring_cases import CAUSAL
from test_plan import plans

import ringflash as rf
from ringflash.plan import Plan, make_plan
from ringflash.schedules import Step, Transfer, chosen, without_idle


def moved(plan: Plan) -> int:
    return sum(len(step.blocks) for step in plan.forward.steps)


@given(plans())
def test_direct_moves_exactly_the_needed_blocks_straight_from_their_owners(plan: Plan) -> None:
    plan = make_plan(plan.layout, plan.mask, plan.kv_layout, schedule="direct")
    hops = [x for step in plan.forward.steps for x in step.transfers]
    assert all(x.source == x.block for x in hops)
    needed = {(r, b) for r in range(plan.size) for b in range(plan.size) if r != b and plan.needs[r, b]}
    assert sorted((x.target, x.block) for x in hops) == sorted(needed)
    grads = [x for step in plan.forward.steps for x in step.grads]
    assert sorted((x.source, x.block) for x in grads) == sorted(needed)
    assert all(x.target == x.block for x in grads)


@given(plans())
def test_auto_takes_direct_only_where_it_moves_fewer_blocks_and_says_why(plan: Plan) -> None:
    by_name = {name: moved(make_plan(plan.layout, plan.mask, plan.kv_layout, schedule=name)) for name in ("rotate", "direct")}
    auto = make_plan(plan.layout, plan.mask, plan.kv_layout)
    assert auto.schedule == ("direct" if by_name["direct"] < by_name["rotate"] else "rotate")
    assert str(by_name[auto.schedule]) in auto.why


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (rf.Mask(), 12),
        (rf.Mask(causal=True), 6),
        (rf.Mask(causal=True, window=(8, None)), 3),
        (rf.Mask(causal=True, window=(9, None)), 5),
        (rf.Mask(window=(0, 0)), 0),
        (rf.Mask(documents=(0, 8, 16, 24, 32)), 0),
        (rf.Mask(causal=True, documents=(0, 9, 32)), 4),
    ],
    ids=repr,
)
def test_number_of_blocks_that_move(mask: rf.Mask, expected: int) -> None:
    assert moved(make_plan(rf.layouts.contiguous(32, 4), mask, schedule="direct")) == expected


def test_rotate_moves_between_neighbours_only() -> None:
    plan = make_plan(rf.layouts.zigzag(32, 4), rf.Mask(causal=True), schedule="rotate")
    assert all(x.target == (x.source + 1) % 4 for step in plan.forward.steps for x in step.transfers)
    assert moved(plan) == 12


def crossing(plan: Plan, moves: str) -> list[Transfer]:
    """What crosses host borders, in order: "blocks" or "partials"."""
    every = [x for step in plan.forward.steps for x, _ in getattr(step, moves)]
    return [x for x in every if plan.hosts[x.source] != plan.hosts[x.target]]


@given(plans(size=8, schedules=("hierarchical",)))
def test_hierarchical_crosses_each_border_once_and_only_where_that_is_needed(plan: Plan) -> None:
    """A block goes into each other host on which some rank needs it, and its partial dK/dV leaves each of those: once."""
    hosts, ranks = plan.hosts, range(plan.size)
    needed = sorted({(b, hosts[r]) for r in ranks for b in ranks if plan.needs[r, b] and hosts[r] != hosts[b]})
    blocks, partials = crossing(plan, "blocks"), crossing(plan, "partials")
    assert sorted((x.block, hosts[x.target]) for x in blocks) == needed
    assert sorted((x.block, hosts[x.source]) for x in partials) == needed
    for moves in (blocks, partials):  # so no border between two hosts is crossed twice in one direction either
        borders = [(x.block, hosts[x.source], hosts[x.target]) for x in moves]
        assert len(borders) == len(set(borders))
    for name in ("rotate", "direct"):
        other = make_plan(plan.layout, plan.mask, plan.kv_layout, schedule=name, hosts=hosts)
        assert len(crossing(other, "blocks")) >= len(blocks)


@given(plans(size=8, schedules=("hierarchical",)))
def test_hierarchical_leaves_borders_to_outer_transfers_that_run_a_whole_inner_turn(plan: Plan) -> None:
    inner = [x for step in plan.forward.steps for x in (*step.transfers, *step.grads)]
    if len(set(plan.hosts)) > 1:
        assert all(plan.hosts[x.source] == plan.hosts[x.target] for x in inner)
    outer = [x for step in plan.forward.steps for o in step.outer for x in (*o.transfers, *o.grads)]
    assert all(plan.hosts[x.source] != plan.hosts[x.target] for x in outer)
    busy = [(t, t + o.steps) for t, step in enumerate(plan.forward.steps) for o in step.outer if o.transfers]
    assert busy == sorted(busy)
    assert all(end == begin for (_, end), (begin, _) in pairwise(busy))  # one takes over from the other


def hierarchical(hosts: tuple[int, ...], mask: rf.Mask = rf.Mask(), name: str = "contiguous") -> Plan:
    layout = getattr(rf.layouts, name)(8 * len(hosts), len(hosts))
    return make_plan(layout, mask, schedule="hierarchical", hosts=hosts)


def outer_moves(plan: Plan) -> list[tuple[int, int, list[Transfer], list[Transfer]]]:
    """(step, steps, blocks, partials) of each outer transfer."""
    return [(t, o.steps, list(o.transfers), list(o.grads)) for t, step in enumerate(plan.forward.steps) for o in step.outer]


def one_each(*blocks: int) -> tuple[tuple[int, ...], ...]:
    """What ranks attend that attend one block each."""
    return tuple((block,) for block in blocks)


def test_two_hosts_of_two() -> None:
    plan = hierarchical((0, 0, 1, 1))
    expected = [one_each(0, 1, 2, 3), one_each(1, 0, 3, 2), one_each(2, 3, 0, 1), one_each(3, 2, 1, 0)]
    assert [step.attend for step in plan.forward.steps[:4]] == expected
    there = [Transfer(2, 2, 0), Transfer(3, 3, 1), Transfer(0, 0, 2), Transfer(1, 1, 3)]
    back = [Transfer(2, 0, 2), Transfer(3, 1, 3), Transfer(0, 2, 0), Transfer(1, 3, 1)]
    assert outer_moves(plan) == [(0, 2, there, []), (5, 1, [], back)]
    assert moved(plan) == 12
    assert all(len(step.transfers) == 4 for step in (plan.forward.steps[0], plan.forward.steps[2]))


def test_blocks_go_on_from_host_to_host_and_their_partials_with_them() -> None:
    plan = hierarchical((0, 1, 2))
    rotate = make_plan(plan.layout, plan.mask, schedule="rotate")
    assert [step.attend for step in plan.forward.steps] == [step.attend for step in rotate.forward.steps]
    for step, other in zip(plan.forward.steps, rotate.forward.steps, strict=True):
        assert {x for x, _ in step.blocks} == set(other.transfers)
        assert {x for x, _ in step.partials} == set(other.grads)


def test_a_block_that_the_next_host_does_not_need_comes_from_its_owner() -> None:
    """Of five hosts the second and the fourth need block 0: it no longer lies with the second when the fourth's turn comes."""
    needs = np.eye(5, dtype=bool)
    needs[[1, 3], 0] = needs[4, 2] = True
    steps = chosen("hierarchical", tuple(map(tuple, needs.tolist())), (0, 1, 2, 3, 4)).forward
    assert [x for step in steps for x, _ in step.blocks] == [Transfer(0, 0, 1), Transfer(2, 2, 4), Transfer(0, 0, 3)]
    assert [x for step in steps for x, _ in step.partials] == [Transfer(0, 1, 0), Transfer(2, 4, 2), Transfer(0, 3, 0)]


def test_hosts_that_need_nothing_of_each_other_exchange_nothing() -> None:
    plan = hierarchical((0, 1, 2, 3), rf.Mask(documents=(0, 8, 16, 24, 32)))
    assert plan.forward.steps == (Step(one_each(0, 1, 2, 3), (), ()),)


def test_a_host_with_fewer_ranks_takes_blocks_one_inner_turn_after_the_other() -> None:
    plan = hierarchical((0, 0, 0, 1))
    assert plan.attended(3) == [3, 0, 1, 2]
    assert max(len([b for b, _ in turn.departing.recvs]) for turn in plan.forward.turns[3]) == 1
    assert {x.target for x in crossing(plan, "blocks") if x.block == 3} == {0}


def test_a_block_lies_with_a_rank_that_needs_it() -> None:
    """A window reaches back over the border: the last block of a host goes straight to the first rank of the next."""
    plan = hierarchical((0, 0, 1, 1), rf.Mask(causal=True, window=(8, 0)))
    assert crossing(plan, "blocks") == [Transfer(1, 1, 2)]
    assert crossing(plan, "partials") == [Transfer(1, 2, 1)]
    assert moved(plan) == 3


def test_one_host_is_its_inner_schedule_and_says_so() -> None:
    plan = hierarchical((0, 0, 0, 0))
    assert plan.schedule == "rotate"
    assert (
        plan.why
        == "hierarchical on one host is its inner schedule: moves 12 blocks between neighbours; direct would move as many"
    )
    assert plan.forward.steps == make_plan(plan.layout, plan.mask, schedule="rotate").forward.steps
    assert hierarchical((5, 5, 5, 5), rf.Mask(window=(8, 8))).schedule == "direct"


@pytest.mark.parametrize(
    ("hosts", "mask", "name", "why"),
    [
        ((0, 0, 1, 1), rf.Mask(), "rotate", "6 blocks cross host borders; direct 8; hierarchical, on request, would cross 4"),
        ((0, 1, 0, 1), rf.Mask(), "direct", "8 blocks cross host borders; rotate 12; hierarchical, on request, would cross 4"),
        ((0, 1, 2, 3), rf.Mask(), "rotate", "12 blocks cross host borders; direct 12"),
        ((0, 0, 1, 1), CAUSAL, "rotate", "2 blocks cross host borders; direct 4"),
        ((0, 0, 1, 1), rf.Mask(window=(8, 8)), "direct", "2 blocks cross host borders; rotate 5"),
        ((0, 0, 1, 1), rf.Mask(window=(0, 0)), "rotate", "0 blocks cross host borders; direct 0"),
    ],
    ids=repr,
)
def test_auto_on_several_hosts(hosts: tuple[int, ...], mask: rf.Mask, name: str, why: str) -> None:
    plan = make_plan(rf.layouts.contiguous(32, 4), mask, hosts=hosts)
    assert (plan.schedule, plan.why) == (name, why)


@given(plans(size=8))
def test_auto_crosses_borders_no_more_than_rotate_or_direct_and_names_what_would_cross_fewer(plan: Plan) -> None:
    ways = ("rotate", "direct", "hierarchical")
    by_name = {name: make_plan(plan.layout, plan.mask, plan.kv_layout, schedule=name, hosts=plan.hosts) for name in ways}
    auto = make_plan(plan.layout, plan.mask, plan.kv_layout, hosts=plan.hosts)
    counts = {name: len(crossing(other, "blocks")) for name, other in by_name.items()}
    on_request = counts.pop("hierarchical")
    assert counts[auto.schedule] == min(counts.values())
    if len(set(plan.hosts)) > 1:
        (other,) = counts.keys() - {auto.schedule}
        hint = f"; hierarchical, on request, would cross {on_request}" if on_request < counts[auto.schedule] else ""
        assert auto.why == f"{counts[auto.schedule]} blocks cross host borders; {other} {counts[other]}{hint}"
    assert auto.forward.steps == by_name[auto.schedule].forward.steps


def with_idle(steps: Sequence[Step], gaps: Sequence[int], *, late: bool) -> list[Step]:
    """The steps with gaps[t] idle ones before step t and the last gap behind; outer transfers run as much longer. late: and
    over the idle steps behind their last one."""
    idle = Step(((),) * len(steps[0].attend), (), ())
    at = [t + sum(gaps[: t + 1]) for t in range(len(steps) + 1)]
    made = [idle] * at[-1]
    for t, step in enumerate(steps):
        ends = [at[t + o.steps] if late else at[t + o.steps - 1] + 1 for o in step.outer]
        outer = [o._replace(steps=end - at[t]) for o, end in zip(step.outer, ends, strict=True)]
        made[at[t]] = step._replace(outer=tuple(outer))
    return made


@given(plans(size=8, schedules=("hierarchical",)), st.data())
def test_idle_steps_are_left_out_also_where_outer_transfers_run_over_them(plan: Plan, data: st.DataObject) -> None:
    n = len(plan.forward.steps) + 1
    gaps = data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    for late in (False, True):
        assert without_idle(with_idle(plan.forward.steps, gaps, late=late)) == plan.forward.steps


@given(plans(size=8))
def test_no_step_is_idle(plan: Plan) -> None:
    assert all(step.busy for step in (*plan.forward.steps, *plan.backward.steps))


def test_gather_is_one_step_forward_and_two_back() -> None:
    """All blocks that are needed and no other, nearest first; the own one is attended last while gradients go home."""
    plan = make_plan(rf.layouts.contiguous(32, 4), CAUSAL, schedule="gather")
    (forward,), (first, last) = plan.forward.steps, plan.backward.steps
    assert forward.attend == ((0,), (1, 0), (2, 1, 0), (3, 2, 1, 0))
    assert (first.attend, last.attend) == (((), (0,), (1, 0), (2, 1, 0)), one_each(0, 1, 2, 3))
    assert forward.transfers == first.transfers
    assert {(x.block, x.source, x.target) for x in last.grads} == {(x.block, x.target, x.block) for x in first.transfers}
    assert (forward.early, first.early, last.early) == (True, True, False)
    assert all(t + o.steps <= len(plan.forward.steps) for t, step in enumerate(plan.forward.steps) for o in step.outer)


def test_hosts_are_one_number_per_rank() -> None:
    with pytest.raises(ValueError, match=re.escape("hosts must have one number per rank: hosts=(0, 1), size=4")):
        make_plan(rf.layouts.contiguous(32, 4), rf.Mask(), hosts=(0, 1))

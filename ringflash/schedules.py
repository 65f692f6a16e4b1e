"""Schedules: generators that turn "which rank needs which block" into the steps of an exchange.

- rotate: every block moves to the next rank each step and stops behind the last rank that needs it;
- direct: a block goes straight from its owner to each rank that needs it, and nowhere else;
- gather: all that a rank needs comes at once and is attended in one launch, while it comes where the transport counts it in;
- hierarchical: on request, for ranks on several hosts. A block goes into each other host on which some rank needs it, once,
  while the ranks of that host attend the blocks that came before it; inside a host it moves as in a ring of that host alone.

dK/dV of a block go home along the same lines: rotate carries one partial from rank to rank and adds on the way, direct
sends each rank's partial straight to the owner, hierarchical adds up a host's partials before they leave it, once. Either
way every addition has its fixed place: the result is the same bits every time.

Where rows travel in backward, a block is one rank's Q, dO, lse and delta, needed by the ranks whose keys they see, and its dQ
goes home in place of dK/dV: the same generators, mirrored (chosen_for_rows).
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

Needs = tuple[tuple[bool, ...], ...]  # needs[r][b]: rank r sees a key of block b
Hosts = tuple[int, ...]  # hosts[r]: the number of the host that rank r runs on
Seats = dict[int, int]  # rank -> the block that the other ranks of its host take from it


class Transfer(NamedTuple):
    """A block (or its partial gradients) goes from one rank to another."""

    block: int
    source: int
    target: int


class Outer(NamedTuple):
    """Transfers between hosts, which run during `steps` steps from the one that lists them."""

    transfers: tuple[Transfer, ...]
    grads: tuple[Transfer, ...]
    steps: int


class Step(NamedTuple):
    """attend[r]: the blocks rank r attends, in one launch, while `transfers` bring blocks of later steps and `grads` carry
    the partial dK/dV that were complete before this step (backward only). outer: what sets out now and lands later. early:
    what arrives in this step is attended in it."""

    attend: tuple[tuple[int, ...], ...]
    transfers: tuple[Transfer, ...]
    grads: tuple[Transfer, ...]
    outer: tuple[Outer, ...] = ()
    early: bool = False

    @property
    def busy(self) -> bool:
        """Whether anything is attended or moves."""
        return bool(self.transfers or self.grads or self.outer or any(self.attend))

    @property
    def blocks(self) -> tuple[tuple[Transfer, int], ...]:
        """All K and V that set out in this step, and the number of steps each has to arrive."""
        return (*((x, 1) for x in self.transfers), *((x, outer.steps) for outer in self.outer for x in outer.transfers))

    @property
    def partials(self) -> tuple[tuple[Transfer, int], ...]:
        """All dK and dV that set out in this step, and the number of steps each has to arrive."""
        return (*((x, 1) for x in self.grads), *((x, outer.steps) for outer in self.outer for x in outer.grads))


def rotate(needs: Needs) -> list[Step]:
    """Steps in which every block moves one rank on per step, up to the last rank that needs it."""
    size = len(needs)
    hops = [[t for t in range(1, size) if needs[(b + t) % size][b]] for b in range(size)]
    n_steps = 1 + max((h[-1] for h in hops if h), default=0)
    steps = []
    for t in range(n_steps + 1):
        moves = tuple(Transfer(b, (b + t) % size, (b + t + 1) % size) for b in range(size) if hops[b] and t < hops[b][-1])
        grads = tuple(_chain(b, t, hops[b], size) for b in range(size) if hops[b] and hops[b][0] < t <= hops[b][-1] + 1)
        here = [(r - t) % size for r in range(size)]
        attend = tuple((b,) if t in hops[b] or t == 0 else () for b in here)
        steps.append(Step(attend, moves, grads))
    return steps


def _chain(block: int, step: int, hops: list[int], size: int) -> Transfer:
    """The partial dK/dV of a block moves on with it, and home from the last rank that needed it."""
    source = (block + step - 1) % size
    return Transfer(block, source, block if step > hops[-1] else (block + step) % size)


def direct(needs: Needs) -> list[Step]:
    """Steps in which each rank receives a block it needs straight from the owner; ranks take turns by distance."""
    size = len(needs)
    offsets = [d for d in range(1, size) if any(needs[r][(r - d) % size] for r in range(size))]
    turns: list[tuple[tuple[int, ...], ...]] = [tuple((r,) for r in range(size))]  # what each rank attends, step by step
    for d in offsets:
        turns.append(tuple(((r - d) % size,) if needs[r][(r - d) % size] else () for r in range(size)))
    steps = []
    for t in range(len(turns) + 1):
        attend = turns[t] if t < len(turns) else ((),) * size
        coming = turns[t + 1] if t + 1 < len(turns) else ()
        done = turns[t - 1] if t > 1 else ()
        moves = tuple(Transfer(b, b, r) for r, blocks in enumerate(coming) for b in blocks)
        grads = tuple(Transfer(b, r, b) for r, blocks in enumerate(done) for b in blocks)
        steps.append(Step(attend, moves, grads))
    return steps


def gather(needs: Needs) -> tuple[list[Step], list[Step]]:
    """(forward, backward): forward is one step. Backward attends the other ranks' blocks first, so that their dK/dV go home
    while the own block is attended.
    """
    size = len(needs)
    others = [tuple((r - d) % size for d in range(1, size) if needs[r][(r - d) % size]) for r in range(size)]
    own = tuple((r,) for r in range(size))
    moves = tuple(Transfer(b, b, r) for r, blocks in enumerate(others) for b in blocks)
    home = tuple(Transfer(x.block, x.target, x.source) for x in moves)
    forward = Step(tuple(mine + more for mine, more in zip(own, others, strict=True)), moves, (), early=True)
    return [forward], [Step(tuple(others), moves, (), early=True), Step(own, (), home)]


def hierarchical(needs: Needs, hosts: Hosts) -> list[Step]:
    """Steps in which hosts take turns by distance and the ranks of a host attend what has come to it.

    An inner turn is a ring of each host alone, by rotate or direct, over the blocks that lie there: first the ranks' own,
    then those of the host before, and so on (_turns_of_hosts says which, and with which rank each of them lies). While it
    runs, the outer transfers bring the blocks of the next inner turn: from the rank of another host with which a block lies
    meanwhile, or, where there is none, straight from its owner. So a block goes into a host at most once, and only where some
    rank needs it: no exchange carries less over the borders. A host's partial dK/dV come together at the rank with which the
    block lay and go from there to where the block went, or home from where it went no further: they leave each host once.

    A rank holds at most four blocks of others (one that lies with it, one that comes to lie with it, one attended, one
    arriving to be next) and nine float32 dK/dV blocks, leaving and arriving ones included: its own; a block's sum at the rank
    with which it lies; between hosts one leaving, one passing on and one coming home; inside the host the one being made, one
    leaving, one passing on and one coming home.
    """
    members = _members(hosts)
    turns = _turns_of_hosts(needs, members)
    inner = [[_inner(needs, seats, ranks, own=w == 0) for ranks in members] for w, seats in enumerate(turns)]
    lengths = [max(len(steps) - 1 for steps in by_host) for by_host in inner]  # the last inner step only brings dK/dV home
    begins = [sum(lengths[:w]) for w in range(len(turns) + 1)]
    gather = int(max(lengths) > 1)  # steps after an inner turn until a host's partials have come together
    parts: list[list[Step]] = [[] for _ in range(begins[-1] + gather + 1)]
    for by_host, begin in zip(inner, begins, strict=False):
        for steps in by_host:
            for t, step in enumerate(steps, begin):
                parts[t].append(step)
    for begin, outer in _outer(turns, begins, gather):
        parts[begin].append(Step((), (), (), (outer,)))
    return [_merged(step, len(needs)) for step in parts]


def _outer(turns: list[Seats], begins: list[int], gather: int) -> Iterator[tuple[int, Outer]]:
    """(first step, transfers) between hosts; of those that begin together, first what lands first. Each runs until the next
    of its kind begins."""
    lies = [*({block: rank for rank, block in seats.items()} for seats in turns), {}]
    lengths = [*(end - begin for begin, end in pairwise(begins)), 1]
    for w, seats in enumerate(turns[1:], 1):
        grads = tuple(Transfer(block, rank, lies[w + 1].get(block, block)) for rank, block in seats.items())
        yield begins[w + 1] + gather, Outer((), grads, lengths[w + 1])
    for w, seats in enumerate(turns[1:]):
        blocks = tuple(Transfer(block, lies[w].get(block, block), rank) for rank, block in seats.items())
        yield begins[w], Outer(blocks, (), lengths[w])


def _members(hosts: Hosts) -> list[list[int]]:
    """The ranks of each host."""
    members: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    return list(members.values())


def _turns_of_hosts(needs: Needs, members: list[list[int]]) -> list[Seats]:
    """Where blocks lie, inner turn by inner turn: first with their owners, then those of the host before that some rank of
    the next host needs, and so on around the hosts. More blocks than a host has ranks take it several inner turns."""
    turns: list[Seats] = [{rank: rank for ranks in members for rank in ranks}]
    for distance in range(1, len(members)):
        more: list[Seats] = []
        for host, ranks in enumerate(members):
            home = members[host - distance]
            wanted = [block for block in home if any(needs[rank][block] for rank in ranks)]
            for i in range(0, len(wanted), len(ranks)):
                if i // len(ranks) == len(more):
                    more.append({})
                counterparts = {block: ranks[home.index(block) % len(ranks)] for block in wanted[i : i + len(ranks)]}
                more[i // len(ranks)].update(_seats(needs, counterparts, ranks))
        turns += more
    return turns


def _seats(needs: Needs, counterparts: Seats, ranks: list[int]) -> Seats:
    """A rank for each block: its owner's counterpart, or rather one that needs the block."""
    seats: Seats = {}
    for block, counterpart in counterparts.items():
        free = [(not needs[rank][block], rank != counterpart, rank) for rank in ranks if rank not in seats]
        seats[min(free)[-1]] = block
    return seats


def _inner(needs: Needs, seats: Seats, ranks: list[int], *, own: bool) -> list[Step]:
    """An inner turn of one host: the steps of a ring of its ranks over the blocks that lie with them. own: those are their
    own, which are always attended."""
    sees = tuple(tuple(at in seats and needs[rank][seats[at]] for at in ranks) for rank in ranks)
    steps = FLAT[_flat(sees)[0]](sees)

    def moved(transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
        return tuple(Transfer(seats[ranks[at]], ranks[source], ranks[target]) for at, source, target in transfers)

    def attend(step: Step) -> tuple[tuple[int, ...], ...]:
        found: list[tuple[int, ...]] = [()] * len(needs)
        for place, blocks in enumerate(step.attend):
            found[ranks[place]] = tuple(seats[ranks[at]] for at in blocks if own or sees[place][at])
        return tuple(found)

    return [Step(attend(step), moved(step.transfers), moved(step.grads)) for step in steps]


def _merged(parts: list[Step], size: int) -> Step:
    """Steps of hosts that run side by side, and of the transfers between them."""
    attend: list[tuple[int, ...]] = [()] * size
    for step in parts:
        for rank, blocks in enumerate(step.attend):
            attend[rank] = blocks or attend[rank]
    transfers = tuple(x for step in parts for x in step.transfers)
    grads = tuple(x for step in parts for x in step.grads)
    return Step(tuple(attend), transfers, grads, tuple(outer for step in parts for outer in step.outer))


FLAT: dict[str, Callable[[Needs], list[Step]]] = {"rotate": rotate, "direct": direct}  # know nothing of hosts
SCHEDULES = (*FLAT, "hierarchical", "gather")


class Chosen(NamedTuple):
    """A schedule's name, why it was picked, and the steps of a forward and of a backward pass."""

    name: str
    why: str
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]


def chosen(schedule: str, needs: Needs, hosts: Hosts) -> Chosen:
    """The schedule that was asked for; "auto" asks for the best of rotate and direct.

    hierarchical is on request only, until it has run between real hosts. On one host it is its inner schedule, which is picked
    as auto picks on one host.
    """
    name, why = schedule, "asked for"
    if schedule == "auto":
        name, why = _flat(needs) if len(set(hosts)) == 1 else _over_hosts(needs, hosts)
    elif schedule == "hierarchical" and len(set(hosts)) == 1:
        name, why = _flat(needs)
        why = f"hierarchical on one host is its inner schedule: {why}"
    if name == "gather":
        why = "all needed blocks at once, attended in one launch"
        return Chosen(name, why, *map(without_idle, gather(needs)))
    steps = without_idle(FLAT[name](needs) if name in FLAT else hierarchical(needs, hosts))
    return Chosen(name, why, steps, steps)


def chosen_for_rows(schedule: str, needs: Needs, hosts: Hosts) -> Chosen:
    """As chosen, for a backward pass in which rows travel, to the ranks whose keys they see.

    Numbers of ranks are mirrored for the generator, so that rotate moves rows to the rank before: to those whose keys a causal
    mask lets them see, and no further.
    """
    size = len(needs)
    mirror = [-rank % size for rank in range(size)]
    sees = tuple(tuple(needs[block][rank] for block in mirror) for rank in mirror)
    found = chosen(schedule, sees, tuple(hosts[rank] for rank in mirror))
    return found._replace(forward=(), backward=tuple(_mirrored(step, mirror) for step in found.backward))


def _mirrored(step: Step, mirror: list[int]) -> Step:
    """The step with rank mirror[r] for rank r, and so for blocks."""

    def moved(transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
        return tuple(Transfer(*(mirror[rank] for rank in x)) for x in transfers)

    attend = tuple(tuple(mirror[block] for block in step.attend[rank]) for rank in mirror)
    outer = tuple(Outer(moved(o.transfers), moved(o.grads), o.steps) for o in step.outer)
    return step._replace(attend=attend, transfers=moved(step.transfers), grads=moved(step.grads), outer=outer)


def without_idle(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The steps without those in which nothing happens; outer transfers that ran over such are that much shorter."""
    upto = [0, *accumulate(step.busy for step in steps)]  # busy steps before each step

    def shortened(t: int, outer: Outer) -> Outer:
        return outer._replace(steps=upto[t + outer.steps] - upto[t])

    return tuple(
        step._replace(outer=tuple(shortened(t, outer) for outer in step.outer)) for t, step in enumerate(steps) if step.busy
    )


def _flat(needs: Needs) -> tuple[str, str]:
    """(schedule, why) on one host: direct where it moves fewer blocks."""
    hops, needed = sum(_hops(needs)), _needed(needs)
    if needed < hops:
        return "direct", f"moves {needed} blocks, rotate would move {hops}"
    return "rotate", f"moves {hops} blocks between neighbours; direct would move as many"


def _over_hosts(needs: Needs, hosts: Hosts) -> tuple[str, str]:
    """(schedule, why) on several hosts: of rotate and direct what carries fewer blocks over host borders; if both carry as
    many, what moves fewer blocks in all; else rotate."""
    size, hops, needed = len(needs), _hops(needs), _needed(needs)
    away = [(block, hosts[rank]) for rank in range(size) for block in range(size) if needs[rank][block]]
    away = [(block, host) for block, host in away if hosts[block] != host]
    borders = [hosts[rank] != hosts[(rank + 1) % size] for rank in range(size)]
    passed = sum(borders[(block + t) % size] for block in range(size) for t in range(hops[block]))
    costs = {"rotate": (passed, sum(hops)), "direct": (len(away), needed)}  # (blocks over host borders, blocks moved in all)
    name, other = sorted(costs, key=lambda name: costs[name])
    (crossing, _), (more, _) = costs[name], costs[other]
    on_request = len(set(away))
    hint = f"; hierarchical, on request, would cross {on_request}" if on_request < crossing else ""
    return name, f"{crossing} blocks cross host borders; {other} {more}{hint}"


def _hops(needs: Needs) -> list[int]:
    """How far each block goes with rotate: to the last rank that needs it."""
    size = len(needs)
    return [max((t for t in range(1, size) if needs[(b + t) % size][b]), default=0) for b in range(size)]


def _needed(needs: Needs) -> int:
    """How many blocks of others the ranks need."""
    return sum(sum(row) for row in needs) - sum(needs[r][r] for r in range(len(needs)))

"""Plans: frozen data that say which block each rank attends at each step and which transfers put it there.

The exchange is a function of the plan alone, never of one rank's data, `requires_grad` or timing, so both ends of every
hop agree.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ringflash.intervals import KeyTable, RowPieces, about_pairs, local_intervals, needed_blocks, row_pieces, visible_pairs
from ringflash.layout import Layout, contiguous
from ringflash.mask import Mask
from ringflash.schedules import Hosts, Needs, Step, Transfer, chosen, chosen_for_rows, without_idle
from ringflash.transport.blocks import Hop, Hops

Array = np.ndarray
Intervals = dict[int, tuple[Tensor, Tensor]]
MOST_WORK = 1.05  # of the busiest rank, over what it would have otherwise, for which bytes are not saved


class TokenBytes(NamedTuple):
    """Bytes of a token, per batch row, as backward moves it: of its K and V, float32 dK and dV, its row (Q, dO, lse, delta),
    and float32 dQ.
    """

    keys: int
    dkv: int
    rows: int
    dq: int

    @classmethod
    def of(cls, q: Tensor, v: Tensor) -> "TokenBytes":
        """For q (batch, seqlen_q, nheads_q, headdim) and v (batch, seqlen_k, nheads_k, headdim_v) of one dtype."""
        (_, _, nheads_q, headdim), (_, _, nheads_k, headdim_v), itemsize = q.shape, v.shape, q.element_size()
        both = headdim + headdim_v
        return cls(nheads_k * both * itemsize, nheads_k * both * 4, nheads_q * (both * itemsize + 8), nheads_q * headdim * 4)


class Turn(NamedTuple):
    """One rank's part of a step: what it attends, sends and receives as (block, other rank), and drops afterwards.

    outer: transfers between hosts that set out in this turn. lands: how many such, the longest under way, have landed when
    this turn ends; all other transfers land in the turn in which they set out.
    """

    attend: tuple[int, ...]
    last: bool  # nothing is attended after this turn: the state is finished here
    hops: Hops  # what sets out and lands in this turn
    drop: tuple[int, ...]  # received blocks that no later turn attends or sends, nor an outer transfer under way
    outer: tuple[Hops, ...] = ()
    lands: int = 0

    @property
    def departing(self) -> Hops:
        """All that sets out in this turn."""
        each = (self.hops, *self.outer)
        sends, recvs, grad_sends, grad_recvs = (
            tuple(hop for group in groups for hop in group) for groups in zip(*(hops[:4] for hops in each), strict=True)
        )
        moves, grad_moves = (any(flags) for flags in zip(*((hops.moves, hops.grad_moves) for hops in each), strict=True))
        return Hops(sends, recvs, grad_sends, grad_recvs, moves, grad_moves)


class Course(NamedTuple):
    """One pass over a plan: its steps, each rank's own part of every step, and whether a rank sends its block in any of them
    and sends or receives gradients.

    rows: what moves are blocks of rows and their dQ, in place of keys and their dK and dV.
    """

    steps: tuple[Step, ...]
    turns: tuple[tuple[Turn, ...], ...]
    sends: tuple[bool, ...]
    shares: tuple[bool, ...]
    rows: bool = False

    def nbytes(self, lengths: Sequence[int], each: int, grads: int) -> int:
        """What all ranks send: each of a block's tokens as so many bytes, and as so many of gradients."""
        blocks = sum(lengths[x.block] for step in self.steps for x, _ in step.blocks)
        return each * blocks + grads * sum(lengths[x.block] for step in self.steps for x, _ in step.partials)


class Traffic(NamedTuple):
    """Bytes per batch row that all ranks send in backward if keys travel, and if rows do; and the busiest rank's visible pairs
    if rows do over those if keys do, about (1.0 where keys are no more bytes anyway).
    """

    keys: int
    rows: int
    work: float

    @property
    def by_rows(self) -> bool:
        """Whether rows travel: fewer bytes, and no rank has much more to do."""
        return self.rows < self.keys and self.work <= MOST_WORK

    def of(self, batch: int) -> "Traffic":
        """Of so many batch rows."""
        return Traffic(self.keys * batch, self.rows * batch, self.work)


class InOrder(NamedTuple):
    """All keys in order of their positions, as one rank's rows see them: int32 (begin, end), (1 or batch, seqlen_q) each.

    places: int64, where the keys of the blocks it attends stand, block by block as it attends them.
    """

    begin: Tensor
    end: Tensor
    places: Tensor


Table = TypeVar("Table", InOrder, dict[int, tuple[Tensor, Tensor]])


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything a ring needs to know about one (layout, mask, schedule, hosts): intervals, needed blocks, steps.

    schedule is the one that was picked (schedules.SCHEDULES), and why. hosts[r]: the number of rank r's host. needs bool (size,
    size): needs[r, b], rank r sees a key of block b. forward and backward: their courses, the same one unless the schedule is
    "gather" or rows travel in backward. traffic: what decided between keys and rows; None where nothing was counted. rows: the
    global intervals of all ranks' rows, one entry per distinct batch row.
    """

    layout: Layout
    kv_layout: Layout
    mask: Mask
    hosts: Hosts
    schedule: str
    why: str
    needs: Array
    forward: Course
    backward: Course
    traffic: Traffic | None
    rows: tuple[RowPieces, ...]
    keys: KeyTable
    _tables: dict

    @property
    def size(self) -> int:
        """Ring size."""
        return self.layout.size

    def attended(self, rank: int) -> list[int]:
        """The blocks that a rank attends, in order of forward's steps; its own is always the first."""
        return [block for turn in self.forward.turns[rank] for block in turn.attend]

    def work(self, rank: int) -> Array:
        """int64 (size,): visible (query, key) pairs of a rank with every block, per head, summed over distinct batch rows."""
        return visible_pairs([r.of(rank) for r in self.rows], self.keys, self.size)

    def lengths(self, course: Course) -> tuple[int, ...]:
        """Tokens of each block that a course moves."""
        return (self.layout if course.rows else self.kv_layout).lengths

    def intervals(self, rank: int, device: torch.device) -> Intervals:
        """Local (begin, end) of the rank's rows in each block it attends: int32 (1 or batch, seqlen_q), on the device.

        Made once per device and stream (another stream would have to wait for this one) and kept with the plan: 8 bytes
        per row and attended block.
        """
        return self._kept(("keys", rank), device, lambda: self._local(rank, self.keys, self.attended(rank), device=device))

    def row_intervals(self, rank: int, device: torch.device) -> Intervals:
        """Where rows travel: local (begin, end) of each block of rows that the rank attends, in its own keys, int32 (1 or
        batch, the block's seqlen_q); made and kept in the same way.
        """
        others = [block for turn in self.backward.turns[rank] for block in turn.attend if block != rank]
        own = {rank: self.intervals(rank, device)[rank]}
        return self._kept(
            ("rows", rank), device, lambda: own | {b: self._local(b, self.keys, [rank], device=device)[rank] for b in others}
        )

    def in_order(self, rank: int, device: torch.device) -> InOrder:
        """The rank's rows against all keys in order of their positions; made and kept as intervals are."""
        return self._kept(("in order", rank), device, lambda: self._in_order(rank, device))

    def _in_order(self, rank: int, device: torch.device) -> InOrder:
        kv = self.kv_layout
        keys = KeyTable(contiguous(kv.seqlen, 1).shift(kv.offset).runs, max(self.layout.end, kv.end))
        ((begin, end),) = self._local(rank, keys, [0], device=device).values()
        places = torch.cat([kv.positions(block) for block in self.attended(rank)]) - kv.offset
        places = places.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else places.to(device)
        return InOrder(begin, end, places)

    def _local(self, rank: int, keys: KeyTable, blocks: Sequence[int], *, device: torch.device) -> Intervals:
        """Of a rank's rows in blocks of keys."""
        rows, seqlen_q = [r.of(rank) for r in self.rows], self.layout.lengths[rank]
        return local_intervals(rows, keys, seqlen_q=seqlen_q, blocks=blocks, device=device)

    def _kept(self, name: tuple[str, int], device: torch.device, make: Callable[[], Table]) -> Table:
        stream = torch.accelerator.current_stream(device.index).stream_id if device.type == "cuda" else 0
        key = (name, device, stream)
        found = self._tables.get(key)
        if found is not None:
            return found
        with torch.inference_mode(False), torch.no_grad():
            made = make()
        tensors = made if isinstance(made, tuple) else [x for pair in made.values() for x in pair]
        if all(type(x) is Tensor for x in tensors):  # a tracer's fake tensors are for that call alone
            self._tables[key] = made
        return made


def _turns(steps: Sequence[Step], size: int) -> tuple[tuple[Turn, ...], ...]:
    """Every rank's part of the steps."""
    used, last = _uses(steps, size)
    lands = [[0] * len(steps) for _ in range(size)]
    turns: list[list[Turn]] = [[] for _ in range(size)]
    for t, step in enumerate(steps):
        inner = _ends(step.transfers, step.grads, size)
        outer = [(o.steps, _ends(o.transfers, o.grads, size)) for o in step.outer]
        for rank, blocks in enumerate(step.attend):
            mine = [(n, ends[rank]) for n, ends in outer if any(ends[rank][:4])]
            for n, _ in mine:
                lands[rank][t + n - 1] += 1
            drop = tuple(b for b, at in used[rank].items() if at == t and b != rank)
            hops = tuple(x for _, x in mine)
            turns[rank].append(Turn(blocks, t == last[rank], inner[rank], drop, hops, lands[rank][t]))
    return tuple(map(tuple, turns))


def _uses(steps: Sequence[Step], size: int) -> tuple[list[dict[int, int]], list[int]]:
    """Of each rank: block -> the last step at which it attends or sends that, and the last step at which it attends."""
    used: list[dict[int, int]] = [{} for _ in range(size)]
    last = [0] * size
    for t, step in enumerate(steps):
        for rank, blocks in enumerate(step.attend):
            last[rank] = t if blocks else last[rank]
            used[rank] |= dict.fromkeys(blocks, t)
        for x, n in step.blocks:
            used[x.source][x.block] = max(t + n - 1, used[x.source].get(x.block, 0))
    return used, last


def _ends(transfers: Sequence[Transfer], grads: Sequence[Transfer], size: int) -> list[Hops]:
    """Each rank's sends and receives."""
    ends: list[tuple[list[Hop], ...]] = [([], [], [], []) for _ in range(size)]
    for first, moves in ((0, transfers), (2, grads)):
        for block, source, target in moves:
            ends[source][first].append((block, target))
            ends[target][first + 1].append((block, source))
    flags = bool(transfers), bool(grads)
    return [Hops(tuple(s), tuple(r), tuple(gs), tuple(gr), *flags) for s, r, gs, gr in ends]


class _Exchange(NamedTuple):
    """What a plan holds that depends on the needed blocks and the hosts alone."""

    schedule: str
    why: str
    forward: Course
    backward: Course


@functools.lru_cache(maxsize=64)
def _exchange(schedule: str, needs: Needs, hosts: Hosts) -> _Exchange:
    found = chosen(schedule, needs, hosts)
    forward = _course(found.forward, len(needs))
    backward = forward if found.backward is found.forward else _course(found.backward, len(needs))
    return _Exchange(found.name, found.why, forward, backward)


@functools.lru_cache(maxsize=64)
def _row_exchange(schedule: str, needs: Needs, hosts: Hosts) -> _Exchange:
    """As _exchange, with rows that travel in backward; forward then moves blocks alone."""
    keys = _exchange(schedule, needs, hosts)
    ahead = without_idle([_without_grads(step) for step in keys.forward.steps])
    back = chosen_for_rows(schedule, needs, hosts).backward
    return keys._replace(forward=_course(ahead, len(needs)), backward=_course(back, len(needs), rows=True))


def _without_grads(step: Step) -> Step:
    return step._replace(grads=(), outer=tuple(o._replace(grads=()) for o in step.outer if o.transfers))


def _course(steps: tuple[Step, ...], size: int, *, rows: bool = False) -> Course:
    turns = _turns(steps, size)
    hops = [[turn.departing for turn in mine] for mine in turns]
    sends = tuple(any(x.sends for x in mine) for mine in hops)
    return Course(steps, turns, sends, tuple(any(x.grad_sends or x.grad_recvs for x in mine) for mine in hops), rows)


def _traffic(courses: tuple[Course, Course], lengths: tuple[Sequence[int], Sequence[int]], token: TokenBytes) -> Traffic:
    """Bytes, by the courses in which keys and in which rows travel; lengths: of the blocks of each."""
    keys = courses[0].nbytes(lengths[0], token.keys, token.dkv)
    return Traffic(keys, courses[1].nbytes(lengths[1], token.rows, token.dq), 1.0)


def _work(rows: Sequence[RowPieces], keys: KeyTable, size: int) -> float:
    """The busiest rank's pairs if each attends its own keys with all rows over those if it attends its own rows."""
    pairs = about_pairs(rows, keys, size)
    return float(pairs.sum(0).max() / max(pairs.sum(1).max(), 1.0))


def make_plan(
    layout: Layout,
    mask: Mask,
    kv_layout: Layout | None = None,
    *,
    schedule: str = "auto",
    hosts: Hosts | None = None,
    token: TokenBytes | None = None,
) -> Plan:
    """The plan of a ring whose queries lie as `layout` and keys as `kv_layout` (default: alike) under the mask.

    hosts: the number of each rank's host, in sequence order (default: one host). schedule "auto" takes on one host direct
    where that moves fewer blocks, else rotate (its traffic is between neighbours only); on several, of these two, what burdens
    host borders less. token: what backward moves of a token, by which rows travel in place of keys where all ranks together
    send fewer bytes so, unless that makes the busiest rank busier (a layout balanced for its rows); without it, and with
    "gather", keys do. Raises ValueError for hosts that are not one number per rank.
    """
    hosts = (0,) * layout.size if hosts is None else tuple(hosts)
    if len(hosts) != layout.size:
        raise ValueError(f"hosts must have one number per rank: hosts={hosts}, size={layout.size}")
    return _make_plan(layout, mask, kv_layout or layout, schedule, hosts, token)


@functools.lru_cache(maxsize=16)  # one entry keeps 8 bytes per global token and attended block on the device
def _make_plan(layout: Layout, mask: Mask, kv_layout: Layout, schedule: str, hosts: Hosts, token: TokenBytes | None) -> Plan:
    extent = max(layout.end, kv_layout.end)
    rows = tuple(row_pieces(layout.runs, pieces) for pieces in mask.pieces(extent))
    keys = KeyTable(kv_layout.runs, extent)
    needs = np.logical_or.reduce([needed_blocks(r, keys, layout.size) for r in rows])
    needed = tuple(map(tuple, needs.tolist()))
    exchange, traffic = _exchange(schedule, needed, hosts), None
    if token is not None and exchange.schedule != "gather":
        by_rows = _row_exchange(schedule, needed, hosts)
        traffic = _traffic((exchange.backward, by_rows.backward), (kv_layout.lengths, layout.lengths), token)
        if traffic.rows < traffic.keys:
            traffic = traffic._replace(work=_work(rows, keys, layout.size))
        exchange = by_rows if traffic.by_rows else exchange
    of_rows = {"needs": needs, "rows": rows, "keys": keys, "traffic": traffic}
    return Plan(layout, kv_layout, mask, hosts, **of_rows, _tables={}, **exchange._asdict())

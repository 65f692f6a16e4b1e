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

from ringflash.intervals import KeyTable, RowPieces, local_intervals, needed_blocks, row_pieces, visible_pairs
from ringflash.layout import Layout, contiguous
from ringflash.mask import Mask
from ringflash.schedules import Hosts, Needs, Step, Transfer, chosen
from ringflash.transport.blocks import Hop, Hops

Array = np.ndarray


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
    and sends or receives dK and dV.
    """

    steps: tuple[Step, ...]
    turns: tuple[tuple[Turn, ...], ...]
    sends: tuple[bool, ...]
    shares: tuple[bool, ...]


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
    size): needs[r, b], rank r sees a key of block b. forward and backward: their courses, the same one but for "gather". rows:
    the global intervals of all ranks' rows, one entry per distinct batch row.
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

    def intervals(self, rank: int, device: torch.device) -> dict[int, tuple[Tensor, Tensor]]:
        """Local (begin, end) of the rank's rows in each block it attends: int32 (1 or batch, seqlen_q), on the device.

        Made once per device and stream (another stream would have to wait for this one) and kept with the plan: 8 bytes
        per row and attended block.
        """
        return self._kept(
            ("each", rank), device, lambda: self._local_intervals(rank, self.keys, self.attended(rank), device=device)
        )

    def in_order(self, rank: int, device: torch.device) -> InOrder:
        """The rank's rows against all keys in order of their positions; made and kept as intervals are."""
        return self._kept(("in order", rank), device, lambda: self._in_order(rank, device))

    def _in_order(self, rank: int, device: torch.device) -> InOrder:
        kv = self.kv_layout
        keys = KeyTable(contiguous(kv.seqlen, 1).shift(kv.offset).runs, max(self.layout.end, kv.end))
        ((begin, end),) = self._local_intervals(rank, keys, [0], device=device).values()
        places = torch.cat([kv.positions(block) for block in self.attended(rank)]) - kv.offset
        places = places.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else places.to(device)
        return InOrder(begin, end, places)

    def _local_intervals(
        self, rank: int, keys: KeyTable, blocks: Sequence[int], *, device: torch.device
    ) -> dict[int, tuple[Tensor, Tensor]]:
        rows = [r.of(rank) for r in self.rows]
        return local_intervals(rows, keys, seqlen_q=self.layout.lengths[rank], blocks=blocks, device=device)

    def _kept(self, name: tuple[str, int], device: torch.device, make: Callable[[], Table]) -> Table:
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        key = (name, device, stream)
        if key in self._tables:
            return self._tables[key]
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


def _course(steps: tuple[Step, ...], size: int) -> Course:
    turns = _turns(steps, size)
    hops = [[turn.departing for turn in mine] for mine in turns]
    sends = tuple(any(x.sends for x in mine) for mine in hops)
    return Course(steps, turns, sends, tuple(any(x.grad_sends or x.grad_recvs for x in mine) for mine in hops))


def make_plan(
    layout: Layout,
    mask: Mask,
    kv_layout: Layout | None = None,
    *,
    schedule: str = "auto",
    hosts: Hosts | None = None,
) -> Plan:
    """The plan of a ring whose queries lie as `layout` and keys as `kv_layout` (default: alike) under the mask.

    hosts: the number of each rank's host, in sequence order (default: one host). schedule "auto" takes on one host direct
    where that moves fewer blocks, else rotate (its traffic is between neighbours only); on several, of these two, what burdens
    host borders less. Raises ValueError for hosts that are not one number per rank.
    """
    hosts = (0,) * layout.size if hosts is None else tuple(hosts)
    if len(hosts) != layout.size:
        raise ValueError(f"hosts must have one number per rank: hosts={hosts}, size={layout.size}")
    return _make_plan(layout, mask, kv_layout or layout, schedule, hosts)


@functools.lru_cache(maxsize=16)  # one entry keeps 8 bytes per global token and attended block on the device
def _make_plan(layout: Layout, mask: Mask, kv_layout: Layout, schedule: str, hosts: Hosts) -> Plan:
    extent = max(layout.end, kv_layout.end)
    rows = tuple(row_pieces(layout.runs, pieces) for pieces in mask.pieces(extent))
    keys = KeyTable(kv_layout.runs, extent)
    needs = np.logical_or.reduce([needed_blocks(r, keys, layout.size) for r in rows])
    exchange = _exchange(schedule, tuple(map(tuple, needs.tolist())), hosts)
    return Plan(layout, kv_layout, mask, hosts, needs=needs, rows=rows, keys=keys, _tables={}, **exchange._asdict())

"""Plans: frozen data that say which block each rank attends at each step and which transfers put it there.

The exchange is a function of the plan alone, never of one rank's data, `requires_grad` or timing, so both ends of every
hop agree. A generator turns "which rank needs which block" into steps:

- rotate: every block moves to the next rank each step and stops behind the last rank that needs it;
- direct: a block goes straight from its owner to each rank that needs it, and nowhere else.

dK/dV of a block go home along the same lines: rotate carries one partial from rank to rank and adds on the way, direct
sends each rank's partial straight to the owner. Either way every addition has its fixed place: the result is the same
bits every time.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringflash.intervals import KeyTable, RowPieces, local_intervals, needed_blocks, row_pieces, visible_pairs
from ringflash.layout import Layout
from ringflash.mask import Mask

Array = np.ndarray


class Transfer(NamedTuple):
    """A block's K and V (or its partial dK and dV) go from one rank to another."""

    block: int
    source: int
    target: int


class Step(NamedTuple):
    """attend[r]: the block rank r attends (None: none), while `transfers` bring blocks of later steps and `grads` carry
    the partial dK/dV that were complete before this step (backward only)."""

    attend: tuple[int | None, ...]
    transfers: tuple[Transfer, ...]
    grads: tuple[Transfer, ...]

    @property
    def busy(self) -> bool:
        """Whether anything is attended or moves."""
        return bool(self.transfers or self.grads) or any(block is not None for block in self.attend)


class Turn(NamedTuple):
    """One rank's part of a step: what it attends, sends and receives as (block, other rank), and drops afterwards."""

    attend: int | None
    last: bool  # nothing is attended after this turn: the state is finished here
    sends: tuple[tuple[int, int], ...]
    recvs: tuple[tuple[int, int], ...]
    grad_sends: tuple[tuple[int, int], ...]
    grad_recvs: tuple[tuple[int, int], ...]
    drop: tuple[int, ...]  # received blocks that no later turn attends or sends


Needs = tuple[tuple[bool, ...], ...]  # needs[r][b]: rank r sees a key of block b


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
        attend = tuple(b if t in hops[b] or t == 0 else None for b in here)
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
    turns: list[tuple[int | None, ...]] = [tuple(range(size))]  # the block attended by each rank, step by step
    for d in offsets:
        turns.append(tuple((r - d) % size if needs[r][(r - d) % size] else None for r in range(size)))
    steps = []
    for t in range(len(turns) + 1):
        attend = turns[t] if t < len(turns) else (None,) * size
        coming = turns[t + 1] if t + 1 < len(turns) else ()
        done = turns[t - 1] if t > 1 else ()
        moves = tuple(Transfer(b, b, r) for r, b in enumerate(coming) if b is not None)
        grads = tuple(Transfer(b, r, b) for r, b in enumerate(done) if b is not None)
        steps.append(Step(attend, moves, grads))
    return steps


SCHEDULES: dict[str, Callable[[Needs], list[Step]]] = {"rotate": rotate, "direct": direct}


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything a ring needs to know about one (layout, mask, schedule): intervals, needed blocks, steps.

    schedule is the one that was picked ("rotate" or "direct"), and why. needs bool (size, size): needs[r, b], rank r sees a
    key of block b. turns[r]: rank r's own part of every step. rows: the global intervals of all ranks' rows, one entry per
    distinct batch row.
    """

    layout: Layout
    kv_layout: Layout
    mask: Mask
    schedule: str
    why: str
    needs: Array
    steps: tuple[Step, ...]
    turns: tuple[tuple[Turn, ...], ...]
    rows: tuple[RowPieces, ...]
    keys: KeyTable
    _tables: dict

    @property
    def size(self) -> int:
        """Ring size."""
        return self.layout.size

    def attended(self, rank: int) -> list[int]:
        """The blocks that a rank attends, in order of the steps; its own is always the first."""
        return [turn.attend for turn in self.turns[rank] if turn.attend is not None]

    def work(self, rank: int) -> Array:
        """int64 (size,): visible (query, key) pairs of a rank with every block, per head, summed over distinct batch rows."""
        return visible_pairs([r.of(rank) for r in self.rows], self.keys, self.size)

    def intervals(self, rank: int, device: torch.device) -> dict[int, tuple[Tensor, Tensor]]:
        """Local (begin, end) of the rank's rows in each block it attends: int32 (1 or batch, seqlen_q), on the device.

        Made once per device and stream (another stream would have to wait for this one) and kept with the plan: 8 bytes
        per row and attended block.
        """
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        key = (rank, device, stream)
        if key in self._tables:
            return self._tables[key]
        with torch.inference_mode(False), torch.no_grad():
            rows = [r.of(rank) for r in self.rows]
            made = local_intervals(
                rows, self.keys, seqlen_q=self.layout.lengths[rank], blocks=self.attended(rank), device=device
            )
        if all(type(x) is Tensor for pair in made.values() for x in pair):  # a tracer's fake tensors are for that call alone
            self._tables[key] = made
        return made


def _turns(steps: Sequence[Step], size: int) -> tuple[tuple[Turn, ...], ...]:
    """Every rank's part of the steps."""
    used: list[dict[int, int]] = [{} for _ in range(size)]  # block -> the last step at which the rank attends or sends it
    last = [0] * size
    for t, step in enumerate(steps):
        for rank, block in enumerate(step.attend):
            if block is not None:
                used[rank][block] = last[rank] = t
        for x in step.transfers:
            used[x.source][x.block] = t
    turns: list[list[Turn]] = [[] for _ in range(size)]
    for t, step in enumerate(steps):
        parts = (*_ends(step.transfers, size), *_ends(step.grads, size))
        for rank, (block, *moved) in enumerate(zip(step.attend, *parts, strict=True)):
            sends, recvs, grad_sends, grad_recvs = map(tuple, moved)
            drop = tuple(b for b, at in used[rank].items() if at == t and b != rank)
            turns[rank].append(Turn(block, t == last[rank], sends, recvs, grad_sends, grad_recvs, drop))
    return tuple(map(tuple, turns))


def _ends(transfers: Sequence[Transfer], size: int) -> tuple[list[list[tuple[int, int]]], list[list[tuple[int, int]]]]:
    """Each rank's (block, other rank) sends and receives."""
    sends, recvs = [[] for _ in range(size)], [[] for _ in range(size)]
    for block, source, target in transfers:
        sends[source].append((block, target))
        recvs[target].append((block, source))
    return sends, recvs


class _Exchange(NamedTuple):
    """What a plan holds that depends on the needed blocks alone."""

    schedule: str
    why: str
    steps: tuple[Step, ...]
    turns: tuple[tuple[Turn, ...], ...]


@functools.lru_cache(maxsize=64)
def _exchange(schedule: str, needs: Needs) -> _Exchange:
    schedule, why = _choose(needs) if schedule == "auto" else (schedule, "asked for")
    steps = tuple(step for step in SCHEDULES[schedule](needs) if step.busy)
    return _Exchange(schedule, why, steps, _turns(steps, len(needs)))


def _choose(needs: Needs) -> tuple[str, str]:
    """(schedule, why): direct where it moves fewer blocks."""
    size = len(needs)
    hops = sum(max((t for t in range(1, size) if needs[(b + t) % size][b]), default=0) for b in range(size))
    needed = sum(sum(row) for row in needs) - sum(needs[r][r] for r in range(size))
    if needed < hops:
        return "direct", f"moves {needed} blocks, rotate would move {hops}"
    return "rotate", f"moves {hops} blocks between neighbours; direct would move as many"


def make_plan(layout: Layout, mask: Mask, kv_layout: Layout | None = None, *, schedule: str = "auto") -> Plan:
    """The plan of a ring whose queries lie as `layout` and keys as `kv_layout` (default: alike) under the mask.

    schedule "auto" takes direct where that moves fewer blocks, else rotate (its traffic is between neighbours only).
    """
    return _make_plan(layout, mask, kv_layout or layout, schedule)


@functools.lru_cache(maxsize=16)  # one entry keeps 8 bytes per global token and attended block on the device
def _make_plan(layout: Layout, mask: Mask, kv_layout: Layout, schedule: str) -> Plan:
    extent = max(layout.end, kv_layout.end)
    rows = tuple(row_pieces(layout.runs, pieces) for pieces in mask.pieces(extent))
    keys = KeyTable(kv_layout.runs, extent)
    needs = np.logical_or.reduce([needed_blocks(r, keys, layout.size) for r in rows])
    exchange = _exchange(schedule, tuple(map(tuple, needs.tolist())))
    return Plan(layout, kv_layout, mask, needs=needs, rows=rows, keys=keys, _tables={}, **exchange._asdict())

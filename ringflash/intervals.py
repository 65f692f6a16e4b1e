"""Interval arithmetic: from runs of rows and of keys to local key intervals per row, and to the blocks a rank needs.

Host work is per run of positions, not per token; the per-row local intervals of a block are made on the device.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringflash.layout import Runs
from ringflash.mask import Pieces

Array = np.ndarray
SAMPLED = 512  # rows


class RowPieces(NamedTuple):
    """Rows of all ranks, rank by rank, in stretches of n: the i-th sees [begin + i * begin_step, end + i * end_step)."""

    rank: Array
    n: Array
    begin: Array
    begin_step: Array
    end: Array
    end_step: Array

    def take(self, which: Array | slice) -> "RowPieces":
        """Some of the pieces."""
        return RowPieces(*(column[which] for column in self))

    def of(self, rank: int) -> "RowPieces":
        """The pieces of one rank."""
        return self.take(slice(*np.searchsorted(self.rank, (rank, rank + 1))))

    def expand(self, whole: Array | bool = False) -> "RowPieces":
        """Every row as a piece of its own, except those of pieces that stay whole."""
        times = np.where(whole, 1, self.n)
        each = RowPieces(*(np.repeat(column, times) for column in self))
        i = np.arange(len(each.rank)) - np.repeat(np.cumsum(times) - times, times)
        n = each.n // np.repeat(times, times)
        return each._replace(n=n, begin=each.begin + i * each.begin_step, end=each.end + i * each.end_step)


def row_pieces(blocks: Sequence[Runs], pieces: Pieces) -> RowPieces:
    """Cut the ranks' runs of positions at the mask's pieces, which cover every position of the runs."""
    runs = Runs(*map(np.concatenate, zip(*blocks, strict=True)))
    rank = np.repeat(np.arange(len(blocks)), [len(b.first) for b in blocks])
    end = runs.first + runs.n * runs.step
    head = np.searchsorted(pieces.last, runs.first, side="right")
    count = np.searchsorted(pieces.first, end - runs.step, side="right") - head
    run = np.repeat(np.arange(len(count)), count)
    piece = np.arange(len(run)) + (head - (np.cumsum(count) - count))[run]
    first, step = runs.first[run], runs.step[run]
    cut = pieces.take(piece)
    low = -((first - np.maximum(first, cut.first)) // step)  # ceil((piece first - run first) / step)
    high = -((first - np.minimum(end[run], cut.last)) // step)
    at = first + low * step
    begin, end = cut.begin + cut.begin_slope * at, cut.end + cut.end_slope * at
    found = RowPieces(rank[run], high - low, begin, cut.begin_slope * step, end, cut.end_slope * step)
    return found if found.n.all() else found.take(found.n > 0)


class KeyTable:
    """The runs of all ranks in one sorted table: position p of block w stands at w * span + p + 1.

    Every block opens with an empty run, so that positions before its first key, and blocks without keys, give index 0.
    """

    def __init__(self, blocks: Sequence[Runs], span: int) -> None:
        self.span = span + 3
        n_runs = np.array([1 + len(b.first) for b in blocks])
        block = np.repeat(np.arange(len(blocks)), n_runs)
        filled = np.ones(len(block), dtype=bool)
        filled[np.cumsum(n_runs) - n_runs] = False
        table = np.tile([[-1], [0], [1], [0]], len(block))  # the opening runs
        table[:, filled] = [np.concatenate(column) for column in zip(*blocks, strict=True)]
        self.first, self.count, self.step, self.base = table
        self.first += 1 + block * self.span

    def index(self, block: Array, position: Array) -> Array:
        """Number of the block's keys before the position: its local index, or where it would be inserted."""
        at = block * self.span + position + 1
        run = np.searchsorted(self.first, at, side="right") - 1
        return self.base[run] + np.clip(-((self.first[run] - at) // self.step[run]), 0, self.count[run])


def needed_blocks(rows: RowPieces, keys: KeyTable, size: int) -> Array:
    """bool (size, size): some row of the rank sees some key of the block. Exact.

    Rows that follow each other mostly see overlapping or touching intervals, so a rank comes down to a few.
    """
    solid = np.logical_or(rows.n == 1, rows.begin + rows.begin_step <= rows.end)
    if not solid.all():  # a stride wider than what its rows see: such rows stand by themselves
        rows = rows.expand(whole=solid)
    begin, end, rank = rows.begin, rows.end + (rows.n - 1) * rows.end_step, rows.rank
    apart = (begin[1:] > end[:-1]) | (rank[1:] != rank[:-1])
    heads, tails = np.concatenate(([True], apart))[: len(rank)], np.concatenate((apart, [True]))[: len(rank)]
    begin, end, rank = begin[heads], end[tails], rank[heads]

    needed = np.zeros((size, size), dtype=bool)
    _mark(needed, keys, begin, end, rank, slice(None, None, 1 + len(rank) // 64))  # often shows that all need all
    for at in range(0, len(rank), 4096):
        undecided = at + np.flatnonzero((needed.sum(axis=1) < size)[rank[at : at + 4096]])
        _mark(needed, keys, begin, end, rank, undecided)
    return needed


def _mark(needed: Array, keys: KeyTable, begin: Array, end: Array, rank: Array, which: Array | slice) -> None:
    """Mark blocks with a key in one of the chosen intervals as needed by the interval's rank."""
    blocks = np.arange(len(needed))[:, None]
    block, i = np.nonzero(keys.index(blocks, end[which]) > keys.index(blocks, begin[which]))
    needed[rank[which][i], block] = True


def visible_pairs(rows: Sequence[RowPieces], keys: KeyTable, size: int) -> Array:
    """int64 (size,): visible (row, key) pairs of these rows with every block, summed over distinct batch rows."""
    each = [r.expand() for r in rows]
    begin, end = np.concatenate([r.begin for r in each]), np.concatenate([r.end for r in each])
    blocks = np.arange(size)[:, None]
    return np.array([(keys.index(w, end) - keys.index(w, begin)).sum() for w in blocks])


def about_pairs(rows: Sequence[RowPieces], keys: KeyTable, size: int) -> Array:
    """float (size, size): visible pairs of each rank's rows with each block, about: from rows at even distances."""
    pairs = np.zeros((size, size))
    for each in (r for r in rows if len(r.n)):
        last = np.cumsum(each.n)
        at = (2 * np.arange(SAMPLED) + 1) * last[-1] // (2 * SAMPLED)
        piece = np.searchsorted(last, at, side="right")
        i = at - (last - each.n)[piece]
        begin, end = (x[piece] + i * step[piece] for x, step in ((each.begin, each.begin_step), (each.end, each.end_step)))
        blocks = np.arange(size)[:, None]
        seen = keys.index(blocks, end) - keys.index(blocks, begin)
        np.add.at(pairs, each.rank[piece], seen.T * (last[-1] / SAMPLED))
    return pairs


def local_intervals(
    rows: Sequence[RowPieces], keys: KeyTable, *, seqlen_q: int, blocks: Sequence[int], device: torch.device
) -> dict[int, tuple[Tensor, Tensor]]:
    """Per block (begin, end), int32 (distinct batch rows, seqlen_q), made on the device from one small upload."""
    table = np.concatenate(
        [np.concatenate(columns) for columns in zip(*rows, strict=True)] + [keys.first, keys.count, keys.step, keys.base]
    )
    n_pieces = sum(len(r.rank) for r in rows)
    sent = torch.from_numpy(table)
    sent = sent.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else sent.to(device)
    _, count, begin, begin_step, end, end_step, first, key_count, step, base = sent.split(
        [n_pieces] * 6 + [len(keys.first)] * 4
    )
    total = len(rows) * seqlen_q
    piece = torch.repeat_interleave(count, output_size=total)
    i = torch.arange(total, device=device) - (count.cumsum(0) - count)[piece]
    span = torch.stack([begin[piece] + i * begin_step[piece], end[piece] + i * end_step[piece]])  # [2, rows]

    found: dict[int, tuple[Tensor, Tensor]] = {}
    for w in blocks:
        at = span + (w * keys.span + 1)
        run = torch.searchsorted(first, at, right=True) - 1
        ahead = torch.div(at - first[run] + step[run] - 1, step[run], rounding_mode="floor")
        index = base[run] + torch.minimum(ahead.clamp_(min=0), key_count[run])
        # Both begin at a multiple of 16 bytes: kernels are compiled anew for pointers that do not.
        local = torch.empty(2, -(-total // 4) * 4, dtype=torch.int32, device=device)
        local[:, :total] = index
        begin_local, end_local = (x[:total].view(len(rows), seqlen_q) for x in local)
        found[w] = (begin_local, end_local)
    return found

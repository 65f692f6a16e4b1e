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


class RowPieces(NamedTuple):
    """A rank's rows in stretches of local indices: row index + i sees keys [begin + i * begin_step, end + i * end_step)."""

    index: Array
    count: Array
    begin: Array
    begin_step: Array
    end: Array
    end_step: Array

    def at(self, i: Array) -> tuple[Array, Array]:
        """Global intervals of the i-th row of every piece."""
        return self.begin + i * self.begin_step, self.end + i * self.end_step

    def take(self, keep: Array) -> "RowPieces":
        """The pieces where `keep` is true."""
        return RowPieces(*(column[keep] for column in self))

    def expand(self) -> tuple[Array, Array]:
        """Global begin and end of every row of the pieces."""
        i = np.arange(int(self.count.sum())) - np.repeat(np.cumsum(self.count) - self.count, self.count)
        rows = RowPieces(*(np.repeat(column, self.count) for column in self))
        return rows.at(i)


def row_pieces(runs: Runs, pieces: Pieces) -> RowPieces:
    """Cut a rank's runs of positions at the mask's pieces; the pieces must cover every position of the runs."""
    head = np.searchsorted(pieces.last, runs.first, side="right")
    tail = np.searchsorted(pieces.first, runs.last, side="right")
    count = tail - head
    run = np.repeat(np.arange(len(count)), count)
    piece = np.arange(len(run)) + np.repeat(head - (np.cumsum(count) - count), count)
    first, step = runs.first[run], runs.step[run]
    low = -((first - np.maximum(first, pieces.first[piece])) // step)  # ceil((piece first - run first) / step)
    high = -((first - np.minimum(runs.last[run] + 1, pieces.last[piece])) // step)
    at = first + low * step
    begin = pieces.begin[piece] + pieces.begin_slope[piece] * at
    end = pieces.end[piece] + pieces.end_slope[piece] * at
    begin_step, end_step = pieces.begin_slope[piece] * step, pieces.end_slope[piece] * step
    return RowPieces(runs.base[run] + low, high - low, begin, begin_step, end, end_step).take(high > low)


class KeyTable:
    """The runs of all ranks in one sorted table: position p of block w stands at w * span + p + 1.

    Every block opens with an empty run, so that positions before its first key, and blocks without keys, give index 0.
    """

    def __init__(self, blocks: Sequence[Runs], span: int) -> None:
        self.span = span + 3
        opened = [Runs(*(np.concatenate(([x], col)) for x, col in zip((-1, 0, 1, 0), b, strict=True))) for b in blocks]
        self.first = np.concatenate([b.first + 1 + w * self.span for w, b in enumerate(opened)])
        self.count, self.step, self.base = (np.concatenate([b[c] for b in opened]) for c in (1, 2, 3))

    def index(self, block: Array, position: Array) -> Array:
        """Number of the block's keys before the position: its local index, or where it would be inserted."""
        at = block * self.span + position + 1
        run = np.searchsorted(self.first, at, side="right") - 1
        return self.base[run] + np.clip(-((self.first[run] - at) // self.step[run]), 0, self.count[run])


def needed_blocks(rows: Sequence[RowPieces], keys: KeyTable, size: int) -> Array:
    """bool (ranks, size): some row of the rank sees some key of the block. Exact.

    A few pieces of each rank usually show that it needs every block; only ranks for which they do not are looked at whole.
    """
    owner = np.repeat(np.arange(len(rows)), [len(r.index) for r in rows])
    pieces = RowPieces(*(np.concatenate(columns) for columns in zip(*rows, strict=True)))
    needed = np.zeros((len(rows), size), dtype=bool)
    _probe(pieces, owner, keys, needed, np.arange(len(owner)) % (1 + len(owner) // 64) == 0)
    _probe(pieces, owner, keys, needed, ~needed.all(1)[owner])
    return needed


def _probe(pieces: RowPieces, owner: Array, keys: KeyTable, needed: Array, chosen: Array) -> None:
    """Mark what the chosen pieces need. Three rows of a piece usually decide it; else it is looked at row by row."""
    pieces, owner = pieces.take(chosen), owner[chosen]
    probes = [pieces.at(i) for i in (np.zeros_like(pieces.count), pieces.count // 2, pieces.count - 1)]
    begin, end = (np.stack(x) for x in zip(*probes, strict=True))
    block = np.arange(needed.shape[1])[:, None, None]
    low, high = keys.index(block, begin), keys.index(block, end)  # [size, probe, piece]
    seen = (high > low).any(1)
    np.logical_or.at(needed, owner, seen.T)
    perhaps = (high[:, 2] > low[:, 0]) & ~seen & ~needed[owner].T  # the hull holds keys that the three rows do not see
    for w, rank in {(int(w), int(owner[p])) for w, p in zip(*np.nonzero(perhaps), strict=True)}:
        begin, end = pieces.take(perhaps[w] & (owner == rank)).expand()
        needed[rank, w] = bool((keys.index(np.int64(w), end) > keys.index(np.int64(w), begin)).any())


def visible_pairs(rows: Sequence[RowPieces], keys: KeyTable, size: int) -> Array:
    """int64 (size,): visible (row, key) pairs of these rows with every block, summed over distinct batch rows."""
    spans = [r.expand() for r in rows]
    begin, end = (np.concatenate(x) for x in zip(*spans, strict=True))
    blocks = range(size)
    return np.array([int((keys.index(np.int64(w), end) - keys.index(np.int64(w), begin)).sum()) for w in blocks])


def local_intervals(
    rows: Sequence[RowPieces], seqlen_q: int, keys: KeyTable, blocks: Sequence[int], device: torch.device
) -> dict[int, tuple[Tensor, Tensor]]:
    """Per block (begin, end), int32 (distinct batch rows, seqlen_q), made on the device from one small upload."""
    table = np.concatenate(
        [np.concatenate(columns) for columns in zip(*rows, strict=True)] + [keys.first, keys.count, keys.step, keys.base]
    )
    n_pieces = sum(len(r.index) for r in rows)
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
        begin_local, end_local = index.to(torch.int32).view(2, len(rows), seqlen_q)
        found[w] = (begin_local, end_local)
    return found

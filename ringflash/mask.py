"""Masks: every query position sees one half-open interval of key positions, kept as few pieces affine in the position."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

Documents = tuple[int, ...] | tuple[tuple[int, ...], ...]
Array = np.ndarray


class Pieces(NamedTuple):
    """Stretches [first, last) of positions p on which begin(p) and end(p) are constant or move with p.

    begin(p) = begin + begin_slope * p and end(p) = end + end_slope * p, slopes 0 or 1. All int64 arrays, ascending.
    """

    first: Array
    last: Array
    begin: Array
    begin_slope: Array
    end: Array
    end_slope: Array

    def take(self, which: Array) -> "Pieces":
        """Some of the pieces, in any order and number."""
        return Pieces(*(column[which] for column in self))


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees. Frozen and hashable.

    causal: no key after the query. window=(left, right): at most that many keys before and after the query, besides the
    query itself; None is unbounded on that side. documents: cumulative lengths (0, ..., seqlen), as a host tuple or one
    tuple per batch row; queries see their own document only (a tensor is accepted; one on a GPU costs a device
    synchronisation). prefix=n: the first n keys are visible to all (with causal or a right window; else they are anyway).

    Raises ValueError or TypeError in words for anything else: negative numbers, causal with right > 0, prefix with
    documents or with a left window, documents that do not start at 0 or descend.
    """

    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    documents: Documents | None = None
    prefix: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.causal, bool):
            raise TypeError(f"causal must be True or False: causal={self.causal!r}")
        object.__setattr__(self, "window", _window(self.window))
        if self.documents is not None:
            object.__setattr__(self, "documents", document_bounds(self.documents))
        left, right = self.window or (None, None)
        if self.causal and right:
            raise ValueError(f"causal and a right window contradict: causal=True, window={self.window}; use (left, 0)")
        if self.prefix is not None:
            self._check_prefix(left)
        object.__setattr__(self, "_hash", hash((self.causal, self.window, self.documents, self.prefix)))

    def __reduce__(self) -> tuple:  # a hash is another one in another process
        return Mask, (self.causal, self.window, self.documents, self.prefix)

    def __hash__(self) -> int:  # documents may be thousands of numbers: hashed once
        return self._hash  # pyright: ignore[reportAttributeAccessIssue]

    def _check_prefix(self, left: int | None) -> None:
        prefix = _integer(self.prefix)
        if prefix is None:
            raise TypeError(f"prefix must be a number of keys: prefix={self.prefix!r}")
        object.__setattr__(self, "prefix", prefix)
        if prefix < 0:
            raise ValueError(f"prefix must not be negative: prefix={self.prefix}; None is no prefix")
        if self.documents is not None:
            raise ValueError("prefix and documents contradict: the first keys cannot be visible across documents; drop one")
        if left is not None:
            raise ValueError(f"prefix and a left window contradict: window={self.window}; use (None, right)")

    @property
    def batch(self) -> int | None:
        """Number of batch rows where each has documents of its own, else None."""
        return len(self.documents) if self.documents and isinstance(self.documents[0], tuple) else None

    def check_seqlen(self, seqlen: int) -> None:
        """Raise ValueError unless the documents end at seqlen."""
        for row in self.document_rows(seqlen) if self.documents is not None else []:
            if row[-1] != seqlen:
                raise ValueError(
                    f"documents must end at the sequence length: the last entry is {row[-1]}, seqlen={seqlen}; "
                    "count padding as a document of its own"
                )

    def document_rows(self, seqlen: int) -> list[Array]:
        """Cumulative document lengths for each distinct batch row, int64; one whole document where there are none."""
        if self.documents is None:
            return [np.array([0, seqlen], dtype=np.int64)]
        rows = self.documents if self.batch is not None else (self.documents,)
        return [np.array(row, dtype=np.int64) for row in rows]

    def pieces(self, seqlen: int) -> list[Pieces]:
        """The intervals of positions 0 ... seqlen-1, for each distinct batch row."""
        return [self._pieces(bounds) for bounds in self.document_rows(seqlen)]

    def _pieces(self, bounds: Array) -> Pieces:
        first, last = bounds[:-1, None], bounds[1:, None]
        longest = int(bounds[-1])  # more than this is no bound, and might not fit int64
        left, right, n_prefix = (None if x is None else min(x, longest) for x in (*(self.window or (None, None)), self.prefix))
        right = 0 if self.causal else right
        # where an interval's end changes its form: behind the left window, before the document's end, at the prefix's end
        edges = [first, last]
        if left is not None:
            edges.append(np.clip(first + left, first, last))
        if right is not None:
            edges.append(np.clip(last - right, first, last))
        if right is not None and n_prefix:
            edges.append(np.clip(np.full_like(first, n_prefix - right - 1), first, last))
        cuts = np.sort(np.concatenate(edges, axis=1), axis=1)
        begins, ends = cuts[:, :-1], cuts[:, 1:]
        filled = begins < ends
        first, last = (np.broadcast_to(x, begins.shape)[filled] for x in (first, last))
        at = begins[filled]
        slides = np.zeros(len(at), dtype=bool) if left is None else at - left >= first
        begin = np.where(slides, -(left or 0), first)
        reach = at + (right or 0) + 1
        moves = np.zeros_like(slides) if right is None else reach <= last
        end = np.where(moves, (right or 0) + 1, last)
        if n_prefix and right is not None:
            prefix = np.minimum(n_prefix, last)
            end, moves = np.where(reach < prefix, prefix, end), moves & (reach >= prefix)
        return Pieces(at, ends[filled], begin, slides.astype(np.int64), end, moves.astype(np.int64))

    def row_work(self, seqlen: int) -> Array:
        """Visible keys of each position, summed over distinct batch rows: int64 (seqlen,)."""
        self.check_seqlen(seqlen)
        work = np.zeros(seqlen, dtype=np.int64)
        for p in self.pieces(seqlen):
            count = p.last - p.first
            at = np.arange(seqlen)
            work += np.repeat(p.end - p.begin, count) + np.repeat(p.end_slope - p.begin_slope, count) * at
        return work


def _integer(x: object) -> int | None:
    """x as an int, numpy's integers too; None if it is none (True and 1.0 are none)."""
    if isinstance(x, bool | np.bool_):
        return None
    try:
        return operator.index(x)  # pyright: ignore[reportArgumentType]
    except TypeError:
        return None


def _window(window: object) -> tuple[int | None, int | None] | None:
    if window is None:
        return None
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise TypeError(f"window must be (left, right), each a number of keys or None: window={window!r}")
    sides = tuple(side if side is None else _integer(side) for side in window)
    for side, given in zip(sides, window, strict=True):
        if side is None and given is not None:
            raise TypeError(f"window must be (left, right), each a number of keys or None: window={window!r}")
        if side is not None and side < 0:
            raise ValueError(f"window must not be negative: window={tuple(window)}; None is unbounded on that side")
    return None if sides == (None, None) else (sides[0], sides[1])


def a_mask(mask: object) -> Mask:
    """A mask, and nothing else."""
    if not isinstance(mask, Mask):
        raise TypeError(f"mask must be an rf.Mask: mask={mask!r}; for instance rf.Mask(causal=True)")
    return mask


def document_bounds(documents: Documents | Sequence | Tensor) -> Documents:
    """Cumulative document lengths as host tuples, checked: start at 0, do not descend, one list or one per batch row."""
    rows = documents.tolist() if isinstance(documents, Tensor | np.ndarray) else documents
    if not isinstance(rows, tuple | list) or not rows:
        raise TypeError(f"documents must be cumulative lengths (0, ..., seqlen) or one tuple per batch row: {documents!r}")
    if isinstance(rows[0], tuple | list | Tensor | np.ndarray):
        return tuple(_one_row(row, f"documents[{i}]") for i, row in enumerate(rows))
    return _one_row(rows, "documents")


def _one_row(row: object, name: str) -> tuple[int, ...]:
    row = row.tolist() if isinstance(row, Tensor | np.ndarray) else row
    if not isinstance(row, tuple | list) or len(row) < 1:
        raise TypeError(f"{name} must be cumulative lengths (0, ..., seqlen): {row!r}")
    if any(type(x) is not int for x in row):
        integers = [y for y in (_integer(x) for x in row) if y is not None]
        if len(integers) < len(row):
            raise TypeError(f"{name} must hold ints: {row!r:.120}")
        row = integers
    if row[0] != 0:
        raise ValueError(f"{name} must start at 0: {name}[0]={row[0]}; pass cumulative lengths (0, len0, len0+len1, ...)")
    for i in range(1, len(row)):
        if row[i] < row[i - 1]:
            found = f"entry {i - 1} is {row[i - 1]}, entry {i} is {row[i]}"
            raise ValueError(f"{name} must be ascending: {found}; pass cumulative lengths (0, len0, len0+len1, ...)")
    return tuple(row)

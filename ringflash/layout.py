"""Layouts: which global token positions each rank holds, as ascending runs of evenly spaced positions."""

import functools
import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringflash.mask import Documents, Mask, a_mask, document_bounds

Array = np.ndarray
MAX_SEQLEN = 2**40  # products of lengths and ring sizes stay far inside int64


class Runs(NamedTuple):
    """One rank's positions: run j holds first[j], first[j] + step[j], ... (n[j] of them) at local index base[j]."""

    first: Array
    n: Array
    step: Array
    base: Array

    @property
    def length(self) -> int:
        """Number of positions in all runs."""
        return int(self.base[-1] + self.n[-1]) if len(self.base) else 0

    @property
    def last(self) -> Array:
        """The last position of each run."""
        return self.first + (self.n - 1) * self.step

    def positions(self) -> Array:
        """All positions, ascending, int64."""
        index = np.arange(self.length) - np.repeat(self.base, self.n)
        return np.repeat(self.first, self.n) + index * np.repeat(self.step, self.n)


def _runs(first: Array, count: Array, step: Array) -> tuple[Runs, ...]:
    """Each rank's runs from [size, n] candidates: empty ones go."""
    keep = count > 0
    return _of_ranks(np.nonzero(keep)[0], first[keep], count[keep], step[keep], size=len(count))


def _of_ranks(rank: Array, first: Array, count: Array, step: Array, *, size: int) -> tuple[Runs, ...]:
    """Each rank's runs from all of them, rank by rank and ascending: those that continue each other with step 1 are joined."""
    single = (step == 1) | (count == 1)
    joins = (first[1:] == first[:-1] + count[:-1]) & single[1:] & single[:-1] & (rank[1:] == rank[:-1])
    heads = np.flatnonzero(np.concatenate(([True], ~joins))[: len(first)])
    first, step, rank = first[heads], np.where(single, 1, step)[heads], rank[heads]
    count = np.add.reduceat(count, heads) if len(heads) else count
    cuts = np.searchsorted(rank, np.arange(size + 1))
    before = np.concatenate(([0], np.cumsum(count)))
    base = before[:-1] - before[cuts[rank]]
    return tuple(Runs(first[a:b], count[a:b], step[a:b], base[a:b]) for a, b in itertools.pairwise(cuts.tolist()))


@dataclass(frozen=True, eq=False, repr=False)
class Layout:
    """Which positions each rank holds: rank r's shard is `runs[r]`, ascending; together they cover each position once.

    Layouts with the same positions are equal, whatever made them. `offset` is the first position (0 unless shifted).
    """

    name: str
    seqlen: int
    size: int
    runs: tuple[Runs, ...]
    offset: int = 0
    key: bytes = field(init=False)

    def __post_init__(self) -> None:
        head = [self.seqlen, self.size, self.offset, *(len(r.first) for r in self.runs)]
        columns = [column for r in self.runs for column in (r.first, r.n, r.step)]
        object.__setattr__(self, "key", np.concatenate([head, *columns]).tobytes())
        object.__setattr__(self, "_hash", hash(self.key))

    def __reduce__(self) -> tuple:  # a hash is another one in another process
        return Layout, (self.name, self.seqlen, self.size, self.runs, self.offset)

    def __hash__(self) -> int:
        return self._hash  # pyright: ignore[reportAttributeAccessIssue]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.key == other.key

    def __repr__(self) -> str:
        shifted = f", offset={self.offset}" if self.offset else ""
        return f"Layout({self.name}, seqlen={self.seqlen}, size={self.size}{shifted})"

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.offset + self.seqlen

    @functools.cached_property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of each rank."""
        return tuple(runs.length for runs in self.runs)

    def shift(self, n: int) -> "Layout":
        """The same shards n positions later: queries that follow n extra keys (kv_layout holds those)."""
        if isinstance(n, bool) or not isinstance(n, int | np.integer):
            raise TypeError(f"shift must be a number of positions: shift={n!r}")
        n = int(n)
        if not 0 <= self.offset + n <= MAX_SEQLEN:
            raise ValueError(f"shift must keep positions in 0 ... 2**40: shift={n}, first position {self.offset}")
        moved = tuple(runs._replace(first=runs.first + n) for runs in self.runs)
        return Layout(self.name, self.seqlen, self.size, moved, self.offset + n)

    def positions(self, rank: int) -> Tensor:
        """Global positions of a rank's tokens, ascending: int64 (tokens of the rank,), on the CPU."""
        return torch.from_numpy(self.runs[self._rank(rank)].positions())

    def part(self, x: Tensor, rank: int, dim: int = 1) -> Tensor:
        """The tokens of one rank out of the whole sequence: x has `seqlen` entries along dim. Differentiable."""
        if x.shape[dim] != self.seqlen:
            raise ValueError(
                f"x must hold the whole sequence along dim={dim}: {self!r} has {self.seqlen} tokens, "
                f"x.shape={tuple(x.shape)}; pass the global tensor, the same on every rank"
            )
        runs = self.runs[self._rank(rank)]
        if len(runs.first) > 32:  # many short runs: one gather beats as many slices
            return x.index_select(dim, self._index(rank).to(x.device))
        slices = [
            _strided(x, dim, int(first) - self.offset, int(count), int(step))
            for first, count, step in zip(runs.first, runs.n, runs.step, strict=True)
        ]
        return torch.cat(slices, dim) if slices else x.narrow(dim, 0, 0)

    def split(self, x: Tensor, dim: int = 1) -> list[Tensor]:
        """The shards of all ranks, in rank order."""
        return [self.part(x, rank, dim) for rank in range(self.size)]

    def join(self, parts: Sequence[Tensor], dim: int = 1) -> Tensor:
        """The whole sequence from the shards of all ranks, in rank order: the inverse of split."""
        found = tuple(part.shape[dim] for part in parts)
        if found != self.lengths:
            raise ValueError(f"parts must have the layout's lengths along dim={dim}: {self.lengths}, got {found}")
        whole = torch.cat(list(parts), dim)
        return whole.index_select(dim, torch.from_numpy(self.order(range(self.size))).to(whole.device))

    def order(self, ranks: range) -> Array:
        """Index that puts these ranks' tokens, one rank's after the other's, in order of their positions: int64."""
        return np.argsort(np.concatenate([self.runs[rank].positions() for rank in ranks]), kind="stable")

    def merged(self, n: int) -> "Layout":
        """The layout of size / n ranks, of which each holds what n ranks that follow each other hold here.

        Work per run of positions, but per position where runs interleave, as striped ones do. Raises ValueError unless n
        divides the size.
        """
        if n < 1 or self.size % n:
            raise ValueError(f"merged must be given a divisor of the size: n={n}, size={self.size}")
        return self if n == 1 else _merged(self, n)

    def _rank(self, rank: int) -> int:
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise TypeError(f"rank must be an int: rank={rank!r}")
        if not 0 <= rank < self.size:
            raise ValueError(f"rank must be in 0 ... size-1: rank={rank}, size={self.size}")
        return rank

    def _index(self, rank: int) -> Tensor:
        return torch.from_numpy(self.runs[rank].positions() - self.offset)


@functools.lru_cache(maxsize=16)
def _merged(layout: Layout, n: int) -> Layout:
    rank = np.repeat(np.arange(layout.size) // n, [len(runs.first) for runs in layout.runs])
    first, count, step, _ = map(np.concatenate, zip(*layout.runs, strict=True))
    times = np.where(step == 1, 1, count)  # positions of a strided run stand by themselves: others may lie in between
    i = np.arange(times.sum()) - np.repeat(np.cumsum(times) - times, times)
    rank, first = np.repeat(rank, times), np.repeat(first, times) + i * np.repeat(step, times)
    count = np.repeat(np.where(step == 1, count, 1), times)
    by = np.lexsort((first, rank))
    runs = _of_ranks(rank[by], first[by], count[by], np.ones_like(first), size=layout.size // n)
    return Layout(f"{layout.name}, {n} ranks as one", layout.seqlen, layout.size // n, runs, layout.offset)


def _strided(x: Tensor, dim: int, first: int, count: int, step: int) -> Tensor:
    index = [slice(None)] * x.dim()
    index[dim] = slice(first, first + (count - 1) * step + 1, step)
    return x[tuple(index)]


# Generators work on all ranks and documents at once: `rank` is [size, 1, 1], starts and lengths are [documents, 1]; the
# plain layouts are the case of one document. Each returns (first, count, step) of runs, [size, documents, runs].
_Generator = Callable[[Array, Array, int, Array], tuple[Array, Array, int]]


def _contiguous(starts: Array, lengths: Array, size: int, rank: Array) -> tuple[Array, Array, int]:
    begin, end = rank * lengths // size, (rank + 1) * lengths // size
    return starts + begin, end - begin, 1


def _zigzag(starts: Array, lengths: Array, size: int, rank: Array) -> tuple[Array, Array, int]:
    chunk = np.concatenate([rank, 2 * size - 1 - rank], axis=2)
    begin, end = chunk * lengths // (2 * size), (chunk + 1) * lengths // (2 * size)
    return starts + begin, end - begin, 1


def _striped(starts: Array, lengths: Array, size: int, rank: Array) -> tuple[Array, Array, int]:
    return starts + rank, np.maximum(0, (lengths - rank + size - 1) // size), size


_GENERATORS: dict[str, _Generator] = {"contiguous": _contiguous, "zigzag": _zigzag, "striped": _striped}
NAMES = tuple(_GENERATORS)


def _generate(name: str, kind: str, bounds: Array, size: int) -> Layout:
    starts, lengths = bounds[:-1, None], np.diff(bounds)[:, None]
    first, count, step = _GENERATORS[kind](starts, lengths, size, np.arange(size)[:, None, None])
    first, count = first.reshape(size, -1), count.reshape(size, -1)
    return Layout(name, int(bounds[-1]), size, _runs(first, count, np.full_like(count, step)))


def _check_sizes(seqlen: int, size: int) -> None:
    for name, value, least in (("seqlen", seqlen, 0), ("size", size, 1)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TypeError(f"{name} must be an int: {name}={value!r}")
        if not least <= value <= MAX_SEQLEN:
            raise ValueError(f"{name} must be in {least} ... 2**40: {name}={value}")


def named(name: str, seqlen: int, size: int) -> Layout:
    """The layout of that name: "contiguous", "zigzag" or "striped"."""
    if not isinstance(name, str) or name not in _GENERATORS:
        raise ValueError(
            f"layout must be one of {', '.join(map(repr, NAMES))} or an rf.Layout: layout={name!r}; "
            "layouts.per_document and layouts.balanced make others"
        )
    _check_sizes(seqlen, size)
    return _named(name, int(seqlen), int(size))


@functools.lru_cache(maxsize=256)
def _named(name: str, seqlen: int, size: int) -> Layout:
    return _generate(name, name, np.array([0, seqlen], dtype=np.int64), size)


def contiguous(seqlen: int, size: int) -> Layout:
    """Rank r holds one stretch [r * seqlen // size, (r+1) * seqlen // size)."""
    return named("contiguous", seqlen, size)


def zigzag(seqlen: int, size: int) -> Layout:
    """Of 2 * size equal chunks rank r holds the r-th from either end: even work under a causal mask."""
    return named("zigzag", seqlen, size)


def striped(seqlen: int, size: int) -> Layout:
    """Rank r holds positions r, r + size, r + 2 * size, ..."""
    return named("striped", seqlen, size)


def per_document(layout: str, cu_seqlens: Documents | Sequence[int] | Tensor, size: int) -> Layout:
    """Every document is laid out by itself as `layout` says: each rank holds a part of each document.

    cu_seqlens: cumulative document lengths, 0 ... seqlen, as for Mask(documents=...).
    """
    if layout not in _GENERATORS:
        raise ValueError(f"layout must be one of {', '.join(map(repr, NAMES))}: layout={layout!r}")
    bounds = document_bounds(cu_seqlens)
    if bounds and isinstance(bounds[0], tuple):
        raise ValueError("cu_seqlens must be one list of lengths for all batch rows: got one per batch row")
    _check_sizes(int(bounds[-1]), size)  # pyright: ignore[reportArgumentType]
    return _generate(f"per_document({layout})", layout, np.array(bounds, dtype=np.int64), size)


def balanced(mask: Mask, seqlen: int, size: int) -> Layout:
    """Equal tokens and as equal work as chunks allow, whatever the mask: chunks, heaviest first, to the idlest rank.

    Chunks are whole multiples of 128 positions where the sequence is long enough, so that kernels see few ragged edges.
    """
    a_mask(mask)
    _check_sizes(seqlen, size)
    per_rank = max(1, min(32, seqlen // (128 * size)))
    bounds = np.arange(size * per_rank + 1) * seqlen // (size * per_rank)
    if per_rank > 1:
        bounds[1:-1] = np.round(bounds[1:-1] / 128).astype(np.int64) * 128
    total = np.concatenate(([0], np.cumsum(mask.row_work(seqlen))))
    work = total[bounds[1:]] - total[bounds[:-1]]
    chunks = np.stack(_share(work, size, per_rank))
    return Layout("balanced", seqlen, size, _runs(bounds[chunks], np.diff(bounds)[chunks], np.ones_like(chunks)))


def _share(work: Array, size: int, per_rank: int) -> list[Array]:
    """Chunks of each rank: longest processing time first, `per_rank` chunks each."""
    idle = [(0, rank) for rank in range(size)]
    mine: list[list[int]] = [[] for _ in range(size)]
    for chunk in np.argsort(-work, kind="stable"):
        load, rank = heapq.heappop(idle)
        mine[rank].append(int(chunk))
        if len(mine[rank]) < per_rank:
            heapq.heappush(idle, (load + int(work[chunk]), rank))
    return [np.sort(np.array(chunks, dtype=np.int64)) for chunks in mine]

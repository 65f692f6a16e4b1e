"""Which heads each of several ranks attends: even shares of the query heads, and the key heads that they see."""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Share(NamedTuple):
    """The heads of one rank: query heads, the key heads they see, and how often the rank attends each of these.

    A tile wants as many query heads for every key head. Where a range of query heads cuts groups unevenly, key heads stand
    in it more than once: of groups of four a rank with query heads 2 ... 7 attends key heads 0, 1, 1.
    """

    q: range
    k: range
    repeats: tuple[int, ...]

    def repeated(self, x: Tensor) -> Tensor:
        """Keys (batch, seqlen_k, its key heads, width) as the tile wants them."""
        if sum(self.repeats) == len(self.k):
            return x
        heads = x.split(1, 2)
        return torch.cat([head.expand(-1, -1, n, -1) for head, n in zip(heads, self.repeats, strict=True)], 2)

    def summed(self, x: Tensor) -> Tensor:
        """The gradient of `repeated`."""
        if sum(self.repeats) == len(self.k):
            return x
        return torch.cat([head.sum(2, keepdim=True) for head in x.split(self.repeats, 2)], 2)


@functools.lru_cache(maxsize=256)
def shares(nheads_q: int, nheads_k: int, size: int) -> tuple[Share, ...]:
    """Heads over `size` ranks: rank r has query heads r * nheads_q // size ... and every key head that one of them sees.

    No rank has more than one query head above another, whatever the numbers; of more ranks than query heads some have none.
    Groups stay whole where size divides nheads_k, and no rank has parts of two where nheads_k divides size.
    """
    cuts = [rank * nheads_q // size for rank in range(size + 1)]
    group = nheads_q // nheads_k
    return tuple(_share(range(begin, end), group) for begin, end in itertools.pairwise(cuts))


def _share(q: range, group: int) -> Share:
    """Query heads with their key heads."""
    if not q:
        return Share(q, range(0), ())
    begin, end = q.start, q.stop
    k = range(begin // group, -(-end // group))
    each = [min(end, (head + 1) * group) - max(begin, head * group) for head in k]
    width = math.gcd(*each)
    return Share(q, k, tuple(n // width for n in each))


def are_shared(every: Sequence[Share], nheads_k: int) -> bool:
    """Whether some key head is attended by several ranks."""
    return sum(len(share.k) for share in every) > nheads_k

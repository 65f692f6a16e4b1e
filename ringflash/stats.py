"""The state algebra: mergeable float32 softmax statistics, unnormalised, base 2 inside.

A state is (acc, max, sum) over the keys seen so far, with x = log2(e) * scale * (q . k):

    max = max x,   sum = sum of 2**(x - max),   acc = sum of 2**(x - max) * v

1. The empty state (0, -inf, 0) is the identity of `merge`; `merge` is associative and commutative up to rounding and
   makes neither NaN nor +inf from finite or empty inputs.
2. States stay float32 and unnormalised; the division and the rounding to the output's dtype happen once, in `finish`.
3. At the border a row is (out, lse) with lse = ln(sum of exp(scale * q.k)), NATURAL log; a row that saw no key is
   out = 0, lse = -inf.

Equations: online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867), the merge of FlashAttention-2 (arXiv 2307.08691).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ringflash.kernels.reference import LN2, LOG2E, empty_state, finish_state

__all__ = ["LN2", "LOG2E", "State", "empty", "finish", "from_border", "merge"]


class State(NamedTuple):
    """acc float32 (batch, seqlen_q, nheads_q, headdim_v); max (base 2) and sum float32 (batch, nheads_q, seqlen_q)."""

    acc: Tensor
    max: Tensor
    sum: Tensor


def empty(shape: tuple[int, int, int, int], device: torch.device | str = "cpu") -> State:
    """The identity of merge, of shape (batch, seqlen_q, nheads_q, headdim_v)."""
    return State(*empty_state(shape, device))


def merge(a: State, b: State) -> State:
    """The state of the union of two disjoint sets of keys."""
    row_max = torch.maximum(a.max, b.max)
    safe_max = row_max.masked_fill(row_max == -math.inf, 0.0)  # both empty: 2**(-inf - 0) = 0, not NaN
    weights = torch.exp2(a.max - safe_max), torch.exp2(b.max - safe_max)
    acc = sum(state.acc * w.transpose(1, 2)[..., None] for state, w in zip((a, b), weights, strict=True))
    row_sum = sum(state.sum * w for state, w in zip((a, b), weights, strict=True))
    return State(acc, row_max, row_sum)  # pyright: ignore[reportArgumentType]


def finish(state: State, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Border form: out = acc / sum in `dtype`, lse = ln 2 * (max + log2 sum) in float32."""
    return finish_state(state, dtype)


def from_border(out: Tensor, lse: Tensor) -> State:
    """A state from (out, lse): sum 1 at max = lse / ln 2. For partials that other kernels made; out is already rounded."""
    empty_rows = lse == -math.inf
    row_sum = torch.ones_like(lse, dtype=torch.float32).masked_fill(empty_rows, 0.0)
    acc = out.float().masked_fill(empty_rows.transpose(1, 2)[..., None], 0.0)
    return State(acc, lse.float() * LOG2E, row_sum)

"""Attention and its gradients by definition, in float64: what `verify` holds the ring against.

Written from the definition of the operator, without intervals, blocks or states; linear in memory by taking rows in chunks.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ringflash.mask import Mask

ROWS = 512


class Results(NamedTuple):
    """What a forward and backward pass gives: out, lse and the gradients of (out * dout).sum() + (lse * dlse).sum()."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def visible(mask: Mask, rows: Tensor, keys: Tensor, *, documents: Tensor) -> Tensor:
    """bool (rows, keys): whether the query at a position sees the key at a position. documents: cumulative lengths."""
    ahead = keys[None, :] - rows[:, None]
    left, right = mask.window or (None, None)
    right = 0 if mask.causal else right
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if left is not None:
        seen &= ahead >= -left
    if right is not None:
        seen &= ahead <= right
    if mask.prefix is not None:
        seen |= keys[None, :] < mask.prefix
    same = torch.bucketize(rows, documents, right=True)[:, None] == torch.bucketize(keys, documents, right=True)[None, :]
    return seen & same


def attention(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, dout: Tensor, dlse: Tensor) -> Results:
    """All results in float64 for q, k, v in (batch, seqlen, nheads, headdim) of whole sequences, scale headdim ** -0.5."""
    results = Results(*(torch.zeros(x.shape, dtype=torch.float64, device=q.device) for x in (dout, dlse, q, k, v)))
    group, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    bounds = [torch.as_tensor(row, device=q.device) for row in mask.document_rows(k.shape[1])]
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            for first in range(0, q.shape[1], ROWS):
                rows = slice(first, min(first + ROWS, q.shape[1]))
                at = torch.arange(rows.start, rows.stop, device=q.device)
                seen = visible(mask, at, torch.arange(k.shape[1], device=q.device), documents=bounds[b % len(bounds)])
                one = [x[b, rows, h].double() for x in (q, dout)] + [x[b, :, h // group].double() for x in (k, v)]
                _add_rows(results, (b, rows, h, h // group), one, dlse[b, h, rows].double(), seen, scale)
    return results


def _add_rows(
    to: Results, place: tuple[int, slice, int, int], one: list[Tensor], dlse: Tensor, seen: Tensor, scale: float
) -> None:
    """softmax(scale Q K^T) V of some rows of one head, and dS = P * (dO V^T - rowsum(dO * O) + dlse)."""
    b, rows, h, h_k = place
    q, dout, k, v = one
    scores = (scale * q @ k.T).masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(1)
    p = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[:, None])
    out = p @ v
    ds = p * (dout @ v.T - (dout * out).sum(1, keepdim=True) + dlse[:, None])
    to.out[b, rows, h], to.lse[b, h, rows] = out, lse
    to.dq[b, rows, h] = scale * ds @ k
    to.dk[b, :, h_k] += scale * ds.T @ q
    to.dv[b, :, h_k] += p.T @ dout

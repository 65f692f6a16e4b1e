"""Dense float64 attention of the whole sequence on one device, straight from the definitions: what everything is held against.

Shares no code with the library; a mask is anything that has rf.Mask's four fields.
"""

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class MaskLike(Protocol):
    """The fields of rf.Mask, in its words."""

    @property
    def causal(self) -> bool: ...
    @property
    def window(self) -> tuple[int | None, int | None] | None: ...
    @property
    def documents(self) -> tuple | None: ...
    @property
    def prefix(self) -> int | None: ...


def visible(mask: MaskLike, query: Tensor, key: Tensor) -> Tensor:
    """bool (1 or batch, queries, keys): the query at each position sees the key at each position."""
    query, key = query[:, None], key[None, :]
    left, right = mask.window or (None, None)
    sees = torch.ones(query.shape[0], key.shape[1], dtype=torch.bool)
    if mask.causal:  # no key after the query
        sees &= key <= query
    if left is not None:  # at most `left` keys before the query
        sees &= query - key <= left
    if right is not None:  # at most `right` keys after it
        sees &= key - query <= right
    if mask.prefix is not None:  # the first keys are visible to all
        sees |= key < mask.prefix
    if mask.documents is None:
        return sees[None]
    rows = mask.documents if isinstance(mask.documents[0], tuple) else (mask.documents,)
    return torch.stack([sees & (_document(query, row) == _document(key, row)) for row in rows])


def _document(position: Tensor, bounds: tuple[int, ...]) -> Tensor:
    """Number of the document that holds each position."""
    return sum((position >= bound).long() for bound in bounds) + torch.zeros_like(position)


def attention(q: Tensor, k: Tensor, v: Tensor, sees: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse) in float64, differentiable: q (batch, seqlen_q, nheads_q, headdim), sees as `visible` gives it.

    A query that sees no key: out 0, lse -inf, gradients 0.
    """
    q, k, v = q.double(), k.double(), v.double()
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~sees[:, None], -math.inf)
    some = sees.any(-1)[:, None].expand(scores.shape[:3])
    top = scores.amax(-1).masked_fill(~some, 0.0).detach() if scores.shape[3] else torch.zeros(scores.shape[:3]).double()
    weights = torch.exp(scores - top[..., None])
    total = weights.sum(-1).masked_fill(~some, 1.0)
    out = torch.einsum("bhqk,bkhd->bqhd", weights / total[..., None], v)
    return out, (top + total.log()).masked_fill(~some, -math.inf)


class Results(NamedTuple):
    """What attention gives: outputs, and gradients for given gradients of both outputs."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def results(
    qkv: tuple[Tensor, Tensor, Tensor], grads: tuple[Tensor, Tensor], sees: Tensor, scale: float | None = None
) -> Results:
    """Outputs, and the gradients of q, k, v by autograd from those of (out, lse)."""
    leaves = [x.detach().double().requires_grad_() for x in qkv]
    out, lse = attention(*leaves, sees=sees, scale=scale)
    torch.autograd.backward([out, lse], [x.double() for x in grads])
    return Results(out.detach(), lse.detach(), *(x.grad for x in leaves))  # pyright: ignore[reportArgumentType]


def rms(x: Tensor, exact: Tensor) -> float:
    """Root mean square of x - exact; inf unless both are -inf at the same places and x is finite elsewhere."""
    same = exact == -math.inf
    if x.shape != exact.shape or not torch.equal(x == -math.inf, same):
        return math.inf
    error = (x.double() - exact).masked_fill(same, 0.0)
    value = float(error.square().mean().sqrt()) if error.numel() else 0.0
    return value if math.isfinite(value) else math.inf


def norm(exact: Tensor) -> float:
    """Root mean square of the finite part: the scale of an error."""
    return rms(exact, torch.where(exact.isfinite(), torch.zeros_like(exact), exact))

"""The one autograd.Function: attention over a ring or over heads, and its gradient the same way."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from ringflash.heads import Heads
from ringflash.ring import Ring

T = TypeVar("T")


class Attention(torch.autograd.Function):
    """apply(q, k, v, ring) -> (out, lse); the ring is frozen and holds everything that is no tensor."""

    @staticmethod
    def forward(ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, ring: Ring | Heads) -> tuple[Tensor, Tensor]:
        """Attend and keep what backward needs: inputs, out and lse."""
        out, lse = _plainly(q, ring.forward, q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring = ring  # pyright: ignore[reportAttributeAccessIssue]
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout: Tensor | None, dlse: Tensor | None):  # pyright: ignore[reportIncompatibleMethodOverride]
        """Gradients of q, k, v from those of out and lse."""
        if ctx.ring.before_backward is not None:
            ctx.ring.before_backward()
        # Even if neither reached this rank the other ranks need it: the exchange must not depend on one rank's data.
        with ctx.ring.running():
            q, k, v, out, lse = ctx.saved_tensors  # an error where they were freed or written to
            grads = _plainly(q, _gradients, ctx.ring, (q, k, v), (out, lse), (dout, dlse))
        if torch.is_grad_enabled():  # create_graph=True: fine unless these gradients are differentiated in turn
            grads = _Once.apply(*grads, *(x for x in (q, k, v, dout, dlse) if x is not None))
        return *grads, None


class _Once(torch.autograd.Function):
    """Passes gradients on and refuses to be differentiated."""

    @staticmethod
    def forward(ctx: FunctionCtx, dq: Tensor, dk: Tensor, dv: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return dq.view_as(dq), dk.view_as(dk), dv.view_as(dv)

    @staticmethod
    def backward(ctx, *grads):  # pyright: ignore[reportIncompatibleMethodOverride]
        raise NotImplementedError(
            "ring_attention is not differentiable twice: its gradients were themselves differentiated (create_graph=True); "
            "use an attention that is for double backward, on one device"
        )


def _gradients(
    ring: Ring | Heads, qkv: tuple[Tensor, ...], results: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Of q, k, v in their dtypes, from those of (out, lse)."""
    (q, k, v), (out, lse), (dout, dlse) = qkv, results, grads
    rows = torch.zeros_like(out) if dout is None else _last_dim_contiguous(dout)
    dq, (dk, dv) = ring.backward(rows, q, k, v, lse, ring.tile.delta(rows, out, dlse))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _plainly(like: Tensor, run: Callable[..., T], *args: object) -> T:
    """run(*args) without casts and without a graph; entering a context costs as much as a launch: only where it is needed."""
    kind = like.device.type
    if torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):
            return _plainly(like, run, *args)
    if torch.is_grad_enabled():
        with torch.no_grad():
            return run(*args)
    return run(*args)


def _last_dim_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.numel() == 0 else x.contiguous()


def attend(q: Tensor, k: Tensor, v: Tensor, *, ring: Ring | Heads) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's queries; differentiable in q, k, v and through both outputs."""
    with ring.running():  # around what torch itself raises as well: it has no rule for transforms
        if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
            q, k, v = map(_last_dim_contiguous, (q, k, v))
        out, lse = Attention.apply(q, k, v, ring)  # pyright: ignore[reportGeneralTypeIssues]
    return out, lse

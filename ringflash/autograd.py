"""The one autograd.Function: attention over a ring or over heads, and its gradient the same way."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from ringflash.heads import Heads
from ringflash.ring import Ring


class Attention(torch.autograd.Function):
    """apply(q, k, v, ring) -> (out, lse); the ring is frozen and holds everything that is no tensor."""

    @staticmethod
    def forward(ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, ring: Ring | Heads) -> tuple[Tensor, Tensor]:
        """Attend and keep what backward needs: inputs, out and lse."""
        with ring.running(), _as_they_are(q):
            out, lse = ring.forward(q, k, v)
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
        q, k, v, out, lse = ctx.saved_tensors
        with ctx.ring.running(), torch.no_grad(), _as_they_are(q):
            rows = torch.zeros_like(out) if dout is None else _last_dim_contiguous(dout)
            delta = ctx.ring.tile.delta(rows, out, dlse)
            dq, (dk, dv) = ctx.ring.backward(rows, q, k, v, lse, delta)
            grads = dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
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


def _as_they_are(x: Tensor) -> AbstractContextManager[object]:
    """Inside, no tensor is cast; entering autocast costs as much as a launch, so only where it is on."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _last_dim_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.numel() == 0 else x.contiguous()


def attend(q: Tensor, k: Tensor, v: Tensor, *, ring: Ring | Heads) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's queries; differentiable in q, k, v and through both outputs."""
    out, lse = Attention.apply(*(_last_dim_contiguous(x) for x in (q, k, v)), ring)  # pyright: ignore[reportGeneralTypeIssues]
    return out, lse

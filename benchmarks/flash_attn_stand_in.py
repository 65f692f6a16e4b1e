"""The functions of flash_attn.flash_attn_interface that ring-flash-attn calls, over kernels that are at hand."""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor


class Lengths(NamedTuple):
    """Packed sequences: where each begins and ends, int32 (sequences + 1,), and the longest, of queries and of keys."""

    q: Tensor | None
    k: Tensor | None
    longest_q: int
    longest_k: int


class Kernels(NamedTuple):
    """Attention of q (batch, seqlen_q, nheads_q, headdim), k, v; with Lengths.q without a batch dimension.

    forward(q, k, v, lengths, scale, causal) -> out, lse. backward(dout, q, k, v, out, lse, lengths, scale, causal, into):
    writes dq, dk, dv into `into`.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., None]


def fa2() -> Kernels:
    """torch's own FlashAttention-2. Its backward cannot write in place, so gradients are copied once (< 1% of the time)."""

    def forward(q, k, v, lengths, scale, causal):
        out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *lengths, 0.0, causal, False, scale=scale)
        return out, lse

    def backward(dout, q, k, v, out, lse, lengths, scale, causal, into):
        unused = torch.empty(2, dtype=torch.uint64, device=q.device), torch.empty((), dtype=torch.uint64, device=q.device)
        found = torch.ops.aten._flash_attention_backward(
            dout.contiguous(), q, k, v, out, lse.contiguous(), *lengths, 0.0, causal, *unused, scale=scale
        )
        for x, grad in zip(into, found, strict=True):
            x.copy_(grad)

    return Kernels(forward, backward)


def fa4() -> Kernels:
    """FlashAttention-4, where flash-attn-4 is installed. Raises ImportError."""
    fa4 = importlib.import_module("flash_attn.cute.interface")

    def options(lengths, scale, causal):
        more = dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), lengths, strict=True))
        return {"softmax_scale": scale, "causal": causal} | (more if lengths.q is not None else {})

    def forward(q, k, v, lengths, scale, causal):
        return fa4._flash_attn_fwd(q, k, v, return_lse=True, **options(lengths, scale, causal))[:2]

    def backward(dout, q, k, v, out, lse, lengths, scale, causal, into):
        grads = dict(zip(("dq", "dk", "dv"), into, strict=True))
        fa4._flash_attn_bwd(q, k, v, out, dout.contiguous(), lse.contiguous(), **options(lengths, scale, causal), **grads)

    return Kernels(forward, backward)


def interface(kernels: Kernels) -> ModuleType:
    """A module flash_attn.flash_attn_interface. ring-flash-attn passes arguments by name, those that it finds here."""
    module = ModuleType("flash_attn.flash_attn_interface")

    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
        alibi_slopes, return_softmax,
    ):  # fmt: skip
        lengths = Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return *kernels.forward(q, k, v, lengths, softmax_scale, causal), None, None

    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size, alibi_slopes, deterministic,
    ):  # fmt: skip
        lengths = Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        kernels.backward(dout, q, k, v, out, softmax_lse, lengths, softmax_scale, causal, (dq, dk, dv))

    def _flash_attn_forward(q, k, v, dropout_p, softmax_scale, causal, window_size, alibi_slopes, return_softmax):
        lengths = Lengths(None, None, q.shape[1], k.shape[1])
        return *kernels.forward(q, k, v, lengths, softmax_scale, causal), None, None

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic
    ):
        lengths = Lengths(None, None, q.shape[1], k.shape[1])
        kernels.backward(dout, q, k, v, out, softmax_lse, lengths, softmax_scale, causal, (dq, dk, dv))

    for function in (_flash_attn_varlen_forward, _flash_attn_varlen_backward, _flash_attn_forward, _flash_attn_backward):
        setattr(module, function.__name__, function)
    return module


def ring_flash_attn(kernels: Kernels) -> ModuleType:
    """ring-flash-attn on these kernels, a module of its own. Raises ImportError where it is not installed."""
    adapters = ModuleType("ring_flash_attn.adapters")  # which import transformers
    for name in ("substitute_hf_flash_attn", "update_ring_flash_attn_params"):
        setattr(adapters, name, None)
    given = {module.__name__: module for module in (interface(kernels), adapters)}
    before = {name: sys.modules[name] for name in given if name in sys.modules}
    sys.modules.update(given)
    try:
        return importlib.import_module("ring_flash_attn")
    finally:
        for name in [*given, *(name for name in sys.modules if name.split(".")[0] == "ring_flash_attn")]:
            sys.modules.pop(name, None)
        sys.modules.update(before)

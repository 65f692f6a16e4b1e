"""Other libraries' attention over the same cases, each where it is installed: what ours is compared with in the same run."""

import importlib
from collections.abc import Callable
from typing import NamedTuple

import cases
import torch
from cases import PACKED, Case
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel


class Peer(NamedTuple):
    """A peer set up for one case: its forward, what it is differentiated by, and its output as (1, seqlen, nheads, headdim)."""

    attend: Callable[[], Tensor]
    inputs: tuple[Tensor, ...]
    dout: Tensor
    as_ours: Callable[[Tensor], Tensor]
    backward: bool = True


class Unavailable(Exception):
    """Why a peer does not run a case."""


def set_up(name: str, case: Case, tensors: tuple[Tensor, ...]) -> Peer:
    """Peer `name` for a case; tensors: q, k, v, dout as cases.inputs makes them. Raises Unavailable."""
    q, k, v, dout = tensors
    try:
        return MAKERS[name](case, (q, k, v), dout)
    except ImportError as error:
        raise Unavailable(f"{name} is not installed: {error}") from error


def _leaves(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.detach().requires_grad_() for x in tensors)


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous()


def _sdpa(backend: SDPBackend) -> Callable[[Case, tuple[Tensor, ...], Tensor], Peer]:
    def make(case: Case, qkv: tuple[Tensor, ...], dout: Tensor) -> Peer:
        if case.kind not in ("causal", "full"):
            raise Unavailable(f"torch's attention knows no {case.kind} mask")
        q, k, v = leaves = _leaves(tuple(map(_heads_first, qkv)))
        causal = case.kind == "causal"

        def attend() -> Tensor:
            with sdpa_kernel(backend):
                return functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

        return Peer(attend, leaves, _heads_first(dout), lambda out: out.transpose(1, 2))

    return make


def _flex(case: Case, qkv: tuple[Tensor, ...], dout: Tensor) -> Peer:
    if case.seqlen not in FLEX_SIZES:
        raise Unavailable(f"FlexAttention, which compiles for every case, is timed at {FLEX_SIZES} only")
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()  # or it stops compiling after a few cases
    compiled = torch.compile(flex_attention, dynamic=False)
    mask = None if case.kind == "full" else block_mask(case)
    q, k, v = leaves = _leaves(tuple(map(_heads_first, qkv)))

    def attend() -> Tensor:
        out = compiled(q, k, v, block_mask=mask, enable_gqa=True)
        assert isinstance(out, Tensor)
        return out

    return Peer(attend, leaves, _heads_first(dout), lambda out: out.transpose(1, 2))


def block_mask(case: Case, device: str = "cuda"):
    """FlexAttention's mask of a case, from its blocks (create_block_mask would look at every pair)."""
    from torch.nn.attention.flex_attention import BlockMask

    begin, end = (x[0] for x in case.intervals(device))

    def visible(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        if case.kind == "causal":
            return key <= row
        if case.kind == "window":
            return (key <= row) & (key >= row - case.window)
        return (key >= begin[row]) & (key < end[row])

    seen, whole = case.blocks(device)
    parts = []
    for blocks in (seen & ~whole, whole):
        counts = blocks.sum(1, dtype=torch.int32)
        parts += [counts[None, None], blocks.int().argsort(dim=1, descending=True, stable=True).int()[None, None]]
    n = case.seqlen
    return BlockMask.from_kv_blocks(*parts, BLOCK_SIZE=cases.BLOCK, mask_mod=visible, seq_lengths=(n, n))


def _window(case: Case, everything: int | None) -> tuple[int | None, int | None]:
    return (case.window, 0) if case.kind == "window" else (everything, everything)


def _documents(case: Case) -> tuple[Tensor, int]:
    """Where documents begin, and end, and the longest."""
    lengths = torch.tensor([0, *PACKED[case.seqlen]], device="cuda")
    return lengths.cumsum(0).int(), max(PACKED[case.seqlen])


def _fa3(case: Case, qkv: tuple[Tensor, ...], dout: Tensor) -> Peer:
    fa3 = importlib.import_module("fa3_fwd_interface")
    q, k, v = qkv
    causal, window = case.kind != "full", _window(case, -1)
    if case.kind == "packed":
        at, longest = _documents(case)
        attend = lambda: fa3.flash_attn_varlen_func(q[0], k[0], v[0], at, at, longest, longest, causal=causal)  # noqa: E731
        return Peer(attend, qkv, dout[0], lambda out: out[None], backward=False)
    attend = lambda: fa3.flash_attn_func(q, k, v, causal=causal, window_size=window)  # noqa: E731
    return Peer(attend, qkv, dout, lambda out: out, backward=False)


def _fa4(case: Case, qkv: tuple[Tensor, ...], dout: Tensor) -> Peer:
    fa4 = importlib.import_module("flash_attn.cute")
    causal, window = case.kind != "full", _window(case, None)
    if case.kind == "packed":
        at, longest = _documents(case)
        q, k, v = leaves = _leaves(tuple(x[0] for x in qkv))
        more = {"cu_seqlens_q": at, "cu_seqlens_k": at, "max_seqlen_q": longest, "max_seqlen_k": longest}
        attend = lambda: _first(fa4.flash_attn_varlen_func(q, k, v, causal=causal, **more))  # noqa: E731
        return Peer(attend, leaves, dout[0], lambda out: out[None])
    q, k, v = leaves = _leaves(qkv)
    attend = lambda: _first(fa4.flash_attn_func(q, k, v, causal=causal, window_size=window))  # noqa: E731
    return Peer(attend, leaves, dout, lambda out: out)


def _first(out: Tensor | tuple[Tensor, ...]) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


FLEX_SIZES = (8192, 16384, 32768)
MAKERS: dict[str, Callable[[Case, tuple[Tensor, ...], Tensor], Peer]] = {
    "cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
    "fa3": _fa3,
    "fa4": _fa4,
    "sdpa-flash": _sdpa(SDPBackend.FLASH_ATTENTION),
    "flex": _flex,
}

"""Other libraries' attention over several GPUs on the same problem, each where it is installed."""

import functools
import importlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import flash_attn_stand_in
import torch
import torch.distributed as dist
from cases import NHEADS_K, NHEADS_Q
from flash_attn_stand_in import Kernels
from peers import Unavailable
from rings import Contestant, Entry, Problem, entry
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def _ring_flash_attn(problem: Problem, kernels: Callable[[], Kernels]) -> Iterator[Entry]:
    """Zigzag. Packed: zigzag in each document, which is padded to a multiple of 2 * size; host synchronisations are its own."""
    library = flash_attn_stand_in.ring_flash_attn(kernels())
    if len(problem.lengths) == 1:
        positions = problem.layout("zigzag").positions(problem.rank)
        yield entry(problem, positions, functools.partial(library.zigzag_ring_flash_attn_func, causal=True))
        return
    positions, lengths = padded_zigzag(problem.lengths, problem.rank, problem.size)
    at = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=problem.device)
    run = functools.partial(library.zigzag_ring_flash_attn_varlen_func, cu_seqlens=at, max_seqlen=max(lengths), causal=True)
    yield entry(problem, positions, lambda q, k, v: run(q[0], k[0], v[0])[None])


def padded_zigzag(lengths: tuple[int, ...], rank: int, size: int) -> tuple[Tensor, list[int]]:
    """(positions, local document lengths) of a rank where each document is padded at its end to a multiple of 2 * size and
    laid out as zigzag by itself; positions int64 (tokens,), -1 for padding.
    """
    parts, local = [], []
    for begin, length in zip(itertools.accumulate(lengths, initial=0), lengths, strict=False):
        chunk = -(-length // (2 * size))
        index = torch.cat([torch.arange(c * chunk, (c + 1) * chunk) for c in (rank, 2 * size - 1 - rank)])
        parts.append(torch.where(index < length, begin + index, -1))
        local.append(2 * chunk)
    return torch.cat(parts), local


@contextmanager
def _context_parallel(problem: Problem, *, grouped: bool) -> Iterator[Entry]:
    """torch's context_parallel, all-gather, on cuDNN. grouped: key heads as they are, not repeated for each query head."""
    experimental = importlib.import_module("torch.distributed.tensor.experimental")
    if len(problem.lengths) > 1:
        raise Unavailable("torch's context_parallel knows no packed documents")
    mesh = init_device_mesh(problem.device.type, (problem.size,))
    group = 1 if grouped else NHEADS_Q // NHEADS_K

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not grouped:
            k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    whole = torch.empty(1, 1, problem.seqlen, 1, device=problem.device)  # it wants something to cut
    cut = experimental.context_parallel(mesh, buffers=[whole], buffer_seq_dims=[2], no_restore_buffers={whole})
    original = functional.scaled_dot_product_attention
    try:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), cut:
            yield entry(problem, problem.layout("zigzag").positions(problem.rank), attend, heads_first=True)
    finally:  # which it leaves replaced where the body raised
        functional.scaled_dot_product_attention = original


class _AllToAll(torch.autograd.Function):
    """Part i of x, (size, ...), goes to rank i; its own inverse, so its gradient is the same exchange."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, x.contiguous())
        return received

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        received = torch.empty_like(grad, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, grad.contiguous())
        return received


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@contextmanager
def ulysses(problem: Problem, attend: Callable[[Problem], AbstractContextManager[Attend]]) -> Iterator[Entry]:
    """Two exchanges, q, k and v in one: whole sequences of a part of the heads in between."""
    size = problem.size
    if NHEADS_K % size:
        raise Unavailable(f"Ulysses gives each rank whole key heads: {NHEADS_K} heads, {size} ranks")
    with attend(problem) as attend_whole:

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            tokens = q.shape[1]
            parts = [x.reshape(tokens, size, -1, x.shape[3]).transpose(0, 1) for x in (q, k, v)]
            mine = _AllToAll.apply(torch.cat(parts, 2)).flatten(0, 1)[None]  # pyright: ignore[reportOptionalMemberAccess]
            out = attend_whole(*mine.split([x.shape[2] for x in parts], 2))
            back = _AllToAll.apply(out.reshape(size, tokens, -1, out.shape[3]))
            return back.transpose(0, 1).reshape(1, tokens, -1, out.shape[3])  # pyright: ignore[reportOptionalMemberAccess]

        yield entry(problem, problem.layout("contiguous").positions(problem.rank), run)


@contextmanager
def _cudnn(problem: Problem) -> Iterator[Attend]:
    if len(problem.lengths) > 1:
        raise Unavailable("torch's attention knows no packed documents")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        yield attend


@contextmanager
def _fa4(problem: Problem) -> Iterator[Attend]:
    fa4 = importlib.import_module("flash_attn.cute")
    if len(problem.lengths) == 1:
        yield lambda q, k, v: _first(fa4.flash_attn_func(q, k, v, causal=True))
        return
    at = torch.tensor([0, *itertools.accumulate(problem.lengths)], dtype=torch.int32, device=problem.device)
    longest = max(problem.lengths)
    more = {"cu_seqlens_q": at, "cu_seqlens_k": at, "max_seqlen_q": longest, "max_seqlen_k": longest}
    yield lambda q, k, v: _first(fa4.flash_attn_varlen_func(q[0], k[0], v[0], causal=True, **more))[None]


def _first(out: Tensor | tuple[Tensor, ...]) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


MAKERS: dict[str, Contestant] = {
    "ring-flash-attn": functools.partial(_ring_flash_attn, kernels=flash_attn_stand_in.fa2),
    "ring-flash-attn-fa4": functools.partial(_ring_flash_attn, kernels=flash_attn_stand_in.fa4),
    "torch-cp": functools.partial(_context_parallel, grouped=True),
    "torch-cp-repeated": functools.partial(_context_parallel, grouped=False),
    "ulysses-cudnn": functools.partial(ulysses, attend=_cudnn),
    "ulysses-fa4": functools.partial(ulysses, attend=_fa4),
}

"""The specification of the tile contract in plain torch: blocked exact attention, linear memory; what CPU runs use.

Equations: FlashAttention-2 (Dao 2023, arXiv 2307.08691), algorithm 1 (forward) and 2 (backward), with the
causal mask replaced by one half-open interval of visible keys per row. A segment that some row sees is waited for
(`ready`), by looking at the flag every tenth of a millisecond, before its k and v are read; one that no row sees is not.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

LOG2E = math.log2(math.e)
LN2 = math.log(2)

# Rows and keys of one block: wide enough that CPU matrix products dominate, small enough to stay linear in memory.
BLOCK_Q = 256
BLOCK_K = 512
# Torch shares no elementwise work of so few elements out between threads.
_ONE_THREAD = 32768


class Segment(NamedTuple):
    """Keys one tile walks: a block's k and v, and the interval of its keys that each query row sees.

    k (batch, seqlen_k, nheads_k, headdim); v (batch, seqlen_k, nheads_k, headdim_v);
    begin, end int32 (1 or batch, seqlen_q), 0 <= begin <= end <= seqlen_k, non-decreasing along the row;
    ready int32 (1,) or None: where given, how many of the key heads, from the first, have arrived: the tile waits until a head
    is among them before it reads its k or v (any number from nheads_k on: all have);
    late int32 (1,) or None, device or pinned memory: a Hopper kernel that has waited for 20 s sets it to 1 and goes on, with a
    result that means nothing. Without it, and in the other tiles, the wait has no end.
    """

    k: Tensor
    v: Tensor
    begin: Tensor
    end: Tensor
    ready: Tensor | None = None
    late: Tensor | None = None


State = tuple[Tensor, Tensor, Tensor]


def empty_state(shape: Sequence[int], device: torch.device | str) -> State:
    """The identity of merging, float32: acc 0 of shape (batch, seqlen_q, nheads_q, headdim_v), max -inf, sum 0."""
    batch, seqlen_q, nheads_q, _ = shape
    row_max = torch.full((batch, nheads_q, seqlen_q), -math.inf, dtype=torch.float32, device=device)
    return torch.zeros(*shape, dtype=torch.float32, device=device), row_max, torch.zeros_like(row_max)


class _Block(NamedTuple):
    """One (query rows) x (keys) block of one batch row that holds a visible pair."""

    b: int
    rows: slice
    keys: slice
    visible: Tensor  # [BLOCK_Q, BLOCK_K] bool, or empty where every pair is visible
    seen: Tensor  # [BLOCK_K] bool: some row of the block sees the key

    def mask(self, x: Tensor, fill: float) -> Tensor:
        """x [..., BLOCK_Q, BLOCK_K] with `fill` where the row does not see the key."""
        return x if self.visible.numel() == 0 else x.masked_fill(~self.visible, fill)

    def keep_seen(self, x: Tensor) -> Tensor:
        """x [nheads_k, BLOCK_K, d] with zeros at keys that no row sees: 0 * NaN is NaN, so masking scores is not enough."""
        return x if self.visible.numel() == 0 else x.masked_fill(~self.seen[:, None], 0.0)


def _wait(segment: Segment) -> None:
    """Until another thread, process or stream has counted all heads in."""
    while segment.ready is not None and int(segment.ready) < segment.k.shape[2]:
        time.sleep(1e-4)


def _blocks(segment: Segment, batch: int, *, fixed: bool = False) -> Iterator[_Block]:
    """Walk the blocks that hold a visible pair, batch row by batch row, keys innermost, once the segment is ready.

    fixed: key blocks begin at multiples of BLOCK_K, and all are masked; seqlen_k is a multiple of BLOCK_K.
    """
    waited = segment.ready is None
    begin, end = segment.begin.expand(batch, -1), segment.end.expand(batch, -1)
    for b in range(batch):
        for row in range(0, begin.shape[1], BLOCK_Q):
            rows = slice(row, min(row + BLOCK_Q, begin.shape[1]))
            begin_blk, end_blk = begin[b, rows, None], end[b, rows, None]  # [BLOCK_Q, 1]
            filled = begin_blk < end_blk
            if not bool(filled.any()):
                continue
            if not waited:
                _wait(segment)
                waited = True
            first, last = int(begin_blk[filled].min()), int(end_blk[filled].max())
            if fixed:
                first, last = first // BLOCK_K * BLOCK_K, -(-last // BLOCK_K) * BLOCK_K
            for key in range(first, last, BLOCK_K):
                keys = slice(key, min(key + BLOCK_K, last))
                index = torch.arange(keys.start, keys.stop, device=begin.device)
                visible = (index >= begin_blk) & (index < end_blk)
                if not fixed and bool(visible.all()):
                    yield _Block(b, rows, keys, visible.new_empty(0), visible.new_empty(0))
                elif bool(visible.any()):
                    yield _Block(b, rows, keys, visible, visible.any(0))


def _heads_first(x: Tensor, nheads_k: int) -> Tensor:
    """[BLOCK, nheads, d] -> float32 [nheads_k, group, BLOCK, d]: query heads that share a key head stand together."""
    return x.float().unflatten(1, (nheads_k, -1)).permute(1, 2, 0, 3)


def _scores(q_blk: Tensor, k_blk: Tensor, scale: float) -> Tensor:
    """Base-2 scores log2(e) * scale * q.k of a block: [nheads_k, group, BLOCK_Q, BLOCK_K]."""
    nheads_k, group, rows, headdim = q_blk.shape
    flat = (q_blk * (scale * LOG2E)).reshape(nheads_k, group * rows, headdim)
    return (flat @ k_blk.transpose(1, 2)).view(nheads_k, group, rows, -1)


def _times_keys(p: Tensor, x: Tensor) -> Tensor:
    """[nheads_k, group, BLOCK_Q, BLOCK_K] times [nheads_k, BLOCK_K, d] -> [nheads_k, group, BLOCK_Q, d]."""
    nheads_k, group, rows, keys = p.shape
    return (p.reshape(nheads_k, group * rows, keys) @ x).view(nheads_k, group, rows, -1)


def _times_rows(p: Tensor, x: Tensor) -> Tensor:
    """P^T X summed over the group's heads and rows: -> [nheads_k, BLOCK_K, d]."""
    return p.flatten(1, 2).transpose(1, 2) @ x.flatten(1, 2)


def forward(
    q: Tensor,
    segments: Sequence[Segment],
    scale: float,
    state: State | None = None,
    finish: bool = True,
    *,
    fixed: bool = False,
) -> tuple[Tensor, ...]:
    """Attend the segments, starting from `state`: -> State, or (out, lse) with `finish` (README.md has the contract)."""
    if fixed:
        assert state is None
        assert finish
        return _forward_fixed(q, segments, scale)
    headdim_v = segments[0].v.shape[-1] if segments else (state[0] if state else q).shape[-1]
    acc, row_max, row_sum = state if state is not None else empty_state((*q.shape[:3], headdim_v), q.device)
    for segment in segments:
        for blk in _blocks(segment, q.shape[0]):
            _forward_block(q, segment, scale, (acc, row_max, row_sum), blk)
    if not finish:
        return acc, row_max, row_sum
    return finish_state((acc, row_max, row_sum), q.dtype)


def _forward_fixed(q: Tensor, segments: Sequence[Segment], scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse) by blocks of one shape, however many rows and keys there are: the bits of a CPU's matrix product change with
    its shape.
    """
    rows, headdim_v = q.shape[1], segments[0].v.shape[-1]
    whole = _whole_blocks(q, BLOCK_Q)
    state = empty_state((*whole.shape[:3], headdim_v), q.device)
    for segment in segments:
        _wait(segment)
        begin, end = (_whole_blocks(x, BLOCK_Q) for x in (segment.begin, segment.end))
        padded = Segment(_whole_blocks(segment.k, BLOCK_K), _whole_blocks(segment.v, BLOCK_K), begin, end)
        for blk in _blocks(padded, q.shape[0], fixed=True):
            _forward_block(whole, padded, scale, state, blk, exp2=_exp2_fixed)
    out, lse = finish_state(state, q.dtype)
    return out[:, :rows].contiguous(), lse[..., :rows].contiguous()


def _exp2_fixed(x: Tensor) -> Tensor:
    """2**x, where a number's bits do not depend on its place: torch takes another function for what is left of a thread's share
    behind the last whole vector, and x, of whole blocks, has such a rest only where shares end inside.
    """
    return torch.cat([part.exp2() for part in x.contiguous().view(-1).split(_ONE_THREAD)]).view(x.shape)


def _whole_blocks(x: Tensor, block: int) -> Tensor:
    """x (batch, seqlen, ...), contiguous, with zeros behind it up to a multiple of the block."""
    batch, seqlen = x.shape[:2]
    padded = x.new_zeros(batch, -(-seqlen // block) * block, *x.shape[2:])
    padded[:, :seqlen] = x
    return padded


def _forward_block(
    q: Tensor,
    segment: Segment,
    scale: float,
    state: State,
    blk: _Block,
    *,
    exp2: Callable[[Tensor], Tensor] = torch.exp2,
) -> None:
    nheads_k = segment.k.shape[2]
    acc, row_max, row_sum = state
    acc_blk = acc[blk.b, blk.rows].unflatten(1, (nheads_k, -1)).permute(1, 2, 0, 3)  # views into the state:
    max_blk = row_max[blk.b, :, blk.rows].unflatten(0, (nheads_k, -1))  # updated in place
    sum_blk = row_sum[blk.b, :, blk.rows].unflatten(0, (nheads_k, -1))

    k_blk = segment.k[blk.b, blk.keys].float().transpose(0, 1)  # [nheads_k, BLOCK_K, headdim]
    v_blk = blk.keep_seen(segment.v[blk.b, blk.keys].float().transpose(0, 1))
    x = blk.mask(_scores(_heads_first(q[blk.b, blk.rows], nheads_k), k_blk, scale), -math.inf)
    new_max = torch.maximum(max_blk, x.amax(-1))
    safe_max = new_max.masked_fill(new_max == -math.inf, 0.0)  # rows that have seen nothing: exp2(-inf - 0) = 0, not NaN
    p = exp2(x - safe_max[..., None])
    alpha = exp2(max_blk - safe_max)
    acc_blk.mul_(alpha[..., None]).add_(_times_keys(p, v_blk))
    sum_blk.mul_(alpha).add_(p.sum(-1))
    max_blk.copy_(new_max)


def finish_state(state: State, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """State -> border form: out = acc / sum in `dtype`, lse = ln 2 * (max + log2 sum); empty rows 0 and -inf."""
    acc, row_max, row_sum = state
    divisor = row_sum.masked_fill(row_sum == 0, 1.0).transpose(1, 2)[..., None]
    return (acc / divisor).to(dtype), (row_max + torch.log2(row_sum)) * LN2


def delta(dout: Tensor, out: Tensor, dlse: Tensor | None = None) -> Tensor:
    """rowsum(dout * out) - dlse, float32 (batch, nheads_q, seqlen_q): what backward subtracts from dP."""
    rows = (dout.float() * out.float()).sum(-1).transpose(1, 2)
    return (rows if dlse is None else rows - dlse).contiguous()


def clear(dkv: Sequence[tuple[Tensor, Tensor]] | None) -> None:
    """Zero the gradients of all segments."""
    for dk, dv in dkv or ():
        dk.zero_()
        dv.zero_()


def backward(
    dout: Tensor,
    q: Tensor,
    segments: Sequence[Segment],
    lse: Tensor,
    delta: Tensor,
    scale: float,
    dq: Tensor | None,
    dkv: Sequence[tuple[Tensor, Tensor]] | None,
    *,
    add: bool = True,
    add_dq: bool = True,
) -> None:
    """Add the segments' contributions into float32 dq, and into float32 (dk, dv) per segment; None: not wanted now.

    add=False: dk and dv are overwritten, and may be of any dtype. add_dq=False: dq is overwritten.
    """
    if not add:
        clear(dkv)
    if dq is not None and not add_dq:
        dq.zero_()
    for i, segment in enumerate(segments):
        into = None if dkv is None else (dkv[i][0].float(), dkv[i][1].float())
        for blk in _blocks(segment, q.shape[0]):
            _backward_block(dout, q, segment, (lse, delta), scale, (dq, into), blk)
        if dkv is not None and into is not None:
            for x, total in zip(dkv[i], into, strict=True):
                if total is not x:  # rounded once
                    x.copy_(total)


def _backward_block(
    dout: Tensor,
    q: Tensor,
    segment: Segment,
    row_stats: tuple[Tensor, Tensor],
    scale: float,
    grads: tuple[Tensor | None, tuple[Tensor, Tensor] | None],
    blk: _Block,
) -> None:
    nheads_k = segment.k.shape[2]
    dq, dkv = grads
    lse_blk, delta_blk = (x[blk.b, :, blk.rows].unflatten(0, (nheads_k, -1))[..., None] for x in row_stats)
    q_blk = _heads_first(q[blk.b, blk.rows], nheads_k)  # [nheads_k, group, BLOCK_Q, headdim]
    dout_blk = _heads_first(dout[blk.b, blk.rows], nheads_k)
    k_blk = blk.keep_seen(segment.k[blk.b, blk.keys].float().transpose(0, 1))  # [nheads_k, BLOCK_K, headdim]
    v_blk = blk.keep_seen(segment.v[blk.b, blk.keys].float().transpose(0, 1))

    # An empty row has lse = -inf; its scores are masked, and 0 keeps the difference finite where they are not used.
    lse_blk = lse_blk.masked_fill(lse_blk == -math.inf, 0.0)
    p = torch.exp2(blk.mask(_scores(q_blk, k_blk, scale), -math.inf) - lse_blk * LOG2E)
    dp = _times_keys(dout_blk, v_blk.transpose(1, 2))
    ds = blk.mask(p * (dp - delta_blk), 0.0) * scale
    if dq is not None:
        dq[blk.b, blk.rows] += _times_keys(ds, k_blk).permute(2, 0, 1, 3).flatten(1, 2)
    if dkv is not None:
        dk, dv = dkv
        dk[blk.b, blk.keys] += _times_rows(ds, q_blk).transpose(0, 1)
        dv[blk.b, blk.keys] += _times_rows(p, dout_blk).transpose(0, 1)

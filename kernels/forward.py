"""The portable forward tile: one launch walks all segments, from a carried state or none, to the next state or the result."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringflash.kernels import blocks, config, portable
from ringflash.kernels.reference import LN2, LOG2E, Segment, State

_LN2 = tl.constexpr(LN2)


@triton.jit
def _step(q_blk, k, k_at, v, v_at, n0, row_keys, acc, row_max, row_sum, scale,
          MASK: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, HEADDIM: tl.constexpr, HEADDIM_PAD: tl.constexpr,
          HEADDIM_V: tl.constexpr, HEADDIM_V_PAD: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """One key block: acc and sum are sums of exp2(x - max), rescaled when the running maximum moves."""
    keys = n0 + tl.arange(0, BLOCK_K)
    begin, end, hi = row_keys[0], row_keys[1], row_keys[2]
    k_blk = blocks.load_block(k, k_at, n0, keys < hi, BLOCK_K, HEADDIM, HEADDIM_PAD, TMA,
                              MASK and not TMA)  # [BLOCK_K, HEADDIM]  # fmt: skip
    scores = blocks.dot(q_blk, tl.trans(k_blk), None, PRECISION)  # [BLOCK_Q, BLOCK_K]
    seen = keys < hi
    if MASK:
        if row_keys[3]:  # gaps
            seen = seen & blocks.seen_keys(keys, row_keys[4], row_keys[5], row_keys[6], row_keys[7], BLOCK_Q)
        visible = (keys[None, :] >= begin[:, None]) & (keys[None, :] < end[:, None])
        x = tl.where(visible, scores * scale, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(x, 1))
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)  # a row that has seen nothing: exp2(-inf - 0) = 0
        p = tl.math.exp2(x - safe_max[:, None])
        alpha = tl.math.exp2(row_max - safe_max)
    else:
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
        p = tl.math.exp2(scores * scale - new_max[:, None])
        alpha = tl.math.exp2(row_max - new_max)
    row_sum = row_sum * alpha + tl.sum(p, 1)
    # A key that no row sees may hold anything, and 0 * NaN is NaN: it is zero in v_blk.
    v_blk = blocks.load_block(v, v_at, n0, seen, BLOCK_K, HEADDIM_V, HEADDIM_V_PAD, TMA, MASK)  # [BLOCK_K, HEADDIM_V]
    acc = blocks.dot(p.to(v_blk.dtype), v_blk, acc * alpha[:, None], PRECISION)
    return acc, new_max, row_sum


@triton.jit
def _load_state(acc_ptr, max_ptr, sum_ptr, acc_at, acc_mask, row_at, valid):
    acc = tl.load(acc_ptr + acc_at, mask=acc_mask, other=0.0)  # [BLOCK_Q, HEADDIM_V]
    row_max = tl.load(max_ptr + row_at, mask=valid, other=float("-inf"))  # [BLOCK_Q]
    row_sum = tl.load(sum_ptr + row_at, mask=valid, other=0.0)  # [BLOCK_Q]
    return acc, row_max, row_sum


@triton.jit
def _kernel(q_ptr, q_strides, k0, k1, k2, k3, k4, k5, k6, k7, v0, v1, v2, v3, v4, v5, v6, v7, k_strides, v_strides,
            begins, ends, interval_strides, readys, waits,
            acc_ptr, max_ptr, sum_ptr, out_ptr, lse_ptr, sizes, scale,
            SEGMENTS: tl.constexpr, CARRIED: tl.constexpr, FINISH: tl.constexpr, FIXED: tl.constexpr, WAIT: tl.constexpr,
            TMA: tl.constexpr, FENCE: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr, HEADDIM: tl.constexpr,
            HEADDIM_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, HEADDIM_PAD: tl.constexpr,
            HEADDIM_V_PAD: tl.constexpr):  # fmt: skip
    seqlen_q, nheads_q, group = blocks.size32(sizes[0]), blocks.size32(sizes[1]), blocks.size32(sizes[2])
    heads, chunk = blocks.size32(sizes[3]), blocks.size32(sizes[4])
    row_blocks = tl.cdiv(seqlen_q, BLOCK_Q)
    block, head = blocks.schedule(tl.program_id(0), row_blocks, heads, chunk)
    b, h = (head // nheads_q).to(tl.int64), head % nheads_q
    first = (row_blocks - 1 - block) * BLOCK_Q  # last rows first: under a causal mask they have the most keys
    rows = first + tl.arange(0, BLOCK_Q)
    valid = rows < seqlen_q

    q_at = blocks.slice_at(q_strides, b, h, ALIGN, False)
    q_blk = blocks.load_block(q_ptr, q_at, first, valid, BLOCK_Q, HEADDIM, HEADDIM_PAD, False, True)  # [BLOCK_Q, HEADDIM]
    cols = tl.arange(0, HEADDIM_V_PAD)
    acc_at = ((b * seqlen_q + rows[:, None]) * nheads_q + h) * HEADDIM_V + cols[None, :]
    acc_mask = valid[:, None] & (cols[None, :] < HEADDIM_V)
    row_at = (b * nheads_q + h) * seqlen_q + rows
    if CARRIED:
        acc, row_max, row_sum = _load_state(acc_ptr, max_ptr, sum_ptr, acc_at, acc_mask, row_at, valid)
    else:
        acc = tl.zeros([BLOCK_Q, HEADDIM_V_PAD], tl.float32)
        row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_Q], tl.float32)

    # Triton 3.6 launches no descriptor inside a tuple, so they arrive one by one.
    ks, vs = (k0, k1, k2, k3, k4, k5, k6, k7), (v0, v1, v2, v3, v4, v5, v6, v7)
    if SEGMENTS > 0:
        for s in tl.range(0, SEGMENTS):
            interval_at = b * blocks.size(blocks.pick(interval_strides, s, SEGMENTS))
            begin_ptr = blocks.pick(begins, s, SEGMENTS) + interval_at
            end_ptr = blocks.pick(ends, s, SEGMENTS) + interval_at
            begin, end = blocks.load_interval(begin_ptr, end_ptr, rows, seqlen_q)
            gaps = blocks.has_gaps(begin, end_ptr, rows, first, valid)
            lo, full_lo, full_hi, hi = blocks.key_range(begin, end, valid, BLOCK_K)
            if FIXED:  # one loop for all blocks: which of them every row sees whole depends on the rows
                lo, gaps = blocks.fixed_range(lo, gaps, BLOCK_K)
                full_lo, full_hi = lo, lo
            if WAIT:  # noqa: SIM102
                if (hi > lo) & (((blocks.size(waits) >> s) & 1) != 0):
                    blocks.wait(blocks.pick(readys, s, SEGMENTS), h // group, FENCE)
            k, v = blocks.pick_view(ks, s, SEGMENTS, TMA), blocks.pick_view(vs, s, SEGMENTS, TMA)
            k_at = blocks.pick_at(k_strides, s, b, h // group, SEGMENTS, ALIGN, TMA)
            v_at = blocks.pick_at(v_strides, s, b, h // group, SEGMENTS, ALIGN, TMA)
            row_keys = begin, end, hi, gaps, begin_ptr, end_ptr, first, tl.minimum(first + BLOCK_Q, seqlen_q)
            for t in tl.range(0, blocks.edge_count(lo, full_lo, full_hi, hi, BLOCK_K)):
                n0 = blocks.edge_block(t, lo, full_lo, full_hi, BLOCK_K)
                acc, row_max, row_sum = _step(
                    q_blk, k, k_at, v, v_at, n0, row_keys, acc, row_max, row_sum, scale, True, BLOCK_Q,
                    BLOCK_K, HEADDIM, HEADDIM_PAD, HEADDIM_V, HEADDIM_V_PAD, TMA, PRECISION,
                )  # fmt: skip
            if not FIXED:
                for n0 in tl.range(full_lo, full_hi, BLOCK_K):
                    acc, row_max, row_sum = _step(
                        q_blk, k, k_at, v, v_at, n0, row_keys, acc, row_max, row_sum, scale, False, BLOCK_Q,
                        BLOCK_K, HEADDIM, HEADDIM_PAD, HEADDIM_V, HEADDIM_V_PAD, TMA, PRECISION,
                    )  # fmt: skip

    if FINISH:
        out = acc / tl.where(row_sum == 0, 1.0, row_sum)[:, None]  # a row that saw no key: 0 / 1
        tl.store(out_ptr + acc_at, out.to(out_ptr.dtype.element_ty), mask=acc_mask)
        lse = tl.fma(row_max, tl.full([BLOCK_Q], _LN2, tl.float32), tl.math.log2(row_sum) * _LN2)  # rounded once at its size
        tl.store(lse_ptr + row_at, lse, mask=valid)
    else:
        tl.store(acc_ptr + acc_at, acc, mask=acc_mask)
        tl.store(max_ptr + row_at, row_max, mask=valid)
        tl.store(sum_ptr + row_at, row_sum, mask=valid)


def forward(
    q: Tensor,
    segments: list[Segment],
    scale: float,
    state: State | None = None,
    finish: bool = True,
    *,
    fixed: bool = False,
) -> tuple[Tensor, ...]:
    """Attend the segments, starting from `state`: -> State, or (out, lse) with `finish` (README.md has the contract).

    q (batch, seqlen_q, nheads_q, headdim) in float32, float16 or bfloat16 on a device Triton runs on. The storage of
    `state` is consumed. More than portable.MAX_SEGMENTS segments take several launches, the state carried between them.
    """
    return launch(q, segments, scale, state=state, finish=finish, options=portable.Options(fixed=fixed))


def launch(
    q: Tensor,
    segments: list[Segment],
    scale: float,
    *,
    state: State | None = None,
    finish: bool = True,
    options: portable.Options = portable.Options(),
) -> tuple[Tensor, ...]:
    """`forward` with the choices a benchmark varies (tile, loads by descriptor) laid open."""
    headdim_v = segments[0].v.shape[-1] if segments else (state[0] if state is not None else q).shape[-1]
    if scale < 0:  # the kernel takes the maximum before it scales
        q, scale = -q, -scale
    q = portable.unit_stride(q)
    parts = portable.in_launches(segments)
    for part in parts[:-1]:
        state = _into_state(q, part, scale, state, headdim_v, options)
    if not finish:
        return _into_state(q, parts[-1], scale, state, headdim_v, options)
    out = q.new_empty(*q.shape[:3], headdim_v)
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32, device=q.device)
    # A pointer that the kernel does not use may be any of its type.
    _one_launch(q, parts[-1], scale, state or (lse, lse, lse), (out, lse), options, CARRIED=state is not None, FINISH=True)
    return out, lse


def _into_state(
    q: Tensor, segments: list[Segment], scale: float, state: State | None, headdim_v: int, options: portable.Options
) -> State:
    into = room_for_state(q, headdim_v) if state is None else state
    _one_launch(q, segments, scale, into, into[:2], options, CARRIED=state is not None, FINISH=False)
    return into


def room_for_state(q: Tensor, headdim_v: int) -> State:
    """Uninitialised: a launch that carries no state in writes every row."""
    batch, seqlen_q, nheads_q, _ = q.shape
    acc = torch.empty(batch, seqlen_q, nheads_q, headdim_v, dtype=torch.float32, device=q.device)
    row_max, row_sum = torch.empty(2, batch, nheads_q, seqlen_q, dtype=torch.float32, device=q.device)
    return acc, row_max, row_sum


def _one_launch(
    q: Tensor,
    segments: list[Segment],
    scale: float,
    state: State,
    result: tuple[Tensor, Tensor],
    options: portable.Options,
    **flags: bool,
) -> None:
    batch, seqlen_q, nheads_q, headdim = q.shape
    headdim_v = result[0].shape[-1]
    if q.numel() == 0:
        return
    arch = portable.arch(q.device)
    tile = options.tile or config.lookup(arch, q.dtype, headdim, headdim_v).forward
    tma = portable.keys_by_descriptor(segments, options)
    args = portable.segment_arguments(segments, (q,), tile.block_k, tma=tma)
    group = nheads_q // segments[0].k.shape[2] if segments else 1
    heads = batch * nheads_q
    chunk = options.chunk or portable.heads_together(portable.key_bytes(segments), group, heads)
    how = config.launch_options(tile, arch)
    if options.fixed:  # every rounding is written in the kernel, none is up to a compiler that fuses where it likes
        how["enable_fp_fusion"] = False
    with portable.guard(q.device):
        _kernel[(triton.cdiv(seqlen_q, tile.block_q) * heads,)](  # pyright: ignore[reportIndexIssue]
            q, portable.strides_of(q, False, args.align), *portable.slots(args.ks),
            *portable.slots(args.vs), *args.keys, *args.intervals, *state, *result,
            portable.encode(seqlen_q, nheads_q, group, heads, chunk), scale * LOG2E, HEADDIM=headdim, HEADDIM_V=headdim_v,
            BLOCK_Q=tile.block_q, BLOCK_K=tile.block_k, TMA=tma, FENCE=tma and q.device.type == "cuda",
            FIXED=options.fixed, **how, **flags, **args.constexprs, **portable.pads(headdim, headdim_v),
        )  # fmt: skip

"""The portable backward tile: delta, a kernel for dQ that walks keys, and one for dK/dV that walks rows; no atomics."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringflash.kernels import blocks, config, portable
from ringflash.kernels.reference import LOG2E, Segment, clear

_LOG2E = tl.constexpr(LOG2E)


@triton.jit
def _load_rows(x, at, first, hi, BLOCK_Q: tl.constexpr, VECTORS: tl.constexpr, CHECK: tl.constexpr):
    """lse or delta of rows first ... [BLOCK_Q]; with CHECK, some number for rows from hi on."""
    if VECTORS:  # all the rows lie in one vector of less than 2**31
        return x.load([at.to(tl.int32) + first])
    else:
        rows = first + tl.arange(0, BLOCK_Q)
        if CHECK:
            return tl.load(x + at + rows, mask=rows < hi, other=0.0)
        else:
            return tl.load(x + at + rows)


@triton.jit
def _dq_step(q_blk, dout_blk, k, k_at, v, v_at, n0, row_keys, lse, delta, dq, scale, MASK: tl.constexpr,
             BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, HEADDIM: tl.constexpr, HEADDIM_PAD: tl.constexpr,
             HEADDIM_V: tl.constexpr, HEADDIM_V_PAD: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """One key block: dQ += dS K, dS = P * (dO V^T - delta). Keys that no row sees are zero in k_blk and v_blk."""
    keys = n0 + tl.arange(0, BLOCK_K)
    begin, end, hi = row_keys[0], row_keys[1], row_keys[2]
    seen = keys < hi
    if MASK:  # noqa: SIM102  (one is known when compiling)
        if row_keys[3]:  # gaps
            seen = seen & blocks.seen_keys(keys, row_keys[4], row_keys[5], row_keys[6], row_keys[7], BLOCK_Q)
    k_blk = blocks.load_block(k, k_at, n0, seen, BLOCK_K, HEADDIM, HEADDIM_PAD, TMA, MASK)  # [BLOCK_K, HEADDIM]
    if HEADDIM_PAD < 256:
        v_blk = blocks.load_block(v, v_at, n0, seen, BLOCK_K, HEADDIM_V, HEADDIM_V_PAD, TMA, MASK)  # [BLOCK_K, HEADDIM_V]
    x = blocks.dot(q_blk, tl.trans(k_blk), None, PRECISION) * scale  # [BLOCK_Q, BLOCK_K]
    if HEADDIM_PAD == 256:  # later, or the copies that are zeroed where nobody sees spill
        v_blk = blocks.load_block(v, v_at, n0, seen, BLOCK_K, HEADDIM_V, HEADDIM_V_PAD, TMA, MASK)  # [BLOCK_K, HEADDIM_V]
    dp = blocks.dot(dout_blk, tl.trans(v_blk), None, PRECISION)  # [BLOCK_Q, BLOCK_K]
    p = tl.math.exp2(x - lse[:, None])
    if MASK:
        p = tl.where((keys[None, :] >= begin[:, None]) & (keys[None, :] < end[:, None]), p, 0.0)
    ds = p * (dp - delta[:, None])
    return blocks.dot(ds.to(k_blk.dtype), k_blk, dq, PRECISION)


@triton.jit
def _dq_kernel(q_ptr, q_strides, dout_ptr, dout_strides, lse_ptr, delta_ptr, k0, k1, k2, k3, k4, k5, k6, k7,
               v0, v1, v2, v3, v4, v5, v6, v7, k_strides, v_strides, begins, ends, interval_strides, readys, waits, dq_ptr,
               sizes, scale,
               SEGMENTS: tl.constexpr, WAIT: tl.constexpr, TMA: tl.constexpr, FENCE: tl.constexpr, ALIGN: tl.constexpr,
               PRECISION: tl.constexpr, HEADDIM: tl.constexpr, HEADDIM_V: tl.constexpr, BLOCK_Q: tl.constexpr,
               BLOCK_K: tl.constexpr, HEADDIM_PAD: tl.constexpr, HEADDIM_V_PAD: tl.constexpr):  # fmt: skip
    seqlen_q, nheads_q, group = blocks.size32(sizes[0]), blocks.size32(sizes[1]), blocks.size32(sizes[2])
    row_blocks = tl.cdiv(seqlen_q, BLOCK_Q)
    block, head = blocks.schedule(tl.program_id(0), row_blocks, blocks.size32(sizes[3]), blocks.size32(sizes[4]))
    b, h = (head // nheads_q).to(tl.int64), head % nheads_q
    first = (row_blocks - 1 - block) * BLOCK_Q  # last rows first, as in forward
    rows = first + tl.arange(0, BLOCK_Q)
    valid = rows < seqlen_q

    q_at = blocks.slice_at(q_strides, b, h, ALIGN, False)
    dout_at = blocks.slice_at(dout_strides, b, h, ALIGN, False)
    q_blk = blocks.load_block(q_ptr, q_at, first, valid, BLOCK_Q, HEADDIM, HEADDIM_PAD, False, True)  # [BLOCK_Q, HEADDIM]
    dout_blk = blocks.load_block(dout_ptr, dout_at, first, valid, BLOCK_Q, HEADDIM_V, HEADDIM_V_PAD, False, True)
    row_at = (b * nheads_q + h) * seqlen_q
    lse = _load_rows(lse_ptr, row_at, first, seqlen_q, BLOCK_Q, False, True) * _LOG2E  # [BLOCK_Q]
    delta = _load_rows(delta_ptr, row_at, first, seqlen_q, BLOCK_Q, False, True)  # [BLOCK_Q]
    lse = tl.where(valid & (lse != float("-inf")), lse, float("inf"))  # rows that saw nothing, or are none: exp2(x - inf) = 0
    delta = tl.where(valid, delta, 0.0)
    dq = tl.zeros([BLOCK_Q, HEADDIM_PAD], tl.float32)
    touched = False
    ks, vs = (k0, k1, k2, k3, k4, k5, k6, k7), (v0, v1, v2, v3, v4, v5, v6, v7)  # as in forward

    for s in tl.range(0, SEGMENTS):
        interval_at = b * blocks.size(blocks.pick(interval_strides, s, SEGMENTS))
        begin_ptr = blocks.pick(begins, s, SEGMENTS) + interval_at
        end_ptr = blocks.pick(ends, s, SEGMENTS) + interval_at
        begin, end = blocks.load_interval(begin_ptr, end_ptr, rows, seqlen_q)
        gaps = blocks.has_gaps(begin, end_ptr, rows, first, valid)
        lo, full_lo, full_hi, hi = blocks.key_range(begin, end, valid, BLOCK_K)
        touched = touched | (hi > lo)
        if WAIT:  # noqa: SIM102
            if (hi > lo) & (((blocks.size(waits) >> s) & 1) != 0):
                blocks.wait(blocks.pick(readys, s, SEGMENTS), h // group, FENCE)
        k, v = blocks.pick_view(ks, s, SEGMENTS, TMA), blocks.pick_view(vs, s, SEGMENTS, TMA)
        k_at = blocks.pick_at(k_strides, s, b, h // group, SEGMENTS, ALIGN, TMA)
        v_at = blocks.pick_at(v_strides, s, b, h // group, SEGMENTS, ALIGN, TMA)
        row_keys = begin, end, hi, gaps, begin_ptr, end_ptr, first, tl.minimum(first + BLOCK_Q, seqlen_q)
        for t in tl.range(0, blocks.edge_count(lo, full_lo, full_hi, hi, BLOCK_K)):
            n0 = blocks.edge_block(t, lo, full_lo, full_hi, BLOCK_K)
            dq = _dq_step(q_blk, dout_blk, k, k_at, v, v_at, n0, row_keys, lse, delta, dq, scale * _LOG2E, True,
                          BLOCK_Q, BLOCK_K, HEADDIM, HEADDIM_PAD, HEADDIM_V, HEADDIM_V_PAD, TMA, PRECISION)  # fmt: skip
        for n0 in tl.range(full_lo, full_hi, BLOCK_K):
            dq = _dq_step(q_blk, dout_blk, k, k_at, v, v_at, n0, row_keys, lse, delta, dq, scale * _LOG2E, False,
                          BLOCK_Q, BLOCK_K, HEADDIM, HEADDIM_PAD, HEADDIM_V, HEADDIM_V_PAD, TMA, PRECISION)  # fmt: skip

    if touched:
        _add(dq_ptr, dq * scale, seqlen_q, nheads_q, b, h, first, BLOCK_Q, HEADDIM, HEADDIM_PAD)


@triton.jit
def _dkv_step(k_blk, v_blk, q, q_at, dout, dout_at, m0, seqlen_q, first, last, lse, delta, row_at, dk, dv, scale,
              MASK: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, HEADDIM: tl.constexpr,
              HEADDIM_PAD: tl.constexpr, HEADDIM_V: tl.constexpr, HEADDIM_V_PAD: tl.constexpr, TMA: tl.constexpr,
              VECTORS: tl.constexpr,
              PRECISION: tl.constexpr):  # fmt: skip
    """One row block, transposed: dV += P^T dO, dK += dS^T Q."""
    at = m0
    if MASK and TMA:
        at = tl.minimum(m0, seqlen_q - BLOCK_Q)  # rows behind the last may be anything; those before m0 are masked again
    rows = at + tl.arange(0, BLOCK_Q)
    q_blk = blocks.load_block(q, q_at, at, rows < seqlen_q, BLOCK_Q, HEADDIM, HEADDIM_PAD, TMA,
                              MASK and not TMA)  # [BLOCK_Q, HEADDIM]  # fmt: skip
    dout_blk = blocks.load_block(dout, dout_at, at, rows < seqlen_q, BLOCK_Q, HEADDIM_V, HEADDIM_V_PAD, TMA,
                                 MASK and not TMA)  # [BLOCK_Q, HEADDIM_V]  # fmt: skip
    lse_blk = _load_rows(lse, row_at, at, seqlen_q, BLOCK_Q, VECTORS, MASK and not TMA) * _LOG2E  # [BLOCK_Q]
    x = blocks.dot(k_blk, tl.trans(q_blk), None, PRECISION) * scale  # [BLOCK_K, BLOCK_Q]
    p = tl.math.exp2(x - lse_blk[None, :])
    if MASK:
        row = tl.arange(0, BLOCK_Q)
        p = tl.where(row[None, :] >= (tl.maximum(first, m0) - at)[:, None], p, 0.0)
        p = tl.where(row[None, :] < (last - at)[:, None], p, 0.0)
    dv = blocks.dot(p.to(dout_blk.dtype), dout_blk, dv, PRECISION)
    dp = blocks.dot(v_blk, tl.trans(dout_blk), None, PRECISION)  # [BLOCK_K, BLOCK_Q]
    # Loaded as late as possible: registers are what bounds this kernel (README.md, notes).
    delta_blk = _load_rows(delta, row_at, at, seqlen_q, BLOCK_Q, VECTORS, MASK and not TMA)  # [BLOCK_Q]
    ds = p * (dp - delta_blk[None, :])
    dk = blocks.dot(ds.to(q_blk.dtype), q_blk, dk, PRECISION)
    return dk, dv


@triton.jit
def _add(ptr, x, seqlen, nheads, b, h, first, BLOCK: tl.constexpr, HEADDIM: tl.constexpr, HEADDIM_PAD: tl.constexpr):
    """Add float32 x [BLOCK, HEADDIM_PAD] into rows first ... of a contiguous (batch, seqlen, nheads, headdim)."""
    ptr += ((b * seqlen + first) * nheads + h) * HEADDIM
    rows, cols = tl.arange(0, BLOCK), tl.arange(0, HEADDIM_PAD)
    ptrs = ptr + (rows[:, None] * (nheads * HEADDIM) + cols[None, :])  # 32 bits are enough inside a block
    mask = rows[:, None] < seqlen - first
    if HEADDIM != HEADDIM_PAD:
        mask = mask & (cols[None, :] < HEADDIM)
    tl.store(ptrs, tl.load(ptrs, mask=mask, other=0.0) + x, mask=mask)


@triton.jit
def _key_block(block, seqlens_k, SEGMENTS: tl.constexpr, BLOCK_K: tl.constexpr):
    """(segment, its key block) of the block-th key block of all segments."""
    s = 0
    within = block
    before = 0
    for i in tl.static_range(0, SEGMENTS - 1):
        before += tl.cdiv(blocks.size32(seqlens_k[i]), BLOCK_K)
        s = tl.where(block >= before, i + 1, s)
        within = tl.where(block >= before, block - before, within)
    return s, within


@triton.jit
def _dkv_kernel(q, q_strides, dout, dout_strides, lse, delta, ks, vs, k_strides, v_strides, begins, ends,
                interval_strides, readys, waits, dks, dvs, seqlens_k, sizes, scale,
                SEGMENTS: tl.constexpr, WAIT: tl.constexpr, TMA: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr,
                HEADDIM: tl.constexpr, HEADDIM_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
                HEADDIM_PAD: tl.constexpr, HEADDIM_V_PAD: tl.constexpr, FANOUT: tl.constexpr,
                VECTORS: tl.constexpr):  # fmt: skip
    seqlen_q, nheads_q, group = blocks.size32(sizes[0]), blocks.size32(sizes[1]), blocks.size32(sizes[2])
    key_blocks = blocks.size32(sizes[5])
    block, head = blocks.schedule(tl.program_id(0), key_blocks, blocks.size32(sizes[3]), blocks.size32(sizes[4]))
    s, within = _key_block(block, seqlens_k, SEGMENTS, BLOCK_K)
    nheads_k = nheads_q // group
    b, hk = (head // nheads_k).to(tl.int64), head % nheads_k
    seqlen_k = blocks.size32(blocks.pick(seqlens_k, s, SEGMENTS))
    n0 = within * BLOCK_K
    interval_at = b * blocks.size(blocks.pick(interval_strides, s, SEGMENTS))
    begin_ptr = blocks.pick(begins, s, SEGMENTS) + interval_at
    end_ptr = blocks.pick(ends, s, SEGMENTS) + interval_at
    keys = n0 + tl.arange(0, BLOCK_K)
    lo, full_lo, full_hi, hi, first, last = blocks.row_range(begin_ptr, end_ptr, seqlen_q, keys, n0,
                                                             tl.minimum(n0 + BLOCK_K, seqlen_k), BLOCK_Q, FANOUT,
                                                             4 if VECTORS else 1)  # fmt: skip
    if hi > lo:
        if WAIT:  # noqa: SIM102
            if ((blocks.size(waits) >> s) & 1) != 0:
                blocks.wait(blocks.pick(readys, s, SEGMENTS), hk, False)
        k_at = blocks.pick_at(k_strides, s, b, hk, SEGMENTS, ALIGN, False)
        v_at = blocks.pick_at(v_strides, s, b, hk, SEGMENTS, ALIGN, False)
        seen = (first < last) & (keys < seqlen_k)  # what another key holds may be NaN, and 0 * NaN is NaN
        k_blk = blocks.load_block(blocks.pick(ks, s, SEGMENTS), k_at, n0, seen, BLOCK_K, HEADDIM, HEADDIM_PAD, False,
                                  True)  # [BLOCK_K, HEADDIM]  # fmt: skip
        v_blk = blocks.load_block(blocks.pick(vs, s, SEGMENTS), v_at, n0, seen, BLOCK_K, HEADDIM_V, HEADDIM_V_PAD, False,
                                  True)  # [BLOCK_K, HEADDIM_V]  # fmt: skip
        dk = tl.zeros([BLOCK_K, HEADDIM_PAD], tl.float32)
        dv = tl.zeros([BLOCK_K, HEADDIM_V_PAD], tl.float32)
        # The group's heads one after the other in one pipelined loop; counters, since divisions cost registers and time.
        h, m0 = hk * group, blocks.lo_edge(lo, full_lo, full_hi)
        for _ in tl.range(0, group * blocks.edge_count(lo, full_lo, full_hi, hi, BLOCK_Q)):
            row_at = (b * nheads_q + h) * seqlen_q
            q_at = blocks.slice_at(q_strides, b, h, ALIGN, TMA)
            dout_at = blocks.slice_at(dout_strides, b, h, ALIGN, TMA)
            dk, dv = _dkv_step(k_blk, v_blk, q, q_at, dout, dout_at, m0, seqlen_q, first, last, lse, delta, row_at,
                               dk, dv, scale * _LOG2E, True, BLOCK_Q, BLOCK_K, HEADDIM, HEADDIM_PAD, HEADDIM_V,
                               HEADDIM_V_PAD, TMA, VECTORS, PRECISION)  # fmt: skip
            m0, again = blocks.next_block(m0, lo, full_lo, full_hi, hi, BLOCK_Q)
            h += again.to(tl.int32)
        # The first head again: m0 < hi says that there were edges. Told so, the compiler keeps nothing in registers for it.
        h, m0 = h - tl.where(m0 < hi, group, 0), full_lo
        # full_hi <= hi anyway: without the minimum the compiler carries the count of blocks through the first loop.
        for _ in tl.range(0, group * ((tl.minimum(full_hi, hi) - full_lo) // BLOCK_Q)):
            row_at = (b * nheads_q + h) * seqlen_q
            q_at = blocks.slice_at(q_strides, b, h, ALIGN, TMA)
            dout_at = blocks.slice_at(dout_strides, b, h, ALIGN, TMA)
            dk, dv = _dkv_step(k_blk, v_blk, q, q_at, dout, dout_at, m0, seqlen_q, first, last, lse, delta, row_at,
                               dk, dv, scale * _LOG2E, False, BLOCK_Q, BLOCK_K, HEADDIM, HEADDIM_PAD, HEADDIM_V,
                               HEADDIM_V_PAD, TMA, VECTORS, PRECISION)  # fmt: skip
            m0 += BLOCK_Q
            again = m0 >= full_hi
            m0 = tl.where(again, full_lo, m0)
            h += again.to(tl.int32)
        _add(blocks.pick(dks, s, SEGMENTS), dk * scale, seqlen_k, nheads_k, b, hk, n0, BLOCK_K, HEADDIM, HEADDIM_PAD)
        _add(blocks.pick(dvs, s, SEGMENTS), dv, seqlen_k, nheads_k, b, hk, n0, BLOCK_K, HEADDIM_V, HEADDIM_V_PAD)


@triton.jit
def _delta_kernel(dout_ptr, dout_strides, out_ptr, out_strides, dlse_ptr, delta_ptr, sizes, HAS_DLSE: tl.constexpr,
                  ALIGN: tl.constexpr, BLOCK_Q: tl.constexpr, HEADDIM_V: tl.constexpr,
                  HEADDIM_V_PAD: tl.constexpr):  # fmt: skip
    seqlen_q, nheads_q = blocks.size32(sizes[0]), blocks.size32(sizes[1])
    # Heads innermost: programs of one time read whole rows of memory.
    heads = tl.num_programs(0) // tl.cdiv(seqlen_q, BLOCK_Q)
    first, head = tl.program_id(0) // heads * BLOCK_Q, tl.program_id(0) % heads
    b, h = (head // nheads_q).to(tl.int64), head % nheads_q
    rows = first + tl.arange(0, BLOCK_Q)
    valid = rows < seqlen_q
    dout_at = blocks.slice_at(dout_strides, b, h, ALIGN, False)
    out_at = blocks.slice_at(out_strides, b, h, ALIGN, False)
    dout_blk = blocks.load_block(dout_ptr, dout_at, first, valid, BLOCK_Q, HEADDIM_V, HEADDIM_V_PAD, False, True)
    out_blk = blocks.load_block(out_ptr, out_at, first, valid, BLOCK_Q, HEADDIM_V, HEADDIM_V_PAD, False, True)
    delta = tl.sum(dout_blk.to(tl.float32) * out_blk.to(tl.float32), 1)  # [BLOCK_Q]
    at = (b * nheads_q + h) * seqlen_q + rows
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + at, mask=valid, other=0.0)
    tl.store(delta_ptr + at, delta, mask=valid)


_launch_delta = portable.Launcher(_delta_kernel, enable_fp_fusion=True)


def delta(dout: Tensor, out: Tensor, dlse: Tensor | None = None) -> Tensor:
    """rowsum(dout * out) - dlse, float32 (batch, nheads_q, seqlen_q): what backward subtracts from dP.

    dout, out (batch, seqlen_q, nheads_q, headdim_v) of any strides; dlse (batch, nheads_q, seqlen_q).
    """
    batch, seqlen_q, nheads_q, headdim_v = out.shape
    result = torch.empty(batch, nheads_q, seqlen_q, dtype=torch.float32, device=out.device)
    if result.numel() == 0:
        return result
    dout, out = portable.unit_stride(dout), portable.unit_stride(out)
    rows = result if dlse is None else dlse.float().contiguous()
    align = portable.alignment((dout, out)) if dout.dtype == out.dtype else 1
    block = 64
    known = (dlse is not None, align, block, headdim_v, config.padded(headdim_v))  # the constexprs
    args = (
        dout, portable.strides_of(dout, False, align), out, portable.strides_of(out, False, align), rows, result,
        portable.encode(seqlen_q, nheads_q), *known,
    )  # fmt: skip
    with portable.guard(out.device):
        grid = triton.cdiv(seqlen_q, block) * batch * nheads_q
        _launch_delta(grid, args, key=(dout.dtype, out.dtype, known), pointers=(dout, out, rows, result))
    return result


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
    """Add the segments' contributions into float32 dq, and into float32 (dk, dv) per segment (README.md has the contract).

    dout in q's dtype (batch, seqlen_q, nheads_q, headdim_v); lse, delta float32 contiguous (batch, nheads_q, seqlen_q).
    Where dq or dkv is None that kernel is not launched. add=False: dk and dv are overwritten, and may be of k's and v's dtype.
    add_dq=False: dq is overwritten.
    """
    if not add:
        clear(dkv)
    if dq is not None and not add_dq:
        dq.zero_()
    dout, q = portable.unit_stride(dout), portable.unit_stride(q)
    grads = [None] * len(segments) if dkv is None else dkv
    pairs = [pair for pair in zip(segments, grads, strict=True) if pair[0].k.shape[1]]
    if q.numel() == 0:
        return
    for i in range(0, len(pairs), portable.MAX_SEGMENTS):
        part, into = zip(*pairs[i : i + portable.MAX_SEGMENTS], strict=True)
        if dkv is not None:
            launch_dkv(dout, q, part, lse, delta, scale, into)
        if dq is not None:
            launch_dq(dout, q, part, lse, delta, scale, dq)


def launch_dq(
    dout: Tensor,
    q: Tensor,
    segments: Sequence[Segment],
    lse: Tensor,
    delta: Tensor,
    scale: float,
    dq: Tensor,
    *,
    options: portable.Options = portable.Options(),
) -> None:
    """Add the segments' contribution to dq, with the choices a benchmark varies laid open."""
    batch, seqlen_q, nheads_q, headdim = q.shape
    headdim_v = dout.shape[-1]
    arch = portable.arch(q.device)
    tile = options.tile or config.lookup(arch, q.dtype, headdim, headdim_v).dq
    tma = portable.keys_by_descriptor(segments, options)
    args = portable.segment_arguments(segments, (q, dout), tile.block_k, tma=tma)
    group, heads = nheads_q // segments[0].k.shape[2], batch * nheads_q
    chunk = options.chunk or portable.heads_together(portable.key_bytes(segments), group, heads)
    with portable.guard(q.device):
        _dq_kernel[(triton.cdiv(seqlen_q, tile.block_q) * heads,)](  # pyright: ignore[reportIndexIssue]
            q, portable.strides_of(q, False, args.align), dout, portable.strides_of(dout, False, args.align), lse, delta,
            *portable.slots(args.ks), *portable.slots(args.vs), *args.keys, *args.intervals, dq,
            portable.encode(seqlen_q, nheads_q, group, heads, chunk), scale, TMA=tma,
            FENCE=tma and q.device.type == "cuda", HEADDIM=headdim, HEADDIM_V=headdim_v, BLOCK_Q=tile.block_q,
            BLOCK_K=tile.block_k, **config.launch_options(tile, arch), **args.constexprs,
            **portable.pads(headdim, headdim_v),
        )  # fmt: skip


def launch_dkv(
    dout: Tensor,
    q: Tensor,
    segments: Sequence[Segment],
    lse: Tensor,
    delta: Tensor,
    scale: float,
    dkv: Sequence[tuple[Tensor, Tensor]],
    *,
    options: portable.Options = portable.Options(),
) -> None:
    """Add each segment's dk and dv, with the choices a benchmark varies laid open."""
    batch, seqlen_q, nheads_q, headdim = q.shape
    headdim_v, nheads_k = dout.shape[-1], segments[0].k.shape[2]
    arch = portable.arch(q.device)
    tile = options.tile or config.lookup(arch, q.dtype, headdim, headdim_v).dkv
    tma = seqlen_q >= tile.block_q and portable.use_descriptors((q, dout), options)
    vectors = tma and seqlen_q % 4 == 0 and portable.describable_vectors(lse, delta)
    args = portable.segment_arguments(segments, (q, dout), tile.block_k)
    seqlens_k = [segment.k.shape[1] for segment in segments]
    key_blocks = sum(triton.cdiv(n, tile.block_k) for n in seqlens_k)
    group, heads = nheads_q // nheads_k, batch * nheads_k
    row_bytes = group * seqlen_q * (headdim + headdim_v) * q.element_size()
    chunk = options.chunk or portable.heads_together(row_bytes, 1, heads)
    view = (lambda x: portable.describe(x, tile.block_q)) if tma else (lambda x: x)
    row = (lambda x: portable.describe_vector(x, tile.block_q)) if vectors else (lambda x: x)
    with portable.guard(q.device):
        _dkv_kernel[(key_blocks * heads,)](  # pyright: ignore[reportIndexIssue]
            view(q), portable.strides_of(q, tma, args.align), view(dout), portable.strides_of(dout, tma, args.align),
            row(lse), row(delta), args.ks, args.vs, *args.keys, *args.intervals, tuple(dk for dk, _ in dkv),
            tuple(dv for _, dv in dkv),
            portable.encode(*seqlens_k), portable.encode(seqlen_q, nheads_q, group, heads, chunk, key_blocks), scale,
            TMA=tma, HEADDIM=headdim, HEADDIM_V=headdim_v, BLOCK_Q=tile.block_q, BLOCK_K=tile.block_k, FANOUT=256,
            VECTORS=vectors, **config.launch_options(tile, arch), **args.constexprs,
            **portable.pads(headdim, headdim_v),
        )  # fmt: skip

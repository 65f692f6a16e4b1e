"""Which keys, and which rows, one program walks: the one place that reads the rows' intervals, and the loads of a block."""

import triton
import triton.language as tl

# Larger than any key index: the begin of a row that no block may treat as fully visible.
_NEVER = tl.constexpr(1 << 30)


@triton.jit
def size(x):
    """Decode an integer argument (portable.encode says why they travel encoded)."""
    return (x - 0x10000000000) >> 1


@triton.jit
def size32(x):
    return size(x).to(tl.int32)


@triton.jit
def pick(xs, s, SEGMENTS: tl.constexpr):
    """xs[s] for a run-time s: a chain of selects, so that the walk over segments stays a loop."""
    x = xs[0]
    for i in tl.static_range(1, SEGMENTS):
        x = tl.where(s == i, xs[i], x)
    return x


@triton.jit
def pick_strides(strides, s, SEGMENTS: tl.constexpr, ALIGN: tl.constexpr):
    """(batch, row, head) strides of segment s in elements; ALIGN carries their divisibility to the loads."""
    a, b, c = strides[0]
    for i in tl.static_range(1, SEGMENTS):
        a = tl.where(s == i, strides[i][0], a)
        b = tl.where(s == i, strides[i][1], b)
        c = tl.where(s == i, strides[i][2], c)
    return size(a) * ALIGN, size(b) * ALIGN, size(c) * ALIGN


@triton.jit
def pick_view(xs, s, SEGMENTS: tl.constexpr, TMA: tl.constexpr):
    """xs[s] where xs are pointers or, with TMA, descriptors (which no select takes, but an if does)."""
    if TMA:
        x = xs[0]
        for i in tl.static_range(1, SEGMENTS):
            if s == i:
                x = xs[i]
        return x
    else:
        return pick(xs, s, SEGMENTS)


@triton.jit
def origin(offset, stride, TMA: tl.constexpr):
    """Where a (batch, head) slice lies: (element offset, row stride), or its (row, column) in the descriptor's matrix."""
    if TMA:
        return (offset // stride).to(tl.int32), (offset % stride).to(tl.int32)
    else:
        return offset, stride


@triton.jit
def slice_at(strides, b, h, ALIGN: tl.constexpr):
    """(element offset, row stride) of the (b, h) slice of a tensor with encoded (batch, row, head) strides."""
    offset = (b * size(strides[0]) + h * size(strides[2])) * ALIGN
    return offset, size(strides[1]) * ALIGN


@triton.jit
def origin_of(at, TMA: tl.constexpr):
    return origin(at[0], at[1], TMA)


@triton.jit
def pick_at(strides, s, b, h, SEGMENTS: tl.constexpr, ALIGN: tl.constexpr, TMA: tl.constexpr):
    """Where the (b, h) slice of segment s lies."""
    stride_b, stride_n, stride_h = pick_strides(strides, s, SEGMENTS, ALIGN)
    return origin(b * stride_b + h * stride_h, stride_n, TMA)


@triton.jit
def load_block(x, at, first, limit, BLOCK: tl.constexpr, HEADDIM: tl.constexpr, HEADDIM_PAD: tl.constexpr,
               TMA: tl.constexpr, CHECK: tl.constexpr):  # fmt: skip
    """Rows first ... first+BLOCK-1 of a slice: [BLOCK, HEADDIM_PAD]. With CHECK rows from `limit` on are zero (not with TMA)."""
    if TMA:
        return x.load([at[0] + first, at[1]])
    else:
        rows = first + tl.arange(0, BLOCK)
        cols = tl.arange(0, HEADDIM_PAD)
        ptrs = x + at[0] + rows[:, None].to(tl.int64) * at[1] + cols[None, :]
        if CHECK:
            mask = rows[:, None] < limit
            if HEADDIM != HEADDIM_PAD:
                mask = mask & (cols[None, :] < HEADDIM)
            return tl.load(ptrs, mask=mask, other=0.0)
        elif HEADDIM != HEADDIM_PAD:
            return tl.load(ptrs, mask=cols[None, :] < HEADDIM, other=0.0)
        else:
            return tl.load(ptrs)


@triton.jit
def load_interval(begin_ptr, end_ptr, rows, seqlen_q):
    """begin, end of the rows; rows past seqlen_q are empty: [BLOCK_Q] each."""
    valid = rows < seqlen_q
    return tl.load(begin_ptr + rows, mask=valid, other=0), tl.load(end_ptr + rows, mask=valid, other=0)


@triton.jit
def key_range(begin, end, valid, BLOCK_K: tl.constexpr):
    """(lo, full_lo, full_hi, hi): the hull of the rows' keys, and its part in whole blocks that every valid row sees.

    A row that is empty sees no block fully; rows that are not valid do not count. Nothing visible: lo == hi.
    """
    filled = begin < end
    hi = tl.max(tl.where(filled, end, 0), 0)
    lo = tl.minimum(tl.min(tl.where(filled, begin, _NEVER), 0), hi)
    last_begin = tl.max(tl.where(filled, begin, tl.where(valid, _NEVER, 0)), 0)
    first_end = tl.min(tl.where(valid, end, _NEVER), 0)
    full_lo, full_hi = whole_blocks(lo, tl.maximum(last_begin, lo), first_end, BLOCK_K)
    return lo, full_lo, full_hi, hi


@triton.jit
def whole_blocks(lo, inner_lo, inner_hi, BLOCK: tl.constexpr):
    """The blocks of the grid lo, lo+BLOCK, ... inside [inner_lo, inner_hi); (lo, lo) where there are none."""
    first = lo + tl.cdiv(inner_lo - lo, BLOCK) * BLOCK
    count = (inner_hi - first) // BLOCK
    first = tl.where(count > 0, first, lo)
    return first, first + tl.maximum(count, 0) * BLOCK


@triton.jit
def edge_count(lo, full_lo, full_hi, hi, BLOCK: tl.constexpr):
    return tl.cdiv(full_lo - lo, BLOCK) + tl.cdiv(hi - full_hi, BLOCK)


@triton.jit
def edge_block(t, lo, full_lo, full_hi, BLOCK: tl.constexpr):
    """First index of edge block t: those left of the full part come first."""
    left = (full_lo - lo) // BLOCK
    return tl.where(t < left, lo + t * BLOCK, full_hi + (t - left) * BLOCK)


@triton.jit
def count_below(ptr, n, value, FANOUT: tl.constexpr):
    """How many of the n non-decreasing numbers at ptr are below value: FANOUT samples a round, not one probe a round."""
    lo = n * 0
    span = n
    while span > 0:
        step = tl.cdiv(span, FANOUT)
        at = lo + tl.arange(0, FANOUT) * step
        inside = at < lo + span
        below = tl.sum((inside & (tl.load(ptr + at, mask=inside, other=0) < value)).to(tl.int32), 0)
        # Sample below-1 is below value and sample `below` is not: the border lies in the stretch between the two.
        last = tl.minimum(lo + below * step, lo + span)
        lo = tl.where(below > 0, lo + (below - 1) * step + 1, lo)
        span = tl.where(below > 0, last - lo, 0)
    return lo


@triton.jit
def row_range(begin_ptr, end_ptr, seqlen_q, n0, n1, BLOCK_Q: tl.constexpr, FANOUT: tl.constexpr):
    """(lo, full_lo, full_hi, hi): the rows that see a key of [n0, n1), and the whole blocks of rows that see all of them.

    begin and end are non-decreasing, so both sets are intervals (the first may hold empty rows).
    """
    lo = count_below(end_ptr, seqlen_q, n0 + 1, FANOUT)
    hi = tl.maximum(count_below(begin_ptr, seqlen_q, n1, FANOUT), lo)
    inner_lo = tl.maximum(count_below(end_ptr, seqlen_q, n1, FANOUT), lo)
    inner_hi = tl.minimum(count_below(begin_ptr, seqlen_q, n0 + 1, FANOUT), hi)
    full_lo, full_hi = whole_blocks(lo, inner_lo, inner_hi, BLOCK_Q)
    return lo, full_lo, full_hi, hi


@triton.jit
def schedule(pid, blocks, heads, chunk):
    """(block, head) of a program: `chunk` heads go together (their keys stay in cache), block by block, heads innermost."""
    first = pid // (chunk * blocks) * chunk
    within = pid - first * blocks
    width = tl.minimum(chunk, heads - first)
    return within // width, first + within % width


@triton.jit
def wait(ready_ptr, FENCE: tl.constexpr):
    """Spin until the flag is set; FENCE orders the copy engine's reads behind it as well."""
    flag = tl.atomic_add(ready_ptr, 0, sem="acquire", scope="sys")
    while flag == 0:
        flag = tl.atomic_add(ready_ptr, 0, sem="acquire", scope="sys")
    if FENCE:
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.u32 $0, $1;", "=r,r", [flag], dtype=tl.int32, is_pure=False, pack=1
        )

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
    """size in 32 bits."""
    return size(x).to(tl.int32)


@triton.jit
def pick(xs, s, SEGMENTS: tl.constexpr):
    """xs[s] for a run-time s: a chain of selects, so that the walk over segments stays a loop."""
    x = xs[0]
    for i in tl.static_range(1, SEGMENTS):
        x = tl.where(s == i, xs[i], x)
    return x


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
def slice_at(strides, b, h, ALIGN: tl.constexpr, TMA: tl.constexpr):
    """Where the (b, h) slice lies, from portable.strides_of: (element offset, row stride), or a descriptor's (row, column)."""
    return _slice_at(strides[0], strides[1], strides[2], b, h, ALIGN, TMA)


@triton.jit
def pick_at(strides, s, b, h, SEGMENTS: tl.constexpr, ALIGN: tl.constexpr, TMA: tl.constexpr):
    """slice_at for segment s."""
    x, y, z = strides[0]
    for i in tl.static_range(1, SEGMENTS):
        x = tl.where(s == i, strides[i][0], x)
        y = tl.where(s == i, strides[i][1], y)
        z = tl.where(s == i, strides[i][2], z)
    return _slice_at(x, y, z, b, h, ALIGN, TMA)


@triton.jit
def _slice_at(x, y, z, b, h, ALIGN: tl.constexpr, TMA: tl.constexpr):
    if TMA:
        return b.to(tl.int32) * size32(x) + h * size32(y), h * size32(z)
    else:
        # ALIGN times a number keeps its divisibility, which widens the loads.
        return (b * size(x) + h * size(y)) * ALIGN, size(z) * ALIGN


@triton.jit
def load_block(x, at, first, keep, BLOCK: tl.constexpr, HEADDIM: tl.constexpr, HEADDIM_PAD: tl.constexpr,
               TMA: tl.constexpr, CHECK: tl.constexpr):  # fmt: skip
    """Rows first ... first+BLOCK-1 of a slice [BLOCK, HEADDIM_PAD]. With CHECK rows where keep [BLOCK] is False are zero."""
    if TMA:
        blk = x.load([at[0] + first, at[1]])
        if CHECK:
            blk = tl.where(keep[:, None], blk, tl.zeros_like(blk))
        return blk
    else:
        rows = first + tl.arange(0, BLOCK)
        cols = tl.arange(0, HEADDIM_PAD)
        ptrs = x + at[0] + rows[:, None].to(tl.int64) * at[1] + cols[None, :]
        if CHECK:
            mask = keep[:, None]
            if HEADDIM != HEADDIM_PAD:
                mask = mask & (cols[None, :] < HEADDIM)
            return tl.load(ptrs, mask=mask, other=0.0)
        elif HEADDIM != HEADDIM_PAD:
            return tl.load(ptrs, mask=cols[None, :] < HEADDIM, other=0.0)
        else:
            return tl.load(ptrs)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b. "upcast" is for the interpreter, whose product takes bfloat16 bit patterns for integers."""
    if PRECISION == "upcast":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


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
def fixed_range(lo, gaps, BLOCK_K: tl.constexpr):
    """(lo, gaps) where key blocks begin at multiples of BLOCK_K: the hull then opens with keys that no row may see."""
    first = lo // BLOCK_K * BLOCK_K
    return first, gaps | (first < lo)


@triton.jit
def has_gaps(begin, end_ptr, rows, first, valid):
    """Whether the hull of the rows' keys may hold a key that none of them sees."""
    end_before = tl.load(end_ptr + rows - 1, mask=valid & (rows > first), other=_NEVER)
    return tl.max((begin > end_before).to(tl.int32), 0) > 0


@triton.jit
def count_to(ptr, values, lo, hi, step):
    """How many of the non-decreasing numbers lo ... hi-1 at ptr are <= each value. `step`: a power of two >= hi - lo."""
    step += hi * 0  # a run-time number even where the caller's is a constant
    count = values * 0
    while step > 0:
        further = count + step
        inside = further <= hi - lo
        count = tl.where(inside & (tl.load(ptr + lo + further - 1, mask=inside, other=0) <= values), further, count)
        step = step // 2
    return count


@triton.jit
def seen_keys(keys, begin_ptr, end_ptr, lo, hi, step):
    """Which keys some row of [lo, hi) sees: the first row that ends after a key decides. `step` as in count_to."""
    ended = count_to(end_ptr, keys, lo, hi, step)
    return tl.load(begin_ptr + lo + ended, mask=ended < hi - lo, other=_NEVER) <= keys


@triton.jit
def power_above(n):
    """The smallest power of two >= n, at least 1."""
    step = n * 0 + 1
    while step < n:
        step *= 2
    return step


@triton.jit
def whole_blocks(lo, inner_lo, inner_hi, BLOCK: tl.constexpr):
    """The blocks of the grid lo, lo+BLOCK, ... inside [inner_lo, inner_hi); (lo, lo) where there are none."""
    first = lo + tl.cdiv(inner_lo - lo, BLOCK) * BLOCK
    count = (inner_hi - first) // BLOCK
    first = tl.where(count > 0, first, lo)
    return first, first + tl.maximum(count, 0) * BLOCK


@triton.jit
def edge_count(lo, full_lo, full_hi, hi, BLOCK: tl.constexpr):
    """Blocks of the hull outside its full part."""
    return tl.cdiv(full_lo - lo, BLOCK) + tl.cdiv(hi - full_hi, BLOCK)


@triton.jit
def edge_block(t, lo, full_lo, full_hi, BLOCK: tl.constexpr):
    """First index of edge block t: those left of the full part come first."""
    left = (full_lo - lo) // BLOCK
    return tl.where(t < left, lo + t * BLOCK, full_hi + (t - left) * BLOCK)


@triton.jit
def next_block(first, lo, full_lo, full_hi, hi, BLOCK: tl.constexpr):
    """The edge block behind `first`, and whether the walk begins again: blocks go left part, right part."""
    first += BLOCK
    first = tl.where(first == full_lo, full_hi, first)
    again = first >= hi
    return tl.where(again, lo_edge(lo, full_lo, full_hi), first), again


@triton.jit
def lo_edge(lo, full_lo, full_hi):
    """First index of the first edge block."""
    return tl.where(full_lo > lo, lo, full_hi)


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
def row_range(begin_ptr, end_ptr, seqlen_q, keys, n0, n1, BLOCK_Q: tl.constexpr, FANOUT: tl.constexpr, UNIT: tl.constexpr):
    """(lo, full_lo, full_hi, hi, first, last): key_range transposed, for the keys of the block that lie in [n0, n1).

    begin and end are non-decreasing, so key j is seen by the rows first[j] ... last[j]-1: from the first row that ends
    behind j to the first that begins behind it (no empty row lies between: it would begin behind and end before j).
    lo is rounded down to a multiple of UNIT.
    """
    lo = count_below(end_ptr, seqlen_q, n0 + 1, FANOUT)
    inner_lo = count_below(end_ptr, seqlen_q, n1, FANOUT)
    inner_hi = count_below(begin_ptr, seqlen_q, n0 + 1, FANOUT)
    hi = count_below(begin_ptr, seqlen_q, n1, FANOUT)
    first = lo + count_to(end_ptr, keys, lo, inner_lo, power_above(inner_lo - lo))
    last = inner_hi + count_to(begin_ptr, keys, inner_hi, hi, power_above(hi - inner_hi))
    hi = tl.maximum(lo, hi)
    lo = tl.where(hi > lo, lo // UNIT * UNIT, lo)
    full_lo, full_hi = whole_blocks(lo, tl.maximum(inner_lo, lo), inner_hi, BLOCK_Q)
    return lo, full_lo, full_hi, hi, first, last


@triton.jit
def schedule(pid, blocks, heads, chunk):
    """(block, head) of a program: `chunk` heads go together (their keys stay in cache), block by block, heads innermost."""
    first = pid // (chunk * blocks) * chunk
    within = pid - first * blocks
    width = tl.minimum(chunk, heads - first)
    return within // width, first + within % width


@triton.jit
def wait(ready_ptr, head, FENCE: tl.constexpr):
    """Spin until the key head has arrived; FENCE orders the copy engine's reads behind the flag as well."""
    arrived = tl.atomic_add(ready_ptr, 0, sem="acquire", scope="sys")
    while arrived <= head:
        arrived = tl.atomic_add(ready_ptr, 0, sem="acquire", scope="sys")
    if FENCE:
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.u32 $0, $1;", "=r,r", [arrived], dtype=tl.int32, is_pure=False, pack=1
        )

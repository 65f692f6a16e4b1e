"""The forward kernel's softmax: the online step on a block's scores, sums of p, and keys that nobody sees."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ringflash.kernels.hopper import dialect


@gluon.jit
def row_sum(p, BLOCK_K: gl.constexpr):
    """[64, BLOCK_K] -> [64, 4]: every thread keeps a part of its own, and no shuffle is needed until the end."""
    return gl.sum(gl.sum(gl.reshape(p, [64, BLOCK_K // 8, 4, 2]), 3), 1)


@gluon.jit
def _row_max(x, LAYOUT: gl.constexpr, BLOCK_K: gl.constexpr):
    """Maximum of each row, by short chains."""
    y = gl.max(gl.reshape(x, [64, BLOCK_K // 32, 4, 4, 2]), 4)
    y = gl.max(gl.max(y, 2), 1)
    return gl.convert_layout(gl.max(y, 1), LAYOUT, assert_trivial=True)


@gluon.jit
def _like(x, y):
    """x [64] in the layout of y's rows, without moving anything."""
    return gl.convert_layout(x, gl.SliceLayout(1, y.type.layout), assert_trivial=True)


@gluon.jit
def rows(x, acc):
    """x [64] to be multiplied with acc's rows."""
    return gl.convert_layout(x, gl.SliceLayout(1, acc.type.layout))[:, None]


@gluon.jit
def online(s, ref, sums, scale, intervals, n0, n1, WG: gl.constexpr, MASK: gl.constexpr, CONFIG: gl.constexpr):
    """(p, ref, sums, alpha): the online softmax. ref is the largest x so far, plus SHIFT; -inf where nothing was seen."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    if MASK:
        # Read here and not before, so that the comparisons stay behind the product. One unsigned comparison for both ends.
        begin = intervals.slice(64 * WG, 64).load(LAYOUT)
        end = intervals.slice(CONFIG.BLOCK_Q + 64 * WG, 64).load(LAYOUT)
        after = gl.arange(0, CONFIG.BLOCK_K, layout=gl.SliceLayout(0, s.type.layout))[None, :] - (begin - n0)[:, None]
        length = gl.maximum(gl.minimum(end, n1) - begin, 0)
        s = dialect.where_below(s, after, length[:, None])
    ref_new = gl.maximum(ref, _row_max(s, LAYOUT, CONFIG.BLOCK_K) * scale + CONFIG.SHIFT)
    safe = ref_new
    if MASK:
        safe = gl.where(ref_new == -float("inf"), 0.0, ref_new)
    p = gl.exp2(s * scale - safe[:, None])
    alpha = gl.exp2(ref - safe)
    sums = sums * _like(alpha, sums)[:, None] + row_sum(p, CONFIG.BLOCK_K)
    return p, ref_new, sums, alpha


@gluon.jit
def zero_unseen(v, WG: gl.constexpr, n0, lo, hi, begin_ptr, end_ptr, first, last, CONFIG: gl.constexpr):
    """Zero the V rows of this warpgroup's half whose keys no row of the item sees: they may hold NaN, and 0 * NaN is NaN."""
    HALF: gl.constexpr = CONFIG.BLOCK_K // 2
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for part in gl.static_range(HALF // 16):
        keys = n0 + WG * HALF + part * 16 + gl.arange(0, 16, layout=gl.SliceLayout(1, L))
        ended = keys * 0  # rows that end at or before the key: `end` does not decrease
        for i in gl.static_range(8):
            further = ended + (CONFIG.BLOCK_Q >> i)
            inside = further <= last - first
            ended = gl.where(inside & (gl.load(end_ptr + first + further - 1, mask=inside, other=0) <= keys), further, ended)
        begins = gl.load(begin_ptr + first + ended, mask=ended < last - first, other=dialect.NEVER)
        seen = (begins <= keys) & (keys >= lo) & (keys < hi)
        v_rows = v.slice(WG * HALF + part * 16, 16)
        v_rows.store(gl.where(seen[:, None], v_rows.load(L), 0.0).to(v.dtype))
    fence_async_shared()
    dialect.meet(12, 256)


@gluon.jit
def power(x):
    """(k, 2^-k) with 2^k <= x < 2^(k + 1), both exact, of x > 0; of x = 0 some numbers."""
    k = (x.to(gl.int32, bitcast=True) >> 23) - 127
    return k.to(gl.float32), ((127 - k) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def rounded(p, DTYPE: gl.constexpr):
    """p in 16 bits; pinned, so that two numbers stay in one register throughout."""
    p = p.to(DTYPE)
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [p], dtype=p.dtype, is_pure=False, pack=2)

"""The forward kernel's copy warp: takes items, finds what the rows of each see of every segment, tells, and loads.

An item is BLOCK_Q rows of one head; what they see of a segment is a span of key blocks.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ringflash.kernels.hopper import dialect

_ROWS = gl.constexpr(gl.BlockedLayout([4], [32], [1], [0]))

# Words of a span's record.
PLACE, BATCH, HEAD, FIRST, HI, LO, RIGHT, FULL, COUNT, MASKED, UNSEEN, ONLINE = (gl.constexpr(i) for i in range(12))


@gluon.jit
def _item(item, sizes, BLOCK_Q: gl.constexpr):
    """(batch, head, first row): `chunk` heads go together (their keys stay in cache), last rows first, heads innermost."""
    blocks = gl.cdiv(sizes[0], BLOCK_Q)
    first = item // (sizes[4] * blocks) * sizes[4]
    within = item - first * blocks
    width = gl.minimum(sizes[4], sizes[3] - first)
    head = first + within % width
    return head // sizes[1], head % sizes[1], (blocks - 1 - within // width) * BLOCK_Q


@gluon.jit
def block_at(j, hi, lo, right, full, edges, BLOCK_K: gl.constexpr):
    """(begin, end) of the j-th block walked: right edges, left edges, full blocks from the left. Blocks are counted from hi
    leftwards; the leftmost begins at lo, and what it shares with its neighbour belongs to that.
    """
    i = gl.where(j < right, j, gl.where(j < edges, j + full, right + full - 1 - (j - edges)))
    return gl.maximum(hi - BLOCK_K * (i + 1), lo), hi - BLOCK_K * i


@gluon.jit
def _any(x):
    return gl.max(x.to(gl.int32), 0)


@gluon.jit
def _span(begin_ptr, end_ptr, first, seqlen_q, seqlen_k, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr):
    """What the rows of an item see of a segment: their intervals, and (hi, lo, right, full, count, masked, unseen).

    count blocks, `right` of them edges at the right, `full` seen whole by every row; `masked` blocks are walked first, the
    edges and the leftmost full one; unseen: a block may hold keys that no row sees. Rows past seqlen_q count
    as seeing everything.
    """
    rows = first + gl.arange(0, BLOCK_Q, layout=_ROWS)
    valid = rows < seqlen_q
    begin = gl.load(begin_ptr + rows, mask=valid, other=0)
    end = gl.load(end_ptr + rows, mask=valid, other=dialect.NEVER)
    end_before = gl.load(end_ptr + rows - 1, mask=valid & (rows > first), other=dialect.NEVER)
    filled = valid & (begin < end)
    hi = gl.max(gl.where(filled, end, 0), 0)
    lo = gl.minimum(gl.min(gl.where(filled, begin, dialect.NEVER), 0), hi)
    count = gl.cdiv(hi - lo, BLOCK_K)
    right = gl.minimum(gl.cdiv(gl.maximum(hi - gl.min(end, 0), 0), BLOCK_K), count)
    inner = gl.maximum(hi - gl.maximum(gl.max(begin, 0), lo), 0) // BLOCK_K
    full = gl.maximum(inner - right, 0)
    masked = count - full + (full > 0).to(gl.int32)
    unseen = _any(valid & (begin > end_before))
    if (hi - lo < BLOCK_K) & (hi < seqlen_k):
        unseen = 1
    return begin, end, hi, lo, right, full, count, masked, unseen


@gluon.jit
def _post(spans, c, words, SLOTS: gl.constexpr):
    """Write a record (intervals are there already) and let both warpgroups see it."""
    info, rows, full, empty = spans
    at = gl.arange(0, 16, layout=dialect.WARP)
    record = gl.full([16], 0, gl.int32, dialect.WARP)
    for i in gl.static_range(12):
        record = gl.where(at == i, words[i], record)
    info.index(c % SLOTS).store(record)
    mbarrier.arrive(full.index(c % SLOTS))


@gluon.jit
def _load_block(desc, b, row, h, full, empty, smem, t, STAGES: gl.constexpr, BYTES: gl.constexpr):
    s = t % STAGES
    mbarrier.wait(empty.index(s), ((t // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(s), BYTES)
    dialect.load(desc, [b, row, h, 0], full.index(s), smem.index(s))


@gluon.jit
def _load_span(k_desc, v_desc, b, hk, span, smems, bars, t, CONFIG: gl.constexpr):
    """The span's blocks, K one ahead of V."""
    BLOCK_K: gl.constexpr = CONFIG.BLOCK_K
    STAGES: gl.constexpr = CONFIG.STAGES
    K_BYTES: gl.constexpr = BLOCK_K * CONFIG.HEADDIM * 2
    V_BYTES: gl.constexpr = BLOCK_K * CONFIG.HEADDIM_V * 2
    hi, lo, right, full, count = span
    q_smem, k_smem, v_smem, o_smem = smems
    q_full, q_empty, k_full, k_empty, v_full, v_empty, o_full, o_empty = bars
    edges = count - full
    n0, n1 = block_at(0, hi, lo, right, full, edges, BLOCK_K)
    _load_block(k_desc, b, n0, hk, k_full, k_empty, k_smem, t, STAGES, K_BYTES)
    for j in range(1, count):
        n2, n1 = block_at(j, hi, lo, right, full, edges, BLOCK_K)
        _load_block(k_desc, b, n2, hk, k_full, k_empty, k_smem, t + j, STAGES, K_BYTES)
        _load_block(v_desc, b, n0, hk, v_full, v_empty, v_smem, t + j - 1, STAGES, V_BYTES)
        n0 = n2
    _load_block(v_desc, b, n0, hk, v_full, v_empty, v_smem, t + count - 1, STAGES, V_BYTES)


@gluon.jit
def producer(q_desc, k_descs, v_descs, acc_desc, smems, bars, spans, redo, done, begins, ends, readys, lates, numbers,
              seqlens_k, work_ptr, limit_ns, CONFIG: gl.constexpr):  # fmt: skip
    """The copy warp: takes items, tells the warpgroups what each sees, and loads it."""
    SEGMENTS: gl.constexpr = CONFIG.SEGMENTS
    q_smem, k_smem, v_smem, o_smem = smems
    q_full, q_empty, k_full, k_empty, v_full, v_empty, o_full, o_empty = bars
    info, rows_smem, span_full, span_empty = spans
    items_smem, bad_smem = redo
    sizes, strides = numbers
    t = 0  # blocks loaded
    c = 0  # records posted
    n = 0  # items begun, second pass included
    taken = 0
    at = 0
    again = 0
    item = gl.atomic_add(work_ptr, 1, sem="relaxed")
    passes = 0
    while passes < CONFIG.PASSES:
        if again == 0:
            have = (item < sizes[5]) & (taken < sizes[6])
        else:
            while (at < taken) & (_flag(bad_smem, gl.minimum(at, CONFIG.ITEMS - 1)) == 0):
                at += 1
            have = at < taken
        if have:
            online = again
            place = taken
            this = item
            if again == 0:
                if CONFIG.ADAPT:  # where many items had to be computed again, the others are exact at once
                    bad = gl.load(work_ptr + 1, volatile=True)
                    online = ((bad > 3) & (bad * 8 > item)).to(gl.int32)
                items_smem.index(taken).store(gl.full([1], 0, gl.int32, dialect.WARP) + item)
                taken += 1
                item = sizes[5]
                if taken < sizes[6]:
                    item = gl.atomic_add(work_ptr, 1, sem="relaxed")
            else:
                place = at
                this = gl.max(items_smem.index(at).load(dialect.WARP), 0)
                at += 1
            b, h, first = _item(this, sizes, CONFIG.BLOCK_Q)
            hk = h // sizes[2]
            for w in gl.static_range(2):
                mbarrier.wait(q_empty.index(w), (n & 1) ^ 1)
                mbarrier.expect(q_full.index(w), 64 * CONFIG.HEADDIM * 2)
                dialect.load(q_desc, [b, first + 64 * w, h, 0], q_full.index(w), q_smem.index(w))
            for s in gl.static_range(SEGMENTS):
                mbarrier.wait(span_empty.index(c % CONFIG.SLOTS), ((c // CONFIG.SLOTS) & 1) ^ 1)
                interval_at = b.to(gl.int64) * strides[s]
                begin, end, hi, lo, right, full, count, masked, unseen = _span(
                    begins[s] + interval_at, ends[s] + interval_at, first, sizes[0], seqlens_k[s], CONFIG.BLOCK_Q,
                    CONFIG.BLOCK_K)  # fmt: skip
                rows_smem.index(c % CONFIG.SLOTS).slice(0, CONFIG.BLOCK_Q).store(begin)
                rows_smem.index(c % CONFIG.SLOTS).slice(CONFIG.BLOCK_Q, CONFIG.BLOCK_Q).store(end)
                _post(spans, c, (place, b, h, first, hi, lo, right, full, count, masked, unseen, online), CONFIG.SLOTS)
                c += 1
                if count > 0:
                    if (CONFIG.WAITS >> s) & 1:
                        dialect.wait_ready(readys[s], hk, lates[s], limit_ns)
                    _load_span(k_descs[s], v_descs[s], b, hk, (hi, lo, right, full, count), smems, bars, t, CONFIG)
                    t += count
            if CONFIG.CARRIED:
                if CONFIG.STAGED:  # the warpgroup has begun this item, so that its stage is free
                    for w in gl.static_range(2):
                        mbarrier.wait(o_empty.index(w), n & 1)
                        mbarrier.expect(o_full.index(w), 64 * CONFIG.HEADDIM_V * 4)
                        dialect.load(acc_desc, [b, first + 64 * w, h, 0], o_full.index(w), o_smem.index(w))
            n += 1
        else:
            mbarrier.wait(span_empty.index(c % CONFIG.SLOTS), ((c // CONFIG.SLOTS) & 1) ^ 1)
            _post(spans, c, (-1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), CONFIG.SLOTS)
            c += 1
            passes += 1
            if passes < CONFIG.PASSES:
                mbarrier.wait(done.index(0), 0)
            again = 1
    # The last program: nobody looks any more. Relaxed, since all have what they asked word 0 for; an addition to word 1 that
    # came behind its zero would only be taken for one of the next launch's.
    if gl.atomic_add(work_ptr + 2, 1, sem="relaxed") == sizes[7] - 1:
        gl.store(work_ptr + gl.arange(0, 32, layout=dialect.WARP), 0, mask=gl.arange(0, 32, layout=dialect.WARP) < 3)


@gluon.jit
def _flag(bad_smem, i):
    """Whether either warpgroup wants item i computed again."""
    return gl.max(bad_smem.index(2 * i).load(dialect.WARP), 0) + gl.max(bad_smem.index(2 * i + 1).load(dialect.WARP), 0)

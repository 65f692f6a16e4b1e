"""The backward kernel for Hopper: dQ, dK and dV in one pass over the rows that see a block of 128 keys.

An item is a block of keys of one key head. Two warpgroups keep dK and dV of 64 keys each in registers and walk tiles of rows,
head by head of the group: S^T = K Q^T and dP^T = V dO^T are [keys, rows], so that P^T and dS^T are operands from registers for
dV += P^T dO and dK += dS^T Q. dS meets in shared memory, since dQ = dS K runs over all 128 keys: each warpgroup makes half of
it, and the copy engine adds it to dq in float32. Four roles: the two warpgroups, a copy warp (takes items, loads), a dQ warp.
backward.py prepares what a block's rows are (records, spans) and the rows' statistics: -log2(e) lse and -delta, -inf and 0 for
rows that see nothing and for rows past the last, whose P is so 0 without any comparison.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from ringflash.kernels.hopper import dialect
from ringflash.kernels.hopper.backward_copies import (
    BATCH,
    EDGES,
    FREE,
    FULL_HI,
    GROUP,
    HEAD,
    KEY,
    LEFT,
    LENGTH,
    LO,
    MORE,
    SEGMENT,
    TILES,
    UNSEEN,
    dq_warp,
    edge_row,
    named,
    place_of,
    producer,
    tile_at,
    word_of,
    words_of,
)  # fmt: skip
from ringflash.kernels.hopper.backward_tile import front, keys_times, step, tile

_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # Triton 3.6, and later
_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def _pick(xs, s, SEGMENTS: gl.constexpr):
    x = xs[0]
    for i in gl.static_range(1, SEGMENTS):
        x = gl.where(s == i, xs[i], x)
    return x


@gluon.jit
def _zero_unseen(x_smem, spans_smem, WG: gl.constexpr, CONFIG: gl.constexpr):
    """Zero this warpgroup's K or V rows that no row sees: they may hold NaN, and 0 * NaN is NaN."""
    spans = spans_smem.reshape([256])
    for part in gl.static_range(4):
        first = spans.slice(WG * 64 + part * 16, 16).load(gl.SliceLayout(1, _ROWS))
        last = spans.slice(128 + WG * 64 + part * 16, 16).load(gl.SliceLayout(1, _ROWS))
        rows = x_smem.reshape([128, CONFIG.HEADDIM]).slice(WG * 64 + part * 16, 16)
        rows.store(gl.where((first < last)[:, None], rows.load(_ROWS), 0.0).to(rows.dtype))


@gluon.jit
def _add(ptr, x, b, key, length, hk, nheads_k, add, WG: gl.constexpr, HEADDIM: gl.constexpr):
    """Add x [64, HEADDIM] to a contiguous float32 (batch, seqlen_k, nheads_k, headdim), or store it."""
    key += WG * 64
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, x.type.layout))
    cols = gl.arange(0, HEADDIM, layout=gl.SliceLayout(0, x.type.layout))
    ptr += ((b.to(gl.int64) * length + key) * nheads_k + hk) * HEADDIM
    ptrs = ptr + (rows[:, None] * (nheads_k * HEADDIM) + cols[None, :])
    keep = (rows < length - key)[:, None]
    before = gl.load(ptrs, mask=keep & (add != 0), other=0.0)
    gl.store(ptrs, before + x, mask=keep)


@gluon.jit
def _at(record, i, group, CONFIG: gl.constexpr):
    """(batch, first row, head) of the item's i-th tile."""
    row, g = tile_at(i, word_of(record, TILES, GROUP), words_of(record, GROUP), group, CONFIG.BLOCK_Q)
    return word_of(record, BATCH, GROUP), row, word_of(record, HEAD, GROUP) * group + g


@gluon.jit
def _edge(record, i, group, CONFIG: gl.constexpr):
    """The same of an edge tile; where another warp adds dQ only the row counts."""
    if CONFIG.HANDOVER == 0:
        return _at(record, i, group, CONFIG)
    else:
        lo, left, full_hi = word_of(record, LO, GROUP), word_of(record, LEFT, GROUP), word_of(record, FULL_HI, GROUP)
        return 0, edge_row(i // group, lo, left, full_hi, CONFIG.BLOCK_Q), 0


@gluon.jit
def _full(record, i, group, CONFIG: gl.constexpr):
    """The same of a full tile."""
    if CONFIG.HANDOVER == 0:
        return _at(record, i, group, CONFIG)
    else:
        return 0, 0, 0


@gluon.jit
def _walk(c, m, record, dk, dv, dq_desc, smems, bars, scale2, scale, group, WG: gl.constexpr, CONFIG: gl.constexpr):
    """All tiles of an item: edges, then full tiles. c: tiles walked before."""
    q_smem, dout_smem, k_smem, v_smem, ds_smem, dq_smem, stats_smem, spans_smem, items_smem = smems
    kv_full, kv_empty, full, empty, dq_full, dq_empty, item_full, item_empty = bars
    # Words are read again where they are used: registers are what bounds this kernel.
    if CONFIG.PIPELINE == 0:
        for i in range(word_of(record, EDGES, GROUP) * group):
            at = _edge(record, i, group, CONFIG)
            dk, dv = tile(c, m, at, dk, dv, dq_desc, smems, bars, scale2, scale, WG, True, CONFIG)
            c += 1
        for i in range(word_of(record, EDGES, GROUP) * group, word_of(record, TILES, GROUP) * group):
            at = _full(record, i, group, CONFIG)
            dk, dv = tile(c, m, at, dk, dv, dq_desc, smems, bars, scale2, scale, WG, False, CONFIG)
            c += 1
    else:
        end = c + word_of(record, TILES, GROUP) * group
        s, parity = place_of(c, CONFIG.STAGES)
        before = _full(record, 0, group, CONFIG)
        if word_of(record, EDGES, GROUP) > 0:
            before = _edge(record, 0, group, CONFIG)
        mbarrier.wait(full.index(s), parity)
        x = warpgroup_mma_wait(0, [keys_times(k_smem, q_smem, c, s, WG, CONFIG)])
        p, dp_t = front(x, v_smem, dout_smem, stats_smem, spans_smem, c, s, before[1], scale2, WG, True, CONFIG)
        dp = warpgroup_mma_wait(0, [dp_t])
        c += 1
        s, parity = place_of(c, CONFIG.STAGES)
        mbarrier.wait(full.index(s), parity, pred=c < end)
        for i in range(1, word_of(record, EDGES, GROUP) * group):
            at = _edge(record, i, group, CONFIG)
            p, dp, dk, dv = step(c, m, c + 1 < end, before, at, p, dp, dk, dv, dq_desc, smems, bars, scale2, scale, WG,
                                 True, False, CONFIG)  # fmt: skip
            before = at
            c += 1
        for i in range(gl.maximum(1, word_of(record, EDGES, GROUP) * group), word_of(record, TILES, GROUP) * group):
            at = _full(record, i, group, CONFIG)
            p, dp, dk, dv = step(c, m, c + 1 < end, before, at, p, dp, dk, dv, dq_desc, smems, bars, scale2, scale, WG,
                                 False, False, CONFIG)  # fmt: skip
            before = at
            c += 1
        p, dp, dk, dv = step(c, m, False, before, before, p, dp, dk, dv, dq_desc, smems, bars, scale2, scale, WG, False, True,
                             CONFIG)  # fmt: skip
    return c, dk, dv


@gluon.jit
def _consumer(WG: gl.constexpr, dq_desc, smems, bars, dks, dvs, numbers, scale2, scale, add, CONFIG: gl.constexpr):
    """One warpgroup: dK and dV of 64 keys, half of dQ."""
    q_smem, dout_smem, k_smem, v_smem, ds_smem, dq_smem, stats_smem, spans_smem, items_smem = smems
    kv_full, kv_empty, full, empty, dq_full, dq_empty, item_full, item_empty = bars
    items, blocks, heads, chunk, nheads_k, group, record_stride, limit, wave, order, limit_ns = numbers
    LD: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.HEADDIM, 16])
    c = 0
    m = 0
    n = 0
    mbarrier.wait(item_full.index(0), 0)
    more = word_of(items_smem.index(0), MORE, GROUP)
    while more > 0:
        record = items_smem.index(n & 1)
        dk = gl.zeros([64, CONFIG.HEADDIM], gl.float32, LD)
        dv = gl.zeros([64, CONFIG.HEADDIM], gl.float32, LD)
        if word_of(record, TILES, GROUP) > 0:
            mbarrier.wait(kv_full.index(0), m & 1)
            if word_of(record, UNSEEN, GROUP) > 0:
                _zero_unseen(k_smem.index(0), spans_smem, WG, CONFIG)
                _zero_unseen(v_smem.index(0), spans_smem, WG, CONFIG)
                fence_async_shared()
                _barrier()  # here, not in the loops
            c, dk, dv = _walk(c, m, record, dk, dv, dq_desc, smems, bars, scale2, scale, group, WG, CONFIG)
            mbarrier.arrive(kv_empty.index(0))
            m += 1
        s, key, length = word_of(record, SEGMENT, GROUP), word_of(record, KEY, GROUP), word_of(record, LENGTH, GROUP)
        b, hk, tiles = word_of(record, BATCH, GROUP), word_of(record, HEAD, GROUP), word_of(record, TILES, GROUP)
        mbarrier.arrive(item_empty.index(n & 1))
        n += 1
        if not CONFIG.FOLD:
            dk = dk * scale
        if (tiles > 0) | (add == 0):
            _add(_pick(dks, s, CONFIG.SEGMENTS), dk, b, key, length, hk, nheads_k, add, WG, CONFIG.HEADDIM)
            _add(_pick(dvs, s, CONFIG.SEGMENTS), dv, b, key, length, hk, nheads_k, add, WG, CONFIG.HEADDIM)
        mbarrier.wait(item_full.index(n & 1), (n >> 1) & 1)
        more = word_of(items_smem.index(n & 1), MORE, GROUP)
    if CONFIG.HANDOVER == 0:
        tma.store_wait(0)
    elif CONFIG.HANDOVER == 2:
        for i in gl.static_range(CONFIG.PLACES):
            named("bar.sync", FREE + i, 288, 4)


@gluon.jit(
    do_not_specialize=[
        "items",
        "blocks",
        "heads",
        "chunk",
        "nheads_k",
        "group",
        "record_stride",
        "limit",
        "wave",
        "order",
        "add",
    ]
)
def kernel(q_desc, dout_desc, dq_desc, stats_desc, spans_desc, k0, k1, k2, k3, k4, k5, k6, k7, v0, v1, v2, v3, v4, v5, v6, v7,
           dks, dvs, counter_ptr, records_ptr, turns_ptr, scale2, scale, items, blocks, heads, chunk,
           nheads_k, group, record_stride, limit, wave, order, limit_ns, add, CONFIG: gl.constexpr):  # fmt: skip
    """One program: see the module. items: blocks * heads (of keys, over the batch); limit: how many items it takes at most;
    wave: how many programs there are at a time; order: of rows (backward_copies)."""
    D: gl.constexpr = CONFIG.HEADDIM
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [CONFIG.STAGES, 1, CONFIG.BLOCK_Q, 1, D], q_desc.layout)
    dout_smem = gl.allocate_shared_memory(q_desc.dtype, [CONFIG.STAGES, 1, CONFIG.BLOCK_Q, 1, D], dout_desc.layout)
    k_smem = gl.allocate_shared_memory(q_desc.dtype, [1, 1, 128, 1, D], k0.layout)
    v_smem = gl.allocate_shared_memory(q_desc.dtype, [1, 1, 128, 1, D], v0.layout)
    ROWS: gl.constexpr = CONFIG.BLOCK_Q if CONFIG.PERMUTE else 128
    COLS: gl.constexpr = 128 if CONFIG.PERMUTE else CONFIG.BLOCK_Q
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLS], q_desc.dtype)
    ds_smem = gl.allocate_shared_memory(q_desc.dtype, [2, ROWS, COLS], ds_layout)
    dq_smem = gl.allocate_shared_memory(gl.float32, [CONFIG.PLACES * 2, 1, 64, 1, 64], dq_desc.layout)
    stats_smem = gl.allocate_shared_memory(gl.float32, [CONFIG.STAGES, 1, 2, CONFIG.BLOCK_Q], stats_desc.layout)
    spans_smem = gl.allocate_shared_memory(gl.int32, [1, 256], spans_desc.layout)
    items_smem = gl.allocate_shared_memory(gl.int32, [2, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    READERS: gl.constexpr = 2 if CONFIG.HANDOVER == 0 else 3
    full = dialect.barriers(CONFIG.STAGES, 1)
    empty, dq_full, dq_empty = full, full, full  # named barriers instead
    if CONFIG.HANDOVER != 2:
        empty = dialect.barriers(CONFIG.STAGES, 2)
        if CONFIG.HANDOVER == 1:
            dq_full = dialect.barriers(CONFIG.PLACES, 2)
            dq_empty = dialect.barriers(CONFIG.PLACES, 1)
    bars = (dialect.barriers(1, 1), dialect.barriers(1, 2), full, empty, dq_full, dq_empty, dialect.barriers(2, 1),
            dialect.barriers(2, READERS))  # fmt: skip
    smems = (q_smem, dout_smem, k_smem, v_smem, ds_smem, dq_smem, stats_smem, spans_smem, items_smem)
    descs = (q_desc, dout_desc, dq_desc, stats_desc, spans_desc)
    numbers = (items, blocks, heads, chunk, nheads_k, group, record_stride, limit, wave, order, limit_ns)
    ks, vs = (k0, k1, k2, k3, k4, k5, k6, k7), (v0, v1, v2, v3, v4, v5, v6, v7)
    pointers = (counter_ptr, records_ptr)
    if CONFIG.HANDOVER == 0:
        gl.warp_specialize([
            (_consumer, (0, dq_desc, smems, bars, dks, dvs, numbers, scale2, scale, add, CONFIG)),
            (_consumer, (1, dq_desc, smems, bars, dks, dvs, numbers, scale2, scale, add, CONFIG)),
            (producer, (descs, ks, vs, smems, bars, pointers, numbers, CONFIG)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consumer, (0, dq_desc, smems, bars, dks, dvs, numbers, scale2, scale, add, CONFIG)),
            (_consumer, (1, dq_desc, smems, bars, dks, dvs, numbers, scale2, scale, add, CONFIG)),
            (producer, (descs, ks, vs, smems, bars, pointers, numbers, CONFIG)),
            (dq_warp, (dq_desc, smems, bars, turns_ptr, numbers, CONFIG)),
        ], [4, 1, 1], [240, 24, 24])  # fmt: skip

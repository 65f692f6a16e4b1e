"""The backward kernel for Hopper: dQ, dK and dV in one pass over the rows that see a block of 128 keys.

An item is a block of keys of one key head; a program takes one, so that other kernels get multiprocessors in between. Few
items, or the last ones, are cut into parts, each a program's: the last to end adds up what all made of dK and dV. Two
warpgroups keep dK and dV of 64 keys each in registers and walk tiles of rows, the heads of the group innermost: S^T = K Q^T and
dP^T = V dO^T are [keys, rows], so that P^T and dS^T are operands from registers for dV += P^T dO and dK += dS^T Q. dS meets in
shared memory, since dQ = dS K runs over all 128 keys: each warpgroup makes half of it, and the copy engine adds it to dq in
float32. Four roles: the two warpgroups, a copy warp (takes the item, loads), a dQ warp.
backward.py prepares what a block's rows are (records, spans) and the rows' statistics: -log2(e) lse and -delta, -inf and 0 for
rows that see nothing and for rows past the last, whose P is so 0 without any comparison.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ringflash.kernels.hopper import dialect
from ringflash.kernels.hopper.backward_copies import (
    BATCH,
    BEGIN,
    EDGES,
    FREE,
    FULL_HI,
    HEAD,
    KEY,
    LEFT,
    LENGTH,
    LO,
    PART,
    PARTS,
    SEGMENT,
    STOP,
    TILES,
    UNSEEN,
    dq_warp,
    edge_row,
    named,
    producer,
)
from ringflash.kernels.hopper.backward_tile import tile

_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # Triton 3.6, and later
_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


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
    """Add x [64, HEADDIM] to a contiguous (batch, seqlen_k, nheads_k, headdim), or store it."""
    key += WG * 64
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, x.type.layout))
    cols = gl.arange(0, HEADDIM, layout=gl.SliceLayout(0, x.type.layout))
    ptr += ((b.to(gl.int64) * length + key) * nheads_k + hk) * HEADDIM
    ptrs = ptr + (rows[:, None] * (nheads_k * HEADDIM) + cols[None, :])
    keep = (rows < length - key)[:, None]
    before = gl.load(ptrs, mask=keep & (add != 0), other=0.0)
    gl.store(ptrs, before + x, mask=keep)


@gluon.jit
def _sum_at(ptr, part, which: gl.constexpr, x, WG: gl.constexpr, HEADDIM: gl.constexpr):
    """Where a part leaves this warpgroup's x, dK (0) or dV (1)."""
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, x.type.layout))
    cols = gl.arange(0, HEADDIM, layout=gl.SliceLayout(0, x.type.layout))
    ptr += ((part * 2 + which) * 2 + WG).to(gl.int64) * (64 * HEADDIM)
    return ptr + (rows[:, None] * HEADDIM + cols[None, :])


@gluon.jit
def _leave(record, dk, dv, sums_ptr, done_ptr, cut, WG: gl.constexpr, HEADDIM: gl.constexpr):
    """Leave this part's dK and dV for whichever part ends last: whether it is this one."""
    part = dialect.word(record, PART)
    gl.store(_sum_at(sums_ptr, part, 0, dk, WG, HEADDIM), dk)
    gl.store(_sum_at(sums_ptr, part, 1, dv, WG, HEADDIM), dv)
    _barrier()  # before one thread tells of all threads' stores
    done = gl.atomic_add(done_ptr + part % cut * 2 + WG, 1, sem="acq_rel", scope="gpu")
    return done == dialect.word(record, PARTS) - 1


@gluon.jit
def _put(record, ptrs, x, nheads_k, add, WG: gl.constexpr, CONFIG: gl.constexpr):
    """Add or store the item's dK or dV."""
    _add(dialect.pick(ptrs, dialect.word(record, SEGMENT), CONFIG.SEGMENTS), x, dialect.word(record, BATCH),
         dialect.word(record, KEY), dialect.word(record, LENGTH), dialect.word(record, HEAD), nheads_k, add, WG,
         CONFIG.HEADDIM)  # fmt: skip


@gluon.jit
def _put_sum(record, ptrs, which: gl.constexpr, sums_ptr, cut, nheads_k, add, WG: gl.constexpr, CONFIG: gl.constexpr):
    """Add or store dK (0) or dV (1), what all parts left of it, in the order of parts."""
    LD: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.HEADDIM, 16])
    x = gl.zeros([64, CONFIG.HEADDIM], gl.float32, LD)
    for i in range(dialect.word(record, PARTS)):
        part = i * cut + dialect.word(record, PART) % cut
        x += gl.load(_sum_at(sums_ptr, part, which, x, WG, CONFIG.HEADDIM))
    _put(record, ptrs, x, nheads_k, add, WG, CONFIG)


@gluon.jit
def _end(record, part: gl.constexpr, CONFIG: gl.constexpr):
    """How many tiles of each head come before the end of a part of the walk: 1 is the full tiles, 0 and 2 are edges.

    DETERMINISTIC walks down: the edges right of the full tiles, these, the edges left of them.
    """
    edges, tiles = dialect.word(record, EDGES), dialect.word(record, TILES)
    if part < 0:
        return tiles * 0
    elif part == 2:
        return tiles
    else:
        end = edges if part == 0 else tiles
        return end - dialect.word(record, LEFT) if CONFIG.DETERMINISTIC else end


@gluon.jit
def _walk(record, dk, dv, smems, bars, scale2, scale, group, WG: gl.constexpr, CONFIG: gl.constexpr):
    """All tiles of the program's part of the item."""
    # Words are read again where they are used: registers are what bounds this kernel.
    for part in gl.static_range(3 if CONFIG.DETERMINISTIC else 2):
        begin = gl.maximum(_end(record, part - 1, CONFIG) * group, dialect.word(record, BEGIN))
        for i in range(begin, gl.minimum(_end(record, part, CONFIG) * group, dialect.word(record, STOP))):
            row = 0
            if part != 1:
                row = edge_row(i // group, dialect.word(record, LO), dialect.word(record, LEFT),
                               dialect.word(record, TILES), dialect.word(record, FULL_HI), CONFIG)  # fmt: skip
            dk, dv = tile(i, row, dk, dv, smems, bars, scale2, scale, WG, part != 1, CONFIG)
    return dk, dv


@gluon.jit
def _consumer(WG: gl.constexpr, smems, bars, dks, dvs, meeting, nheads_k, group, scale2, scale, add, CONFIG: gl.constexpr):
    """One warpgroup: dK and dV of 64 keys, half of dQ. meeting: what parts of items leave where, and how many items are cut."""
    q_smem, dout_smem, k_smem, v_smem, ds_smem, dq_smem, stats_smem, spans_smem, record = smems
    kv_full, full, told = bars
    LD: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.HEADDIM, 16])
    dk = gl.zeros([64, CONFIG.HEADDIM], gl.float32, LD)
    dv = gl.zeros([64, CONFIG.HEADDIM], gl.float32, LD)
    mbarrier.wait(told.index(0), 0)
    if dialect.word(record, BEGIN) < dialect.word(record, STOP):
        mbarrier.wait(kv_full.index(0), 0)
        if dialect.word(record, UNSEEN) > 0:
            _zero_unseen(k_smem.index(0), spans_smem, WG, CONFIG)
            _zero_unseen(v_smem.index(0), spans_smem, WG, CONFIG)
            fence_async_shared()
            _barrier()  # here, not in the loops
        dk, dv = _walk(record, dk, dv, smems, bars, scale2, scale, group, WG, CONFIG)
    if not CONFIG.FOLD:
        dk = dk * scale
    sums_ptr, done_ptr, cut = meeting
    if dialect.word(record, PARTS) > 1:
        if _leave(record, dk, dv, sums_ptr, done_ptr, cut, WG, CONFIG.HEADDIM):
            _put_sum(record, dks, 0, sums_ptr, cut, nheads_k, add, WG, CONFIG)
            _put_sum(record, dvs, 1, sums_ptr, cut, nheads_k, add, WG, CONFIG)
    elif (dialect.word(record, PARTS) == 1) & ((dialect.word(record, TILES) > 0) | (add == 0)):
        _put(record, dks, dk, nheads_k, add, WG, CONFIG)
        _put(record, dvs, dv, nheads_k, add, WG, CONFIG)
    for i in gl.static_range(CONFIG.PLACES):
        named("bar.sync", FREE + i, 288, 4)


_NUMBERS = ["blocks", "heads", "chunk", "nheads_k", "group", "record_stride", "wave", "cut", "parts", "share", "add"]


@gluon.jit(do_not_specialize=_NUMBERS)
def kernel(q_desc, dout_desc, dq_desc, stats_desc, spans_desc, k0, k1, k2, k3, k4, k5, k6, k7, v0, v1, v2, v3, v4, v5, v6, v7,
           dks, dvs, counter_ptr, records_ptr, turns_ptr, sums_ptr, scale2, scale, blocks, heads, chunk, nheads_k, group,
           record_stride, wave, cut, parts, share, limit_ns, add, CONFIG: gl.constexpr):  # fmt: skip
    """One item, or a part of it: see the module. `wave` programs run at a time; of the blocks * heads items (blocks of keys,
    heads over the batch) the last `cut` are in `parts` (backward_copies). counter, all 0: programs begun; from 32 on, two for
    each item that is cut.
    """
    D: gl.constexpr = CONFIG.HEADDIM
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [CONFIG.STAGES, 1, CONFIG.BLOCK_Q, 1, D], q_desc.layout)
    dout_smem = gl.allocate_shared_memory(q_desc.dtype, [CONFIG.STAGES, 1, CONFIG.BLOCK_Q, 1, D], dout_desc.layout)
    k_smem = gl.allocate_shared_memory(q_desc.dtype, [1, 1, 128, 1, D], k0.layout)
    v_smem = gl.allocate_shared_memory(q_desc.dtype, [1, 1, 128, 1, D], v0.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CONFIG.BLOCK_Q, 128], q_desc.dtype)
    ds_smem = gl.allocate_shared_memory(q_desc.dtype, [2, CONFIG.BLOCK_Q, 128], ds_layout)
    dq_smem = gl.allocate_shared_memory(gl.float32, [CONFIG.PLACES * 2, 1, 64, 1, 64], dq_desc.layout)
    stats_smem = gl.allocate_shared_memory(gl.float32, [CONFIG.STAGES, 1, 2, CONFIG.BLOCK_Q], stats_desc.layout)
    spans_smem = gl.allocate_shared_memory(gl.int32, [1, 256], spans_desc.layout)
    record_smem = gl.allocate_shared_memory(gl.int32, [32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    smems = (q_smem, dout_smem, k_smem, v_smem, ds_smem, dq_smem, stats_smem, spans_smem, record_smem)
    bars = (dialect.barriers(1, 1), dialect.barriers(CONFIG.STAGES, 1), dialect.barriers(1, 1))  # keys, rows, the record
    descs = (q_desc, dout_desc, dq_desc, stats_desc, spans_desc)
    ks, vs = (k0, k1, k2, k3, k4, k5, k6, k7), (v0, v1, v2, v3, v4, v5, v6, v7)
    pointers = (counter_ptr, records_ptr)
    numbers = (blocks, heads, chunk, nheads_k, group, record_stride, wave, limit_ns, (cut, parts, share))
    meeting = (sums_ptr, counter_ptr + 32, cut)
    gl.warp_specialize([
        (_consumer, (0, smems, bars, dks, dvs, meeting, nheads_k, group, scale2, scale, add, CONFIG)),
        (_consumer, (1, smems, bars, dks, dvs, meeting, nheads_k, group, scale2, scale, add, CONFIG)),
        (producer, (descs, ks, vs, smems, bars, pointers, numbers, CONFIG)),
        (dq_warp, (dq_desc, smems, bars, turns_ptr, numbers, CONFIG)),
    ], [4, 1, 1], [240, 24, 24])  # fmt: skip

"""The forward kernel for Hopper: a copy warp feeds two warpgroups of 64 rows, over items taken from a counter.

Softmax: every row keeps a reference and sums exp2(x - reference). Edge blocks and the leftmost full one raise it to the largest
x, as the online softmax does. In the other full blocks it stays, without a maximum and without rescaling, unless those
blocks show that few keys have most of the weight (_attend). Where it stayed in any block, a sum past LIMIT, or a result that is
not finite, shows in the end; such an item is computed again, online throughout, before the program ends. The reference lies
SHIFT above the largest x, so that sums begin far below 1 and a later x may exceed the earlier ones by log2(LIMIT) + SHIFT.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ringflash.kernels.hopper import dialect
from ringflash.kernels.hopper import forward_copies as copies
from ringflash.kernels.hopper import forward_softmax as softmax

_LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _scores(q, k_smem, t, LAYOUT: gl.constexpr, CONFIG: gl.constexpr):
    """Start q k^T of block t."""
    k = k_smem.index(t % CONFIG.STAGES).reshape([CONFIG.BLOCK_K, CONFIG.HEADDIM])
    zero = gl.zeros([64, CONFIG.BLOCK_K], gl.float32, LAYOUT)
    return warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _values(v_smem, t, CONFIG: gl.constexpr):
    return v_smem.index(t % CONFIG.STAGES).reshape([CONFIG.BLOCK_K, CONFIG.HEADDIM_V])


@gluon.jit
def _phase(t, CONFIG: gl.constexpr):
    return (t // CONFIG.STAGES) & 1


@gluon.jit
def _step(q, smems, bars, t, end_t, ref, sums, acc, p, scale, seen, unseen, n0, n1, WG: gl.constexpr,
          MASK: gl.constexpr, ONLINE: gl.constexpr, CONFIG: gl.constexpr):  # fmt: skip
    """Scores and softmax of block t while the values of block t - 1 are multiplied."""
    q_smem, k_smem, v_smem, o_smem = smems
    q_full, q_empty, k_full, k_empty, v_full, v_empty, o_full, o_empty = bars
    rows, lo, hi, begin_ptr, end_ptr, first, last = seen
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.BLOCK_K, 16])
    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.HEADDIM_V, 16])
    LP: gl.constexpr = gl.DotOperandLayout(0, LO, 2)
    dialect.meet(13 + WG, 256)  # the two warpgroups start their products one after the other
    s_t = _scores(q, k_smem, t, LS, CONFIG)
    mbarrier.wait(v_full.index((t - 1) % CONFIG.STAGES), _phase(t - 1, CONFIG))
    acc_t = warpgroup_mma(gl.convert_layout(p, LP), _values(v_smem, t - 1, CONFIG), acc, is_async=True)
    dialect.pass_on(14 - WG, 256)
    s = warpgroup_mma_wait(1, [s_t])
    mbarrier.arrive(k_empty.index(t % CONFIG.STAGES))
    if ONLINE:
        p, ref, sums, alpha = softmax.online(s, ref, sums, scale, rows, n0, n1, WG, MASK, CONFIG)
    else:
        p = gl.exp2(s * scale - ref[:, None])
        sums = sums + softmax.row_sum(p, CONFIG.BLOCK_K)
    # The wait for the next K stands here, not at the loop's top: it keeps ptxas from hoisting the wait below over the softmax.
    mbarrier.wait(k_full.index((t + 1) % CONFIG.STAGES), _phase(t + 1, CONFIG), pred=t + 1 < end_t)
    acc = warpgroup_mma_wait(0, [acc_t])
    mbarrier.arrive(v_empty.index((t - 1) % CONFIG.STAGES))
    if ONLINE:
        acc = acc * softmax.rows(alpha, acc)
    p = softmax.rounded(p, v_smem.dtype)
    if MASK:
        if unseen != 0:
            mbarrier.wait(v_full.index(t % CONFIG.STAGES), _phase(t, CONFIG))
            softmax.zero_unseen(_values(v_smem, t, CONFIG), WG, n0, lo, hi, begin_ptr, end_ptr, first, last, CONFIG)
    return ref, sums, acc, p


@gluon.jit
def _attend(q, smems, bars, t, span, seen, release, scale, ref, sums, acc, online, WG: gl.constexpr, CONFIG: gl.constexpr):
    """Walk a span's blocks: (ref, sums, acc, online). online: 1 moves the reference in every block, 0 only in the masked ones,
    2 is for this span to decide: what its masked blocks held says whether few keys have most of the weight. Then the largest
    had better be a reference, which makes its p a power of two, without rounding.
    """
    q_smem, k_smem, v_smem, o_smem = smems
    q_full, q_empty, k_full, k_empty, v_full, v_empty, o_full, o_empty = bars
    rows, lo, hi, begin_ptr, end_ptr, first, last = seen
    right, full, count, masked, unseen = span
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.BLOCK_K, 16])
    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.HEADDIM_V, 16])
    LP: gl.constexpr = gl.DotOperandLayout(0, LO, 2)
    edges = count - full
    end_t = t + count
    n0, n1 = copies.block_at(0, hi, lo, right, full, edges, CONFIG.BLOCK_K)
    mbarrier.wait(k_full.index(t % CONFIG.STAGES), _phase(t, CONFIG))
    s = warpgroup_mma_wait(0, [_scores(q, k_smem, t, LS, CONFIG)])
    mbarrier.arrive(k_empty.index(t % CONFIG.STAGES))
    p, ref, sums, alpha = softmax.online(s, ref, sums, scale, rows, n0, n1, WG, True, CONFIG)
    acc = acc * softmax.rows(alpha, acc)
    if unseen != 0:
        mbarrier.wait(v_full.index(t % CONFIG.STAGES), _phase(t, CONFIG))
        softmax.zero_unseen(_values(v_smem, t, CONFIG), WG, n0, lo, hi, begin_ptr, end_ptr, first, last, CONFIG)
    p = softmax.rounded(p, v_smem.dtype)
    mbarrier.wait(k_full.index((t + 1) % CONFIG.STAGES), _phase(t + 1, CONFIG), pred=count > 1)
    for j in range(1, edges):
        n0, n1 = copies.block_at(j, hi, lo, right, full, edges, CONFIG.BLOCK_K)
        ref, sums, acc, p = _step(q, smems, bars, t + j, end_t, ref, sums, acc, p, scale, seen, unseen, n0, n1, WG, True, True,
                                  CONFIG)  # fmt: skip
    mbarrier.arrive(release)
    for j in range(gl.maximum(edges, 1), masked):
        ref, sums, acc, p = _step(q, smems, bars, t + j, end_t, ref, sums, acc, p, scale, seen, 0, 0, 0, WG, False, True,
                                  CONFIG)  # fmt: skip
    if not CONFIG.EXACT:
        if (online == 2) & (full > 0):
            at = first + 64 * WG + gl.arange(0, 64, layout=gl.SliceLayout(1, sums.type.layout))
            valid = gl.maximum(gl.minimum(last - first - 64 * WG, 64), 1)
            weight = gl.sum(gl.where(at < last, gl.sum(sums, 1), 0.0), 0) * 2.0**CONFIG.SHIFT / valid
            online = dialect.uniform(((weight < CONFIG.FLAT) | (count <= CONFIG.SHORT)).to(gl.int32))
    until = gl.where(online == 1, count, masked)
    for j in range(masked, until):
        ref, sums, acc, p = _step(q, smems, bars, t + j, end_t, ref, sums, acc, p, scale, seen, 0, 0, 0, WG, False, True,
                                  CONFIG)  # fmt: skip
    if not CONFIG.EXACT:
        for j in range(until, count):
            ref, sums, acc, p = _step(q, smems, bars, t + j, end_t, ref, sums, acc, p, scale, seen, 0, 0, 0, WG, False, False,
                                      CONFIG)  # fmt: skip
    mbarrier.wait(v_full.index((end_t - 1) % CONFIG.STAGES), _phase(end_t - 1, CONFIG))
    acc_t = warpgroup_mma(gl.convert_layout(p, LP), _values(v_smem, end_t - 1, CONFIG), acc, is_async=True)
    acc = warpgroup_mma_wait(0, [acc_t])
    mbarrier.arrive(v_empty.index((end_t - 1) % CONFIG.STAGES))
    return ref, sums, acc, online


@gluon.jit
def _merge(ref, total, acc, acc_in, row_at, keep, max_ptr, sum_ptr, CONFIG: gl.constexpr):
    """Add the carried state: (reference, sum, acc), untouched to the bit where the row saw nothing here."""
    ref_in = gl.load(max_ptr + row_at, mask=keep, other=-float("inf"))
    sum_in = gl.load(sum_ptr + row_at, mask=keep, other=0.0)
    k, _ = softmax.power(total)  # a whole step from our reference: then our weight is a power of two, which rounds nothing
    ref_new = gl.maximum(ref_in, gl.where(total > 0, ref + k, -float("inf")))
    safe = gl.where(ref_new == -float("inf"), 0.0, ref_new)
    ours = gl.where(total > 0, gl.exp2(ref - safe), 0.0)
    theirs = gl.exp2(ref_in - safe)
    acc = acc_in * softmax.rows(theirs, acc) + acc * softmax.rows(ours * 2.0**CONFIG.SHIFT, acc)
    return ref_new, sum_in * theirs + total * ours, acc


@gluon.jit
def _verdict(total, acc, keep, online, passes, bad, work_ptr, CONFIG: gl.constexpr):
    """Whether to store: in the first pass what is in range or was online throughout, in the second what was not."""
    store = 1
    if CONFIG.PASSES > 1:
        if passes == 0:
            if online == 0:
                wrong = gl.where(total <= CONFIG.LIMIT, 0, 1)
                wrong = gl.maximum(wrong, gl.convert_layout(gl.max(gl.where(acc * 0.0 == 0.0, 0, 1), 1), total.type.layout))
                store = dialect.uniform(1 - gl.max(gl.where(keep, wrong, 0), 0))
            bad.store(gl.full([1], 0, gl.int32, dialect.GROUP) + (1 - store))
            if store == 0:
                gl.atomic_add(work_ptr + 1, 1, sem="relaxed")
        else:
            store = gl.max(bad.load(dialect.GROUP), 0)
    return store


@gluon.jit
def _store(WG: gl.constexpr, ref, total, acc, where, o_desc, o_smem, q_smem, max_ptr, sum_ptr, out_ptr, lse_ptr,
           CONFIG: gl.constexpr):  # fmt: skip
    """Write (out, lse), or the state."""
    b, h, first, row_at, keep, acc_at, acc_keep = where
    LIFT: gl.constexpr = 1.0 if CONFIG.CARRIED else 2.0**CONFIG.SHIFT
    if CONFIG.FINISH:
        # Rounded once at lse's size: added first, and then scaled, lse had 1.1 times the error where references were larger.
        gl.store(lse_ptr + row_at, gl.fma(ref, gl.to_tensor(_LN2), gl.log2(total) * _LN2), mask=keep)
        weight = LIFT / gl.where(total == 0.0, 1.0, total)
    else:
        # Without a carried state the reference takes the sum's power of two, so that the sum is 1 to 2; nothing is rounded.
        ref_out = ref
        weight = gl.full([64], 1.0, gl.float32, total.type.layout)
        if not CONFIG.CARRIED:
            k, power = softmax.power(total)
            ref_out = gl.where(total == 0.0, ref, ref + k)
            weight = gl.where(total == 0.0, 0.0, power)
        gl.store(max_ptr + row_at, ref_out, mask=keep)
        gl.store(sum_ptr + row_at, total * weight, mask=keep)
        weight = weight * LIFT
    acc = acc * softmax.rows(weight, acc)
    if CONFIG.STAGED:
        tma.store_wait(0)
        stage = o_smem.index(WG)
        if CONFIG.CARRIED and CONFIG.FINISH:
            stage = dialect.reinterpret(stage, q_smem.dtype, shape=[2, 1, 64, 1, CONFIG.HEADDIM_V], layout=o_desc.layout)
            stage = stage.index(0)
        stage.reshape([64, CONFIG.HEADDIM_V]).store(acc.to(o_desc.dtype))
        fence_async_shared()
        dialect.store(o_desc, [b, first + 64 * WG, h, 0], stage)
    else:
        gl.store(out_ptr + acc_at, acc.to(out_ptr.dtype.element_ty), mask=acc_keep)


@gluon.jit
def _consumer(WG: gl.constexpr, o_desc, smems, bars, spans, redo, done, begins, ends, numbers, acc_ptr, max_ptr, sum_ptr,
              out_ptr, lse_ptr, work_ptr, scale, CONFIG: gl.constexpr):  # fmt: skip
    """One warpgroup: the softmax and both products of 64 rows."""
    q_smem, k_smem, v_smem, o_smem = smems
    q_full, q_empty, k_full, k_empty, v_full, v_empty, o_full, o_empty = bars
    info, rows_smem, span_full, span_empty = spans
    items_smem, bad_smem = redo
    sizes, strides = numbers
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.BLOCK_K, 16])
    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.HEADDIM_V, 16])
    RS: gl.constexpr = gl.SliceLayout(1, LS)
    RO: gl.constexpr = gl.SliceLayout(1, LO)
    if WG == 1:
        dialect.pass_on(13, 256)
    t = 0
    c = 0
    n = 0
    passes = 0
    while passes < CONFIG.PASSES:
        slot = c % CONFIG.SLOTS
        mbarrier.wait(span_full.index(slot), (c // CONFIG.SLOTS) & 1)
        place = dialect.word(info.index(slot), copies.PLACE)
        if place < 0:
            mbarrier.arrive(span_empty.index(slot))
            c += 1
            passes += 1
            if passes < CONFIG.PASSES:
                mbarrier.arrive(done.index(0))
        else:
            b = dialect.word(info.index(slot), copies.BATCH)
            h = dialect.word(info.index(slot), copies.HEAD)
            first = dialect.word(info.index(slot), copies.FIRST)
            last = gl.minimum(first + CONFIG.BLOCK_Q, sizes[0])
            online = 1
            if not CONFIG.EXACT:
                online = 2 - dialect.word(info.index(slot), copies.ONLINE)
            mbarrier.wait(q_full.index(WG), n & 1)
            q = q_smem.index(WG).reshape([64, CONFIG.HEADDIM])
            if CONFIG.Q_REGS:
                q = q.load(gl.DotOperandLayout(0, LS, 2))
                mbarrier.arrive(q_empty.index(WG))
            if CONFIG.CARRIED:
                if CONFIG.STAGED:
                    tma.store_wait(0)
                    mbarrier.arrive(o_empty.index(WG))
            ref = gl.full([64], -float("inf"), gl.float32, RS)
            sums = softmax.row_sum(gl.zeros([64, CONFIG.BLOCK_K], gl.float32, LS), CONFIG.BLOCK_K)
            acc = gl.zeros([64, CONFIG.HEADDIM_V], gl.float32, LO)
            for s in range(CONFIG.SEGMENTS):
                slot = c % CONFIG.SLOTS
                mbarrier.wait(span_full.index(slot), (c // CONFIG.SLOTS) & 1)
                word = info.index(slot)
                hi, lo = dialect.word(word, copies.HI), dialect.word(word, copies.LO)
                count = dialect.word(word, copies.COUNT)
                span = (dialect.word(word, copies.RIGHT), dialect.word(word, copies.FULL), count,
                        dialect.word(word, copies.MASKED), dialect.word(word, copies.UNSEEN))  # fmt: skip
                c += 1
                if count == 0:
                    mbarrier.arrive(span_empty.index(slot))
                else:
                    interval_at = b.to(gl.int64) * dialect.pick(strides, s, CONFIG.SEGMENTS)
                    begin_ptr = dialect.pick(begins, s, CONFIG.SEGMENTS) + interval_at
                    end_ptr = dialect.pick(ends, s, CONFIG.SEGMENTS) + interval_at
                    seen = (rows_smem.index(slot), lo, hi, begin_ptr, end_ptr, first, last)
                    ref, sums, acc, online = _attend(q, smems, bars, t, span, seen, span_empty.index(slot), scale, ref, sums,
                                                     acc, online, WG, CONFIG)  # fmt: skip
                    t += count
            if not CONFIG.Q_REGS:
                mbarrier.arrive(q_empty.index(WG))
            total = gl.convert_layout(gl.sum(sums, 1), RS)
            row = first + 64 * WG + gl.arange(0, 64, layout=RS)
            keep = row < sizes[0]
            store = _verdict(total, acc, keep, online, passes, bad_smem.index(2 * place + WG), work_ptr, CONFIG)
            # Without SHIFT the logarithm of the sum is small, and so is its rounding; acc follows where it is weighted.
            ref = ref - CONFIG.SHIFT
            total = total * 2.0**CONFIG.SHIFT
            row_at = (b.to(gl.int64) * sizes[1] + h) * sizes[0] + row
            acc_row = gl.convert_layout((b.to(gl.int64) * sizes[0] + row) * sizes[1] + h, RO)
            acc_at = acc_row[:, None] * CONFIG.HEADDIM_V + gl.arange(0, CONFIG.HEADDIM_V, layout=gl.SliceLayout(0, LO))[None, :]
            acc_keep = gl.convert_layout(row, RO)[:, None] < sizes[0]
            if CONFIG.CARRIED:
                if CONFIG.STAGED:
                    mbarrier.wait(o_full.index(WG), n & 1)
                    acc_in = o_smem.index(WG).reshape([64, CONFIG.HEADDIM_V]).load(LO)
                else:
                    acc_in = gl.load(acc_ptr + acc_at, mask=acc_keep, other=0.0)
                ref, total, acc = _merge(ref, total, acc, acc_in, row_at, keep, max_ptr, sum_ptr, CONFIG)
            if store != 0:
                where = (b, h, first, row_at, keep, acc_at, acc_keep)
                _store(WG, ref, total, acc, where, o_desc, o_smem, q_smem, max_ptr, sum_ptr, out_ptr, lse_ptr, CONFIG)
            n += 1
    tma.store_wait(0)


@gluon.jit
def kernel(q_desc, k0, k1, k2, k3, k4, k5, k6, k7, v0, v1, v2, v3, v4, v5, v6, v7, acc_desc, o_desc, begins, ends, readys,
           lates, acc_ptr, max_ptr, sum_ptr, out_ptr, lse_ptr, work_ptr, sizes, strides, seqlens_k, limit_ns, scale,
           CONFIG: gl.constexpr):  # fmt: skip
    """One program: see the module. sizes: seqlen_q, nheads_q, group, heads, chunk, items, how many of them a program takes at
    most, and how many programs leave work_ptr as they found it, or 0. work_ptr: int32 (3,), zeros at first: the next item, how
    many half items were wrong, and how many programs are done.
    """
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2, 1, 64, 1, CONFIG.HEADDIM], q_desc.layout)
    k_smem = gl.allocate_shared_memory(k0.dtype, [CONFIG.STAGES, 1, CONFIG.BLOCK_K, 1, CONFIG.HEADDIM], k0.layout)
    v_smem = gl.allocate_shared_memory(v0.dtype, [CONFIG.STAGES, 1, CONFIG.BLOCK_K, 1, CONFIG.HEADDIM_V], v0.layout)
    if CONFIG.STAGED:
        if CONFIG.CARRIED:
            o_smem = gl.allocate_shared_memory(acc_desc.dtype, [2, 1, 64, 1, CONFIG.HEADDIM_V], acc_desc.layout)
        else:
            o_smem = gl.allocate_shared_memory(o_desc.dtype, [2, 1, 64, 1, CONFIG.HEADDIM_V], o_desc.layout)
    else:
        o_smem = q_smem
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    info = gl.allocate_shared_memory(gl.int32, [CONFIG.SLOTS, 16], flat)
    rows = gl.allocate_shared_memory(gl.int32, [CONFIG.SLOTS, 2 * CONFIG.BLOCK_Q], flat)
    items = gl.allocate_shared_memory(gl.int32, [CONFIG.ITEMS, 1], flat)
    bad = gl.allocate_shared_memory(gl.int32, [2 * CONFIG.ITEMS, 1], flat)
    smems = (q_smem, k_smem, v_smem, o_smem)
    bars = (
        dialect.barriers(2, 1), dialect.barriers(2, 1), dialect.barriers(CONFIG.STAGES, 1), dialect.barriers(CONFIG.STAGES, 2),
        dialect.barriers(CONFIG.STAGES, 1), dialect.barriers(CONFIG.STAGES, 2), dialect.barriers(2, 1), dialect.barriers(2, 1),
    )  # fmt: skip
    spans = (info, rows, dialect.barriers(CONFIG.SLOTS, 1), dialect.barriers(CONFIG.SLOTS, 2))
    redo = (items, bad)
    done = dialect.barriers(1, 2)
    ks = (k0, k1, k2, k3, k4, k5, k6, k7)
    vs = (v0, v1, v2, v3, v4, v5, v6, v7)
    numbers = (dialect.numbers(sizes, 8), dialect.numbers(strides, CONFIG.SEGMENTS))
    lengths = dialect.numbers(seqlens_k, CONFIG.SEGMENTS)
    limit_ns = dialect.number(limit_ns)
    gl.warp_specialize([
        (_consumer, (0, o_desc, smems, bars, spans, redo, done, begins, ends, numbers, acc_ptr, max_ptr, sum_ptr, out_ptr,
                     lse_ptr, work_ptr, scale, CONFIG)),
        (_consumer, (1, o_desc, smems, bars, spans, redo, done, begins, ends, numbers, acc_ptr, max_ptr, sum_ptr, out_ptr,
                     lse_ptr, work_ptr, scale, CONFIG)),
        (copies.producer, (q_desc, ks, vs, acc_desc, smems, bars, spans, redo, done, begins, ends, readys, lates, numbers,
                           lengths, work_ptr, limit_ns, CONFIG)),
    ], [4, 1], [CONFIG.REGS, CONFIG.COPY_REGS])  # fmt: skip

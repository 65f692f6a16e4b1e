"""One tile of rows of the Hopper backward, as one warpgroup computes it: five products, the exponentials, dS."""

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
from ringflash.kernels.hopper.backward_copies import FREE, MEET, READ, STAGED, add_dq, named, place_of


@gluon.jit
def _pin(x, PACK: gl.constexpr):
    """x computed here and not later: the compiler moves arithmetic over products in flight. PACK: elements of 32 bits."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=PACK)


@gluon.jit
def _keys(x_smem, c, CONFIG: gl.constexpr):
    """K or V. The place, always 0, depends on the tile for the compiler, which would keep many addresses in registers."""
    return x_smem.index(c >> 30).reshape([128, CONFIG.HEADDIM])


@gluon.jit
def keys_times(x_smem, rows_smem, c, s, WG: gl.constexpr, CONFIG: gl.constexpr):
    """Start K Q^T or V dO^T of this warpgroup's keys: [64, BLOCK_Q]."""
    LT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.BLOCK_Q, 16])
    x = _keys(x_smem, c, CONFIG).slice(WG * 64, 64)
    rows = rows_smem.index(s).reshape([CONFIG.BLOCK_Q, CONFIG.HEADDIM]).permute((1, 0))
    return warpgroup_mma(x, rows, gl.zeros([64, CONFIG.BLOCK_Q], gl.float32, LT), use_acc=False, is_async=True)


@gluon.jit
def _exponents(x, stats_smem, spans_smem, s, row, scale2, WG: gl.constexpr, MASK: gl.constexpr, CONFIG: gl.constexpr):
    """scale2 S^T - log2(e) lse, -inf where the row does not see the key; P^T is exp2 of it."""
    LT: gl.constexpr = x.type.layout
    stat = stats_smem.index(s).reshape([2 * CONFIG.BLOCK_Q]).slice(0, CONFIG.BLOCK_Q).load(gl.SliceLayout(0, LT))
    x = x * scale2 + stat[None, :]
    if MASK:
        spans = spans_smem.reshape([256])
        first = spans.slice(WG * 64, 64).load(gl.SliceLayout(1, LT)) - row
        last = spans.slice(128 + WG * 64, 64).load(gl.SliceLayout(1, LT)) - row
        rows = gl.arange(0, CONFIG.BLOCK_Q, layout=gl.SliceLayout(0, LT))
        x = gl.where((rows[None, :] >= first[:, None]) & (rows[None, :] < last[:, None]), x, -float("inf"))
    return x


@gluon.jit
def front(x, v_smem, dout_smem, stats_smem, spans_smem, c, s, row, scale2, WG: gl.constexpr, MASK: gl.constexpr,
           CONFIG: gl.constexpr):  # fmt: skip
    """(P^T, dP^T on its way) from scores. EARLY: an edge tile compares first, while dP takes no registers yet."""
    EARLY: gl.constexpr = MASK and CONFIG.HEADDIM == 128
    if EARLY:
        x = _exponents(x, stats_smem, spans_smem, s, row, scale2, WG, MASK, CONFIG)
    dp_t = keys_times(v_smem, dout_smem, c, s, WG, CONFIG)
    if not EARLY:
        x = _exponents(x, stats_smem, spans_smem, s, row, scale2, WG, MASK, CONFIG)
    return gl.exp2(x), dp_t


@gluon.jit
def _score_gradients(p, dp, stats_smem, s, scale, CONFIG: gl.constexpr):
    """dS^T = P^T * (dP^T - delta), with FOLD times the softmax scale (which the statistics hold then)."""
    stat = stats_smem.index(s).reshape([2 * CONFIG.BLOCK_Q]).slice(CONFIG.BLOCK_Q, CONFIG.BLOCK_Q)
    stat = stat.load(gl.SliceLayout(0, p.type.layout))
    if CONFIG.FOLD:
        return p * (dp * scale + stat[None, :])
    else:
        return p * (dp + stat[None, :])


@gluon.jit
def _share(ds, ds_smem, b, WG: gl.constexpr, CONFIG: gl.constexpr):
    """dS^T of this warpgroup into shared memory, for both.

    PERMUTE: as dS [rows, keys], row 8j + 2i + e at 8j + 4e + i: then the threads that store rows of dQ at the same time hit
    different banks.
    """
    if CONFIG.PERMUTE:
        x = gl.reshape(gl.permute(ds, (1, 0)), [CONFIG.BLOCK_Q // 8, 4, 2, 64])
        x = gl.reshape(gl.permute(x, (0, 2, 1, 3)), [CONFIG.BLOCK_Q, 64])
        ds_smem.index(b).slice(WG * 64, 64, dim=1).store(x)
    else:
        ds_smem.index(b).slice(WG * 64, 64).store(ds)
    fence_async_shared()


@gluon.jit
def _times_keys(ds_smem, k_smem, c, WG: gl.constexpr, CONFIG: gl.constexpr):
    """Start this warpgroup's half of dQ = dS K: [64, 64]."""
    LQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    k = _keys(k_smem, c, CONFIG)
    ds = ds_smem.index(c & 1)
    if not CONFIG.PERMUTE:
        ds = ds.permute((1, 0))
    if CONFIG.HEADDIM == 128:
        k = k.slice(WG * 64, 64, dim=1)
    else:
        ds = ds.slice(WG * 64, 64)
    return warpgroup_mma(ds, k, gl.zeros([64, 64], gl.float32, LQ), use_acc=False, is_async=True)


@gluon.jit
def _stage(dq, dq_desc, dq_smem, dq_full, c, at, scale, WG: gl.constexpr, CONFIG: gl.constexpr):
    """Hand half of dQ to the dQ warp (HANDOVER 1 by mbarrier, 2 by named barrier) or add it from here (0)."""
    place, parity = place_of(c, CONFIG.PLACES)
    b, row, h = at
    if not CONFIG.FOLD:
        dq = dq * scale
    if CONFIG.PERMUTE:
        dq = gl.reshape(gl.permute(gl.reshape(dq, [8, 2, 4, 64]), (0, 2, 1, 3)), [64, 64])
    half = dq_smem.index(place * 2 + WG)
    half.reshape([64, 64]).store(dq)
    fence_async_shared()
    if CONFIG.HANDOVER == 0:
        add_dq(dq_desc, half, WG, b, row, h, CONFIG)
    elif CONFIG.HANDOVER == 1:
        mbarrier.arrive(dq_full.index(place))
    else:
        named("bar.arrive", STAGED + place, 288, 4)


@gluon.jit
def _await_place(dq_empty, c, CONFIG: gl.constexpr):
    """Until dQ may be staged again (HANDOVER 2: see _meet)."""
    place, parity = place_of(c, CONFIG.PLACES)
    if CONFIG.HANDOVER == 0:
        tma.store_wait(CONFIG.PLACES - 1)
    elif CONFIG.HANDOVER == 1:
        mbarrier.wait(dq_empty.index(place), parity ^ 1)


@gluon.jit
def _meet(c, CONFIG: gl.constexpr):
    """Until both warpgroups have shared their dS."""
    if CONFIG.HANDOVER == 2:
        place, parity = place_of(c, CONFIG.PLACES)
        named("bar.sync", FREE + place, 288, 4)
    else:
        dialect.meet(MEET, 256)


@gluon.jit
def _release(empty, s, CONFIG: gl.constexpr):
    """This warpgroup has no more use for the rows in place s."""
    if CONFIG.HANDOVER == 2:
        named("bar.arrive", READ + s, 288, 4)
    else:
        mbarrier.arrive(empty.index(s))


@gluon.jit
def tile(c, m, at, dk, dv, dq_desc, smems, bars, scale2, scale, WG: gl.constexpr, MASK: gl.constexpr, CONFIG: gl.constexpr):
    """PIPELINE 0: one tile from scores to dK. dV runs while the warpgroups meet, dK while dQ is staged."""
    q_smem, dout_smem, k_smem, v_smem, ds_smem, dq_smem, stats_smem, spans_smem, items_smem = smems
    kv_full, kv_empty, full, empty, dq_full, dq_empty, item_full, item_empty = bars
    LA: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    s, parity = place_of(c, CONFIG.STAGES)
    mbarrier.wait(full.index(s), parity)
    x_t = keys_times(k_smem, q_smem, c, s, WG, CONFIG)
    dp_t = keys_times(v_smem, dout_smem, c, s, WG, CONFIG)
    x = warpgroup_mma_wait(1, [x_t])
    p = gl.exp2(_exponents(x, stats_smem, spans_smem, s, at[1], scale2, WG, MASK, CONFIG))
    # never spins: it ends the basic block, so that ptxas cannot move the wait for dP above the exponentials
    mbarrier.wait(kv_full.index(0), m & 1)
    dout = dout_smem.index(s).reshape([CONFIG.BLOCK_Q, CONFIG.HEADDIM])
    if CONFIG.EARLY:
        pb = _pin(p.to(q_smem.dtype), 2)
        dv_t = warpgroup_mma(gl.convert_layout(pb, LA), dout, dv, is_async=True)
        dp = warpgroup_mma_wait(1, [dp_t])
        ds = _score_gradients(p, dp, stats_smem, s, scale, CONFIG).to(q_smem.dtype)
        _share(ds, ds_smem, c & 1, WG, CONFIG)
        _await_place(dq_empty, c, CONFIG)
    else:
        dp = warpgroup_mma_wait(0, [dp_t])
        ds = _score_gradients(p, dp, stats_smem, s, scale, CONFIG).to(q_smem.dtype)
        pb = _pin(p.to(q_smem.dtype), 2)
        _share(ds, ds_smem, c & 1, WG, CONFIG)
        _await_place(dq_empty, c, CONFIG)
        dv_t = warpgroup_mma(gl.convert_layout(pb, LA), dout, dv, is_async=True)
    _meet(c, CONFIG)
    dq_t = _times_keys(ds_smem, k_smem, c, WG, CONFIG)
    dv = warpgroup_mma_wait(1, [dv_t])
    dk_t = warpgroup_mma(gl.convert_layout(ds, LA), q_smem.index(s).reshape([CONFIG.BLOCK_Q, CONFIG.HEADDIM]), dk,
                         is_async=True)  # fmt: skip
    dq = warpgroup_mma_wait(1, [dq_t])
    _stage(dq, dq_desc, dq_smem, dq_full, c, at, scale, WG, CONFIG)
    dk = warpgroup_mma_wait(0, [dk_t])
    _release(empty, s, CONFIG)
    return dk, dv


@gluon.jit
def step(c, m, more, at_before, at, p, dp, dk, dv, dq_desc, smems, bars, scale2, scale, WG: gl.constexpr, MASK: gl.constexpr,
          LAST: gl.constexpr, CONFIG: gl.constexpr):  # fmt: skip
    """PIPELINE 1: what remains of tile c - 1 (from dS on), and tile c up to dP. more: there is a tile c + 1."""
    q_smem, dout_smem, k_smem, v_smem, ds_smem, dq_smem, stats_smem, spans_smem, items_smem = smems
    kv_full, kv_empty, full, empty, dq_full, dq_empty, item_full, item_empty = bars
    LA: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    t = c - 1
    s, parity = place_of(t, CONFIG.STAGES)
    s1, parity1 = place_of(c, CONFIG.STAGES)
    dout = dout_smem.index(s).reshape([CONFIG.BLOCK_Q, CONFIG.HEADDIM])
    q = q_smem.index(s).reshape([CONFIG.BLOCK_Q, CONFIG.HEADDIM])
    ds = _score_gradients(p, dp, stats_smem, s, scale, CONFIG).to(q_smem.dtype)
    pb = _pin(p.to(q_smem.dtype), 2)
    _share(ds, ds_smem, t & 1, WG, CONFIG)
    _await_place(dq_empty, t, CONFIG)
    dv_t = warpgroup_mma(gl.convert_layout(pb, LA), dout, dv, is_async=True)
    dk_t = warpgroup_mma(gl.convert_layout(ds, LA), q, dk, is_async=True)
    _meet(t, CONFIG)
    dq_t = _times_keys(ds_smem, k_smem, t, WG, CONFIG)
    if LAST:
        dv, dk, dq = warpgroup_mma_wait(0, [dv_t, dk_t, dq_t])
        _release(empty, s, CONFIG)
        _stage(dq, dq_desc, dq_smem, dq_full, t, at_before, scale, WG, CONFIG)
    else:
        dv, dk = warpgroup_mma_wait(1, [dv_t, dk_t])
        _release(empty, s, CONFIG)
        x_t = keys_times(k_smem, q_smem, c, s1, WG, CONFIG)
        dq = warpgroup_mma_wait(1, [dq_t])
        _stage(dq, dq_desc, dq_smem, dq_full, t, at_before, scale, WG, CONFIG)
        x = warpgroup_mma_wait(0, [x_t])
        p, dp_t = front(x, v_smem, dout_smem, stats_smem, spans_smem, c, s1, at[1], scale2, WG, MASK, CONFIG)
        mbarrier.wait(kv_full.index(0), m & 1)  # as in _tile
        dp = warpgroup_mma_wait(0, [dp_t])
        s2, parity2 = place_of(c + 1, CONFIG.STAGES)
        mbarrier.wait(full.index(s2), parity2, pred=more)
    return p, dp, dk, dv

"""One tile of rows of the Hopper backward, as one warpgroup computes it: five products, the exponentials, dS."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ringflash.kernels.hopper.backward_copies import FREE, READ, STAGED, named, place_of


@gluon.jit
def _pin(x, PACK: gl.constexpr):
    """x computed here and not later: the compiler moves arithmetic over products in flight. PACK: elements of 32 bits."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=PACK)


@gluon.jit
def _keys(x_smem, i, CONFIG: gl.constexpr):
    """K or V. The place, always 0, depends on the tile for the compiler, which would keep many addresses in registers."""
    return x_smem.index(i >> 30).reshape([128, CONFIG.HEADDIM])


@gluon.jit
def _keys_times(x_smem, rows_smem, i, s, WG: gl.constexpr, CONFIG: gl.constexpr):
    """Start K Q^T or V dO^T of this warpgroup's keys: [64, BLOCK_Q]."""
    LT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.BLOCK_Q, 16])
    x = _keys(x_smem, i, CONFIG).slice(WG * 64, 64)
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
    """dS^T of this warpgroup into shared memory, for both, as dS [rows, keys], row 8j + 2i + e at 8j + 4e + i.

    With the rows in that order the threads that store rows of dQ at the same time hit different banks.
    """
    x = gl.reshape(gl.permute(ds, (1, 0)), [CONFIG.BLOCK_Q // 8, 4, 2, 64])
    x = gl.reshape(gl.permute(x, (0, 2, 1, 3)), [CONFIG.BLOCK_Q, 64])
    ds_smem.index(b).slice(WG * 64, 64, dim=1).store(x)
    fence_async_shared()


@gluon.jit
def _times_keys(ds_smem, k_smem, i, WG: gl.constexpr, CONFIG: gl.constexpr):
    """Start this warpgroup's half of dQ = dS K: [64, 64]."""
    LQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    k = _keys(k_smem, i, CONFIG)
    ds = ds_smem.index(i & 1)
    if CONFIG.HEADDIM == 128:
        k = k.slice(WG * 64, 64, dim=1)
    else:
        ds = ds.slice(WG * 64, 64)
    return warpgroup_mma(ds, k, gl.zeros([64, 64], gl.float32, LQ), use_acc=False, is_async=True)


@gluon.jit
def _stage(dq, dq_smem, place, scale, WG: gl.constexpr, CONFIG: gl.constexpr):
    """Hand half of dQ to the dQ warp, its rows in order again."""
    if not CONFIG.FOLD:
        dq = dq * scale
    dq = gl.reshape(gl.permute(gl.reshape(dq, [8, 2, 4, 64]), (0, 2, 1, 3)), [64, 64])
    dq_smem.index(place * 2 + WG).reshape([64, 64]).store(dq)
    fence_async_shared()
    named("bar.arrive", STAGED + place, 288, 4)


@gluon.jit
def tile(i, row, dk, dv, smems, bars, scale2, scale, WG: gl.constexpr, MASK: gl.constexpr, CONFIG: gl.constexpr):
    """The item's i-th tile from scores to dK. dV runs while the warpgroups meet, dK while dQ is staged. row: where to MASK."""
    q_smem, dout_smem, k_smem, v_smem, ds_smem, dq_smem, stats_smem, spans_smem, record_smem = smems
    kv_full, full, told = bars
    LA: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    s, parity = place_of(i, CONFIG.STAGES)
    mbarrier.wait(full.index(s), parity)
    x_t = _keys_times(k_smem, q_smem, i, s, WG, CONFIG)
    dp_t = _keys_times(v_smem, dout_smem, i, s, WG, CONFIG)
    x = warpgroup_mma_wait(1, [x_t])
    p = gl.exp2(_exponents(x, stats_smem, spans_smem, s, row, scale2, WG, MASK, CONFIG))
    # never spins: it ends the basic block, so that ptxas cannot move the wait for dP above the exponentials
    mbarrier.wait(kv_full.index(0), 0)
    dp = warpgroup_mma_wait(0, [dp_t])
    ds = _score_gradients(p, dp, stats_smem, s, scale, CONFIG).to(q_smem.dtype)
    pb = _pin(p.to(q_smem.dtype), 2)
    _share(ds, ds_smem, i & 1, WG, CONFIG)
    dout = dout_smem.index(s).reshape([CONFIG.BLOCK_Q, CONFIG.HEADDIM])
    dv_t = warpgroup_mma(gl.convert_layout(pb, LA), dout, dv, is_async=True)
    place, parity = place_of(i, CONFIG.PLACES)
    named("bar.sync", FREE + place, 288, 4)  # dS of both is there, and dQ may be staged
    dq_t = _times_keys(ds_smem, k_smem, i, WG, CONFIG)
    dv = warpgroup_mma_wait(1, [dv_t])
    dk_t = warpgroup_mma(gl.convert_layout(ds, LA), q_smem.index(s).reshape([CONFIG.BLOCK_Q, CONFIG.HEADDIM]), dk,
                         is_async=True)  # fmt: skip
    dq = warpgroup_mma_wait(1, [dq_t])
    _stage(dq, dq_smem, place, scale, WG, CONFIG)
    dk = warpgroup_mma_wait(0, [dk_t])
    named("bar.arrive", READ + s, 288, 4)  # no more use for the rows
    return dk, dv

"""What the Hopper kernels share: Gluon's names across Triton versions, barriers, fences, and a wait that ends."""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

if hasattr(tma, "async_load"):
    load, store, reduce_add = tma.async_load, tma.async_store, tma.async_atomic_add
else:  # Triton 3.6
    load, store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global

    @builtin
    def reduce_add(tensor_desc, coord, src, _semantic=None):
        """Add a shared tile into global memory by the copy engine."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


@builtin
def reinterpret(smem, dtype, *, shape, layout, _semantic=None):
    """The same shared memory as a tensor of another type (Triton 3.9 made the method public)."""
    method = smem.reinterpret if hasattr(smem, "reinterpret") else smem._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)


# One number per thread of a warpgroup, or of a warp: scalars out of shared memory, and what inline assembly is run on.
GROUP = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
WARP = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))

NEVER = gl.constexpr(1 << 30)  # past every key

# Triton 3.6 ends a reduction over warps by a load that all threads share, later ones by shuffles.
_REDUCED_IS_UNIFORM = gl.constexpr(not hasattr(tma, "async_load"))


@gluon.jit
def number(x):
    """Decode an integer argument (portable.encode says why they travel encoded)."""
    return (x - 0x10000000000) >> 1


@gluon.jit
def numbers(xs, N: gl.constexpr):
    """N of them, in 32 bits."""
    ys = ()
    for i in gl.static_range(N):
        ys = ys + (number(xs[i]).to(gl.int32),)  # noqa: RUF005
    return ys


@gluon.jit
def pick(xs, s, SEGMENTS: gl.constexpr):
    """xs[s] for a run-time s: a chain of selects."""
    x = xs[0]
    for i in gl.static_range(1, SEGMENTS):
        x = gl.where(s == i, xs[i], x)
    return x


@gluon.jit
def word(record, i: gl.constexpr, LAYOUT: gl.constexpr = GROUP):
    """Word i of a record in shared memory, for a role whose threads are LAYOUT."""
    return gl.max(record.slice(i, 1).load(LAYOUT), 0)


@gluon.jit
def barriers(N: gl.constexpr, COUNT: gl.constexpr):
    """N mbarriers in shared memory that complete a phase after COUNT arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


@gluon.jit
def meet(ID: gl.constexpr, THREADS: gl.constexpr):
    """Named barrier of the warpgroups that call it (Triton itself uses 0, 1 and the first few)."""
    lanes = gl.arange(0, 128, layout=GROUP)
    asm: gl.constexpr = f"bar.sync {ID}, {THREADS}; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(asm, "=r,r", [lanes], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pass_on(ID: gl.constexpr, THREADS: gl.constexpr):
    """Arrive at a named barrier without waiting."""
    lanes = gl.arange(0, 128, layout=GROUP)
    asm: gl.constexpr = f"bar.arrive {ID}, {THREADS}; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(asm, "=r,r", [lanes], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def uniform(x):
    """x, an int32 alike in all threads, so that ptxas knows it is: else a branch on it makes all that comes behind divergent,
    with addresses in registers instead of uniform ones.
    """
    if _REDUCED_IS_UNIFORM:
        return x
    else:
        xs = gl.full([1], 0, gl.int32, GROUP) + x
        asm: gl.constexpr = "shfl.sync.idx.b32 $0, $1, 0, 31, -1;"
        return gl.max(gl.inline_asm_elementwise(asm, "=r,r", [xs], dtype=gl.int32, is_pure=False, pack=1), 0)


@gluon.jit
def where_below(x, i, n):
    """x where i, as an unsigned number, is below n, else -inf. (In assembly, or LLVM packs the comparisons into bit masks.)"""
    asm: gl.constexpr = "{ .reg .pred p; setp.lt.u32 p, $2, $3; selp.f32 $0, $1, 0fFF800000, p; }"
    return gl.inline_asm_elementwise(asm, "=f,f,r,r", [x, i, n], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _clock():
    lanes = gl.arange(0, 32, layout=WARP)
    asm: gl.constexpr = "mov.u64 $0, %globaltimer;"
    now = gl.inline_asm_elementwise(asm, "=l,r", [lanes], dtype=gl.int64, is_pure=False, pack=1)
    return gl.max(now, 0)


@gluon.jit
def let_copies_follow():
    """Order what the copy engine does for this warp from here on behind what the warp has read."""
    lanes = gl.arange(0, 32, layout=WARP)
    asm: gl.constexpr = "fence.proxy.async.global; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(asm, "=r,r", [lanes], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_ready(ready_ptr, head, late_ptr, limit_ns):
    """Spin (one warp) until the key head has arrived, then let the copy engine's reads follow; give up after limit_ns:
    *late_ptr = 1.
    """
    arrived = gl.atomic_add(ready_ptr, 0, sem="acquire", scope="sys")
    if arrived <= head:
        begin = _clock()
        while arrived <= head:
            arrived = gl.atomic_add(ready_ptr, 0, sem="acquire", scope="sys")
            if arrived <= head:
                if _clock() - begin > limit_ns:
                    gl.store(late_ptr, 1)
                    arrived = head + 1
    let_copies_follow()

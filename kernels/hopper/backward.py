"""The Hopper backward tile: dQ, dK and dV of all segments in one launch, behind a small one that prepares its numbers."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ringflash.kernels import backward as plain
from ringflash.kernels import blocks, portable
from ringflash.kernels.hopper import backward_kernel, config, host
from ringflash.kernels.hopper.backward_copies import ORDER
from ringflash.kernels.reference import LOG2E, Segment, clear

_NEVER = tl.constexpr(1 << 30)  # past every row
_LOG2E = tl.constexpr(LOG2E)

_launcher = portable.Launcher(backward_kernel.kernel, **host.LAUNCH)

# Heads are walked together while their queries and dO fit in so much; more than the cache, since programs walk the same rows.
CACHE_BYTES = 64 << 20
BLOCK_K = 128
# Rows of statistics that a program of _prepare writes, and numbers of a new dQ that one clears.
_STRETCH, _CLEARED = 2048, 8192
# Counters of a launch: of items, and from 32 on two for each item that is cut (fewer than there are multiprocessors).
_COUNTERS = 1024


@triton.jit
def _spans(begin_ptr, end_ptr, seqlen_q, keys, top):
    """first[j] ... last[j]-1 are the rows that see key j: how many rows end at or before it, and how many begin so.

    Neither number decreases in the row. top: the largest power of two <= seqlen_q.
    """
    first, last = keys * 0, keys * 0
    step = top
    while step > 0:
        inside = first + step <= seqlen_q
        first = tl.where(inside & (tl.load(end_ptr + first + step - 1, mask=inside, other=0) <= keys), first + step, first)
        inside = last + step <= seqlen_q
        last = tl.where(inside & (tl.load(begin_ptr + last + step - 1, mask=inside, other=0) <= keys), last + step, last)
        step = step // 2
    return first, last


@triton.jit
def _record(begin_ptr, end_ptr, record_ptr, spans_ptr, segment, n0, seqlen_k, seqlen_q, top, wait, ready, late,
            UNIT: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """One key block: which rows see each key, and the tiles of rows that follow (words as in backward_copies).

    wait: 1 if the segment has a flag; ready, late: addresses.
    """
    keys = n0 + tl.arange(0, BLOCK_K)
    first, last = _spans(begin_ptr, end_ptr, seqlen_q, keys, top)
    seen = (first < last) & (keys < seqlen_k)
    first = tl.where(seen, first, _NEVER)
    last = tl.where(seen, last, 0)
    tl.store(spans_ptr + tl.arange(0, BLOCK_K), first)
    tl.store(spans_ptr + BLOCK_K + tl.arange(0, BLOCK_K), last)
    hi = tl.max(last, 0)
    lo = tl.minimum(tl.min(first, 0), hi) // UNIT * UNIT
    unseen = tl.max(((first >= last) & (keys < seqlen_k)).to(tl.int32), 0)
    inner_lo, inner_hi = tl.max(first, 0), tl.min(last, 0)
    # A tile may end behind the last row: what lies there has no weight.
    inner_hi = tl.where(inner_hi >= seqlen_q, lo + tl.cdiv(seqlen_q - lo, BLOCK_Q) * BLOCK_Q, inner_hi)
    # A block with a key that no row sees (or past the end) has no full tile: its P would be exp2(-lse).
    full_lo, full_hi = blocks.whole_blocks(lo, tl.minimum(inner_lo, hi), inner_hi, BLOCK_Q)
    left = (full_lo - lo) // BLOCK_Q
    edges = left + tl.cdiv(tl.maximum(hi - full_hi, 0), BLOCK_Q)
    tiles = edges + (full_hi - full_lo) // BLOCK_Q
    word = tl.arange(0, 32)
    record = tl.where(word == 0, lo, tl.where(word == 1, left, tl.where(word == 2, edges, tl.where(word == 3, tiles, 0))))
    record = tl.where(word == 4, full_lo, tl.where(word == 5, full_hi, tl.where(word == 6, unseen, record)))
    record = tl.where(word == 7, segment, tl.where(word == 8, n0, tl.where(word == 9, seqlen_k, record)))
    record = tl.where(word == 10, wait, record)
    record = tl.where(word == 11, ready.to(tl.int32), tl.where(word == 12, (ready >> 32).to(tl.int32), record))
    record = tl.where(word == 13, late.to(tl.int32), tl.where(word == 14, (late >> 32).to(tl.int32), record))
    tl.store(record_ptr + word, record)


@triton.jit
def _prepare(lse_ptr, delta_ptr, stats_ptr, begins, ends, strides, waits, readys, lates, seqlens_k, counter_ptr, records_ptr,
             spans_ptr, dq_ptr, sizes, factor, SEGMENTS: tl.constexpr, UNIT: tl.constexpr, BLOCK_Q: tl.constexpr,
             BLOCK_K: tl.constexpr, STRETCH: tl.constexpr, CLEARED: tl.constexpr, COUNTERS: tl.constexpr):  # fmt: skip
    """Programs below `records` write a record each, those below `others` a stretch of statistics, the rest clear dq.

    The first also clears the counters.
    """
    seqlen_q, padded, top = blocks.size32(sizes[0]), blocks.size32(sizes[1]), blocks.size32(sizes[2])
    key_blocks, records, others = blocks.size32(sizes[3]), blocks.size32(sizes[4]), blocks.size32(sizes[5])
    pid = tl.program_id(0)
    if pid < records:
        if pid == 0:
            tl.store(counter_ptr + tl.arange(0, COUNTERS), 0)
        b, block = pid // key_blocks, pid % key_blocks
        s = 0
        within = block
        before = 0
        for i in tl.static_range(0, SEGMENTS - 1):
            before += tl.cdiv(blocks.size32(seqlens_k[i]), BLOCK_K)
            s = tl.where(block >= before, i + 1, s)
            within = tl.where(block >= before, block - before, within)
        interval_at = b.to(tl.int64) * blocks.size(blocks.pick(strides, s, SEGMENTS))
        at = pid.to(tl.int64)
        _record(blocks.pick(begins, s, SEGMENTS) + interval_at, blocks.pick(ends, s, SEGMENTS) + interval_at,
                records_ptr + at * 32, spans_ptr + at * (2 * BLOCK_K), s, within * BLOCK_K,
                blocks.size32(blocks.pick(seqlens_k, s, SEGMENTS)), seqlen_q, top,
                (blocks.size32(waits) >> s) & 1, blocks.pick(readys, s, SEGMENTS).to(tl.int64),
                blocks.pick(lates, s, SEGMENTS).to(tl.int64), UNIT, BLOCK_Q, BLOCK_K)  # fmt: skip
    elif pid < others:
        stretches = tl.cdiv(padded, STRETCH)
        head = ((pid - records) // stretches).to(tl.int64)
        rows = (pid - records) % stretches * STRETCH + tl.arange(0, STRETCH)
        lse = tl.load(lse_ptr + head * seqlen_q + rows, mask=rows < seqlen_q, other=float("-inf"))
        delta = tl.load(delta_ptr + head * seqlen_q + rows, mask=rows < seqlen_q, other=0.0)
        lse = tl.where(lse == float("-inf"), float("inf"), lse)
        into = stats_ptr + head * 2 * padded + rows
        tl.store(into, lse * -_LOG2E, mask=rows < padded)
        tl.store(into + padded, delta * -factor, mask=rows < padded)
    else:
        at = (pid - others).to(tl.int64) * CLEARED + tl.arange(0, CLEARED)
        tl.store(dq_ptr + at, tl.zeros([CLEARED], tl.float32), mask=at < blocks.size(sizes[6]) * 64)


_launch_prepare = portable.Launcher(_prepare, num_warps=4)


@triton.jit
def _order(records_ptr, table_ptr, key_blocks, sizes, SEGMENTS: tl.constexpr, BLOCK_Q: tl.constexpr):
    """In which order key blocks add to a tile of rows: block j of a segment comes after table[segment, tile] + ORDER of j.

    ORDER: how many blocks of the segment before j have tiles. Of these, those whose rows end before the tile do not touch
    it, all others do, since rows' ends and begins do not decrease; and blocks of earlier segments come first.
    """
    total, tiles = blocks.size32(sizes[0]), blocks.size32(sizes[1])
    b = tl.program_id(0)
    tile = tl.program_id(1) * 64 + tl.arange(0, 64)
    row = tile[:, None] * BLOCK_Q
    records_ptr += b.to(tl.int64) * total * 32
    before = tl.zeros([64], tl.int32)
    for s in tl.static_range(SEGMENTS):
        number = blocks.size32(key_blocks[s])
        count = 0
        ended = tl.zeros([64], tl.int32)
        touched = tl.zeros([64], tl.int32)
        for i in range(0, number, 32):
            block = i + tl.arange(0, 32)
            lo = tl.load(records_ptr + block * 32, mask=block < number, other=0)
            hi = lo + BLOCK_Q * tl.load(records_ptr + block * 32 + 3, mask=block < number, other=0)
            some = (hi > lo).to(tl.int32)
            if tl.program_id(1) == 0:
                tl.store(records_ptr + block * 32 + ORDER, count + tl.cumsum(some, 0) - some, mask=block < number)
            count += tl.sum(some, 0)
            ended += tl.sum(tl.where(hi[None, :] <= row, some[None, :], 0), 1)
            touched += tl.sum(tl.where((lo[None, :] <= row) & (row < hi[None, :]), some[None, :], 0), 1)
        tl.store(table_ptr + (b * SEGMENTS + s) * tiles + tile, before - ended, mask=tile < tiles)
        before += touched
        records_ptr += number * 32


def backward(
    dout: Tensor,
    q: Tensor,
    segments: Sequence[Segment],
    lse: Tensor,
    delta: Tensor,
    scale: float,
    dq: Tensor | None,
    dkv: Sequence[tuple[Tensor, Tensor]] | None,
    *,
    add: bool = True,
    add_dq: bool = True,
    deterministic: bool = False,
) -> None:
    """Add the segments' contributions to dq and, per segment, to (dk, dv) (kernels/README.md has the contract).

    dout, q (batch, seqlen_q, nheads_q, headdim), segments' k, v (batch, seqlen_k, nheads_k, headdim): bfloat16 or float16,
    headdim 64 or 128. lse, delta float32 (batch, nheads_q, seqlen_q). dq, dk, dv of the shapes of q, k, v: float32, contiguous.
    add=False: dk and dv are stored instead, zeros where no row sees the key, and may be of k's dtype. add_dq=False: dq
    is stored. deterministic: dq too is the same to the bit every time, since its parts are added in one order. Where dq
    or dkv is None the portable kernels make the other alone.
    """
    if dq is None or dkv is None:
        return plain.backward(dout, q, segments, lse, delta, scale, dq, dkv, add=add, add_dq=add_dq)
    scale = float(scale)  # an integer would be compiled in
    pairs = [pair for pair in zip(segments, dkv, strict=True) if pair[0].k.numel()]
    if not add_dq and not pairs:
        dq.zero_()
    if q.numel() == 0:
        if not add:
            clear(dkv)
        return None
    constants = _constants(q.shape[3], q.dtype, deterministic)
    dout, q = host.loadable(dout), host.loadable(q)
    for i in range(0, len(pairs), portable.MAX_SEGMENTS):
        part, into = zip(*pairs[i : i + portable.MAX_SEGMENTS], strict=True)
        _one_launch(dout, q, part, (lse, delta), scale, dq, into, constants, (add, add_dq or i > 0))
    return None


@functools.lru_cache(maxsize=64)
def _constants(headdim: int, dtype: torch.dtype, deterministic: bool) -> config.Backward:
    return replace(config.BACKWARD[headdim], FOLD=dtype == torch.bfloat16, DETERMINISTIC=deterministic)


def _one_launch(dout: Tensor, q: Tensor, segments: Sequence[Segment], stats: tuple[Tensor, Tensor], scale: float, dq: Tensor,
                dkv: Sequence[tuple[Tensor, Tensor]], constants: config.Backward, adds: tuple[bool, bool]) -> None:  # fmt: skip
    batch, _, nheads_q, headdim = q.shape
    nheads_k = segments[0].k.shape[2]
    group = nheads_q // nheads_k
    waits, flags = host.waits(segments), host.flags(segments)
    c, known = config.of_launch(constants, SEGMENTS=len(segments), WAITS=waits != 0)
    key_blocks = sum(-(-segment.k.shape[1] // BLOCK_K) for segment in segments)
    heads = batch * nheads_k
    row_bytes = q.shape[1] * group * headdim * 2 * q.element_size()
    chunk = portable.heads_together(row_bytes, 1, heads, cache=CACHE_BYTES)
    views = host.key_views(segments, rows=BLOCK_K, headdim=headdim, headdim_v=headdim)
    with portable.guard(q.device):
        rows, spans, records, counter = _prepared(
            segments, stats, (waits, *flags[:2]), key_blocks, scale if c.FOLD else 1.0, c, None if adds[1] else dq
        )
        turns = _turns(segments, records, (batch * nheads_q, q.shape[1]), c) if c.DETERMINISTIC else counter
        dks, dvs = tuple([dk for dk, _ in dkv]), tuple([dv for _, dv in dkv])
        wave = host.multiprocessors(q.device)
        cut, parts, share = _cuts(key_blocks * heads, wave, -(-q.shape[1] // c.BLOCK_Q) * group, c)
        sums = torch.empty(cut * parts * 2 * BLOCK_K * headdim, dtype=torch.float32, device=q.device)
        args = (
            host.describe(q, c.BLOCK_Q, headdim), host.describe(dout, c.BLOCK_Q, headdim), host.describe(dq, 64, 64), rows,
            spans, *views, dks, dvs, counter, records, turns, sums, scale * LOG2E, scale,
            key_blocks, heads, chunk, nheads_k, group, key_blocks if records.shape[0] > key_blocks else 0,
            wave, cut, parts, share, flags[2], int(adds[0]), known,
        )  # fmt: skip
        key = (c, q.dtype, *[x.dtype for x in (*dks, *dvs)])
        pointers = (*dks, *dvs, counter, records, turns, sums)
        _launcher(key_blocks * heads + cut * (parts - 1), args, key=key, pointers=pointers)


# What a program costs before its first and behind its last tile, in tiles; how few tiles are worth that.
_OVERHEAD, _LEAST = 3, 16


@functools.lru_cache(maxsize=256)
def _cuts(items: int, wave: int, longest: int, c: config.Backward) -> tuple[int, int, int]:
    """(how many items, the last, are cut, into how many parts, what share of 1024 the first part is).

    Items are of `longest` tiles at most; `wave` programs run at a time. Where items are few all are cut, since some may be
    twice as long as the mean (causal). Else the last, incomplete wave is, so that the multiprocessors it leaves idle make all
    second parts in the time of a first: `rounds` of them each. Ordered dQ waits for all items before: nothing is cut.
    """
    whole = 0, 1, 1024
    if c.DETERMINISTIC:
        return whole
    if items <= wave:
        parts = min(2 if 2 * items > wave else 8, longest // _LEAST)
        return (items, parts, 1024 // parts) if parts >= 2 else whole
    tail, spare = items % wave, -items % wave
    if tail == 0:
        return whole
    rounds = -(-tail // spare)
    share = (rounds + (rounds - 1) * _OVERHEAD / longest) / (rounds + 1)
    return (tail, 2, round(1024 * share)) if (1 - share) * longest >= _LEAST else whole


def _prepared(
    segments: Sequence[Segment],
    stats: tuple[Tensor, Tensor],
    flags: tuple[int, host.Pointers, host.Pointers],
    key_blocks: int,
    factor: float,
    c: config.Backward,
    new_dq: Tensor | None,
) -> tuple[TensorDescriptor, TensorDescriptor, Tensor, Tensor]:
    """Statistics and spans as descriptors, records (a row each), the counters at 0, and new_dq at 0, by one launch."""
    (lse, delta), (waits, readys, lates) = stats, flags
    batch, nheads_q, seqlen_q = lse.shape
    begins, ends, strides = host.intervals(segments)
    records = key_blocks * max(segment.begin.shape[0] for segment in segments)
    # A tile may begin at any row (statistics: at a multiple of 4) and is read whole.
    padded = -(-seqlen_q // 64) * 64 + c.BLOCK_Q
    stretches = batch * nheads_q * -(-padded // _STRETCH)
    cleared = 0 if new_dq is None else -(-new_dq.numel() // _CLEARED)
    numbers = torch.empty(records * (32 + 2 * BLOCK_K) + _COUNTERS, dtype=torch.int32, device=lse.device)
    rows = torch.empty(batch * nheads_q * 2 * padded, dtype=torch.float32, device=lse.device)
    counter, table, spans = numbers.split([_COUNTERS, 32 * records, 2 * BLOCK_K * records])
    known = (len(segments), c.BLOCK_Q if c.DETERMINISTIC else 4, c.BLOCK_Q, BLOCK_K, _STRETCH, _CLEARED, _COUNTERS)
    to_clear = rows if new_dq is None else new_dq
    sizes = portable.encode(
        seqlen_q, padded, 1 << (seqlen_q.bit_length() - 1), key_blocks, records, records + stretches,
        0 if new_dq is None else new_dq.numel() // 64,
    )  # fmt: skip
    args = (
        lse, delta, rows, begins, ends, strides, portable.encode(waits)[0], readys, lates,
        portable.encode(*[segment.k.shape[1] for segment in segments]), counter, table, spans, to_clear, sizes, factor, *known,
    )  # fmt: skip
    pointers = (lse, delta, rows, *begins, *ends, *readys, *lates, counter, table, spans, to_clear)
    _launch_prepare(records + stretches + cleared, args, key=known, pointers=pointers)
    return (
        host.describe_as(rows, (batch * nheads_q, 2, padded), (1, 2, c.BLOCK_Q)),
        host.describe_as(spans, (records, 2 * BLOCK_K), (1, 2 * BLOCK_K)),
        table.view(records, 32),
        counter,
    )


def _turns(segments: Sequence[Segment], records: Tensor, rows: tuple[int, int], c: config.Backward) -> Tensor:
    """Whose turn it is at each (head, tile of rows), all 0; then per record's batch row, segment and tile, what _order says."""
    heads, tiles = rows[0], -(-rows[1] // c.BLOCK_Q)
    key_blocks = [-(-segment.k.shape[1] // BLOCK_K) for segment in segments]
    batch = records.shape[0] // sum(key_blocks)
    turns = torch.zeros((heads + batch * len(segments)) * tiles, dtype=torch.int32, device=records.device)
    _order[(batch, -(-tiles // 64))](  # pyright: ignore[reportIndexIssue]
        records, turns[heads * tiles :], portable.encode(*key_blocks), portable.encode(sum(key_blocks), tiles),
        SEGMENTS=len(segments), BLOCK_Q=c.BLOCK_Q, num_warps=4,
    )  # fmt: skip
    return turns


def sources() -> Iterator[tuple[str, Any, dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """(name, kernel, signature, constants, options) of every configuration, to be compiled without a GPU."""
    variants: dict[str, dict[str, Any]] = {"plain": {}, "three segments": {"SEGMENTS": 3, "WAITS": True}}
    variants |= {"deterministic": {"DETERMINISTIC": True}, "rounded": {}}
    for dtype in (torch.bfloat16, torch.float16):
        for headdim, constants in config.BACKWARD.items():
            for name, changes in variants.items():
                c = replace(constants, FOLD=dtype == torch.bfloat16, **changes)
                rounded = dtype if name == "rounded" else torch.float32
                yield f"{str(dtype)[6:]} {headdim} {name}", backward_kernel.kernel, *_signature(c, dtype, rounded), host.LAUNCH


def _signature(c: config.Backward, dtype: torch.dtype, of_keys: torch.dtype) -> tuple[dict[str, Any], dict[str, Any]]:
    """(signature, constants) of the kernel compiled for c; of_keys: dk's and dv's dtype."""
    gradient = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}[of_keys]
    rows, keys = host.descriptor_type(c.BLOCK_Q, c.HEADDIM, dtype), host.descriptor_type(BLOCK_K, c.HEADDIM, dtype)
    slots, constants = host.key_types(c.SEGMENTS, keys, keys)
    signature: dict[str, Any] = {
        "q_desc": rows,
        "dout_desc": rows,
        "dq_desc": host.descriptor_type(64, 64, torch.float32),
        "stats_desc": f"tensordesc<fp32[1, 2, {c.BLOCK_Q}],{host.FLAT[3]!r}>",
        "spans_desc": f"tensordesc<i32[1, {2 * BLOCK_K}],{host.FLAT[2]!r}>",
    }
    signature |= slots
    signature |= dict.fromkeys(("dks", "dvs"), (gradient,) * c.SEGMENTS)
    signature |= {f"{name}_ptr": "*i32" for name in ("counter", "records", "turns")} | {"sums_ptr": "*fp32"}
    names = ("blocks", "heads", "chunk", "nheads_k", "group", "record_stride", "wave", "cut", "parts", "share")
    signature |= {"scale2": "fp32", "scale": "fp32"} | dict.fromkeys(names, "i32")
    signature |= {"limit_ns": "i64", "add": "i32", "CONFIG": "constexpr"}
    return signature, {**constants, "CONFIG": config.Known(c)}

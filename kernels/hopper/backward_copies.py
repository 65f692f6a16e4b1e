"""The Hopper backward's copy warps: one takes an item and loads it, the other adds dQ; and the words all roles talk in."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ringflash.kernels.hopper import dialect

# Words of a record. The host's: first row; edge tiles left of the full ones, edge tiles, tiles; rows of the full tiles; whether
# a key of the block is seen by no row; segment, first key, keys of the segment; whether to wait for it, the addresses of its
# flag and of the word that says late; backward._order's. The copy warp's: batch, key head, first full tile's row, the way on;
# the program's share of the item's tiles (of all heads): BEGIN ... STOP-1; in how many PARTS the item is, 0 where this is not
# one of them; the part's place among all parts.
LO, LEFT, EDGES, TILES, FULL_LO, FULL_HI, UNSEEN, SEGMENT, KEY, LENGTH, WAIT, READY, READY_HI, LATE, LATE_HI, ORDER = (
    gl.constexpr(i) for i in range(16)
)
BATCH, HEAD, FIRST, STEP, BEGIN, STOP, PARTS, PART = (gl.constexpr(i) for i in range(16, 24))
# Items of fewer tiles than this are not cut.
_SHORT = gl.constexpr(24)
# Named barriers (Triton itself uses the first few): dQ is staged in place 0, 1; place 0, 1 is free, and dS there; rows 0, 1 are
# free. An mbarrier's arrival costs a barrier of the warpgroup, and Triton puts another behind it.
STAGED, FREE, READ = (gl.constexpr(i) for i in (6, 8, 10))

# A word a lane, of the copy warps and of a warpgroup.


@gluon.jit
def place_of(c, N: gl.constexpr):
    """(place, parity) of the c-th use of a ring of N."""
    if N == 1:
        return c * 0, c & 1
    elif N == 2:
        return c & 1, (c >> 1) & 1
    else:
        return c % N, (c // N) & 1


@gluon.jit
def _lane(record, word, i: gl.constexpr):
    """Word i of a record that the copy warp holds, a word a lane; it is not negative."""
    return gl.max(gl.where(word == i, record, 0), 0)


@gluon.jit
def _address(record, word, LOW: gl.constexpr, HIGH: gl.constexpr):
    """The int32 pointer of two words."""
    low = gl.sum(gl.where(word == LOW, record, 0), 0).to(gl.int64) & 0xFFFFFFFF
    high = gl.sum(gl.where(word == HIGH, record, 0), 0).to(gl.int64)
    return ((high << 32) | low).to(gl.pointer_type(gl.int32), bitcast=True)


@gluon.jit
def named(WORD: gl.constexpr, barrier, THREADS: gl.constexpr, WARPS: gl.constexpr):
    """bar.sync or bar.arrive at a named barrier chosen at run time."""
    lanes = gl.arange(0, 32 * WARPS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    asm: gl.constexpr = f"{WORD} $2, {THREADS}; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(asm, "=r,r,r", [lanes, lanes * 0 + barrier], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def edge_row(t, lo, left, tiles, full_hi, CONFIG: gl.constexpr):
    """First row of edge tile t: those left of the full tiles come first.

    DETERMINISTIC: all tiles go down. A block's last row is not before that of the block before, so if both go down the latter
    is ahead at every row: programs follow each other a tile apart and wait only at their first, whatever the mask.
    """
    if CONFIG.DETERMINISTIC:
        return lo + (tiles - 1 - t) * CONFIG.BLOCK_Q
    else:
        return gl.where(t < left, lo + t * CONFIG.BLOCK_Q, full_hi + (t - left) * CONFIG.BLOCK_Q)


@gluon.jit
def row_of(t, words, CONFIG: gl.constexpr):
    """First row of the t-th tile that every head of the group walks: the edges, then the full tiles, a ring."""
    lo, left, edges, tiles, full_lo, full_hi, first, step = words
    row = edge_row(t, lo, left, tiles, full_hi, CONFIG)
    if not CONFIG.DETERMINISTIC:
        full = first + (t - edges) * step
        full = gl.where(full >= full_hi, full - (full_hi - full_lo), full)
        row = gl.where(t < edges, row, full)
    return row


@gluon.jit
def _words_of(record, LAYOUT: gl.constexpr):
    """What row_of wants of a record in shared memory."""
    return (dialect.word(record, LO, LAYOUT), dialect.word(record, LEFT, LAYOUT), dialect.word(record, EDGES, LAYOUT),
            dialect.word(record, TILES, LAYOUT), dialect.word(record, FULL_LO, LAYOUT), dialect.word(record, FULL_HI, LAYOUT),
            dialect.word(record, FIRST, LAYOUT), dialect.word(record, STEP, LAYOUT))  # fmt: skip


@gluon.jit
def _walk_of(full_lo, full_hi, end, turn, BLOCK_Q: gl.constexpr):
    """(row of the first full tile, rows to the next); turn: how many waves of programs came before the item's, about.

    Programs that work at the same time should be at the same rows, which the cache then holds. Items whose rows go to the
    `end` begin there together; they come to an end one by one, so the next wave goes up, and so on in turn. Others, a
    window's, go up from where the number of the row says. What decides is the item, not who takes it: dK and dV are the same
    to the bit every time.
    """
    full = gl.maximum((full_hi - full_lo) // BLOCK_Q, 1)
    skip = full - 1 - (full_lo // BLOCK_Q + full - 1) % full
    together = full_hi + BLOCK_Q > end
    down = together & (turn & 1 == 0)
    first = gl.where(down, full_hi - BLOCK_Q, gl.where(together, full_lo, full_lo + skip * BLOCK_Q))
    return first, gl.where(down, -BLOCK_Q, BLOCK_Q)


@gluon.jit
def _item_at(item, blocks, heads, chunk, nheads_k):
    """(batch, key head, block): `chunk` heads go together (their rows stay in cache), first keys first, heads innermost."""
    first = item // (chunk * blocks) * chunk
    within = item - first * blocks
    width = gl.minimum(chunk, heads - first)
    head = first + within % width
    return head // nheads_k, head % nheads_k, within // width


@gluon.jit
def _part_at(program, items, cuts):
    """(item, part): the last `cut` items are in parts, all first parts before all second ones."""
    cut, parts, share = cuts
    among = gl.maximum(program - (items - cut), 0)
    width = gl.maximum(cut, 1)
    return gl.where(program < items, program, items - cut + among % width), among // width


@gluon.jit
def _part_begin(part, parts, share, length):
    """Where a part of `length` tiles begins: the first takes share / 1024 of them, the others the same. At a multiple of 4, so
    that all rings of places begin at their first.
    """
    shares = share + (part - 1) * ((1024 - share) // gl.maximum(parts - 1, 1))
    at = (length.to(gl.int64) * shares >> 10).to(gl.int32) // 4 * 4
    return gl.where(part == 0, 0, gl.where(part >= parts, length, at))


@gluon.jit
def _load_rows(descs, smems, full, i, begin, b, row, h, nheads_q, CONFIG: gl.constexpr):
    """Q, dO and statistics of the item's i-th tile, once its place is free; the first to be loaded is that of `begin`."""
    q_desc, dout_desc, stats_desc = descs
    q_smem, dout_smem, stats_smem = smems
    s, parity = place_of(i, CONFIG.STAGES)
    if i >= begin + CONFIG.STAGES:
        named("bar.sync", READ + s, 288, 1)
    mbarrier.expect(full.index(s), 4 * CONFIG.BLOCK_Q * CONFIG.HEADDIM + 8 * CONFIG.BLOCK_Q)
    dialect.load(q_desc, [b, row, h, 0], full.index(s), q_smem.index(s))
    dialect.load(stats_desc, [b * nheads_q + h, 0, row], full.index(s), stats_smem.index(s))
    dialect.load(dout_desc, [b, row, h, 0], full.index(s), dout_smem.index(s))


@gluon.jit
def _load_keys(k_descs, v_descs, spans_desc, smems, full, record_at, b, key, h, s, CONFIG: gl.constexpr):
    """K, V and the rows that see each key."""
    k_smem, v_smem, spans_smem = smems
    mbarrier.expect(full.index(0), 2 * 128 * CONFIG.HEADDIM * 2 + 2 * 128 * 4)
    dialect.load(spans_desc, [record_at, 0], full.index(0), spans_smem)
    for i in gl.static_range(CONFIG.SEGMENTS):
        if s == i:
            dialect.load(k_descs[i], [b, key, h, 0], full.index(0), k_smem.index(0))
            dialect.load(v_descs[i], [b, key, h, 0], full.index(0), v_smem.index(0))


@gluon.jit
def producer(descs, k_descs, v_descs, smems, bars, pointers, numbers, CONFIG: gl.constexpr):
    """The copy warp: takes an item, tells the others what it is, and loads it."""
    q_desc, dout_desc, dq_desc, stats_desc, spans_desc = descs
    q_smem, dout_smem, k_smem, v_smem, ds_smem, dq_smem, stats_smem, spans_smem, record_smem = smems
    kv_full, full, told = bars
    counter_ptr, records_ptr = pointers
    blocks, heads, chunk, nheads_k, group, record_stride, wave, limit_ns, cuts = numbers
    word = gl.arange(0, 32, layout=dialect.WARP)
    # Not the program's number: an item may wait for those below it (dQ's order), which have been taken then.
    item, part = _part_at(gl.atomic_add(counter_ptr, 1, sem="relaxed"), blocks * heads, cuts)
    b, hk, block = _item_at(item, blocks, heads, chunk, nheads_k)
    record_at = b * record_stride + block
    record = gl.load(records_ptr + record_at.to(gl.int64) * 32 + word)
    full_lo = _lane(record, word, FULL_LO)
    full_hi = _lane(record, word, FULL_HI)
    first, step = _walk_of(full_lo, full_hi, dout_desc.shape[1].to(gl.int32), item // wave, CONFIG.BLOCK_Q)
    cut, parts, share = cuts
    length = _lane(record, word, TILES) * group
    parts = gl.where((item >= blocks * heads - cut) & (length >= _SHORT), parts, 1)
    begin, stop = _part_begin(part, parts, share, length), _part_begin(part + 1, parts, share, length)
    record = gl.where(word == BATCH, b, gl.where(word == HEAD, hk, record))
    record = gl.where(word == BEGIN, begin, gl.where(word == STOP, stop, record))
    record = gl.where(word == PARTS, gl.where(part < parts, parts, 0), record)
    record = gl.where(word == PART, part * cut + item - (blocks * heads - cut), record)
    record_smem.store(gl.where(word == FIRST, first, gl.where(word == STEP, step, record)))
    mbarrier.arrive(told.index(0))
    lo = _lane(record, word, LO)
    left = _lane(record, word, LEFT)
    edges = _lane(record, word, EDGES)
    tiles = _lane(record, word, TILES)
    s = _lane(record, word, SEGMENT)
    key = _lane(record, word, KEY)
    if CONFIG.WAITS:
        if (begin < stop) & (_lane(record, word, WAIT) > 0):
            dialect.wait_ready(_address(record, word, READY, READY_HI), hk, _address(record, word, LATE, LATE_HI),
                               dialect.number(limit_ns))  # fmt: skip
    words = lo, left, edges, tiles, full_lo, full_hi, first, step
    for i in range(begin, stop):
        row = row_of(i // group, words, CONFIG)
        _load_rows((q_desc, dout_desc, stats_desc), (q_smem, dout_smem, stats_smem), full, i, begin, b, row,
                   hk * group + i % group, nheads_k * group, CONFIG)  # fmt: skip
        if i == begin:
            _load_keys(k_descs, v_descs, spans_desc, (k_smem, v_smem, spans_smem), kv_full, record_at, b, key, hk, s,
                       CONFIG)  # fmt: skip
    for i in gl.static_range(CONFIG.STAGES):
        if stop - begin > i:
            named("bar.sync", READ + i, 288, 1)


@gluon.jit
def _await_turn(turn_ptr, before_ptr, order):
    """Spin until all that come before have added to the tile; those were taken earlier, by programs that run or ran."""
    order += gl.load(before_ptr)
    while gl.atomic_add(turn_ptr, 0, sem="acquire", scope="gpu") != order:
        pass
    dialect.let_copies_follow()


@gluon.jit
def _end_turn(turn_ptr):
    """Once this tile's additions are done (not only read from here), it is the next one's turn."""
    lanes = gl.arange(0, 32, layout=dialect.WARP)
    asm: gl.constexpr = (
        "cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff; fence.proxy.async.global; fence.acq_rel.gpu; mov.b32 $0, $1;"
    )
    gl.inline_asm_elementwise(asm, "=r,r", [lanes], dtype=gl.int32, is_pure=False, pack=1)
    gl.atomic_add(turn_ptr, 1, sem="release", scope="gpu")


@gluon.jit
def dq_warp(dq_desc, smems, bars, turns_ptr, numbers, CONFIG: gl.constexpr):
    """Adds what the warpgroups staged to dq, and says when the place is free again."""
    q_smem, dout_smem, k_smem, v_smem, ds_smem, dq_smem, stats_smem, spans_smem, record_smem = smems
    kv_full, full, told = bars
    blocks, heads, chunk, nheads_k, group, record_stride, wave, limit_ns, cuts = numbers
    for i in gl.static_range(CONFIG.PLACES):
        named("bar.arrive", FREE + i, 288, 1)
    mbarrier.wait(told.index(0), 0)
    words = _words_of(record_smem, dialect.WARP)
    b, head = dialect.word(record_smem, BATCH, dialect.WARP), dialect.word(record_smem, HEAD, dialect.WARP)
    begin, stop = dialect.word(record_smem, BEGIN, dialect.WARP), dialect.word(record_smem, STOP, dialect.WARP)
    if CONFIG.DETERMINISTIC:
        row_tiles = (dq_desc.shape[1].to(gl.int32) + CONFIG.BLOCK_Q - 1) // CONFIG.BLOCK_Q
        turns_at = turns_ptr + (b * nheads_k + head) * group * row_tiles
        before_at = turns_ptr + heads * group * row_tiles
        segment = dialect.word(record_smem, SEGMENT, dialect.WARP)
        before_at += (gl.where(record_stride > 0, b, 0) * CONFIG.SEGMENTS + segment) * row_tiles
        order = dialect.word(record_smem, ORDER, dialect.WARP)
    for i in range(begin, stop):
        row, g = row_of(i // group, words, CONFIG), i % group
        place, parity = place_of(i, CONFIG.PLACES)
        named("bar.sync", STAGED + place, 288, 1)
        if CONFIG.DETERMINISTIC:
            turn = turns_at + g * row_tiles + row // CONFIG.BLOCK_Q
            _await_turn(turn, before_at + row // CONFIG.BLOCK_Q, order)
        for w in gl.static_range(2):
            _add_dq(dq_desc, dq_smem.index(place * 2 + w), w, b, row, head * group + g, CONFIG)
        tma.store_wait(0)
        if CONFIG.DETERMINISTIC:
            _end_turn(turn)
        named("bar.arrive", FREE + place, 288, 1)


@gluon.jit
def _add_dq(dq_desc, half, WG: gl.constexpr, b, row, h, CONFIG: gl.constexpr):
    """Half of a tile [64, 64]: the left or right columns of 64 rows, or the upper or lower of 128 rows."""
    if CONFIG.HEADDIM == 128:
        dialect.reduce_add(dq_desc, [b, row, h, 64 * WG], half)
    else:
        dialect.reduce_add(dq_desc, [b, row + 64 * WG, h, 0], half)

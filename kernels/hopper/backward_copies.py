"""The Hopper backward's copy warps: one takes items and loads, the other adds dQ; and the words in which all roles talk."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ringflash.kernels.hopper import dialect

# Words of a record. The host's: first row; edge tiles left of the full ones, edge tiles, tiles; rows of the full tiles; whether
# a key of the block is seen by no row; segment, first key, keys of the segment; whether to wait for it, the addresses of its
# flag and of the word that says late. The copy warp's: batch, key head, first full tile and how to go on, 1.
LO, LEFT, EDGES, TILES, FULL_LO, FULL_HI, UNSEEN, SEGMENT, KEY, LENGTH, WAIT, READY, READY_HI, LATE, LATE_HI = (
    gl.constexpr(i) for i in range(15)
)
BATCH, HEAD, BEGIN, WALK, MORE = (gl.constexpr(i) for i in range(15, 20))
RANK = gl.constexpr(20)  # the host's, for an ordered dQ: backward._rank
# Of full tiles: heads of the group innermost; from the last row; in turn from the last and from the first; see _walk_of.
INNER, DOWN, TURNS, ALIGNED = (gl.constexpr(i) for i in (1, 2, 4, 8))
# Named barriers (Triton itself uses the first few): dS is there; dQ is staged in place 0, 1; place 0, 1 is free (and dS there);
# rows 0, 1, 2 are free. An mbarrier's arrival costs a barrier of the warpgroup, and Triton puts another behind it.
MEET, STAGED, FREE, READ = (gl.constexpr(i) for i in (5, 6, 8, 10))

# A word a lane, of the copy warps and of a warpgroup.
WORDS = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
GROUP = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def number(x):
    """Decode an integer argument (portable.encode says why they travel encoded)."""
    return (x - 0x10000000000) >> 1


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
def word_of(record, i: gl.constexpr, LAYOUT: gl.constexpr):
    """Word i of a record in shared memory, for a role whose threads are LAYOUT."""
    return gl.max(record.slice(i, 1).load(LAYOUT), 0)


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
def edge_row(t, lo, left, full_hi, BLOCK_Q: gl.constexpr):
    """First row of edge tile t: those left of the full tiles come first."""
    return gl.where(t < left, lo + t * BLOCK_Q, full_hi + (t - left) * BLOCK_Q)


@gluon.jit
def tile_at(i, tiles, words, group, BLOCK_Q: gl.constexpr):
    """(first row, head of the group) of an item's i-th tile: the edges, head by head innermost, then the full tiles, a ring."""
    lo, left, edges, full_lo, full_hi, begin, walk = words
    full = gl.maximum(tiles - edges, 1)
    j = gl.maximum(i - edges * group, 0)
    inner = walk & INNER != 0
    t = gl.where(inner, j // group, j % full)
    t = gl.where(walk & DOWN != 0, begin + full - t, begin + t)
    row = full_lo + gl.where(t >= full, t - full, t) * BLOCK_Q
    edge = i < edges * group
    row = gl.where(edge, edge_row(i // group, lo, left, full_hi, BLOCK_Q), row)
    return row, gl.where(edge | inner, gl.where(edge, i, j) % group, j // full)


@gluon.jit
def words_of(record, LAYOUT: gl.constexpr):
    """What tile_at wants of a record in shared memory."""
    return (word_of(record, LO, LAYOUT), word_of(record, LEFT, LAYOUT), word_of(record, EDGES, LAYOUT),
            word_of(record, FULL_LO, LAYOUT), word_of(record, FULL_HI, LAYOUT), word_of(record, BEGIN, LAYOUT),
            word_of(record, WALK, LAYOUT))  # fmt: skip


@gluon.jit
def _walk_of(full_lo, full_hi, end, turn, order, BLOCK_Q: gl.constexpr):
    """(first full tile, INNER and DOWN) of an item; turn: how many times all programs took one before, about.

    Programs that work at the same time should be at the same rows, which the cache then holds. Items whose rows go to the
    `end` begin there together; they come to an end one by one, and so those that follow go up (TURNS). Others, a window's,
    begin where the number of the row says (ALIGNED). What decides is the item, not who takes it: dK and dV are the same to
    the bit every time.
    """
    full = gl.maximum((full_hi - full_lo) // BLOCK_Q, 1)
    aligned = (order & ALIGNED != 0) & (full_hi + BLOCK_Q <= end)
    down = (order & DOWN != 0) | ((order & TURNS != 0) & (turn & 1 == 0))
    down = gl.where(aligned, 0, gl.where(down, DOWN, 0))
    begin = gl.where(aligned, full - 1 - (full_lo // BLOCK_Q + full - 1) % full, gl.where(down != 0, full - 1, 0))
    return begin, down | (order & INNER)


@gluon.jit
def _load_rows(descs, smems, bars, c, b, row, h, nheads_q, CONFIG: gl.constexpr):
    """Q, dO and statistics of a tile, once its place is free."""
    q_desc, dout_desc, stats_desc = descs
    q_smem, dout_smem, stats_smem = smems
    full, empty = bars
    s, parity = place_of(c, CONFIG.STAGES)
    if CONFIG.HANDOVER == 2:
        if c >= CONFIG.STAGES:
            named("bar.sync", READ + s, 288, 1)
    else:
        mbarrier.wait(empty.index(s), parity ^ 1)
    mbarrier.expect(full.index(s), 4 * CONFIG.BLOCK_Q * CONFIG.HEADDIM + 8 * CONFIG.BLOCK_Q)
    dialect.load(q_desc, [b, row, h, 0], full.index(s), q_smem.index(s))
    dialect.load(stats_desc, [b * nheads_q + h, 0, row], full.index(s), stats_smem.index(s))
    dialect.load(dout_desc, [b, row, h, 0], full.index(s), dout_smem.index(s))


@gluon.jit
def _load_keys(k_descs, v_descs, spans_desc, smems, bars, m, record_at, b, key, h, s, CONFIG: gl.constexpr):
    """K, V and the rows that see each key, once the item before has no more use for them."""
    k_smem, v_smem, spans_smem = smems
    full, empty = bars
    mbarrier.wait(empty.index(0), (m & 1) ^ 1)
    mbarrier.expect(full.index(0), 2 * 128 * CONFIG.HEADDIM * 2 + 2 * 128 * 4)
    dialect.load(spans_desc, [record_at, 0], full.index(0), spans_smem)
    for i in gl.static_range(CONFIG.SEGMENTS):
        if s == i:
            dialect.load(k_descs[i], [b, key, h, 0], full.index(0), k_smem.index(0))
            dialect.load(v_descs[i], [b, key, h, 0], full.index(0), v_smem.index(0))


@gluon.jit
def producer(descs, k_descs, v_descs, smems, bars, pointers, numbers, CONFIG: gl.constexpr):
    """The copy warp: takes items, tells the others what each is, and loads it."""
    q_desc, dout_desc, dq_desc, stats_desc, spans_desc = descs
    q_smem, dout_smem, k_smem, v_smem, ds_smem, dq_smem, stats_smem, spans_smem, items_smem = smems
    kv_full, kv_empty, full, empty, dq_full, dq_empty, item_full, item_empty = bars
    counter_ptr, records_ptr = pointers
    items, blocks, heads, chunk, nheads_k, group, record_stride, limit, wave, order, limit_ns = numbers
    word = gl.arange(0, 32, layout=WORDS)
    c = 0  # tiles sent
    m = 0  # blocks of keys sent
    n = 0  # items sent
    item = gl.program_id(0)
    if CONFIG.PERSISTENT:
        item = gl.atomic_add(counter_ptr, 1, sem="relaxed")
    while item < items:
        # `chunk` heads go together (their rows stay in cache), first keys first, heads innermost
        first = item // (chunk * blocks) * chunk
        within = item - first * blocks
        width = gl.minimum(chunk, heads - first)
        head = first + within % width
        b = head // nheads_k
        hk = head % nheads_k
        record_at = b * record_stride + within // width
        record = gl.load(records_ptr + record_at.to(gl.int64) * 32 + word)
        full_lo = _lane(record, word, FULL_LO)
        full_hi = _lane(record, word, FULL_HI)
        end = dout_desc.shape[1].to(gl.int32)
        begin, walk = _walk_of(full_lo, full_hi, end, item // wave, order, CONFIG.BLOCK_Q)
        record = gl.where(word == BATCH, b, gl.where(word == HEAD, hk, record))
        record = gl.where(word == BEGIN, begin, gl.where(word == WALK, walk, gl.where(word == MORE, 1, record)))
        place, parity = place_of(n, 2)
        mbarrier.wait(item_empty.index(place), parity ^ 1)
        items_smem.index(place).store(record)
        mbarrier.arrive(item_full.index(place))
        n += 1
        lo = _lane(record, word, LO)
        left = _lane(record, word, LEFT)
        edges = _lane(record, word, EDGES)
        tiles = _lane(record, word, TILES)
        if tiles > 0:
            s = _lane(record, word, SEGMENT)
            key = _lane(record, word, KEY)
            if CONFIG.WAITS:
                if _lane(record, word, WAIT) > 0:
                    dialect.wait_ready(_address(record, word, READY, READY_HI), _address(record, word, LATE, LATE_HI),
                                       number(limit_ns))  # fmt: skip
            words = lo, left, edges, full_lo, full_hi, begin, walk
            for i in range(tiles * group):
                row, g = tile_at(i, tiles, words, group, CONFIG.BLOCK_Q)
                _load_rows((q_desc, dout_desc, stats_desc), (q_smem, dout_smem, stats_smem), (full, empty), c, b, row,
                           hk * group + g, nheads_k * group, CONFIG)  # fmt: skip
                if i == 0:  # behind the first rows, whose place is free earlier
                    _load_keys(k_descs, v_descs, spans_desc, (k_smem, v_smem, spans_smem), (kv_full, kv_empty), m, record_at,
                               b, key, hk, s, CONFIG)  # fmt: skip
                c += 1
            m += 1
        item = items
        if CONFIG.PERSISTENT:
            if n < limit:
                item = gl.atomic_add(counter_ptr, 1, sem="relaxed")
    place, parity = place_of(n, 2)
    mbarrier.wait(item_empty.index(place), parity ^ 1)
    items_smem.index(place).store(word * 0)
    mbarrier.arrive(item_full.index(place))
    if CONFIG.HANDOVER == 2:
        for i in gl.static_range(CONFIG.STAGES):
            if c > i:
                named("bar.sync", READ + i, 288, 1)


@gluon.jit
def _await_turn(turn_ptr, rank_ptr, rank):
    """Spin until all that come before have added to the tile; those were taken earlier, by programs that run or ran."""
    rank += gl.load(rank_ptr)
    while gl.atomic_add(turn_ptr, 0, sem="acquire", scope="gpu") != rank:
        pass
    lanes = gl.arange(0, 32, layout=WORDS)
    asm: gl.constexpr = "fence.proxy.async.global; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(asm, "=r,r", [lanes], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _end_turn(turn_ptr):
    """Once this tile's additions are done (not only read from here), it is the next one's turn."""
    lanes = gl.arange(0, 32, layout=WORDS)
    asm: gl.constexpr = (
        "cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff; fence.proxy.async.global; fence.acq_rel.gpu; mov.b32 $0, $1;"
    )
    gl.inline_asm_elementwise(asm, "=r,r", [lanes], dtype=gl.int32, is_pure=False, pack=1)
    gl.atomic_add(turn_ptr, 1, sem="release", scope="gpu")


@gluon.jit
def dq_warp(dq_desc, smems, bars, turns_ptr, numbers, CONFIG: gl.constexpr):
    """Adds what the warpgroups staged to dq, and says when the place is free again."""
    q_smem, dout_smem, k_smem, v_smem, ds_smem, dq_smem, stats_smem, spans_smem, items_smem = smems
    kv_full, kv_empty, full, empty, dq_full, dq_empty, item_full, item_empty = bars
    items, blocks, heads, chunk, nheads_k, group, record_stride, limit, wave, order, limit_ns = numbers
    c = 0
    n = 0
    if CONFIG.HANDOVER == 2:
        for i in gl.static_range(CONFIG.PLACES):
            named("bar.arrive", FREE + i, 288, 1)
    mbarrier.wait(item_full.index(0), 0)
    more = word_of(items_smem.index(0), MORE, WORDS)
    while more > 0:
        record = items_smem.index(n & 1)
        words = words_of(record, WORDS)
        b, head, tiles = word_of(record, BATCH, WORDS), word_of(record, HEAD, WORDS), word_of(record, TILES, WORDS)
        if CONFIG.DETERMINISTIC:
            row_tiles = (dq_desc.shape[1].to(gl.int32) + CONFIG.BLOCK_Q - 1) // CONFIG.BLOCK_Q
            turns_at = turns_ptr + (b * nheads_k + head) * group * row_tiles
            ranks_at = turns_ptr + heads * group * row_tiles
            ranks_at += (gl.where(record_stride > 0, b, 0) * CONFIG.SEGMENTS + word_of(record, SEGMENT, WORDS)) * row_tiles
            rank = word_of(record, RANK, WORDS)
        mbarrier.arrive(item_empty.index(n & 1))
        n += 1
        for at in range(tiles * group):
            row, g = tile_at(at, tiles, words, group, CONFIG.BLOCK_Q)
            place, parity = place_of(c, CONFIG.PLACES)
            if CONFIG.HANDOVER == 2:
                named("bar.sync", STAGED + place, 288, 1)
            else:
                mbarrier.wait(dq_full.index(place), parity)
            if CONFIG.DETERMINISTIC:
                turn = turns_at + g * row_tiles + row // CONFIG.BLOCK_Q
                _await_turn(turn, ranks_at + row // CONFIG.BLOCK_Q, rank)
            for w in gl.static_range(2):
                add_dq(dq_desc, dq_smem.index(place * 2 + w), w, b, row, head * group + g, CONFIG)
            tma.store_wait(0)
            if CONFIG.DETERMINISTIC:
                _end_turn(turn)
            if CONFIG.HANDOVER == 2:
                named("bar.arrive", FREE + place, 288, 1)
            else:
                mbarrier.arrive(dq_empty.index(place))
            c += 1
        mbarrier.wait(item_full.index(n & 1), (n >> 1) & 1)
        more = word_of(items_smem.index(n & 1), MORE, WORDS)


@gluon.jit
def add_dq(dq_desc, half, WG: gl.constexpr, b, row, h, CONFIG: gl.constexpr):
    """Half of a tile [64, 64]: the left or right columns of 64 rows, or the upper or lower of 128 rows."""
    if CONFIG.HEADDIM == 128:
        dialect.reduce_add(dq_desc, [b, row, h, 64 * WG], half)
    else:
        dialect.reduce_add(dq_desc, [b, row + 64 * WG, h, 0], half)

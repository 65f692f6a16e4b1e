"""Which keys and rows a program walks, against counting by hand, in Triton's interpreter."""

import kernel_cases
import pytest
import torch
import triton
import triton.language as tl
from kernel_cases import interpreted

from ringflash.kernels import blocks

BLOCK = 16


@pytest.mark.skipif(kernel_cases.INTERPRETED, reason="this is that process")
def test_in_interpreter():
    kernel_cases.run_interpreted(__file__)


@triton.jit
def _key_range(begin_ptr, end_ptr, out_ptr, seen_ptr, seqlen_q, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    rows = tl.arange(0, BLOCK_Q)
    begin, end = blocks.load_interval(begin_ptr, end_ptr, rows, seqlen_q)
    lo, full_lo, full_hi, hi = blocks.key_range(begin, end, rows < seqlen_q, BLOCK_K)
    gaps = blocks.has_gaps(begin, end_ptr, rows, 0, rows < seqlen_q)
    tl.store(out_ptr, lo)
    tl.store(out_ptr + 1, full_lo)
    tl.store(out_ptr + 2, full_hi)
    tl.store(out_ptr + 3, hi)
    tl.store(out_ptr + 4, gaps.to(tl.int32))
    keys = tl.arange(0, 64)
    tl.store(seen_ptr + keys, blocks.seen_keys(keys, begin_ptr, end_ptr, 0, seqlen_q, BLOCK_Q).to(tl.int32))


@triton.jit
def _row_range(begin_ptr, end_ptr, out_ptr, rows_ptr, seqlen_q, n0, n1, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
               UNIT: tl.constexpr):  # fmt: skip
    keys = n0 + tl.arange(0, BLOCK_K)
    lo, full_lo, full_hi, hi, first, last = blocks.row_range(begin_ptr, end_ptr, seqlen_q, keys, n0, n1, BLOCK_Q, 4, UNIT)  # pyright: ignore[reportArgumentType]
    tl.store(out_ptr, lo)
    tl.store(out_ptr + 1, full_lo)
    tl.store(out_ptr + 2, full_hi)
    tl.store(out_ptr + 3, hi)
    tl.store(rows_ptr + tl.arange(0, BLOCK_K), first)
    tl.store(rows_ptr + BLOCK_K + tl.arange(0, BLOCK_K), last)


@triton.jit
def _count_below(ptr, out_ptr, n, value, FANOUT: tl.constexpr):
    tl.store(out_ptr, blocks.count_below(ptr, n, value, FANOUT))


@triton.jit
def _schedule(out_ptr, blocks_per_head, heads, chunk):
    block, head = blocks.schedule(tl.program_id(0), blocks_per_head, heads, chunk)
    tl.store(out_ptr + 2 * tl.program_id(0), block)
    tl.store(out_ptr + 2 * tl.program_id(0) + 1, head)


def drawn(seed: int, seqlen_q: int, seqlen_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    begin, end = (x[0].contiguous() for x in kernel_cases.intervals(seqlen_q, seqlen_k, 1, torch.Generator().manual_seed(seed)))
    keys = torch.arange(seqlen_k)
    return begin, end, (keys >= begin[:, None]) & (keys < end[:, None])


@interpreted
@pytest.mark.parametrize("seed", range(12))
def test_key_range(seed):
    begin, end, visible = drawn(seed, 1 + seed, 64)
    out, seen = torch.zeros(5, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    _key_range[(1,)](begin, end, out, seen, len(begin), BLOCK_Q=16, BLOCK_K=4)  # pyright: ignore[reportArgumentType]
    lo, full_lo, full_hi, hi, gaps = out.tolist()
    columns = visible.any(0).nonzero().flatten()
    assert torch.equal(seen.bool(), visible.any(0))
    if len(columns) == 0:
        assert lo == hi == full_lo == full_hi
        return
    assert (lo, hi) == (int(columns[0]), int(columns[-1]) + 1)
    assert lo <= full_lo <= full_hi <= hi
    assert (full_lo - lo) % 4 == (full_hi - full_lo) % 4 == 0
    assert bool(visible[:, full_lo:full_hi].all())
    assert gaps or bool(visible.any(0)[lo:hi].all())


@interpreted
@pytest.mark.parametrize("seed", range(12))
def test_row_range_is_the_transpose(seed):
    begin, end, visible = drawn(seed, 40 + seed, 50)
    for n0 in range(0, 50, 8):
        n1 = min(n0 + 8, 50)
        out, rows = torch.zeros(4, dtype=torch.int32), torch.zeros(2, 8, dtype=torch.int32)
        _row_range[(1,)](begin, end, out, rows, len(begin), n0, n1, BLOCK_Q=4, BLOCK_K=8, UNIT=1 + seed % 2 * 3)  # pyright: ignore[reportArgumentType]
        lo, full_lo, full_hi, hi = out.tolist()
        index = torch.arange(len(begin))
        per_key = (index[:, None] >= rows[0]) & (index[:, None] < rows[1])
        assert torch.equal(per_key[:, : n1 - n0], visible[:, n0:n1])
        assert not bool(visible[:lo, n0:n1].any() | visible[hi:, n0:n1].any())
        assert lo <= full_lo <= full_hi <= max(hi, lo)
        assert lo == hi or lo % (1 + seed % 2 * 3) == 0
        assert bool(visible[full_lo:full_hi, n0:n1].all())


@interpreted
@pytest.mark.parametrize("n", [0, 1, 3, 4, 5, 17, 100])
def test_count_below(n):
    numbers = torch.randint(0, 20, (max(n, 1),), generator=torch.Generator().manual_seed(n)).sort().values.int()
    out = torch.zeros(1, dtype=torch.int32)
    for value in (-1, 0, 5, 19, 30):
        _count_below[(1,)](numbers, out, n, value, FANOUT=4)  # pyright: ignore[reportArgumentType]
        assert out.item() == int((numbers[:n] < value).sum())


@interpreted
@pytest.mark.parametrize(("count", "heads", "chunk"), [(3, 8, 4), (5, 7, 3), (1, 2, 2), (2, 5, 1)])
def test_schedule_visits_everything_once(count, heads, chunk):
    out = torch.zeros(count * heads, 2, dtype=torch.int32)
    _schedule[(count * heads,)](out, count, heads, chunk)
    assert len({tuple(pair) for pair in out.tolist()}) == count * heads
    assert out.amax(0).tolist() == [count - 1, heads - 1]
    assert out[:, 1].tolist()[: count * min(chunk, heads)] == list(range(min(chunk, heads))) * count

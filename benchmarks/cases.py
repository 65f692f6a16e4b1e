"""The named shapes that benchmarks measure: 32 query heads, 8 key heads, bfloat16, batch 1, head dim 128 unless said."""

from typing import NamedTuple

import torch
from torch import Tensor

# Document lengths of packed training batches, by tokens in the batch.
PACKED = {
    16384: (
        2265, 2090, 56, 607, 1538, 1281, 193, 275, 1033, 148, 560, 80, 743, 130, 823, 4096, 466,
    ),
    65536: (
        3412, 76, 1544, 338, 121, 938, 1917, 14310, 504, 4285, 32, 438, 703, 300, 2978, 504, 2944, 3126, 177,
        568, 641, 544, 221, 230, 1360, 198, 335, 2320, 2063, 736, 126, 40, 865, 682, 2849, 2774, 378, 548,
        711, 819, 1443, 5091, 1347,
    ),
}  # fmt: skip
NHEADS_Q, NHEADS_K, HEADDIM = 32, 8, 128
BLOCK = 128  # rows and keys of the blocks by which work is counted


class Case(NamedTuple):
    """A mask over seqlen tokens: causal, full, window (left keys besides itself) or packed documents, causal in each."""

    name: str
    seqlen: int
    kind: str
    window: int = 0

    def intervals(self, device: str = "cuda") -> tuple[Tensor, Tensor]:
        """begin, end int32 (1, seqlen): the keys that each row sees."""
        row = torch.arange(self.seqlen, device=device, dtype=torch.int32)
        begin, end = torch.zeros_like(row), row + 1
        if self.kind == "full":
            end = torch.full_like(row, self.seqlen)
        elif self.kind == "window":
            begin = (row - self.window).clamp(min=0)
        elif self.kind == "packed":
            lengths = torch.tensor(PACKED[self.seqlen], device=device)
            begin = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths).int()
        return begin[None].contiguous(), end[None].contiguous()

    def pairs(self) -> int:
        """Visible pairs; causal counts half the square, as everybody does."""
        if self.kind == "causal":
            return self.seqlen * self.seqlen // 2
        begin, end = self.intervals("cpu")
        return int((end.long() - begin).sum())

    def blocks(self, device: str = "cpu") -> tuple[Tensor, Tensor]:
        """bool (row blocks, key blocks): those with a visible pair, and those of visible pairs only. seqlen is a multiple."""
        begin, end = (x.view(-1, BLOCK) for x in self.intervals(device))
        key = torch.arange(0, self.seqlen, BLOCK, device=device)
        seen = (key + BLOCK > begin.amin(1)[:, None]) & (key < end.amax(1)[:, None])
        whole = (key >= begin.amax(1)[:, None]) & (key + BLOCK <= end.amin(1)[:, None])
        return seen, whole

    def share(self) -> float:
        """Visible pairs over all pairs of the blocks that hold one."""
        return self.pairs() / (int(self.blocks()[0].sum()) * BLOCK * BLOCK)


# What matters most first: a run that is cut short has that.
SIZES = (32768, 8192, 16384, 4096, 2048)
CASES = {
    case.name: case
    for case in (
        *(Case(f"{kind}-{n}", n, kind) for n in SIZES[:2] for kind in ("causal", "full")),
        *(Case(f"packed-{n}", n, "packed") for n in PACKED),
        Case("window-32768", 32768, "window", 4095),
        Case("window-8192", 8192, "window", 4095),
        *(Case(f"{kind}-{n}", n, kind) for n in SIZES[2:] for kind in ("causal", "full")),
        Case("window-16384", 16384, "window", 4095),
    )
}


def inputs(case: Case, *, nheads: tuple[int, int] = (NHEADS_Q, NHEADS_K), headdim: int = HEADDIM,
           dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """q, k, v, dout of a case: (1, seqlen, nheads, headdim) normal random numbers on the GPU."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    shapes = [(1, case.seqlen, n, headdim) for n in (nheads[0], nheads[1], nheads[1], nheads[0])]
    q, k, v, dout = (torch.randn(s, device="cuda", generator=generator).to(dtype) for s in shapes)
    return q, k, v, dout

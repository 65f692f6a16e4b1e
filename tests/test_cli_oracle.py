"""verify's float64 oracle against the tests' own, which was written from other equations."""

import oracle
import pytest
import torch

import ringflash as rf
from ringflash.cli import oracle as shipped

SEQLEN = 37
MASKS = [
    rf.Mask(),
    rf.Mask(causal=True),
    rf.Mask(window=(3, 5)),
    rf.Mask(causal=True, window=(4, None), documents=(0, 9, 10, 30, SEQLEN)),
    rf.Mask(documents=((0, 9, SEQLEN), (0, 1, SEQLEN))),
    rf.Mask(causal=True, prefix=6),
]


@pytest.mark.parametrize("mask", MASKS)
def test_two_oracles_agree(mask: rf.Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "ROWS", 16)
    g = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(2, SEQLEN, h, d, generator=g) for h, d in ((4, 8), (2, 8), (2, 6), (4, 6)))
    dlse = torch.randn(2, 4, SEQLEN, generator=g)
    at = torch.arange(SEQLEN)
    expected = oracle.results((q, k, v), (dout, dlse), oracle.visible(mask, at, at))
    for name, a, b in zip(expected._fields, shipped.attention(q, k, v, mask=mask, dout=dout, dlse=dlse), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13, msg=name)

"""`ringflash verify`: its arguments, its verdict, and that it can fail."""

import pytest
import torch

import ringflash as rf
from ringflash import cli
from ringflash.cli import verify
from ringflash.kernels import reference


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    status = cli.main(["verify", *args])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_two_ranks_are_as_exact_as_one(capfd: pytest.CaptureFixture[str]) -> None:
    args = "--nproc 2 --seqlen 131 --headdim 16/8 --layout zigzag per_document --mask causal+documents:5,60 window:9,3"
    assert cli.main(["verify", *args.split()]) == 0
    out = capfd.readouterr().out
    assert out.count("lse") == 4
    assert "all within bounds" in out


@pytest.mark.parametrize(
    ("text", "mask"),
    [
        ("full", rf.Mask()),
        ("causal", rf.Mask(causal=True)),
        ("causal+window:8", rf.Mask(causal=True, window=(8, None))),
        ("window:,3", rf.Mask(window=(None, 3))),
        ("causal+documents:3,5", rf.Mask(causal=True, documents=(0, 3, 8, 20))),
        ("documents:3,17", rf.Mask(documents=(0, 3, 20))),
        ("causal+prefix:4", rf.Mask(causal=True, prefix=4)),
    ],
)
def test_mask_words(text: str, mask: rf.Mask) -> None:
    assert verify.parse_mask(text, 20) == mask


@pytest.mark.parametrize(
    "args",
    [
        "--mask sideways",
        "--mask window:a",
        "--mask causal+window:3,4",
        "--nproc 0",
        "--seqlen -1",
        "--heads 3/2",
        "--headdim 300",
    ],
)
def test_wrong_arguments_are_worded_and_exit_2(capsys: pytest.CaptureFixture[str], args: str) -> None:
    status, _, err = run(capsys, *args.split())
    assert status == 2
    assert err.startswith("ringflash verify: ")
    assert "Traceback" not in err


def test_a_worse_ring_fails() -> None:
    exact = torch.linspace(1.0, 2.0, 100, dtype=torch.float64)
    single = exact.float()
    assert verify._line("out", single, single, exact).good
    assert not verify._line("out", single * (1 + 1e-6), single, exact).good
    assert not verify._line("out", torch.full_like(single, torch.nan), single, exact).good


def test_a_wrong_kernel_exits_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each call of this forward is a little further off, so the single-rank run after the ring's is worse or better."""
    calls: list[int] = []
    exact = reference.forward

    def drifting(*args: object) -> tuple[torch.Tensor, ...]:
        calls.append(0)
        out, lse = exact(*args)  # pyright: ignore[reportArgumentType]
        return (out * (1 + 1e-3), lse) if len(calls) == 1 else (out, lse)

    monkeypatch.setattr(reference, "forward", drifting)
    rf.tile.pick.cache_clear()  # pyright: ignore[reportAttributeAccessIssue]
    case = verify.Case("zigzag", rf.Mask(causal=True), 50, 1, (2, 2), (8, 8), "float32", "auto", 0)
    try:
        assert verify.run_rank([case], "cpu") == 1
    finally:
        rf.tile.pick.cache_clear()  # pyright: ignore[reportAttributeAccessIssue]
    assert "WORSE" in capsys.readouterr().out

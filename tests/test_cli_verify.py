"""`ringflash verify`: its arguments, its verdict, and that it can fail."""

import pytest
import torch

import ringflash as rf
from ringflash import cli
from ringflash.cli import verify
from ringflash.kernels import reference
from ringflash.transport.communicator import Communicator


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    status = cli.main(["verify", *args])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_two_ranks_are_as_exact_as_one(capfd: pytest.CaptureFixture[str]) -> None:
    args = "--nproc 2 --seqlen 131 --headdim 16/8 --layout zigzag per_document --mask causal+documents:0,5,60,131 window:9,3"
    assert cli.main(["verify", *args.split()]) == 0
    out = capfd.readouterr().out
    assert out.count("lse") == 4
    assert "all within bounds: ring rms at most 1.05 x single rms + ranks / seqlen x float32 eps" in out
    title = "zigzag, causal + documents 0,5,60,131, float32, seqlen 131, heads 4/2, headdim 16/8, 2 ranks on cpu"
    assert title in out.splitlines()
    assert "allowed" in out


def test_heads_over_ranks_are_as_exact(capfd: pytest.CaptureFixture[str]) -> None:
    args = "--nproc 2 --seqlen 131 --headdim 16/8 --heads 3/1 --transport ulysses --device cpu"
    assert cli.main(["verify", *args.split()]) == 0
    assert "all within bounds" in capfd.readouterr().out


def test_a_handful_of_tokens_is_no_false_alarm(capfd: pytest.CaptureFixture[str]) -> None:
    """As many blocks as keys, so that each merge rounds once more than one kernel over all keys does."""
    assert cli.main(["verify", "--nproc", "4", "--seqlen", "3", "--device", "cpu"]) == 0
    assert "WORSE" not in capfd.readouterr().out


def test_titles_count_many_documents_and_one_rank() -> None:
    def title(ends: int, size: int) -> str:
        mask = rf.Mask(documents=tuple(range(ends)))
        return verify._title(
            verify.Case("zigzag", mask, ends - 1, 1, (2, 2), (8, 8), "float32", "auto", 0), size, torch.device("cpu")
        )

    assert "zigzag, documents 0,1,2,3[/], " in title(4, 1)
    assert "zigzag, 49 documents[/], " in title(50, 1)
    assert title(4, 1).endswith(", 1 rank on cpu")
    assert title(4, 2).endswith(", 2 ranks on cpu")


@pytest.mark.parametrize(
    ("text", "mask"),
    [
        ("full", rf.Mask()),
        ("causal", rf.Mask(causal=True)),
        ("causal+window:8", rf.Mask(causal=True, window=(8, None))),
        ("window:,3", rf.Mask(window=(None, 3))),
        ("window:8,", rf.Mask(window=(8, None))),
        ("causal+documents:0,3,8,20", rf.Mask(causal=True, documents=(0, 3, 8, 20))),
        ("documents:0,20", rf.Mask(documents=(0, 20))),
        ("causal+prefix:4", rf.Mask(causal=True, prefix=4)),
    ],
)
def test_mask_words(text: str, mask: rf.Mask) -> None:
    assert verify.parse_mask(text, 20) == mask


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("--mask sideways", "mask must be words joined by +"),
        ("--mask window:a", "cannot read 'window:a'"),
        ("--mask causal+window:", "cannot read 'window:' in 'causal+window:'"),
        ("--mask window:,", "cannot read 'window:,'"),
        ("--mask window:1,2,3", "cannot read 'window:1,2,3'"),
        ("--mask causal:4", "cannot read 'causal:4'"),
        ("--mask causal+causal", "mask must say causal once"),
        ("--mask causal+window:3,4", "causal and a right window contradict"),
        ("--mask documents:", "cannot read 'documents:'"),
        ("--mask documents:100,300,1000", "documents must start at 0: documents[0]=100"),
        ("--mask documents:0,300,100,1000", "documents must be ascending"),
        ("--mask documents:0,100,300", "documents must end at the sequence length: the last entry is 300, seqlen=1000"),
        ("--mask documents:0,100,2000", "documents must end at the sequence length: the last entry is 2000, seqlen=1000"),
        ("--nproc 0", "nproc must be at least 1: nproc=0"),
        ("--nproc 2 --device cpu --transport nvlink", "transport='nvlink' needs GPUs: the tensors are on a cpu"),
        (
            "--nproc 2 --device cpu --transport allgather --schedule rotate",
            "schedule must be 'auto' or 'gather', schedule='rotate'",
        ),
        ("--nproc 1000 --device cuda", "needs one GPU per rank: nproc=1000"),
        ("--seqlen -1", "--seqlen must be at least 0: -1"),
        ("--heads 3/2", "nheads_q"),
        ("--headdim 300", "headdim"),
    ],
)
def test_wrong_arguments_are_worded_and_exit_2(capsys: pytest.CaptureFixture[str], args: str, words: str) -> None:
    status, _, err = run(capsys, *args.split())
    assert status == 2
    assert err.startswith("ringflash verify: ")
    assert words in err
    assert "Traceback" not in err


def test_what_is_no_pair_of_numbers_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(capsys, "--heads", "4x2")
    assert "argument --heads: two whole numbers, as 4/2, or one for both: '4x2'" in capsys.readouterr().err


def test_a_worse_ring_fails() -> None:
    exact = torch.linspace(1.0, 2.0, 100, dtype=torch.float64)
    single = exact.float()
    share = 4 / 1000
    assert verify._line("out", single, single, exact, share=share).good
    assert not verify._line("out", single * (1 + 1e-6), single, exact, share=share).good
    assert not verify._line("out", torch.full_like(single, torch.nan), single, exact, share=share).good


def test_six_percent_more_error_fails() -> None:
    """The single kernel's own errors at seqlen 1000, made 1.04 and 1.06 times as large."""
    case = verify.Case("zigzag", rf.Mask(causal=True), 1000, 1, (2, 1), (64, 64), "float32", "auto", 0)
    q, k, v, dout, dlse = whole = verify._inputs(case, torch.device("cpu"))
    single = verify._run(whole, Communicator(0, 1, (0,)), rf.layouts.contiguous(1000, 1), case)
    exact = verify.oracle.attention(q, k, v, mask=case.mask, dout=dout, dlse=dlse)
    for name, found, right in zip(exact._fields, single, exact, strict=True):
        error = found.double() - right
        lines = [verify._line(name, right + f * error, right + error, right, share=2 / 1000) for f in (1.04, 1.06)]
        assert [line.good for line in lines] == [True, False], name


def test_a_wrong_kernel_exits_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each call of this forward is a little further off, so the single-rank run after the ring's is worse or better."""
    calls: list[int] = []
    exact = reference.forward

    def drifting(*args: object) -> tuple[torch.Tensor, ...]:
        calls.append(0)
        out, lse = exact(*args)  # pyright: ignore[reportArgumentType]
        return (out * (1 + 1e-3), lse) if len(calls) == 1 else (out, lse)

    monkeypatch.setattr(reference, "forward", drifting)
    rf.tile.choose.cache_clear()  # pyright: ignore[reportAttributeAccessIssue]
    case = verify.Case("zigzag", rf.Mask(causal=True), 50, 1, (2, 2), (8, 8), "float32", "auto", 0)
    try:
        assert verify.run_rank([case], "cpu") == 1
    finally:
        rf.tile.choose.cache_clear()  # pyright: ignore[reportAttributeAccessIssue]
    assert "WORSE" in capsys.readouterr().out

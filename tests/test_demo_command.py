"""`python -m ringflash.demo` end to end on two ranks, and its words for wrong arguments."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ringflash.demo import main

ROOT = Path(__file__).parents[1]


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, outside any launcher that runs these tests."""
    launch = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in launch} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "ringflash.demo", "--device", "cpu", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_two_ranks_train_as_one() -> None:
    ended = demo("--part", "text", "--steps", "3", "--seqlen", "101")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("PASS") == 2
    assert "2 ranks  1/3  loss " in ended.stdout
    assert "  - tokens/s" in ended.stdout
    assert " 0 tokens/s" not in ended.stdout
    assert "share this machine's cores" in ended.stdout
    assert "2 ranks" in ended.stdout
    assert "1 rank " in ended.stdout
    assert "FAIL" not in ended.stdout


def test_copy_is_learnt_across_ranks() -> None:
    ended = demo("--part", "copy")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"\nstopped at step \d+ of at most 400: accuracy (99|100)%\nPASS  accuracy ", ended.stdout)


def test_one_rank_skips_the_copy_task() -> None:
    ended = demo("--nproc", "1", "--steps", "1", "--seqlen", "20")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "needs at least two ranks" in ended.stdout
    assert ended.stdout.count("NO RING RAN: one rank only") == 2
    assert "cores" not in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "0"], "--steps: must be an integer of at least 1: '0'"),
        (["--seqlen", "many"], "--seqlen: must be an integer of at least 2: 'many'"),
        (["--nproc", "-2"], "--nproc: must be an integer of at least 1: '-2'"),
        (["--layout", "spiral"], "invalid choice: 'spiral'"),
        (["--cut", "--part", "text"], "--cut is about the copy task"),
        (["--plot", "curves.jpg"], "--plot must name a .png file"),
        (["--plot", "no/such/folder/curves.png"], "in a folder that exists"),
        (["--plot", "curves.png", "--part", "copy"], "add --part both"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_nproc_is_the_launchers_to_say(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        main(["--nproc", "2"])
    assert "--nproc is the launcher's to say here: --nproc 2 under torchrun; leave it out" in capsys.readouterr().err


def test_cuda_without_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        main(["--device", "cuda"])
    assert "use --device cpu" in capsys.readouterr().err

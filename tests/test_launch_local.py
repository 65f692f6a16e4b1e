"""Owns the checks of launch/local.py: results in rank order, the right rank blamed, nobody left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ringflash.launch import local
from ringflash.launch.bootstrap import bootstrap
from ringflash.launch.local import run

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES")


# Functions that run as ranks


def plain_torch(scale: float, offset: torch.Tensor) -> tuple[list[str | None], int, torch.Tensor]:
    dist.init_process_group("gloo")
    x = offset + scale * (dist.get_rank() + 1)
    dist.all_reduce(x)
    dist.destroy_process_group()
    return [os.environ.get(name) for name in NAMES], torch.get_num_threads(), x


def fail_on_1() -> None:
    with bootstrap(device="cpu", timeout=60) as session:
        if session.world.rank == 1:
            raise KeyError("the cause")
        dist.barrier()


def sleep_unless_0(how: str) -> None:
    if os.environ["RANK"] != "0":
        time.sleep(100)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(3)


def sleep_and_write_pid(folder: str) -> None:
    Path(folder, os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(100)


def alive(pid: int) -> bool:
    """Whether the process still runs (a zombie does not)."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> bool:
    """Whether `condition()` came true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


def blocked_signals() -> set[int]:
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, []))


# Results


def test_plain_torch_code_runs_unchanged_and_tensors_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    results = run(plain_torch, 2, (10.0, torch.tensor([0.0, 1.0])), device="cpu")
    for rank, (variables, threads, x) in enumerate(results):
        assert variables == [str(rank), "2", str(rank), "2", "127.0.0.1", ""]
        assert threads == max(1, local._cores() // 2)
        assert x.tolist() == [30.0, 32.0]


def test_an_explicit_number_of_threads_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert local.rank_environment(0, 2, port=1, device=None)["OMP_NUM_THREADS"] == "7"


def test_signals_are_blocked_only_while_a_rank_starts() -> None:
    assert run(blocked_signals, 1) == [set()]
    assert signal.SIGINT not in blocked_signals()


# Failures


def test_the_rank_that_failed_by_itself_is_named_with_its_traceback() -> None:
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"^rank 1 failed") as caught:
        run(fail_on_1, 2)
    assert "KeyError: 'the cause'" in str(caught.value)
    assert "in fail_on_1" in str(caught.value)
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize(("how", "message"), [("kill", "ended by signal SIGKILL"), ("exit", "SystemExit: 3")])
def test_a_rank_that_dies_ends_the_others(how: str, message: str) -> None:
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"(?s)^rank 0 failed.*{message}"):
        run(sleep_unless_0, 2, (how,))
    assert time.monotonic() - begin < 30


def test_a_run_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    # Ranks that start slowly have written nothing yet; those that did must be gone.
    with pytest.raises(TimeoutError, match=r"rank 0, 1 of 2 did not finish within timeout=4"):
        run(sleep_and_write_pid, 2, (str(tmp_path),), timeout=4)
    assert not any(alive(int(file.read_text())) for file in tmp_path.iterdir())


def test_the_cause_is_preferred_to_lost_peers_and_order() -> None:
    lost = local._Report(error="peer", lost_peer=True)
    own = local._Report(error="own")
    assert str(local._failure({0: lost, 1: lost, 2: own})) == "rank 2 failed (then failed: rank 0, 1):\nown"
    assert str(local._failure({1: lost})).startswith("rank 1 failed:\npeer")


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL], ids=lambda ending: signal.Signals(ending).name)
def test_no_orphans(tmp_path: Path, ending: int) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_launch_local as t; "
        "t.run(t.sleep_and_write_pid, 2, sys.argv[2:])"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(Path(__file__).parent), str(tmp_path)], stderr=subprocess.PIPE)
    assert wait_until(lambda: len([file for file in tmp_path.iterdir() if file.read_text()]) == 2)
    pids = [int(file.read_text()) for file in tmp_path.iterdir()]
    parent.send_signal(ending)
    _, error = parent.communicate(timeout=20)
    assert parent.returncode in (-ending, 1)
    assert (b"KeyboardInterrupt" in error) == (ending == signal.SIGINT)
    assert wait_until(lambda: not any(alive(pid) for pid in pids), 5)


# What is refused


def test_a_function_that_cannot_travel_is_refused() -> None:
    with pytest.raises(TypeError, match=r"fn and args must be picklable, fn defined at the top level"):
        run(lambda: 0, 1)


@pytest.mark.parametrize(
    ("nproc", "device", "message"),
    [
        (0, None, "nproc must be at least 1: nproc=0"),
        (1, "tpu", "device must be None, 'cpu' or 'cuda': device='tpu'"),
        (1000, "cuda", "device='cuda' needs one GPU per rank: nproc=1000"),
    ],
)
def test_require_ranks(nproc: int, device: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        local.require_ranks(nproc, device)

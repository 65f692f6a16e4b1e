"""Owns the checks of launch/bootstrap.py: the group's life, the device chosen, ranks that fail, torchrun."""

import os
import re
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from ringflash.launch import bootstrap as module
from ringflash.launch.bootstrap import bootstrap, pick_device
from ringflash.launch.local import run
from ringflash.launch.world import World


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests start their own launches, so they must not look like ranks of one themselves."""
    for name in list(os.environ):
        if re.match(r"RANK$|WORLD_SIZE$|LOCAL_|MASTER_|TORCHELASTIC|SLURM_STEP|PMI|MPI_LOCAL|OMPI_", name):
            monkeypatch.delenv(name)


def world(**changes: object) -> World:
    """Rank 0 of 2 on one host."""
    facts = {"rank": 0, "size": 2, "local_rank": 0, "local_size": 2, "host": "h", "master_addr": "h", "master_port": 1}
    return World(**{**facts, "source": "torchrun", **changes})


# Functions that run as ranks


def summed() -> tuple[float, str, str, tuple[int, int]]:
    with bootstrap(device="cpu", timeout=30) as session:
        x = torch.full((3,), float(session.world.rank + 1))
        dist.all_reduce(x)
        return x[0].item(), session.backend, str(session.device), (session.world.local_rank, session.world.local_size)


def summed_twice() -> list[tuple]:
    return [summed(), summed()]


def joined() -> tuple[World, bool]:
    dist.init_process_group("gloo")
    try:
        with bootstrap() as session:
            found = session.world
        return found, dist.is_initialized()
    finally:
        dist.destroy_process_group()


# One rank


def test_a_single_process_gets_a_group_of_one() -> None:
    with bootstrap(device="cpu") as session:
        assert (session.world.size, session.backend, session.device) == (1, "gloo", torch.device("cpu"))
        x = torch.ones(2)
        dist.all_reduce(x)
        assert x.tolist() == [1, 1]
    assert not dist.is_initialized()


def test_the_group_is_destroyed_when_the_body_raises() -> None:
    with pytest.raises(KeyError, match="cause"), bootstrap(device="cpu"):
        raise KeyError("cause")
    assert not dist.is_initialized()


def test_a_body_may_destroy_the_group_itself() -> None:
    with bootstrap(device="cpu"):
        dist.destroy_process_group()
    assert not dist.is_initialized()


def test_a_running_group_is_used_and_left_alone() -> None:
    with bootstrap(device="cpu") as outer, bootstrap(device="cpu", backend="gloo") as inner:
        assert (inner.world.source, inner.world.rank, inner.world.size) == ("existing", 0, 1)
        assert inner.backend == outer.backend
        inner_ended = dist.is_initialized()
    assert inner_ended


@pytest.mark.parametrize(
    ("options", "message"),
    [({"backend": "mpi"}, "backend='mpi', its backend is 'gloo'"), ({"timeout": 5.0}, "timeout=5; leave timeout out")],
)
def test_a_running_group_refuses_what_it_cannot_honour(options: dict, message: str) -> None:
    with bootstrap(device="cpu"):
        with pytest.raises(ValueError, match=message), bootstrap(**options):
            pass
        assert dist.is_initialized()


def test_nccl_needs_a_gpu() -> None:
    with pytest.raises(ValueError, match="backend='nccl' needs a CUDA device"), bootstrap(backend="nccl", device="cpu"):
        pass
    assert not dist.is_initialized()


def test_bad_variables_are_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="WORLD_SIZE is not set though RANK is"), bootstrap():
        pass


# The device


@pytest.mark.parametrize(
    ("asked", "visible", "local_rank", "local_size", "chosen"),
    [
        (None, 0, 1, 2, "cpu"),
        (None, 8, 3, 8, "cuda:3"),
        (None, 8, 1, 2, "cuda:1"),
        (None, 1, 0, 1, "cuda:0"),
        (None, 1, 3, 4, "cuda:0"),
        ("cuda", 2, 1, 2, "cuda:1"),
        ("cuda:1", 2, 0, 2, "cuda:1"),
        ("cpu", 2, 5, 8, "cpu"),
        (torch.device("cpu"), 2, 5, 8, "cpu"),
    ],
)
def test_pick_device(asked: str | torch.device | None, visible: int, local_rank: int, local_size: int, chosen: str) -> None:
    assert pick_device(asked, visible=visible, local_rank=local_rank, local_size=local_size) == torch.device(chosen)


@pytest.mark.parametrize(
    ("asked", "visible", "local_size", "message"),
    [
        (None, 2, 4, r"4 ranks on this host, 2 GPUs visible; .* or ask for device='cpu'"),
        ("cuda", 2, 4, r"4 ranks on this host, 2 GPUs visible"),
        ("cuda", 0, 1, r"device='cuda' is not there: 0 GPUs visible"),
        ("cuda:2", 2, 1, r"device='cuda:2' is not there: 2 GPUs visible"),
        ("meta", 2, 1, r"device must be 'cpu', 'cuda' or .* device='meta'"),
    ],
)
def test_pick_device_refuses(asked: str | None, visible: int, local_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pick_device(asked, visible=visible, local_rank=0, local_size=local_size)


@pytest.mark.parametrize(("gpus", "errors"), [(["a", "b", "c"], 0), (["a", "b", "a"], 2)])
def test_one_visible_gpu_each_must_be_different_ones(gpus: list[str], errors: int) -> None:
    store, raised = HashStore(), []

    def rank(gpu: str) -> None:
        try:
            module._require_own_gpu(store, world(size=3, local_size=3), gpu)
        except ValueError as error:
            raised.append(str(error))

    threads = [threading.Thread(target=rank, args=(gpu,)) for gpu in gpus]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(raised) == errors
    assert all("2 of the 3 ranks on host h see the same one" in text for text in raised)


# Several ranks


def test_ranks_meet_twice_in_one_process() -> None:
    assert run(summed_twice, 2) == [[(3.0, "gloo", "cpu", (rank, 2))] * 2 for rank in range(2)]


def test_a_group_made_by_hand_tells_who_shares_the_host() -> None:
    for rank, (found, still_there) in enumerate(run(joined, 2)):
        assert (found.rank, found.size, found.local_rank, found.local_size) == (rank, 2, rank, 2)
        assert found.source == "existing"
        assert still_there


BODY = """
import sys, time, torch, torch.distributed as dist
from ringflash.launch.bootstrap import bootstrap
with bootstrap(device="cpu", timeout=60) as session:
    rank = session.world.rank
    {body}
print("left\\n", end="", flush=True)
"""
SUM = "x = torch.ones(2); dist.all_reduce(x); print(f'sum={x[0].item():g}\\n', end='', flush=True)"
FAIL = "if rank == 1: raise KeyError('the cause')\n    dist.barrier()"
# Rank 1 needs the store, which lives in rank 0, long after rank 0 has nothing left to do.
LATE = "if rank == 1: time.sleep(1); dist.distributed_c10d._get_default_store().set('late', 'x')"


def torchrun(body: str, tmp_path: object) -> subprocess.CompletedProcess[str]:
    """Run `body` inside bootstrap on two ranks of torchrun."""
    script = f"{tmp_path}/script.py"
    with open(script, "w") as file:
        file.write(BODY.format(body=body))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=50, env=env)


def by_hand(body: str) -> list[tuple[int, str, str]]:
    """Run `body` in two processes with torchrun's variables exported by hand; (status, stdout, stderr) of each."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    facts = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-W", "error", "-c", BODY.format(body=body)]
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **facts, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    outputs = [rank.communicate(timeout=50) for rank in ranks]
    return [(rank.returncode, *output) for rank, output in zip(ranks, outputs, strict=True)]


def test_torchrun_sums_through_bootstrap(tmp_path: object) -> None:
    done = torchrun(SUM, tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == ["left", "left", "sum=2", "sum=2"]
    assert "arning" not in done.stderr


def test_the_rank_that_serves_the_store_leaves_last() -> None:
    assert by_hand(LATE) == [(0, "left\n", "")] * 2


def test_a_failing_rank_waits_for_nobody() -> None:
    begin = time.monotonic()
    (status_0, _, error_0), (status_1, _, error_1) = by_hand(FAIL)
    assert (status_0, status_1) == (1, 1)
    assert "KeyError: 'the cause'" in error_1
    assert "KeyError" not in error_0
    assert time.monotonic() - begin < 40


def test_rank_0_says_why_it_gives_up_waiting() -> None:
    with pytest.raises(RuntimeError, match=r"some rank did not leave within timeout=0.1 s"):
        module._wait_for_others(HashStore(), 0.1)

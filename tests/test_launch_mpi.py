"""Owns the checks of launch/mpi.py: a real mpiexec where there is one, and a stand-in MPI for what goes wrong."""

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from ringflash.launch import mpi
from ringflash.launch.world import find_world

MPIEXEC = Path(sys.executable).with_name("mpiexec")
needs_mpiexec = pytest.mark.skipif(not MPIEXEC.exists(), reason="no mpiexec next to this Python")

SUM = """
import torch, torch.distributed as dist
from ringflash.launch.bootstrap import bootstrap
with bootstrap(device="cpu", timeout=30) as session:
    x = torch.full((3,), float(session.world.rank + 1))
    dist.all_reduce(x)
    w = session.world
    print(f"sum={x[0].item():g} rank={w.rank}/{w.size} local={w.local_rank}/{w.local_size} {w.source}\\n", end="",
    flush=True)
"""
FAIL = """
import torch, torch.distributed as dist
from ringflash.launch.bootstrap import bootstrap
with bootstrap(device="cpu", timeout=60) as session:
    if session.world.rank == 1:
        raise KeyError("the cause")
    dist.barrier()
"""


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests start their own launches, so they must not look like ranks of one themselves."""
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)


def mpiexec(*command: str) -> subprocess.CompletedProcess[str]:
    """Run two ranks."""
    return subprocess.run([MPIEXEC, "-n", "2", *command], check=False, capture_output=True, text=True, timeout=50)


@needs_mpiexec
def test_mpiexec_sums_through_bootstrap() -> None:
    done = mpiexec(sys.executable, "-W", "error", "-c", SUM)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n"))[1:] == ["sum=3 rank=0/2 local=0/2 mpi", "sum=3 rank=1/2 local=1/2 mpi"]
    assert done.stderr == ""


@needs_mpiexec
def test_a_failing_rank_ends_the_job() -> None:
    begin = time.monotonic()
    done = mpiexec(sys.executable, "-c", FAIL)
    assert done.returncode != 0
    assert "KeyError: 'the cause'" in done.stderr
    assert time.monotonic() - begin < 40


class FakeComm:
    """A communicator of one host; as rank 0 its broadcast is the value itself."""

    def __init__(self, *, rank: int = 0, size: int = 2, local_size: int = 2) -> None:
        self.rank, self.size, self.local_size = rank, size, local_size
        self.aborted: list[int] = []

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def Split_type(self, _kind: int, key: int) -> "FakeComm":
        return FakeComm(rank=key % self.local_size, size=self.local_size)

    def Free(self) -> None:
        pass

    def Abort(self, status: int) -> None:
        self.aborted.append(status)

    def bcast(self, value: object, root: int) -> object:
        return value if self.rank == root else ("head", 4321)


def use(monkeypatch: pytest.MonkeyPatch, comm: FakeComm) -> FakeComm:
    """Make `comm` the world of mpi4py."""
    module = SimpleNamespace(MPI=SimpleNamespace(COMM_WORLD=comm, COMM_TYPE_SHARED=0))
    monkeypatch.setitem(sys.modules, "mpi4py", module)
    return comm


def test_rank_0_picks_a_reachable_address_and_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeComm())
    facts = mpi.mpi_facts({"PMI_SIZE": "2"})
    assert facts.master_addr == "127.0.0.1"
    assert 0 < facts.master_port < 65536
    use(monkeypatch, FakeComm(size=4))
    assert not mpi.mpi_facts({}).master_addr.startswith("127.")


def test_other_ranks_take_what_rank_0_picked(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeComm(rank=3, size=4))
    world = find_world({"PMI_RANK": "3", "PMI_SIZE": "4"})
    assert (world.rank, world.size, world.local_rank, world.local_size) == (3, 4, 1, 2)
    assert (world.master_addr, world.master_port, world.source) == ("head", 4321, "mpi")


def test_an_exported_address_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeComm())
    facts = mpi.mpi_facts({"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "4000"})
    assert (facts.master_addr, facts.master_port) == ("10.0.0.9", 4000)


def test_another_mpi_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeComm(size=1, local_size=1))
    with pytest.raises(ValueError, match=r"OMPI_COMM_WORLD_SIZE=4, mpi4py sees 1; mpi4py is linked with another MPI"):
        find_world({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"})


def test_missing_mpi4py_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(RuntimeError, match=r"pip install mpi4py mpich"):
        find_world({"PMI_RANK": "0", "PMI_SIZE": "2"})


def test_end_job_aborts_only_where_mpi_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = FakeComm()
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    mpi.end_job(2)
    use(monkeypatch, comm)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", SimpleNamespace())
    mpi.end_job(2)
    assert comm.aborted == [2]


def test_an_uncaught_error_is_reported_and_aborts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    comm, seen = use(monkeypatch, FakeComm()), []
    monkeypatch.setattr(sys, "excepthook", lambda *report: seen.append(report))
    monkeypatch.setattr(mpi, "GRACE", 0)
    at_exit = []
    monkeypatch.setattr(mpi.atexit, "register", at_exit.append)
    mpi.abort_if_uncaught()
    mpi.abort_if_uncaught()
    error = KeyError("cause")
    sys.excepthook(KeyError, error, None)
    assert seen == [(KeyError, error, None)]
    assert comm.aborted == []
    for function in at_exit:
        function()
    assert comm.aborted == [1]


def test_own_address_is_not_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi.socket, "gethostbyname", lambda _name: "127.0.1.1")
    monkeypatch.setattr(mpi, "_outgoing_address", lambda default: "10.1.2.3")
    assert mpi._own_address() == "10.1.2.3"

"""Owns what mpiexec worlds need of MPI: rank facts, exchange of the rendezvous address, ending the job on an error."""

import atexit
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

LOOPBACK = "127.0.0.1"
# Seconds between the report of an uncaught error and the end of the job.
GRACE = 1.0
# How many ranks mpiexec says it started, in the words of the launchers.
SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


@dataclass(frozen=True, kw_only=True)
class MpiFacts:
    """What MPI says of this process: `rank` of `size`, `local_rank` of `local_size` on this host; and where to meet."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    master_addr: str
    master_port: int


def mpi_facts(env: Mapping[str, str] = os.environ) -> MpiFacts:
    """This process's place in an mpiexec job. Collective: every rank calls it; rank 0 picks a free rendezvous port.

    MASTER_ADDR and MASTER_PORT, if rank 0's `env` has them, are taken instead of picking.

    Raises RuntimeError if mpi4py is missing, ValueError if it is linked with another MPI than the mpiexec.
    """
    comm = _import_mpi().COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    _require_size(env, size)
    local_rank, local_size = _local_place(comm)
    address = _pick_address(env, one_host=local_size == size) if rank == 0 else None
    master_addr, master_port = comm.bcast(address, root=0)
    return MpiFacts(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        master_addr=master_addr,
        master_port=master_port,
    )


def abort_if_uncaught() -> None:
    """From now on an uncaught exception in this process ends the whole mpiexec job.

    Without it the failing rank would wait at exit in MPI_Finalize for ranks that wait for it in a collective, forever.
    """
    if not isinstance(sys.excepthook, _AbortHook):
        sys.excepthook = _AbortHook(sys.excepthook)


def abort(status: int) -> None:
    """End every rank of the mpiexec job with exit status `status`; does not return."""
    sys.stdout.flush()
    sys.stderr.flush()
    _import_mpi().COMM_WORLD.Abort(status)


def end_job(status: int) -> None:
    """End every rank of the mpiexec job, where MPI runs in this process: one that leaves alone would wait at exit.

    Elsewhere it returns, and the caller ends this process by itself.
    """
    if "mpi4py.MPI" in sys.modules:
        abort(status)


@dataclass(frozen=True)
class _AbortHook:
    """A `sys.excepthook` that reports as `report` does and ends the job when the interpreter exits."""

    report: Callable[..., Any]

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.report(kind, error, trace)
        # Not now: init_process_group wraps this hook in one that holds what it prints back until it returns.
        atexit.register(_abort_after_grace)


def _abort_after_grace() -> None:
    """End the job, but not before ranks that fail in the same moment have reported.

    A rank that merely lost its peer often gets here first; its peer's report is the one that explains the failure.
    """
    time.sleep(GRACE)
    abort(1)


def _import_mpi() -> Any:
    """mpi4py.MPI, imported late because importing it starts MPI."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py is there, but finds no MPI library to load
        raise RuntimeError(
            "this process was started by mpiexec, and reading its rank needs mpi4py and an MPI library: "
            "pip install mpi4py mpich (mpich only where the cluster has no MPI of its own), or start the job with torchrun; "
            f"the import failed with: {error}"
        ) from error
    return MPI


def _require_size(env: Mapping[str, str], size: int) -> None:
    """Raise if mpiexec started another number of ranks than mpi4py sees (each would be a ring of its own)."""
    for name in SIZE_VARIABLES:
        if name in env and env[name] != str(size):
            raise ValueError(
                f"mpiexec and mpi4py disagree on the number of ranks: {name}={env[name]}, mpi4py sees {size}; "
                "mpi4py is linked with another MPI library: use that library's mpiexec, or reinstall mpi4py for this one"
            )


def _local_place(comm: Any) -> tuple[int, int]:
    """(local_rank, local_size): place among the ranks that share this host's memory, in rank order."""
    local = comm.Split_type(_import_mpi().COMM_TYPE_SHARED, key=comm.Get_rank())
    try:
        return local.Get_rank(), local.Get_size()
    finally:
        local.Free()


def _pick_address(env: Mapping[str, str], *, one_host: bool) -> tuple[str, int]:
    """Address and free port of this host that the other ranks can reach."""
    address = env.get("MASTER_ADDR") or (LOOPBACK if one_host else _own_address())
    return address, int(env.get("MASTER_PORT") or _free_port())


def _free_port() -> int:
    """A port that was free a moment ago; the system hands them out at random, so a second taker is unlikely."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def _own_address() -> str:
    """This host's address as other hosts see it: what its name resolves to, else the source of outgoing traffic."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = LOOPBACK
    # Many distributions map the own name to 127.0.1.1, which leads every other host to itself.
    return _outgoing_address(default=name) if address.startswith("127.") else address


def _outgoing_address(*, default: str) -> str:
    """The source address the system would use; connecting a datagram socket sends nothing (192.0.2.1 is reserved)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return default
        return probe.getsockname()[0]

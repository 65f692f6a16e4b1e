"""Owns running one Python function as several ranks on this host: spawn, wire together, collect, and end them all."""

import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] (documented, but not in __all__)

from ringflash.launch.mpi import LOOPBACK
from ringflash.launch.world import World, torchrun_variables

# Seconds after the first failure in which the others may report: a rank that merely lost its peer often speaks first.
GRACE = 1.0
# Seconds between asking a rank to end and ending it.
PATIENCE = 3.0


def run(
    fn: Callable[..., Any],
    nproc: int,
    args: Sequence[Any] = (),
    *,
    device: Literal["cpu", "cuda"] | None = None,
    timeout: float | None = None,
) -> list[Any]:
    """Call `fn(*args)` in `nproc` fresh processes on this host; returns each rank's result, in rank order.

    `fn` finds torchrun's variables set, so `with bootstrap():` or `init_process_group()` inside it make the ring. It
    must be importable (defined at the top level of a module); arguments and results travel by pickle, tensors by copy.

    device: "cpu" hides the GPUs from the ranks, "cuda" requires one GPU per rank, None leaves it to bootstrap. timeout:
    seconds for the whole run (None: no limit).

    Raises RuntimeError naming the rank that failed first, with its traceback, after ending the others; TimeoutError;
    ValueError for an `nproc` below 1 or above the number of GPUs; TypeError if `fn` or `args` cannot be pickled.
    """
    require_ranks(nproc, device)
    payload = _pack(fn, args)
    store = serve_store()
    ranks: list[_Rank] = []
    try:
        for rank in range(nproc):
            _start(ranks, rank_environment(rank, nproc, port=store.port, device=device), payload)
        return _collect(ranks, timeout)
    finally:
        _end(ranks)


def require_ranks(nproc: int, device: str | None) -> None:
    """Raise ValueError unless this host can hold `nproc` ranks on `device`."""
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"device must be None, 'cpu' or 'cuda': device={device!r}")
    if nproc < 1:
        raise ValueError(f"nproc must be at least 1: nproc={nproc}")
    if device == "cuda" and nproc > torch.cuda.device_count():
        raise ValueError(
            f"device='cuda' needs one GPU per rank: nproc={nproc}, {torch.cuda.device_count()} GPUs visible; "
            "lower nproc, or use device='cpu'"
        )


def serve_store() -> TCPStore:
    """The rendezvous store for ranks on this host, served by the caller while it keeps it.

    It binds the port that the ranks will be told, so nothing can take it in between.
    """
    return TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)


def rank_environment(rank: int, nproc: int, *, port: int, device: str | None) -> dict[str, str]:
    """The variables that make a process rank `rank` of `nproc` on this host, meeting at the store on `port`."""
    world = World(
        rank=rank,
        size=nproc,
        local_rank=rank,
        local_size=nproc,
        host="",
        master_addr=LOOPBACK,
        master_port=port,
        source="torchrun",
    )
    variables = torchrun_variables(world)
    # torchrun's word for "the store is already served, rank 0 must not bind the port": see
    # torch.distributed.rendezvous.
    variables["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or str(max(1, _cores() // nproc))
    if device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
    return variables


@dataclass(frozen=True)
class _Rank:
    """A spawned process and the pipe on which it will report once."""

    number: int
    process: BaseProcess
    pipe: Connection


@dataclass(frozen=True)
class _Report:
    """How a rank ended: with a `result`, or with the text of an `error` (which may only mean that a peer was lost)."""

    result: Any = None
    error: str | None = None
    lost_peer: bool = False


def _cores() -> int:
    """Cores this process may use, which in a container are often fewer than the host has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _pack(fn: Callable[..., Any], args: Sequence[Any]) -> bytes:
    """`fn` and `args` as plain bytes: a copy for each rank, not memory shared between them."""
    try:
        return pickle.dumps((fn, tuple(args)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"fn and args must be picklable, fn defined at the top level of a module: fn={fn!r}; pickle says: {error}"
        ) from error


def _start(ranks: list[_Rank], variables: dict[str, str], payload: bytes) -> None:
    """Spawn the next rank; spawn, as a forked child inherits dead threads and a CUDA context that it cannot use."""
    context = get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    # Not daemonic: a daemonic process may not have children, and ranks use data loaders.
    process = context.Process(target=_serve, args=(variables, payload, theirs), name=f"rank {len(ranks)}", daemon=False)
    # Listed before it starts, so that an interrupt in between leaves nothing that _end does not know.
    ranks.append(_Rank(len(ranks), process, ours))
    # Python's helper for spawning lets SIGINT through again when it starts, so it has to run before.
    resource_tracker.ensure_running()
    # A rank inherits the mask: Ctrl-C during its imports must not end it with a traceback of its own; see _serve.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        with theirs:
            process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(variables: dict[str, str], payload: bytes, pipe: Connection) -> None:
    """What a spawned process does: become the rank, call the function, report."""
    # Ctrl-C reaches the whole terminal group; the parent decides, so that one traceback is seen and not one per rank.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.environ.update(variables)
    # torch has been imported by now and has read OMP_NUM_THREADS already.
    torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
    pipe.send_bytes(_call(payload))
    pipe.close()


def _call(payload: bytes) -> bytes:
    """The pickled report of calling the packed function."""
    try:
        fn, args = pickle.loads(payload)
        return pickle.dumps(_Report(result=fn(*args)))
    except BaseException as error:  # SystemExit too: whatever ends the function is reported
        return pickle.dumps(_Report(error=traceback.format_exc(), lost_peer=_lost_peer(error)))


def _lost_peer(error: BaseException) -> bool:
    """Whether the error only says that another rank went away."""
    phrases = ("closed by peer", "reset by peer", "remote process has exited", "Broken pipe")
    return isinstance(error, dist.DistError) or any(phrase in str(error) for phrase in phrases)


def _die_with_parent() -> None:
    """End this process when its parent is gone, however that happened."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _collect(ranks: list[_Rank], timeout: float | None) -> list[Any]:
    """Every rank's result in rank order; raises at the first failure or when time is up."""
    end = None if timeout is None else time.monotonic() + timeout
    reports: dict[int, _Report] = {}
    while len(reports) < len(ranks):
        arrived = _receive(ranks, reports, end)
        if any(report.error for report in arrived.values()):
            _receive_all(ranks, reports, time.monotonic() + GRACE)
            raise _failure(reports)
        if not arrived:
            raise TimeoutError(_late(ranks, reports, timeout))
    return [reports[rank.number].result for rank in ranks]


def _receive(ranks: list[_Rank], reports: dict[int, _Report], end: float | None) -> dict[int, _Report]:
    """Wait for reports until `end` and add them to `reports`; returns the new ones, none if time is up."""
    waiting = {rank.pipe: rank for rank in ranks if rank.number not in reports}
    left = None if end is None else max(0.0, end - time.monotonic())
    ready = connection.wait(list(waiting), left)
    arrived = {waiting[pipe].number: _read(waiting[pipe]) for pipe in waiting if pipe in ready}
    reports.update(arrived)
    return arrived


def _receive_all(ranks: list[_Rank], reports: dict[int, _Report], end: float) -> None:
    """Take what reports come until `end`, no longer than until the failure that caused the others is there."""
    while len(reports) < len(ranks) and all(r.lost_peer for r in reports.values() if r.error):
        if not _receive(ranks, reports, end):
            return


def _read(rank: _Rank) -> _Report:
    """The report on a ready pipe, which is at its end if the process died before it could speak."""
    try:
        return pickle.loads(rank.pipe.recv_bytes())
    except EOFError:
        rank.process.join(PATIENCE)
        return _Report(error=f"the process ended without a result: {_describe_exit(rank.process.exitcode)}")


def _describe_exit(exitcode: int | None) -> str:
    """`exit status 3`, or the name of the signal that ended it."""
    if exitcode is None or exitcode >= 0:
        return f"exit status {exitcode}"
    return f"ended by signal {signal.Signals(-exitcode).name}"


def _failure(reports: dict[int, _Report]) -> RuntimeError:
    """The error for the rank that failed on its own account, if any did, else for the first one that lost a peer."""
    failed = [(report.lost_peer, number) for number, report in reports.items() if report.error]
    number = min(failed)[1]
    others = sorted(other for _, other in failed if other != number)
    also = f" (then failed: rank {', '.join(map(str, others))})" if others else ""
    return RuntimeError(f"rank {number} failed{also}:\n{reports[number].error}")


def _late(ranks: list[_Rank], reports: dict[int, _Report], timeout: float | None) -> str:
    """The sentence for ranks that did not finish in time."""
    late = ", ".join(str(rank.number) for rank in ranks if rank.number not in reports)
    return f"rank {late} of {len(ranks)} did not finish within timeout={timeout} s; all ranks were ended"


def _end(ranks: list[_Rank]) -> None:
    """Leave no process and no pipe: ask each rank still running to end, then end it."""
    started = [rank for rank in ranks if rank.process.pid is not None]
    for rank in started:
        # A pipe at its end belongs to a rank that is on its way out by itself.
        if rank.process.is_alive() and not rank.pipe.poll():
            rank.process.terminate()
    end = time.monotonic() + PATIENCE
    for rank in started:
        rank.process.join(max(0.0, end - time.monotonic()))
        if rank.process.is_alive():
            rank.process.kill()
            rank.process.join()
        rank.process.close()
    for rank in ranks:
        rank.pipe.close()

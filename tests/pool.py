"""Owns the workers of the tests: one long-lived pool of gloo processes per world size, which runs a function on all ranks."""

import datetime
import functools
import multiprocessing
import os
import pickle
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

GROUP_TIMEOUT = datetime.timedelta(seconds=90)
JOB_TIMEOUT = 120.0  # longer than the group's, so that a hang inside a collective first shows where it hangs
GRACE = 2.0  # seconds the other ranks get to report after one has failed
START_TIMEOUT = 300.0
MOST_THREADS = 150  # of a worker, three for each of its groups
MAKERS = ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty"))


def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`make` with NaN in the floating tensors it returns: what reads memory that nobody wrote, shows."""

    @functools.wraps(make)
    def poisoned_make(*args: Any, **kwargs: Any) -> torch.Tensor:
        x = make(*args, **kwargs)
        return x.detach().fill_(torch.nan).requires_grad_(x.requires_grad) if x.is_floating_point() else x

    return poisoned_make


class Pool:
    """`size` processes that share a default group over gloo. A failed or hung job ends them; the next job starts new ones."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._workers: list[tuple[BaseProcess, Connection]] = []

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = JOB_TIMEOUT) -> list[Any]:
        """fn(*args) on every rank, at once: the results in rank order. fn is importable, arguments and results pickle.

        Raises RuntimeError with the traceback of each rank that raised, TimeoutError if some rank does not answer in time.
        """
        if not self._workers:
            self._start()
        payload = pickle.dumps((fn, args))
        for _, connection in self._workers:
            connection.send_bytes(payload)
        results = self._collect(f"{fn.__module__}.{fn.__qualname__}{args!r:.300}", timeout)
        if self._crowded():
            self.leave()
            self.close()
        return results

    def _crowded(self) -> bool:
        """Whether the workers' groups, of which each has threads that never quite sleep, are better begun anew."""
        threads = Path(f"/proc/{self._workers[0][0].pid}/task")
        return threads.is_dir() and len(os.listdir(threads)) > MOST_THREADS

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, store.port, there), daemon=True)
            process.start()
            there.close()
            self._workers.append((process, here))
        self._store = store  # served by this process as long as the pool lives
        self._collect("start", START_TIMEOUT)

    def _collect(self, job: str, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._workers)}
        deadline = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    ok, value = pickle.loads(connection.recv_bytes())
                except EOFError:
                    ok, value = False, "the process died"
                (results if ok else errors)[rank] = value
                if not ok:
                    deadline = min(deadline, time.monotonic() + GRACE)
        if errors or waiting:
            self.kill()
        if errors:
            told = "\n".join(f"--- rank {rank} of {self.size}\n{text}" for rank, text in sorted(errors.items()))
            raise RuntimeError(f"{job} failed, ranks {sorted(waiting.values())} had not answered\n{told}")
        if waiting:
            raise TimeoutError(f"{job} hangs: ranks {sorted(waiting.values())} of {self.size} gave no answer in {timeout} s")
        return [results[rank] for rank in range(self.size)]

    def leave(self) -> None:
        """Ask idle workers to end."""
        for _, connection in self._workers:
            connection.send_bytes(b"")

    def close(self) -> None:
        """Wait until they have."""
        for process, _ in self._workers:
            process.join(20)
        self.kill()

    def kill(self) -> None:
        """End every worker."""
        for process, connection in self._workers:
            process.kill()
            process.join()
            process.close()
            connection.close()
        self._workers = []


class Pools:
    """Pools by world size, each started by its first job."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}

    def run(self, size: int, fn: Callable[..., Any], *args: Any, timeout: float = JOB_TIMEOUT) -> list[Any]:
        """Pool.run on the pool of `size` ranks."""
        return self._pools.setdefault(size, Pool(size)).run(fn, *args, timeout=timeout)

    def close(self) -> None:
        """End every pool's workers, at once."""
        for pool in self._pools.values():
            pool.leave()
        for pool in self._pools.values():
            pool.close()


def _serve(rank: int, size: int, port: int, connection: Connection) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    for owner, name in MAKERS:
        setattr(owner, name, poisoned(getattr(owner, name)))
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=GROUP_TIMEOUT)
    connection.send_bytes(pickle.dumps((True, None)))
    while job := _next(connection):
        connection.send_bytes(_answer(job))
    dist.destroy_process_group()
    os._exit(0)  # without the interpreter's slow end


def _next(connection: Connection) -> bytes:
    """The next job; empty: leave."""
    try:
        return connection.recv_bytes()
    except EOFError:  # the tests are gone
        return b""


def _answer(job: bytes) -> bytes:
    try:
        fn, args = pickle.loads(job)
        return pickle.dumps((True, fn(*args)))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))

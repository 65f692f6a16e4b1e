"""Owns `python -m ringflash.launch`: run a script as the ranks of a ring, under any launcher or as its own."""

import argparse
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

import torch

from ringflash.launch import mpi
from ringflash.launch.local import rank_environment, require_ranks, serve_store
from ringflash.launch.world import find_world, launcher, torchrun_variables

# Seconds a rank gets to end after a signal, before the next, harder one.
PATIENCE = 5.0
# Seconds after the first failure in which the others may fail by themselves: a rank that merely lost its peer often
# ends first, and the traceback that explains it is still being written.
GRACE = 1.0
POLL = 0.05
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

EPILOG = """\
examples:
  python -m ringflash.launch --nproc 4 train.py --lr 3e-4        four ranks on this host
  python -m ringflash.launch --nproc 2 -m my.training --steps 10 a module, as python -m would run it
  srun -N 2 --ntasks-per-node 8 python -m ringflash.launch train.py
  mpiexec -n 4 python -m ringflash.launch train.py

Every rank finds torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT), so
init_process_group() works unchanged. Under torchrun, mpiexec or srun the script runs in the process they started.
The exit status is that of the first rank that failed; a rank ended by signal N counts as 128 + N.
"""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to run: `script` (a file, or with `module` a module's name) with `args`, on `nproc` ranks of this host."""

    script: str
    args: tuple[str, ...]
    module: bool
    nproc: int | None
    device: str | None
    prefix: bool


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's) and return its exit status."""
    parser = _parser()
    given = vars(parser.parse_args(argv))
    job = Job(**{**given, "args": tuple(given["args"])})
    try:
        return _run_as_rank(job) if launcher() != "single" else _run_here(job)
    except _BadLaunch as error:
        parser.exit(2, f"{parser.prog}: {error}\n")  # parser.error would put the usage before it, once per rank


class _BadLaunch(ValueError):
    """A mistake in how the command was called, as opposed to an error inside the script."""


def _parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m ringflash.launch",
        description="Run a Python script as the ranks of a ring.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="ranks on this host (default: the number of visible GPUs, or 2 without GPUs)",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], help="cpu: hide the GPUs; cuda: require one GPU per rank")
    parser.add_argument(
        "--no-prefix", dest="prefix", action="store_false", help="do not put [rank N] before each line of output"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT", help="the script's file")
    parser.add_argument("args", metavar="ARGS", nargs=argparse.REMAINDER, help="arguments for the script")
    return parser


def _run_as_rank(job: Job) -> int:
    """Run the script in this process, which a launcher started as one rank."""
    started_by = launcher()
    try:
        world = find_world()
    except (ValueError, RuntimeError) as error:
        raise _BadLaunch(str(error)) from error
    if job.nproc not in (None, world.size, world.local_size):
        raise _BadLaunch(
            f"--nproc {job.nproc} differs from what {started_by} started: {world.size} ranks, {world.local_size} on this "
            "host; leave --nproc out"
        )
    os.environ.update(torchrun_variables(world))
    if job.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if started_by == "mpi":
        mpi.abort_if_uncaught()
    return _execute(job, ends_mpi_job=started_by == "mpi")


def _execute(job: Job, *, ends_mpi_job: bool) -> int:
    """Run the script as `__main__`, the way the interpreter would."""
    sys.argv = [job.script, *job.args]
    try:
        if job.module:
            runpy.run_module(job.script, run_name="__main__", alter_sys=True)
        else:
            # python puts the script's folder first where `python -m` put the current one.
            sys.path[0] = str(Path(job.script).resolve().parent)
            runpy.run_path(job.script, run_name="__main__")
    except SystemExit as error:
        # sys.exit(1) on one rank is a failure too, and no excepthook sees it; see mpi.abort_if_uncaught.
        if ends_mpi_job and error.code not in (None, 0):
            mpi.abort(error.code if isinstance(error.code, int) else 1)
        raise
    return 0


def _run_here(job: Job) -> int:
    """Start the ranks on this host, pass on their output and our signals, and wait for them."""
    nproc = job.nproc if job.nproc is not None else _default_nproc(job.device)
    try:
        require_ranks(nproc, job.device)
    except ValueError as error:
        raise _BadLaunch(f"--nproc {nproc}: {error}") from error
    if not job.module and not Path(job.script).is_file():
        raise _BadLaunch(f"there is no script {job.script!r}; for a module's name put -m before it")
    return _Ranks().run(job, nproc)


def _default_nproc(device: str | None) -> int:
    """A rank per visible GPU; on CPU two, the smallest ring."""
    return (torch.cuda.device_count() if device != "cpu" else 0) or 2


class _Stopped(Exception):
    """A signal asked this command to end."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class _Ranks:
    """The processes of one job on this host."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.pumps: list[threading.Thread] = []
        self.writing = threading.Lock()

    def run(self, job: Job, nproc: int) -> int:
        """Start them, wait, and return the exit status for the whole job."""
        store = serve_store()
        handlers = {signum: signal.signal(signum, _stop) for signum in SIGNALS}
        try:
            for rank in range(nproc):
                self.start(job, rank, rank_environment(rank, nproc, port=store.port, device=job.device))
            return self.wait()
        except _Stopped as stopped:
            _ignore_signals()
            self.end(stopped.signum)
            return 128 + stopped.signum
        finally:
            _ignore_signals()
            self.end(signal.SIGTERM)
            for pump in self.pumps:
                pump.join(PATIENCE)
            for signum, handler in handlers.items():
                signal.signal(signum, handler)

    def start(self, job: Job, rank: int, variables: dict[str, str]) -> None:
        """Start one rank."""
        command = [sys.executable, *(["-m"] if job.module else []), job.script, *job.args]
        prefixed = job.prefix and int(variables["WORLD_SIZE"]) > 1
        pipe = subprocess.PIPE if prefixed else None
        # Behind a pipe Python would hold its output back in blocks, and a crash would lose the last one.
        variables = {**os.environ, **variables, **({"PYTHONUNBUFFERED": "1"} if prefixed else {})}
        # A session of its own: one signal reaches a rank with its children, and Ctrl-C reaches it once, through us.
        process = subprocess.Popen(command, env=variables, stdout=pipe, stderr=pipe, start_new_session=True)
        self.processes.append(process)
        for source, target in ((process.stdout, sys.stdout.buffer), (process.stderr, sys.stderr.buffer)):
            if source is not None:
                self.pump(f"[rank {rank}] ".encode(), source, target)

    def pump(self, prefix: bytes, source: IO[bytes], target: IO[bytes]) -> None:
        """Copy lines from `source` to `target` in a thread, each with `prefix`, until `source` ends."""

        def copy() -> None:
            # If our reader is gone, closing `source` tells the rank so, as it would have been told without us.
            with source, suppress(BrokenPipeError):
                for line in source:
                    with self.writing:
                        target.write(prefix + line + (b"" if line.endswith(b"\n") else b"\n"))
                        target.flush()

        thread = threading.Thread(target=copy, daemon=True)
        self.pumps.append(thread)
        thread.start()

    def wait(self) -> int:
        """Wait until all ranks ended well, or one did not; returns the exit status."""
        while True:
            codes = [process.poll() for process in self.processes]
            failed = next((rank for rank, code in enumerate(codes) if code), None)
            if failed is not None:
                return self.report(failed, codes[failed] or 0)
            if all(code == 0 for code in codes):
                return 0
            time.sleep(POLL)

    def report(self, rank: int, code: int) -> int:
        """Say which rank failed, and return its exit status in the shell's terms."""
        how = f"exit status {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
        others = ", ending the others" if len(self.processes) > 1 else ""
        with self.writing:
            sys.stderr.write(f"ringflash.launch: rank {rank} failed: {how}{others}\n")
            sys.stderr.flush()
        self.join(GRACE)
        return code if code > 0 else 128 - code

    def end(self, signum: int) -> None:
        """End every rank still running, first by `signum`, then harder."""
        for harder in (signum, signal.SIGTERM, signal.SIGKILL):
            for process in self.processes:
                if process.poll() is None:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, harder)
            self.join(PATIENCE)

    def join(self, seconds: float) -> None:
        """Wait until every rank has ended, for at most `seconds`."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and any(process.poll() is None for process in self.processes):
            time.sleep(POLL)


def _stop(signum: int, _frame: FrameType | None) -> None:
    """Signal handler."""
    raise _Stopped(signum)


def _ignore_signals() -> None:
    """While the ranks are being ended, a second Ctrl-C must not leave some of them behind."""
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main())

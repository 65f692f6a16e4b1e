"""Owns the question "which rank am I, of how many, and where do we meet": read from the environment a launcher left."""

import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from ringflash.launch.mpi import LOOPBACK, mpi_facts

Source = Literal["torchrun", "mpi", "slurm", "single", "existing"]

# Set by mpiexec/mpirun themselves (MPICH and Intel MPI, Open MPI, MVAPICH, Cray PALS).
MPIEXEC_MARKS = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PALS_RANKID")
# Set by whoever speaks the process-management protocol: mpiexec, but also `srun --mpi=pmi2` and `--mpi=pmix`.
PMI_MARKS = ("PMI_RANK", "PMIX_RANK")
# Slurm numbers the steps that are no `srun` from the top of uint32: batch script, extern, interactive shell, pending.
FIRST_SPECIAL_STEP = 0xFFFFFFF0


@dataclass(frozen=True, kw_only=True)
class World:
    """One process's place in a job.

    `rank` of `size` in the whole job, `local_rank` of `local_size` on this `host`. Rank 0 serves the rendezvous store
    at `master_addr:master_port` (port 0: a world of one, nobody else joins). `source` names where the facts came from.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    master_addr: str
    master_port: int
    source: Source

    def __post_init__(self) -> None:
        _require_place("rank", self.rank, "size", self.size)
        _require_place("local_rank", self.local_rank, "local_size", self.local_size)
        if self.local_size > self.size:
            raise ValueError(
                f"one host cannot hold more ranks than the job: local_size={self.local_size}, size={self.size}; "
                f"check the variables of the {self.source} launch"
            )


def find_world(env: Mapping[str, str] = os.environ) -> World:
    """This process's `World`, from the variables that torchrun, mpiexec or srun set; a world of one if none did.

    A pure function of `env`, except under mpiexec: there the facts come from mpi4py, and the call is collective (every
    rank must make it, and each call picks a new rendezvous port).

    Raises ValueError for half-set or contradictory variables, RuntimeError if mpiexec is used without mpi4py.
    """
    return _READERS[launcher(env)](env)


def launcher(env: Mapping[str, str] = os.environ) -> Source:
    """Which launcher started this process: "torchrun", "mpi", "slurm" or "single"; only looks, never raises."""
    # torchrun wins: it is often started *by* srun or mpiexec, once per host, so their variables are inherited from
    # outside and count hosts; torchrun's are the innermost. Variables exported by hand for env:// are likewise the most
    # explicit wish.
    if "RANK" in env or "WORLD_SIZE" in env:
        return "torchrun"
    # mpiexec inside a Slurm job starts one helper per host through srun: a real step, but it counts hosts, not ranks.
    if any(mark in env for mark in MPIEXEC_MARKS):
        return "mpi"
    if _in_srun_step(env):
        return "slurm"
    # Only now, because srun sets these too and then its own variables say the same without needing mpi4py.
    return "mpi" if any(mark in env for mark in PMI_MARKS) else "single"


def torchrun_variables(world: World) -> dict[str, str]:
    """`world` spelled in torchrun's environment variables, which `init_process_group("env://")` reads."""
    return {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(world.local_size),
        "MASTER_ADDR": world.master_addr,
        "MASTER_PORT": str(world.master_port),
    }


def expand_hosts(nodelist: str) -> tuple[str, ...]:
    """Host names in a Slurm expression, in its order: `node[08-10],gpu5` -> node08, node09, node10, gpu5.

    Raises ValueError for an expression that is not one.
    """
    if not re.fullmatch(r"(?:[^\[\],\s]|\[[\d,-]+\])+(?:,(?:[^\[\],\s]|\[[\d,-]+\])+)*", nodelist):
        raise ValueError(f"SLURM_NODELIST={nodelist!r} is not a host list such as 'node[01-03,07],gpu5'")
    parts = re.findall(r"(?:[^\[\],]|\[[^\]]*\])+", nodelist)
    return tuple(host for part in parts for host in _expand_part(part))


def _torchrun_world(env: Mapping[str, str]) -> World:
    """The world of torchrun's variables, all of which must be there."""
    world_size = _integer(env, "WORLD_SIZE", minimum=1)
    rank = _integer(env, "RANK")
    _require_place("RANK", rank, "WORLD_SIZE", world_size)
    local_size = _integer(env, "LOCAL_WORLD_SIZE", minimum=1)
    local_rank = _integer(env, "LOCAL_RANK")
    _require_place("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_size)
    return World(
        rank=rank,
        size=world_size,
        local_rank=local_rank,
        local_size=local_size,
        host=socket.gethostname(),
        master_addr=_text(env, "MASTER_ADDR"),
        master_port=_port(env),
        source="torchrun",
    )


def _slurm_world(env: Mapping[str, str]) -> World:
    """The world of one `srun` step."""
    size = _integer(env, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS", minimum=1)
    rank = _integer(env, "SLURM_PROCID")
    _require_place("SLURM_PROCID", rank, "SLURM_NTASKS", size)
    local_size = _slurm_local_size(env, size)
    local_rank = _integer(env, "SLURM_LOCALID")
    _require_place("SLURM_LOCALID", local_rank, "tasks on this host", local_size)
    # Job scripts often export MASTER_ADDR and MASTER_PORT by hand; that is a wish, so it goes before what we derive.
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        host=env.get("SLURMD_NODENAME") or socket.gethostname(),
        master_addr=env.get("MASTER_ADDR") or _slurm_first_host(env, size, local_size),
        master_port=_port(env) if "MASTER_PORT" in env else _slurm_port(env),
        source="slurm",
    )


def _mpi_world(env: Mapping[str, str]) -> World:
    """The world of one `mpiexec`, asked of MPI itself, because its variables differ between MPI libraries."""
    facts = mpi_facts(env)
    return World(
        rank=facts.rank,
        size=facts.size,
        local_rank=facts.local_rank,
        local_size=facts.local_size,
        host=socket.gethostname(),
        master_addr=facts.master_addr,
        master_port=facts.master_port,
        source="mpi",
    )


def _single_world(_env: Mapping[str, str]) -> World:
    """A world of one process."""
    host = socket.gethostname()
    return World(rank=0, size=1, local_rank=0, local_size=1, host=host, master_addr=LOOPBACK, master_port=0, source="single")


_READERS: Mapping[str, Callable[[Mapping[str, str]], World]] = {
    "torchrun": _torchrun_world,
    "slurm": _slurm_world,
    "mpi": _mpi_world,
    "single": _single_world,
}


def _in_srun_step(env: Mapping[str, str]) -> bool:
    """Whether `srun` started this process as a task of a step.

    SLURM_NTASKS and SLURM_PROCID=0 are also set in a batch script and in an allocation's shell, where one process runs;
    only a step proper has an ordinary step number, and it comes with its own count of tasks.
    """
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", ""))
    is_step = step.isdigit() and int(step) < FIRST_SPECIAL_STEP
    return is_step and "SLURM_PROCID" in env and ("SLURM_STEP_NUM_TASKS" in env or "SLURM_NTASKS" in env)


def _slurm_local_size(env: Mapping[str, str], size: int) -> int:
    """Tasks of the step on this host, from a list such as `2(x3),1` indexed by the host's number in the step."""
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if name in env:
            counts = _expand_counts(name, env[name])
            node = _integer(env, "SLURM_NODEID") if "SLURM_NODEID" in env else 0
            _require_place("SLURM_NODEID", node, f"hosts in {name}", len(counts))
            return counts[node]
    if "SLURM_NTASKS_PER_NODE" in env:
        return min(size, _integer(env, "SLURM_NTASKS_PER_NODE", minimum=1))
    if size == 1:
        return 1
    raise ValueError(
        f"SLURM_STEP_TASKS_PER_NODE is not set though this is one of {size} tasks of an srun step; start the job with "
        "`srun --ntasks-per-node=...`, or export it"
    )


def _expand_counts(name: str, text: str) -> list[int]:
    """`2(x3),1` -> [2, 2, 2, 1]."""
    if not re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", text):
        raise ValueError(f"{name}={text!r} is not a list of task counts such as '2(x3),1'; start the job with srun")
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in runs for _ in range(int(times or 1))]


def _slurm_first_host(env: Mapping[str, str], size: int, local_size: int) -> str:
    """The host of the step's rank 0."""
    if size == local_size:
        return LOOPBACK
    for name in ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"):
        if env.get(name):
            return expand_hosts(env[name])[0]
    raise ValueError(
        f"SLURM_STEP_NODELIST is not set though the {size} tasks of this srun step span several hosts; "
        "start the job with srun, or export MASTER_ADDR"
    )


def _slurm_port(env: Mapping[str, str]) -> int:
    """A port every task derives alike, another one per job and step, below Linux's ephemeral range (32768 on)."""
    job = _integer(env, "SLURM_JOB_ID" if "SLURM_JOB_ID" in env else "SLURM_JOBID")
    step = int(env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", "0")))
    return 10000 + (job + 7919 * step) % 20000


def _expand_part(part: str) -> Iterator[str]:
    """Host names of one comma-free part; several brackets multiply, the last one fastest."""
    match = re.search(r"\[([^\]]*)\]", part)
    if match is None:
        yield part
        return
    for number in _expand_numbers(match[1], part):
        yield from (part[: match.start()] + number + rest for rest in _expand_part(part[match.end() :]))


def _expand_numbers(ranges: str, part: str) -> Iterator[str]:
    """`01-03,07` -> 01, 02, 03, 07: zero padding as wide as the first number of a range is written."""
    for piece in ranges.split(","):
        bounds = re.fullmatch(r"(\d+)(?:-(\d+))?", piece)
        if bounds is None or int(bounds[2] or bounds[1]) < int(bounds[1]):
            raise ValueError(f"{piece!r} is not an ascending range of host numbers in the host list part {part!r}")
        first, last = bounds[1], bounds[2] or bounds[1]
        yield from (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))


def _text(env: Mapping[str, str], name: str) -> str:
    """The variable's value, which must be there and not empty."""
    value = env.get(name, "")
    if not value:
        telling = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_STEP_ID")
        given = ", ".join(key for key in telling if key in env)
        raise ValueError(
            f"{name} is not set though {given or 'other launch variables'} is: "
            f"start the job with torchrun, mpiexec or srun, which set them all, or export {name} too"
        )
    return value


def _integer(env: Mapping[str, str], name: str, *, minimum: int = 0) -> int:
    """The variable's value as an integer of at least `minimum`."""
    text = _text(env, name)
    if not re.fullmatch(r"\d+", text) or int(text) < minimum:
        raise ValueError(f"{name} must be an integer >= {minimum}: {name}={text!r}; correct it, or unset it")
    return int(text)


def _port(env: Mapping[str, str]) -> int:
    """MASTER_PORT, a port that every rank can be told in advance (so not 0)."""
    port = _integer(env, "MASTER_PORT", minimum=1)
    if port > 65535:
        raise ValueError(f"MASTER_PORT must be a port between 1 and 65535: MASTER_PORT={port}; export a free one")
    return port


def _require_place(name: str, value: int, size_name: str, size: int) -> None:
    """Raise unless 0 <= value < size."""
    if not 0 <= value < size:
        raise ValueError(
            f"{name} must lie between 0 and {size_name} - 1: {name}={value}, {size_name}={size}; "
            "the variables were left by different launches, or one was set by hand: unset or correct it"
        )

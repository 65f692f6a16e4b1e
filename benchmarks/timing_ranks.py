"""How calls in which all ranks take part are timed, and how ranks agree on going on after one that failed."""

import datetime
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

PROTOCOL = (
    "median of {repeats} after {warmup} warm-ups and {steady} ms of calls that bring clocks to those of steady work, CUDA "
    "events, slowest rank; isolated: barrier and host synchronisation before each call; back to back: {burst} calls between "
    "two events"
)
REPEATS, WARMUP, BURST, STEADY_MS = 20, 3, 10, 200
PATIENCE = datetime.timedelta(minutes=3)  # kernels that compile on one rank only must fit in


def protocol(repeats: int = REPEATS) -> str:
    """What isolated and back_to_back do, in words."""
    return PROTOCOL.format(repeats=repeats, warmup=WARMUP, burst=BURST, steady=STEADY_MS)


def isolated(call: Callable[[], object], repeats: int = REPEATS) -> float:
    """Milliseconds of one call, ranks starting together: median, slowest rank."""
    _warm(call)
    return slowest(statistics.median(_once(call, 1) for _ in range(repeats)))


def back_to_back(call: Callable[[], object], repeats: int = REPEATS) -> float:
    """Milliseconds of one of BURST calls in a row: median, slowest rank."""
    _warm(call)
    return slowest(statistics.median(_once(call, BURST) / BURST for _ in range(max(3, repeats // 5))))


def _warm(call: Callable[[], object]) -> None:
    """Warm-ups, then calls for STEADY_MS, the same number on every rank: a GPU that was idle is quicker for some time."""
    for _ in range(WARMUP):
        call()
    each = slowest(_once(call, 1))
    for _ in range(int(STEADY_MS / each)):
        call()


CLOCKS = {"isolated": isolated, "back to back": back_to_back}


def _once(call: Callable[[], object], times: int) -> float:
    dist.barrier()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def slowest(x: float) -> float:
    """The largest of all ranks' numbers."""
    most = torch.tensor(x, device="cuda")
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return most.item()


def peak(call: Callable[[], object]) -> int:
    """Bytes that a call needs at once, on this rank."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def verdicts() -> ProcessGroup:
    """The group over which `attempt` agrees. Collective. A rank that waits in it longer than PATIENCE fails, which ends the
    run: the others are then inside a call that cannot end.
    """
    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    assert isinstance(group, ProcessGroup)
    return group


def attempt(call: Callable[[], object], group: ProcessGroup) -> str:
    """Run a call on every rank; the first rank's error in words, on every rank, or "" where none failed. Collective."""
    try:
        call()
        mine = ""
    except Exception as error:
        mine = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    errors = [""] * dist.get_world_size(group)
    dist.all_gather_object(errors, mine, group=group)
    return next(filter(None, errors), "")

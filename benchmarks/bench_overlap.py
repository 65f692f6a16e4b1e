"""From profiler traces of ring calls: the share of transfer time that is hidden, and the time without an attention kernel.

    torchrun --nproc-per-node 2 benchmarks/bench_overlap.py [--transports auto,p2p] [--tokens 8192 32768]
        [--cases causal,packed] [--layouts zigzag,balanced] [--calls 5] [--traces FOLDER]

Isolated calls, medians over them, of each rank: what overlap.Figures says. An attention kernel that waits inside for keys to
arrive counts as running there; "lost" does not miss that: the call's time without a profiler less that of the baseline (one
launch per pass, same rows and intervals, all keys local). host: the time that a call keeps the CPU, without a profiler, nothing
queued before it. Lines go to benchmarks/results/bench_overlap.jsonl. --traces: keep the traces, for Perfetto.
"""

import argparse
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_peers
import overlap
import rings
import timing
import timing_ranks
import torch
import torch.distributed as dist
from rings import Problem
from torch.distributed import ProcessGroup
from torch.profiler import ProfilerActivity, profile, record_function

from ringflash.launch.bootstrap import bootstrap
from ringflash.options import CHOICES

PROTOCOL = "medians over {calls} isolated calls, each rank; lost: by CUDA events, {timed}; host: perf_counter around the call"


def trace(call: Callable[[], object], calls: int, path: Path) -> list[list[overlap.Event]]:
    """The device events of each of a number of isolated calls; the trace is left at path."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls + 1):
            dist.barrier()
            torch.cuda.synchronize()
            with record_function(overlap.MARK):
                call()
                torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    return overlap.calls(json.loads(path.read_text()))[1:]  # the first meets the profiler's own start


def host(call: Callable[[], object], calls: int) -> float:
    """Microseconds that a call keeps the CPU: median."""
    times = []
    for _ in range(calls):
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times)


def measure(call: Callable[[], object], base: Callable[[], object], path: Path, calls: int) -> dict[str, Any]:
    """This rank's figures of one call."""
    base_ms, ms = timing_ranks.isolated(base), timing_ranks.isolated(call)
    busy = host(call, timing_ranks.REPEATS)
    events = trace(call, calls, path)
    columns = zip(*map(overlap.figures, events), strict=True)
    found = {f"{name}_us" if name != "hidden" else name: statistics.median(x)
             for name, x in zip(overlap.Figures._fields, columns, strict=True)}  # fmt: skip
    return found | {
        "host_us": busy, "ms": ms, "baseline_ms": base_ms, "lost_us": (ms - base_ms) * 1000,
        "last_call_by_stream_us": overlap.by_stream(events[-1]),
    }  # fmt: skip


def words(row: dict[str, Any]) -> str:
    """A row as a line of output."""
    idle = f"{row['idle_us']:6.0f} us ({row['idle_us'] / row['call_us']:.1%})"
    return (
        f"{row['case']:<6} {row['tokens_per_gpu']:>6} {row['pass']:<16} {row['by']:<28} rank {row['rank']}: call "
        f"{row['call_us']:8.0f} us, transfer {row['transfer_us']:7.0f} us, hidden {row['hidden']:6.1%}, idle {idle}, "
        f"lost {row['lost_us']:6.0f} us, host {row['host_us']:6.0f} us"
    )


def run(case: str, problem: Problem, folder: Path, args: argparse.Namespace, verdicts: ProcessGroup) -> None:
    """Measure, print and keep one case; a ring that fails is a line of output."""
    layouts = args.layouts or bench_peers.LAYOUTS[case]
    contestants = rings.contestants(layouts, args.transports)
    for layout in layouts:
        for transport in args.transports:
            name = f"ringflash {transport} {layout}"
            rows: list[dict[str, Any]] = []
            stem = "-".join((case, str(problem.seqlen // problem.size), transport, layout))
            pair = (contestants[name], contestants[f"baseline {layout}"])
            error = timing_ranks.attempt(functools.partial(_both, pair, problem, folder / stem, args.calls, rows), verdicts)
            if error:
                bench_peers.say(problem, f"{name} is left out: {error}")
                continue
            _keep([{"case": case, "by": name} | row for row in rows], problem, args, verdicts)


def _both(
    pair: tuple[rings.Contestant, rings.Contestant], problem: Problem, stem: Path, calls: int, rows: list[dict[str, Any]]
) -> None:
    """The rows of both passes."""
    known = {"tokens_per_gpu": problem.seqlen // problem.size, "ranks": problem.size, "rank": problem.rank}
    with pair[0](problem) as ring, pair[1](problem) as base:
        for what, call, same in zip(bench_peers.PASSES, (ring.forward, ring.both), (base.forward, base.both), strict=True):
            path = stem.with_name(f"{stem.name}-{what.replace('+', '-')}-rank{problem.rank}.json")
            rows.append(known | {"pass": what} | measure(call, same, path, calls))


def _keep(rows: list[dict[str, Any]], problem: Problem, args: argparse.Namespace, verdicts: ProcessGroup) -> None:
    """Print and append the rows of all ranks."""
    everyone: list[list[dict[str, Any]]] = [[] for _ in range(problem.size)]
    dist.all_gather_object(everyone, rows, group=verdicts)
    if problem.rank == 0:
        lines = [row for same in zip(*everyone, strict=True) for row in same]
        print("\n".join(map(words, lines)), flush=True)
        protocol = PROTOCOL.format(calls=args.calls, timed=timing_ranks.protocol())
        timing.append("bench_overlap", lines, protocol=protocol, commit=args.commit, folder=args.out)


def options() -> argparse.ArgumentParser:
    names = bench_peers.names
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768], help="tokens per GPU")
    parser.add_argument("--cases", type=functools.partial(names, tuple(bench_peers.LAYOUTS)), default=["causal"])
    parser.add_argument("--transports", type=functools.partial(names, CHOICES["transport"]), default=["auto"])
    parser.add_argument("--layouts", type=lambda s: s.split(","), help="zigzag; packed documents: balanced,zigzag")
    parser.add_argument("--calls", type=int, default=5, help="calls traced")
    parser.add_argument("--traces", type=Path, help="folder that keeps the traces")
    parser.add_argument("--out", type=Path, default=timing.RESULTS, help="folder of the result lines")
    timing.add_commit(parser)
    return parser


def main() -> None:
    args = timing.parsed(options())
    with bootstrap(device="cuda") as session, tempfile.TemporaryDirectory() as scratch:
        verdicts = timing_ranks.verdicts()
        folder = args.traces or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for tokens in args.tokens:
            for case in args.cases:
                lengths = rings.lengths_of(case, tokens * session.world.size)
                run(case, Problem(lengths, session.device), folder, args, verdicts)
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

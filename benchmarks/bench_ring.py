"""The ring against its baseline: the same kernel in one launch, same rows and intervals, all keys already local.

    torchrun --nproc-per-node 2 benchmarks/bench_ring.py [--tokens 8192 32768] [--schedule auto] [--layout zigzag]
        [--transport auto]

Prints TFLOP/s per GPU of the slowest rank and the ratio ring / baseline for forward and forward+backward, isolated calls
and back to back, with peak memory; appends one line per row to benchmarks/results/bench_ring.jsonl.
--commit HASH says what was measured on a machine without git.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import rings
import timing
import timing_ranks
from rings import Problem

import ringflash as rf
from ringflash.launch.bootstrap import bootstrap
from ringflash.options import CHOICES

ROUNDS = 3  # ring and baseline in turn


def measure(problem: Problem, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows of one size, ring and baseline alternating so that both see the same clocks."""
    options = rf.Options(check="never", schedule=args.schedule, transport=args.transport)
    rows = []
    with rings.ours(problem, args.layout, options) as ring, rings.baseline(problem, args.layout) as base:
        told = explained(problem, ring, args.layout, options)
        error = difference(ring, base)
        for what, ours, theirs, factor in (
            ("forward", ring.forward, base.forward, 1.0),
            ("forward+backward", ring.both, base.both, 3.5),
        ):
            for how, clock in timing_ranks.CLOCKS.items():
                times = [(clock(theirs), clock(ours)) for _ in range(ROUNDS)]
                base_ms, ring_ms = map(statistics.median, zip(*times, strict=True))
                tera = factor * problem.flops / 1e9
                rows.append({
                    "tokens_per_gpu": problem.seqlen // problem.size, "ranks": problem.size, "pass": what, "how": how,
                    "layout": args.layout, **told, "ring_ms": ring_ms, "baseline_ms": base_ms,
                    "ring_tflops": tera / ring_ms, "baseline_tflops": tera / base_ms, "ratio": base_ms / ring_ms,
                    "all_times_ms": times, "difference_from_baseline": error, "peak_memory_bytes": timing_ranks.peak(ours),
                })  # fmt: skip
    return rows


def explained(problem: Problem, ring: rings.Entry, layout: str, options: rf.Options) -> dict[str, str]:
    """The transport, schedule and kernel of the ring, by name."""
    q, k, v, _ = problem.part(ring.positions)
    said = rf.explain(q, k, v, layout=problem.layout(layout), mask=problem.mask, rank=problem.rank, options=options)
    return {name: getattr(said, name).split(" (")[0] for name in ("transport", "schedule", "kernel")}


def difference(ring: rings.Entry, base: rings.Entry) -> float:
    """Relative rms difference of the ring's out and dq from the baseline's, the larger."""
    pairs = ((ring.forward(), base.forward()), (ring.both()[0], base.both()[0]))
    return max(((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768], help="tokens per GPU")
    parser.add_argument("--layout", default="zigzag")
    parser.add_argument("--schedule", default="auto", choices=CHOICES["schedule"])
    parser.add_argument("--transport", default="auto", choices=CHOICES["transport"])
    parser.add_argument("--out", type=Path, default=timing.RESULTS, help="folder of the result lines")
    timing.add_commit(parser)
    args = timing.parsed(parser)
    protocol = (
        f"{timing_ranks.protocol()}; median of {ROUNDS} rounds, ring and baseline in turn; "
        "baseline: one launch per pass, all keys local"
    )
    with bootstrap(device="cuda") as session:
        for tokens in args.tokens:
            for row in measure(Problem((tokens * session.world.size,), session.device), args):
                if session.world.rank == 0:
                    print(
                        f"{tokens:>6} tokens {row['pass']:<17} {row['how']:<12} ring {row['ring_tflops']:6.1f}  "
                        f"baseline {row['baseline_tflops']:6.1f} TFLOP/s per GPU  ratio {row['ratio']:.3f}  "
                        f"peak {row['peak_memory_bytes'] / 2**20:.0f} MiB",
                        flush=True,
                    )
                    timing.append("bench_ring", [row], protocol=protocol, commit=args.commit, folder=args.out)


if __name__ == "__main__":
    main()

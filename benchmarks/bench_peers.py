"""The ring beside other libraries on the same tokens in the same run: right first, then how fast.

    torchrun --nproc-per-node 2 benchmarks/bench_peers.py [--transports auto,p2p] [--tokens 8192 32768] [--rounds 2]
        [--cases causal,packed] [--layouts zigzag,balanced] [--peers ring-flash-attn,ulysses-fa4]

Causal sequences and packed documents, 32/8 heads, head dim 128, bfloat16. Everybody attends the same global tokens, each laid
out as it wants them; out, dq, dk and dv are compared with the ring's over P2P before anything is timed. Peers run in their best
form that is known here: "ring-flash-attn" is its zigzag on torch's FlashAttention-2 kernels, "-fa4" the same on flash-attn-4;
"torch-cp" is torch's context_parallel on cuDNN ("torch-cp-repeated": with key heads repeated, should it not take grouped
ones); "ulysses-..." exchanges heads for tokens. One that is not installed, knows no such case or fails is a line of output and
left out on all ranks; one that fails on one rank inside a collective ends the run after minutes.

TFLOP/s are per GPU of the slowest rank, by visible pairs. Lines go to benchmarks/results/bench_peers.jsonl after each case.
ratios, of our lines: the time of the baseline (one launch, same rows and intervals, all keys local, all GPUs busy) and of each
peer over ours; above 1 we are faster.
"""

import argparse
import contextlib
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ring_peers
import rings
import timing
import timing_ranks
import torch
from rings import Contestant, Entry, Problem
from torch import Tensor
from torch.distributed import ProcessGroup

from ringflash.launch.bootstrap import bootstrap
from ringflash.options import CHOICES

LAYOUTS = {"causal": ("zigzag",), "packed": ("balanced", "zigzag")}
PASSES = {"forward": 1.0, "forward+backward": 3.5}  # by the forward's FLOPs
Row = dict[str, Any]


def check(contestants: dict[str, Contestant], problem: Problem, verdicts: ProcessGroup) -> dict[str, dict[str, float]]:
    """Of each contestant that computes the right thing, this rank's differences; why another is left out is printed."""
    whole = rings.expected(problem)
    sound = {}
    for name, contestant in contestants.items():
        error, found = compare(contestant, problem, whole, verdicts=verdicts)
        if error:
            say(problem, f"{name} is left out: {error}")
        else:
            sound[name] = found
    return sound


def compare(
    contestant: Contestant, problem: Problem, whole: dict[str, Tensor], *, verdicts: ProcessGroup
) -> tuple[str, dict[str, float]]:
    """(error or "", differences); set up on all ranks before any of them computes, so that a missing peer holds nobody up."""
    entries: list[Entry] = []
    found: dict[str, float] = {}
    with contextlib.ExitStack() as stack:
        error = timing_ranks.attempt(lambda: entries.append(stack.enter_context(contestant(problem))), verdicts)
        error = error or timing_ranks.attempt(lambda: found.update(rings.differences(entries[0], whole)), verdicts)
    return error, found


def time_one(contestant: Contestant, problem: Problem, repeats: int) -> dict[tuple[str, str], float]:
    """Milliseconds by (pass, how), and under (pass, "peak") the bytes that this rank needs."""
    found: dict[tuple[str, str], float] = {}
    with contestant(problem) as one:
        for what, call in zip(PASSES, (one.forward, one.both), strict=True):
            for how, clock in timing_ranks.CLOCKS.items():
                found[what, how] = clock(call, repeats)
            found[what, "peak"] = timing_ranks.peak(call)
    return found


def measure(
    contestants: dict[str, Contestant], problem: Problem, args: argparse.Namespace, verdicts: ProcessGroup
) -> list[Row]:
    """The rows of one problem: all contestants in turn, round by round, so that all see the same clocks."""
    sound = check(contestants, problem, verdicts)
    times: dict[str, list[dict[tuple[str, str], float]]] = {name: [] for name in sound}
    for _ in range(args.rounds):
        for name in list(times):
            run = functools.partial(_timed, times[name], contestants[name], problem, args.repeats)
            error = timing_ranks.attempt(run, verdicts)
            if error:
                del times[name]
                say(problem, f"{name} is left out: {error}")
    return [
        row(problem, name, rounds, what=what, how=how) | {"differences": sound[name]}
        for what in PASSES
        for how in timing_ranks.CLOCKS
        for name, rounds in times.items()
    ]


def _timed(into: list[dict[tuple[str, str], float]], contestant: Contestant, problem: Problem, repeats: int) -> None:
    into.append(time_one(contestant, problem, repeats))


def row(problem: Problem, name: str, rounds: list[dict[tuple[str, str], float]], *, what: str, how: str) -> Row:
    """One result line."""
    ms = [found[what, how] for found in rounds]
    return {
        "tokens_per_gpu": problem.seqlen // problem.size, "ranks": problem.size, "documents": len(problem.lengths),
        "pass": what, "how": how, "by": name, "ms": min(ms), "tflops": PASSES[what] * problem.flops / min(ms) / 1e9,
        "all_ms": ms, "peak_memory_bytes": max(found[what, "peak"] for found in rounds),
    }  # fmt: skip


def add_ratios(rows: Sequence[Row]) -> None:
    """Give each of our rows its ratios to the baseline of its layout and to the peers, of the same pass and manner."""
    for mine in rows:
        if not mine["by"].startswith("ringflash "):
            continue
        rivals = {x["by"]: x["ms"] for x in rows if (x["pass"], x["how"]) == (mine["pass"], mine["how"])}
        base = f"baseline {mine['by'].split()[-1]}"
        wanted = [base, *(name for name in rivals if name.split()[0] not in ("baseline", "ringflash"))]
        mine["ratios"] = {name: rivals[name] / mine["ms"] for name in wanted if name in rivals}


def words(entry: Row) -> str:
    """A row as a line of output."""
    ratios = "  ".join(f"{name} {ratio:.3f}" for name, ratio in entry.get("ratios", {}).items())
    return (
        f"{entry['case']:<6} {entry['tokens_per_gpu']:>6} {entry['pass']:<16} {entry['how']:<12} {entry['by']:<28} "
        f"{entry['ms']:8.3f} ms {entry['tflops']:6.1f} TFLOP/s {entry['peak_memory_bytes'] / 2**20:6.0f} MiB  {ratios}"
    ).rstrip()


def say(problem: Problem, line: str) -> None:
    """Print on the first rank."""
    if problem.rank == 0:
        print(line, flush=True)


def names(known: Sequence[str], text: str) -> list[str]:
    """Comma-separated names, each one of the known."""
    found = text.split(",")
    wrong = [name for name in found if name not in known]
    if wrong:
        raise argparse.ArgumentTypeError(f"{', '.join(wrong)}: of {', '.join(known)}")
    return found


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768], help="tokens per GPU")
    parser.add_argument("--cases", type=functools.partial(names, tuple(LAYOUTS)), default=list(LAYOUTS))
    parser.add_argument("--transports", type=functools.partial(names, CHOICES["transport"]), default=["auto"])
    parser.add_argument("--layouts", type=lambda s: s.split(","), help="zigzag; packed documents: balanced,zigzag")
    peers = [name for name in ring_peers.MAKERS if name != "torch-cp-repeated"]
    parser.add_argument("--peers", type=functools.partial(names, tuple(ring_peers.MAKERS)), default=peers)
    parser.add_argument("--rounds", type=int, default=2, help="times that each is measured, all of a case in turn")
    parser.add_argument("--repeats", type=int, default=timing_ranks.REPEATS, help="calls of each isolated measurement")
    parser.add_argument("--out", type=Path, default=timing.RESULTS, help="folder of the result lines")
    timing.add_commit(parser)
    return parser


def run(case: str, problem: Problem, args: argparse.Namespace, verdicts: ProcessGroup) -> None:
    """Measure, print and keep one case."""
    contestants = rings.contestants(args.layouts or LAYOUTS[case], args.transports)
    contestants |= {name: ring_peers.MAKERS[name] for name in args.peers}
    rows = [{"case": case} | found for found in measure(contestants, problem, args, verdicts)]
    add_ratios(rows)
    for found in rows:
        say(problem, words(found))
    if problem.rank == 0:
        protocol = f"{timing_ranks.protocol(args.repeats)}; the least of {args.rounds} rounds over all"
        timing.append("bench_peers", rows, protocol=protocol, commit=args.commit, folder=args.out)


def main() -> None:
    args = timing.parsed(options())
    with bootstrap(device="cuda") as session:
        verdicts = timing_ranks.verdicts()
        for tokens in args.tokens:
            for case in args.cases:
                lengths = rings.lengths_of(case, tokens * session.world.size)
                run(case, Problem(lengths, session.device), args, verdicts)
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

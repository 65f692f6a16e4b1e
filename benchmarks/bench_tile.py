"""The tile on one GPU, ours beside others' in the same run: right first, then how fast.

    python benchmarks/bench_tile.py [--kernels hopper,triton] [--peers cudnn,fa3,fa4,sdpa-flash,flex] [--headdims 128,64]
                                    [--cases causal-32768,packed-16384] [--what forward,backward,carried,alone]
    python benchmarks/bench_tile.py --check [--dtypes bfloat16,float16]        only the comparison with float64
    python benchmarks/bench_tile.py --generators [--cases causal-8192]         optimistic against exact softmax, by input

what: "forward"; "backward", all that a gradient takes of inputs and outputs in 16 bits, as a ring of one does it: delta, a new
float32 dQ, the kernels, the rounding; "carried", the forward from a state to a state; "alone", the backward's kernels only.
kernels: "auto", "hopper", "triton", "hopper-exact" (forward), "hopper-deterministic" (backward).

Lines go to benchmarks/results/bench_tile.jsonl as they are made, what matters most first. ratio: to the fastest peer of the
same case and pass. tflops_of_blocks: by the pairs of the 128 x 128 blocks that hold a visible one. over_forward: a carried
forward's time over a plain one's. difference: of out, from the portable kernel's.
"""

import argparse
import contextlib
import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import cases
import check_tile
import generators
import peers
import timing
import torch
from torch import Tensor

from ringflash.kernels.reference import Segment
from ringflash.tile import Tile, pick

WHAT = {"forward": 1.0, "backward": 2.5, "carried": 1.0, "alone": 2.5}  # share of the forward's FLOPs
ONLY = {"hopper-exact": ("forward", "carried"), "hopper-deterministic": ("backward", "alone")}


class Timed(NamedTuple):
    """One thing to time."""

    by: str
    what: str
    call: Callable[[], object]
    peer: bool
    difference: float


def tile_of(kernel: str, q: Tensor, v: Tensor) -> Tile:
    """The tile of a name that --kernels takes."""
    name, _, variant = kernel.partition("-")
    tile = pick(name, q, v, deterministic=variant == "deterministic")
    return tile._replace(forward=functools.partial(tile.forward, exact=True)) if variant == "exact" else tile


def compared(out: Tensor, expected: Tensor) -> float:
    """Relative rms difference; RuntimeError where it is not rounding, so that nobody's time is taken for something else."""
    difference = float((out.detach().float() - expected).norm() / expected.norm())
    if not difference < 0.02:
        raise RuntimeError(f"computes something else: out is {difference:.1e} off")
    return difference


def ours(case: cases.Case, tensors: tuple[Tensor, ...], kernel: str, expected: Tensor) -> Iterator[Timed]:
    """The passes of one of our kernels; expected: out."""
    q, k, v, dout = tensors
    tile, scale, segments = tile_of(kernel, q, v), q.shape[3] ** -0.5, [Segment(k, v, *case.intervals())]
    by = kernel if kernel in ONLY else tile.name
    attend = functools.partial(tile.forward, q, segments, scale)
    out, lse = attend()
    difference = compared(out, expected)
    yield Timed(by, "forward", attend, False, difference)
    state: list[Any] = [None]

    def carry() -> None:
        state[0] = tile.forward(q, segments, scale, state[0], False)

    yield Timed(by, "carried", carry, False, difference)
    into, delta = torch.zeros(q.shape, device="cuda"), tile.delta(dout, out)

    def backward(delta: Tensor, dq: Tensor, add_dq: bool) -> tuple[Tensor, Tensor]:
        dkv = torch.empty_like(k), torch.empty_like(v)
        tile.backward(dout, q, segments, lse, delta, scale, dq, [dkv], add=False, add_dq=add_dq)
        return dkv

    def differentiate() -> tuple[Tensor, ...]:
        dq = torch.empty(q.shape, device="cuda")
        dkv = backward(tile.delta(dout, out), dq, False)
        return dq.to(q.dtype), *dkv

    yield Timed(by, "backward", differentiate, False, difference)
    yield Timed(by, "alone", lambda: backward(delta, into, True), False, difference)


def theirs(case: cases.Case, tensors: tuple[Tensor, ...], name: str, expected: Tensor) -> Iterator[Timed]:
    """The passes of a peer; expected: out."""
    peer = peers.set_up(name, case, tensors)
    out = peer.attend()
    difference = compared(peer.as_ours(out), expected)
    yield Timed(name, "forward", peer.attend, True, difference)
    if peer.backward:

        def differentiate() -> tuple[Tensor, ...]:
            return torch.autograd.grad(out, peer.inputs, peer.dout, retain_graph=True)

        yield Timed(name, "backward", differentiate, True, difference)


def time_case(case: cases.Case, headdim: int, args: argparse.Namespace, watch: timing.Watch) -> list[dict[str, Any]]:
    """All that is asked for at one case, as result lines; what fails is said and left out."""
    tensors = cases.inputs(case, headdim=headdim)
    q, k, v, _ = tensors
    expected = pick("triton", q, v).forward(q, [Segment(k, v, *case.intervals())], headdim**-0.5)[0].float()
    flops = timing.attention_flops(case.pairs(), cases.NHEADS_Q, headdim)
    makers = [(name, functools.partial(ours, case, tensors, name, expected)) for name in args.kernels]
    makers += [(name, functools.partial(theirs, case, tensors, name, expected)) for name in args.peers]
    timed: list[Timed] = []
    for name, make in makers:
        with reported(f"{case.name:13s} {headdim:3d} {name}"):
            timed += [x for x in make() if x.what in args.what and x.what in ONLY.get(name, WHAT)]
    lines = []
    for one, found in zip(timed, figures([x.call for x in timed], args, watch), strict=True):
        if found:
            known = {"what": one.what, "by": one.by, "peer": one.peer, "difference": one.difference}
            lines.append({"case": case.name, "headdim": headdim} | known | found)
    for entry in lines:
        rate(entry, lines, flops, case)
    return lines


@contextlib.contextmanager
def reported(name: str) -> Iterator[None]:
    """What fails inside is a line of output: a peer that breaks must not take the rest along."""
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, peers.Unavailable | NotImplementedError) else f"{type(error).__name__} "
        print(f"{name}: {kind}{str(error)[:300]}", flush=True)


def figures(calls: list[Callable[[], object]], args: argparse.Namespace, watch: timing.Watch) -> list[dict[str, float]]:
    """Milliseconds, clock and power of each call, medians of rounds over all of them; empty for a call that fails."""
    found: list[list[dict[str, float]]] = [[] for _ in calls]
    for _ in range(args.rounds):
        for call, so_far in zip(calls, found, strict=True):
            with reported("not timed"):
                so_far.append(timing.measure(call, warm=args.warm, rep=args.rep, watch=watch))
    return [{key: statistics.median(x[key] for x in rounds if key in x) for key in rounds[0]} if rounds else {}
            for rounds in found]  # fmt: skip


def rate(entry: dict[str, Any], lines: list[dict[str, Any]], flops: int, case: cases.Case) -> None:
    """Add the figures that follow from the times, and print the line."""
    entry["tflops"] = round(WHAT[entry["what"]] * flops / entry["ms"] / 1e9, 1)
    if case.kind in ("packed", "window"):
        entry["tflops_of_blocks"] = round(entry["tflops"] / case.share(), 1)
    best = min((x for x in lines if x["peer"] and x["what"] == entry["what"]), key=lambda x: x["ms"], default=None)
    plain = [x["ms"] for x in lines if (x["by"], x["what"]) == (entry["by"], "forward")]
    against = ""
    if best is not None and not entry["peer"]:
        entry |= {"best_peer": best["by"], "ratio": round(best["ms"] / entry["ms"], 3)}
        against = f"{entry['ratio']:6.3f} x {best['by']}"
    if entry["what"] == "carried" and plain:
        entry["over_forward"] = round(entry["ms"] / plain[0], 3)
        against = f"{entry['over_forward']:6.3f} of forward"
    blocks = f"{entry['tflops_of_blocks']:6.1f} of blocks" if "tflops_of_blocks" in entry else ""
    clock = f"{entry['sm_mhz']} MHz {entry['watts']} W" if "watts" in entry else ""
    print(
        f"{entry['case']:13s} {entry['headdim']:3d} {entry['what']:8s} {entry['by']:20s} {entry['ms']:9.3f} ms "
        f"{entry['tflops']:6.1f} TFLOP/s {blocks:16s} {against:20s} {clock}",
        flush=True,
    )


def rerun_study(case: cases.Case, headdim: int, args: argparse.Namespace, watch: timing.Watch) -> list[dict[str, Any]]:
    """Optimistic softmax against exact, in time and in error, over the named generators."""
    lines = []
    for name in args.generators:
        entry = {"case": case.name, "headdim": headdim, "what": "forward", "by": "hopper", "generator": name}
        entry |= generators.errors(name, headdim)
        q, k, v = generators.make(name, case.seqlen, headdim=headdim)
        attend = functools.partial(pick("hopper", q, v).forward, q, [Segment(k, v, *case.intervals())], headdim**-0.5)
        stats = torch.zeros(2, dtype=torch.int32, device="cuda")
        attend(stats=stats)
        items, reruns = stats.tolist()
        timed = figures([functools.partial(attend, exact=exact) for exact in (False, True)], args, watch)
        ms, exact = (x["ms"] for x in timed)
        entry |= {"items": items, "reruns": reruns, "ms": ms, "exact_ms": exact, "ratio_to_exact": round(ms / exact, 3)}
        lines.append(entry)
        print(
            f"{case.name:13s} {headdim:3d} {name:12s} {ms:8.3f} ms, exact {exact:8.3f}: {ms / exact:6.3f} x; reruns "
            f"{reruns} of {items} ({reruns / max(items, 1):.1%}); rms {entry['rms']:.2e}, exact {entry['rms_exact']:.2e}, "
            f"triton {entry['rms_triton']:.2e}, lse {entry['lse']:.1e}",
            flush=True,
        )
    return lines


def options() -> argparse.ArgumentParser:
    def names(s: str) -> list[str]:
        return s.split(",")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only check")
    parser.add_argument("--no-check", action="store_true", help="time what was checked before")
    parser.add_argument("--dtypes", type=names, default=["bfloat16"], help="to check")
    parser.add_argument("--headdims", type=lambda s: list(map(int, s.split(","))), default=[128, 64])
    parser.add_argument("--kernels", type=names, default=["auto"])
    parser.add_argument("--peers", type=names, default=[], help=f"of {','.join(peers.MAKERS)}")
    parser.add_argument("--what", type=names, default=["forward", "backward"], help=f"of {','.join(WHAT)}")
    parser.add_argument("--cases", type=names, default=list(cases.CASES), help=f"of {','.join(cases.CASES)}")
    parser.add_argument("--rounds", type=int, default=1, help="times that each is measured, all of a case in turn")
    parser.add_argument("--generators", type=names, nargs="?", const=list(generators.MAKERS), help="study reruns instead")
    timing.add_options(parser)
    return parser


def main() -> int:
    args = timing.parsed(options())
    kernels = sorted({kernel.partition("-")[0] for kernel in args.kernels})
    if not args.no_check and not check_tile.check(kernels, args.dtypes, args.headdims):
        return 1
    if args.check:
        return 0
    watch = timing.Watch()
    run = rerun_study if args.generators else time_case
    for headdim in args.headdims:
        for name in args.cases:
            timing.keep("bench_tile", run(cases.CASES[name], headdim, args, watch), args)
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

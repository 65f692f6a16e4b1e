"""Alternative tiles of the portable kernels on one GPU: what kernels/config.py was chosen from.

python benchmarks/sweep_tile.py [--cases causal-32768,packed-16384] [--commit HASH]
"""

import argparse
from collections.abc import Callable

import cases
import timing
import torch

from ringflash.kernels import backward, forward, portable
from ringflash.kernels.config import Tile
from ringflash.kernels.reference import Segment

TILES = {
    "forward": ((128, 128, 8, 3), (128, 128, 8, 2), (128, 64, 8, 3)),
    "dq": ((128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2)),
    "dkv": ((64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 8, 3, 0), (64, 128, 8, 3), (64, 128, 8, 2), (32, 128, 8, 3)),
}
SHARE = {"forward": 1.0, "dq": 1.5, "dkv": 2.0}  # of the forward's FLOPs
LOADS = ((True, None), (False, None), (True, 4), (True, 32))  # by descriptor or not, heads walked together


def functions(case: cases.Case) -> dict[str, Callable[[portable.Options], object]]:
    """What is timed, by its options."""
    q, k, v, dout = cases.inputs(case)
    scale = q.shape[3] ** -0.5
    segments = [Segment(k, v, *case.intervals())]
    out, lse = forward.forward(q, segments, scale)
    delta = backward.delta(dout, out)
    dq, dkv = (torch.zeros(x, device="cuda") for x in (q.shape, (2, *k.shape)))
    return {
        "forward": lambda options: forward.launch(q, segments, scale, options=options),
        "dq": lambda options: backward.launch_dq(dout, q, segments, lse, delta, scale, dq, options=options),
        "dkv": lambda options: backward.launch_dkv(
            dout, q, segments, lse, delta, scale, [(dkv[0], dkv[1])], options=options
        ),
    }  # fmt: skip


def sweep(case: cases.Case, args: argparse.Namespace, watch: timing.Watch) -> list[dict[str, object]]:
    """Time every tile at a case, the first of each kernel with every way of loading."""
    lines: list[dict[str, object]] = []
    flops = timing.attention_flops(case.pairs(), cases.NHEADS_Q, cases.HEADDIM)
    for what, run in functions(case).items():
        for tile in TILES[what]:
            for tma, chunk in LOADS if tile == TILES[what][0] else LOADS[:1]:
                label = f"{tile} {'tma' if tma else 'ptr'} {chunk or ''}"
                options = portable.Options(tile=Tile(*tile), tma=tma, chunk=chunk)
                try:
                    figures = timing.measure(lambda: run(options), warm=args.warm, rep=args.rep, watch=watch)  # noqa: B023
                except Exception as error:  # a tile that does not fit is a result too
                    print(f"{case.name} {what} {label}: {type(error).__name__} {str(error)[:80]}", flush=True)
                    continue
                tflops = round(SHARE[what] * flops / figures["ms"] / 1e9)
                lines.append({"case": case.name, "what": what, "by": label, **figures, "tflops": tflops})
                print(f"{case.name:14s} {what:9s} {label:40s} {figures['ms']:8.3f} ms {tflops:5d} TFLOP/s", flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=lambda s: s.split(","), default=list(cases.CASES), help=f"of {','.join(cases.CASES)}")
    timing.add_options(parser)
    args = timing.parsed(parser)
    watch = timing.Watch()
    for name in args.cases:
        timing.keep("sweep_tile", sweep(cases.CASES[name], args, watch), args)


if __name__ == "__main__":
    main()

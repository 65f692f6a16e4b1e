"""The tile on one GPU: right first, then how fast.

python benchmarks/bench_tile.py [--check] [--peers sdpa-flash,cudnn] [--sweep] [--commit HASH]
"""

import argparse
import math
from collections.abc import Callable
from typing import Any

import cases
import timing
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringflash.kernels import backward, forward, portable
from ringflash.kernels.config import Tile
from ringflash.kernels.reference import Segment

PEERS = {"sdpa-flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
SWEEP = {
    "forward": ((128, 128, 8, 3), (128, 128, 8, 2), (128, 64, 8, 3)),
    "dq": ((128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2)),
    "dkv": ((64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 8, 3, 0), (64, 128, 8, 3), (64, 128, 8, 2), (32, 128, 8, 3)),
}


def dense(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, begin: Tensor, end: Tensor) -> list[Tensor]:
    """out, lse, dq, dk, dv in float64 by autograd over the whole score matrix: shares nothing with the kernels."""
    q, k, v = (x.double().detach().requires_grad_() for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    keys = torch.arange(k.shape[1], device=q.device)
    visible = (keys >= begin[:, None, :, None]) & (keys < end[:, None, :, None])
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(group, 2)) / math.sqrt(q.shape[3])
    scores = scores.masked_fill(~visible, -math.inf)
    lse = scores.logsumexp(-1)
    p = (scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()
    out = torch.einsum("bhqk,bkhd->bqhd", p, v.repeat_interleave(group, 2))
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), dout.double())]


def rms(x: Tensor, reference: Tensor) -> float:
    """Root mean square error relative to the reference, over its finite entries."""
    finite = reference.isfinite()
    if not bool((finite == x.isfinite()).all()):
        return math.nan
    return float((x.double() - reference)[finite].norm() / reference[finite].norm())


def tile_results(q: Tensor, segments: list[Segment], dout: Tensor, options: dict[str, portable.Options]) -> list[Tensor]:
    """out, lse, dq, dk, dv of one segment, outputs poisoned where the kernels add or write."""
    scale = q.shape[3] ** -0.5
    out, lse = forward.launch(q, segments, scale, options=options["forward"])
    delta = backward.delta(dout, out)
    dq = torch.zeros(q.shape, device=q.device)
    dkv = [(torch.zeros(s.k.shape, device=q.device), torch.zeros(s.v.shape, device=q.device)) for s in segments]
    backward.launch_dq(dout, q, segments, lse, delta, scale, dq, options=options["dq"])
    backward.launch_dkv(dout, q, segments, lse, delta, scale, dkv, options=options["dkv"])
    return [out, lse, dq, torch.cat([x[0] for x in dkv], 1), torch.cat([x[1] for x in dkv], 1)]


def random_intervals(seqlen_q: int, seqlen_k: int, seed: int) -> tuple[Tensor, Tensor]:
    """Monotone intervals with empty rows and keys that nobody sees."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.randint(0, seqlen_k - seqlen_k // 8, (2, seqlen_q), generator=generator).sort(1).values.int()
    ends[:, :30], ends[:, -40:] = 0, seqlen_k - seqlen_k // 8
    return ends.amin(0)[None].cuda().contiguous(), ends.amax(0)[None].cuda().contiguous()


def poisoned(x: Tensor, begin: Tensor, end: Tensor) -> Tensor:
    """x inside a longer buffer, NaN in the tail and at keys that no row sees."""
    keys = torch.arange(x.shape[1], device=x.device)
    seen = ((keys >= begin[0, :, None]) & (keys < end[0, :, None])).any(0)
    buffer = torch.full((x.shape[0], x.shape[1] + 300, *x.shape[2:]), math.nan, device=x.device, dtype=x.dtype)
    buffer[:, : x.shape[1]] = torch.where(seen[None, :, None, None], x, math.nan)
    return buffer[:, : x.shape[1]]


def check_one(name: str, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, intervals: tuple[Tensor, Tensor],
              tma: bool | None) -> bool:  # fmt: skip
    """Compare with float64; 16-bit outputs may differ by 1%, float32 ones (gradients too) by 1e-5."""
    begin, end = intervals
    half = k.shape[1] // 2 + 3
    options = dict.fromkeys(SWEEP, portable.Options(tma=tma))
    expected = dense(q, k, v, dout, begin, end)
    k, v = poisoned(k, begin, end), poisoned(v, begin, end)
    parts = [Segment(k[:, :half], v[:, :half], begin.clamp(max=half), end.clamp(max=half)),
             Segment(k[:, half:], v[:, half:], (begin - half).clamp(min=0), (end - half).clamp(min=0),
                     torch.ones(1, dtype=torch.int32, device=q.device))]  # fmt: skip
    errors = [max(pair) for pair in zip(*(
        [rms(x, y) for x, y in zip(tile_results(q, s, dout, options), expected, strict=True)]
        for s in ([Segment(k, v, begin, end)], parts)), strict=True)]  # fmt: skip
    bound = 1e-5 if q.dtype == torch.float32 else 1e-2
    right = all(error < bound for error in errors)
    print(f"{'ok   ' if right else 'WRONG'} {name:34s} " + " ".join(f"{e:.1e}" for e in errors), flush=True)
    return right


def check(names: list[str], headdims: list[int]) -> bool:
    """Shapes, masks, dtypes, both ways of loading; prints out, lse, dq, dk, dv errors."""
    right = True
    for dtype in (getattr(torch, name) for name in names):
        for headdim in headdims:
            headdim_v = {80: 48, 192: 128}.get(headdim, headdim)
            for kind in ("causal", "random"):
                n = 777
                q, k, v, dout = cases.inputs(cases.Case("", n, ""), nheads=(4, 2), headdim=headdim, dtype=dtype)
                v, dout = v[..., :headdim_v], dout[..., :headdim_v]
                intervals = cases.Case("", n, kind).intervals() if kind == "causal" else random_intervals(n, n, 1)
                for tma in (None, False):
                    name = f"{str(dtype)[6:]} {headdim}/{headdim_v} {kind} {'tma' if tma is None else 'ptr'}"
                    right &= check_one(name, q, k, v, dout, intervals, tma)
    return right


def functions(case: cases.Case, options: dict[str, portable.Options]) -> dict[str, tuple[Callable[[], object], float]]:
    """What is timed, with the share of the forward's FLOPs that each is credited with."""
    q, k, v, dout = cases.inputs(case)
    scale = q.shape[3] ** -0.5
    segments = [Segment(k, v, *case.intervals())]
    out, lse = forward.forward(q, segments, scale)
    delta = backward.delta(dout, out)
    dq, dkv = torch.zeros(q.shape, device="cuda"), [(torch.zeros(k.shape, device="cuda"), torch.zeros(v.shape, device="cuda"))]

    def both() -> None:
        rows = backward.delta(dout, out)
        backward.launch_dq(dout, q, segments, lse, rows, scale, dq, options=options["dq"])
        backward.launch_dkv(dout, q, segments, lse, rows, scale, dkv, options=options["dkv"])

    return {
        "forward": (lambda: forward.launch(q, segments, scale, options=options["forward"]), 1.0),
        "dq": (lambda: backward.launch_dq(dout, q, segments, lse, delta, scale, dq, options=options["dq"]), 1.5),
        "dkv": (lambda: backward.launch_dkv(dout, q, segments, lse, delta, scale, dkv, options=options["dkv"]), 2.0),
        "backward": (both, 2.5),
    }


def result(case: cases.Case, what: str, by: str, ms: float, flops: float) -> dict[str, Any]:
    """One line of results, printed as well."""
    line = {"case": case.name, "what": what, "by": by, "ms": round(ms, 4), "tflops": round(flops / ms / 1e9)}
    print(f"{case.name:14s} {what:9s} {by:40s} {ms:8.3f} ms {line['tflops']:5d} TFLOP/s", flush=True)
    return line


def time_case(case: cases.Case, args: argparse.Namespace, which: tuple[str, ...], options: dict[str, portable.Options],
              label: str) -> list[dict[str, Any]]:  # fmt: skip
    flops = timing.attention_flops(case.pairs(), cases.NHEADS_Q, cases.HEADDIM)
    lines = []
    for name, (fn, share) in functions(case, options).items():
        if name in which:
            ms = timing.median_ms(fn, warm=args.warm, rep=args.rep)
            lines.append(result(case, name, label, ms, share * flops))
    return lines


def time_peer(case: cases.Case, args: argparse.Namespace, peer: str) -> list[dict[str, Any]]:
    q, k, v, dout = (x.transpose(1, 2).contiguous().requires_grad_() for x in cases.inputs(case))
    flops = timing.attention_flops(case.pairs(), cases.NHEADS_Q, cases.HEADDIM)
    lines = []
    with sdpa_kernel(PEERS[peer]):

        def attend() -> Tensor:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=case.kind == "causal", enable_gqa=True)

        out = attend()

        def differentiate() -> tuple[Tensor, ...]:
            return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

        for name, fn, share in (("forward", attend, 1.0), ("backward", differentiate, 2.5)):
            ms = timing.median_ms(fn, warm=args.warm, rep=args.rep)
            lines.append(result(case, name, peer, ms, share * flops))
    return lines


def sweep(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time every tile of SWEEP at the asked cases, with descriptors and without."""
    lines: list[dict[str, Any]] = []
    for name in args.cases:
        for what, tiles in SWEEP.items():
            for tile in tiles:
                for tma, chunk in ((True, None), (False, None), (True, 4), (True, 32)) if tile == tiles[0] else ((True, None),):
                    label = f"{tile} {'tma' if tma else 'ptr'} {chunk or ''}"
                    options = dict.fromkeys(SWEEP, portable.Options(tile=Tile(*tile), tma=tma, chunk=chunk))
                    try:
                        lines += time_case(cases.CASES[name], args, (what,), options, label)
                    except Exception as error:  # a tile that does not fit is a result too
                        print(f"{name} {what} {label}: {type(error).__name__} {str(error)[:80]}", flush=True)
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only check")
    parser.add_argument("--dtypes", type=lambda s: s.split(","), default=["bfloat16", "float16", "float32"], help="to check")
    parser.add_argument("--headdims", type=lambda s: list(map(int, s.split(","))), default=[128, 64, 80, 192, 256])
    parser.add_argument("--peers", type=lambda s: s.split(","), default=[], help=f"also time: {','.join(PEERS)}")
    parser.add_argument("--sweep", action="store_true", help="time alternative tiles")
    parser.add_argument("--cases", type=lambda s: s.split(","), default=list(cases.CASES))
    parser.add_argument("--warm", type=float, default=50)
    parser.add_argument("--rep", type=float, default=200)
    timing.add_commit(parser)
    args = parser.parse_args()
    if not check(args.dtypes, args.headdims):
        return 1
    if args.check:
        return 0
    if args.sweep:
        lines = sweep(args)
    else:
        options = dict.fromkeys(SWEEP, portable.Options())
        lines = []
        for case in (cases.CASES[name] for name in args.cases):
            lines += time_case(case, args, (*SWEEP, "backward"), options, "ringflash")
            for peer in args.peers if case.kind in ("causal", "full") else ():
                lines += time_peer(case, args, peer)
    timing.append("bench_tile", lines, protocol=timing.PROTOCOL.format(warm=args.warm, rep=args.rep), commit=args.commit)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The tile against dense float64 on one GPU: shapes, masks and dtypes, poisoned where nothing may be read.

python benchmarks/check_tile.py [--kernels triton,hopper] [--dtypes bfloat16] [--headdims 128,64]
"""

import argparse
import functools
import itertools
import math
from collections.abc import Callable, Iterator

import cases
import timing
import torch
from torch import Tensor

from ringflash.kernels import backward, forward, portable
from ringflash.kernels.reference import Segment
from ringflash.tile import Tile, pick

NAMES = ("out", "lse", "dq", "dk", "dv")


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


def ways(kernel: str, q: Tensor, v: Tensor) -> Iterator[tuple[str, Tile]]:
    """The ways a kernel computes, each as a tile: with and without descriptors, deterministic, exact."""
    tile = pick(kernel, q, v)
    if tile.name == "triton":
        for name, tma in (("tma", None), ("ptr", False)):
            options = portable.Options(tma=tma)
            run = functools.partial(forward.launch, options=options)
            yield name, tile._replace(forward=run, backward=functools.partial(_portable_backward, options))
        return
    yield "default", tile
    exact = functools.partial(tile.forward, exact=True)
    yield "exact, deterministic", pick(kernel, q, v, deterministic=True)._replace(forward=exact)


def _portable_backward(
    options: portable.Options, dout: Tensor, q: Tensor, segments: list[Segment], lse: Tensor, delta: Tensor, scale: float,
    dq: Tensor, dkv: list[tuple[Tensor, Tensor]],
) -> None:  # fmt: skip
    backward.launch_dq(dout, q, segments, lse, delta, scale, dq, options=options)
    backward.launch_dkv(dout, q, segments, lse, delta, scale, dkv, options=options)


def results(tile: Tile, q: Tensor, segments: list[Segment], dout: Tensor) -> list[Tensor]:
    """out, lse, dq, dk, dv of the segments' keys in a row."""
    scale = q.shape[3] ** -0.5
    out, lse = tile.forward(q, segments, scale)
    delta = tile.delta(dout, out)
    dq = torch.zeros(q.shape, device=q.device)
    dkv = [(torch.zeros(s.k.shape, device=q.device), torch.zeros(s.v.shape, device=q.device)) for s in segments]
    tile.backward(dout, q, segments, lse, delta, scale, dq, dkv)
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


def in_two(k: Tensor, v: Tensor, begin: Tensor, end: Tensor) -> list[Segment]:
    """The keys as two segments, the second with a flag."""
    half = k.shape[1] // 2 + 3
    ready = torch.full((1,), k.shape[2], dtype=torch.int32, device=k.device)
    return [
        Segment(k[:, :half], v[:, :half], begin.clamp(max=half), end.clamp(max=half)),
        Segment(k[:, half:], v[:, half:], (begin - half).clamp(min=0), (end - half).clamp(min=0), ready),
    ]


def check_one(name: str, tile: Tile, tensors: tuple[Tensor, ...], intervals: tuple[Tensor, Tensor]) -> bool:
    """Compare with float64; 16-bit outputs may differ by 1%, float32 ones (gradients too) by 1e-5."""
    q, k, v, dout = tensors
    expected = dense(q, k, v, dout, *intervals)
    k, v = poisoned(k, *intervals), poisoned(v, *intervals)
    errors = [0.0] * len(NAMES)
    for segments in ([Segment(k, v, *intervals)], in_two(k, v, *intervals)):
        found = [rms(x, y) for x, y in zip(results(tile, q, segments, dout), expected, strict=True)]
        errors = [a if math.isnan(a) or a > b else b for a, b in zip(errors, found, strict=True)]
    right = all(error < (1e-5 if q.dtype == torch.float32 else 1e-2) for error in errors)
    print(f"{'ok   ' if right else 'WRONG'} {name:50s} " + " ".join(f"{e:.1e}" for e in errors), flush=True)
    return right


def _tensors(n: int, headdim: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    headdim_v = {80: 48, 192: 128}.get(headdim, headdim)
    q, k, v, dout = cases.inputs(cases.Case("", n, ""), nheads=(4, 2), headdim=headdim, dtype=dtype)
    return q, k, v[..., :headdim_v], dout[..., :headdim_v]


def check(kernels: list[str], names: list[str], headdims: list[int], *, n: int = 777) -> bool:
    """All ways of the kernels; prints out, lse, dq, dk, dv errors. A kernel that has no such head dim is passed over."""
    right = True
    for dtype, headdim, kernel in itertools.product(names, headdims, kernels):
        for run in _checks(kernel, _tensors(n, headdim, getattr(torch, dtype))):
            right &= run()
    return right


def _checks(kernel: str, tensors: tuple[Tensor, ...]) -> Iterator[Callable[[], bool]]:
    q, _, v, _ = tensors
    n, dtype = q.shape[1], str(q.dtype).removeprefix("torch.")
    try:
        tiles = list(ways(kernel, q, v))
    except NotImplementedError as error:
        print(f"      {error}", flush=True)
        return
    for way, tile in tiles:
        for kind in ("causal", "random"):
            intervals = cases.Case("", n, kind).intervals() if kind == "causal" else random_intervals(n, n, 1)
            name = f"{tile.name} {way} {dtype} {q.shape[3]}/{v.shape[3]} {kind}"
            yield functools.partial(check_one, name, tile, tensors, intervals)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=lambda s: s.split(","), default=["triton", "hopper"])
    parser.add_argument("--dtypes", type=lambda s: s.split(","), default=["bfloat16", "float16", "float32"])
    parser.add_argument("--headdims", type=lambda s: list(map(int, s.split(","))), default=[128, 64, 80, 192, 256])
    args = timing.parsed(parser)
    return 0 if check(args.kernels, args.dtypes, args.headdims) else 1


if __name__ == "__main__":
    raise SystemExit(main())

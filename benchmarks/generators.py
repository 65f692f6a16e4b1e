"""Inputs by name on which an optimistic softmax reference may fail: sinks, heavy tails, a needle, trained-like, adversarial.

A "nat" is a unit of the softmax exponent scale * (q . k), scale = headdim ** -0.5. Each key head has a direction that its
query heads share, so that a key can be lifted by a known number of nats above those that do not have it.
"""

from collections.abc import Callable

import cases
import torch
from torch import Tensor

ROWS = 128  # queries of one program
PULL = 4.0  # length of a query along the direction that lifted keys lie in
SMALL = 1024  # tokens where errors are taken

Shape = tuple[int, int, int, int]  # seqlen, nheads_q, nheads_k, headdim
Maker = Callable[[Shape, torch.Generator], tuple[Tensor, Tensor, Tensor]]


def make(
    name: str, seqlen: int, *, nheads: tuple[int, int] = (cases.NHEADS_Q, cases.NHEADS_K), headdim: int = cases.HEADDIM,
    dtype: torch.dtype = torch.bfloat16, seed: int = 0, device: str = "cuda",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q, k, v of a generator: (1, seqlen, nheads, headdim)."""
    generator = torch.Generator(device=device).manual_seed(seed)
    q, k, v = (x.to(dtype)[None] for x in MAKERS[name]((seqlen, *nheads, headdim), generator))
    return q, k, v


def _randn(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)


def normal(shape: Shape, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Standard normal numbers: scores of about one nat."""
    n, nheads_q, nheads_k, headdim = shape
    return tuple(_randn(generator, n, heads, headdim) for heads in (nheads_q, nheads_k, nheads_k))  # pyright: ignore


def _lifted(nats: float, at: Callable[[int], int]) -> Maker:
    """One key, at(seqlen), that many nats above what a key without the shared direction scores."""

    def make(shape: Shape, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        n, nheads_q, nheads_k, headdim = shape
        q, k, v = normal(shape, generator)
        u = torch.nn.functional.normalize(_randn(generator, nheads_k, headdim), dim=-1)
        q, k = _without(q, u), _without(k, u)
        q += PULL * u.repeat_interleave(nheads_q // nheads_k, 0)
        k[at(n)] = nats * headdim**0.5 / PULL * u
        return q, k, v

    return make


def _without(x: Tensor, u: Tensor) -> Tensor:
    """x (seqlen, nheads, headdim) less its part along the directions u (nheads_k, headdim)."""
    u = u.repeat_interleave(x.shape[1] // u.shape[0], 0)
    return x - (x * u).sum(-1, keepdim=True) * u


def heavy_tailed(shape: Shape, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """q and k from Student's t with 3 degrees of freedom: few numbers make most of a score."""
    q, k, v = normal(shape, generator)
    q, k = (x / (sum(_randn(generator, *x.shape).square() for _ in range(3)) / 3).sqrt() for x in (q, k))
    return q, k, v


def trained(shape: Shape, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """As behind a trained model's projections: tokens that resemble their neighbours, q and k projections that match more from
    head to head, a gain per channel behind qk-norm, rotary positions.
    """
    n, nheads_q, nheads_k, headdim = shape
    width = 256
    x = _neighbours(_randn(generator, n, width))
    w_k = _randn(generator, nheads_k, width, headdim) / width**0.5
    noise = _randn(generator, nheads_q, width, headdim) / width**0.5
    match = torch.linspace(0, 1, nheads_q, device=x.device)[:, None, None]
    w_q = match * w_k.repeat_interleave(nheads_q // nheads_k, 0) + (1 - match * match).sqrt() * noise
    gain = 1.4 * (0.3 * _randn(generator, headdim)).exp()
    q, k, v = (torch.einsum("nw,hwd->nhd", x, w) for w in (w_q, w_k, _randn(generator, *w_k.shape) / width**0.5))
    q, k = (_rotated(torch.nn.functional.rms_norm(x, (headdim,)) * gain) for x in (q, k))
    return q, k, v


def _neighbours(x: Tensor, reach: int = 16) -> Tensor:
    """Each row mixed with those before it, of unit size again, and a part that all share."""
    kernel = torch.exp(-torch.arange(reach, device=x.device) / (reach / 4))
    padded = torch.nn.functional.pad(x.T, (reach - 1, 0))
    mixed = torch.nn.functional.conv1d(padded[:, None], kernel.flip(0)[None, None])[:, 0].T
    return (mixed / kernel.square().sum().sqrt() + x[:1]) / 2**0.5


def _rotated(x: Tensor, base: float = 500_000.0) -> Tensor:
    """Rotary positions, halves paired."""
    n, _, headdim = x.shape
    frequency = base ** (-torch.arange(0, headdim, 2, device=x.device) / headdim)
    angle = torch.arange(n, device=x.device)[:, None, None] * frequency
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def adversarial(shape: Shape, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """For each program's rows a key of their own, 140 nats up, half way back: neither its first nor its last blocks have it."""
    n, nheads_q, nheads_k, headdim = shape
    q, k, v = normal(shape, generator)
    for program in range(4, -(-n // ROWS)):
        u = torch.nn.functional.normalize(_randn(generator, nheads_k, headdim), dim=-1)
        rows = slice(program * ROWS, (program + 1) * ROWS)
        q[rows] = _without(q[rows], u) + 2 * PULL * u.repeat_interleave(nheads_q // nheads_k, 0)
        k[program // 2 * ROWS + program % 2 * (ROWS // 2) + program // 2 % (ROWS // 2)] = 140 * headdim**0.5 / (2 * PULL) * u
    return q, k, v


MAKERS: dict[str, Maker] = {
    "normal": normal,
    "sink-10": _lifted(10, lambda n: 0),
    "sink-30": _lifted(30, lambda n: 0),
    "sink-60": _lifted(60, lambda n: 0),
    "heavy-tailed": heavy_tailed,
    "needle": _lifted(40, lambda n: n // 2),
    "trained": trained,
    "adversarial": adversarial,
}


def errors(name: str, headdim: int) -> dict[str, float]:
    """rms errors of a causal forward against float64 at a small size: optimistic, exact, the portable kernel; and of lse."""
    import check_tile

    from ringflash.kernels.reference import Segment
    from ringflash.tile import pick

    q, k, v = make(name, SMALL, nheads=(8, 2), headdim=headdim)
    intervals = cases.Case("", SMALL, "causal").intervals()
    out, lse = check_tile.dense(q, k, v, torch.zeros_like(q), *intervals)[:2]
    call, scale = [Segment(k, v, *intervals)], headdim**-0.5
    hopper = pick("hopper", q, v).forward
    found = hopper(q, call, scale)
    return {
        "rms": check_tile.rms(found[0], out),
        "rms_exact": check_tile.rms(hopper(q, call, scale, exact=True)[0], out),
        "rms_triton": check_tile.rms(pick("triton", q, v).forward(q, call, scale)[0], out),
        "lse": check_tile.rms(found[1], lse),
    }

"""The ring against its baseline: the same kernel in one launch, same rows and intervals, all keys already local.

    torchrun --nproc-per-node 2 benchmarks/bench_ring.py [--tokens 8192 32768] [--schedule auto] [--layout zigzag]

Prints TFLOP/s per GPU of the slowest rank and the ratio ring / baseline for forward and forward+backward, isolated calls
and back to back, with peak memory; appends one line per row to benchmarks/results/bench_ring.jsonl.
--commit HASH says what was measured on a machine without git.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timing
import torch
import torch.distributed as dist
from cases import HEADDIM, NHEADS_K, NHEADS_Q
from torch import Tensor

import ringflash as rf
from ringflash.launch.bootstrap import bootstrap
from ringflash.plan import make_plan
from ringflash.tile import pick

PROTOCOL = (
    "median of {repeats} after {warmup} warm-ups, CUDA events, slowest rank; isolated: barrier and host synchronisation "
    "before each call; back to back: {burst} calls between two events; baseline: one launch per pass, all keys local"
)
REPEATS, WARMUP, BURST = 20, 3, 10


class Workload:
    """One rank's tensors for a number of tokens per GPU, and the calls that are timed."""

    def __init__(self, tokens: int, layout: str, schedule: str, device: torch.device) -> None:
        self.cp = rf.ContextParallel(layout=layout, options=rf.Options(check="never", schedule=schedule))
        self.batch = self.cp.batch(tokens * self.cp.size, rf.Mask(causal=True))
        g = torch.Generator(device=device).manual_seed(self.cp.rank)
        make = [
            torch.randn(1, tokens, h, HEADDIM, device=device, generator=g) for h in (NHEADS_Q, NHEADS_K, NHEADS_K, NHEADS_Q)
        ]
        self.q, self.k, self.v, self.dout = (x.to(torch.bfloat16) for x in make)
        for x in (self.q, self.k, self.v):
            x.requires_grad_()
        self.tile = pick("auto", self.q, self.v)
        self.scale = HEADDIM**-0.5
        plan = make_plan(self.batch.layout, self.batch.mask, schedule=schedule)
        intervals = plan.intervals(self.cp.rank, device)
        gathered = [self._gather(x.detach()) for x in (self.k, self.v)]
        self.segments = [
            self.tile.segment(gathered[0][block], gathered[1][block], *intervals[block])
            for block in plan.attended(self.cp.rank)
        ]
        self.flops = timing.attention_flops(sum(int(x) for x in plan.work(self.cp.rank)), NHEADS_Q, HEADDIM)

    def _gather(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.cp.size)]
        dist.all_gather(parts, x)
        return parts

    def ring_forward(self) -> Tensor:
        with torch.no_grad():
            return self.batch.attention(self.q, self.k, self.v)

    def ring_both(self) -> tuple[Tensor, ...]:
        out = self.batch.attention(self.q, self.k, self.v)
        return torch.autograd.grad(out, (self.q, self.k, self.v), self.dout)

    def base_forward(self) -> Tensor:
        return self.tile.forward(self.q.detach(), self.segments, self.scale)[0]

    def base_both(self) -> tuple[Tensor, ...]:
        q = self.q.detach()
        out, lse = self.tile.forward(q, self.segments, self.scale)
        delta = self.tile.delta(self.dout, out)
        dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        dkv = [tuple(torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in s[:2]) for s in self.segments]
        self.tile.backward(self.dout, q, self.segments, lse, delta, self.scale, dq, dkv)
        return dq.to(q.dtype), dkv[0][0].to(q.dtype), dkv[0][1].to(q.dtype)


def isolated(call: Callable[[], object]) -> float:
    """Milliseconds of one call, ranks starting together: median, slowest rank."""
    return _slowest(statistics.median(_once(call, 1) for _ in range(REPEATS)))


def back_to_back(call: Callable[[], object]) -> float:
    """Milliseconds of one of BURST calls in a row: median, slowest rank."""
    return _slowest(statistics.median(_once(call, BURST) / BURST for _ in range(max(3, REPEATS // 5))))


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


def _slowest(milliseconds: float) -> float:
    x = torch.tensor(milliseconds, device="cuda")
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return x.item()


def check(work: Workload) -> float:
    """Relative rms difference of the ring's output and gradients from the baseline's own rows (dq too)."""
    off = [
        ((a.float() - b.float()).norm() / b.float().norm()).item()
        for a, b in ((work.ring_forward(), work.base_forward()), (work.ring_both()[0], work.base_both()[0]))
    ]
    return max(off)


def measure(tokens: int, args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """All rows of one size, ring and baseline alternating so that both see the same clocks."""
    work = Workload(tokens, args.layout, args.schedule, device)
    error = check(work)
    rows = []
    for what, ring, base, factor in (
        ("forward", work.ring_forward, work.base_forward, 1.0),
        ("forward+backward", work.ring_both, work.base_both, 3.5),
    ):
        for how, clock in (("isolated", isolated), ("back to back", back_to_back)):
            for _ in range(WARMUP):
                base()
                ring()
            times = [(clock(base), clock(ring)) for _ in range(2)]
            base_ms, ring_ms = (min(x) for x in zip(*times, strict=True))
            tera = factor * work.flops / 1e9
            rows.append({
                "tokens_per_gpu": tokens, "ranks": work.cp.size, "pass": what, "how": how, "layout": args.layout,
                "schedule": args.schedule, "kernel": work.tile.name, "ring_ms": ring_ms, "baseline_ms": base_ms,
                "ring_tflops": tera / ring_ms, "baseline_tflops": tera / base_ms, "ratio": base_ms / ring_ms,
                "all_times_ms": times, "difference_from_baseline": error, "peak_memory_bytes": _peak(ring),
            })  # fmt: skip
    return rows


def _peak(call: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768], help="tokens per GPU")
    parser.add_argument("--layout", default="zigzag")
    parser.add_argument("--schedule", default="auto")
    parser.add_argument("--out", type=Path, default=timing.RESULTS, help="folder of the result lines")
    timing.add_commit(parser)
    args = parser.parse_args()
    protocol = PROTOCOL.format(repeats=REPEATS, warmup=WARMUP, burst=BURST)
    with bootstrap(device="cuda") as session:
        for tokens in args.tokens:
            for row in measure(tokens, args, session.device):
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

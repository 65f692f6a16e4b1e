"""About how long a step takes: rates measured on H200s, for explain to predict with and nothing else."""

from typing import NamedTuple


class Link(NamedTuple):
    """Seconds before the first byte, and bytes per second after it, each way."""

    seconds: float
    rate: float


# FLOP/s forward and backward by kernel: 32 heads on 8, head dim 128, 16 bits, 32k tokens (benchmarks/results/bench_tile.jsonl).
TILES = {"hopper": (720e12, 570e12), "triton": (490e12, 430e12)}
# Two H200 of one host: NCCL's sends and receives took 150, 243 and 574 us for 8, 32 and 128 MiB, copy engines 36, 105 and 378.
LINKS = {"p2p": Link(120e-6, 295e9), "allgather": Link(120e-6, 295e9), "nvlink": Link(20e-6, 375e9)}
BETWEEN_HOSTS = Link(50e-6, 45e9)  # not measured: an adapter of 400 Gbit/s for each GPU


def attend_ms(kernel: str, flops: int, *, backward: bool) -> float | None:
    """Milliseconds of a launch over pairs that make `flops` in forward; None for a kernel without figures. kernel: as explain
    says it.
    """
    rates = TILES.get(kernel.split(" (")[0])
    if rates is None:
        return None
    return 1e3 * (2.5 * flops / rates[1] if backward else flops / rates[0])


def move_ms(transport: str, nbytes: int, *, between_hosts: bool) -> float:
    """Milliseconds that a rank's transfers of one step take, nbytes each way."""
    link = BETWEEN_HOSTS if between_hosts else LINKS.get(transport, LINKS["p2p"])
    return 1e3 * (link.seconds + nbytes / link.rate) if nbytes else 0.0

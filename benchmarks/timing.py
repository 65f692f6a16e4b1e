"""How a benchmark times device work and what it writes beside each figure."""

import argparse
import json
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

RESULTS = Path(__file__).parent / "results"
PROTOCOL = "median of CUDA-event times, one pair per call, L2 overwritten between calls, {warm} ms warm-up, {rep} ms measured"


def attention_flops(pairs: int, nheads_q: int, headdim: int) -> int:
    """FLOPs of one forward over `pairs` visible (query, key) pairs: two products; a backward counts 2.5 times that."""
    return 4 * pairs * nheads_q * headdim


def median_ms(fn: Callable[[], object], *, warm: float = 50, rep: float = 200) -> float:
    """Median device milliseconds of one call of fn: `warm` ms of calls before, `rep` ms measured, five calls at least."""
    cache = torch.empty(256 << 20, dtype=torch.int8, device="cuda")

    def once() -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        cache.zero_()
        begin.record()
        fn()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    once()
    estimate = max(once(), 1e-3)
    for _ in range(max(1, int(warm / estimate))):
        once()
    return statistics.median(once() for _ in range(max(5, int(rep / estimate))))


def _query(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def environment(commit: str = "") -> dict[str, Any]:
    """Commit, versions, GPU, clocks and power: what a figure needs to be compared with another. No commit: git is asked."""
    here = Path(__file__).parent
    smi = "clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,temperature.gpu,driver_version"
    values = _query(["nvidia-smi", f"--query-gpu={smi}", "--format=csv,noheader,nounits"]).split("\n")[0].split(", ")
    return {
        "commit": commit or _query(["git", "-C", str(here), "describe", "--always", "--dirty"]),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "smi": dict(zip(smi.split(","), values, strict=False)),
    }


def add_commit(parser: argparse.ArgumentParser) -> None:
    """The option for machines that have the files without their history."""
    parser.add_argument("--commit", default="", help="what was measured, where there is no git to ask")


def append(name: str, lines: list[dict[str, Any]], *, protocol: str, commit: str = "", folder: Path = RESULTS) -> None:
    """Append one JSON line per result, each with the environment and the protocol."""
    folder.mkdir(parents=True, exist_ok=True)
    shared = {**environment(commit), "protocol": protocol}
    with (folder / f"{name}.jsonl").open("a") as file:
        file.writelines(json.dumps({**line, **shared}) + "\n" for line in lines)

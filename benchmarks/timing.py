"""How a benchmark times device work and what it writes beside each figure."""

import argparse
import ctypes
import json
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

RESULTS = Path(__file__).parent / "results"
PROTOCOL = (
    "median of CUDA-event times, one pair per call, L2 overwritten between calls, {warm} ms warm-up, {rep} ms measured; calls "
    "queued 20 at a time, the GPU held up first where the host is slower than it; sm_mhz, watts: means of samples meanwhile"
)
BATCH, CYCLES_PER_MS = 20, 2_000_000
SAMPLE_SECONDS = 0.01


def attention_flops(pairs: int, nheads_q: int, headdim: int) -> int:
    """FLOPs of one forward over `pairs` visible (query, key) pairs: two products; a backward counts 2.5 times that."""
    return 4 * pairs * nheads_q * headdim


class _Field(ctypes.Structure):
    """nvmlFieldValue_t, its value read as an unsigned int."""

    _fields_ = (
        ("field", ctypes.c_uint), ("scope", ctypes.c_uint), ("timestamp", ctypes.c_longlong), ("latency", ctypes.c_longlong),
        ("kind", ctypes.c_int), ("status", ctypes.c_int), ("value", ctypes.c_uint), ("unused", ctypes.c_uint),
    )  # fmt: skip


class Watch:
    """Samples the current GPU's SM clock and power in a thread, through the driver's NVML; no samples where that is missing."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float, float]] = []  # (time, MHz, W)
        self._thread = threading.Thread(target=self._run, daemon=True)
        try:
            self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
            self._device = ctypes.c_void_p()
            uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}".encode()
            self._check(self._nvml.nvmlInit_v2())
            self._check(self._nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(self._device)))
            self._read()
        except (OSError, AttributeError) as error:
            print(f"no clocks and no power are sampled: {error}", flush=True)
        else:
            self._thread.start()

    @staticmethod
    def _check(status: int) -> None:
        if status:
            raise OSError(f"NVML answers {status}")

    def _read(self) -> tuple[float, float]:
        """SM clock in MHz and power of this moment in W (where only a mean over a second is known, that)."""
        clock, power = ctypes.c_uint(), ctypes.c_uint()
        self._check(self._nvml.nvmlDeviceGetClockInfo(self._device, 1, ctypes.byref(clock)))
        field = _Field(field=186)  # NVML_FI_DEV_POWER_INSTANT
        status = self._nvml.nvmlDeviceGetFieldValues(self._device, 1, ctypes.byref(field))
        if status == 0 and field.status == 0:
            return clock.value, field.value / 1000
        self._check(self._nvml.nvmlDeviceGetPowerUsage(self._device, ctypes.byref(power)))
        return clock.value, power.value / 1000

    def _run(self) -> None:
        while True:
            time.sleep(SAMPLE_SECONDS)
            try:
                self._samples.append((time.monotonic(), *self._read()))
            except OSError:
                continue

    def between(self, begin: float, end: float) -> dict[str, float]:
        """Means over a window of time.monotonic: sm_mhz and watts, nothing where no sample lies in it."""
        found = [sample[1:] for sample in tuple(self._samples) if begin <= sample[0] <= end]
        self._samples.clear()
        if not found:
            return {}
        clock, power = (statistics.fmean(column) for column in zip(*found, strict=True))
        return {"sm_mhz": round(clock), "watts": round(power)}


def measure(fn: Callable[[], object], *, warm: float = 50, rep: float = 200, watch: Watch | None = None) -> dict[str, float]:
    """Median device milliseconds of one call of fn, with clock and power: `warm` ms of calls before, `rep` ms measured, five
    calls at least.
    """
    cache = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    _batch(fn, cache, 1)
    host, times = _batch(fn, cache, 5)
    ms = max(statistics.median(times), 1e-3)
    ahead = 1.5 * host if ms < 2 * host else 0.0

    def run(milliseconds: float) -> list[float]:
        count = max(5, int(milliseconds / ms))
        return [x for i in range(0, count, BATCH) for x in _batch(fn, cache, min(BATCH, count - i), ahead)[1]]

    run(warm)
    begin = time.monotonic()
    ms = statistics.median(run(rep))
    return {"ms": round(ms, 4), **(watch.between(begin, time.monotonic()) if watch else {})}


def _batch(fn: Callable[[], object], cache: torch.Tensor, count: int, ahead: float = 0.0) -> tuple[float, list[float]]:
    """(the host's milliseconds per call, device milliseconds of each); ahead: milliseconds per call that the GPU is held up."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    if ahead:
        torch.cuda._sleep(int(ahead * count * CYCLES_PER_MS))
    since = time.perf_counter()
    for begin, end in events:
        cache.zero_()
        begin.record()
        fn()
        end.record()
    host = (time.perf_counter() - since) * 1000 / count
    torch.cuda.synchronize()
    return host, [begin.elapsed_time(end) for begin, end in events]


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


def add_options(parser: argparse.ArgumentParser) -> None:
    """What every benchmark of one GPU takes."""
    add_commit(parser)
    parser.add_argument("--warm", type=float, default=50, help="milliseconds before measuring")
    parser.add_argument("--rep", type=float, default=200, help="milliseconds measured")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result lines")


def keep(name: str, lines: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """append, by the options of add_options."""
    protocol = PROTOCOL.format(warm=args.warm, rep=args.rep)
    append(name, lines, protocol=protocol, commit=args.commit, folder=args.out)


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """A benchmark's arguments; where torch sees no GPU, a sentence that says so ends the command."""
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU, and torch sees none: look at CUDA_VISIBLE_DEVICES, and whether this torch is a CPU build")
    return args


def add_commit(parser: argparse.ArgumentParser) -> None:
    """The option for machines that have the files without their history."""
    parser.add_argument("--commit", default="", help="what was measured, where there is no git to ask")


def append(name: str, lines: list[dict[str, Any]], *, protocol: str, commit: str = "", folder: Path = RESULTS) -> None:
    """Append one JSON line per result, each with the environment and the protocol."""
    folder.mkdir(parents=True, exist_ok=True)
    shared = {**environment(commit), "protocol": protocol}
    with (folder / f"{name}.jsonl").open("a") as file:
        file.writelines(json.dumps({**line, **shared}) + "\n" for line in lines)

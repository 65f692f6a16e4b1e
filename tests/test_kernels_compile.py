"""Every tile of the table compiles for its GPU on a machine that has none, uses the matrix units and fits the chip.

Runs with any Triton: python -m pytest tests/test_kernels_compile.py in an environment with torch, triton and pytest.
"""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import kernel_cases
import pytest

from ringflash.kernels import config

MATRIX_UNIT = {"sm_80": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05.mma", "gfx942": "v_mfma"}
# Bytes still spilled (the larger of Triton 3.6 and 3.9; README.md, notes); what is not named: none.
KNOWN_SPILLS = {
    ("dq", 256, "plain"): 112,
    ("dkv", 256, "plain"): 336,
    ("dq", 128, "segments"): 152,
    ("forward", 128, "segments"): 112,
}

# Every entry of the table for sm_90; of the others the middle head dim in 16 bits.
JOBS = [
    (arch, which, "bf16" if itemsize == 2 else "fp32", headdim)
    for arch, itemsize, headdim in config.TABLE
    for which in kernel_cases.KERNELS
    if arch == "sm_90" or (arch != "cpu" and itemsize == 2 and headdim == 128)
]
VARIANTS = [
    ("segments", {"segments": 3, "WAIT": True, "FENCE": True, "CARRIED": True, "FINISH": False}),
    ("pointers", {"tma": False, "headdim_v": 48}),
    ("fp16", {}),
]


def build(arch: str, which: str, element: str, headdim: int, options: dict[str, Any]) -> tuple[int, int, str]:
    """(shared memory, spilled bytes, text of the machine code) of one kernel."""
    compiled = kernel_cases.compile_kernel(which, arch, element, headdim, **({"tma": arch in ("sm_90", "sm_100")} | options))
    text = compiled.asm["amdgcn" if arch.startswith("gfx") else "ptx"]
    spilled = 0 if arch.startswith("gfx") else kernel_cases.resources(compiled)[1]
    return compiled.metadata.shared, spilled, text if MATRIX_UNIT[arch] not in text else MATRIX_UNIT[arch]


@pytest.fixture(scope="module")
def built():
    """All kernels at once, in as many processes as there are processors to this one."""
    jobs = {(*job, "plain"): (*job, {}) for job in JOBS}
    jobs |= {("sm_90", w, "fp16" if n == "fp16" else "bf16", 80 if n == "pointers" else 128, n):
             ("sm_90", w, "fp16" if n == "fp16" else "bf16", 80 if n == "pointers" else 128, options)
             for n, options in VARIANTS for w in kernel_cases.KERNELS}  # fmt: skip
    workers = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return dict(zip(jobs, pool.map(build, *zip(*jobs.values(), strict=True)), strict=True))


pytestmark = pytest.mark.skipif(kernel_cases.INTERPRETED, reason="an interpreted kernel is not compiled")


@pytest.mark.parametrize(("arch", "which", "element", "headdim"), JOBS)
def test_table(built, arch, which, element, headdim):
    shared, spilled, text = built[arch, which, element, headdim, "plain"]
    assert shared <= kernel_cases.SHARED_LIMIT[arch]
    if element != "fp32":
        assert text == MATRIX_UNIT[arch]
        assert spilled <= (KNOWN_SPILLS.get((which, headdim, "plain"), 0) if arch == "sm_90" else 0)


@pytest.mark.parametrize("which", list(kernel_cases.KERNELS))
@pytest.mark.parametrize("name", [name for name, _ in VARIANTS])
def test_variants(built, which, name):
    shared, spilled, text = next(v for k, v in built.items() if k[1] == which and k[4] == name)
    assert shared <= kernel_cases.SHARED_LIMIT["sm_90"]
    assert text == MATRIX_UNIT["sm_90"]
    assert spilled <= KNOWN_SPILLS.get((which, 128, name), 0)

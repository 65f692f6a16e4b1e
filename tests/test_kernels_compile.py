"""Every tile of the table compiles for its GPU on a machine that has none, uses the matrix units and fits the chip.

Runs with any Triton: python -m pytest tests/test_kernels_compile.py in an environment with torch, triton and pytest.
"""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import kernel_cases
import pytest
import triton
from kernel_cases import KERNELS

from ringflash.kernels import config

MATRIX_UNIT = {"sm_80": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05.mma", "gfx942": "v_mfma"}
# wgmma multiplies 64 rows at least; the backward blocks of 256 columns have 32, or they would spill, and go to the same
# matrix unit by mma.sync.
NARROW = {("sm_90", "dq", 256): "mma.sync", ("sm_90", "dkv", 256): "mma.sync"}
TRITON = ".".join(triton.__version__.split(".")[:2])
# Bytes spilled, as measured, by (triton, arch, kernel, headdim, variant); what is not named here: none.
SPILLS = {
    # Several segments: their pointers, strides and intervals are chosen at run time, on top of a walk that alone takes 218 to
    # 255 registers; the forward carries a state in and out as well.
    ("3.6", "sm_90", "forward", 128, "segments"): 16,
    ("3.9", "sm_90", "forward", 128, "segments"): 112,
    ("3.6", "sm_90", "dq", 128, "segments"): 152,
    ("3.9", "sm_90", "dq", 128, "segments"): 24,
    ("3.6", "sm_90", "dkv", 128, "segments"): 8,
    # A number of rows that is no multiple of 4: lse and delta are loaded by address, not by descriptor, in the pipeline.
    ("3.9", "sm_90", "dkv", 128, "odd rows"): 136,
}

# Every entry of the table for sm_90; of the others the middle head dim in 16 bits.
JOBS = [
    (arch, which, "bf16" if itemsize == 2 else "fp32", headdim)
    for arch, itemsize, headdim in config.TABLE
    for which in KERNELS
    if arch == "sm_90" or (arch != "cpu" and itemsize == 2 and headdim == 128)
]
VARIANTS = [
    *((which, "segments", {"segments": 3, "WAIT": True, "FENCE": True, "CARRIED": True, "FINISH": False}) for which in KERNELS),
    *((which, "pointers", {"tma": False, "headdim_v": 48}) for which in KERNELS),
    *((which, "fp16", {}) for which in KERNELS),
    ("dkv", "odd rows", {"VECTORS": False}),
    ("forward", "fixed", {"FIXED": True}),
]


def build(arch: str, which: str, element: str, headdim: int, options: dict[str, Any]) -> tuple[int, int, str]:
    """(shared memory, spilled bytes, matrix instruction) of one kernel."""
    options = {"tma": arch in ("sm_90", "sm_100")} | options
    compiled = kernel_cases.compile_kernel(which, arch, element, headdim, **options)
    text = compiled.asm["amdgcn" if arch.startswith("gfx") else "ptx"]
    spilled = 0 if arch.startswith("gfx") else kernel_cases.resources(compiled)[1]
    return compiled.metadata.shared, spilled, next((unit for unit in MATRIX_UNIT.values() if unit in text), "")


@pytest.fixture(scope="module")
def built():
    """All kernels at once, in as many processes as there are processors to this one."""
    jobs = {(*job, "plain"): (*job, {}) for job in JOBS}
    for which, name, options in VARIANTS:
        job = "sm_90", which, "fp16" if name == "fp16" else "bf16", 80 if name == "pointers" else 128
        jobs[(*job, name)] = (*job, options)
    workers = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return dict(zip(jobs, pool.map(build, *zip(*jobs.values(), strict=True)), strict=True))


pytestmark = pytest.mark.skipif(kernel_cases.INTERPRETED, reason="an interpreted kernel is not compiled")


@pytest.mark.parametrize(("arch", "which", "element", "headdim"), JOBS)
def test_table(built, arch, which, element, headdim):
    shared, spilled, unit = built[arch, which, element, headdim, "plain"]
    assert shared <= kernel_cases.SHARED_LIMIT[arch]
    if element != "fp32":
        assert unit == NARROW.get((arch, which, headdim), MATRIX_UNIT[arch])
        assert spilled <= SPILLS.get((TRITON, arch, which, headdim, "plain"), 0)


@pytest.mark.parametrize(("which", "name"), [variant[:2] for variant in VARIANTS])
def test_variants(built, which, name):
    shared, spilled, unit = next(v for k, v in built.items() if k[1] == which and k[4] == name)
    assert shared <= kernel_cases.SHARED_LIMIT["sm_90"]
    assert unit == MATRIX_UNIT["sm_90"]
    assert spilled <= SPILLS.get((TRITON, "sm_90", which, 128, name), 0)

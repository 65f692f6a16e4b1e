"""Where the Hopper kernels run, and the words for where not."""

import subprocess
import sys

import pytest
import torch

from ringflash.kernels.hopper import support
from ringflash.kernels.hopper.support import HEADDIMS, Inputs, why_not

RUNS = Inputs("sm_90", torch.bfloat16, 128, 128)
TRITON = f"{support.TESTED[0]}.0"


@pytest.mark.parametrize("part", HEADDIMS)
def test_what_runs(part: str) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for headdim, headdim_v in HEADDIMS[part]:
            assert why_not(part, Inputs("sm_90", dtype, headdim, headdim_v), triton=TRITON) is None
    assert {(64, 64), (128, 128)} <= set(HEADDIMS[part])


def test_a_backward_has_a_forward() -> None:
    assert set(HEADDIMS["backward"]) <= set(HEADDIMS["forward"])


@pytest.mark.parametrize("part", HEADDIMS)
@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize(
    ("change", "triton", "words"),
    [
        ({"arch": "sm_80"}, TRITON, "needs an sm_90 GPU, not sm_80"),
        ({"arch": "sm_100"}, TRITON, "needs an sm_90 GPU, not sm_100"),
        ({"arch": "cpu"}, TRITON, "needs an sm_90 GPU, not cpu"),
        ({"dtype": torch.float32}, TRITON, "needs bfloat16 or float16, not float32"),
        ({"headdim": 80, "headdim_v": 48}, TRITON, "not 80/48"),
        ({"headdim": 80, "headdim_v": 80}, TRITON, "not 80"),
        ({}, "", "needs Triton with Gluon, none is installed"),
    ],
    ids=str,
)
def test_what_does_not_run_asked_for_or_not(part: str, asked: bool, change: dict, triton: str, words: str) -> None:
    found = why_not(part, RUNS._replace(**change), triton=triton, asked=asked)
    assert found is not None
    assert found.endswith(words)


@pytest.mark.parametrize("triton", ["3.5.1", "3.7.0", "4.0.0", "3.60.0"])
def test_another_triton_runs_only_if_asked_for(triton: str) -> None:
    assert not support.tested(triton)
    found = why_not("forward", RUNS, triton=triton)
    assert found is not None
    assert found.startswith(f"never ran with Triton {triton}, only {support.TESTED[0]}")
    assert why_not("forward", RUNS, triton=triton, asked=True) is None


def test_tested_versions() -> None:
    assert all(support.tested(f"{version}{patch}") for version in support.TESTED for patch in ("", ".0", ".1", ".0+git1234"))


def test_the_installed_triton_is_found() -> None:
    triton = pytest.importorskip("triton")
    support.triton_version.cache_clear()
    assert support.triton_version() == triton.__version__


def test_neither_gluon_nor_cuda_is_touched_by_an_import() -> None:
    code = (
        "import sys, torch, ringflash.kernels.hopper.support; "
        "sys.exit('triton' in sys.modules and 'triton.experimental' in sys.modules or torch.cuda.is_initialized())"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

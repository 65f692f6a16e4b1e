"""Which implementation is picked, why, and what an explicit choice that cannot run says."""

import importlib.util
import subprocess
import sys

import pytest

from ringflash import tile
from ringflash.kernels import reference


@pytest.fixture(autouse=True)
def _fresh() -> None:
    tile.pick.cache_clear()


@pytest.fixture
def no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "triton" else find(name, *rest))


@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_tensors_on_a_cpu_get_the_reference(kernel: str) -> None:
    picked = tile.pick(kernel, "cpu")
    assert (picked.name, picked.forward, picked.backward) == ("reference", reference.forward, reference.backward)
    assert picked.why == ("asked for" if kernel == "reference" else "tensors on a CPU")
    assert tile.pick(kernel, "cpu") is picked


def test_the_reference_can_be_asked_for_on_a_gpu() -> None:
    assert tile.pick("reference", "cuda").name == "reference"


def test_tensors_on_a_gpu_get_triton() -> None:
    pytest.importorskip("triton")
    picked = tile.pick("auto", "cuda")
    assert (picked.name, picked.why) == ("triton", "tensors on a GPU")
    assert tile.pick("triton", "cuda").why == "asked for"
    assert picked.forward.__module__ == "ringflash.kernels.forward"


@pytest.mark.usefixtures("no_triton")
def test_without_triton_only_the_default_falls_back() -> None:
    assert tile.pick("auto", "cuda")[:2] == ("reference", "Triton is not installed")
    with pytest.raises(
        NotImplementedError, match="kernel='triton' needs a GPU and Triton: triton is not installed; use kernel="
    ):
        tile.pick("triton", "cuda")


def test_triton_on_a_cpu_is_refused() -> None:
    pytest.importorskip("triton")
    with pytest.raises(
        NotImplementedError, match="kernel='triton' needs a GPU and Triton: the tensors are on cpu; use kernel="
    ):
        tile.pick("triton", "cpu")


def test_triton_is_not_imported_where_it_is_not_used() -> None:
    code = (
        "import sys, ringflash.tile; ringflash.tile.pick('auto', 'cpu'); sys.exit('ringflash.kernels.forward' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

"""Which implementation is picked, why, and what an explicit choice that cannot run says."""

import importlib.util
import logging
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest
import torch

from ringflash import tile
from ringflash.kernels import reference
from ringflash.kernels.hopper import support
from ringflash.tile import Inputs, choose, pick

CPU = torch.empty(1, 1, 1, 64)
HOPPER = Inputs("sm_90", torch.bfloat16, 128, 128)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    choose.cache_clear()
    support.say_untested.cache_clear()
    yield
    choose.cache_clear()


@pytest.fixture
def no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "triton" else find(name, *rest))
    monkeypatch.setattr(support, "triton_version", lambda: "")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stand-ins for both Hopper kernels, on a Triton that ran them; they keep what they are called with."""
    pytest.importorskip("triton")
    made = SimpleNamespace(calls=[])
    for name in ("forward", "backward"):
        module = ModuleType(f"ringflash.kernels.hopper.{name}")
        setattr(module, name, lambda *args, name=name, **more: made.calls.append((name, args, more)))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(sys.modules["ringflash.kernels.hopper"], name, module, raising=False)
    monkeypatch.setattr(support, "triton_version", lambda: f"{support.TESTED[0]}.1")
    return made


@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_tensors_on_a_cpu_get_the_reference(kernel: str) -> None:
    picked = pick(kernel, CPU, CPU)
    assert (picked.name, picked.forward, picked.backward) == ("reference", reference.forward, reference.backward)
    assert picked.why == ("asked for" if kernel == "reference" else "tensors on a CPU")
    assert pick(kernel, CPU, CPU) is picked
    assert not picked.fused_backward


def test_the_reference_can_be_asked_for_on_a_gpu() -> None:
    assert choose("reference", HOPPER).name == "reference"


@pytest.mark.parametrize("arch", ["sm_80", "sm_100", "gfx942"])
def test_tensors_on_a_gpu_get_triton(arch: str) -> None:
    pytest.importorskip("triton")
    picked = choose("auto", HOPPER._replace(arch=arch))
    assert (picked.name, picked.why) == ("triton", f"hopper needs an sm_90 GPU, not {arch}")
    assert choose("triton", HOPPER).why == "asked for"
    assert picked.forward.__module__ == "ringflash.kernels.forward"
    assert not picked.fused_backward


@pytest.mark.usefixtures("no_triton")
def test_without_triton_only_the_default_falls_back() -> None:
    assert choose("auto", HOPPER)[:2] == ("reference", "Triton is not installed")
    with pytest.raises(
        NotImplementedError, match="kernel='triton' needs a GPU and Triton: triton is not installed; use kernel="
    ):
        choose("triton", HOPPER)
    with pytest.raises(NotImplementedError, match="kernel='hopper' needs Triton with Gluon, none is installed; use kernel="):
        choose("hopper", HOPPER)


def test_triton_and_hopper_on_a_cpu_are_refused() -> None:
    pytest.importorskip("triton")
    with pytest.raises(
        NotImplementedError, match="kernel='triton' needs a GPU and Triton: the tensors are on cpu; use kernel="
    ):
        pick("triton", CPU, CPU)
    with pytest.raises(NotImplementedError, match="kernel='hopper' needs an sm_90 GPU, not cpu; use kernel="):
        pick("hopper", CPU, CPU)


def test_hopper_is_the_default_on_its_gpu(kernels: SimpleNamespace) -> None:
    picked = choose("auto", HOPPER)
    assert (picked.name, picked.why, picked.fused_backward) == ("hopper", "sm_90, bfloat16", True)
    assert choose("hopper", HOPPER).why == "asked for"
    assert choose("triton", HOPPER).name == "triton"
    picked.forward("q")
    assert kernels.calls == [("forward", ("q",), {})]


def test_what_has_no_hopper_kernel_gets_triton_and_is_refused_by_name(kernels: SimpleNamespace) -> None:
    odd = HOPPER._replace(headdim=80)
    assert choose("auto", odd)[:2] == ("triton", f"hopper {support.why_not('forward', odd, triton='3.6')}")
    with pytest.raises(NotImplementedError, match=r"kernel='hopper' has headdim .*, not 80/128; use kernel='auto'"):
        choose("hopper", odd)
    with pytest.raises(NotImplementedError, match="kernel='hopper' needs bfloat16 or float16, not float32; use kernel='auto'"):
        choose("hopper", HOPPER._replace(dtype=torch.float32))


def test_the_backward_may_be_another(kernels: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(support.HEADDIMS, "backward", ((64, 64), (128, 128)))
    for kernel, why in (("auto", "sm_90, bfloat16"), ("hopper", "asked for")):
        picked = choose(kernel, HOPPER._replace(headdim=256, headdim_v=256))
        assert picked.name == "hopper forward, triton backward"
        assert picked.why == f"{why}; the Hopper backward has headdim 64, 128, not 256"
        assert picked.backward.__module__ == "ringflash.kernels.backward"
        assert not picked.fused_backward


@pytest.mark.parametrize("deterministic", [False, True])
def test_both_parts_are_told_of_deterministic(kernels: SimpleNamespace, deterministic: bool) -> None:
    picked = choose("auto", HOPPER, deterministic=deterministic)
    picked.forward("q")
    picked.backward("dout", add=False)
    more = {"deterministic": True} if deterministic else {}
    assert kernels.calls == [("forward", ("q",), more), ("backward", ("dout",), {"add": False, **more})]


def test_fixed_blocks_are_not_of_the_hopper_kernel(kernels: SimpleNamespace) -> None:
    picked = choose("auto", HOPPER, deterministic=True, fixed=True)
    assert picked[:2] == ("triton", "hopper has no key blocks at fixed places, which reproducible=True needs")
    assert picked.forward.keywords == {"fixed": True}  # pyright: ignore[reportFunctionMemberAccess]
    assert picked.backward.__module__ == "ringflash.kernels.backward"
    assert choose("triton", HOPPER, fixed=True).why == "asked for"
    assert pick("auto", CPU, CPU, fixed=True).forward.func is reference.forward  # pyright: ignore[reportFunctionMemberAccess]
    with pytest.raises(NotImplementedError, match=r"kernel='hopper' has no key blocks at fixed places, which .*; use kernel="):
        choose("hopper", HOPPER, fixed=True)


def test_an_untested_triton_gets_the_portable_kernels_and_one_log_line(
    kernels: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(support, "triton_version", lambda: "9.1.0")
    with caplog.at_level(logging.INFO, "ringflash"):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for arch in ("sm_90", "sm_80"):
                assert choose("auto", HOPPER._replace(dtype=dtype, arch=arch)).name == "triton"
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("ringflash", "WARNING")
    assert "Triton 9.1.0 has not run the Hopper kernels yet" in record.getMessage()
    assert "hopper never ran with Triton 9.1.0, only" in choose("auto", HOPPER).why
    assert choose("hopper", HOPPER).name == "hopper"  # by name it is tried


def test_no_log_line_where_all_is_as_it_should_be(kernels: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    choose("auto", HOPPER)
    choose("auto", HOPPER._replace(headdim=80))
    choose("auto", HOPPER._replace(arch="sm_80"))
    assert not caplog.records


def test_a_triton_of_other_names_is_refused_in_words(kernels: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "triton_version", lambda: "9.1.0")
    monkeypatch.setitem(sys.modules, "ringflash.kernels.hopper.backward", None)
    monkeypatch.delattr(sys.modules["ringflash.kernels.hopper"], "backward")
    with pytest.raises(NotImplementedError, match=r"kernel='hopper' does not load with Triton 9\.1\.0 .*; use kernel='auto'"):
        choose("hopper", HOPPER)


def test_triton_is_not_imported_where_it_is_not_used() -> None:
    code = (
        "import sys, torch, ringflash.tile as t; x = torch.empty(1, 1, 1, 64); t.pick('auto', x, x); "
        "sys.exit('ringflash.kernels.forward' in sys.modules or 'triton.experimental' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_pick_is_cheap() -> None:
    pick("auto", CPU, CPU)
    assert tile.choose.cache_info().misses == 1
    pick("auto", torch.empty(2, 5, 3, 64), CPU)
    assert tile.choose.cache_info().hits == 1

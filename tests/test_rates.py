"""What explain predicts with: times grow with work and bytes, and nothing is said of kernels without figures."""

import pytest

from ringflash import rates


@pytest.mark.parametrize("kernel", ["hopper (asked for)", "triton (asked for)"])
def test_times_are_proportional_to_work(kernel: str) -> None:
    forward, backward = (rates.attend_ms(kernel, 10**12, backward=b) for b in (False, True))
    assert forward is not None and backward is not None  # noqa: PT018
    assert 1 < forward < 5
    assert 2.5 * forward < backward < 4 * forward
    assert rates.attend_ms(kernel, 3 * 10**12, backward=False) == pytest.approx(3 * forward)


def test_the_reference_has_no_figures() -> None:
    for kernel in ("reference (tensors on a CPU)", "hopper forward, triton backward (asked for)", ""):
        assert rates.attend_ms(kernel, 10**12, backward=False) is None


@pytest.mark.parametrize(("nbytes", "nccl", "copies"), [(8 << 20, 150, 36), (32 << 20, 243, 105), (128 << 20, 574, 378)])
def test_transfers_take_what_was_measured(nbytes: int, nccl: float, copies: float) -> None:
    assert rates.move_ms("p2p", nbytes, between_hosts=False) * 1e3 == pytest.approx(nccl, rel=0.05)
    assert rates.move_ms("nvlink", nbytes, between_hosts=False) * 1e3 == pytest.approx(copies, rel=0.2)
    assert rates.move_ms("p2p", nbytes, between_hosts=True) > rates.move_ms("p2p", nbytes, between_hosts=False)


def test_nothing_takes_no_time() -> None:
    assert rates.move_ms("p2p", 0, between_hosts=True) == 0

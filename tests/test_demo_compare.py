"""The verdict on two runs: exact for equal ones, large for different ones, and a NaN never passes."""

import math

import torch

from ringflash.demo.compare import BOUNDS, Difference, compare
from ringflash.demo.train import Run


def made(losses: list[float], gradient: list[float]) -> Run:
    return Run(ranks=1, losses=losses, gradients={0: torch.tensor(gradient)})


def test_equal_runs_do_not_differ() -> None:
    run = made([2.0, 1.0], [3.0, 4.0])
    assert compare(run, run) == Difference(loss=0.0, gradient=0.0, steps=(2, 1))


def test_differences_are_relative_and_the_largest() -> None:
    found = compare(made([2.0, 1.5], [3.0, 4.5]), made([2.0, 1.0], [3.0, 4.0]))
    assert math.isclose(found.loss, 0.5, rel_tol=1e-6)
    assert math.isclose(found.gradient, 0.1, rel_tol=1e-6)
    assert not found.within(BOUNDS[torch.float32])


def test_nan_keeps_no_bound() -> None:
    found = compare(made([2.0, math.nan], [3.0, 4.0]), made([2.0, 1.0], [3.0, 4.0]))
    assert not found.within(Difference(loss=math.inf, gradient=math.inf))

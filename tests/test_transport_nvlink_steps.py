"""Steps in a row over the NVLink transport: ranks are held up here and there, and none disturbs another's step."""

import functools
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from ring_cases import CAUSAL, Case, ThreadLink, Threads, on_threads
from torch import Tensor

import ringflash as rf
from ringflash.autograd import attend
from ringflash.plan import make_plan
from ringflash.ring import Ring
from ringflash.tile import pick
from ringflash.transport.nvlink import NVLink

BLOCKS, GRADS, END = range(3)  # meetings
STEPS = 100
CASES = [  # take turns: other shapes from step to step
    Case(CAUSAL, 9, "contiguous", batch=1, heads=(2, 2), headdim=(4, 8)),
    Case(rf.Mask(window=(3, 1)), 7, "contiguous", batch=1, heads=(2, 1), headdim=(4, 8)),
]
Break = Callable[[NVLink], None]


class Steps:
    """Two layers forward and backward on each of three threads, step by step: the data depend on the step and the layer.

    serial: all wait for all behind each pass. replays: that often a pass uses the published block that a captured one would,
    which is always the first. spoil: breaks a rank's transport behind the first step.
    """

    def __init__(self, *, serial: bool = False, replays: float = 0.0, spoil: Break = lambda *_: None) -> None:
        self._serial, self._replays, self._spoil = serial, replays, spoil
        self._shared, self._together = Threads(3), threading.Barrier(3, timeout=30)
        self._plans = [make_plan(case.layouts(3)[0], case.mask, schedule="gather") for case in CASES]

    def run(self, steps: int) -> list[list[Tensor]]:
        """Of each rank: out, dq, dk and dv of all layers and steps."""
        return on_threads(3, lambda rank: self._rank(rank, steps))

    def _rank(self, rank: int, steps: int) -> list[Tensor]:
        wait, same = random.Random(rank), random.Random(0)
        transport = self._shared.transport(rank, lambda: None if self._serial else self._pause(wait))
        results: list[Tensor] = []
        for step in range(steps):
            if step == 1:
                self._spoil(transport)

            def turn(first: bool = step < len(CASES)) -> AbstractContextManager[None]:
                return self._turn(transport, replayed=not first and same.random() < self._replays)

            results += self._step(step, rank, transport, turn)
        return results

    @staticmethod
    def _pause(wait: random.Random) -> None:
        if wait.random() < 0.2:
            time.sleep(wait.random() * 2e-3)

    @contextmanager
    def _turn(self, transport: NVLink, *, replayed: bool) -> Iterator[None]:
        calls, link = transport._calls, transport._link
        assert isinstance(link, ThreadLink)
        if replayed:
            transport._calls, link.captured = 0, True
        yield
        if replayed:
            transport._calls, link.captured = calls, False
        if self._serial:
            self._together.wait()

    def _step(self, step: int, rank: int, transport: NVLink, turn: Callable[[], Any]) -> list[Tensor]:
        case, plan = CASES[step % len(CASES)], self._plans[step % len(CASES)]
        (q, k, v), _ = case.inputs()
        ring = Ring(plan, rank, pick("reference", q, v), transport, 0.5)
        shards = [plan.layout.part(x, rank) for x in (q, k, v)]
        layers = [[(x * gain + gain).requires_grad_() for x in shards] for gain in (1 + step, 1.5 + step)]
        outs, grads = [], []
        for layer in layers:
            with turn():
                outs.append(attend(*layer, ring=ring)[0])
        transport._gathered.fill_(255)  # backward takes nothing from there
        for layer, out in zip(layers[::-1], outs[::-1], strict=True):
            with turn():
                grads += torch.autograd.grad(out.square().sum(), layer)
        return [*(out.detach() for out in outs), *grads]


@functools.cache
def serialised(steps: int) -> list[list[Tensor]]:
    return Steps(serial=True).run(steps)


def differing(found: list[list[Tensor]], steps: int) -> int:
    """How many results are not, bit for bit, those of a serialised run."""
    pairs = zip(itertools.chain(*found), itertools.chain(*serialised(steps)), strict=True)
    return sum(not torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("replays", [0.0, 0.5])
def test_steps_in_a_row_are_those_of_a_serialised_run_bit_for_bit(full: bool, replays: float) -> None:
    steps = 10 * STEPS if full else STEPS
    assert differing(Steps(replays=replays).run(steps), steps) == 0


def one_published_block(transport: NVLink) -> None:
    transport._published[1] = transport._published[0]
    transport._ways.clear()


def no_meeting(channel: int) -> Break:
    def spoil(transport: NVLink) -> None:
        link: Any = transport._link
        meet = link.meet
        link.meet = lambda at: None if at == channel else meet(at)

    return spoil


@pytest.mark.parametrize(
    "spoil",
    [one_published_block, *map(no_meeting, (BLOCKS, GRADS, END))],
    ids=["one published block", "no meeting of blocks", "no meeting of grads", "no meeting around replays"],
)
def test_a_step_that_disturbs_another_is_noticed(spoil: Break) -> None:
    """Whether one does in a given run is chance; that none does in so many is not."""
    assert any(differing(Steps(replays=0.5, spoil=spoil).run(STEPS), STEPS) > 0 for _ in range(20))

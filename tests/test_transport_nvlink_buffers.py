"""Buffers of the NVLink transport: when they are made, how large they are, and how long they live."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from test_transport_nvlink import CALL, Alone, Call
from torch import Tensor

from ringflash.transport import nvlink as module
from ringflash.transport.blocks import Shapes
from ringflash.transport.communicator import Communicator, ExchangeError
from ringflash.transport.nvlink import FIRST_PIECE, NVLink, nvlink


def test_a_capture_makes_no_buffers() -> None:
    alone = Alone()
    alone.link.captured = True
    told = "cannot make its buffers while a CUDA graph is captured: run forward and backward once"
    with pytest.raises(RuntimeError, match=told):
        alone.bring()
    alone.link.captured = False
    alone.bring()
    alone.link.captured = True
    alone.bring()
    with pytest.raises(RuntimeError, match=told):
        alone.bring(grads=True)
    with pytest.raises(RuntimeError, match=told):
        alone.bring(replace(CALL, batch=20))
    alone.bring()
    alone.link.captured = False
    alone.bring(grads=True)
    alone.link.captured = True
    alone.bring(grads=True)
    assert len(alone.link.made) == 3


def test_buffers_grow_and_are_used_again() -> None:
    """Made for the longest block of any rank, so that all ranks make them in the same call."""
    alone, large = Alone(), replace(CALL, lengths=(5, 50, 4))

    def made(call: Call, *, grads: bool = False) -> int:
        return sum(x[0] == "make" for x in alone.noted(lambda: alone.bring(call, grads=grads)))

    assert [made(CALL), made(large), made(CALL), made(replace(CALL, lengths=(50, 0, 0)))] == [2, 2, 0, 0]
    assert [made(CALL, grads=True), made(CALL, grads=True), made(large, grads=True), made(CALL, grads=True)] == [1, 0, 1, 0]
    assert made(replace(large, dtype=torch.bfloat16), grads=True) == 0
    for n in range(module.MOST_WAYS + 5):  # forgets calls, not buffers
        assert made(replace(CALL, lengths=(5, n % 50, n // 50)), grads=True) == 0


def buffers(transport: NVLink) -> list[Tensor]:
    """All that a rank keeps, but for a few words."""
    assert transport._partials is not None
    shared = [x.mine for x in (*transport._published, transport._partials)]
    return [*shared, transport._gathered, transport._home]


def test_buffers_are_as_large_as_shapes_say() -> None:
    alone = Alone()
    for call in (CALL, replace(CALL, lengths=(5, 50, 4))):
        alone.bring(call, grads=True)
        kept = sum(x.numel() for x in buffers(alone.transport))
        assert kept == Shapes(call.own(0), call.lengths).buffer_bytes


@pytest.mark.parametrize("captured", [False, True])
def test_what_larger_buffers_replace_is_kept_for_graphs_alone(captured: bool) -> None:
    alone = Alone()
    alone.bring(grads=True)
    alone.bring(grads=True)
    alone.link.captured = captured
    alone.bring(grads=True)
    alone.link.captured = False
    before = [weakref.ref(x) for x in (*buffers(alone.transport), alone.transport._arrived)]
    alone.link.made.clear()
    alone.bring(replace(CALL, batch=20), grads=True)
    assert [x() is not None for x in before] == [captured] * 6


def test_a_small_block_in_large_buffers_comes_in_one_piece() -> None:
    alone = Alone()
    alone.bring(replace(CALL, lengths=(5, FIRST_PIECE // 400, 4)))
    counts = [x for x in alone.noted(alone.bring) if x[0] == "count"]
    assert counts == [("count", 1, 4), ("count", 2, 4)]


def test_a_communicator_keeps_its_transport_and_nothing_else_does() -> None:
    comm = Communicator(0, 3, (0, 1, 2))
    transport = nvlink(comm)
    assert nvlink(comm) is transport
    assert nvlink(Communicator(0, 3, (0, 1, 2))) is not transport
    gone = weakref.ref(transport)
    del comm, transport
    gc.collect()
    assert gone() is None


def test_what_inference_made_serves_training() -> None:
    with torch.inference_mode():
        alone = Alone()
        alone.bring(grads=True)
        alone.bring(grads=True)
    alone.bring(grads=True)
    moving = alone.bring(grads=True)
    alone.take_home().pending.wait()
    assert not any(x.is_inference() for pair in moving.blocks.values() for x in pair)
    moving.ready[1].late.fill_(1)
    with pytest.raises(ExchangeError, match="keys of rank 1 had"):
        alone.bring()

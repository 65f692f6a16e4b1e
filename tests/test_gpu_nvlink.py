"""GPU tests of the one-launch ring over NVLink: steps in a row, graphs, and what else may go on beside it.

They hold under CUDA_LAUNCH_BLOCKING=1 and CUDA_DEVICE_MAX_CONNECTIONS=1 as well, which a process takes when it starts.
"""

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_cases import case, check, ring_of, unchecked
from torch.profiler import ProfilerActivity, profile

from ringflash.launch.bootstrap import Session
from ringflash.transport import nvlink
from ringflash.transport.symmetric import Symmetric

pytestmark = pytest.mark.gpu
Step = Callable[[list[float]], torch.Tensor]


def step_of(batch: Any, qkv: list[torch.Tensor]) -> Step:
    """A forward and a backward pass on q, k, v times what is given, and a number for each result that tells its bits."""
    weights = torch.randint(1, 1 << 40, (qkv[0].numel(),), device="cuda", generator=torch.Generator("cuda").manual_seed(0))

    def bits(x: torch.Tensor) -> torch.Tensor:
        words = x.contiguous().view(torch.int16).flatten()
        return (words * weights[: words.numel()]).sum()

    def step(gains: list[float]) -> torch.Tensor:
        q, k, v = (x.detach().mul(gain).requires_grad_() for x, gain in zip(qkv, gains, strict=True))
        out = batch.attention(q, k, v)
        return torch.stack([bits(x) for x in (out.detach(), *torch.autograd.grad(out, (q, k, v), out.detach()))])

    return step


def both(tokens: int = 1024) -> tuple[Step, Step]:
    """The same step over NVLink and over collectives."""
    fast, slow = (unchecked(transport, deterministic=True) for transport in ("nvlink", "allgather"))
    batch, qkv = ring_of(fast, tokens)
    steps = step_of(batch, qkv), step_of(slow.batch(batch.layout.seqlen, batch.mask), qkv)
    for step in steps * 2:  # buffers and kernels are made, all ranks together
        step([1.0] * 3)
    return steps


def drawn_gains(steps: int) -> list[list[float]]:
    """For q, k and v of each step, the same on all ranks."""
    return torch.rand(steps, 3, generator=torch.Generator().manual_seed(1)).add(0.5).tolist()


def same(found: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    """The same bits in each step, and not those of another step."""
    ours, theirs = (torch.stack(x).tolist() for x in (found, right))
    wrong = [n for n, (x, y) in enumerate(zip(ours, theirs, strict=True)) if x != y]
    assert not wrong, f"{len(wrong)} of {len(found)} steps, the first {wrong[:10]}"
    assert len(set(map(tuple, ours))) == len(found)


def test_many_heads_arrive_in_pieces(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvlink, "FIRST_PIECE", 1 << 20)
    check(session, case(heads=(16, 16), headdims=(128, 128), seqlen=4096, transport="nvlink"))


@pytest.mark.parametrize("steps", [300, pytest.param(10_000, marks=pytest.mark.slow(sample=0))])
def test_steps_in_a_row_with_other_data_each_are_those_of_steps_alone(session: Session, steps: int) -> None:
    """Buffers are used again at once, ranks are held up here and there; compared bit for bit with what collectives bring."""
    (step, right), gains = both(), drawn_gains(steps)
    wait, found = random.Random(session.world.rank), []
    for n in range(steps):
        if wait.random() < 0.1:
            torch.cuda._sleep(wait.randrange(1_000_000))
        if wait.random() < 0.05:
            time.sleep(0.002)
        found.append(step(gains[n]))
    same(found, [right(gains[n]) for n in range(steps)])


def test_a_captured_step_may_be_replayed_with_other_inputs(session: Session) -> None:
    fast, slow = (unchecked(transport, deterministic=True) for transport in ("nvlink", "allgather"))
    batch, qkv = ring_of(fast, 512)
    given = [x.detach().clone() for x in qkv]
    step, right = step_of(batch, given), step_of(slow.batch(batch.layout.seqlen, batch.mask), qkv)
    alike, gains = [1.0] * 3, drawn_gains(100)
    stream, found = torch.cuda.Stream(), []
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(alike)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            told = step(alike)
        for n, gain in enumerate(gains):
            for x, y, g in zip(given, qkv, gain, strict=True):
                x.copy_(y.detach() * g)
            graph.replay()
            found.append(told.clone())
            if n % 10 == 3:  # an eager call between two replays
                assert torch.equal(step(alike), found[-1])
    torch.cuda.synchronize()
    same(found, [right(gain) for gain in gains])


def test_a_collective_that_waits_on_another_stream_of_one_rank(session: Session) -> None:
    """As FSDP's gathering of weights may: in line before the step on one rank, behind it on the others."""
    (step, right), gains = both(), drawn_gains(20)
    group, side, found = torch.distributed.new_group(), torch.cuda.Stream(), []
    weights = torch.full((1 << 20,), 1.0, device="cuda")
    torch.distributed.all_reduce(weights, group=group)  # its communicator is made here

    def collect() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.distributed.all_reduce(weights, group=group)

    for n, gain in enumerate(gains):
        early = n % session.world.size == session.world.rank
        if early:
            collect()
        found.append(step(gain))
        if not early:
            collect()
    torch.cuda.synchronize()
    same(found, [right(gain) for gain in gains])


def test_steps_on_streams_that_take_turns(session: Session) -> None:
    """More streams than the device has queues: some share one."""
    (step, right), gains = both(), drawn_gains(80)
    streams, found = [torch.cuda.Stream() for _ in range(40)], []
    for n, gain in enumerate(gains):
        stream = streams[n % len(streams)]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found.append(step(gain))
        torch.cuda.current_stream().wait_stream(stream)
    same(found, [right(gain) for gain in gains])


def test_a_profiled_step(session: Session) -> None:
    (step, right), gains = both(), drawn_gains(5)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as told:
        found = [step(gain) for gain in gains]
        torch.cuda.synchronize()
    same(found, [right(gain) for gain in gains])
    if session.world.size > 1:
        assert any("Memcpy PtoP" in event.key for event in told.key_averages())


def test_an_error_between_publishing_and_the_launch_is_overcome(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks stop there, and the next steps are right."""
    if session.world.size == 1:
        pytest.skip("needs two ranks")
    (step, right), gains = both(), drawn_gains(10)
    found = [step(gain) for gain in gains[:5]]
    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(Symmetric, "count", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                step(gains[0])
        found += [step(gain) for gain in gains[len(found) :][:1]]
    found += [step(gain) for gain in gains[len(found) :]]
    same(found, [right(gain) for gain in gains])

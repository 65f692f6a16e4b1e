"""P2P: what is sent arrives, in order, whatever the sizes and directions; nothing is posted for empty tensors."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import Pools
from torch.distributed.device_mesh import DeviceMesh

import ringflash as rf
from ringflash.ring import Ring
from ringflash.transport.blocks import Hops, Shapes
from ringflash.transport.communicator import communicator
from ringflash.transport.p2p import P2P, Pending


def around(order: list[int] | None, dtype: torch.dtype) -> list[bool]:
    """Two tensors to the next place and three to the one before, in one exchange: pairs meet in the order they were given."""
    comm = communicator(None if order is None else DeviceMesh("cpu", order))
    rank, after, before = comm.rank, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sends = [(torch.full((3, i + 1), 10 * rank + i).to(dtype), after) for i in range(2)]
    sends += [(torch.full((2,), 10 * rank + i).to(dtype), before) for i in range(2, 5)]
    recvs = [(torch.zeros(3, i + 1).to(dtype), before) for i in range(2)] + [
        (torch.zeros(2).to(dtype), after) for _ in range(3)
    ]
    P2P(comm).exchange(sends, recvs).wait()
    sources = [10 * before, 10 * before + 1, *(10 * after + i for i in (2, 3, 4))]
    return [bool((x.float() == value).all()) for (x, _), value in zip(recvs, sources, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("order", [None, [2, 0, 1]])
def test_pairs_meet_in_order(pools: Pools, order: list[int] | None, dtype: torch.dtype) -> None:
    assert pools.run(3, around, order, dtype) == [[True] * 5] * 3


def among_some() -> float:
    """Ranks 0 and 2 of three, in this order the second and the first."""
    comm, got = communicator(), torch.full((2,), -1.0)
    if comm.rank != 1:
        place = 0 if comm.rank == 2 else 1
        P2P(comm, [2, 0]).exchange([(torch.full((2,), float(comm.rank)), 1 - place)], [(got, 1 - place)]).wait()
    return float(got[1])


def test_among_some_ranks(pools: Pools) -> None:
    assert pools.run(3, among_some) == [2.0, -1.0, 0.0]


def move_among_some() -> tuple[float, float] | None:
    """Blocks, and dK and dV, between ranks 2 and 0 of three, which are 0 and 1 to each other: what of both arrives."""
    comm = communicator()
    if comm.rank == 1:
        return None
    place, other = (0, 1) if comm.rank == 2 else (1, 0)
    shapes = Shapes((torch.ones(1, 3 + place, 2, 4), torch.ones(1, 3 + place, 2, 5)), (3, 4))
    held = {place: (shapes.k * (10 + place), shapes.v * (20 + place))}
    partial = {other: tuple(x.fill_(30 + place) for x in shapes.empty(other, torch.float32))}
    hops = Hops(((place, other),), ((other, other),), ((other, other),), ((place, other),), moves=True, grad_moves=True)
    moving = P2P(comm, [2, 0]).move(hops, held, partial, shapes=shapes)  # pyright: ignore[reportArgumentType]
    moving.pending.wait()
    assert not partial
    (k, v), ((block, (dk, dv)),) = moving.blocks[other], moving.grads
    assert (k.shape[1], block, dk.shape, dv.shape) == (3 + other, place, shapes.k.shape, shapes.v.shape)
    assert all(bool((x == x.flatten()[0]).all()) for x in (k, v, dk, dv))
    return float(v[0, 0, 0, 0]), float(dv[0, 0, 0, 0])


def test_blocks_among_some_ranks(pools: Pools) -> None:
    assert pools.run(3, move_among_some) == [(20.0, 30.0), None, (21.0, 31.0)]


def one_way(n: int) -> int:
    """Rank 0 to rank 1 only: (operations posted). Both directions are a case of their own in the ring's tests."""
    comm = communicator()
    x = torch.arange(float(n)) if comm.rank == 0 else torch.full((n,), -1.0)
    with mock.patch.object(dist, "batch_isend_irecv", wraps=dist.batch_isend_irecv) as batch:
        P2P(comm).exchange(*(([(x, 1)], []) if comm.rank == 0 else ([], [(x, 0)]))).wait()
    assert torch.equal(x, torch.arange(float(n)))
    return sum(len(call.args[0]) for call in batch.call_args_list)


@pytest.mark.parametrize(("n", "posted"), [(0, 0), (1, 1), (1 << 20, 1)])
def test_one_way(pools: Pools, n: int, posted: int) -> None:
    assert pools.run(2, one_way, n) == [posted] * 2


def several_in_flight() -> bool:
    """Exchanges started before the one ahead has ended, waited for in order."""
    comm = communicator()
    other, pending = 1 - comm.rank, []
    recvs = [torch.zeros(4) for _ in range(5)]
    for i, recv in enumerate(recvs):
        pending.append(P2P(comm).exchange([(torch.full((4,), float(i + 10 * comm.rank)), other)], [(recv, other)]))
    for each in pending:
        each.wait()
        each.wait()  # once more does no harm
    return all(bool((x == i + 10 * other).all()) for i, x in enumerate(recvs))


def test_several_in_flight(pools: Pools) -> None:
    assert all(pools.run(2, several_in_flight))


def outer_and_others() -> list[float]:
    """An outer exchange that is waited for after those which started behind it."""
    comm = communicator()
    other = 1 - comm.rank
    recvs = [torch.zeros(4) for _ in range(4)]

    def start(i: int, *, outer: bool = False) -> Pending:
        return P2P(comm).exchange([(torch.full((4,), float(i + 10 * comm.rank)), other)], [(recvs[i], other)], outer=outer)

    outer = start(0, outer=True)
    for i in (1, 2, 3):
        start(i).wait()
    outer.wait()
    return [float(x.mean()) for x in recvs]


def test_others_do_not_wait_for_an_outer_exchange(pools: Pools) -> None:
    assert pools.run(2, outer_and_others) == [[10.0, 11.0, 12.0, 13.0], [0.0, 1.0, 2.0, 3.0]]


def left_in_midst(error: type[BaseException], backward: bool) -> tuple[str, str, int]:
    """All ranks raise while blocks are under way, catch it and go on: (the first error, the next call's, transfers kept)."""
    group: Any = dist.new_group()
    x = torch.ones(1, 4, 3, 2, 8, requires_grad=True)

    def call() -> torch.Tensor:
        return rf.ring_attention(*x.unbind(2), layout="zigzag", group=group).sum()  # pyright: ignore[reportReturnType, reportAttributeAccessIssue]

    call().backward()
    assert not communicator(group).flying
    loss = call()
    method = "_add_gradients" if backward else "_segments"
    with mock.patch.object(Ring, method, side_effect=error), pytest.raises(error) as first:
        loss.backward() if backward else call()
    with pytest.raises(RuntimeError) as later:
        call()
    return repr(first.value), str(later.value), len(communicator(group).flying)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_nobody_goes_on_from_a_call_with_blocks_under_way(pools: Pools, error: type[BaseException], backward: bool) -> None:
    """Its transfers would be paired with the next call's: wrong blocks, or none and all ranks wait."""
    for first, later, kept in pools.run(2, left_in_midst, error, backward):
        assert first == f"{error.__name__}()"
        assert "this ring is out of step since rank " in later
        assert kept == 1

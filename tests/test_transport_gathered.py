"""All-gather transport over gloo: padding, blocks that a rank leaves out, orders of ranks, passes over one graph again."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import Pools
from ring_cases import CAUSAL, Case, check
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import ringflash as rf
from ringflash.transport import gathered
from ringflash.transport.blocks import Hops, Pair, Shapes
from ringflash.transport.communicator import communicator
from ringflash.transport.gathered import AllGather

Needs = tuple[tuple[bool, ...], ...]
ORDERS = [[0, 1, 2], [2, 1, 0], [2, 0, 1], [2, 0], [1, 2]]  # of global ranks in the ring
OPTIONS = rf.Options(transport="allgather")


@functools.lru_cache
def mesh_of(order: tuple[int, ...]) -> DeviceMesh:
    """A mesh of some ranks, in this order. A collective of all, once."""
    return DeviceMesh("cpu", list(order))


def hops_of(rank: int, needs: Needs) -> tuple[Hops, Hops]:
    """Of a step in which all that is needed comes, and of one in which its dK/dV go home."""
    others = [r for r in range(len(needs)) if r != rank]
    to = tuple((rank, r) for r in others if needs[r][rank])
    come = tuple((b, b) for b in others if needs[rank][b])
    return Hops(to, come, (), (), moves=True), Hops((), (), come, to, grad_moves=True)


def own(rank: int, tokens: int, dtype: torch.dtype) -> Pair:
    """k and v (2, tokens, 3, 4 | 5) of a rank."""
    generator = torch.Generator().manual_seed(rank)
    return tuple(torch.randn(2, tokens, 3, d, generator=generator).to(dtype) for d in (4, 5))  # pyright: ignore


def there_and_back(order: list[int], lengths: Sequence[int], needs: Needs, dtype: torch.dtype) -> list[float] | None:
    """All blocks, then twice dK and dV: what comes home, made of a power of ten per rank; None: not in the ring."""
    mesh = mesh_of(tuple(order))
    if dist.get_rank() not in order:
        return None
    comm = communicator(mesh)
    k, v = own(comm.rank, lengths[comm.rank], dtype)
    shapes, transport = Shapes((k, v), tuple(lengths)), AllGather(comm)
    (out, home), sums = hops_of(comm.rank, needs), []
    for _ in range(2):
        moving = transport.move(out, {comm.rank: (k, v)}, {}, shapes=shapes)
        moving.pending.wait()
        assert list(moving.blocks) == [block for block, _ in out.recvs]
        for block, pair in moving.blocks.items():
            assert all(torch.equal(x, y) for x, y in zip(pair, own(block, lengths[block], dtype), strict=True))
        partial = {block: transport.room(block, shapes) for block in moving.blocks}
        for pair in partial.values():
            assert [(x.dtype, x.is_contiguous()) for x in pair] == [(torch.float32, True)] * 2
            _ = [x.fill_(10.0**comm.rank) for x in pair]
        moving = transport.move(home, {comm.rank: (k, v)}, partial, shapes=shapes)
        moving.pending.wait()
        assert not partial
        sums += [float(x.mean()) for _, pair in moving.grads for x in pair if x.numel()]
        assert [(b, x.shape) for b, pair in moving.grads for x in pair] == [(comm.rank, x.shape) for x in (k, v)] * len(
            moving.grads
        )
    return sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_what_a_rank_does_not_attend_adds_nothing(pools: Pools, order: list[int], dtype: torch.dtype) -> None:
    """Uneven blocks, one of them empty, in rings whose order is not the group's."""
    n = len(order)
    for lengths, bits in (((5, 2, 3), 0b110101), ((5, 0, 3), 0b111111), ((1, 7, 2), 0b010010)):
        needs = tuple(tuple(bool(bits >> (r * (n - 1) + b) & 1) for b in range(n)) for r in range(n))
        found = pools.run(3, there_and_back, order, lengths[:n], needs, dtype)
        for place, rank in enumerate(order):
            total = sum(10.0**r for r in range(n) if r != place and needs[r][place])
            assert found[rank] == ([total] * 4 if total and lengths[place] else [])


def begun_and_given_up() -> list[float]:
    """The dK that comes home in a pass behind one that was given up: the last rank alone has some, for the first."""
    comm = communicator()
    k, v = own(comm.rank, 2, torch.float32)
    shapes, transport = Shapes((k, v), (2, 2, 2)), AllGather(comm)
    for block in {0, 1, 2} - {comm.rank}:
        _ = [x.fill_(7.0) for x in transport.room(block, shapes)]
    with mock.patch.object(comm, "leave_word") as word:
        transport.abandon(ValueError("x"))
    word.assert_called_once()
    _, home = hops_of(comm.rank, ((True, False, False), (False, True, False), (True, False, True)))
    partial = {0: transport.room(0, shapes)} if comm.rank == 2 else {}
    for pair in partial.values():
        _ = [x.fill_(1.0) for x in pair]
    moving = transport.move(home, {comm.rank: (k, v)}, partial, shapes=shapes)
    moving.pending.wait()
    return [float(pair[0].mean()) for _, pair in moving.grads]


def test_what_was_given_up_is_not_added(pools: Pools) -> None:
    assert pools.run(3, begun_and_given_up) == [[1.0], [], []]


@pytest.mark.parametrize("size", [2, 3])
def test_nothing_to_attend_or_to_see(pools: Pools, size: int) -> None:
    few = [Case(seqlen=n, layout=layout, transport="allgather") for n in (0, 1, 2) for layout in ("contiguous", "zigzag")]
    check(pools, size, [*few, Case(batch=0, transport="allgather"), Case(behind=-30, transport="allgather")])


@contextmanager
def collectives() -> Iterator[list[tuple[str, int]]]:
    """(name, elements that go in) of each meanwhile."""
    log: list[tuple[str, int]] = []
    gather, scatter = gathered._ALL_GATHER, gathered._REDUCE_SCATTER

    def gathering(into: Tensor, x: Tensor, **kwargs: Any) -> object:
        log.append(("gather", x.numel()))
        return gather(into, x, **kwargs)

    def scattering(into: Tensor, x: Tensor, **kwargs: Any) -> object:
        log.append(("scatter", x.numel()))
        return scatter(into, x, **kwargs)

    with mock.patch.multiple(gathered, _ALL_GATHER=gathering, _REDUCE_SCATTER=scattering):
        yield log


def shards(layout: rf.Layout, rank: int) -> list[Tensor]:
    """q, k and v (2, seqlen, 4 | 2, 8) of a rank."""
    generator = torch.Generator().manual_seed(5)
    whole = [torch.randn(2, layout.seqlen, heads, 8, generator=generator) for heads in (4, 2, 2)]
    return [layout.part(x, rank).clone().requires_grad_() for x in whole]


def moved(mask: rf.Mask) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """The collectives of forward and of backward over shards of 3, 4 and 4 tokens."""
    layout = rf.layouts.contiguous(11, 3)
    qkv = shards(layout, dist.get_rank())
    rf.ring_attention(*qkv, layout=layout, mask=mask, options=OPTIONS)  # ranks compare the first calls
    with collectives() as forward:
        out = rf.ring_attention(*qkv, layout=layout, mask=mask, options=OPTIONS)
    with collectives() as backward:
        out.sum().backward()  # pyright: ignore[reportAttributeAccessIssue]
    return forward, backward


def test_one_collective_each_way(pools: Pools) -> None:
    """Of the longest block, on every rank, though the first sees no other's block and no other sees the last's."""
    n = 2 * 4 * 2 * (8 + 8)
    assert pools.run(3, moved, CAUSAL) == [([("gather", n)], [("gather", n), ("scatter", 3 * n)])] * 3


def test_none_where_nothing_is_needed(pools: Pools) -> None:
    assert pools.run(3, moved, rf.Mask(documents=(0, 3, 7, 11))) == [([], [])] * 3


def again_and_again(order: list[int]) -> list[bool] | None:
    """Whether a second backward over a graph, and whole calls, give the same bits."""
    mesh = mesh_of(tuple(order))
    if dist.get_rank() not in order:
        return None
    layout = rf.layouts.zigzag(37, len(order))
    qkv = shards(layout, communicator(mesh).rank)
    calls = []
    for _ in range(3):
        out = rf.ring_attention(*qkv, layout=layout, mask=CAUSAL, group=mesh, options=OPTIONS)
        assert isinstance(out, Tensor)
        for keep in (True, False):
            calls.append((out.detach(), *torch.autograd.grad(out.square().sum(), qkv, retain_graph=keep)))
    return [torch.equal(x, y) for call in calls for x, y in zip(call, calls[0], strict=True)]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_the_same_bits_every_time_and_over_a_graph_that_is_kept(pools: Pools, order: list[int]) -> None:
    found = pools.run(3, again_and_again, order)
    assert [found[rank] for rank in order] == [[True] * 24] * len(order)


def around(order: list[int]) -> list[Tensor] | None:
    """out, dq, dk and dv of a rank."""
    mesh = mesh_of(tuple(order))
    if dist.get_rank() not in order:
        return None
    layout = rf.layouts.contiguous(11, len(order))
    qkv = shards(layout, communicator(mesh).rank)
    out = rf.ring_attention(*qkv, layout=layout, mask=CAUSAL, group=mesh, options=OPTIONS)
    assert isinstance(out, Tensor)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), qkv)]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_places_are_the_ring_s_not_the_group_s(pools: Pools, order: list[int]) -> None:
    layout = rf.layouts.contiguous(11, 1)
    qkv = shards(layout, 0)
    out = rf.ring_attention(*qkv, layout=layout, mask=CAUSAL)
    assert isinstance(out, Tensor)
    whole = [out.detach(), *torch.autograd.grad(out.square().sum(), qkv)]
    found = pools.run(3, around, order)
    for i, x in enumerate(whole):
        torch.testing.assert_close(torch.cat([found[rank][i] for rank in order], 1), x, atol=1e-5, rtol=1e-5)

"""NVLink transport, on threads and on one rank alone: what arrives where, in what order things happen, what is kept."""

import datetime
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import Pools
from ring_cases import Threads, on_threads
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ringflash.transport import nvlink as module
from ringflash.transport.blocks import Hops, Moving, Pair, Shapes, Shared
from ringflash.transport.communicator import Communicator, ExchangeError, communicator
from ringflash.transport.nvlink import FIRST_PIECE, NVLink, nvlink, pieces

BLOCKS, GRADS, END = range(3)


# Pieces


@given(st.integers(0, 300), st.integers(0, 2 * FIRST_PIECE))
def test_pieces_cover_the_heads_once(nheads: int, bytes_per_head: int) -> None:
    found = pieces(nheads, bytes_per_head)
    assert [head for begin, end in found for head in range(begin, end)] == list(range(nheads))
    assert all(end == 2 * begin for begin, end in found[1:-1]), "as much as all before"
    assert all(end <= 2 * begin for begin, end in found[1:])
    if len(found) > 1:
        first = found[0][1]
        assert first == 1 or first * bytes_per_head <= FIRST_PIECE < (first + 1) * bytes_per_head


# What arrives


@dataclass(frozen=True)
class Call:
    """The shapes of an exchange, and which rank needs which block."""

    lengths: tuple[int, ...]
    needs: tuple[tuple[bool, ...], ...]
    batch: int = 1
    nheads: int = 2
    headdims: tuple[int, int] = (4, 4)
    dtype: torch.dtype = torch.float32

    def own(self, rank: int) -> Pair:
        """k and v, all of whose values say whose they are and where they belong."""
        sizes = [(self.batch, self.lengths[rank], self.nheads, headdim) for headdim in self.headdims]
        k, v = (torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(self.dtype) for size in sizes)
        return k, v

    def hops(self, rank: int) -> Hops:
        """Of a step in which all that is needed comes, or goes home."""
        ranks = [r for r in range(len(self.lengths)) if r != rank]
        to = tuple((rank, r) for r in ranks if self.needs[r][rank])
        come = tuple((b, b) for b in ranks if self.needs[rank][b])
        return Hops(to, come, (), (), moves=True)

    def hops_home(self, rank: int) -> Hops:
        out = self.hops(rank)
        return Hops((), (), out.recvs, out.sends, grad_moves=True)


@st.composite
def calls(draw: st.DrawFn) -> list[Call]:
    """A few exchanges between the same ranks."""
    size = draw(st.integers(2, 5))
    return [
        Call(
            tuple(draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))),
            tuple(tuple(draw(st.booleans()) for _ in range(size)) for _ in range(size)),
            draw(st.integers(0, 3)),
            draw(st.integers(1, 5)),
            (draw(st.sampled_from([1, 4, 8, 24])), draw(st.sampled_from([1, 3, 8, 16]))),
            draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        )
        for _ in range(draw(st.integers(1, 4)))
    ]


def exchanged(transport: NVLink, rank: int, call: Call) -> None:
    """One exchange there and, with partial dK/dV that say who made them, back."""
    k, v = call.own(rank)
    shapes, hops = Shapes((k, v), call.lengths), call.hops(rank)
    partial: dict[int, Pair] = {}
    moving = transport.move(hops, {rank: (k, v)}, partial, shapes=shapes)
    assert all(ready.tolist() == [call.nheads] for ready, _ in moving.ready.values())
    moving.pending.wait()
    assert list(moving.blocks) == list(moving.ready) == [block for block, _ in hops.recvs]
    for block, pair in moving.blocks.items():
        assert all(torch.equal(x, y) for x, y in zip(pair, call.own(block), strict=True))
        assert moving.ready[block].ready.tolist() == [0], "nothing is counted for the next call"
        partial[block] = transport.room(block, shapes)
        for x, like in zip(partial[block], pair, strict=True):
            assert (x.dtype, x.shape, x.is_contiguous()) == (torch.float32, like.shape, True)
            x.fill_(10 * rank + block)
    home = call.hops_home(rank)
    moving = transport.move(home, {rank: (k, v)}, partial, shapes=shapes)
    moving.pending.wait()
    assert not partial
    assert [block for block, _ in moving.grads] == [rank] * len(home.grad_recvs)
    for (_, maker), (_, pair) in zip(home.grad_recvs, moving.grads, strict=True):
        for x, own in zip(pair, (k, v), strict=True):
            assert torch.equal(x, torch.full(own.shape, 10.0 * maker + rank))


@settings(max_examples=60)
@given(calls())
def test_every_block_and_gradient_lands_where_it_is_looked_for(several: list[Call]) -> None:
    """Lengths uneven and nought, other shapes from call to call: whose buffers grow, and are used again, at any rank's turn."""
    size = len(several[0].lengths)
    shared = Threads(size)

    def one(rank: int) -> None:
        transport = shared.transport(rank)
        for call in several:
            exchanged(transport, rank, call)

    on_threads(size, one)


ALL3 = ((True,) * 3,) * 3
CALL = Call((5, 3, 4), ALL3, nheads=4, headdims=(8, 16))


def with_strides(x: Tensor, strides: str) -> Tensor:
    """The same values laid out otherwise."""
    if strides == "heads first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    room = x.new_zeros(*x.shape[:-1], x.shape[-1] + 3)
    return room[..., 3:].copy_(x)


@pytest.mark.parametrize("strides", ["heads first", "off by three"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strides_of_the_own_block_do_not_matter(strides: str, dtype: torch.dtype) -> None:
    shared, call = Threads(3), replace(CALL, dtype=dtype)

    def one(rank: int) -> None:
        own, shapes = call.own(rank), Shapes(call.own(rank), call.lengths)
        k, v = (with_strides(x, strides) for x in own)
        moving = shared.transport(rank).move(call.hops(rank), {rank: (k, v)}, None, shapes=shapes)
        for block, pair in moving.blocks.items():
            assert all(torch.equal(x, y) for x, y in zip(pair, call.own(block), strict=True))

    on_threads(3, one)


# One rank alone, whose link notes what it is asked


@dataclass
class Lone:
    """The link of rank 0 of three, the others of which do nothing: what happens, in order. made: all memory that is shared."""

    log: list[tuple] = field(default_factory=list)
    made: list[Shared] = field(default_factory=list)
    captured: bool = False

    def shared(self, nbytes: int) -> Shared:
        of = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(3)]
        self.log.append(("make", nbytes))
        self.made.append(Shared(of[0], of))
        return self.made[-1]

    def meet(self, channel: int) -> None:
        self.log.append(("meet", channel))

    def follow(self) -> None:
        self.log.append(("follow",))

    @contextmanager
    def aside(self) -> Iterator[None]:
        self.log.append(("aside",))
        yield
        self.log.append(("back",))

    def rejoin(self) -> None:
        self.log.append(("rejoin",))

    def count(self, words: Tensor, block: int, heads: int) -> None:
        self.log.append(("count", block, heads))

    def late(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32)


class Writes(TorchDispatchMode):
    """Notes copies and zeroing in a link's log: from a shared memory, by its number and rank, to another or to elsewhere."""

    def __init__(self, link: Lone) -> None:
        super().__init__()
        self._link = link

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._link.log.append(("copy", self._name(args[1]), self._name(args[0])))
        if func is torch.ops.aten.zero_.default:
            self._link.log.append(("zero", self._name(args[0])))
        return func(*args, **(kwargs or {}))

    def _name(self, x: Tensor) -> tuple[int, int] | None:
        at = {y.data_ptr(): (i, rank) for i, shared in enumerate(self._link.made) for rank, y in enumerate(shared.of)}
        return at.get(x.untyped_storage().data_ptr())


class Alone:
    """A transport over a Lone link, and the steps of its calls."""

    def __init__(self) -> None:
        self.link = Lone()
        self.transport = NVLink(Communicator(0, 3, (0, 1, 2)), lambda _: self.link)

    def bring(self, call: Call = CALL, *, grads: bool = False) -> Moving:
        k, v = call.own(0)
        shapes, partial = Shapes((k, v), call.lengths), {} if grads else None
        return self.transport.move(call.hops(0), {0: (k, v)}, partial, shapes=shapes)

    def take_home(self, call: Call = CALL) -> Moving:
        k, v = call.own(0)
        shapes = Shapes((k, v), call.lengths)
        partial = {block: self.transport.room(block, shapes) for block in (1, 2)}
        return self.transport.move(call.hops_home(0), {0: (k, v)}, partial, shapes=shapes)

    def noted(self, do: Callable[[], object]) -> list[tuple]:
        """What happens meanwhile."""
        self.link.log.clear()
        with Writes(self.link):
            do()
        return list(self.link.log)


def arriving(published: int) -> list[tuple]:
    """Blocks 1 and 2 in three pieces, each counted behind its copy."""
    heads = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (2, 4)]
    return [x for block, n in heads for x in (("copy", (published, block), None), ("count", block, n))]


ZERO = ("zero", None)


def calling(published: int, *zero: tuple) -> list[tuple]:
    """A call up to where `move` returns."""
    publish = [("copy", None, (published, 0))] * 2
    return [*publish, *zero, ("meet", BLOCKS), ("aside",), *arriving(published), ("back",)]


def test_a_block_is_published_then_all_meet_then_copies_are_made_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PIECE", 1)
    alone = Alone()
    bytes_ = Shapes(CALL.own(0), CALL.lengths).block_bytes
    assert alone.noted(alone.bring) == [("follow",), ("make", bytes_), ("make", bytes_), *calling(0)]
    for turn in (1, 0, 1):
        assert alone.noted(alone.bring) == [("follow",), *calling(turn, ZERO)], "two published blocks take turns"
    for _ in range(2):
        moving = alone.bring()
        assert alone.noted(moving.pending.wait) == [("rejoin",), ZERO]
        assert alone.noted(alone.bring) == [("follow",), *calling(1)], "what was counted is forgotten behind the kernel"


def test_gradients_go_home_when_all_have_met() -> None:
    alone = Alone()
    alone.bring(grads=True).pending.wait()
    copies = [("copy", (2, rank), None) for rank in (1, 2)]
    assert alone.noted(alone.take_home) == [("follow",), ("aside",), ("meet", GRADS), *copies, ("back",)]
    assert alone.noted(alone.take_home().pending.wait) == [("rejoin",)]


def test_a_rank_that_needs_nothing_and_gives_nothing_meets_the_others() -> None:
    alone, nothing = Alone(), replace(CALL, needs=((False,) * 3,) * 3)
    alone.bring()
    assert ("meet", BLOCKS) in alone.noted(lambda: alone.bring(nothing, grads=True))
    home = alone.noted(lambda: alone.transport.move(nothing.hops_home(0), {}, {}, shapes=Shapes(CALL.own(0), CALL.lengths)))
    assert home == [("follow",), ("aside",), ("meet", GRADS), ("back",)]


def test_a_captured_call_begins_and_ends_with_a_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its replays publish to one and the same block, whichever the call before or behind them uses."""
    monkeypatch.setattr(module, "FIRST_PIECE", 1)
    alone = Alone()
    alone.bring().pending.wait()
    alone.link.captured = True
    moving: list[Moving] = []
    assert alone.noted(lambda: moving.append(alone.bring())) == [("follow",), ("meet", END), *calling(1, ZERO)]
    assert alone.noted(moving[0].pending.wait) == [("rejoin",), ZERO, ("meet", END)]
    alone.link.captured = False
    assert alone.noted(alone.bring) == [("follow",), *calling(0, ZERO)], "the capture did not zero what it would have"


def test_a_kernel_that_gave_up_waiting_is_told_of_once() -> None:
    alone = Alone()
    moving = alone.bring()
    moving.ready[2].late.fill_(1)
    with pytest.raises(ExchangeError, match="an earlier call's result is wrong: keys of rank 2 had not arrived after 20 s"):
        alone.bring()
    moving = alone.bring(grads=True)
    for ready in moving.ready.values():
        ready.late.fill_(1)
    with pytest.raises(ExchangeError, match="keys of rank 1, 2 had not arrived"):
        alone.take_home()
    alone.take_home()


def test_a_later_call_comes_behind_what_an_error_left_under_way() -> None:
    alone = Alone()
    alone.bring()
    assert alone.noted(lambda: alone.transport.abandon(ValueError("x"))) == [("rejoin",)]
    assert "raised in its call 0: x" in str(alone.transport._comm.left)
    alone.link.captured = True
    assert alone.noted(lambda: alone.transport.abandon(ValueError("x"))) == []


def test_the_word_is_left_though_the_gpu_is_lost() -> None:
    alone = Alone()
    with mock.patch.object(alone.link, "rejoin", side_effect=RuntimeError("CUDA error")):
        alone.transport.abandon(ValueError("x"))
    assert "raised in its call 0: x" in str(alone.transport._comm.left)


# The link


def found_link(without: list[int]) -> str:
    """What a rank finds where some have no memory to share, with groups as on GPUs."""
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    comm = communicator(group)
    comm.groups["cuda"] = comm.groups["cpu"]

    def connect(group: dist.ProcessGroup, ranks: tuple[int, ...], *, timeout_ms: int) -> str:
        assert (group, ranks, timeout_ms) == (comm.groups["cuda"], comm.ranks, 17_500)
        if dist.get_rank() in without:
            raise [RuntimeError("no peer access"), ImportError(), RuntimeError("")][dist.get_rank()]
        return "memory"

    timeout = datetime.timedelta(seconds=17.5)
    with (
        mock.patch.object(module.symmetric, "connect", connect),
        mock.patch.object(comm, "timeout", return_value=timeout),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
    ):
        why = nvlink(comm).connect()
        assert nvlink(comm).linked == (not why)
        if not why:
            return str(nvlink(comm)._link)
        nvlink(comm).abandon(ValueError("x"))  # must not look for the link again, alone
        return why


@pytest.mark.parametrize(
    ("without", "told"),
    [
        ([], "memory"),
        ([0], "rank 0: no peer access"),
        ([1], "rank 1: ?"),  # an error that says nothing is one too
        ([0, 1, 2], "rank 0: no peer access; rank 1: ?; rank 2: ?"),
    ],
)
def test_all_ranks_share_memory_or_none(pools: Pools, without: list[int], told: str) -> None:
    assert set(pools.run(3, found_link, without)) == {told}


def test_ranks_do_not_look_for_memory_while_a_graph_is_captured() -> None:
    transport = nvlink(Communicator(0, 3, (0, 1, 2)))
    with (
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
        pytest.raises(RuntimeError, match="cannot be connected while a CUDA graph is captured: run forward and backward once"),
    ):
        transport.connect()
    assert not transport.linked


def test_the_link_is_made_when_something_moves() -> None:
    """And not by a rank that leaves before: the others would wait for it."""
    transport = NVLink(Communicator(0, 3, (0, 1, 2)), mock.Mock(side_effect=AssertionError))
    transport.abandon(ValueError("x"))
    with pytest.raises(AssertionError):
        transport.move(CALL.hops(0), {}, None, shapes=Shapes(CALL.own(0), CALL.lengths))

"""NVLink transport: copy engines pull other ranks' blocks, and one launch attends them while they arrive.

A rank publishes its block by copying it, key head by key head, to memory that the others can read; all meet; then each has its
copy engines pull what it needs, on a stream of their own, a few heads first, and counts the heads of each piece
in by a word that the stream writes behind it. The kernel waits for a head's word where it first needs that head.

The invariant that keeps a waiting kernel from waiting for ever: when it is launched, all that it waits for has been published,
since the meeting lies before it on its stream, and every copy and every word behind one has been enqueued, by stream operations
that need no multiprocessor and wait for the meeting alone. So nothing that comes after the kernel, on any stream, in any order
in which launches are made one after the other, can be what it waits for. `move` returns only then.

Heads are counted in from zero. A call leaves the words so, behind its kernel, so that the next one need not zero them ahead of
its own. A call that ended in an error does not, and a capture does not know what its replays will find: then that comes first.

Gradients go home the other way: each rank makes the partial dK and dV of other ranks' blocks in memory that they can read, all
meet, and the owners pull them and add them up in a fixed order.

A published block may be overwritten once all have pulled it. Two take turns, so that the next call's meeting, which comes after
the end of each rank's pulling on its stream, says so. A captured graph's replays use the same one each time, whichever the
call before or behind them used: there a meeting more begins the call and one ends it. Buffers that a graph uses are kept.
"""

import datetime
import functools
import math
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ringflash.transport import symmetric
from ringflash.transport.blocks import Hops, Moving, Pair, Parts, Ready, Shapes, Shared
from ringflash.transport.communicator import Communicator, ExchangeError
from ringflash.transport.publishing import Target, publish, target

FIRST_PIECE = 16 << 20  # bytes: some 50 us, in which a kernel attends what it has; each more is two calls of the host
MOST_WAYS = 64  # kept for calls with shapes that have been seen
_BEFORE = "run forward and backward once with these shapes before the capture"
_BLOCKS, _GRADS, _END = range(3)  # meetings that may be under way at the same time


class Link(Protocol):
    """What the transport needs of the machine (transport/symmetric.py has the real one)."""

    def shared(self, nbytes: int, /) -> Shared:
        """Make memory of that size on every rank. All ranks call it together; what it replaces is no longer in use."""
        ...

    def meet(self, channel: int, /) -> None:
        """On the current stream: go on when all ranks have come to this point of theirs."""
        ...

    def follow(self) -> None:
        """The current stream goes on behind the one that called this last, whose call used the same buffers."""
        ...

    def aside(self) -> AbstractContextManager[object]:
        """Inside, the current stream is the transfers' own, which goes on from where the one that called `follow` is."""
        ...

    def rejoin(self) -> None:
        """The current stream goes on when the transfers' own is done."""
        ...

    def count(self, words: Tensor, block: int, heads: int, /) -> None:
        """On the current stream: words[block] = heads, behind what came before; words is uint32."""
        ...

    def late(self, size: int, /) -> Tensor:
        """int32 (size,) zeros that both the host and kernels can write."""
        ...

    @property
    def captured(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        ...


def pieces(nheads: int, bytes_per_head: int) -> list[tuple[int, int]]:
    """[begin, end) of the key heads that are copied together: FIRST_PIECE bytes or one head, then as much again each time.

    A kernel begins with the first heads, which should not be long in coming; it is slower than the copies, so that the rest
    arrives before it gets there.
    """
    found, end = [], 0
    while end < nheads:
        begin, end = end, min(nheads, 2 * end or max(1, FIRST_PIECE // max(bytes_per_head, 1)))
        found.append((begin, end))
    return found


class _Way(NamedTuple):
    """What is alike in all calls with the same shapes: the views of buffers between which blocks move."""

    publish: Target
    copies: tuple[tuple[Tensor, Tensor, int, int], ...]  # (to, from, block, how many of its heads have arrived then)
    blocks: dict[int, Pair]
    ready: dict[int, Ready]


class _WayHome(NamedTuple):
    """The same of gradients."""

    copies: tuple[tuple[Tensor, Tensor], ...]  # (to, from)
    grads: tuple[tuple[int, Pair], ...]  # what has come then: (block, its dK and dV)


class NVLink:
    """Blocks and gradients by copy engines over memory that all ranks share; its buffers serve all calls of a communicator."""

    copies = True

    def __init__(self, comm: Communicator, connect: Callable[[Communicator], Link]) -> None:
        self._comm, self._connect = comm, connect
        self._published: list[Shared] = []
        self._partials: Shared | None = None
        self._gathered = self._home = torch.empty(0)
        self._sizes = {"block": 0, "grads": 0}
        self._calls = 0
        self._arrived = self._words = torch.empty(0)
        self._none_counted = True  # whether _arrived is zero when all that was enqueued is done
        self._ways: dict[Hashable, _Way] = {}
        self._ways_home: dict[Hashable, _WayHome] = {}
        self._rooms: dict[Hashable, Pair] = {}
        self._in_graphs: list[object] = []

    @functools.cached_property
    def _link(self) -> Link:
        """Made where all ranks meet, agreed on their options."""
        return self._connect(self._comm)

    @property
    def linked(self) -> bool:
        """Whether the memory that all ranks share was found."""
        return "_link" in vars(self)

    def connect(self) -> str:
        """Look for that memory: "", or, on all ranks, why there is none. A collective.

        Raises RuntimeError while a graph is captured.
        """
        try:
            _ = self._link
        except NotImplementedError as error:
            return str(error)
        return ""

    @functools.cached_property
    def _late(self) -> Tensor:
        with torch.inference_mode(False):  # what is made here serves calls outside of inference as well
            return self._link.late(self._comm.size)

    @functools.cached_property
    def _late_words(self) -> memoryview:
        """The same words, which the host reads so in every call."""
        return self._late.numpy().data

    def move(
        self, hops: Hops, held: Mapping[int, Parts], partial: dict[int, Parts] | None, *, shapes: Shapes, outer: bool = False
    ) -> Moving:
        """Bring blocks, whose heads are counted in, or take dK and dV home.

        Raises ExchangeError where a kernel of an earlier call gave up waiting for a block, RuntimeError where a graph's capture
        would have to make buffers.
        """
        assert not outer
        self._link.follow()
        if any(self._late_words):
            self._tell_late()
        if hops.moves:
            return self._bring(hops, held[self._comm.rank], shapes, grads=partial is not None)
        assert partial is not None
        return self._take_home(hops, partial, shapes)

    def room(self, block: int, shapes: Shapes) -> Pair:
        """Where the block's owner will find this rank's partial dK and dV."""
        key = (block, *_likeness(shapes))
        if key not in self._rooms:
            assert self._partials is not None
            with torch.inference_mode(False):
                memory = self._slot(self._partials.mine, block, self._comm.rank)
                self._rooms[key] = shapes.pair(memory.view(torch.float32), block)
        return self._rooms[key]

    def abandon(self, error: BaseException) -> None:
        """Leave the reason; the others' meeting ends in the group's timeout. A later call comes behind what is under way."""
        self._comm.leave_word(error)
        with suppress(RuntimeError):  # of a GPU that is lost; the error itself must be seen
            if self.linked and not self._link.captured:
                self._link.rejoin()

    def _bring(self, hops: Hops, own: Parts, shapes: Shapes, *, grads: bool) -> Moving:
        """Publish the own block, and have the others' copied."""
        key = (hops.recvs, grads, self._calls % 2, *_likeness(shapes))
        way = self._ways.get(key)
        if way is None:
            with torch.inference_mode(False):
                self._make_room(shapes, grads=grads)
                way = self._ways[key] = self._way(hops, shapes)
        self._calls += 1
        captured = self._link.captured
        if captured:
            self._in_graphs.append((self._published, self._gathered, self._arrived, self._partials, self._home))
            self._link.meet(_END)
        publish(way.publish, *own)
        if captured or not self._none_counted:
            self._arrived.zero_()
        self._none_counted = False
        self._link.meet(_BLOCKS)
        with self._link.aside():
            for into, source, block, heads in way.copies:
                into.copy_(source)
                self._link.count(self._words, block, heads)
        return Moving(dict(way.blocks), [], _Joining(self, captured, counts=True), way.ready)

    def end(self, *, captured: bool, counts: bool) -> None:
        """Later work on the current stream comes behind the transfers; where they counted heads, none counts any more."""
        self._link.rejoin()
        if counts:
            self._arrived.zero_()
            self._none_counted = not captured  # a capture enqueues nothing that runs now
        if captured:
            self._link.meet(_END)

    def _way(self, hops: Hops, shapes: Shapes) -> _Way:
        """Of the call that comes, whose turn says which of the two published blocks it uses."""
        own, published, nheads = self._comm.rank, self._published[self._calls % 2], shapes.k.shape[2]
        here = {block: _by_head(self._slot(self._gathered, block, own), shapes, block) for block, _ in hops.recvs}
        there = {block: _by_head(published.of[block], shapes, block) for block in here}
        copies = [
            (into[begin:end], there[block][begin:end], block, end)
            for begin, end in pieces(nheads, shapes.block_bytes // max(nheads, 1))
            for block, into in here.items()
        ]
        return _Way(
            target(*_pair(_by_head(published.mine, shapes, own), shapes, own)),
            tuple(copies),
            {block: _pair(heads, shapes, block) for block, heads in here.items()},
            {block: Ready(self._arrived[block : block + 1], self._late[block : block + 1]) for block in here},
        )

    def _take_home(self, hops: Hops, partial: dict[int, Parts], shapes: Shapes) -> Moving:
        """Have copied what other ranks made for the own block."""
        for block, _ in hops.grad_sends:
            del partial[block]
        key = (hops.grad_recvs, *_likeness(shapes))
        way = self._ways_home.get(key)
        if way is None:
            with torch.inference_mode(False):
                way = self._ways_home[key] = self._way_home(hops, shapes)
        captured = self._link.captured
        with self._link.aside():
            self._link.meet(_GRADS)
            for into, source in way.copies:
                into.copy_(source)
        return Moving({}, list(way.grads), _Joining(self, captured, counts=False), {})

    def _way_home(self, hops: Hops, shapes: Shapes) -> _WayHome:
        assert self._partials is not None
        copies, grads = [], []
        for block, rank in hops.grad_recvs:
            elements = shapes.elements_of(block)
            home = self._slot(self._home, rank, block).view(torch.float32)[:elements]
            there = self._slot(self._partials.of[rank], block, rank).view(torch.float32)[:elements]
            copies.append((home, there))
            grads.append((block, shapes.pair(home, block)))
        return _WayHome(tuple(copies), tuple(grads))

    def _slot(self, memory: Tensor, other: int, rank: int) -> Tensor:
        """The part of `rank`'s memory that belongs to another rank: in equal parts, by distance."""
        parts = self._comm.size - 1
        each = memory.numel() // parts
        return memory[((rank - other) % self._comm.size - 1) * each :][:each]

    def _make_room(self, shapes: Shapes, *, grads: bool) -> None:
        """Buffers for the longest block; all ranks, which agree on the shapes, make them in the same call."""
        if len(self._ways) > MOST_WAYS:
            self._forget_ways()
        sizes = {"block": shapes.block_bytes, "grads": shapes.grads_bytes}
        if sizes["block"] > self._sizes["block"]:
            self._published = [self._shared(sizes["block"]) for _ in range(2)]
            self._gathered = self._local(sizes["block"] * (self._comm.size - 1))
            self._arrived = torch.zeros(self._comm.size, dtype=torch.int32, device=shapes.k.device)
            self._words = self._arrived.view(torch.uint32)
            self._none_counted = True
            self._sizes["block"] = sizes["block"]
            self._forget_ways()
        if grads and sizes["grads"] > self._sizes["grads"]:
            self._partials = self._shared(sizes["grads"] * (self._comm.size - 1))
            self._home = self._local(sizes["grads"] * (self._comm.size - 1))
            self._sizes["grads"] = sizes["grads"]
            self._forget_ways()

    def _forget_ways(self) -> None:
        for ways in (self._ways, self._ways_home, self._rooms):
            ways.clear()

    def _shared(self, nbytes: int) -> Shared:
        if self._link.captured:
            raise RuntimeError(f"transport='nvlink' cannot make its buffers while a CUDA graph is captured: {_BEFORE}")
        return self._link.shared(nbytes)

    def _local(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._published[0].mine.device)

    def _tell_late(self) -> None:
        late = self._late.nonzero().flatten().tolist()
        self._late.zero_()
        blocks = ", ".join(map(str, late))
        raise ExchangeError(f"an earlier call's result is wrong: keys of rank {blocks} had not arrived after 20 s")


def _by_head(memory: Tensor, shapes: Shapes, block: int) -> Tensor:
    """(nheads_k, elements) of a block in memory: head by head, the V of each behind its K."""
    batch, _, nheads, headdim = shapes.k.shape
    elements = batch * shapes.lengths[block] * (headdim + shapes.v.shape[3])
    return memory[: nheads * elements * shapes.k.element_size()].view(shapes.k.dtype).view(nheads, elements)


def _pair(heads: Tensor, shapes: Shapes, block: int) -> Pair:
    """k and v (batch, tokens, nheads_k, headdim | headdim_v) of a block that lies head by head."""
    rows = shapes.k.shape[0], shapes.lengths[block]
    widths = shapes.k.shape[3], shapes.v.shape[3]
    parts = heads.split([math.prod(rows) * width for width in widths], 1)
    k, v = (x.unflatten(1, (*rows, width)).permute(1, 2, 0, 3) for x, width in zip(parts, widths, strict=True))
    return k, v


def _likeness(shapes: Shapes) -> tuple[Hashable, ...]:
    """What of a call's shapes decides where its blocks and gradients lie."""
    k, v = shapes.parts
    return k.shape, v.shape, k.dtype, shapes.lengths


class _Joining:
    """The end of what the transfers' own stream was given so far."""

    def __init__(self, transport: NVLink, captured: bool, *, counts: bool) -> None:
        self._transport, self._captured, self._counts = transport, captured, counts

    def wait(self) -> None:
        """Later work on the current stream comes behind the transfers."""
        self._transport.end(captured=self._captured, counts=self._counts)


def nvlink(comm: Communicator) -> NVLink:
    """The NVLink transport of a communicator."""
    if "nvlink" not in comm.kept:
        comm.kept["nvlink"] = NVLink(comm, _connected)
    return comm.kept["nvlink"]


def _connected(comm: Communicator) -> Link:
    """Memory that the GPUs of all ranks share, tried out; NotImplementedError, on all, where there is none. A collective."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"the ranks' GPUs cannot be connected while a CUDA graph is captured: {_BEFORE}")
    group, link, reason = comm.group_for("cuda"), None, b""
    timeout = comm.timeout(torch.device("cuda", torch.cuda.current_device())) or datetime.timedelta(minutes=10)
    try:
        link = symmetric.connect(group, comm.ranks, timeout_ms=int(timeout.total_seconds() * 1000))
    except (RuntimeError, ImportError) as error:
        reason = str(error).encode()[:200] or b"?"
    reasons = {rank: told.decode(errors="replace") for rank, told in enumerate(comm.gather_bytes(reason)) if told}
    if link is None or reasons:
        told = "; ".join(f"rank {rank}: {why}" for rank, why in reasons.items())
        raise NotImplementedError(told)
    return link

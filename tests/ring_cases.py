"""Owns what the ring's tests share: a case as data, its run on a ring, on one rank and on the oracle, and the verdict."""

import functools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import oracle
import torch
import torch.distributed as dist
from oracle import Results
from pool import Pools
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import ringflash as rf
from ringflash.autograd import attend
from ringflash.plan import Plan, TokenBytes, make_plan
from ringflash.ring import Ring
from ringflash.tile import pick
from ringflash.transport import communicator
from ringflash.transport.blocks import Shared
from ringflash.transport.communicator import Communicator
from ringflash.transport.nvlink import NVLink
from ringflash.transport.p2p import P2P

NAMES = ("contiguous", "zigzag", "striped")
LAYOUTS = (*NAMES, *(f"per_document({name})" for name in NAMES), "balanced")
SCHEDULES = ("rotate", "direct")
HOSTS = {  # of each rank, by ring size: uneven hosts, one rank per host, ranks of a host that are not neighbours
    2: ((0, 1),),
    3: ((0, 1, 1), (0, 0, 1), (0, 1, 0), (0, 1, 2)),
    4: ((0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 0, 1), (0, 1, 1, 2), (0, 1, 2, 3)),
    5: ((0, 0, 1, 1, 1), (0, 1, 2, 0, 1)),
    8: ((0, 0, 1, 1, 2, 2, 3, 3), (0, 1, 2, 0, 1, 2, 0, 1), (0, 0, 0, 0, 0, 1, 1, 2)),
}
LENGTHS = (1, 7, 33, 63, 100)
SIZES = (2, 3, 4)
KEYS = [  # that lie otherwise than the queries
    {"front": 13},
    {"behind": 9},
    {"front": 5, "behind": 40},
    {"behind": -20},  # queries past the last key
    {"front": 20, "behind": -30},
    {"kv_layout": "striped"},
    {"front": 3, "kv_layout": "striped", "layout": "contiguous"},
]
CAUSAL = rf.Mask(causal=True)
SLACK = 1.05  # a ring's rms error over that of the same tile on one rank


@dataclass(frozen=True)
class Case:
    """One attention over a whole sequence. front, behind: keys before the first query and after the last one."""

    mask: rf.Mask = CAUSAL
    seqlen: int = 33
    layout: str = "zigzag"
    kv_layout: str | None = None
    schedule: str = "auto"
    transport: str = "auto"
    reproducible: bool = False
    hosts: tuple[int, ...] | None = None  # as if the ranks ran on such hosts; None: on one
    mesh: tuple[int, int] | None = None  # (ring, heads)
    dtype: torch.dtype = torch.float32
    batch: int = 2
    heads: tuple[int, int] = (4, 2)
    headdim: tuple[int, int] = (16, 8)
    front: int = 0
    behind: int = 0
    scale: float | None = None
    gain: float = 1.0  # inputs are gain * normal

    @property
    def seqlen_k(self) -> int:
        return self.front + self.seqlen + self.behind

    def layouts(self, size: int) -> tuple[rf.Layout, rf.Layout]:
        """Where queries and keys lie."""
        layout = make_layout(self.layout, self.seqlen, size, self.mask).shift(self.front)
        return layout, make_layout(self.kv_layout or self.layout, self.seqlen_k, size, self.mask)

    def inputs(self) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Global (q, k, v) and the gradients of (out, lse), the same on every rank."""
        generator = torch.Generator().manual_seed(self.seqlen)

        def normal(*shape: int, gain: float = 1.0) -> Tensor:
            return torch.randn(shape, generator=generator) * gain

        (heads_q, heads_k), (headdim, headdim_v) = self.heads, self.headdim
        q = normal(self.batch, self.seqlen, heads_q, headdim, gain=self.gain).to(self.dtype)
        k = normal(self.batch, self.seqlen_k, heads_k, headdim, gain=self.gain).to(self.dtype)
        v = normal(self.batch, self.seqlen_k, heads_k, headdim_v, gain=self.gain).to(self.dtype)
        dout = normal(self.batch, self.seqlen, heads_q, headdim_v).to(self.dtype)
        return (q, k, v), (dout, normal(self.batch, heads_q, self.seqlen))


def make_layout(name: str, seqlen: int, size: int, mask: rf.Mask) -> rf.Layout:
    """A layout by name; per_document takes the mask's documents, or two of its own."""
    if name == "balanced":
        return rf.layouts.balanced(mask, seqlen, size)
    if name.startswith("per_document"):
        documents = mask.documents or (0, seqlen // 3, seqlen)
        first = documents[0] if isinstance(documents[0], tuple) else documents
        return rf.layouts.per_document(name[len("per_document(") : -1], first, size)
    return getattr(rf.layouts, name)(seqlen, size)


def masks(seqlen: int) -> dict[str, rf.Mask]:
    """A mask of every kind that fits the length; shards are longer than some windows and shorter than others."""
    documents = (0, seqlen // 5, seqlen // 5, seqlen // 2, seqlen)  # one is empty
    rows = ((0, seqlen // 3, seqlen), (0, seqlen // 2, seqlen - seqlen // 4, seqlen))
    return {
        "full": rf.Mask(),
        "causal": rf.Mask(causal=True),
        "self": rf.Mask(window=(0, 0)),
        "narrow": rf.Mask(window=(2, 1)),
        "left": rf.Mask(causal=True, window=(5, None)),
        "right": rf.Mask(window=(None, 4)),
        "wide": rf.Mask(causal=True, window=(41, 0)),
        "wider than all": rf.Mask(window=(200, 300)),
        "documents": rf.Mask(documents=documents),
        "causal documents": rf.Mask(causal=True, documents=documents),
        "documents per row": rf.Mask(causal=True, documents=rows),
        "windowed documents": rf.Mask(window=(6, 2), documents=documents),
        "windowed documents per row": rf.Mask(causal=True, window=(9, None), documents=rows),
        "prefix": rf.Mask(causal=True, prefix=seqlen // 4 + 1),
        "prefix and right": rf.Mask(window=(None, 3), prefix=seqlen // 2),
        "prefix of all": rf.Mask(causal=True, prefix=seqlen + 5),
    }


# One rank's part of a case


def masks_for(case: Case) -> list[rf.Mask]:
    """Masks that fit a case whose keys lie elsewhere than its queries."""
    end = max(case.front + case.seqlen, case.seqlen_k)
    plain = [rf.Mask(), CAUSAL, rf.Mask(window=(4, 2)), rf.Mask(causal=True, prefix=3)]
    return [*plain, rf.Mask(causal=True, documents=(0, 9, end - 2, end))]


def run_cases(cases: Sequence[Case]) -> list[Results]:
    """Each case on this rank of the default group, or alone: its shards of the results."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return [_ring(case, rank, size) for case in cases]


def _ring(case: Case, rank: int, size: int) -> Results:
    layout, kv_layout = case.layouts(size)
    options = rf.Options(schedule=case.schedule, transport=case.transport, reproducible=case.reproducible)

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return rf.ring_attention(  # pyright: ignore[reportReturnType]
            *(q, k, v),
            layout=layout,
            mask=case.mask,
            kv_layout=kv_layout,
            group=mesh_of(case.mesh) if case.mesh else None if case.hosts is None else group_on(case.hosts),
            scale=case.scale,
            return_lse=True,
            options=options,
        )

    return on_rank(case, rank, size, call)


@functools.lru_cache(maxsize=64)
def group_on(hosts: tuple[int, ...]) -> dist.ProcessGroup:
    """A group of all ranks whose communicator takes this rank for one on a host of that number. A collective, once."""
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    with mock.patch.object(communicator, "_host_name", return_value=f"host-{hosts[dist.get_rank()]}"):
        assert communicator.communicator(group).hosts == hosts
    return group


@functools.lru_cache(maxsize=64)
def mesh_of(shape: tuple[int, int]) -> DeviceMesh:
    """A mesh of all ranks, row by row. A collective, once."""
    return DeviceMesh("cpu", torch.arange(dist.get_world_size()).view(shape), mesh_dim_names=("ring", "heads"))


def on_rank(case: Case, rank: int, size: int, call: Callable[..., tuple[Tensor, Tensor]]) -> Results:
    """This rank's shards of out, lse and the gradients, where `call` attends."""
    layout, kv_layout = case.layouts(size)
    (q, k, v), (dout, dlse) = case.inputs()
    leaves = [lay.part(x, rank).clone().requires_grad_() for lay, x in ((layout, q), (kv_layout, k), (kv_layout, v))]
    out, lse = call(*leaves)
    torch.autograd.backward([out, lse], [layout.part(dout, rank), layout.part(dlse, rank, 2)])
    return Results(out.detach(), lse.detach(), *(x.grad for x in leaves))  # pyright: ignore[reportArgumentType]


@contextmanager
def sent() -> Iterator[list[tuple[int, int, torch.dtype]]]:
    """What this rank sends meanwhile: (to, elements, dtype) of every tensor."""
    log: list[tuple[int, int, torch.dtype]] = []
    exchange = P2P.exchange

    def logged(self: P2P, sends: Sequence, recvs: Sequence, *, outer: bool = False) -> object:
        log.extend((to, x.numel(), x.dtype) for x, to in sends if x.numel())
        return exchange(self, sends, recvs, outer=outer)

    with mock.patch.object(P2P, "exchange", logged):
        yield log


# Rings of more ranks than there are cores: threads that leave tensors in each other's mailboxes


class _Mail(P2P):
    """Sends and receives between threads."""

    def __init__(self, rank: int, boxes: dict[tuple[int, int, bool], queue.Queue]) -> None:
        self._rank, self._boxes = rank, boxes

    def exchange(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, sends: Sequence[tuple[Tensor, int]], recvs: Sequence[tuple[Tensor, int]], *, outer: bool = False
    ) -> "_Parcels":
        for x, to in sends:
            self._boxes[self._rank, to, outer].put(x.clone())
        return _Parcels([(x, self._boxes[source, self._rank, outer]) for x, source in recvs])

    def abandon(self, error: BaseException) -> None:
        """The other threads run into the timeout."""


@dataclass(frozen=True)
class _Parcels:
    """Tensors to be filled from mailboxes."""

    recvs: list[tuple[Tensor, queue.Queue]]

    def wait(self) -> None:
        for x, box in self.recvs:
            x.copy_(box.get(timeout=30))


class Threads:
    """What threads share that take each other for ranks whose GPUs read each other's memory."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.meetings = [threading.Barrier(size, timeout=30) for _ in range(4)]
        self.memory: list[Tensor] = [torch.empty(0)] * size

    def transport(self, rank: int, pause: Callable[[], None] = lambda: None) -> NVLink:
        """A rank's transport. pause: what its copy engine does before it begins."""
        return NVLink(Communicator(rank, self.size, tuple(range(self.size))), lambda _: ThreadLink(self, rank, pause))


class ThreadLink:
    """One thread's link: memory is shared anyway, and there is one stream, in which copies are made at once."""

    captured = False

    def __init__(self, threads: Threads, rank: int, pause: Callable[[], None]) -> None:
        self._threads, self._rank, self._pause = threads, rank, pause

    def shared(self, nbytes: int) -> Shared:
        self._threads.memory[self._rank] = mine = torch.empty(nbytes, dtype=torch.uint8)
        self.meet(-1)
        of = list(self._threads.memory)
        self.meet(-1)
        return Shared(mine, of)

    def meet(self, channel: int) -> None:
        self._threads.meetings[channel].wait()

    def follow(self) -> None:
        """There is one stream."""

    @contextmanager
    def aside(self) -> Iterator[None]:
        self._pause()
        yield

    def rejoin(self) -> None:
        """Copies were made at once."""

    def count(self, words: Tensor, block: int, heads: int) -> None:
        assert words[block].item() < heads
        words[block] = heads

    def late(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32)


def plan_of(case: Case, size: int) -> Plan:
    """The plan of a ring that counts what backward moves, as a call does."""
    layout, kv_layout = case.layouts(size)
    (q, _, v), _ = case.inputs()
    schedule = "gather" if case.transport == "nvlink" else case.schedule
    return make_plan(layout, case.mask, kv_layout, schedule=schedule, hosts=case.hosts, token=TokenBytes.of(q, v))


def run_threads(case: Case, size: int) -> list[Results]:
    """The case on a ring of `size` threads of this process: each rank's shards."""
    gathers, plan = case.transport == "nvlink", plan_of(case, size)
    boxes = {(a, b, outer): queue.Queue() for a in range(size) for b in range(size) for outer in (False, True)}
    shared = Threads(size)
    (q, _, v), _ = case.inputs()
    tile, scale = pick("reference", q, v), case.headdim[0] ** -0.5 if case.scale is None else case.scale

    def one(rank: int) -> Results:
        transport = shared.transport(rank) if gathers else _Mail(rank, boxes)
        ring = Ring(plan, rank, tile, transport, scale)
        return on_rank(case, rank, size, lambda q, k, v: attend(q, k, v, ring=ring))

    return on_threads(size, one)


def on_threads(size: int, one: Callable[[int], Any]) -> list[Any]:
    """one(rank) for each rank, at once."""
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(one, range(size)))


# The verdict


def alone(case: Case) -> Results:
    """The ring of one rank in the case's own dtype."""
    return _alone(_of_one(case))


@functools.lru_cache(maxsize=512)
def _alone(case: Case) -> Results:
    return run_cases([case])[0]


def exact(case: Case) -> Results:
    """The oracle's float64 results."""
    return _exact(_of_one(case))


def _of_one(case: Case) -> Case:
    """The case without what says how ranks share it."""
    return replace(case, layout="contiguous", kv_layout=None, schedule="auto", hosts=None, transport="auto", mesh=None)


@functools.lru_cache(maxsize=512)
def _exact(case: Case) -> Results:
    query, key = torch.arange(case.seqlen) + case.front, torch.arange(case.seqlen_k)
    return oracle.results(*case.inputs(), oracle.visible(case.mask, query, key), case.scale)


def whole(case: Case, shards: Sequence[Results]) -> Results:
    """Every rank's shards put at their positions."""
    size = len(shards)
    layout, kv_layout = case.layouts(size)

    def place(name: str, lay: rf.Layout, dim: int) -> Tensor:
        parts = [getattr(shard, name) for shard in shards]
        positions = torch.cat([lay.positions(rank) for rank in range(size)]) - lay.offset
        assert sorted(positions.tolist()) == list(range(lay.seqlen))
        joined = torch.cat(parts, dim)
        return torch.zeros_like(joined).index_copy_(dim, positions, joined)

    queries = place("out", layout, 1), place("lse", layout, 2), place("dq", layout, 1)
    return Results(*queries, place("dk", kv_layout, 1), place("dv", kv_layout, 1))


def verdict(case: Case, shards: Sequence[Results], floor: float = torch.finfo(torch.float32).eps) -> str:
    """What is wrong with a ring's results: every rms error must be within SLACK of one rank's, plus floor * its scale."""
    ring, one, right = whole(case, shards), alone(case), exact(case)
    wrong = []
    for name, x, y, z in zip(Results._fields, ring, one, right, strict=True):
        limit = SLACK * oracle.rms(y, z) + floor * oracle.norm(z)
        if x.dtype != y.dtype or not oracle.rms(x, z) <= limit:
            wrong.append(f"{name} ({x.dtype}): rms error {oracle.rms(x, z):.3g}, limit {limit:.3g}")
    return f"{case} on {len(shards)} ranks: {'; '.join(wrong)}" if wrong else ""


def check(pools: Pools, size: int, cases: Sequence[Case]) -> None:
    """Run the cases on a ring of `size` ranks and hold them against the oracle."""
    ranks = pools.run(size, run_cases, cases)
    wrong = [verdict(case, shards) for case, shards in zip(cases, zip(*ranks, strict=True), strict=True)]
    assert not any(wrong), "\n".join(filter(None, wrong))

"""The link between GPUs, over stand-ins for torch's shared memory and streams: who is meant, and what waits for what."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d

from ringflash.transport import symmetric
from ringflash.transport.symmetric import Symmetric, connect

GROUP: Any = SimpleNamespace(group_name="ring")
GROUP_RANKS = [3, 5, 7]  # the group's own order
RANKS = (7, 3, 5)  # the ring's


class Stream:
    """Notes what it waits for and who waits for it; inside, it is the current one."""

    def __init__(self, machine: "Machine", name: str) -> None:
        self._machine, self.name = machine, name

    def wait_stream(self, other: "Stream") -> None:
        self._machine.log.append((self.name, "waits for", other.name))

    def synchronize(self) -> None:
        self._machine.log.append(("synchronize", self.name))

    def __enter__(self) -> None:
        self._before, self._machine.current = self._machine.current, self

    def __exit__(self, *_: object) -> None:
        self._machine.current = self._before


@dataclass
class Machine:
    """One GPU of a group of three: the current stream, and all that it was asked for."""

    log: list[tuple] = field(default_factory=list)
    capturing: bool = False

    def __post_init__(self) -> None:
        self.main, self.other, self.default = (Stream(self, name) for name in ("main", "other", "default"))
        self.current = self.main

    def new_stream(self, device: torch.device, *, priority: int) -> Stream:
        assert (device, priority) == (torch.device("cuda", 2), -1)
        return Stream(self, "aside")

    def current_stream(self, index: int = 2) -> Stream:
        assert index == 2
        return self.current

    def note(self, *what: Any) -> Any:
        return lambda *args, **kwargs: self.log.append((*what, *args, *kwargs.values()))

    def empty(self, nbytes: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        assert (dtype, device) == (torch.uint8, torch.device("cuda", 2))
        self.log.append(("room", nbytes))
        return torch.zeros(nbytes, dtype=dtype)

    def rendezvous(self, memory: Tensor, group: str) -> Any:
        self.log.append(("rendezvous", memory.numel(), group))
        return SimpleNamespace(barrier=self.note("barrier"), get_buffer=self.get_buffer)

    @staticmethod
    def get_buffer(place: int, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.full(size, place, dtype=dtype)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(dist, "_symmetric_memory", SimpleNamespace(empty=made.empty, rendezvous=made.rendezvous), raising=False)
    write = SimpleNamespace(stream_write_value32=made.note("write"))
    monkeypatch.setattr(_distributed_c10d, "_SymmetricMemory", write)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: GROUP_RANKS if group is GROUP else [])
    monkeypatch.setattr(dist, "barrier", lambda group: made.log.append(("barrier of", group.group_name)))
    monkeypatch.setattr(torch, "Stream", made.new_stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", made.current_stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: made.default if device.index == 2 else None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    return made


@pytest.fixture
def link(machine: Machine) -> Symmetric:
    made = Symmetric(GROUP, RANKS, timeout_ms=17)
    machine.log.clear()
    return made


def test_a_link_is_tried_before_it_counts(machine: Machine) -> None:
    assert isinstance(connect(GROUP, RANKS, timeout_ms=17), Symmetric)
    room = [("room", 1024), ("main", "waits for", "default")]  # where torch zeroes it
    assert machine.log == [*room, ("rendezvous", 1024, "ring"), ("barrier", 0, 17), ("synchronize", "main")]


def test_ranks_without_memory_have_no_link(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no peer access")

    monkeypatch.setattr("torch.distributed._symmetric_memory.rendezvous", refuse)
    with pytest.raises(RuntimeError, match="no peer access"):
        symmetric.connect(GROUP, RANKS, timeout_ms=17)


def test_memory_comes_in_the_ring_s_order(link: Symmetric) -> None:
    shared = link.shared(512)
    assert [int(x[0]) for x in shared.of] == [2, 0, 1], "places of global ranks 7, 3, 5 in the group"
    assert [x.numel() for x in (shared.mine, *shared.of)] == [512] * 4
    assert shared.mapped is not None


def test_memory_is_made_when_nothing_uses_the_old_any_more(machine: Machine, link: Symmetric) -> None:
    """On no rank: each has synchronised before it comes to the barrier; and not the device, where others' work may wait."""
    with machine.other:
        link.shared(512)
    first = [("synchronize", name) for name in ("main", "aside", "other")]
    then = [("barrier of", "ring"), ("synchronize", "other")]
    assert machine.log == [*first, *then, ("room", 512), ("other", "waits for", "default"), ("rendezvous", 512, "ring")]


@pytest.mark.parametrize("channel", [0, 1, 2])
def test_a_meeting_has_its_channel_and_an_end(machine: Machine, link: Symmetric, channel: int) -> None:
    link.meet(channel)
    assert machine.log == [("barrier", channel, 17)]


def test_transfers_have_a_stream_of_their_own(machine: Machine, link: Symmetric) -> None:
    link.follow()
    with link.aside():
        assert machine.current.name == "aside"
    assert machine.current is machine.main
    link.rejoin()
    assert machine.log == [("aside", "waits for", "main"), ("main", "waits for", "aside")]


def test_calls_on_another_stream_follow_those_before(machine: Machine, link: Symmetric) -> None:
    link.follow()
    assert machine.log == []
    with machine.other:
        link.follow()
        link.follow()
        assert machine.log == [("other", "waits for", "main")]
    link.follow()
    assert machine.log[1:] == [("main", "waits for", "other")]


def test_a_captured_stream_waits_for_none_that_is_not(machine: Machine, link: Symmetric) -> None:
    machine.capturing = True
    assert link.captured
    with machine.other:
        link.follow()
    machine.capturing = False
    assert not link.captured
    link.follow()
    assert machine.log == []


def test_heads_are_counted_at_their_block(machine: Machine, link: Symmetric) -> None:
    words = torch.zeros(3, dtype=torch.int32).view(torch.uint32)
    link.count(words, 2, 5)
    ((name, written, block, heads),) = machine.log
    assert (name, block, heads) == ("write", 2, 5)
    assert written is words


def test_late_words_lie_where_the_host_sees_them(link: Symmetric, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[Tensor] = []

    def pin(x: Tensor) -> Tensor:
        pinned.append(x)
        return x

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    late = link.late(3)
    assert late is pinned[0]
    assert (late.dtype, late.tolist()) == (torch.int32, [0, 0, 0])

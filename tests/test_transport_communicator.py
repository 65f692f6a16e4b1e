"""Communicator: places in sequence order, small collectives, what is kept per group, and the word that a rank leaves."""

import datetime
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import Pools
from torch.distributed.device_mesh import DeviceMesh

from ringflash.transport import communicator as module
from ringflash.transport.communicator import MESSAGE_BYTES, Communicator, communicator

SIZE = 3


def new_group(**kwargs: Any) -> dist.ProcessGroup:
    group = dist.new_group(**kwargs)
    assert isinstance(group, dist.ProcessGroup)
    return group


def places(order: list[int] | None) -> tuple[int, int, tuple[int, ...], bool]:
    """(rank, size, ranks, whether the same object comes back)."""
    group = None if order is None else DeviceMesh("cpu", order)
    comm = communicator(group)
    return comm.rank, comm.size, comm.ranks, comm is communicator(group)


@pytest.mark.parametrize("order", [None, [0, 1, 2], [2, 0, 1]])
def test_rank_is_the_place_in_sequence_order(pools: Pools, order: list[int] | None) -> None:
    wanted = order or list(range(SIZE))
    assert pools.run(SIZE, places, order) == [(wanted.index(r), SIZE, tuple(wanted), True) for r in range(SIZE)]


def test_alone_without_a_process_group() -> None:
    comm = communicator()
    assert (comm.rank, comm.size, comm.ranks, comm.groups) == (0, 1, (0,), {})
    x = torch.arange(3)
    assert comm.all_reduce(x) is x
    assert comm.gather(x, 0, [3]) == [x]
    assert comm.gather_bytes(b"abc") == [b"abc"]


def mesh_places(dims: list) -> tuple[int, tuple[int, ...], tuple[int, ...], list[bytes], bool]:
    """(rank, ranks, mesh, every rank's message, whether the same object comes back for a mesh of the same groups)."""
    if dist.get_rank() == 1:  # the others know one group less
        dist.new_group([1], backend="gloo", use_local_synchronization=True)
    names = ("dp", "ring", "heads")[-torch.tensor(dims).dim() :]
    mesh = DeviceMesh("cpu", dims, mesh_dim_names=names)
    mesh = mesh["ring", "heads"] if len(names) == 3 else mesh
    comm = communicator(mesh)
    return comm.rank, comm.ranks, comm.mesh, comm.gather_bytes(bytes([65 + dist.get_rank()])), comm is communicator(mesh)


@pytest.mark.parametrize("dims", [[[2, 0], [3, 1]], [[2, 0, 3, 1]], [[2], [0], [3], [1]]])
def test_places_in_a_mesh_of_two_dimensions_count_row_by_row(pools: Pools, dims: list) -> None:
    shape = tuple(torch.tensor(dims).shape)
    places = {2: 0, 0: 1, 3: 2, 1: 3}
    wanted = [(places[rank], (2, 0, 3, 1), shape, [b"C", b"A", b"D", b"B"], True) for rank in range(4)]
    assert pools.run(4, mesh_places, dims) == wanted


def test_two_dimensions_of_three(pools: Pools) -> None:
    found = pools.run(4, mesh_places, [[[0, 2]], [[3, 1]]])
    assert [x[:3] for x in found] == [
        (0, (0, 2), (1, 2)),
        (1, (3, 1), (1, 2)),
        (1, (0, 2), (1, 2)),
        (0, (3, 1), (1, 2)),
    ]
    assert [b"".join(x[3]) for x in found] == [b"AC", b"DB", b"AC", b"DB"]


def messages(order: list[int] | None) -> list[Any]:
    comm = communicator(None if order is None else DeviceMesh("cpu", order))
    text = comm.gather_bytes(f"place {comm.rank}".encode() * comm.rank)  # the first sends nothing
    with pytest.raises(AssertionError):
        comm.gather_bytes(b"x" * (MESSAGE_BYTES + 1))
    lengths = [2, 0, 3]
    x = torch.full((2, lengths[comm.rank], 2), comm.rank, dtype=torch.int16)
    gathered = comm.gather(x.transpose(1, 2), 2, lengths)
    total = comm.all_reduce(torch.tensor([comm.rank, 1.0]))
    return [text, [y.tolist() for y in gathered], total.tolist()]


@pytest.mark.parametrize("order", [None, [2, 0, 1]])
def test_small_collectives_answer_in_sequence_order(pools: Pools, order: list[int] | None) -> None:
    for text, gathered, total in pools.run(SIZE, messages, order):
        assert text == [b"", b"place 1", b"place 2place 2"]
        assert gathered == [torch.full((2, 2, n), rank).tolist() for rank, n in enumerate([2, 0, 3])]
        assert total == [3.0, 3.0]


def found_hosts(names: list[str], order: list[int]) -> tuple[int, ...]:
    """By made-up names. A mesh of all ranks is the default group, whose communicators outlive a test: none is known here, and
    what becomes known here is forgotten."""
    group = None if order == [0, 1, 2] else DeviceMesh("cpu", order)
    with mock.patch.object(module, "_known", weakref.WeakKeyDictionary()):
        with mock.patch.object(module, "_host_name", return_value=names[dist.get_rank()]):
            hosts = communicator(group).hosts
        assert communicator(group).hosts == hosts  # found once
    return hosts


@pytest.mark.parametrize(
    ("names", "order", "hosts"),
    [
        (["a", "a", "a"], [0, 1, 2], (0, 0, 0)),
        (["b", "a", "b"], [0, 1, 2], (0, 1, 0)),
        (["b", "a", "b"], [1, 2, 0], (0, 1, 1)),
        (["c", "", "a"], [2, 1, 0], (0, 1, 2)),
    ],
)
def test_hosts_are_numbered_in_sequence_order(pools: Pools, names: list[str], order: list[int], hosts: tuple[int, ...]) -> None:
    assert pools.run(SIZE, found_hosts, names, order) == [hosts] * SIZE


def test_ranks_of_this_machine_share_a_host(pools: Pools) -> None:
    assert pools.run(2, default_hosts) == [(0, 0)] * 2


def default_hosts() -> tuple[int, ...]:
    return communicator().hosts


def test_all_reduce_leaves_its_input(pools: Pools) -> None:
    assert pools.run(2, reduce_twice) == [(1.0, 2.0)] * 2


def reduce_twice() -> tuple[float, float]:
    x = torch.ones(())
    total = communicator().all_reduce(x)
    return float(x), float(total)


def own_group() -> dict[str, Any]:
    """The ring talks over groups of its own, with the caller's timeout."""
    group = new_group(timeout=datetime.timedelta(seconds=17))
    comm = communicator(group)
    mine = comm.groups["cpu"]
    with pytest.raises(ValueError, match="group must move cuda tensors: its backend serves cpu only") as error:
        comm.group_for("cuda")
    return {
        "own": mine is not group and mine is not dist.group.WORLD,
        "timeout": mine._get_backend(torch.device("cpu")).options._timeout.total_seconds(),  # pyright: ignore
        "hint": "init_process_group" in str(error.value),
    }


def test_groups_of_its_own(pools: Pools) -> None:
    assert pools.run(2, own_group) == [{"own": True, "timeout": 17.0, "hint": True}] * 2


def words() -> tuple[str | None, str | None]:
    group = new_group()
    comm = communicator(group)
    before = comm.word_left()
    dist.barrier(group)
    comm.calls = 30
    if comm.rank == 1:
        comm.leave_word(ValueError("x must be y: " + "long" * 1000))
    dist.barrier(group)
    return before, comm.word_left()


def test_a_word_left_is_found_by_all(pools: Pools) -> None:
    for before, word in pools.run(SIZE, words):
        assert before is None
        assert word is not None
        assert word.startswith("rank 1 raised in its call 30: x must be y: ")
        assert len(word) <= 1000


def left_in_midst(moving: bool) -> tuple[bool, str | None]:
    """All ranks leave a call; one of them with transfers under way, or none."""
    comm = communicator(new_group())
    if moving and comm.rank == 1:
        comm.flying.add(object())
    comm.leave_word(KeyboardInterrupt())
    return comm.left_together(), comm.left


@pytest.mark.parametrize("moving", [False, True])
def test_ranks_that_left_together_go_on_unless_transfers_are_under_way(pools: Pools, moving: bool) -> None:
    for rank, (go_on, left) in enumerate(pools.run(2, left_in_midst, moving)):
        assert go_on is not moving
        assert left == f"rank {rank} raised in its call 0: KeyboardInterrupt"


def destroyed() -> str:
    group = new_group()
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match="group must not be destroyed") as found:
        communicator(group)
    return str(found.value)


def test_a_destroyed_group(pools: Pools) -> None:
    for words in pools.run(2, destroyed):
        assert "make a new one" in words


def two_groups() -> bool:
    """What is kept belongs to one group: counts of calls do not mix."""
    a, b = communicator(new_group()), communicator(new_group())
    a.calls += 5
    return a is not b and b.calls == 0 and communicator().calls != 5


def test_groups_do_not_share(pools: Pools) -> None:
    assert all(pools.run(2, two_groups))


@pytest.mark.parametrize("group", ["world", 3, object()])
def test_wrong_kinds(group: object) -> None:
    with pytest.raises(TypeError, match="group must be None, a ProcessGroup or a DeviceMesh: group="):
        communicator(group)  # pyright: ignore[reportArgumentType]


def test_a_communicator_knows_its_defaults() -> None:
    comm = Communicator(0, 1, (0,))
    assert (comm.calls, comm.check, comm.word_left()) == (0, "first", None)
    other = Communicator(1, 3, (0, 1, 2))
    assert (comm.hosts, comm.mesh, other.hosts, other.mesh) == ((0,), (1,), (0, 0, 0), (3,))

"""Who takes part in a ring: this process's rank, the others, and process groups of the ring's own to talk over."""

import datetime
import os
import socket
import warnings
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

_LEFT = "ringflash/left"  # store keys: why a rank left a call without joining its exchange, and which ranks did
_MOVING = "moving"  # what such a key of a rank says that left transfers under way
MESSAGE_BYTES = 4096  # of what one rank tells the others: one size for all, or calls out of order would not even pair up
MESH_NAMES = ("ring", "heads")  # of a mesh of two dimensions; any other is hardly meant so
LEFT_TOGETHER = datetime.timedelta(seconds=2)  # in which ranks that made the same mistake have all said so


class ExchangeError(RuntimeError):
    """Transfers that failed because another rank left them."""


@dataclass(eq=False)
class Communicator:
    """One ring's membership. `rank` and `size` are places in sequence order; `ranks` the global rank of each place.

    mesh: (size,), or the (ring, heads) of a 2-D DeviceMesh, whose places are counted row by row.
    groups holds a process group of the ring's own per device type, so that its traffic never mixes with the caller's.
    hosts: the number of each rank's host, by host name; the first rank's is 0.
    calls counts the ring's calls on this process: when a collective check runs depends on it alone. check: the mode that the
    ring's first call agreed. left: why this rank did not join an exchange that the others may wait for.
    message_bytes: the size of a message of gather_bytes. prepared: what is kept for calls like an earlier one, by likeness.
    kept: what transports keep for all calls, by their names. flying: transfers between CPUs that began and have not ended.
    """

    rank: int
    size: int
    ranks: tuple[int, ...]
    groups: dict[str, ProcessGroup] = field(default_factory=dict)
    hosts: tuple[int, ...] = ()
    mesh: tuple[int, ...] = ()
    calls: int = 0
    check: str = "first"
    left: str | None = None
    message_bytes: int = MESSAGE_BYTES
    prepared: dict = field(default_factory=dict)
    kept: dict = field(default_factory=dict)
    unlinked: str = ""
    flying: set = field(default_factory=set)
    _left_in: int = 0
    _side: dict[int, torch.Stream] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.hosts = self.hosts or (0,) * self.size
        self.mesh = self.mesh or (self.size,)

    def side_stream(self) -> torch.Stream:
        """The ring's own stream on the current GPU: transfers are handed over on it."""
        index = torch.accelerator.current_device_index()
        if index not in self._side:
            self._side[index] = torch.Stream(torch.device("cuda", index), priority=-1)
        return self._side[index]

    @property
    def control(self) -> tuple[ProcessGroup, torch.device]:
        """The group and device of small collectives: the CPU where it has a group, else the current GPU."""
        if "cpu" in self.groups:
            return self.groups["cpu"], torch.device("cpu")
        return self.groups["cuda"], torch.device("cuda", torch.cuda.current_device())

    def gather_bytes(self, message: bytes) -> list[bytes]:
        """Every rank's message of at most message_bytes, in rank order. A collective with one host synchronisation."""
        assert len(message) <= self.message_bytes
        if self.size == 1:
            return [message]
        group, device = self.control
        mine = torch.zeros(self.message_bytes, dtype=torch.uint8)
        mine[: len(message)] = torch.frombuffer(bytearray(message or b"\0"), dtype=torch.uint8)[: len(message)]
        mine = mine.to(device)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        with self.explained():
            dist.all_gather(parts, mine, group=group)
        by_global = dict(zip(dist.get_process_group_ranks(group), parts, strict=True))
        return [bytes(by_global[r].cpu().numpy()).rstrip(b"\0") for r in self.ranks]

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks (x itself at size 1)."""
        if self.size == 1:
            return x
        x = x.clone()
        with self.explained():
            dist.all_reduce(x, group=self.group_for(x.device.type))
        return x

    def gather(self, x: Tensor, dim: int, lengths: Sequence[int]) -> list[Tensor]:
        """Every rank's x, in rank order; they differ in length along dim only, as `lengths` says."""
        if self.size == 1:
            return [x]
        group = self.group_for(x.device.type)
        moved = x.movedim(dim, 0).contiguous()
        padded = moved.new_zeros(max(lengths), *moved.shape[1:])
        padded[: len(moved)] = moved
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        if padded.numel():  # bytes, so that every dtype travels over every backend
            with self.explained():
                dist.all_gather([_bytes(p) for p in parts], _bytes(padded), group=group)
        by_global = dict(zip(dist.get_process_group_ranks(group), parts, strict=True))
        return [by_global[r][:n].movedim(0, dim) for r, n in zip(self.ranks, lengths, strict=True)]

    def group_for(self, device_type: str) -> ProcessGroup:
        """The ring's group for tensors of this device type."""
        if device_type not in self.groups:
            has = " and ".join(sorted(self.groups))
            raise ValueError(
                f"group must move {device_type} tensors: its backend serves {has} only; "
                "use init_process_group() without a backend, or nccl for GPUs and gloo for CPUs"
            )
        return self.groups[device_type]

    def timeout(self, device: torch.device) -> datetime.timedelta | None:
        """The ring's own timeout for traffic of a device."""
        return _timeout(self.group_for(device.type), device)

    def alive(self) -> bool:
        """Whether the ring's process groups still exist: destroy_process_group ends them with all others."""
        return not self.groups or all(map(_groups_of_torch().__contains__, self.groups.values()))

    def leave_word(self, error: BaseException) -> None:
        """Say that this rank does not join the exchange of this call, and why unless another rank is the reason."""
        word = f"rank {self.rank} raised in its call {self.calls}: {str(error) or type(error).__name__}"[:1000]
        if self.size > 1 and self.left is None:
            self.left, self._left_in = word, self.calls
        with suppress(RuntimeError):  # the store may be gone with its rank; the error itself must be seen
            for group in self.groups.values():
                store = group.get_group_store()
                store.set(f"{_LEFT}/{self.calls}/{self.rank}", _MOVING if self.flying else "")
                if not isinstance(error, ExchangeError):
                    store.set(f"{_LEFT}/{self.calls}", word)

    def left_together(self) -> bool:
        """Whether all ranks left the call that this one left: then nobody waits for anybody, and the ring goes on.

        Not where one left transfers under way, which the next call's would be paired with.
        """
        keys = [f"{_LEFT}/{self._left_in}/{rank}" for rank in range(self.size)]
        try:
            for group in self.groups.values():
                store = group.get_group_store()
                store.wait(keys, LEFT_TOGETHER)
                if any(map(store.get, keys)):
                    return False
        except RuntimeError:
            return False
        return True

    def explained(self) -> "_Explained":
        """Inside, an exchange that fails is given the word of the rank that left it, if one did."""
        return _Explained(self)

    def word_left(self) -> str | None:
        """What a rank that left in this call had to say, if one did."""
        key = f"{_LEFT}/{self.calls}"
        with suppress(RuntimeError):
            for group in self.groups.values():
                store = group.get_group_store()
                if store.check([key]):
                    return store.get(key).decode()
        return None


class _Explained:
    """A context as `Communicator.explained` says; a class costs the host less than a generator."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, ExchangeError):
            word = self._comm.word_left()
            if word is not None:
                raise ExchangeError(f"the ring's exchange failed because {word}") from error


def _groups_of_torch() -> dict:
    return dist.distributed_c10d._world.pg_map


def _bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)


class _Members(NamedTuple):
    """Who shall form a ring: global ranks in sequence order, this process's place among them, and the shape they came in.

    parents: the caller's groups, one per dimension; all of the ranks have met when each has met in one after the other.
    """

    parents: tuple[ProcessGroup, ...]
    ranks: tuple[int, ...]
    rank: int
    mesh: tuple[int, ...]


# Communicators by the caller's first group, then by shape and order of the ranks (a mesh may have another than its group).
_Known = dict[tuple[tuple[int, ...], tuple[int, ...]], Communicator]
_known: "weakref.WeakKeyDictionary[ProcessGroup, _Known]" = weakref.WeakKeyDictionary()


def communicator(group: ProcessGroup | DeviceMesh | None = None) -> Communicator:
    """The communicator of a group, made at the first call: all ranks of the group meet here.

    group: None is the default group, or a ring of size 1 where torch.distributed is not initialised. In a DeviceMesh the
    rank is the place in the mesh: of one dimension, or of two named ("ring", "heads") row by row. Raises TypeError or
    ValueError for anything else, or where this process is no member.
    """
    if group is None:
        if not dist.is_initialized():
            _warn_if_launched()
            return Communicator(0, 1, (0,))
        group = dist.group.WORLD
    members = _membership(group)
    known, key = _known.setdefault(members.parents[0], {}), (members.mesh, members.ranks)
    if key not in known:
        known[key] = _made(members)
    return known[key]


def _made(members: _Members) -> Communicator:
    """The communicator of ranks that have none yet. A collective."""
    parents, ranks, rank, mesh = members
    if len(ranks) == 1:
        return Communicator(rank, 1, ranks, mesh=mesh)
    comm = Communicator(rank, len(ranks), ranks, _own_groups(parents, ranks), mesh=mesh)
    names = comm.gather_bytes(_host_name().encode())
    comm.hosts = tuple(map(list(dict.fromkeys(names)).index, names))
    return comm


def _host_name() -> str:
    """What ranks of one host have in common."""
    return socket.gethostname()


def _warn_if_launched() -> None:
    """Several processes that each form a ring of one are seldom meant."""
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        warnings.warn(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}, but torch.distributed is not initialised: this rank attends alone; call "
            "torch.distributed.init_process_group() or enter ringflash.launch.bootstrap.bootstrap() first",
            RuntimeWarning,
            stacklevel=4,
        )


def _membership(group: object) -> _Members:
    """Who the caller's group stands for."""
    if isinstance(group, DeviceMesh):
        names = tuple(group.mesh_dim_names or ())
        if group.ndim > 1 and names != MESH_NAMES:
            raise ValueError(
                f"group must be a DeviceMesh of one dimension, or of two named {MESH_NAMES}, whose rows then share heads: "
                f"it has {group.ndim} dimensions {f'named {names}' if names else 'without names'}; take one with mesh['name']"
            )
        ranks, mesh = tuple(group.mesh.flatten().tolist()), tuple(group.mesh.shape)
    elif isinstance(group, ProcessGroup):
        try:
            ranks = tuple(dist.get_process_group_ranks(group))
        except KeyError:
            raise ValueError("group must not be destroyed: torch does not know this one any more; make a new one") from None
        mesh = (len(ranks),)
    else:
        hint = "a layout goes into layout=" if isinstance(group, str) else "is this rank a member?"
        raise TypeError(f"group must be None, a ProcessGroup or a DeviceMesh: group={group!r} ({hint})")
    if dist.get_rank() not in ranks:
        raise ValueError(f"group must have this process as a member: its ranks are {ranks}")
    parents = tuple(group.get_all_groups()) if isinstance(group, DeviceMesh) else (group,)
    return _Members(parents, ranks, ranks.index(dist.get_rank()), mesh)


def _own_groups(parents: Sequence[ProcessGroup], ranks: Sequence[int]) -> dict[str, ProcessGroup]:
    """A process group per device type that the parents serve, each opened by one tiny collective of all its ranks."""
    backends = dict(item.split(":") for item in str(dist.get_backend_config(parents[0])).split(","))
    groups: dict[str, ProcessGroup] = {}
    if backends.get("cpu") not in (None, "nccl"):
        groups["cpu"] = _open(parents, ranks, backends["cpu"], torch.device("cpu"))
    if backends.get("cuda") == "nccl" and torch.cuda.is_available():
        groups["cuda"] = _open(parents, ranks, "nccl", torch.device("cuda", torch.cuda.current_device()))
    if not groups:
        raise ValueError(f"group must use gloo or nccl: its backends are {backends}")
    return groups


def _open(parents: Sequence[ProcessGroup], ranks: Sequence[int], backend: str, device: torch.device) -> ProcessGroup:
    _know_as_many_groups(parents, device)
    group: ProcessGroup = dist.new_group(  # pyright: ignore[reportAssignmentType]
        sorted(ranks),
        timeout=_timeout(parents[0], device),
        backend=backend,
        pg_options=_nccl_options() if backend == "nccl" else None,
        use_local_synchronization=True,
    )
    # The first point-to-point batch on a fresh NCCL group would have to include all its ranks; after this it need not.
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    return group


def _know_as_many_groups(parents: Sequence[ProcessGroup], device: torch.device) -> None:
    """Make every rank know the same number of groups.

    new_group with local synchronisation names a group after its ranks and that number, and ranks that name it differently wait
    for each other in vain. A rank outside of some earlier sub-group knows fewer: it makes groups of itself.
    """
    known = dist.distributed_c10d._world.pg_names
    most = torch.tensor([len(known)], device=device)
    for parent in parents:  # the most of each column, then of each row of these: the most of all
        dist.all_reduce(most, dist.ReduceOp.MAX, group=parent)
    for _ in range(int(most) - len(known)):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


def _timeout(parent: ProcessGroup, device: torch.device) -> datetime.timedelta | None:
    """The caller's own timeout for this kind of traffic."""
    return getattr(parent._get_backend(device).options, "_timeout", None)


def _nccl_options() -> object:
    """Transfers run beside a kernel that fills the GPU: they go first, and on few multiprocessors."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = 16
    return options

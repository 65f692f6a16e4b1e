"""Owns the life of a process group: find the world, set the device, initialise, tear down even if the body raises."""

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import (  # pyright: ignore[reportPrivateImportUsage] (documented, but not in __all__)
    HashStore,  # pyright: ignore[reportPrivateImportUsage]
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
    distributed_c10d,
)
from torch.distributed.rendezvous import rendezvous

from ringflash.launch.mpi import abort_if_uncaught
from ringflash.launch.world import World, find_world

# Seconds that rank 0 keeps the store for ranks that are still at work, where no timeout was given.
LEAVE_TIMEOUT = 600.0


@dataclass(frozen=True, kw_only=True)
class Session:
    """A process in a running job: its place in the `world`, the `device` it computes on, and its `backend`."""

    world: World
    device: torch.device
    backend: str


@contextmanager
def bootstrap(
    *, backend: str | None = None, device: str | torch.device | None = None, timeout: float | None = None
) -> Iterator[Session]:
    """Run the body inside a process group of all ranks of this launch. Collective.

    backend: None for nccl on CUDA and gloo on CPU. device: None for this rank's own GPU where CUDA is visible, else the
    CPU; "cpu", "cuda", "cuda:1". timeout: seconds a collective may wait (None: torch's default for the backend).

    A process group that is already initialised is used, and left running. Leaving destroys ours; if the body raised,
    without waiting for anyone.

    Raises ValueError for a contradiction: more ranks on this host than GPUs, no GPU though one was asked, a backend
    that does not fit the device, an option that an existing process group cannot honour, variables that find_world
    refuses.
    """
    if dist.is_initialized():
        yield _join_existing(backend, device, timeout)
        return
    with ExitStack() as stack:
        session = _begin(backend, device, timeout, stack)
        yield session


def pick_device(asked: str | torch.device | None, *, visible: int, local_rank: int, local_size: int) -> torch.device:
    """The device of rank `local_rank` of `local_size` on a host where this process sees `visible` GPUs.

    Raises ValueError where the ranks of this host would have to share a GPU, or `asked` is not there.
    """
    wanted = torch.device(asked if asked is not None else "cuda" if visible else "cpu")
    if wanted.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'cpu', 'cuda' or a CUDA index such as 'cuda:1': device={str(wanted)!r}")
    if wanted.type == "cpu":
        return torch.device("cpu")
    if wanted.index is not None or visible == 0:
        return _require_visible(wanted, visible)
    # One visible GPU for several ranks is how Slurm binds one GPU to each task; _require_own_gpu then tells whether it
    # did.
    if visible < local_size and visible != 1:
        raise ValueError(
            f"each rank needs its own GPU: {local_size} ranks on this host, {visible} GPUs visible; "
            f"start at most {visible} ranks per host, or ask for device='cpu'"
        )
    return torch.device("cuda", local_rank if visible > 1 else 0)


def _begin(backend: str | None, device: str | torch.device | None, timeout: float | None, stack: ExitStack) -> Session:
    """Initialise the process group; `stack` gets what must be undone, in the order of undoing."""
    world = find_world()
    if world.source == "mpi":
        abort_if_uncaught()
    visible = torch.cuda.device_count()
    chosen = pick_device(device, visible=visible, local_rank=world.local_rank, local_size=world.local_size)
    session = Session(world=world, device=chosen, backend=_pick_backend(backend, chosen))
    limit = None if timeout is None else timedelta(seconds=timeout)
    store = _meet(world, limit or distributed_c10d.default_pg_timeout)
    stack.push(lambda kind, _error, _trace: _leave(store, world, timeout, failed=kind is not None))
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
        if visible < world.local_size:
            _require_own_gpu(store, world, str(torch.cuda.get_device_properties(chosen).uuid))
    _initialise(session, store, limit)
    return session


def _initialise(session: Session, store: Store, limit: timedelta | None) -> None:
    """Make the default process group."""
    dist.init_process_group(
        session.backend,
        store=store,
        rank=session.world.rank,
        world_size=session.world.size,
        timeout=limit,
        # NCCL then connects now, where all ranks meet, instead of inside the first collective.
        device_id=session.device if "nccl" in session.backend else None,
    )


def _meet(world: World, limit: timedelta) -> Store:
    """The store through which the ranks find each other."""
    if world.source == "single":
        return HashStore()
    address = f"[{world.master_addr}]" if ":" in world.master_addr else world.master_addr
    # torch's own rendezvous, because it knows when an agent (torchrun, our launch.local) serves the store already.
    url = f"tcp://{address}:{world.master_port}"
    store, _rank, _size = next(rendezvous(url, rank=world.rank, world_size=world.size, timeout=limit))
    # An agent's store outlives a process group, so a second bootstrap in the same process must not meet the first one's
    # keys.
    entry = store.add(f"ringflash/entries/{world.rank}", 1)
    return PrefixStore(f"ringflash/{entry}", store)


def _serves_store(world: World) -> bool:
    """Whether the store that the other ranks use lives in this process."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return world.rank == 0 and world.source != "single" and not agent


def _leave(store: Store, world: World, timeout: float | None, *, failed: bool) -> None:
    """Say that this rank leaves, and destroy the process group; the rank that serves the store leaves last.

    No collective: a rank whose body raised counts as gone at once, and waits for nobody.
    """
    try:
        # The store may have died with its rank; then this rank's body has ended too, and there is nobody to tell.
        with suppress(RuntimeError):
            if store.add("left", 1) == world.size:
                store.set("all left", "")
        if not failed and _serves_store(world):
            _wait_for_others(store, LEAVE_TIMEOUT if timeout is None else timeout)
    finally:
        _destroy(failed=failed)


def _wait_for_others(store: Store, timeout: float) -> None:
    """Keep the store alive until every rank has left: they would log broken connections, or fail, without it."""
    try:
        store.wait(["all left"], timedelta(seconds=timeout))
    except dist.DistStoreError as error:
        raise RuntimeError(
            f"rank 0 is done, but some rank did not leave within timeout={timeout:g} s: it died without a word or still "
            "works; see its output, or give bootstrap a longer timeout"
        ) from error


def _destroy(*, failed: bool) -> None:
    """Destroy the default process group, unless the body did."""
    if not dist.is_initialized():
        return
    if failed and "nccl" in dist.get_backend():
        # An orderly NCCL shutdown may wait for the peers, which may wait for us in the collective we never entered.
        distributed_c10d._abort_process_group()
    if dist.is_initialized():
        dist.destroy_process_group()


def _pick_backend(asked: str | None, device: torch.device) -> str:
    """The backend's name; raises ValueError for one that cannot serve `device`."""
    if asked is None:
        return "nccl" if device.type == "cuda" else "gloo"
    if asked == "nccl" and device.type == "cpu":
        raise ValueError("backend='nccl' needs a CUDA device: device='cpu'; leave backend out, or use backend='gloo'")
    return asked


def _require_visible(wanted: torch.device, visible: int) -> torch.device:
    """`wanted`, if this process sees that many GPUs."""
    if (wanted.index or 0) >= visible:
        raise ValueError(
            f"device={str(wanted)!r} is not there: {visible} GPUs visible to this process; check CUDA_VISIBLE_DEVICES, "
            "or ask for device='cpu'"
        )
    return wanted


def _require_own_gpu(store: Store, world: World, gpu: str) -> None:
    """Raise on every rank that shares the GPU with unique name `gpu` with another one."""
    here = f"gpus/{world.host}"
    store.add(f"{here}/{gpu}", 1)
    if store.add(f"{here}/arrived", 1) == world.local_size:
        store.set(f"{here}/all", "")
    store.wait([f"{here}/all"])
    users = store.add(f"{here}/{gpu}", 0)
    if users > 1:
        raise ValueError(
            f"each rank needs its own GPU: {users} of the {world.local_size} ranks on host {world.host} see the same one; "
            "start fewer ranks per host, bind one GPU to each task, or ask for device='cpu'"
        )


def _join_existing(backend: str | None, device: str | torch.device | None, timeout: float | None) -> Session:
    """The session of a process group that somebody else initialised and will destroy."""
    running = dist.get_backend()
    if backend is not None and backend != running:
        raise ValueError(f"a process group runs already: backend={backend!r}, its backend is {running!r}; leave backend out")
    if timeout is not None:
        raise ValueError(f"a process group runs already and keeps its own timeout: timeout={timeout:g}; leave timeout out")
    # After init_process_group by hand no variable says which ranks share this host, so the ranks tell one another.
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    rank = dist.get_rank()
    world = World(
        rank=rank,
        size=len(hosts),
        local_rank=hosts[:rank].count(hosts[rank]),
        local_size=hosts.count(hosts[rank]),
        host=hosts[rank],
        master_addr=os.environ.get("MASTER_ADDR", ""),
        master_port=0,
        source="existing",
    )
    return Session(world=world, device=_existing_device(device, running, world), backend=running)


def _existing_device(asked: str | torch.device | None, running: str, world: World) -> torch.device:
    """The device asked for, else the one that the running backend implies."""
    if asked is None:
        return torch.device("cuda", torch.cuda.current_device()) if "nccl" in running else torch.device("cpu")
    visible = torch.cuda.device_count()
    chosen = pick_device(asked, visible=visible, local_rank=world.local_rank, local_size=world.local_size)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    return chosen

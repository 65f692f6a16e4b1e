"""What "auto" takes: transports by what each needs of a call, in the order in which they are preferred."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ringflash.options import Options
from ringflash.schedules import Hosts
from ringflash.transport.blocks import Shapes


class Facts(NamedTuple):
    """What the choice depends on, the same on every rank.

    device: type of the tensors. buffer_bytes: what a rank keeps to gather all keys and their gradients. heads: how many ranks
    exchange sequence for heads, if any; a ring then has size / heads ranks. unlinked: why the ranks' GPUs share no memory, ""
    where they do or nobody has tried.
    """

    size: int
    hosts: Hosts
    device: str
    buffer_bytes: int
    heads: int = 1
    unlinked: str = ""

    @classmethod
    def of(cls, k: Tensor, v: Tensor, lengths: tuple[int, ...], **more: Any) -> "Facts":
        """For this rank's k and v, where lengths are those of all ranks' blocks."""
        nbytes = Shapes((k, v), lengths).buffer_bytes
        return cls(size=len(lengths), device=k.device.type, buffer_bytes=nbytes, **more)


class Route(NamedTuple):
    """A transport, the schedule to ask the plan for, why the transport, and how many ranks exchange sequence for heads."""

    transport: str
    schedule: str
    why: str
    heads: int


class _Need(NamedTuple):
    """What a transport needs, what to say where it is missing, and the way out. of_options: options contradict each other,
    which is told on one rank as well.
    """

    holds: Callable[[Options, Facts], bool]
    missing: Callable[[Options, Facts], str]
    way_out: str = "transport='auto'"
    of_options: bool = False


_GATHERS = _Need(
    lambda options, facts: options.schedule in ("auto", "gather"),
    lambda options, facts: f"gathers all keys: schedule must be 'auto' or 'gather', schedule={options.schedule!r}",
    "schedule='auto'",
    of_options=True,
)
_ONE_RING = _Need(
    lambda options, facts: facts.heads == 1,
    lambda options, facts: f"needs one ring of all ranks: the mesh is {facts.size // facts.heads} x {facts.heads}",
    "a group of one dimension",
)
_NOT_IN_ORDER = _Need(
    lambda options, facts: not options.reproducible,
    lambda options, facts: "attends keys as ranks hold them, reproducible=True attends them in order of their positions",
    of_options=True,
)
_BUFFERS = _Need(
    lambda options, facts: facts.buffer_bytes <= options.max_buffer_bytes,
    lambda options, facts: f"would keep {facts.buffer_bytes} bytes of buffers: max_buffer_bytes={options.max_buffer_bytes}",
    "a larger max_buffer_bytes",
)
NEEDS: dict[str, tuple[_Need, ...]] = {
    "nvlink": (
        _NOT_IN_ORDER,
        _ONE_RING,
        _Need(lambda o, f: f.device == "cuda", lambda o, f: f"needs GPUs: the tensors are on a {f.device}"),
        _Need(
            lambda o, f: len(set(f.hosts)) == 1,
            lambda o, f: f"needs GPUs of one host: the ranks are on {len(set(f.hosts))}",
        ),
        _Need(
            lambda o, f: not f.unlinked,
            lambda o, f: f"found no memory that all ranks' GPUs share ({f.unlinked})",
            "transport='p2p'",
        ),
        _BUFFERS,
        _GATHERS,
    ),
    "p2p": (
        _NOT_IN_ORDER,
        _Need(
            lambda o, f: o.schedule != "gather",
            lambda o, f: "keeps two blocks and does not gather: schedule='gather' goes with transport 'nvlink' or 'allgather'",
            "schedule='auto'",
            of_options=True,
        ),
    ),
    "allgather": (
        _ONE_RING,
        _BUFFERS,
        _GATHERS,
    ),
    "ulysses": (
        _NOT_IN_ORDER,
        _Need(
            lambda o, f: o.schedule == "auto",
            lambda o, f: f"passes no blocks from rank to rank, so that schedule must be 'auto': schedule={o.schedule!r}",
            "schedule='auto'",
            of_options=True,
        ),
    ),
}
PREFERRED = {"nvlink": "one launch, keys pulled by copy engines", "p2p": "keeps two blocks in flight"}
IN_ORDER = {"allgather": "brings all keys, which reproducible=True attends in order of their positions"}


def route(options: Options, facts: Facts) -> Route:
    """The transport and schedule of a call. Raises NotImplementedError where the transport asked for cannot run; on one rank,
    where nothing moves, only where options contradict each other.
    """
    asked = options.transport != "auto"
    preferred = {options.transport: "asked for"} if asked else IN_ORDER if options.reproducible else PREFERRED
    missing = {name: _missing(name, options, facts) for name in preferred}
    for name, need in missing.items():
        if need is None:
            passed = [f"{other} {more.missing(options, facts)}" for other, more in missing.items() if more is not None]
            return _route(name, "; ".join([preferred[name], *passed]), options, facts)
    needs = {name: need for name, need in missing.items() if need is not None}
    takes = "reproducible=True takes transport {!r}, which " if options.reproducible else "transport {!r} "
    words = "transport={!r} " if asked else takes
    told = [words.format(name) + need.missing(options, facts) for name, need in needs.items()]
    raise NotImplementedError(f"{'; '.join(told)}; use {[*needs.values()][-1].way_out}")


def _missing(transport: str, options: Options, facts: Facts) -> _Need | None:
    """The first need of a transport that a call does not meet."""
    needs = [need for need in NEEDS[transport] if facts.size > 1 or need.of_options]
    return next((need for need in needs if not need.holds(options, facts)), None)


def _route(transport: str, why: str, options: Options, facts: Facts) -> Route:
    if facts.size == 1:
        return Route("none", options.schedule, "one rank", 1)
    return Route(transport, "gather" if _GATHERS in NEEDS[transport] else options.schedule, why, facts.heads)

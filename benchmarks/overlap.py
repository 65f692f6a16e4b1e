"""What a profiler's trace says of calls: when transfers and attention kernels ran, and how much of the one hid the other."""

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

MARK = "ringflash call"  # the annotation around each call and the synchronisation after it
ATTENTION = re.compile(r"_?(dq_|dkv_)?kernel")  # our kernels' names (delta and preparation are other work)
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")

Span = tuple[float, float]


class Event(NamedTuple):
    """Something that a GPU did, in microseconds."""

    name: str
    stream: int
    begin: float
    end: float


class Figures(NamedTuple):
    """Of one call, in microseconds unless said.

    call: first device event's begin to last one's end. attention: some attention kernel runs. transfer: some transfer is under
    way (an NCCL kernel's wait for the other rank counts). hidden: share of transfer during which an attention kernel runs; 1
    without transfers. idle: no attention kernel runs. other: of that, some other kernel or copy on this GPU runs, no transfer.
    """

    call: float
    attention: float
    transfer: float
    hidden: float
    idle: float
    other: float


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time as disjoint spans, ascending; empty ones go."""
    joined: list[Span] = []
    for begin, end in sorted(span for span in spans if span[1] > span[0]):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def common(a: Sequence[Span], b: Sequence[Span]) -> list[Span]:
    """The time in both, each as union gives it."""
    found: list[Span] = []
    i = j = 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            found.append((begin, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def duration(spans: Iterable[Span]) -> float:
    """Length of disjoint spans."""
    return sum(end - begin for begin, end in spans)


def calls(trace: dict[str, Any], mark: str = MARK) -> list[list[Event]]:
    """The device events of each annotated call, in order, from a trace in Chrome's format."""
    spans = [x for x in trace["traceEvents"] if x.get("ph") == "X"]
    marks = sorted((x["ts"], x["ts"] + x["dur"]) for x in spans if x.get("cat") == "user_annotation" and x["name"] == mark)
    events = sorted(
        (Event(x["name"], x["args"]["stream"], x["ts"], x["ts"] + x["dur"]) for x in spans if x.get("cat") in DEVICE),
        key=lambda event: event.begin,
    )
    return [[event for event in events if begin <= event.begin < end] for begin, end in marks]


def kinds(events: Sequence[Event]) -> list[str]:
    """Of each event: "attention", "transfer" or "other".

    Transfers are NCCL's kernels, copies between GPUs, and copies on streams without attention kernels: a copy out of another
    GPU's mapped memory need not be called one.
    """
    computing = {event.stream for event in events if ATTENTION.fullmatch(event.name)}

    def kind(event: Event) -> str:
        if ATTENTION.fullmatch(event.name):
            return "attention"
        apart = event.name.startswith("Memcpy DtoD") and event.stream not in computing
        return "transfer" if apart or event.name.startswith(("nccl", "Memcpy PtoP")) else "other"

    return list(map(kind, events))


def figures(events: Sequence[Event]) -> Figures:
    """Figures of one call's device events. Raises ValueError where there are none."""
    if not events:
        raise ValueError("a call has no device events: was the GPU traced?")
    of: dict[str, list[Span]] = {"attention": [], "transfer": [], "other": []}
    for event, kind in zip(events, kinds(events), strict=True):
        of[kind].append((event.begin, event.end))
    attention, transfer, other = (union(of[kind]) for kind in ("attention", "transfer", "other"))
    call = max(event.end for event in events) - min(event.begin for event in events)
    busy, moving = duration(attention), duration(transfer)
    return Figures(
        call=call,
        attention=busy,
        transfer=moving,
        hidden=duration(common(transfer, attention)) / moving if moving else 1.0,
        idle=call - busy,
        other=duration(union([*attention, *transfer, *other])) - duration(union([*attention, *transfer])),
    )


def by_stream(events: Sequence[Event]) -> dict[int, dict[str, float]]:
    """Microseconds of each kind of event on each stream."""
    found: dict[int, dict[str, float]] = {}
    for event, kind in zip(events, kinds(events), strict=True):
        stream = found.setdefault(event.stream, {})
        stream[kind] = stream.get(kind, 0.0) + event.end - event.begin
    return found

"""benchmarks/overlap.py: figures of made-up traces, against counting microseconds one by one."""

import itertools

import overlap
import pytest
from hypothesis import given
from hypothesis import strategies as st
from overlap import Event

from ringflash.kernels import backward, forward

SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda x: (min(x), max(x))), max_size=8)


def ticks(spans: list[tuple[int, int]]) -> set[int]:
    return {tick for begin, end in spans for tick in range(begin, end)}


@given(SPANS, SPANS)
def test_union_and_common_cover_the_same_ticks(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    joined = overlap.union(a), overlap.union(b)
    assert all(x[1] < y[0] for spans in joined for x, y in itertools.pairwise(spans))
    both = overlap.common(*joined)
    assert ticks(both) == ticks(a) & ticks(b)  # pyright: ignore[reportArgumentType]
    assert overlap.duration(both) == len(ticks(a) & ticks(b))
    assert overlap.duration(joined[0]) == len(ticks(a))


RING = [
    Event("_kernel", 7, 10, 60),
    Event("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 20, 0, 40),
    Event("Memcpy DtoD (Device -> Device)", 21, 55, 65),  # a pull out of mapped memory
    Event("Memcpy DtoD (Device -> Device)", 7, 65, 70),  # a copy between attention kernels
    Event("_dkv_kernel", 7, 80, 100),
]


def test_figures_of_a_call() -> None:
    found = overlap.figures(RING)
    assert found == overlap.Figures(call=100, attention=70, transfer=50, hidden=35 / 50, idle=30, other=5)
    assert overlap.by_stream(RING) == {7: {"attention": 70, "other": 5}, 20: {"transfer": 40}, 21: {"transfer": 10}}


def test_copies_between_gpus_are_transfers_on_any_stream() -> None:
    events = [Event("kernel", 7, 0, 10), Event("Memcpy PtoP (Device -> Device)", 7, 10, 30)]
    assert overlap.kinds(events) == ["attention", "transfer"]
    assert overlap.figures(events).hidden == 0


def test_delta_and_preparation_are_no_attention() -> None:
    names = ("_delta_kernel", "_prepare", "_dq_kernel", "void at::native::elementwise_kernel<128>()")
    assert overlap.kinds([Event(name, 7, 0, 1) for name in names]) == ["other", "other", "attention", "other"]


def test_our_kernels_are_known_by_name() -> None:
    hopper = [pytest.importorskip(f"ringflash.kernels.hopper.{name}_kernel").kernel for name in ("forward", "backward")]
    for kernel in (forward._kernel, backward._dq_kernel, backward._dkv_kernel, *hopper):
        assert overlap.ATTENTION.fullmatch(kernel.fn.__name__)
    assert not overlap.ATTENTION.fullmatch(backward._delta_kernel.fn.__name__)


def test_without_transfers_nothing_is_left_unhidden() -> None:
    assert overlap.figures([Event("kernel", 7, 0, 10)]).hidden == 1


def test_a_call_without_device_events_is_an_error() -> None:
    with pytest.raises(ValueError, match="no device events"):
        overlap.figures([])


def test_calls_takes_device_events_by_annotation() -> None:
    def span(cat: str, name: str, ts: float, dur: float) -> dict:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"stream": 7}}

    trace = {
        "traceEvents": [
            {"ph": "M", "name": "process_name", "args": {}},
            span("user_annotation", overlap.MARK, 100, 50),
            span("user_annotation", overlap.MARK, 0, 50),
            span("gpu_user_annotation", overlap.MARK, 10, 30),
            span("cpu_op", "aten::mul", 5, 5),
            span("kernel", "kernel", 110, 20),
            span("gpu_memcpy", "Memcpy PtoP (Device -> Device)", 20, 5),
            span("kernel", "ncclDevKernel_AllReduce", 60, 5),  # the barrier between calls
        ]
    }
    first, second = overlap.calls(trace)
    assert first == [Event("Memcpy PtoP (Device -> Device)", 7, 20, 25)]
    assert second == [Event("kernel", 7, 110, 130)]

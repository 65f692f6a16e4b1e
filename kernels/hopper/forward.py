"""The Hopper forward tile: one launch walks all segments, from a carried state or none, to the next state or the result."""

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ringflash.kernels import forward as plain
from ringflash.kernels import portable
from ringflash.kernels.hopper import config, forward_kernel, host
from ringflash.kernels.reference import LOG2E, Segment, State

_launcher = portable.Launcher(forward_kernel.kernel, **host.LAUNCH)

# How many items a program takes at most, and where keys are few: as many (up to config's ITEMS) as see so many keys in all.
_ITEMS, _KEYS_AT_ONCE = 4, 1 << 17

# float16 holds 2**16 at most and few small numbers: see forward_kernel.
_HALF = {"SHIFT": 4.0, "LIMIT": 2.0**15}


def forward(
    q: Tensor,
    segments: list[Segment],
    scale: float,
    state: State | None = None,
    finish: bool = True,
    *,
    exact: bool = False,
    deterministic: bool = False,
    stats: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Attend the segments, starting from `state`: -> State, or (out, lse) with `finish` (kernels/README.md has the contract).

    q (batch, seqlen_q, nheads_q, headdim), bfloat16 or float16, head dims as in config.FORWARD. The storage of `state` is
    consumed. exact: the online softmax throughout. deterministic: the same bits every time, also where items have to be
    computed again. stats: int32 (2,) on q's device, to which the numbers of half items (64 rows of one head) and of those
    computed twice are added.

    Raises ValueError for a segment that is waited for and that the copy engine cannot read as it lies.
    """
    parts = portable.in_launches(segments)
    if q.numel() == 0 or not parts[0]:
        return plain.forward(q, segments, scale, state, finish)
    if scale <= 0:  # the kernel takes the maximum before it scales
        q, scale = (-q, -scale) if scale else (torch.zeros_like(q), 1.0)
    headdim, headdim_v = q.shape[3], segments[0].v.shape[3]
    constants = _constants(headdim, headdim_v, q.dtype, exact, not deterministic)
    q = host.loadable(q)
    for part in parts[:-1]:
        state = _into_state(q, part, scale, state, headdim_v, constants, stats)
    if not finish:
        return _into_state(q, parts[-1], scale, state, headdim_v, constants, stats)
    out = q.new_empty(*q.shape[:3], headdim_v)
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32, device=q.device)
    _one_launch(q, parts[-1], scale, state, (out, lse), constants, stats)
    return out, lse


@functools.lru_cache(maxsize=64)
def _constants(headdim: int, headdim_v: int, dtype: torch.dtype, exact: bool, adapt: bool) -> config.Forward:
    half = _HALF if dtype == torch.float16 else {}
    return replace(config.FORWARD[headdim, headdim_v], EXACT=exact, ADAPT=adapt, **half)


def _into_state(
    q: Tensor, segments: list[Segment], scale: float, state: State | None, headdim_v: int, constants: config.Forward,
    stats: Tensor | None,
) -> State:  # fmt: skip
    into = plain.room_for_state(q, headdim_v) if state is None else state
    _one_launch(q, segments, scale, state, None, constants, stats, into)
    return into


def _one_launch(
    q: Tensor,
    segments: list[Segment],
    scale: float,
    state: State | None,
    result: tuple[Tensor, Tensor] | None,
    constants: config.Forward,
    stats: Tensor | None,
    into: State | None = None,
) -> None:
    c, known = config.of_launch(
        constants, SEGMENTS=len(segments), CARRIED=state is not None, FINISH=result is not None, WAITS=host.waits(segments),
        SLOTS=constants.SLOTS if state is None else 1,
    )  # fmt: skip
    out, lse = result if result is not None else (into or state or ())[:2]
    _, row_max, row_sum = state or into or (None, lse, lse)
    acc = out if state is None else state[0]
    lengths = tuple([segment.k.shape[1] for segment in segments])
    grid, items, sizes = _sizes(q.shape, segments[0].k.shape[2], lengths, host.multiprocessors(q.device), c)
    work, lasting = host.counters(q.device, own=stats is not None)
    begins, ends, strides = host.intervals(segments)
    readys, lates, limit_ns = host.flags(segments)
    args = (
        host.describe(q, 64, c.HEADDIM), *host.key_views(segments, rows=c.BLOCK_K, headdim=c.HEADDIM, headdim_v=c.HEADDIM_V),
        host.describe(acc, 64, c.HEADDIM_V) if c.CARRIED else None, host.describe(out, 64, c.HEADDIM_V),
        begins, ends, readys, lates, acc, row_max, row_sum, out, lse, work,
        portable.encode(*sizes, grid if lasting else 0), strides, portable.encode(*lengths), limit_ns, float(scale * LOG2E),
        known,
    )  # fmt: skip
    with portable.guard(q.device):
        _launcher(
            grid, args, key=(c, q.dtype), pointers=(*begins, *ends, *readys, *lates, acc, row_max, row_sum, out, lse, work)
        )
    if stats is not None:
        stats[0] += 2 * items
        stats[1:] += work[1:2]


@functools.lru_cache(maxsize=1024)
def _sizes(
    shape: tuple[int, ...], nheads_k: int, lengths: tuple[int, ...], at_once: int, c: config.Forward
) -> tuple[int, int, tuple[int, ...]]:
    """(how many programs, how many items, all but the last of the kernel's `sizes`), where `at_once` programs run at a time.

    A program makes room for other kernels after a few items where keys are many; where they are few, its begin and end would
    cost as much as an item. Programs beyond those that run at once replace the ones whose items were short.
    """
    batch, seqlen_q, nheads_q, _ = shape
    heads, group = batch * nheads_q, nheads_q // nheads_k
    items = -(-seqlen_q // c.BLOCK_Q) * heads
    chunk = portable.heads_together(sum(lengths) * (c.HEADDIM + c.HEADDIM_V) * 2, group, heads)
    if c.WAITS:  # keys that are still coming come head by head: items that need the first half go first
        chunk = min(chunk, group * -(-nheads_k // 2))
    most = max(_ITEMS, min(c.ITEMS, _KEYS_AT_ONCE // sum(lengths)))
    needed = -(-items // most)
    grid = min(items, max(at_once, needed + min(needed, at_once)))
    return grid, items, (seqlen_q, nheads_q, group, heads, chunk, items, most)


def sources() -> Iterator[tuple[str, Any, dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """(name, kernel, signature, constants, options) of every configuration, to be compiled without a GPU."""
    variants: dict[str, dict[str, Any]] = {
        "plain": {},
        "exact": {"EXACT": True},
        "carried": {"CARRIED": True, "SLOTS": 1},
        "to state": {"FINISH": False},
        "three segments": {"SEGMENTS": 3, "WAITS": 5, "CARRIED": True, "FINISH": False, "SLOTS": 1},
    }
    for dtype, more in ((torch.bfloat16, {}), (torch.float16, _HALF)):
        for (headdim, headdim_v), constants in config.FORWARD.items():
            for name, changes in variants.items():
                c = replace(constants, **more, **changes)
                yield (
                    f"{str(dtype)[6:]} {headdim}/{headdim_v} {name}",
                    forward_kernel.kernel,
                    *_signature(c, dtype),
                    host.LAUNCH,
                )


def _signature(c: config.Forward, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Any]]:
    """(signature, constants) of the kernel compiled for c."""
    element = host.descriptor_type(64, c.HEADDIM, dtype)
    out = host.descriptor_type(64, c.HEADDIM_V, dtype if c.FINISH else torch.float32)
    keys, values = (host.descriptor_type(c.BLOCK_K, headdim, dtype) for headdim in (c.HEADDIM, c.HEADDIM_V))
    slots, constants = host.key_types(c.SEGMENTS, keys, values)
    signature: dict[str, Any] = {"q_desc": element, **slots}
    signature["acc_desc"] = host.descriptor_type(64, c.HEADDIM_V, torch.float32) if c.CARRIED else "constexpr"
    if not c.CARRIED:
        constants["acc_desc"] = None
    signature["o_desc"] = out
    signature |= dict.fromkeys(("begins", "ends", "readys", "lates"), ("*i32",) * c.SEGMENTS)
    signature |= dict.fromkeys(("acc_ptr", "max_ptr", "sum_ptr"), "*fp32")
    signature |= {"out_ptr": "*" + out.removeprefix("tensordesc<").split("[")[0], "lse_ptr": "*fp32", "work_ptr": "*i32"}
    signature |= {"sizes": ("i64",) * 8} | dict.fromkeys(("strides", "seqlens_k"), ("i64",) * c.SEGMENTS)
    signature |= {"limit_ns": "i64", "scale": "fp32", "CONFIG": "constexpr"}
    return signature, {**constants, "CONFIG": config.Known(c)}

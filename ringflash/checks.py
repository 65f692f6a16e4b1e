"""Every error a caller of attention can meet, worded here: argument, rule, value, way out.

Checks agree on when they run: a collective check depends only on the call's number in its group, so that no rank can
enter it alone. A rank with a local error sends the error in place of its facts, and every rank raises.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ringflash.layout import Layout
from ringflash.mask import Mask
from ringflash.options import Options

T = TypeVar("T")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEADDIM = 256
MESSAGE_BYTES = 4096  # of what one rank tells the others
FIRST_CALLS = 16  # check="first": enough for every kind of layer of a model to be compared once


class _Gathers(Protocol):
    rank: int
    size: int
    calls: int
    check: str

    def gather_bytes(self, message: bytes, limit: int = ...) -> list[bytes]:
        """Every rank's message, in rank order."""
        ...

    def leave_word(self, error: BaseException) -> None:
        """Leave for the other ranks why this one will not join their exchange."""
        ...


@dataclass(frozen=True)
class Call:
    """One call as a rank made it: what the local checks look at and the ranks compare."""

    layout: Layout
    kv_layout: Layout
    mask: Mask
    scale: float
    options: Options


def tensors(q: Tensor, k: Tensor, v: Tensor, *, meta: bool = False) -> None:
    """Shapes, dtypes and devices of one rank's q, k, v. meta: meta tensors will do, since nothing is computed."""
    named = {"q": q, "k": k, "v": v}
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor: {name} is a {type(x).__name__}")
        if x.layout != torch.strided or x.is_nested:
            found = "a nested tensor" if x.is_nested else f"{name}.layout={x.layout}"
            raise TypeError(f"{name} must be a dense strided tensor: {found}; pack sequences and pass rf.Mask(documents=...)")
        if x.dim() != 4:
            raise ValueError(f"{name} must be (batch, seqlen, nheads, headdim): {name}.shape={tuple(x.shape)}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be float32, float16 or bfloat16: {name}.dtype={x.dtype}")
        if x.device.type not in ("cpu", "cuda") and not (meta and x.device.type == "meta"):
            hint = "; rf.explain takes meta tensors" if x.device.type == "meta" else ""
            raise ValueError(f"{name} must be on a CPU or a CUDA GPU: {name}.device={x.device}{hint}")
    for what in ("dtype", "device"):
        if len({getattr(x, what) for x in named.values()}) > 1:
            found = ", ".join(f"{name}.{what}={getattr(x, what)}" for name, x in named.items())
            raise ValueError(f"q, k and v must have one {what}: {found}")
    _shapes(q, k, v)


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    shapes = f"q.shape={tuple(q.shape)}, k.shape={tuple(k.shape)}, v.shape={tuple(v.shape)}"
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(f"q, k and v must have one batch size: {shapes}")
    if k.shape[1:3] != v.shape[1:3]:
        raise ValueError(f"k and v must have the same seqlen_k and nheads_k: {shapes}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must have the same headdim: {shapes}")
    for name, headdim in (("headdim", q.shape[3]), ("headdim_v", v.shape[3])):
        if not 1 <= headdim <= MAX_HEADDIM:
            raise ValueError(f"{name} must be in 1 ... {MAX_HEADDIM}: {name}={headdim}; {shapes}")
    if q.shape[2] < 1 or k.shape[2] < 1:
        raise ValueError(f"nheads_q and nheads_k must be at least 1: {shapes}")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"nheads_q must be a multiple of nheads_k: nheads_q={q.shape[2]}, nheads_k={k.shape[2]}")


def shards(q: Tensor, k: Tensor, call: Call, *, rank: int, size: int) -> None:
    """Layouts and mask against the local tensors and the ring's size."""
    for name, layout in (("layout", call.layout), ("kv_layout", call.kv_layout)):
        if layout.size != size:
            raise ValueError(f"{name} must be for this ring's size: {name}.size={layout.size}, ring size {size}")
    if q.shape[1] != call.layout.lengths[rank]:
        raise ValueError(
            f"q must hold this rank's tokens of the layout: rank {rank} of {call.layout!r} has "
            f"{call.layout.lengths[rank]}, seqlen_q={q.shape[1]}; shard with the same layout"
        )
    if k.shape[1] != call.kv_layout.lengths[rank]:
        raise ValueError(
            f"k must hold this rank's tokens of the layout: rank {rank} of {call.kv_layout!r} has "
            f"{call.kv_layout.lengths[rank]}, seqlen_k={k.shape[1]}; pass kv_layout= where keys lie otherwise than queries"
        )
    call.mask.check_seqlen(max(call.layout.end, call.kv_layout.end))
    if call.mask.batch not in (None, q.shape[0]):
        raise ValueError(f"documents must be one list, or one per batch row: {call.mask.batch} lists, batch={q.shape[0]}")


def rank(value: int, size: int) -> None:
    """A rank of a ring."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < size:
        raise ValueError(f"rank must be in 0 ... size-1: rank={value!r}, size={size}")


def scale(value: float | None, headdim: int) -> float:
    """The softmax scale: headdim ** -0.5 unless given."""
    if value is None:
        return headdim**-0.5
    if isinstance(value, bool) or not isinstance(value, float | int) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"scale must be a finite number: scale={value!r:.120}")
    return float(value)


def kinds(layout: object, kv_layout: object, mask: object, *, options: object) -> None:
    """Types of the arguments that are not tensors."""
    for name, value, wanted in (("layout", layout, str | Layout), ("kv_layout", kv_layout, str | Layout | None)):
        if not isinstance(value, wanted):
            raise TypeError(f"{name} must be an rf.Layout or the name of one: {name}={value!r}")
    if not isinstance(mask, Mask):
        raise TypeError(f"mask must be an rf.Mask: mask={mask!r}; for instance rf.Mask(causal=True)")
    if not isinstance(options, Options):
        raise TypeError(f"options must be an rf.Options: options={options!r}")


def facts(q: Tensor, k: Tensor, v: Tensor, call: Call) -> dict[str, object]:
    """What must be the same on every rank, as short printable values."""
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    return {
        "call": "attention",
        "batch": q.shape[0],
        "nheads_q": q.shape[2],
        "nheads_k": k.shape[2],
        "headdim": q.shape[3],
        "headdim_v": v.shape[3],
        "dtype": str(q.dtype),
        "device": q.device.type,
        "layout": f"{call.layout!r} #{_digest(call.layout.key)}",
        "kv_layout": f"{call.kv_layout!r} #{_digest(call.kv_layout.key)}",
        "mask": mask_words(call.mask),
        "scale": call.scale,
        "options": ", ".join(f"{name}={value}" for name, value in asdict(call.options).items()),
        "gradients needed": needs_grad,
    }


def mask_words(mask: Mask) -> str:
    """A mask in one short line; documents by digest."""
    documents = "None" if mask.documents is None else f"#{_digest(repr(mask.documents).encode())}"
    return f"Mask(causal={mask.causal}, window={mask.window}, documents={documents}, prefix={mask.prefix})"


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=6).hexdigest()


def together(comm: _Gathers, prepare: Callable[[], T], *, facts: Callable[[T], dict[str, object]], check: str | None) -> T:
    """Run this rank's own checks (`prepare`), then compare the ranks: whatever is wrong on one is raised on all.

    check: the mode of `Options`; None (options so wrong that they have none) is that of the last call.
    """
    mode = comm.check if check is None else check
    try:
        prepared = prepare()
    except Exception as error:  # of any kind: the other ranks must not wait for this one
        agree(comm, error, mode)
        raise
    agree(comm, lambda: facts(prepared), mode)
    return prepared


def agree(comm: _Gathers, mine: Callable[[], dict[str, object]] | Exception, check: str) -> None:
    """Raise `mine` if it is an error; in a checked call raise on every rank if any rank has one or its facts differ.

    Counts the call. "first" checks the first FIRST_CALLS calls of the group, "always" every one, "never" the very first
    only: ranks that chose differently would otherwise wait for each other.
    """
    comm.calls += 1
    comm.check = check
    checked = check == "always" or comm.calls <= (FIRST_CALLS if check == "first" else 1)
    if comm.size > 1 and checked:
        sent: Mapping[str, object] = {"error": f"{type(mine).__name__}: {mine}"} if isinstance(mine, Exception) else mine()
        answers = [json.loads(x) for x in comm.gather_bytes(_packed(sent), limit=MESSAGE_BYTES)]
        if not isinstance(mine, Exception):
            _compare(answers)
    elif isinstance(mine, Exception):
        comm.leave_word(mine)  # the others are not told now: they find it when their exchange fails
    if isinstance(mine, Exception):
        raise mine


def _packed(sent: Mapping[str, object]) -> bytes:
    """The facts as JSON of at most MESSAGE_BYTES: texts are cut where they are too long."""
    width, message = MESSAGE_BYTES, b""
    while not message or len(message) > MESSAGE_BYTES:
        message = json.dumps({name: x[:width] if isinstance(x, str) else x for name, x in sent.items()}).encode()
        width //= 2
    return message


def _compare(answers: list[dict[str, object]]) -> None:
    for other, answer in enumerate(answers):
        if "error" in answer:
            raise RuntimeError(f"rank {other} of the ring was called wrongly, so no rank runs: {answer['error']}")
    for name, value in answers[0].items():
        for other, answer in enumerate(answers):
            if answer[name] != value:
                raise ValueError(_differs(name, answers, other))


def _differs(name: str, answers: list[dict[str, object]], other: int) -> str:
    found = f"rank 0 has {answers[0][name]}, rank {other} has {answers[other][name]}"
    if name == "call":
        return f"every rank of the ring must make the same calls in the same order: {found}"
    if name == "gradients needed":
        return (
            f"gradients must be needed on every rank of the ring or on none: {found}; a rank without tokens or labels "
            "still takes part in backward: give it inputs that require gradients"
        )
    return f"{name} must be the same on every rank of the ring: {found}"

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

from ringflash.layout import Layout, named
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
class Given:
    """The arguments of attention besides the tensors, as they were given and not yet checked."""

    layout: object
    kv_layout: object = None
    mask: object = Mask()
    scale: object = None
    options: object = Options()

    @property
    def check(self) -> str | None:
        """The mode of the collective checks, if there are options to say so."""
        return self.options.check if isinstance(self.options, Options) else None


@dataclass(frozen=True)
class Call:
    """One checked call of a rank: what the ranks compare."""

    layout: Layout
    kv_layout: Layout
    mask: Mask
    scale: float
    options: Options


Prepared = tuple[tuple[Tensor, Tensor, Tensor], Call]


def prepare(q: Tensor, k: Tensor, v: Tensor, given: Given, *, rank: int, size: int, meta: bool = False) -> Prepared:
    """q, k, v (in autocast's dtype where it is on) and the call, or the error of whatever is wrong on this rank."""
    layout, kv_layout, mask, options = kinds(given)
    q, k, v = (autocast(x) for x in (q, k, v))
    tensors(q, k, v, meta=meta)
    layout = layout if isinstance(layout, Layout) else named(layout, q.shape[1] * size, size)
    kv_layout = layout if kv_layout is None else kv_layout
    kv_layout = kv_layout if isinstance(kv_layout, Layout) else named(kv_layout, k.shape[1] * size, size)
    call = Call(layout, kv_layout, mask, scale(given.scale, q.shape[3]), options)
    shards(q, k, call, rank=rank, size=size)
    return (q, k, v), call


def autocast(x: Tensor) -> Tensor:
    """x in autocast's dtype where autocast is on for its device; float64 is left alone, as by torch's own attention."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64 or x.device.type == "meta":
        return x
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


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


def scale(value: object, headdim: int) -> float:
    """The softmax scale: headdim ** -0.5 unless given."""
    if value is None:
        return headdim**-0.5
    if isinstance(value, bool) or not isinstance(value, float | int) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"scale must be a finite number: scale={value!r:.120}")
    return float(value)


def kinds(given: Given) -> tuple[Layout | str, Layout | str | None, Mask, Options]:
    """Types of the arguments that are not tensors."""
    layout, kv_layout = given.layout, given.kv_layout
    if not isinstance(layout, str | Layout):
        raise TypeError(f"layout must be an rf.Layout or the name of one: layout={layout!r}")
    if not isinstance(kv_layout, str | Layout | None):
        raise TypeError(f"kv_layout must be an rf.Layout or the name of one: kv_layout={kv_layout!r}")
    return layout, kv_layout, a_mask(given.mask), an_options(given.options)


def a_mask(mask: object) -> Mask:
    """A mask, and nothing else."""
    if not isinstance(mask, Mask):
        raise TypeError(f"mask must be an rf.Mask: mask={mask!r}; for instance rf.Mask(causal=True)")
    return mask


def an_options(options: object) -> Options:
    """Options, and nothing else."""
    if not isinstance(options, Options):
        raise TypeError(f"options must be an rf.Options: options={options!r}")
    return options


def layout_name(layout: object) -> str:
    """The name of a layout, and no layout itself: one object serves batches of any length."""
    if not isinstance(layout, str):
        raise TypeError(f"layout must be the name of one: layout={layout!r}; batch(layout=...) takes an rf.Layout")
    named(layout, 0, 1)
    return layout


def a_layout(layout: object, seqlen: int, size: int) -> Layout:
    """A layout, or the one of that name, for seqlen tokens over size ranks."""
    if not isinstance(layout, Layout | str):
        raise TypeError(f"layout must be an rf.Layout or the name of one: layout={layout!r}")
    chosen = named(layout, seqlen, size) if isinstance(layout, str) else layout
    if (chosen.seqlen, chosen.size) != (seqlen, size):
        raise ValueError(f"layout must be for seqlen={seqlen} and ring size {size}: layout={chosen!r}")
    return chosen


def whole(name: str, x: Tensor, dim: int, seqlen: int) -> None:
    """A tensor that holds the whole sequence along dim."""
    _dimension(name, x, dim)
    if x.shape[dim] != seqlen:
        raise ValueError(
            f"{name} must hold the whole sequence along dim={dim}: seqlen={seqlen}, {name}.shape={tuple(x.shape)}; "
            "pass the global tensor, the same on every rank"
        )


def part(name: str, x: Tensor, dim: int, layout: Layout, *, rank: int) -> dict[str, object]:
    """A tensor that holds a rank's tokens along dim; returns what of it must agree between ranks."""
    _dimension(name, x, dim)
    length = layout.lengths[rank]
    if x.shape[dim] != length:
        raise ValueError(
            f"{name} must hold this rank's tokens along dim={dim}: rank {rank} of {layout!r} has {length}, "
            f"{name}.shape={tuple(x.shape)}"
        )
    others = [n for i, n in enumerate(x.shape) if i != dim % x.dim()]
    needs_grad = torch.is_grad_enabled() and x.requires_grad
    return {"dtype": str(x.dtype), "device": x.device.type, "other dimensions": others, "gradients needed": needs_grad}


def _dimension(name: str, x: Tensor, dim: int) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor: {name} is a {type(x).__name__}")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim must be a dimension of {name}: dim={dim}, {name}.shape={tuple(x.shape)}")


def labels(x: Tensor, seqlen: int, mask: Mask) -> None:
    """Global labels, one row per sequence."""
    if not isinstance(x, Tensor) or x.dim() != 2 or x.shape[1] != seqlen:
        found = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"labels must be a global tensor (batch, seqlen={seqlen}): labels.shape={found}")
    if mask.batch not in (None, len(x)):
        raise ValueError(f"documents must be one list, or one per batch row: {mask.batch} lists, labels.shape={tuple(x.shape)}")


def loss(per_token_loss: Tensor, targets: Tensor, grad_reduce: str, *, tokens: int) -> dict[str, object]:
    """Per-token losses and targets of one rank, (batch, tokens) or flat; returns what must agree between ranks."""
    for name, x in (("per_token_loss", per_token_loss), ("targets", targets)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor: {name} is a {type(x).__name__}")
    if grad_reduce not in ("mean", "sum"):
        raise ValueError(f"grad_reduce must be 'mean' or 'sum': grad_reduce={grad_reduce!r}")
    shapes = f"per_token_loss.shape={tuple(per_token_loss.shape)}, targets.shape={tuple(targets.shape)}"
    if per_token_loss.shape != targets.shape:
        raise ValueError(f"per_token_loss and targets must have one shape (use reduction='none'): {shapes}")
    flat = targets.dim() == 1 and (tokens == 0 or targets.numel() % tokens == 0)
    if not flat and not (targets.dim() == 2 and targets.shape[1] == tokens):
        raise ValueError(f"targets must be this rank's, (batch, {tokens}) or flat: {shapes}; shift_labels makes them")
    return {"device": per_token_loss.device.type}


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
    mode = (comm.check if comm.calls else "first") if check is None else check
    try:
        prepared = prepare()
    except Exception as error:  # of any kind: the other ranks must not wait for this one
        agree(comm, error, mode)
        raise
    agree(comm, lambda: facts(prepared), mode)
    return prepared


def agree(comm: _Gathers, mine: Callable[[], dict[str, object]] | Exception, check: str) -> None:
    """Raise `mine` if it is an error; in a checked call raise on every rank if any rank has one or its facts differ.

    Counts the call. The mode is the group's, agreed in its first call, which is always compared: "first" checks the first
    FIRST_CALLS calls of the group, "always" every one, "never" no other.
    """
    comm.calls += 1
    if comm.calls == 1:
        comm.check = check
    elif check != comm.check and not isinstance(mine, Exception):
        mine = ValueError(
            f"check must stay what the group's first call said: check={check!r}, first call {comm.check!r}; "
            "pass the same Options, or another group"
        )
    checked = comm.calls == 1 or comm.check == "always" or (comm.check == "first" and comm.calls <= FIRST_CALLS)
    if comm.size > 1 and checked:
        _exchange_facts(comm, mine)
    elif isinstance(mine, Exception):
        comm.leave_word(mine)  # the others are not told now: they find it when their exchange fails
    if isinstance(mine, Exception):
        raise mine


def _exchange_facts(comm: _Gathers, mine: Callable[[], dict[str, object]] | Exception) -> None:
    sent: Mapping[str, object]
    sent = {"error": f"{type(mine).__name__}: {mine}"} if isinstance(mine, Exception) else mine() | {"check": comm.check}
    answers = [json.loads(x) for x in comm.gather_bytes(_packed(sent), limit=MESSAGE_BYTES)]
    try:
        _compare(answers)
    except (RuntimeError, ValueError):
        if comm.calls == 1:
            comm.calls = 0  # nothing has been agreed yet: the next call is the first again, on every rank
        if not isinstance(mine, Exception):
            raise


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

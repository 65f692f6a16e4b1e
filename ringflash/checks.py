"""Every error a caller can meet on one rank, worded here: argument, rule, value, way out; and what ranks then compare."""

import hashlib
import math
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ringflash.layout import Layout, named
from ringflash.mask import Mask, a_mask
from ringflash.options import Options

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEADDIM = 256
MAX_SCALE = 1e30  # scores are float32
SHOWN = 6  # boundaries of documents that a line has room for
_PLAIN = {Tensor, torch.nn.Parameter}  # a subclass may decide by more than its shape, dtype and device


class Given(NamedTuple):
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
    by_name: bool = False  # the layout was a name: every rank holds the same number of tokens


Prepared = tuple[tuple[Tensor, Tensor, Tensor], Call]


def prepare(q: Tensor, k: Tensor, v: Tensor, given: Given, *, rank: int, size: int, meta: bool = False) -> Prepared:
    """q, k, v (in autocast's dtype where it is on) and the call, or the error of whatever is wrong on this rank."""
    layout, kv_layout, mask, options = kinds(given)
    by_name = isinstance(layout, str)
    q, k, v = (autocast(x) for x in (q, k, v))
    tensors(q, k, v, meta=meta)
    layout = layout if isinstance(layout, Layout) else named(layout, q.shape[1] * size, size)
    kv_layout = layout if kv_layout is None else kv_layout
    kv_layout = kv_layout if isinstance(kv_layout, Layout) else named(kv_layout, k.shape[1] * size, size)
    call = Call(layout, kv_layout, mask, scale(given.scale, q.shape[3]), options, by_name)
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
            found = f"{name}.shape={tuple(x.shape)}"
            raise ValueError(f"{name} must be (batch, seqlen, nheads, headdim): {found}; unflatten or unsqueeze it to that")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be float32, float16 or bfloat16: {name}.dtype={x.dtype}; cast it to one of them")
        if x.device.type not in ("cpu", "cuda") and not (meta and x.device.type == "meta"):
            hint = "; rf.explain takes meta tensors" if x.device.type == "meta" else "; move it there"
            raise ValueError(f"{name} must be on a CPU or a CUDA GPU: {name}.device={x.device}{hint}")
    if q.is_cuda and q.device.index != torch.cuda.current_device():
        here = f"current cuda:{torch.cuda.current_device()}"
        raise ValueError(f"q, k and v must be on the current GPU: q.device={q.device}, {here}; call torch.cuda.set_device")
    for what, way_out in (("dtype", "cast them to one"), ("device", "move them to one")):
        if len({getattr(x, what) for x in named.values()}) > 1:
            found = ", ".join(f"{name}.{what}={getattr(x, what)}" for name, x in named.items())
            raise ValueError(f"q, k and v must have one {what}: {found}; {way_out}")
    _shapes(q, k, v)


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    shapes = f"q.shape={tuple(q.shape)}, k.shape={tuple(k.shape)}, v.shape={tuple(v.shape)}"
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(f"q, k and v must have one batch size: {shapes}; pass the same sequences in each")
    if k.shape[1:3] != v.shape[1:3]:
        raise ValueError(f"k and v must have the same seqlen_k and nheads_k: {shapes}; pass the same tokens and heads of both")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must have the same headdim: {shapes}; only v may have another")
    for name, headdim in (("headdim", q.shape[3]), ("headdim_v", v.shape[3])):
        if not 1 <= headdim <= MAX_HEADDIM:
            raise ValueError(f"{name} must be in 1 ... {MAX_HEADDIM}: {name}={headdim}, {shapes}; use more, smaller heads")
    if q.shape[2] < 1 or k.shape[2] < 1:
        raise ValueError(f"nheads_q and nheads_k must be at least 1: {shapes}; pass no tensor without heads")
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"nheads_q must be a multiple of nheads_k: nheads_q={q.shape[2]}, nheads_k={k.shape[2]}; repeat heads of k and v "
            "until each serves as many of q"
        )


def shards(q: Tensor, k: Tensor, call: Call, *, rank: int, size: int) -> None:
    """Layouts and mask against the local tensors and the ring's size."""
    for name, layout in (("layout", call.layout), ("kv_layout", call.kv_layout)):
        if layout.size != size:
            raise ValueError(
                f"{name} must be for this ring's size: {name}.size={layout.size}, ring size {size}; make one with size={size}"
            )
    _length("q", q, call.layout, rank, "shard with the same layout")
    _length("k", k, call.kv_layout, rank, "pass kv_layout= where keys lie otherwise than queries")
    call.mask.check_seqlen(max(call.layout.end, call.kv_layout.end))
    _document_rows(call.mask, q.shape[0], f"batch={q.shape[0]}")


def _document_rows(mask: Mask, batch: int, found: str) -> None:
    """Documents against the batch: one list for all rows, or one for each."""
    if mask.batch not in (None, batch):
        raise ValueError(
            f"documents must be one list, or one per batch row: {mask.batch} lists, {found}; one list serves all rows"
        )


def _length(name: str, x: Tensor, layout: Layout, rank: int, way_out: str) -> None:
    """A tensor's seqlen against the layout."""
    length = layout.lengths[rank]
    if x.shape[1] == length:
        return
    if x.shape[2] == length:
        way_out = "dimensions 1 and 2 look swapped: the order is (batch, seqlen, nheads, headdim)"
    found = f"seqlen_{name}={x.shape[1]}, {name}.shape={tuple(x.shape)}"
    raise ValueError(
        f"{name} must hold this rank's tokens of the layout: rank {rank} of {layout!r} has {length}, {found}; {way_out}"
    )


def scale(value: object, headdim: int) -> float:
    """The softmax scale: headdim ** -0.5 unless given."""
    if value is None:
        return headdim**-0.5
    if isinstance(value, bool) or not isinstance(value, float | int) or not abs(value) <= MAX_SCALE:
        raise ValueError(
            f"scale must be a finite number of at most {MAX_SCALE:g}: scale={value!r:.120}; None is headdim ** -0.5"
        )
    return float(value)


def likeness(qkv: tuple[Tensor, Tensor, Tensor], given: Given) -> tuple[Hashable, ...] | None:
    """What decides all that a call is prepared from and checked for; None where calls are not to be compared.

    Runs in every call of a model, so without loops, which cost the host more than what they look at. Hashing the answer raises
    TypeError where an argument has a wrong type.
    """
    q, k, v = qkv
    if not _PLAIN.issuperset((type(q), type(k), type(v))) or q.is_nested or k.is_nested or v.is_nested:
        return None
    kind = q.device.type
    if kind == "meta" or torch.is_autocast_enabled(kind):
        return None
    here = torch.accelerator.current_device_index() if kind == "cuda" else None
    where = q.device, k.device, v.device, q.layout, k.layout, v.layout
    return given, type(given.scale), here, q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, *where


def kinds(given: Given) -> tuple[Layout | str, Layout | str | None, Mask, Options]:
    """Types of the arguments that are not tensors."""
    layout, kv_layout = given.layout, given.kv_layout
    if not isinstance(layout, str | Layout):
        raise TypeError(f"layout must be an rf.Layout or the name of one: layout={layout!r}")
    if not isinstance(kv_layout, str | Layout | None):
        raise TypeError(f"kv_layout must be an rf.Layout or the name of one: kv_layout={kv_layout!r}")
    return layout, kv_layout, a_mask(given.mask), an_options(given.options)


def heads_ranks(transport: str, mesh: Sequence[int]) -> int:
    """How many ranks that follow each other exchange sequence for heads: those of a mesh row, or with "ulysses" all."""
    if transport == "ulysses" and len(mesh) == 2 and mesh[0] > 1:
        raise ValueError(
            f"transport='ulysses' must have all ranks in one exchange of heads: the group is a mesh of {mesh[0]} x {mesh[1]}, "
            "(ring, heads); use transport='auto' for heads inside a ring, or a 1-D mesh of the same ranks"
        )
    return mesh[1] if len(mesh) == 2 else mesh[0] if transport == "ulysses" else 1


def mesh(value: object, size: int) -> tuple[int, ...]:
    """The shape of the ranks' mesh: (ring, heads), or one dimension; None: one."""
    if value is None:
        return (size,)
    shape = tuple(value) if isinstance(value, Sequence) else ()
    if not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in shape) or len(shape) not in (1, 2):
        raise ValueError(f"mesh must be the shape of a DeviceMesh, such as (1, {size}) for (ring, heads): mesh={value!r}")
    if math.prod(shape) != size:
        raise ValueError(f"mesh must hold as many ranks as the layout: mesh={value!r}, size={size}")
    return shape


def hosts(value: object, size: int) -> tuple[int, ...]:
    """The number of each rank's host; None: all on one."""
    if value is None:
        return (0,) * size
    numbers = tuple(value) if isinstance(value, Sequence) else ()
    if len(numbers) != size or not all(isinstance(x, int) and not isinstance(x, bool) for x in numbers):
        raise ValueError(f"hosts must be one number per rank, such as {tuple(r // 2 for r in range(size))}: hosts={value!r}")
    return numbers


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


def part(name: str, x: Tensor, dim: int, *, layout: Layout, rank: int) -> dict[str, object]:
    """A tensor that holds a rank's tokens along dim; returns what of it must agree between ranks."""
    dimension(name, x, dim)
    length = layout.lengths[rank]
    if x.shape[dim] != length:
        raise ValueError(
            f"{name} must hold this rank's tokens along dim={dim}: rank {rank} of {layout!r} has {length}, "
            f"{name}.shape={tuple(x.shape)}"
        )
    others = str(tuple(n for i, n in enumerate(x.shape) if i != dim % x.dim()))
    needs_grad = torch.is_grad_enabled() and x.requires_grad
    facts: dict[str, object] = {"dim": dim % x.dim(), "dtype": str(x.dtype), "device": x.device.type}
    return facts | {"other dimensions": others, "gradients needed": needs_grad}


def dimension(name: str, x: Tensor, dim: int) -> None:
    """A tensor and a dimension of it."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor: {name} is a {type(x).__name__}")
    if isinstance(dim, bool) or not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim must be a dimension of {name}: dim={dim!r}, {name}.shape={tuple(x.shape)}")


def labels(x: Tensor, seqlen: int, mask: Mask, *, ignore_index: int) -> None:
    """Global integer labels, one row per sequence, of a dtype that can hold ignore_index."""
    if not isinstance(x, Tensor) or x.dim() != 2 or x.shape[1] != seqlen:
        found = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"labels must be a global tensor (batch, seqlen={seqlen}): labels.shape={found}")
    integers = not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
    if (
        not isinstance(ignore_index, int)
        or not integers
        or not torch.iinfo(x.dtype).min <= ignore_index <= torch.iinfo(x.dtype).max
    ):
        raise TypeError(
            f"labels must be integers that can hold ignore_index={ignore_index!r}: labels.dtype={x.dtype}; use int64"
        )
    _document_rows(mask, len(x), f"labels.shape={tuple(x.shape)}")


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
    if not per_token_loss.is_floating_point() or targets.is_floating_point() or per_token_loss.device != targets.device:
        found = f"{per_token_loss.dtype} on {per_token_loss.device}, {targets.dtype} on {targets.device}"
        raise TypeError(f"per_token_loss must be floating and targets integers, on one device: {found}")
    flat = targets.dim() == 1 and (targets.numel() % tokens == 0 if tokens else targets.numel() == 0)
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
        "equal shards": q.shape[1] if call.by_name else None,
        "layout": (repr(call.layout), digest(call.layout.key)),
        "kv_layout": (repr(call.kv_layout), digest(call.kv_layout.key)),
        "mask": (mask_words(call.mask), digest(repr(call.mask).encode())),
        "scale": call.scale,
        "options": ", ".join(f"{name}={value}" for name, value in asdict(call.options).items()),
        "gradients needed": needs_grad,
    }


def mask_words(mask: Mask) -> str:
    """A mask in one short line; where documents are many, their number and letters that tell them from others."""
    words = [f"causal={mask.causal}", f"window={mask.window}", f"documents={_documents(mask)}", f"prefix={mask.prefix}"]
    return f"Mask({', '.join(words)})"


def _documents(mask: Mask) -> str:
    if mask.documents is None or (not mask.batch and len(mask.documents) <= SHOWN):
        return str(mask.documents)
    counts = "/".join(map(str, sorted({len(row) - 1 for row in mask.document_rows(0)})))
    rows = f" in each of {mask.batch} rows" if mask.batch else ""
    return f"{counts} of them{rows} [{digest(repr(mask.documents).encode())}]"


def digest(data: bytes) -> str:
    """A few letters that differ where the data do."""
    return hashlib.blake2b(data, digest_size=6).hexdigest()

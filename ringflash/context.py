"""Objects for training scripts: one long-lived ContextParallel per ring, one cheap Batch per step."""

import hashlib
from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ringflash import agreement, checks
from ringflash.api import attend_over
from ringflash.layout import Layout
from ringflash.mask import Mask, a_mask
from ringflash.options import Options
from ringflash.transport.communicator import Communicator, communicator


class ContextParallel:
    """A ring of ranks that share every sequence.

    group: None (the default group, or a ring of one), a ProcessGroup or a DeviceMesh of one dimension, or of two named
    ("ring", "heads"), as for ring_attention; all its ranks construct this together. layout: the name batches use unless they
    say otherwise. Raises ValueError or TypeError for wrong arguments.
    """

    def __init__(
        self,
        group: ProcessGroup | DeviceMesh | None = None,
        layout: str = "zigzag",
        options: Options = Options(),
    ) -> None:
        self.group, self.layout, self.options = group, layout, options
        self._comm = communicator(group)
        agreement.together(
            self._comm,
            lambda: (checks.layout_name(layout), checks.heads_ranks(checks.an_options(options).transport, self._comm.mesh)),
            facts=lambda _: {"call": "ContextParallel", "layout": layout, "options": repr(options)},
            check=checks.Given(layout, options=options).check,
        )

    def __repr__(self) -> str:
        return f"ContextParallel(rank={self.rank}, size={self.size}, layout={self.layout!r})"

    def __copy__(self) -> "ContextParallel":
        return self

    def __deepcopy__(self, memo: dict) -> "ContextParallel":
        return self  # a copy of a model talks over the same ring

    def __reduce__(self) -> tuple:
        raise TypeError("ContextParallel cannot be pickled: it holds process groups; make one in each process")

    @property
    def rank(self) -> int:
        """This process's place in sequence order."""
        return self._comm.rank

    @property
    def size(self) -> int:
        """Number of ranks that share a sequence."""
        return self._comm.size

    def batch(
        self,
        seqlen: int,
        mask: Mask = Mask(),
        layout: Layout | str | None = None,
    ) -> "Batch":
        """One step's sequences: seqlen global tokens under a mask (as everywhere, nothing is masked unless it says so).

        Lengths, documents and layout may change every step. layout: a name, which fits any seqlen, or an rf.Layout.

        Raises ValueError where documents do not end at seqlen or the layout is for another length or ring size.
        """
        chosen = checks.a_layout(self.layout if layout is None else layout, seqlen, self.size)
        a_mask(mask).check_seqlen(seqlen)
        return Batch(self, chosen, mask)


class Batch:
    """The sequences of one step as this rank sees them. Methods that take a whole sequence want the same on every rank."""

    def __init__(self, cp: ContextParallel, layout: Layout, mask: Mask) -> None:
        self.cp, self.layout, self.mask = cp, layout, mask

    def __repr__(self) -> str:
        return f"Batch(rank {self.cp.rank} of {self.layout!r}, {checks.mask_words(self.mask)})"

    @property
    def _comm(self) -> Communicator:
        return self.cp._comm

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of a whole sequence: x has seqlen entries along dim, any dtype. Differentiable."""
        checks.dimension("x", x, dim)
        return self.layout.part(x, self.cp.rank, dim)

    def unshard(self, y: Tensor, dim: int = 1) -> Tensor:
        """The whole sequence from every rank's tokens, on every rank: exactly seqlen entries along dim.

        Differentiable: the gradient is that of the sum over ranks of the local losses. A collective.
        """
        facts: dict[str, object] = {"layout": (repr(self.layout), checks.digest(self.layout.key))}
        self._together("unshard", lambda: checks.part("y", y, dim, layout=self.layout, rank=self.cp.rank), facts)
        return _Unshard.apply(y, self._comm, self.layout, dim)  # pyright: ignore[reportReturnType]

    def positions(self, restart: bool = False, device: torch.device | str | None = None) -> Tensor:
        """Global positions of this rank's tokens, int64 (tokens,): what rotary tables index.

        restart: positions begin at 0 in each document; (batch, tokens) where batch rows have documents of their own.
        device: where they are wanted; None is the current GPU where the ring (of one: the machine) has GPUs, else the CPU.
        """
        positions = self.layout.positions(self.cp.rank)
        if restart:
            rows = [torch.from_numpy(row) for row in self.mask.document_rows(self.layout.seqlen)]
            starts = [row[torch.searchsorted(row, positions, right=True) - 1] for row in rows]
            positions = torch.stack([positions - start for start in starts])
            positions = positions if self.mask.batch is not None else positions[0]
        return positions.to(self._device() if device is None else device)

    def _device(self) -> torch.device:
        on_gpu = "cuda" in self._comm.groups or (self.cp.size == 1 and torch.cuda.is_available())
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def attention(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask | None = None, scale: float | None = None) -> Tensor:
        """Attention of this rank's queries over the whole sequence: q (batch, tokens, nheads_q, headdim), k (batch, tokens,
        nheads_k, headdim), v (batch, tokens, nheads_k, headdim_v) -> (batch, tokens, nheads_q, headdim_v). Errors as of
        ring_attention.

        mask: another mask for layers that differ; a mask without documents does not inherit the batch's.
        """
        given = checks.Given(self.layout, None, self.mask if mask is None else mask, scale, self.cp.options)
        out = attend_over(self._comm, (q, k, v), given)
        assert isinstance(out, Tensor)
        return out

    def shift_labels(self, labels: Tensor, ignore_index: int = -100) -> Tensor:
        """This rank's next-token targets, (batch, tokens), from the global labels (batch, seqlen).

        Shifted before sharding, so a target is right also where the next token lies on another rank; the last token of
        each document has none and gets ignore_index.
        """
        checks.labels(labels, self.layout.seqlen, self.mask, ignore_index=ignore_index)
        targets = torch.roll(labels, -1, dims=1)
        for row, bounds in enumerate(self.mask.document_rows(self.layout.seqlen)):
            ends = torch.from_numpy(bounds[1:] - 1)
            rows = slice(row, row + 1) if self.mask.batch is not None else slice(None)
            targets[rows, ends[ends >= 0].to(labels.device)] = ignore_index
        return self.shard(targets)

    def mean_loss(
        self,
        per_token_loss: Tensor,
        targets: Tensor,
        *,
        grad_reduce: Literal["mean", "sum"] = "mean",
        ignore_index: int = -100,
        reducer: ProcessGroup | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(loss to call backward on, detached global mean) of the tokens whose target is not ignore_index.

        per_token_loss, targets: this rank's, one shape. The loss is local sum / global number of valid tokens, so that
        gradients *summed* over the ranks are those of the mean. grad_reduce "mean": for reducers that average (DDP,
        FSDP), times the number of ranks they average over; "sum": for reducers that sum. reducer: the group that
        gradients are reduced over where it is larger than the ring (data x context parallel): tokens are then counted
        over all of it. A rank without a valid token still gets a loss of 0 that reaches every parameter. Collective.
        """
        facts = {"grad_reduce": grad_reduce, "ignore_index": ignore_index, "reducer given": reducer is not None}
        tokens = self.layout.lengths[self.cp.rank]
        self._together("mean_loss", lambda: checks.loss(per_token_loss, targets, grad_reduce, tokens=tokens), facts)
        valid = targets != ignore_index
        local = torch.where(valid, per_token_loss, 0.0).sum(dtype=torch.float32)
        totals = self._total(torch.stack([local.detach().double(), valid.sum().double()]), reducer)
        count = totals[1].clamp(min=1.0)
        ranks = self.cp.size if reducer is None else dist.get_world_size(reducer)
        factor = ranks if grad_reduce == "mean" else 1
        return local * (factor / count).float(), (totals[0] / count).float()

    def _together(self, call: str, check: Callable[[], dict[str, object]], facts: dict[str, object]) -> None:
        """A collective's own checks: what is wrong on one rank is raised on all. check returns what else must agree."""
        mode = self.cp.options.check

        def run() -> dict[str, object]:
            more = check()
            if self.cp.size > 1:
                self._comm.group_for(str(more["device"]))
            return {"call": call} | facts | more

        agreement.together(self._comm, run, facts=lambda found: found, check=mode)

    def _total(self, x: Tensor, reducer: ProcessGroup | None) -> Tensor:
        if reducer is None:
            return self._comm.all_reduce(x)
        dist.all_reduce(x, group=reducer)
        return x

    def check_same(self, x: Tensor, name: str = "x") -> None:
        """Raise ValueError on every rank unless x holds the same bits on all: different samples in one ring are silent
        nonsense otherwise. A collective with a host synchronisation, meant for the first steps."""
        try:
            bits = _fingerprint(x, name)
        except TypeError as error:
            agreement.exchange(self._comm, error)
            raise
        agreement.exchange(self._comm, lambda: {"call": "check_same", name: f"bits {bits}"})


def _fingerprint(x: Tensor, name: str) -> str:
    """Dtype, shape and bits of a tensor in 16 letters."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor: {name} is a {type(x).__name__}")
    data = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(repr((x.dtype, tuple(x.shape))).encode() + data, digest_size=8).hexdigest()


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: Tensor, comm: Communicator, layout: Layout, dim: int) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.comm, ctx.layout, ctx.dim = comm, layout, dim
        return layout.join(comm.gather(y, dim, layout.lengths), dim)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        exact = grad.float() if grad.dtype in (torch.float16, torch.bfloat16) else grad  # rounded once, behind the sum
        whole = ctx.comm.all_reduce(exact.contiguous())
        return ctx.layout.part(whole, ctx.comm.rank, ctx.dim).to(grad.dtype), None, None, None

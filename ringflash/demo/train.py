"""The training loop: one sequence per step, spread over a ring of ranks, gradients summed with one all-reduce.

This file is the whole of what a training script needs of ringflash. `train` does not know how many ranks there are:
the same lines run on one rank and on many, and that is what the demo compares.
"""

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

import ringflash as rf
from ringflash.demo.model import Decoder

IGNORE = -100  # the label of a token that is not to be predicted
CAUSAL = rf.Mask(causal=True)
WARMUP = 10  # steps until the full learning rate
GRADIENTS_KEPT = 8  # per run, spread over its steps: enough to compare, and small beside the optimizer


@dataclass(frozen=True)
class Ring:
    """The ranks of one run: `cp` spreads sequences over them, `group` sums their gradients."""

    cp: rf.ContextParallel
    group: ProcessGroup
    device: torch.device

    @classmethod
    def of(cls, group: ProcessGroup, device: torch.device) -> "Ring":
        """The ring of a process group's ranks. All of them call this together."""
        return cls(rf.ContextParallel(group), group, device)

    @property
    def dtype(self) -> torch.dtype:
        """What matrix products and attention compute in: bfloat16 on GPUs, whose matrix units it is made for."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a run does, the same on every rank. `layout` and `mask` are those of `rf.ContextParallel.batch`."""

    steps: int
    seqlen: int
    lr: float
    layout: rf.Layout | str
    mask: rf.Mask = CAUSAL


@dataclass
class Run:
    """What came of a run, as one rank saw it; losses and gradients are global, so every rank has the same."""

    ranks: int
    losses: list[float] = field(default_factory=list)
    gradients: dict[int, Tensor] = field(default_factory=dict)  # step -> all parameters' gradients in one CPU vector
    tokens_per_second: float = 0.0
    memory: int = 0  # peak bytes of this rank


Sequences = Callable[[int], tuple[Tensor, Tensor]]
OnStep = Callable[[Run], bool]


def train(model: Decoder, sequences: Sequences, recipe: Recipe, *, ring: Ring, on_step: OnStep) -> Run:
    """Train `model` in place. Collective over the ring.

    sequences: step -> global (tokens, labels), int64 (batch, seqlen), the same on every rank. on_step is called after
    every step; a true answer, the same on every rank, ends the run early.
    """
    # Cheap, and may differ from step to step: other lengths, documents, layouts. Here all steps are alike.
    batch = ring.cp.batch(recipe.seqlen, mask=recipe.mask, layout=recipe.layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, recipe.steps))
    keep = {round(i * (recipe.steps - 1) / (GRADIENTS_KEPT - 1)) for i in range(GRADIENTS_KEPT)}
    run = Run(ranks=ring.cp.size)
    clock = Clock(ring.device)
    for step in range(recipe.steps):
        tokens, labels = (x.to(ring.device) for x in sequences(step))
        optimizer.zero_grad()
        loss = backward(model, batch, tokens, labels, dtype=ring.dtype)
        gradient = sum_gradients(model, ring.group)
        optimizer.step()
        schedule.step()
        if step in keep:
            run.gradients[step] = gradient.cpu()
        run.losses.append(loss.item())
        run.tokens_per_second = clock.tick(tokens.numel())
        if on_step(run):
            break
    run.memory = clock.peak_memory()
    return run


def lr_factor(step: int, steps: int) -> float:
    """Share of the full learning rate: up over WARMUP steps, and down to 0 over the second half."""
    return min(1.0, (step + 1) / WARMUP, 2 * (1 - step / steps))


def backward(model: Decoder, batch: rf.Batch, tokens: Tensor, labels: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Run the model on this rank's tokens and leave this rank's gradients: global tokens, labels (batch, seqlen).

    Returns the mean loss over the whole sequence, a scalar that is the same on every rank.
    """
    # Shifted while still whole: the next token of a shard's last token lies on another rank.
    targets = batch.shift_labels(labels, ignore_index=IGNORE)
    with torch.autocast(tokens.device.type, dtype=dtype, enabled=dtype != torch.float32):
        logits = model(batch.shard(tokens), batch)
    per_token = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORE, reduction="none")
    # Each rank's sum is divided by the number of targets of all ranks, so that gradients only need to be added up.
    loss, mean = batch.mean_loss(per_token, targets, grad_reduce="sum", ignore_index=IGNORE)
    loss.backward()
    return mean


def sum_gradients(model: Decoder, group: ProcessGroup) -> Tensor:
    """Add up the ranks' gradients in place, all in one message; returns them as one float32 vector."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat, group=group)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
    return flat


class Clock:
    """Speed and peak memory of a run on this rank."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.started: float | None = None
        self.tokens = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def tick(self, tokens: int) -> float:
        """Note the end of a step of that many global tokens; returns tokens per second.

        The first step is not counted: it opens connections and compiles kernels.
        """
        now = time.perf_counter()
        if self.started is None:
            self.started = now
            return 0.0
        self.tokens += tokens
        return self.tokens / (now - self.started)

    def peak_memory(self) -> int:
        """Bytes: PyTorch's peak on the GPU since this clock started, or on CPUs the process's peak until now."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes where Linux counts KiB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

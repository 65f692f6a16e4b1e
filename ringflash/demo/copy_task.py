"""A task that cannot be learnt without attention between ranks: repeat random symbols seen `LAG` positions ago.

    position   0   1 ... 8   9 ... LAG-1   LAG   LAG+1 ... LAG+8
    token      GO  payload   BLANK         GO    payload again

Text is too easy a test: most of a byte can be guessed from the few before it, which lie on the same rank. Here the
symbols are random and the distance between the two payloads is larger than a shard, so whoever has to predict one finds
nothing on its own rank. Attention cut at the shards' borders stays at chance, and that is checked too (`--cut`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

import ringflash as rf
from ringflash.demo.model import Config, Decoder
from ringflash.demo.train import IGNORE, Recipe, Ring, Run, train

SYMBOLS = 16
BLANK, GO = SYMBOLS, SYMBOLS + 1
PAYLOAD = 8
CHANCE = 1 / SYMBOLS
MUST_PASS = 0.95
CUT_LIMIT = 2 * CHANCE  # over 1,024 targets guessing strays from CHANCE by 0.008: one chance in 10^15 to pass this
LEARNT = 0.99  # training may end here

BATCH = 16
MAX_STEPS = 400
EVALUATE_EVERY = 25
EVALUATED = 64  # sequences
FINAL_SEQUENCES = 128  # of PAYLOAD targets each
EVALUATION_SEED = 1 << 40  # apart from all training steps, so that what is measured was never trained on

CONFIG = Config(vocab=SYMBOLS + 2, width=64, layers=2, nheads_q=2, nheads_k=1, headdim=32, hidden=128)


def sequence_length(size: int) -> int:
    """Tokens of one sequence: 64 however many ranks share them, so that the task does not grow harder with the ring.

    Only past 32 ranks it grows, to keep two tokens on each.
    """
    return max(64, 2 * size)


def draw_copies(seqlen: int, *, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Global (tokens, labels), both int64 (count, seqlen); labels are IGNORE except at the second payload."""
    payload = torch.randint(SYMBOLS, (count, PAYLOAD), generator=torch.Generator().manual_seed(seed))
    tokens = torch.full((count, seqlen), BLANK)
    for go in (0, lag(seqlen)):
        tokens[:, go] = GO
        tokens[:, go + 1 : go + 1 + PAYLOAD] = payload
    labels = torch.full_like(tokens, IGNORE)
    labels[:, -PAYLOAD:] = payload
    return tokens, labels


def lag(seqlen: int) -> int:
    """How many positions the second payload lies after the first: as far as the sequence allows."""
    return seqlen - 1 - PAYLOAD


def copy_mask(layout: rf.Layout, *, cut: bool) -> rf.Mask:
    """Causal attention; with `cut` each shard of the (contiguous) layout is a document, which sees only itself."""
    borders = tuple(accumulate(layout.lengths, initial=0))
    return rf.Mask(causal=True, documents=borders if cut else None)


@dataclass(frozen=True)
class Outcome:
    """What training came to: after `steps` steps it measured `latest`, and on fresh sequences `accuracy`."""

    steps: int
    latest: float
    accuracy: float

    @property
    def ending(self) -> str:
        """Why training ended."""
        if self.steps < MAX_STEPS:
            return f"stopped at step {self.steps} of at most {MAX_STEPS}: accuracy {self.latest:.0%}"
        return f"all {MAX_STEPS} steps done: accuracy {self.latest:.0%}"


def train_copy(*, ring: Ring, seed: int, cut: bool, show: Callable[[Run, str], None]) -> Outcome:
    """Train until the task is learnt or MAX_STEPS have passed, then measure on fresh sequences. Collective.

    show is called after every step with the run so far and a note on how far it is.
    """
    seqlen = sequence_length(ring.cp.size)
    layout = rf.layouts.contiguous(seqlen, ring.cp.size)
    recipe = Recipe(steps=MAX_STEPS, seqlen=seqlen, lr=3e-3, layout=layout, mask=copy_mask(layout, cut=cut))
    batch = ring.cp.batch(seqlen, mask=recipe.mask, layout=layout)
    torch.manual_seed(seed)
    model = Decoder(CONFIG).to(ring.device)
    latest: float | None = None

    def learnt(run: Run) -> bool:
        nonlocal latest
        if len(run.losses) % EVALUATE_EVERY == 0:
            latest = accuracy(model, batch, ring=ring, count=EVALUATED, seed=EVALUATION_SEED + len(run.losses))
        show(run, "accuracy -" if latest is None else f"accuracy {latest:.0%}")
        return latest is not None and latest >= LEARNT

    def sequences(step: int) -> tuple[Tensor, Tensor]:
        return draw_copies(seqlen, count=BATCH, seed=seed * MAX_STEPS + step)

    run = train(model, sequences, recipe, ring=ring, on_step=learnt)
    fresh = accuracy(model, batch, ring=ring, count=FINAL_SEQUENCES, seed=EVALUATION_SEED)
    return Outcome(len(run.losses), fresh if latest is None else latest, fresh)


@torch.no_grad()
def accuracy(model: Decoder, batch: rf.Batch, *, ring: Ring, count: int, seed: int) -> float:
    """Share of targets whose most likely symbol is right, over `count` sequences and all ranks. Collective."""
    tokens, labels = (x.to(ring.device) for x in draw_copies(batch.layout.seqlen, count=count, seed=seed))
    targets = batch.shift_labels(labels, ignore_index=IGNORE)
    right = model(batch.shard(tokens), batch).argmax(-1) == targets  # IGNORE is negative: never predicted
    totals = torch.stack([right.sum(), (targets != IGNORE).sum()])
    torch.distributed.all_reduce(totals, group=ring.group)
    return totals[0].item() / max(1, totals[1].item())

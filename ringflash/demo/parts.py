"""The demo's two parts: language modelling compared with one rank, and the copy task that only a ring can learn."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ringflash.demo import copy_task
from ringflash.demo.compare import BOUNDS, compare
from ringflash.demo.model import Config, Decoder
from ringflash.demo.report import Display, count_ranks, plot
from ringflash.demo.text import draw_sequence, load_text
from ringflash.demo.train import Recipe, Ring, Run, train

PATIENCE = timedelta(hours=4)  # for ranks that wait while rank 0 repeats their work alone


@dataclass(frozen=True)
class Scale:
    """How much the text part does unless told otherwise."""

    config: Config
    seqlen: int
    steps: int
    lr: float


SCALES = {
    "cpu": Scale(Config(), seqlen=1024, steps=80, lr=1e-3),
    "cuda": Scale(
        Config(width=512, layers=6, nheads_q=8, nheads_k=2, headdim=64, hidden=1408), seqlen=32768, steps=100, lr=3e-4
    ),
}


@dataclass(frozen=True)
class Job:
    """All ranks of the demo: the `ring` they form, rank 0 `alone`, and `words`, a group for messages between hosts.

    one_host: whether they share a machine.
    """

    ring: Ring
    alone: Ring | None  # None on the ranks that are not in it
    words: ProcessGroup
    display: Display
    one_host: bool

    @classmethod
    def of_world(cls, device: torch.device, *, one_host: bool) -> "Job":
        """The job of all ranks of the default process group. Collective."""
        first = dist.get_rank() == 0
        ring = Ring.of(_as_member(dist.group.WORLD), device)
        only_first = dist.new_group([0])  # every rank has to make the call, also those outside
        return cls(
            ring=ring,
            alone=Ring.of(_as_member(only_first), device) if first else None,
            words=_as_member(dist.new_group(backend="gloo", timeout=PATIENCE)),
            display=Display(shown=first),
            one_host=one_host,
        )

    def gather(self, value: int) -> list[int]:
        """Every rank's value, in rank order. Collective."""
        values = [0] * self.ring.cp.size
        dist.all_gather_object(values, value, group=self.words)
        return values

    def first_says(self, value: bool) -> bool:
        """Rank 0's value on every rank; the others wait for it. Collective."""
        return bool(self.gather(int(value))[0])


@dataclass(frozen=True, kw_only=True)
class TextPart:
    """Train on text over the ring, then the same steps on rank 0 alone, and compare. None: what SCALES says."""

    seed: int
    layout: str
    seqlen: int | None = None
    steps: int | None = None
    plot: Path | None = None

    def run(self, job: Job) -> bool:
        """Whether the two runs differ by rounding only. Collective."""
        scale = SCALES[job.ring.device.type]
        recipe = Recipe(steps=self.steps or scale.steps, seqlen=self.seqlen or scale.seqlen, lr=scale.lr, layout=self.layout)
        job.display.say(
            f"[bold]Text[/]: one sequence of {recipe.seqlen:,} bytes per step over {count_ranks(job.ring.cp.size)}, "
            f"layout {recipe.layout}, {job.ring.device.type}, {str(job.ring.dtype).removeprefix('torch.')}"
        )
        ring = self._train(scale.config, recipe, job.ring, job.display)
        peaks = job.gather(ring.memory)
        same = self._repeat(scale.config, recipe, job, ring, peaks) if job.alone else False
        return job.first_says(same)

    def _repeat(self, config: Config, recipe: Recipe, job: Job, ring: Run, peaks: list[int]) -> bool:
        """On rank 0: the same steps without the others, and the report of both runs."""
        assert job.alone is not None
        alone = self._train(config, recipe, job.alone, job.display)
        job.display.losses(ring, alone)
        on_gpu = job.ring.device.type == "cuda"
        memory = "peak memory per rank" if on_gpu else "peak memory per rank (whole process)"
        job.display.speeds([(ring, peaks), (alone, [alone.memory])], memory=memory)
        if ring.ranks == 1:
            job.display.say("NO RING RAN: one rank only, so both runs are the same (two ranks: --nproc 2)")
        elif job.one_host and not on_gpu:
            job.display.say("The ranks share this machine's cores, so speed does not grow with their number here.")
        if self.plot:
            plot(self.plot, ring, alone)
            job.display.say(f"loss curves: {self.plot}")
        return job.display.difference(compare(ring, alone), BOUNDS[job.ring.dtype])

    def _train(self, config: Config, recipe: Recipe, ring: Ring, display: Display) -> Run:
        text = load_text()
        torch.manual_seed(self.seed)  # the same initial weights on every rank, and again when rank 0 is alone
        model = Decoder(config).to(ring.device)

        def sequences(step: int) -> tuple[Tensor, Tensor]:
            tokens = draw_sequence(text, seqlen=recipe.seqlen, seed=self.seed, step=step)
            return tokens, tokens

        with display.progress(count_ranks(ring.cp.size), recipe.steps) as show:
            return train(model, sequences, recipe, ring=ring, on_step=_keep_going(show))


@dataclass(frozen=True, kw_only=True)
class CopyPart:
    """Train the copy task; with `cut`, attention ends at the borders of the shards."""

    seed: int
    cut: bool = False

    def run(self, job: Job) -> bool:
        """Whether it was learnt, or with `cut` whether it was not. Collective."""
        if job.ring.cp.size < 2:
            job.display.say("[bold]Copy task[/]: skipped, it needs at least two ranks (--nproc 2). NO RING RAN: one rank only")
            return not self.cut
        reach = "cut at the shards' borders" if self.cut else "over the whole ring"
        job.display.say(f"[bold]Copy task[/]: source and target on different ranks, attention {reach}")
        with job.display.progress(count_ranks(job.ring.cp.size), copy_task.MAX_STEPS) as show:
            outcome = copy_task.train_copy(ring=job.ring, seed=self.seed, cut=self.cut, show=show)
        job.display.say(outcome.ending)
        passed, words = verdict(outcome.accuracy, cut=self.cut)
        job.display.verdict(passed, words)
        return job.first_says(passed)


def verdict(accuracy: float, *, cut: bool) -> tuple[bool, str]:
    """Whether the copy task came out as it must, and the words for it."""
    found, chance = f"accuracy on fresh sequences {accuracy:.1%}", f"chance is {copy_task.CHANCE:.1%}"
    if not cut:
        return accuracy >= copy_task.MUST_PASS, f"{found} (at least {copy_task.MUST_PASS:.0%}; {chance})"
    bound = f"({chance}, at most {copy_task.CUT_LIMIT:.1%})"
    if accuracy <= copy_task.CUT_LIMIT:
        return True, f"{found}: near chance, as it must be without the other shards {bound}"
    return False, f"{found}: above chance, which it cannot be without the other shards {bound}"


def _as_member(group: object) -> ProcessGroup:
    """`group` itself: PyTorch's types allow for ranks that are no members."""
    assert isinstance(group, ProcessGroup)
    return group


def _keep_going(show: Callable[[Run, str], None]) -> Callable[[Run], bool]:
    def on_step(run: Run) -> bool:
        show(run, "")
        return False

    return on_step

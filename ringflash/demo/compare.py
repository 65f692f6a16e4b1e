"""Whether two runs of the same steps are the same training: the largest differences, and the bounds they must keep."""

from dataclasses import dataclass

import torch

from ringflash.demo.train import Run


@dataclass(frozen=True)
class Difference:
    """Relative differences: of a step's loss, and of its gradient as the norm of the difference over the norm.

    steps: how many losses and how many gradients were compared.
    """

    loss: float
    gradient: float
    steps: tuple[int, int] = (0, 0)

    def within(self, bound: "Difference") -> bool:
        """Whether both keep the bound; a NaN keeps none."""
        return self.loss <= bound.loss and self.gradient <= bound.gradient


# Ring and single rank add the same numbers in another order, so they differ by rounding (float32 2 ** -24, bfloat16
# 2 ** -9), which every step then feeds into the next. How fast that grows is the training's own affair: at three times
# the learning rate of SCALES, weights perturbed by 1e-7 on a single rank (no ring at all) gave losses 5e-3 apart after
# 80 steps. At SCALES' rates such a perturbation stays at 6e-7 (loss) and 1e-6 (gradient) in float32, and two H200s
# against one reached 6e-5 and 6e-3 in bfloat16. The bounds leave an order of magnitude above that.
BOUNDS = {
    torch.float32: Difference(loss=1e-5, gradient=1e-4),
    torch.bfloat16: Difference(loss=1e-3, gradient=1e-1),
}


def compare(ring: Run, alone: Run) -> Difference:
    """The largest difference over all steps (losses) and over the steps whose gradients were kept."""
    losses = [abs(a - b) / abs(b) for a, b in zip(ring.losses, alone.losses, strict=True)]
    gradients = [((ring.gradients[step] - g).norm() / g.norm()).item() for step, g in alone.gradients.items()]
    return Difference(largest(losses), largest(gradients), (len(losses), len(gradients)))


def largest(values: list[float]) -> float:
    """max() that does not lose a NaN."""
    return torch.tensor(values).amax().item()

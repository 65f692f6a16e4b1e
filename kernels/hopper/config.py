"""The frozen table of the Hopper kernels' block sizes, and what of a launch is known when compiling."""

import functools
from dataclasses import dataclass, replace
from typing import Any

import triton
from triton.language import constexpr

# Later Tritons copy what a product reads from registers (their issue 9433), and 3.9's ptxas keeps copies of what is used again,
# as Q is: kilobytes of spills at head dim 128. So Q is read from shared memory there.
_Q_REGS = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)


@dataclass(frozen=True)
class Known:
    """A frozen dataclass as one constexpr argument of a kernel: its fields read as constants there."""

    of: Any

    def __getattr__(self, name: str) -> constexpr:
        return constexpr(getattr(self.of, name))


@functools.lru_cache(maxsize=256)
def of_launch(constants: Any, **of_call: Any) -> tuple[Any, Known]:
    """The constants with what one call adds to them, also as a kernel's argument."""
    c = replace(constants, **of_call)
    return c, Known(c)


@dataclass(frozen=True)
class Forward:
    """Everything that a forward kernel is compiled for.

    FLAT, SHORT: where the rows' sums are below FLAT times their largest p, or there are at most SHORT blocks,
    every block moves the reference. SHIFT, LIMIT: forward_kernel. ITEMS: how many items a program has room for. ADAPT: what
    other items needed decides as well, so that bits depend on timing. WAITS: one bit for each segment that has a flag.
    """

    BLOCK_Q: int
    BLOCK_K: int
    HEADDIM: int
    HEADDIM_V: int
    STAGES: int
    Q_REGS: bool
    STAGED: bool
    SEGMENTS: int = 1
    CARRIED: bool = False
    FINISH: bool = True
    EXACT: bool = False
    ADAPT: bool = True
    FLAT: float = 12.0
    SHORT: int = 8
    SHIFT: float = 8.0
    LIMIT: float = 2.0**94
    WAITS: int = 0
    ITEMS: int = 16
    SLOTS: int = 2
    REGS: int = 232
    COPY_REGS: int = 40

    @property
    def PASSES(self) -> int:
        """A second pass is there for what the optimistic reference got wrong."""
        return 1 if self.EXACT else 2


# (headdim, headdim_v) -> the constants of the forward kernel.
FORWARD: dict[tuple[int, int], Forward] = {
    (64, 64): Forward(128, 128, 64, 64, STAGES=3, Q_REGS=True, STAGED=True),
    (128, 128): Forward(128, 128, 128, 128, STAGES=2, Q_REGS=_Q_REGS, STAGED=True),
    (192, 128): Forward(128, 64, 256, 128, STAGES=2, Q_REGS=False, STAGED=False),
    (256, 256): Forward(128, 64, 256, 256, STAGES=2, Q_REGS=False, STAGED=False),
}


@dataclass(frozen=True)
class Backward:
    """Everything that a backward kernel is compiled for.

    STAGES: how many tiles of rows are there or on their way. PLACES: how many tiles of dQ wait to be added. FOLD: dS carries
    the softmax scale. DETERMINISTIC: dQ's parts are added in the order of the key blocks. WAITS: some segment has a flag.
    """

    HEADDIM: int
    BLOCK_Q: int
    STAGES: int
    PLACES: int
    FOLD: bool = True
    DETERMINISTIC: bool = False
    SEGMENTS: int = 1
    WAITS: bool = False


# headdim -> the constants of the backward kernel.
BACKWARD: dict[int, Backward] = {
    64: Backward(64, 128, STAGES=2, PLACES=1),
    128: Backward(128, 64, STAGES=2, PLACES=2),
}

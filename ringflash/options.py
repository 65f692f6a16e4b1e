"""Options that choose how attention is computed, never what it computes."""

from dataclasses import dataclass

CHOICES = {
    "transport": ("auto", "p2p", "ulysses"),
    "schedule": ("auto", "rotate", "direct", "hierarchical"),
    "check": ("first", "always", "never"),
    "kernel": ("auto", "reference", "triton", "hopper"),
}


@dataclass(frozen=True)
class Options:
    """How a ring runs. Every rank must pass the same.

    transport: "auto"; "p2p", blocks from rank to rank; "ulysses", all ranks exchange sequence for heads before and after, so
    that each attends all tokens with its share of heads. In a 2-D mesh (ring, heads) the ranks of a row do that, and blocks
    go round the ring: "auto" and "p2p" alike. schedule: the plan's generator ("auto", "rotate", "direct", "hierarchical").
    check: when ranks compare what they were called with: "first" (the first 16 calls of a group), "always", "never" (save for
    the very first call, so that ranks that chose differently find out).
    deterministic: the same inputs give the same bits. Without it so they do, but for kernel "hopper": the last bits of dQ,
    whose sum over keys is taken in the order that programs arrive, and those of out and lse where scores are too far apart for
    its optimistic softmax. Every path honours it.
    kernel: "auto"; "reference", plain torch; "triton", any GPU; "hopper", sm_90 (explain says whether its backward too).
    Raises ValueError for any other value.
    """

    transport: str = "auto"
    schedule: str = "auto"
    check: str = "first"
    deterministic: bool = False
    kernel: str = "auto"

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}: {name}={getattr(self, name)!r}")
        if not isinstance(self.deterministic, bool):
            raise TypeError(f"deterministic must be True or False: deterministic={self.deterministic!r}")

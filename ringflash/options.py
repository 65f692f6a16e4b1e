"""Options that choose how attention is computed, never what it computes."""

from dataclasses import dataclass

CHOICES = {
    "transport": ("auto", "p2p", "nvlink", "allgather", "ulysses"),
    "schedule": ("auto", "rotate", "direct", "hierarchical", "gather"),
    "check": ("first", "always", "never"),
    "kernel": ("auto", "reference", "triton", "hopper"),
}


@dataclass(frozen=True)
class Options:
    """How a ring runs. Every rank must pass the same.

    transport: what moves blocks. "p2p": sends and receives over NCCL or gloo, two blocks in flight. "nvlink": copy engines
    between the GPUs of one host, and one launch that attends keys as they arrive. "allgather": collectives, for small shards.
    "ulysses": no blocks move; all ranks exchange sequence for heads before and after, so that each attends all tokens with its
    share of heads. "auto" takes nvlink where the ranks' GPUs share memory and its buffers are allowed, else p2p (explain says
    why). In a 2-D mesh (ring, heads) the ranks of a row exchange sequence for heads, and "auto" and "p2p" alike send blocks
    round each column.
    On one rank nothing moves, and only options that contradict each other are refused.
    schedule: the plan's generator, "rotate", "direct" or "hierarchical" with p2p, "gather" with nvlink and allgather; "auto"
    takes what moves least.
    max_buffer_bytes: the most that a rank may keep to gather all keys and their gradients (explain says what that is).
    check: when ranks compare what they were called with: "first" (the first 16 calls of a group), "always", "never" (save for
    the very first call, so that ranks that chose differently find out).
    deterministic: the same inputs give the same bits. Without it so they do, but for kernel "hopper": the last bits of dQ,
    whose sum over keys is taken in the order that programs arrive, and those of out and lse where scores are too far apart for
    its optimistic softmax. Every path honours it.
    reproducible: deterministic, and a query's out and lse have the same bits for every ring size and layout, on one kind
    of machine with one version of torch and Triton. Every rank gathers all keys, and they are attended in order of their
    positions, in blocks that begin at fixed ones: by "allgather", which "auto" then takes, and by any kernel but "hopper". It
    is slower, and one rank goes the same way, so that its bits are not those of one rank without it. Gradients have the same
    bits from run to run; between ring sizes and layouts they differ by rounding.
    kernel: "auto"; "reference", plain torch; "triton", any GPU; "hopper", sm_90 (explain says whether its backward too).
    Raises ValueError for any other value.
    """

    transport: str = "auto"
    schedule: str = "auto"
    check: str = "first"
    deterministic: bool = False
    kernel: str = "auto"
    max_buffer_bytes: int = 16 << 30
    reproducible: bool = False

    @property
    def of_tile(self) -> dict[str, bool]:
        """What is asked of a tile besides its name, as tile.pick takes it."""
        return {"deterministic": self.deterministic or self.reproducible, "fixed": self.reproducible}

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if not isinstance(getattr(self, name), str) or getattr(self, name) not in choices:  # an array may equal a name
                raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}: {name}={getattr(self, name)!r}")
        for name in ("deterministic", "reproducible"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False: {name}={getattr(self, name)!r}")
        if isinstance(self.max_buffer_bytes, bool) or not isinstance(self.max_buffer_bytes, int) or self.max_buffer_bytes < 0:
            raise ValueError(f"max_buffer_bytes must be an int of at least 0: max_buffer_bytes={self.max_buffer_bytes!r}")

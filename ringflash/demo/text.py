"""The training text: Python's own language reference as bytes, which every Python carries in `pydoc_data.topics`."""

from pydoc_data.topics import topics

import torch
from torch import Tensor


def load_text() -> Tensor:
    """All help topics in alphabetical order as one uint8 vector (about 460,000 bytes)."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def draw_sequence(text: Tensor, *, seqlen: int, seed: int, step: int) -> Tensor:
    """The sequence of one training step: int64 (1, seqlen), the same on every rank for the same seed and step.

    Every rank draws the whole sequence and keeps its own shard: bytes are cheap, agreeing by message is not. A text
    shorter than the sequence is read again from its beginning.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    first = int(torch.randint(text.numel(), (), generator=generator))
    return text[(first + torch.arange(seqlen)) % text.numel()].long()[None]

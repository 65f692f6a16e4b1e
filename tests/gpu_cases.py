"""What the GPU tests share: masks, a case as `ringflash verify` takes it, and rings whose calls are not compared."""

from typing import Any

import torch

import ringflash as rf
from ringflash.cli.verify import Case, verify
from ringflash.launch.bootstrap import Session
from ringflash.transport.communicator import communicator

DOCUMENTS = (0, 3, 16, 130, 131, 700, 1025)
MASKS = {
    "full": rf.Mask(),
    "causal": rf.Mask(causal=True),
    "window": rf.Mask(causal=True, window=(100, None)),
    "two-sided window": rf.Mask(window=(5, 70)),
    "documents": rf.Mask(causal=True, documents=DOCUMENTS),
    "documents in a window": rf.Mask(causal=True, documents=DOCUMENTS, window=(33, None)),
    "prefix": rf.Mask(causal=True, prefix=200),
}


def case(**changes: object) -> Case:
    given = {
        "layout": "zigzag",
        "mask": MASKS["causal"],
        "seqlen": 1025,
        "batch": 1,
        "heads": (4, 2),
        "headdims": (64, 64),
        "dtype": "bfloat16",
        "schedule": "auto",
        "seed": 0,
    }
    return Case(**(given | changes))  # pyright: ignore[reportArgumentType]


def unchecked(transport: str = "auto", **options: Any) -> rf.ContextParallel:
    """A ring whose ranks compare no calls but the first, over a group of its own (the mode is the group's)."""
    group = torch.distributed.new_group()
    assert isinstance(group, torch.distributed.ProcessGroup)
    return rf.ContextParallel(group, options=rf.Options(check="never", transport=transport, **options))


def check(session: Session, chosen: Case) -> None:
    wrong = [line for line in verify(chosen, communicator(), session.device) if not line.good]
    assert not wrong, (chosen, wrong)


def ring_of(cp: rf.ContextParallel, tokens: int) -> tuple[Any, list[torch.Tensor]]:
    """A causal batch and this rank's bfloat16 q, k, v (8 heads on 2, 64)."""
    batch = cp.batch(tokens * cp.size, rf.Mask(causal=True))
    g = torch.Generator(device="cuda").manual_seed(cp.rank)
    made = [torch.randn(1, tokens, h, 64, device="cuda", generator=g).bfloat16().requires_grad_() for h in (8, 2, 2)]
    return batch, made

"""What a ring moves and holds, counted: sends of a pass, which blocks are needed, blocks that are held at a time."""

import weakref
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from ring_cases import Case, group_on, sent

import ringflash as rf
from ringflash import api
from ringflash.tile import pick
from ringflash.transport.blocks import Shapes


def count_sends(cases: list[Case], requires_grad: bool) -> list[tuple[list, list]]:
    """What this rank sends in forward and in backward of each case: sorted (to, elements, dtype)."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    counted = []
    for case in cases:
        layout, kv_layout = case.layouts(size)
        (q, k, v), _ = case.inputs()
        q, k, v = layout.part(q, rank), kv_layout.part(k, rank), kv_layout.part(v, rank)
        with sent() as forward:
            out = rf.ring_attention(
                q.requires_grad_(requires_grad),
                k,
                v,
                layout=layout,
                kv_layout=kv_layout,
                mask=case.mask,
                group=None if case.hosts is None else group_on(case.hosts),
                options=rf.Options(schedule=case.schedule),
            )
        with sent() as backward:
            if requires_grad:
                out.sum().backward()  # pyright: ignore[reportAttributeAccessIssue]
        counted.append((sorted(forward, key=str), sorted(backward, key=str)))
    return counted


def needs_of(case: Case, size: int) -> torch.Tensor:
    """bool (size, size): some query of a rank sees some key of a block, by the oracle's mask."""
    layout, kv_layout = case.layouts(size)
    ranks = range(size)
    sees = oracle.visible(case.mask, torch.arange(case.front + case.seqlen), torch.arange(case.seqlen_k)).any(0)
    at = [[sees[layout.positions(r)][:, kv_layout.positions(b)] for b in ranks] for r in ranks]
    return torch.tensor([[bool(x.any()) for x in row] for row in at])


class Alive:
    """Counts the blocks a rank has made room for and still holds, and the most there ever were."""

    def __init__(self) -> None:
        self.blocks: dict[str, list[weakref.ref]] = {"kv": [], "grads": []}
        self.most = {"kv": 0, "grads": 0}

    def watch(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any) -> Any:
            pair = make(*args)
            kind = "kv" if pair[0].dtype == torch.bfloat16 else "grads"
            self.blocks[kind] = [x for x in self.blocks[kind] if x() is not None] + [weakref.ref(pair[0])]
            self.most[kind] = max(self.most[kind], len(self.blocks[kind]))
            return pair

        return made


def most_blocks(schedule: str, fused: bool, hosts: tuple[int, ...], nheads_k: int = 2) -> dict[str, int]:
    """The most K/V blocks of others, and float32 dK/dV blocks, that one rank holds at a time in forward and backward; with as
    many key heads as query heads, 4, of rows and dQ."""
    cp = rf.ContextParallel(group_on(hosts), options=rf.Options(schedule=schedule))
    batch, alive = cp.batch(8 * cp.size), Alive()
    heads = (4, nheads_k, nheads_k)
    q, k, v = (torch.randn(1, batch.layout.lengths[cp.rank], n, 8).bfloat16().requires_grad_() for n in heads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Shapes, "empty", alive.watch(Shapes.empty))
        patch.setattr(api, "pick", lambda *args, **options: pick(*args, **options)._replace(fused_backward=fused))
        cp._comm.prepared.clear()  # with another tile
        batch.attention(q, k, v).sum().backward()
    return alive.most

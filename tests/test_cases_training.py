"""Cases that broke other ring-attention code, by their tags: positions and loss (E), groups (F), shapes and training (G)."""

import functools
import mmap
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from pool import Pools
from ring_cases import (
    CAUSAL,
    LAYOUTS,
    NAMES,
    SCHEDULES,
    Case,
    alone,
    check,
    exact,
    on_rank,
    run_cases,
    run_threads,
    sent,
    verdict,
)
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import ringflash as rf
from ringflash.tile import pick

EPS = torch.finfo(torch.float32).eps

# E: positions, loss (E4, E5 and E7 are in test_context)


def e1() -> list[list[int]]:
    cp, cu = rf.ContextParallel(layout="zigzag"), (0, 4, 8)
    batch = cp.batch(8, rf.Mask(causal=True, documents=cu), rf.layouts.per_document("zigzag", cu, 2))
    return [batch.positions(restart).tolist() for restart in (False, True)]


def test_e1_positions_of_documents_sharded_each(pools: Pools) -> None:
    assert pools.run(2, e1) == [[[0, 3, 4, 7], [0, 3, 0, 3]], [[1, 2, 5, 6], [1, 2, 1, 2]]]


@pytest.mark.parametrize("layout", NAMES)
def test_e3_positions_reach_the_end_whatever_the_shard(layout: str) -> None:
    places = getattr(rf.layouts, layout)(4000, 4)
    assert sorted(torch.cat([places.positions(r) for r in range(4)]).tolist()) == list(range(4000))


def test_e5_the_target_after_token_3_is_4(pools: Pools) -> None:
    targets = pools.run(2, shifted)
    assert targets[0][:4] == [1, 2, 3, 4]  # rank 0 of zigzag holds tokens 0-3 and 12-15
    assert targets[0][4:] == [13, 14, 15, -100]


def shifted() -> list[int]:
    return rf.ContextParallel().batch(16, rf.Mask(causal=True)).shift_labels(torch.arange(16)[None])[0].tolist()


class Tiny(torch.nn.Module):
    """Embedding, one attention layer with GQA, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv = torch.nn.Embedding(17, 32), torch.nn.Linear(32, 64)
        self.head = torch.nn.Linear(32, 17)

    def forward(self, tokens: Tensor, batch: rf.Batch) -> Tensor:
        x = self.embed(tokens) + torch.sin(batch.positions()[:, None] * torch.arange(1, 33) / 7.0)
        q, k, v = self.qkv(x).unflatten(2, (-1, 8)).split([4, 2, 2], 2)
        return self.head(x + batch.attention(q, k, v).flatten(2))


def sample(seqlen: int = 23) -> Tensor:
    return torch.randint(17, (2, seqlen), generator=torch.Generator().manual_seed(1))


def losses(model: torch.nn.Module, batch: rf.Batch, grad_reduce: Any) -> tuple[Tensor, Tensor]:
    targets = batch.shift_labels(sample())
    logits = model(batch.shard(sample()), batch)
    each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return batch.mean_loss(each.view_as(targets), targets, grad_reduce=grad_reduce)


def gradients(how: str) -> tuple[float, list[Tensor]]:
    """The global mean and the gradients under a reducer that averages (DDP), or sums."""
    model: torch.nn.Module = Tiny()
    reducer = DistributedDataParallel(model) if how == "ddp" else model
    loss, mean = losses(reducer, rf.ContextParallel().batch(23, rf.Mask(causal=True)), "mean" if how == "ddp" else "sum")
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    if how == "sum" and dist.is_initialized():
        for grad in grads:
            dist.all_reduce(grad)
    return float(mean), grads


@pytest.mark.parametrize("how", ["ddp", "sum"])
@pytest.mark.parametrize("size", [2, 4])
def test_e6_gradient_norms_equal_those_of_one_rank(pools: Pools, size: int, how: str) -> None:
    mean, right = gradients("sum")
    norm = torch.cat([x.flatten() for x in right]).norm()
    for found_mean, found in pools.run(size, gradients, how):
        assert found_mean == pytest.approx(mean, rel=8 * EPS)
        difference = torch.cat([(x - y).flatten() for x, y in zip(found, right, strict=True)]).norm()
        assert difference <= 64 * EPS * norm


# F: groups and communication


def attend_in(group: object, rank: int, size: int, case: Case) -> bool:
    """The case on a ring over that group: this rank's shards against the oracle."""
    layout, _ = case.layouts(size)
    found = on_rank(
        case, rank, size,
        lambda q, k, v: rf.ring_attention(q, k, v, layout=layout, mask=case.mask, group=group, return_lse=True),  # pyright: ignore
    )  # fmt: skip
    mine = [x.index_select(d, layout.positions(rank)) for x, d in zip(exact(case), (1, 2, 1, 1, 1), strict=True)]
    return all(oracle.rms(x, z) <= 32 * EPS * oracle.norm(z) + EPS for x, z in zip(found, mine, strict=True))


def alternate(times: int) -> bool:
    """Rings on the default group and on a sub-group in turn; rank 0 is in both."""
    rank, members = dist.get_rank(), [0, 2]
    group = dist.new_group(members)
    right = True
    for _ in range(times):
        right &= attend_in(None, rank, 4, Case(CAUSAL, 12, batch=1))
        if rank in members:
            right &= attend_in(group, members.index(rank), 2, Case(rf.Mask(), 10, batch=1))
    return right


def test_f2_default_and_sub_group_alternate(pools: Pools) -> None:
    assert all(pools.run(4, alternate, 100))


def two_rings() -> bool:
    rings = [[0, 2], [1, 3]]
    groups = [dist.new_group(ranks) for ranks in rings]  # all ranks, one order
    rank = dist.get_rank()
    group, ranks = groups[rank % 2], rings[rank % 2]
    return all(attend_in(group, ranks.index(rank), 2, Case(CAUSAL, n)) for n in (9, 16, 2))


def test_f3_two_rings_side_by_side(pools: Pools) -> None:
    assert all(pools.run(4, two_rings))


def after_groups_of_some() -> bool:
    """Ranks that know different numbers of groups still meet: sub-groups of some ranks, then a ring on all of them."""
    for ranks in ([0], [0, 1], [0], [2, 3]):
        dist.new_group(ranks)
    found = [attend_in(dist.new_group(), dist.get_rank(), 4, Case(CAUSAL, 9))]
    pair = dist.new_group([1, 3])
    if dist.get_rank() in (1, 3):
        found.append(attend_in(pair, dist.get_rank() // 2, 2, Case(CAUSAL, 9)))
    return all([*found, attend_in(dist.new_group(), dist.get_rank(), 4, Case(CAUSAL, 9))])


def test_f3_ranks_that_know_different_groups(pools: Pools) -> None:
    assert all(pools.run(4, after_groups_of_some))


def mesh_order(order: list[int]) -> tuple[bool, int]:
    """Sequence order is the mesh's, whatever the ranks' numbers; unshard and the loss go by it too."""
    mesh = DeviceMesh("cpu", order, mesh_dim_names=("cp",))
    place = order.index(dist.get_rank())
    right = attend_in(mesh, place, len(order), Case(CAUSAL, 14))
    cp = rf.ContextParallel(mesh)
    x = torch.arange(14.0)[None]
    batch = cp.batch(14, rf.Mask(causal=True))
    shard = batch.shard(x)
    return right and cp.rank == place and torch.equal(batch.unshard(shard), x), cp.rank


@pytest.mark.parametrize("order", [[2, 0, 1], [1, 2, 0], [0, 1, 2]])
def test_f3_mesh_in_any_order(pools: Pools, order: list[int]) -> None:
    assert pools.run(3, mesh_order, order) == [(True, order.index(rank)) for rank in range(3)]


def ring_of_a_2d_mesh() -> bool:
    mesh = DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("dp", "cp"))
    row = [3, 1] if dist.get_rank() in (3, 1) else [0, 2]
    with pytest.raises(ValueError, match=r"it has 2 dimensions named \('dp', 'cp'\); take one with mesh"):
        rf.ContextParallel(mesh)
    return attend_in(mesh["cp"], row.index(dist.get_rank()), 2, Case(CAUSAL, 14))


def test_f3_one_dimension_of_a_mesh(pools: Pools) -> None:
    assert all(pools.run(4, ring_of_a_2d_mesh))


def big_blocks() -> bool:
    """K and V blocks of 64 MiB, both ways, forward and backward; each row sees two keys, so that little is computed."""
    layout, mask = rf.layouts.contiguous(16, 2), rf.Mask(window=(1, 0))
    q = torch.ones(1, 8, 8192, 256, requires_grad=True)
    out = rf.ring_attention(q, q, q, layout=layout, mask=mask)
    assert isinstance(out, Tensor)
    assert q.numel() * 4 == 64 << 20
    out.backward(torch.ones_like(out))
    return bool((out == 1).all()) and q.grad is not None and bool(q.grad.isfinite().all())


def test_f4_blocks_of_64_mib_do_not_deadlock(pools: Pools) -> None:
    assert all(pools.run(2, big_blocks))


@pytest.mark.parametrize("mask", [CAUSAL, rf.Mask(causal=True, window=(3, 0)), rf.Mask(window=(0, 2))])
@pytest.mark.parametrize("size", [3, 4])
def test_f5_skipped_hops_agree_at_both_ends(pools: Pools, size: int, mask: rf.Mask) -> None:
    check(pools, size, [Case(mask, 40, layout, schedule=s) for layout in NAMES for s in SCHEDULES])


def as_local_tile(case: Case) -> tuple[bool, int]:
    """A ring of one over a process group: bits of the tile's own single launch, and what was sent."""
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    (q, k, v), (dout, dlse) = case.inputs()
    launches = pick("reference", q, v)
    at = torch.arange(case.seqlen)
    sees = oracle.visible(case.mask, at, at)[:1]
    begin = sees.int().argmax(-1).int()
    segment = launches.segment(k, v, begin, (begin + sees.sum(-1)).int())
    scale = q.shape[-1] ** -0.5
    out, lse = launches.forward(q, [segment], scale)
    dq, dk, dv = (torch.zeros(x.shape) for x in (q, k, v))
    launches.backward(dout, q, [segment], lse, launches.delta(dout, out, dlse), scale, dq, [(dk, dv)])
    layout, _ = case.layouts(1)
    with sent() as log:
        ring = on_rank(
            case, 0, 1,
            lambda *x: rf.ring_attention(*x, layout=layout, mask=case.mask, group=group, return_lse=True),  # pyright: ignore
        )  # fmt: skip
    want = out, lse, *(x.to(case.dtype) for x in (dq, dk, dv))
    return all(torch.equal(x, y) for x, y in zip(ring, want, strict=True)), len(log)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_f15_a_ring_of_one_is_the_local_tile_bit_for_bit(pools: Pools, dtype: torch.dtype) -> None:
    """Over a process group of one and of more, and without any; in one launch and without communication."""
    for mask in (rf.Mask(), CAUSAL, rf.Mask(causal=True, window=(5, 0)), rf.Mask(documents=(0, 10, 33))):
        case = Case(mask, 33, dtype=dtype)
        assert pools.run(2, as_local_tile, case) == [(True, 0)] * 2
        assert pools.run(1, as_local_tile, case) == [(True, 0)]
        for layout in LAYOUTS:
            ring = run_cases([Case(mask, 33, layout, dtype=dtype)])[0]
            assert all(torch.equal(x, y) for x, y in zip(ring, alone(case), strict=True))


# G: shapes


@pytest.mark.parametrize("heads", [(28, 7), (4, 1), (3, 3)])
@pytest.mark.parametrize("size", [2, 4])
def test_g2_head_counts(pools: Pools, size: int, heads: tuple[int, int]) -> None:
    check(pools, size, [Case(CAUSAL, 37, heads=heads, schedule=s) for s in SCHEDULES])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_g4_headdim_192_with_128(pools: Pools, dtype: torch.dtype) -> None:
    check(pools, 2, [Case(CAUSAL, 65, headdim=(192, 128), schedule=s, dtype=dtype) for s in SCHEDULES])


def huge_strides() -> bool:
    """Rows 2**29 elements apart over one lazily mapped allocation: the last ones lie past 2**31."""
    apart, rows = 2**29 + 8, 6
    memory = torch.frombuffer(mmap.mmap(-1, 2 * (apart * rows)), dtype=torch.bfloat16)
    x = memory.as_strided((1, rows, 2, 8), (0, apart, 8, 1))
    x.copy_(torch.randn(1, rows, 2, 8, generator=torch.Generator().manual_seed(dist.get_rank())))
    outs = []
    for y in (x, x.contiguous()):
        leaf = y.detach().requires_grad_()
        out = rf.ring_attention(leaf, leaf, leaf, layout=rf.layouts.zigzag(2 * rows, 2), mask=CAUSAL)
        assert isinstance(out, Tensor)
        outs.append(out)
    return torch.equal(*outs) and bool(outs[0].isfinite().all())


def test_g6_elements_past_2_to_the_31(pools: Pools) -> None:
    assert all(pools.run(2, huge_strides))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 4])
def test_g8_large_logits(pools: Pools, size: int, dtype: torch.dtype) -> None:
    """Gradients have the inputs' dtypes (the verdict sees to that); logits of hundreds."""
    check(pools, size, [Case(mask, 50, gain=8.0, dtype=dtype, schedule=s) for mask in (CAUSAL, rf.Mask()) for s in SCHEDULES])


@pytest.mark.slow(sample=3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_g9_rms_equals_the_single_kernels(size: int, dtype: torch.dtype) -> None:
    """No floor: many elements, so that a state that is rounded or normalised between steps would show."""
    case = Case(CAUSAL, 2048, "zigzag", batch=1, heads=(2, 1), headdim=(64, 64), dtype=dtype)
    assert not (wrong := verdict(case, run_threads(case, size), floor=0.0)), wrong


@pytest.mark.parametrize("size", [2, 3, 4])
def test_g11_causal_of_8_tokens_and_4_heads(pools: Pools, size: int) -> None:
    check(pools, size, [Case(CAUSAL, 8, layout, heads=(4, 4), schedule=s) for layout in LAYOUTS for s in SCHEDULES])


def overfit(steps: int) -> list[float]:
    """Losses of training on one fixed batch of 2."""
    model, batch = Tiny(), rf.ContextParallel().batch(23, rf.Mask(causal=True))
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(steps):
        loss, mean = losses(model, batch, "sum")
        optimizer.zero_grad()
        loss.backward()
        if dist.is_initialized():
            for p in model.parameters():
                dist.all_reduce(p.grad)
        optimizer.step()
        found.append(float(mean))
    return found


def test_g14_twenty_steps_of_overfitting(pools: Pools) -> None:
    right = overfit(20)
    assert right[-1] < 0.7 * right[0]
    bound = functools.partial(pytest.approx, rel=1024 * EPS)  # rounding differences grow from step to step
    assert pools.run(4, overfit, 20) == [bound(right)] * 4

"""Heads over ranks: Ulysses and heads inside a ring against the dense float64 oracle, what moves, and what is refused."""

import datetime
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pools
from ring_cases import CAUSAL, LAYOUTS, NAMES, SCHEDULES, Case, check, masks, mesh_of, run_cases, sent
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import ringflash as rf
from ringflash import api, heads
from ringflash.tile import pick
from ringflash.transport.p2p import P2P

LENGTHS = (1, 7, 33, 63, 100)
SIZES = (2, 3, 4)
HEADS = ((8, 2), (6, 3), (4, 1), (5, 5), (3, 3), (9, 3), (1, 1))  # whole, uneven, replicated; fewer than ranks
MESHES = ((2, 2), (1, 4), (4, 1))


def drawn(layout: str, seed: object, full: bool, **how: Any) -> list[Case]:
    """Every mask; without --full each at one length and with one number of heads."""
    draw = random.Random(f"{layout}{seed}")
    every = [(n, h) for n in LENGTHS for h in HEADS]
    chosen = [(name, pair) for name in masks(1) for pair in (every if full else [draw.choice(every)])]
    return [Case(masks(n)[name], n, layout, heads=h, **how) for name, (n, h) in chosen]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
def test_ulysses_equals_oracle(pools: Pools, full: bool, size: int, layout: str) -> None:
    check(pools, size, drawn(layout, size, full, transport="ulysses"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_heads_inside_a_ring_equal_oracle(pools: Pools, full: bool, schedule: str, layout: str) -> None:
    check(pools, 4, drawn(layout, schedule, full, mesh=(2, 2), schedule=schedule))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("size", SIZES)
def test_any_heads(pools: Pools, size: int, heads: tuple[int, int]) -> None:
    """Rounded once also where ranks share key heads: bfloat16 shows it."""
    dtypes = (torch.bfloat16, torch.float32)
    how = [{"transport": "ulysses"}, *({"mesh": mesh} for mesh in MESHES if size == 4)]
    check(pools, size, [Case(CAUSAL, 100, heads=heads, dtype=dtype, **x) for dtype in dtypes for x in how])


@pytest.mark.parametrize("mesh", [(2, 3), (3, 2)], ids=str)
def test_meshes_that_are_not_square(pools: Pools, mesh: tuple[int, int]) -> None:
    draw = random.Random(str(mesh))
    check(pools, 6, [Case(m, 63, draw.choice(LAYOUTS), heads=draw.choice(HEADS), mesh=mesh) for m in masks(63).values()])


SHAPES = [
    {"headdim": (24, 40)},
    {"headdim": (1, 1)},
    {"batch": 1},
    {"batch": 0},
    {"scale": -0.3},
    {"dtype": torch.float16},
    {"front": 5, "behind": 40},
    {"front": 20, "behind": -30},
    {"kv_layout": "striped"},
    {"front": 3, "kv_layout": "striped", "layout": "contiguous"},
    {"seqlen": 3, "layout": "contiguous"},  # some shards are empty
    {"seqlen": 0},
]


@pytest.mark.parametrize("how", [{"transport": "ulysses"}, {"mesh": (2, 2)}], ids=str)
def test_shapes_and_keys_that_lie_otherwise(pools: Pools, how: dict[str, Any]) -> None:
    check(pools, 4, [Case(CAUSAL, **{"heads": h, **how, **shape}) for shape in SHAPES for h in ((6, 3), (4, 2))])


def test_alone_it_is_the_kernel(pools: Pools) -> None:
    """Bit for bit, with and without a process group."""
    case = Case(CAUSAL, 100)
    ulysses = Case(CAUSAL, 100, transport="ulysses")
    for shards in (run_cases([ulysses]), pools.run(1, run_cases, [ulysses])[0]):
        assert all(torch.equal(x, y) for x, y in zip(shards[0], run_cases([case])[0], strict=True))


def test_contiguous_tokens_are_not_moved_about() -> None:
    assert heads.rows(rf.layouts.contiguous(41, 4), range(4)).order is None
    assert heads.rows(rf.layouts.zigzag(41, 4), range(1)).order is None
    assert heads.rows(rf.layouts.zigzag(41, 4), range(4)).order is not None


@pytest.mark.parametrize("name", NAMES)
def test_rows_apart_undo_rows_joined(name: str) -> None:
    layout = rf.layouts.per_document(name, (0, 5, 30, 41), 4)
    for first, n in ((0, 2), (2, 2), (0, 4)):
        rows = heads.rows(layout, range(first, first + n))
        positions = torch.cat([layout.positions(rank) for rank in range(first, first + n)])[:, None]  # batch of one
        joined = rows.joined(positions)
        assert torch.equal(joined[0], layout.merged(n).positions(first // n))
        assert torch.equal(torch.cat(rows.apart(joined)), positions)


def test_inner_rings_know_their_own_hosts() -> None:
    layout = rf.layouts.zigzag(40, 6)
    plan = heads.inner_plan(layout, CAUSAL, layout, size=2, rank=1, schedule="auto", hosts=(0, 0, 0, 1, 1, 2))
    assert (plan.layout, plan.hosts) == (layout.merged(2), (0, 1, 2))


def subsets(how: dict[str, Any], needs: list[str]) -> list[tuple[int, bool]]:
    """For each subset, a letter per rank or the same for all: transfers, and whether gradients are those of all three."""
    case = Case(CAUSAL, 33, heads=(6, 3), **how)
    rank, size = dist.get_rank(), dist.get_world_size()
    layout, _ = case.layouts(size)
    right = dict(zip("qkv", run_cases([case])[0][2:], strict=True))
    found = []
    for wanted in needs:
        mine = wanted.split("|")[rank] if "|" in wanted else wanted
        qkv, (dout, dlse) = case.inputs()
        leaves = {n: layout.part(x, rank).clone().requires_grad_(n in mine) for n, x in zip("qkv", qkv, strict=True)}
        options, group = rf.Options(transport=case.transport), mesh_of(case.mesh) if case.mesh else None
        with sent() as log:
            given = {"layout": layout, "mask": case.mask, "group": group, "return_lse": True, "options": options}
            outputs = rf.ring_attention(**leaves, **given)
            torch.autograd.backward(outputs, [layout.part(dout, rank), layout.part(dlse, rank, 2)])
        same = [x.grad is None if n not in mine else torch.equal(x.grad, right[n]) for n, x in leaves.items()]  # pyright: ignore
        found.append((len(log), all(same)))
    return found


@pytest.mark.parametrize("how", [{"transport": "ulysses"}, {"mesh": (2, 2)}], ids=str)
def test_any_subset_needs_gradients(pools: Pools, how: dict[str, Any]) -> None:
    """Also one that differs between ranks; what moves is the same for all of them."""
    for found in pools.run(4, subsets, how, ["q", "k", "v", "qkv", "q|k|v|qk", "k|k|k|v"]):
        assert all(right for _, right in found)
        assert len({transfers for transfers, _ in found}) == 1


# What moves


def moved(cases: list[Case], requires_grad: bool) -> list[tuple[list, list, rf.Explanation]]:
    """What this rank sends in forward and in backward of each case, and what explain says of it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    for case in cases:
        layout, _ = case.layouts(size)
        leaves = [layout.part(x, rank).clone().requires_grad_(requires_grad) for x in case.inputs()[0]]
        options = rf.Options(transport=case.transport, schedule=case.schedule)
        group = mesh_of(case.mesh) if case.mesh else None
        with sent() as forward:
            out = rf.ring_attention(*leaves, layout=layout, mask=case.mask, group=group, options=options)
        with sent() as backward:
            if requires_grad:
                out.sum().backward()  # pyright: ignore[reportAttributeAccessIssue]
        told = rf.explain(*leaves, layout=layout, mask=case.mask, rank=rank, mesh=case.mesh, options=options)
        found.append((forward, backward, told))
    return found


HOW: list[dict[str, Any]] = [
    {"transport": "ulysses"},
    {"mesh": (2, 2)},
    {"mesh": (2, 2), "schedule": "direct"},
    {"mesh": (4, 1)},
]
MOVED = [Case(CAUSAL, 63, heads=h, dtype=torch.bfloat16, **how) for h in HEADS for how in HOW]


def test_explain_counts_the_bytes_that_move(pools: Pools) -> None:
    for case, *ranks in zip(MOVED, *pools.run(4, moved, MOVED, True), strict=True):
        for forward, backward, told in ranks:
            sizes = [sum(n * dtype.itemsize for _, n, dtype in log) for log in (forward, backward)]
            blocks = sum(step.bytes_sent for step in told.steps)
            back_steps = told.backward_steps or told.steps
            going = sum(step.bytes_sent + step.grad_bytes_sent for step in back_steps)
            there, back = (told.heads.bytes_sent, told.heads.grad_bytes_sent) if told.heads else (0, 0)
            assert sizes == [there + blocks, back + going], case


def test_what_moves_does_not_depend_on_gradients(pools: Pools) -> None:
    with_grad, without = (pools.run(4, moved, MOVED, needed) for needed in (True, False))
    for a, b in zip(with_grad, without, strict=True):
        assert [forward for forward, *_ in a] == [forward for forward, *_ in b]


def count_exchanges() -> tuple[int, int]:
    """Batches of transfers that one call starts, forward and backward."""
    calls, exchange = [], P2P.exchange
    layout = rf.layouts.zigzag(24, dist.get_world_size())
    q, k, v = (torch.randn(1, layout.lengths[dist.get_rank()], 4, 8, requires_grad=True) for _ in range(3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(P2P, "exchange", lambda *args, **more: (calls.append(1), exchange(*args, **more))[1])
        out = rf.ring_attention(q, k, v, layout=layout, options=rf.Options(transport="ulysses"))
        forward = len(calls)
        out.sum().backward()  # pyright: ignore[reportAttributeAccessIssue]
    return forward, len(calls) - forward


def test_one_batch_of_transfers_each_way(pools: Pools) -> None:
    assert pools.run(3, count_exchanges) == [(2, 2)] * 3


# Meshes and their errors


def train(shape: tuple[int, int]) -> list[Tensor]:
    """A step of a training script on a mesh in an order of its own: (mean loss, whole output, whole gradient of x)."""
    mesh = DeviceMesh("cpu", torch.tensor([2, 0, 3, 1]).view(shape), mesh_dim_names=("ring", "heads"))
    cp = rf.ContextParallel(mesh)
    batch = cp.batch(37, rf.Mask(causal=True, documents=(0, 11, 37)))
    whole = torch.randn(2, 37, 3, 4, 8, generator=torch.Generator().manual_seed(3))
    x = batch.shard(whole).clone().requires_grad_()
    q, k, v = x.unbind(2)
    out = batch.attention(q, k, v)
    targets = batch.shift_labels(torch.arange(74).view(2, 37))
    loss, mean = batch.mean_loss(out.square().sum((2, 3)), targets, grad_reduce="sum")
    loss.backward()
    assert x.grad is not None
    batch.check_same(batch.unshard(x.grad), "gradient")
    return [mean, batch.unshard(out.detach()), batch.unshard(x.grad)]


def train_alone() -> list[Tensor]:
    batch = rf.ContextParallel().batch(37, rf.Mask(causal=True, documents=(0, 11, 37)))
    x = torch.randn(2, 37, 3, 4, 8, generator=torch.Generator().manual_seed(3)).requires_grad_()
    out = batch.attention(*x.unbind(2))
    targets = batch.shift_labels(torch.arange(74).view(2, 37))
    loss, mean = batch.mean_loss(out.square().sum((2, 3)), targets, grad_reduce="sum")
    loss.backward()
    assert x.grad is not None
    return [mean, out.detach(), x.grad]


@pytest.mark.parametrize("shape", MESHES)
def test_a_training_script_on_a_mesh(pools: Pools, shape: tuple[int, int]) -> None:
    wanted = train_alone()
    for found in pools.run(4, train, shape):
        torch.testing.assert_close(found, wanted)


def new_mesh(shape: tuple[int, int]) -> DeviceMesh:
    """With groups of its own, whose calls are compared from the first one on."""
    return DeviceMesh("cpu", torch.arange(4).view(shape), mesh_dim_names=("ring", "heads"))


def refused(shape: tuple[int, int], change: dict[str, Any], wrong: tuple[int, ...]) -> tuple[str, str]:
    """What a wrong call raises on this rank, and a good one after it."""
    mesh, told = new_mesh(shape), []
    q = torch.ones(1, 6, 2, 8)
    for more in (change if dist.get_rank() in wrong else {}, {}):
        try:
            rf.ring_attention(**{"q": q, "k": q, "v": q, "layout": "zigzag", "group": mesh, **more})
            told.append("")
        except (ValueError, TypeError, RuntimeError) as error:  # NotImplementedError is a RuntimeError
            told.append(f"{type(error).__name__}: {error}")
    return told[0], told[1]


ULYSSES = {"options": rf.Options(transport="ulysses")}


def made_with_ulysses() -> str:
    with pytest.raises(ValueError, match="transport='ulysses' must have all ranks") as error:
        rf.ContextParallel(new_mesh((2, 2)), options=rf.Options(transport="ulysses"))
    return str(error.value)


def test_a_context_says_so_when_it_is_made(pools: Pools) -> None:
    assert len(set(pools.run(4, made_with_ulysses))) == 1


def test_ulysses_over_a_ring_of_rows_is_refused(pools: Pools) -> None:
    for wrong, good in pools.run(4, refused, (2, 2), ULYSSES, (0, 1, 2, 3)):
        assert wrong.startswith("ValueError: transport='ulysses' must have all ranks in one exchange of heads: the group is a")
        assert good == ""
    assert pools.run(4, refused, (1, 4), ULYSSES, (0, 1, 2, 3)) == [("", "")] * 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"transport": "nvlink"},
            "transport='nvlink' needs one ring of all ranks: the mesh is 2 x 2; use a group",
        ),
        ({"transport": "allgather"}, "transport='allgather' needs one ring of all ranks: the mesh is 2 x 2; use"),
        ({"schedule": "gather"}, "transport 'p2p' keeps two blocks and does not gather"),
    ],
)
def test_what_meets_all_ranks_is_refused_where_a_mesh_has_several_rings(
    pools: Pools, options: dict[str, Any], words: str
) -> None:
    for wrong, good in pools.run(4, refused, (2, 2), {"options": rf.Options(**options)}, (0, 1, 2, 3)):
        assert wrong.startswith("NotImplementedError: ")
        assert words in wrong
        assert good == ""


def other_mesh(names: tuple[str, ...] | None, shape: tuple[int, ...]) -> list[str]:
    """What is said of a mesh that is hardly meant to share heads, before any rank waits for another."""
    mesh, x = DeviceMesh("cpu", torch.arange(4).view(shape), mesh_dim_names=names), torch.ones(1, 6, 2, 8)
    with pytest.raises(ValueError, match="group must be") as made:
        rf.ContextParallel(mesh)
    with pytest.raises(ValueError, match="group must be") as called:
        rf.ring_attention(x, x, x, layout="zigzag", group=mesh)
    return [str(made.value), str(called.value)]


@pytest.mark.parametrize(
    ("names", "shape", "found"),
    [
        (("dp", "cp"), (2, 2), "2 dimensions named ('dp', 'cp')"),
        (("heads", "ring"), (2, 2), "2 dimensions named ('heads', 'ring')"),
        (None, (2, 2), "2 dimensions without names"),
        (("dp", "ring", "heads"), (1, 2, 2), "3 dimensions named ('dp', 'ring', 'heads')"),
    ],
)
def test_only_meshes_named_ring_and_heads_share_heads(
    pools: Pools, names: tuple[str, ...] | None, shape: tuple[int, ...], found: str
) -> None:
    rule = "group must be a DeviceMesh of one dimension, or of two named ('ring', 'heads'), whose rows then share heads"
    assert pools.run(4, other_mesh, names, shape) == [[f"{rule}: it has {found}; take one with mesh['name']"] * 2] * 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (ULYSSES, "transport='ulysses' must have all ranks in one exchange"),
        ({"scale": "big"}, "scale must be a finite number"),
        ({"k": torch.ones(1, 5, 2, 8)}, "k and v must have the same seqlen_k"),
    ],
)
def test_a_mistake_of_one_rank_is_an_error_on_all(pools: Pools, change: dict[str, Any], words: str) -> None:
    for rank, (wrong, good) in enumerate(pools.run(4, refused, (2, 2), change, (2,))):
        assert wrong.startswith("ValueError: " if rank == 2 else "RuntimeError: rank 2 of the ring was called wrongly")
        assert words in wrong
        assert good == ""


def test_ranks_that_differ_are_told(pools: Pools) -> None:
    x = torch.ones(1, 6, 4, 8)
    for wrong, good in pools.run(4, refused, (2, 2), {"q": x, "k": x, "v": x}, (3,)):
        assert wrong.startswith("ValueError: nheads_q must be the same on every rank of the ring: rank 0 has 2, rank 3 has 4")
        assert good == ""


def kernel_fails(way: str) -> str:
    """Rank 1's kernel raises between the two exchanges of a pass; what this rank hears of it."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=3))
    assert isinstance(group, dist.ProcessGroup)

    def broken(*args: object, **more: object) -> None:
        raise MemoryError("no room")

    def choose(*args: Any, **options: Any) -> Any:
        tile = pick(*args, **options)
        return tile._replace(**{way: broken}) if dist.get_rank() == 1 else tile

    def call() -> None:
        x = torch.ones(1, 6, 2, 8, requires_grad=True)
        out = rf.ring_attention(x, x, x, layout="zigzag", group=group, options=rf.Options(transport="ulysses"))
        out.sum().backward()  # pyright: ignore[reportAttributeAccessIssue]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "pick", choose)
        with pytest.raises((MemoryError, RuntimeError)) as error:
            call()
    return f"{error.type.__name__}: {error.value}"


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_a_rank_whose_kernel_fails_is_named(pools: Pools, way: str) -> None:
    other, failed = pools.run(2, kernel_fails, way)
    assert failed == "MemoryError: no room"
    assert other.startswith("ExchangeError: ")
    assert "rank 1 raised in its call 1: no room" in other

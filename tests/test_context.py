"""ContextParallel and Batch: shards and back, positions, labels, the loss that is scaled right, other masks, wrong samples."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from pool import Pools
from ring_cases import CAUSAL, LAYOUTS, make_layout
from torch import Tensor

import ringflash as rf

SIZES = (1, 2, 4)
DOCUMENTS = (0, 4, 4, 11, 21)
ROWS = ((0, 4, 21), (0, 0, 9, 10, 21))
PACKED = rf.Mask(causal=True, documents=DOCUMENTS)
SEQLEN = 21
IGNORED = -100


def a_batch(layout: str = "zigzag", mask: rf.Mask = PACKED, seqlen: int = SEQLEN) -> rf.Batch:
    cp = rf.ContextParallel()
    return cp.batch(seqlen, mask, make_layout(layout, seqlen, cp.size, mask))


# Shards


def round_trips(layout: str) -> dict[str, bool]:
    batch, found = a_batch(layout), {}
    rank = batch.cp.rank
    for dim, shape in ((0, (21,)), (1, (2, 21)), (1, (3, 21, 2, 5)), (-2, (2, 3, 21, 4)), (-1, (3, 21))):  # E4: [3, S]
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
            x = (torch.arange(torch.Size(shape).numel()).reshape(shape) % 251).to(dtype)
            shard = batch.shard(x, dim)
            right = torch.equal(shard, x.index_select(dim, batch.layout.positions(rank)))
            found[f"{shape} {dtype}"] = right and torch.equal(batch.unshard(shard, dim), x)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
def test_e4_shard_and_unshard(pools: Pools, size: int, layout: str) -> None:
    for found in pools.run(size, round_trips, layout):
        assert all(found.values()), found


def unshard_gradient(layout: str) -> tuple[Tensor, Tensor]:
    """The local loss weighs the whole sequence with weights of this rank's own: (gradient of the shard, the weights)."""
    batch = a_batch(layout)
    y = batch.shard(torch.ones(2, SEQLEN, 3)).clone().requires_grad_()
    weights = torch.randn(2, SEQLEN, 3, generator=torch.Generator().manual_seed(batch.cp.rank))
    (batch.unshard(y) * weights).sum().backward()
    assert y.grad is not None
    return y.grad, weights


@pytest.mark.parametrize("layout", ["zigzag", "per_document(striped)"])
@pytest.mark.parametrize("size", SIZES)
def test_gradient_of_unshard_is_that_of_the_sum_of_losses(pools: Pools, size: int, layout: str) -> None:
    told = pools.run(size, unshard_gradient, layout)
    total = torch.stack([weights for _, weights in told]).sum(0)
    for rank, (grad, _) in enumerate(told):
        at = make_layout(layout, SEQLEN, size, PACKED).positions(rank)
        torch.testing.assert_close(grad, total[:, at])


def short_unshard() -> list[str]:
    batch, told = a_batch(), []
    for call in (lambda: batch.unshard(torch.ones(2, SEQLEN + 1)), lambda: batch.shard(torch.ones(2, SEQLEN - 1))):
        with pytest.raises(ValueError, match="must hold") as error:
            call()
        told.append(str(error.value))
    return told


def test_wrong_lengths_are_refused(pools: Pools) -> None:
    for unshard, shard in pools.run(2, short_unshard):
        assert "y must hold this rank's tokens along dim=1" in unshard
        assert "y.shape=(2, 22)" in unshard
        assert "x must hold the whole sequence along dim=1" in shard
        assert "x.shape=(2, 20)" in shard


# Positions and labels


def positions(layout: str, mask: rf.Mask, restart: bool) -> Tensor:
    return a_batch(layout, mask).positions(restart)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
def test_positions(pools: Pools, size: int, layout: str) -> None:
    told = pools.run(size, positions, layout, PACKED, False)
    assert sorted(torch.cat(told).tolist()) == list(range(SEQLEN))
    starts = torch.tensor([max(b for b in DOCUMENTS if b <= p) for p in range(SEQLEN)])
    for plain, restarted in zip(told, pools.run(size, positions, layout, PACKED, True), strict=True):
        assert plain.dtype == torch.int64
        assert torch.equal(restarted, plain - starts[plain])


def test_restarted_positions_per_batch_row(pools: Pools) -> None:
    mask = rf.Mask(documents=ROWS)
    plain, restarted = (pools.run(2, positions, "zigzag", mask, restart) for restart in (False, True))
    for p, r in zip(plain, restarted, strict=True):
        right = [[int(x) - max(b for b in row if b <= x) for x in p] for row in ROWS]
        assert r.tolist() == right


def labels_of(layout: str, mask: rf.Mask) -> tuple[Tensor, Tensor]:
    batch = a_batch(layout, mask)
    labels = torch.arange(2 * SEQLEN).reshape(2, SEQLEN)
    return batch.positions(), batch.shift_labels(labels, IGNORED)


@pytest.mark.parametrize("mask", [CAUSAL, PACKED, rf.Mask(causal=True, documents=ROWS)], ids=["one", "packed", "rows"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_e5_labels_are_shifted_before_sharding(pools: Pools, layout: str, mask: rf.Mask) -> None:
    rows = mask.documents or (0, SEQLEN)
    rows = rows if isinstance(rows[0], tuple) else (rows, rows)
    for at, targets in pools.run(3, labels_of, layout, mask):
        for row in range(2):
            last = [p + 1 in rows[row] for p in at.tolist()]
            right = [IGNORED if end else row * SEQLEN + p + 1 for p, end in zip(at.tolist(), last, strict=True)]
            assert targets[row].tolist() == right


def test_labels_of_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"labels must be a global tensor \(batch, seqlen=21\): labels.shape=\(2, 20\)"):
        a_batch().shift_labels(torch.zeros(2, 20))
    with pytest.raises(ValueError, match=r"labels.shape=\(21,\)"):
        a_batch().shift_labels(torch.zeros(21))
    with pytest.raises(ValueError, match=r"one per batch row.*2 lists.*labels.shape=\(3, 21\)"):
        a_batch(mask=rf.Mask(documents=ROWS)).shift_labels(torch.zeros(3, SEQLEN, dtype=torch.int64))


# The loss


def loss_parts(valid: list[int], grad_reduce: str, wide: bool) -> dict[str, Any]:
    """Per-token losses w * value at each position; targets are valid at some. wide: rings of two inside a world of four."""
    group, data = None, 0
    if wide:
        rings = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        data = dist.get_rank() // 2
        group = rings[data]
        assert isinstance(group, dist.ProcessGroup)
    cp = rf.ContextParallel(group, layout="contiguous")
    batch = cp.batch(16, rf.Mask(causal=True))
    w = torch.ones((), requires_grad=True)
    value = torch.arange(16.0)[None] + 100 * data
    targets = torch.full((1, 16), IGNORED)
    targets[:, valid if not data else valid[:1]] = 5
    losses = batch.shard(value) * w + torch.where(batch.shard(targets) == IGNORED, torch.nan, 0.0)
    reducer = dist.group.WORLD if wide else None
    loss, mean = batch.mean_loss(losses, batch.shard(targets), grad_reduce=grad_reduce, reducer=reducer)  # pyright: ignore
    loss.backward()
    return {"grad": float(w.grad) if w.grad is not None else None, "mean": float(mean), "detached": not mean.requires_grad}


@pytest.mark.parametrize("grad_reduce", ["mean", "sum"])
@pytest.mark.parametrize("valid", [[0, 5, 9], [12, 13, 14, 15], list(range(16)), []], ids=["some", "last", "all", "none"])
@pytest.mark.parametrize("size", SIZES)
def test_e7_mean_loss(pools: Pools, size: int, valid: list[int], grad_reduce: str) -> None:
    """The reducer's result over the ranks' gradients is the gradient of the token-weighted mean, also where a rank has none.

    NaN where the target is ignored reaches neither value."""
    told = pools.run(size, loss_parts, valid, grad_reduce, False)
    mean = sum(valid) / max(1, len(valid))
    reduced = sum(t["grad"] for t in told) / (size if grad_reduce == "mean" else 1)
    assert all(t["detached"] and t["mean"] == pytest.approx(mean) for t in told)
    assert reduced == pytest.approx(mean)


@pytest.mark.parametrize("grad_reduce", ["mean", "sum"])
def test_mean_loss_where_the_reducer_is_larger_than_the_ring(pools: Pools, grad_reduce: str) -> None:
    valid = [3, 8, 9]
    told = pools.run(4, loss_parts, valid, grad_reduce, True)
    mean = (sum(valid) + 100 + valid[0]) / 4
    assert all(t["mean"] == pytest.approx(mean) for t in told)
    assert sum(t["grad"] for t in told) / (4 if grad_reduce == "mean" else 1) == pytest.approx(mean)


def test_mean_loss_refuses() -> None:
    batch, losses = rf.ContextParallel().batch(4, rf.Mask(causal=True)), torch.ones(1, 4)
    with pytest.raises(ValueError, match="grad_reduce must be 'mean' or 'sum': grad_reduce='avg'"):
        batch.mean_loss(losses, losses.long(), grad_reduce="avg")  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ValueError, match=r"one shape \(use reduction='none'\): per_token_loss.shape=\(\), targets.shape=\(1, 4\)"
    ):
        batch.mean_loss(losses.mean(), losses.long())
    with pytest.raises(ValueError, match=r"targets must be this rank's, \(batch, 4\) or flat"):
        batch.mean_loss(torch.ones(1, 8), torch.ones(1, 8).long())
    with pytest.raises(TypeError, match=r"per_token_loss must be a torch\.Tensor: per_token_loss is a float"):
        batch.mean_loss(1.0, losses)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("call", ["shard", "unshard", "shift_labels", "check_same"])
def test_what_is_no_tensor_is_refused_in_words(call: str) -> None:
    with pytest.raises((TypeError, ValueError), match=r"must be a (torch\.Tensor|global tensor)"):
        getattr(a_batch(), call)([1])


def mode_after_construction() -> list[str]:
    """What each rank is told when the ranks construct differently, or one of them wrongly."""
    wrong = dist.get_rank() == 1
    told = []
    for kwargs in ({"layout": "striped"}, {"options": rf.Options(check="never")}, {"layout": "diagonal"}):
        with pytest.raises((ValueError, RuntimeError)) as error:
            rf.ContextParallel(dist.new_group(), **(kwargs if wrong else {}))  # pyright: ignore
        told.append(str(error.value))
    return told


def test_construction_is_compared(pools: Pools) -> None:
    for layout, options, wrong in pools.run(2, mode_after_construction):
        assert layout.startswith("layout must be the same on every rank")
        assert options.startswith("options must be the same on every rank")
        assert "layout must be one of" in wrong


# Attention


def attention(layout: str) -> list[Tensor]:
    """The batch's own mask, and one that overrides it; a scale."""
    batch = a_batch(layout)
    q, k, v = (batch.shard(x) for x in inputs())
    window = rf.Mask(causal=True, window=(3, 0))
    return [batch.attention(q, k, v), batch.attention(q, k, v, mask=window), batch.attention(q, k, v, scale=1.0)]


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, SEQLEN, heads, 8, generator=generator) for heads in (4, 2, 2)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
def test_attention(pools: Pools, size: int, layout: str) -> None:
    at = torch.arange(SEQLEN)
    sees = [oracle.visible(mask, at, at) for mask in (PACKED, rf.Mask(causal=True, window=(3, 0)), PACKED)]
    right = [oracle.attention(*inputs(), sees=s, scale=scale)[0] for s, scale in zip(sees, (None, None, 1.0), strict=True)]
    for rank, told in enumerate(pools.run(size, attention, layout)):
        mine = make_layout(layout, SEQLEN, size, PACKED).positions(rank)
        for x, z in zip(told, right, strict=True):
            assert oracle.rms(x, z[:, mine]) <= 8 * torch.finfo(torch.float32).eps * oracle.norm(z)


# What a caller can get wrong


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({"layout": "zig"}, ValueError, "layout must be one of .*layout='zig'"),
        ({"layout": rf.layouts.zigzag(8, 1)}, TypeError, "layout must be .*name"),
        ({"options": None}, TypeError, "options must be an rf.Options: options=None"),
        (
            {"group": "world"},
            TypeError,
            "group must be None, a ProcessGroup or a DeviceMesh: group='world' \\(a layout goes into layout=",
        ),
        ({"group": -100}, TypeError, "is this rank a member"),
    ],
)
def test_context_parallel_refuses(kwargs: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        rf.ContextParallel(**kwargs)


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({"seqlen": -1}, ValueError, r"seqlen must be in 0 \.\.\. 2\*\*40: seqlen=-1"),
        ({"seqlen": 8.0}, TypeError, "seqlen must be an int: seqlen=8.0"),
        ({"seqlen": 8, "layout": "zig"}, ValueError, "layout='zig'"),
        ({"seqlen": 8, "layout": 3}, TypeError, "layout must be .*layout=3"),
        (
            {"seqlen": 8, "layout": rf.layouts.zigzag(9, 1)},
            ValueError,
            "layout must be for seqlen=8 and ring size 1: .*seqlen=9",
        ),
        ({"seqlen": 8, "layout": rf.layouts.zigzag(8, 2)}, ValueError, "ring size 1: .*size=2"),
        ({"seqlen": 8, "mask": None}, TypeError, "mask must be an rf.Mask: mask=None"),
        ({"seqlen": 8, "mask": rf.Mask(documents=(0, 7))}, ValueError, "last entry is 7, seqlen=8"),
    ],
)
def test_batch_refuses(kwargs: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        rf.ContextParallel().batch(**kwargs)


def different_samples(which: str) -> str:
    batch = rf.ContextParallel().batch(16, rf.Mask(causal=True))
    x = torch.arange(32.0).reshape(2, 16)
    batch.check_same(x)
    if dist.get_rank() == 2:
        x = {"value": x + (x == 5), "sign of zero": x * torch.where(x == 0, -1, 1), "dtype": x.double(), "shape": x[:1]}[which]
    try:
        batch.check_same(x, "tokens")
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("which", ["value", "sign of zero", "dtype", "shape"])
def test_f8_different_samples_in_one_ring_can_be_detected(pools: Pools, which: str) -> None:
    words = "tokens must be the same on every rank of the ring: rank 0 has bits "
    assert all(told.startswith(words) and ", rank 2 has bits " in told for told in pools.run(3, different_samples, which))


def same_samples() -> None:
    batch = rf.ContextParallel().batch(16, rf.Mask(causal=True))
    for x in (torch.tensor(3), torch.zeros(0), torch.ones(4, 4).T, torch.ones(3, dtype=torch.bfloat16, requires_grad=True)):
        batch.check_same(x)


@pytest.mark.parametrize("size", SIZES)
def test_check_same_takes_any_tensor(pools: Pools, size: int) -> None:
    pools.run(size, same_samples)


# Collectives besides attention


def one_rank_wrong(call: str) -> str:
    """What each rank is told when rank 1 alone makes the mistake."""
    batch = rf.ContextParallel(dist.new_group()).batch(SEQLEN, PACKED)  # pyright: ignore[reportArgumentType]
    tokens = batch.layout.lengths[batch.cp.rank]
    wrong = batch.cp.rank == 1
    y, loss, targets = torch.ones(2, tokens, 3), torch.ones(2, tokens), torch.zeros(2, tokens, dtype=torch.int64)
    calls: dict[str, Callable[[], object]] = {
        "unshard length": lambda: batch.unshard(y[:, 1:] if wrong else y),
        "unshard dim": lambda: batch.unshard(y, dim=7 if wrong else 1),
        "unshard dtype": lambda: batch.unshard(y.half() if wrong else y),
        "unshard other dimensions": lambda: batch.unshard(y[..., :2] if wrong else y),
        "loss shape": lambda: batch.mean_loss(loss[:1] if wrong else loss, targets),
        "loss grad_reduce": lambda: batch.mean_loss(loss, targets, grad_reduce="sum" if wrong else "mean"),
        "other call": lambda: batch.unshard(y) if wrong else batch.mean_loss(loss, targets),
    }
    with pytest.raises((ValueError, RuntimeError)) as told:
        calls[call]()
    batch.unshard(y)  # and the ring goes on
    return str(told.value)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("unshard length", "y must hold this rank's tokens"),
        ("unshard dim", "dim must be a dimension of y: dim=7"),
        ("unshard dtype", "dtype must be the same on every rank"),
        ("unshard other dimensions", "other dimensions must be the same on every rank"),
        ("loss shape", "per_token_loss and targets must have one shape"),
        ("loss grad_reduce", "grad_reduce must be the same on every rank"),
        ("other call", "every rank of the ring must make the same calls in the same order"),
    ],
)
def test_a_mistake_of_one_rank_is_told_to_all(pools: Pools, call: str, words: str) -> None:
    for told in pools.run(2, one_rank_wrong, call):
        assert words in told


def copies() -> bool:
    """A copy of a model that holds a ring talks over the same ring."""
    model = torch.nn.Linear(2, 2)
    model.cp = rf.ContextParallel()  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="ContextParallel cannot be pickled: it holds process groups"):
        pickle.dumps(model.cp)
    return copy.deepcopy(model).cp is model.cp


def test_copies_share_the_ring(pools: Pools) -> None:
    assert all(pools.run(2, copies))
    assert copies()


def test_what_is_printed_says_what_it_is() -> None:
    cp = rf.ContextParallel()
    assert repr(cp) == "ContextParallel(rank=0, size=1, layout='zigzag')"
    assert repr(cp.batch(8, CAUSAL)).startswith("Batch(rank 0 of Layout(zigzag, seqlen=8, size=1), Mask(causal=True")


def test_a_launched_process_without_a_group_is_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(RuntimeWarning, match="WORLD_SIZE=2, but torch.distributed is not initialised: this rank attends alone"):
        rf.ContextParallel()

"""Gradients as a caller meets them: subsets, modes, autocast, views, double backward, checkpoints, micro-batches."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from pool import Pools
from ring_cases import CAUSAL, Case, exact, run_cases, sent
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ringflash as rf

SIZES = (1, 2, 4)
CASE = Case(CAUSAL, 33, "zigzag")
EPS = torch.finfo(torch.float32).eps


def place() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def local() -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """This rank's q, k, v and the gradients of out and lse."""
    rank, size = place()
    layout, _ = CASE.layouts(size)
    (q, k, v), (dout, dlse) = CASE.inputs()
    parts = layout.part(q, rank), layout.part(k, rank), layout.part(v, rank)
    return parts, (layout.part(dout, rank), layout.part(dlse, rank, 2))


def attend(*qkv: Tensor, **kwargs: Any) -> Any:
    q, k, v = qkv
    return rf.ring_attention(q, k, v, layout=CASE.layouts(place()[1])[0], mask=CASE.mask, **kwargs)


def leaves(needs: str = "qkv") -> list[Tensor]:
    return [x.clone().requires_grad_(name in needs) for name, x in zip("qkv", local()[0], strict=True)]


def reference() -> dict[str, Tensor]:
    """The plain result of this rank: what every other way to ask for it must give, bit for bit."""
    return dict(zip(("out", "lse", "q", "k", "v"), run_cases([CASE])[0], strict=True))


def shared(pools: Pools, size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """fn on every rank of a ring; a ring of one without any process group runs here."""
    return pools.run(size, fn, *args) if size > 1 else [fn(*args)]


def close(x: Tensor, exact: Tensor) -> bool:
    """Equal up to float32 rounding."""
    return oracle.rms(x, exact.double()) <= 16 * EPS * oracle.norm(exact.double())


# Subsets


def subsets(needs: list[str]) -> list[tuple[int, bool]]:
    """For each subset, a letter per rank or the same for all: hops of forward and backward, and whether gradients are right."""
    whole, found = reference(), []
    rank, _ = place()
    for wanted in needs:
        mine = wanted.split("|")[rank] if "|" in wanted else wanted
        q, k, v = leaves(needs=mine)
        with sent() as log:
            out, lse = attend(q, k, v, return_lse=True)
            torch.autograd.backward([out, lse], list(local()[1]))
        grads = {name: x.grad for name, x in zip("qkv", (q, k, v), strict=True)}
        right = all((g is None) if n not in mine else (g is not None and torch.equal(g, whole[n])) for n, g in grads.items())
        found.append((len(log), right))
    return found


SUBSETS = ["q", "k", "v", "qk", "kv", "qv", "qkv"]
MIXED = {1: [], 2: ["q|k", "v|qkv", "k|v"], 4: ["q|k|v|qk", "qkv|q|q|q", "k|k|k|v"]}


@pytest.mark.parametrize("size", SIZES)
def test_b11_any_subset_needs_gradients(pools: Pools, size: int) -> None:
    """Also one that differs between ranks; the hops are the same for all of them."""
    for found in shared(pools, size, subsets, SUBSETS + MIXED[size]):
        assert all(right for _, right in found)
        assert len({hops for hops, _ in found}) == 1


def grad_of(wanted: str) -> bool:
    whole, (dout, dlse) = reference(), local()[1]
    inputs = dict(zip("qkv", leaves(), strict=True))
    outputs = attend(*inputs.values(), return_lse=True)
    grads = torch.autograd.grad(outputs, [inputs[name] for name in wanted], [dout, dlse])
    return all(torch.equal(g, whole[name]) for name, g in zip(wanted, grads, strict=True))


@pytest.mark.parametrize("wanted", ["q", "k", "v", "vk", "qkv"])
@pytest.mark.parametrize("size", SIZES)
def test_autograd_grad(pools: Pools, size: int, wanted: str) -> None:
    assert all(shared(pools, size, grad_of, wanted))


def one_output(which: str) -> list[Tensor]:
    """Gradients where only out or only lse reaches the loss; on odd ranks nothing but 0 * out does."""
    q, k, v = leaves()
    out, lse = attend(q, k, v, return_lse=True)
    x, grad = (out, local()[1][0]) if which == "out" else (lse, local()[1][1])
    if place()[0] % 2:
        x, grad = 0 * out, torch.ones_like(out)
    x.backward(grad)
    return [q.grad, k.grad, v.grad]  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("which", ["out", "lse"])
@pytest.mark.parametrize("size", SIZES)
def test_one_output_reaches_the_loss(pools: Pools, size: int, which: str) -> None:
    layout, _ = CASE.layouts(size)
    qkv, grads = CASE.inputs()
    grads = [torch.zeros_like(x) for x in grads]
    for rank in range(0, size, 2):
        at = layout.positions(rank)
        i, dim = (0, 1) if which == "out" else (1, 2)
        grads[i].index_copy_(dim, at, CASE.inputs()[1][i].index_select(dim, at))
    sees = oracle.visible(CASE.mask, torch.arange(33), torch.arange(33))
    right = oracle.results(qkv, (grads[0], grads[1]), sees)
    for rank, found in enumerate(shared(pools, size, one_output, which)):
        for x, z in zip(found, (right.dq, right.dk, right.dv), strict=True):
            assert close(x, layout.part(z, rank)) or oracle.rms(x, layout.part(z, rank)) < EPS


# Modes


def modes() -> dict[str, bool]:
    whole, ((q, k, v), _) = reference(), local()
    found = {}
    for name, mode in (("no_grad", torch.no_grad()), ("inference", torch.inference_mode())):
        with mode:
            out, lse = attend(*leaves(), return_lse=True)
            found[name] = torch.equal(out, whole["out"]) and torch.equal(lse, whole["lse"]) and not out.requires_grad
    found["no leaf needs one"] = not attend(q, k, v).requires_grad
    with torch.inference_mode():
        made_there = [x.clone() for x in (q, k, v)]
    found["inference tensors"] = torch.equal(attend(*made_there), whole["out"])
    again = leaves()  # after inference mode, with the same plan
    attend(*again).sum().backward()
    found["training after inference"] = all(x.grad is not None for x in again)
    return found


@pytest.mark.parametrize("size", SIZES)
def test_modes(pools: Pools, size: int) -> None:
    for found in shared(pools, size, modes):
        assert all(found.values()), found


def autocast() -> dict[str, bool]:
    """float32 leaves under bf16 autocast, backward outside of it, against bf16 inputs."""
    (_, (dout, _)), half = local(), [x.to(torch.bfloat16).requires_grad_() for x in local()[0]]
    right = attend(*half)
    right.backward(dout.bfloat16())
    full = leaves()
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(*full)
        mixed = attend(half[0].detach(), full[1].detach(), full[2].detach())
    out.backward(dout.bfloat16())
    return {
        "dtype": out.dtype == torch.bfloat16,
        "out": torch.equal(out, right) and torch.equal(mixed, right),
        "gradients": all(x.grad is not None and torch.equal(x.grad, y.grad.float()) for x, y in zip(full, half, strict=True)),  # pyright: ignore
        "gradients' dtype": all(x.grad is not None and x.grad.dtype == torch.float32 for x in full),
    }


@pytest.mark.parametrize("size", SIZES)
def test_autocast_with_backward_outside(pools: Pools, size: int) -> None:
    for found in shared(pools, size, autocast):
        assert all(found.values()), found


def test_autocast_leaves_float64_alone() -> None:
    """As torch's attention does: so it is refused here like anywhere else, not rounded in silence."""
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match="float64"):
        attend(*(x.double() for x in local()[0]))


# Views


def views(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Sequence[Tensor]]:
    """The same values under other strides."""

    def heads_first(x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    def spread(x: Tensor) -> Tensor:
        return torch.stack([x, torch.full_like(x, torch.nan)], -1).flatten(-2)[..., ::2]

    packed = torch.cat([q.flatten(2), k.flatten(2), v.flatten(2)], 2)
    a, b, c = (x.flatten(2).shape[2] for x in (q, k, v))
    unpacked = [y.unflatten(2, x.shape[2:]) for y, x in zip(packed.split([a, b, c], 2), (q, k, v), strict=True)]
    sliced = torch.cat([k, k.new_full(k.shape, torch.nan)], 2)[:, :, : k.shape[2]]
    return {
        "heads first": (heads_first(q), heads_first(k), heads_first(v)),
        "last dimension spread": (spread(q), spread(k), spread(v)),
        "packed": unpacked,
        "head slice": (q, sliced, v),
        "last dimension first": tuple(x.movedim(3, 0).contiguous().movedim(0, 3) for x in (q, k, v)),
    }


def through_views() -> dict[str, bool]:
    whole, found = reference(), {}
    for name in views(*local()[0]):
        inputs = leaves()
        out, lse = attend(*views(*inputs)[name], return_lse=True)
        torch.autograd.backward([out, lse], list(local()[1]))
        right = torch.equal(out, whole["out"]) and torch.equal(lse, whole["lse"])
        found[name] = right and all(
            x.grad is not None and torch.equal(x.grad, whole[n]) for n, x in zip("qkv", inputs, strict=True)
        )
    return found


@pytest.mark.parametrize("size", SIZES)
def test_b9_f10_strides_do_not_matter(pools: Pools, size: int) -> None:
    for found in shared(pools, size, through_views):
        assert all(found.values()), found


def expanded() -> tuple[bool, bool]:
    """Stride 0: one key head for all and one batch row for all, against the same values written out; strided dout too."""
    (q, k, v), (dout, _) = local()
    small = [k[:1, :, :1].clone().requires_grad_(), v[:1, :, :1].clone().requires_grad_()]
    big = [x.detach().expand(y.shape).clone().requires_grad_() for x, y in zip(small, (k, v), strict=True)]
    out = attend(q, *(x.expand(y.shape) for x, y in zip(small, (k, v), strict=True)))
    right = attend(q, *big)
    out.sum().backward()  # an expanded gradient
    right.backward(torch.ones_like(dout))
    same = [torch.allclose(x.grad, y.grad.sum((0, 2), keepdim=True), atol=1e-5) for x, y in zip(small, big, strict=True)]  # pyright: ignore
    return torch.equal(out, right), all(same)


@pytest.mark.parametrize("size", SIZES)
def test_f10_expanded_inputs(pools: Pools, size: int) -> None:
    assert shared(pools, size, expanded) == [(True, True)] * size


# Twice


def penalty_downstream() -> str:
    """A gradient penalty differentiated in a parameter behind attention only: it reaches dout and no input of attention."""
    (q, k, v), _ = local()
    v = v.requires_grad_()
    p = torch.ones(v.shape[-1], requires_grad=True)
    loss = (attend(q, k, v) * p).square().sum()
    (g,) = torch.autograd.grad(loss, v, create_graph=True)
    try:
        torch.autograd.grad(loss + g.square().sum(), p)
    except NotImplementedError as error:
        return str(error)
    return "a gradient without the penalty"


@pytest.mark.parametrize("size", SIZES)
def test_b10_not_even_through_what_is_behind_attention(pools: Pools, size: int) -> None:
    assert all("not differentiable twice" in found for found in shared(pools, size, penalty_downstream))


def twice(create_graph: bool) -> str:
    q, k, v = leaves()
    out = attend(q, k, v)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v), create_graph=create_graph)
    if not create_graph:
        return str(all(x.grad_fn is None for x in grads))
    try:
        sum(g.square().sum() for g in grads).backward()  # pyright: ignore[reportAttributeAccessIssue]
    except NotImplementedError as error:
        return str(error)
    return "differentiated twice"


@pytest.mark.parametrize("size", SIZES)
def test_b10_not_differentiable_twice(pools: Pools, size: int) -> None:
    assert all("not differentiable twice" in found for found in shared(pools, size, twice, True))
    assert shared(pools, size, twice, False) == ["True"] * size


def graph_without_second_gradient() -> bool:
    """create_graph=True alone does no harm: the gradients are right, also next to a second derivative that avoids them."""
    whole, (dout, dlse) = reference(), local()[1]
    q, k, v = leaves()
    outputs = attend(q, k, v, return_lse=True)
    grads = torch.autograd.grad(outputs, (q, k, v), [dout, dlse], create_graph=True)
    return all(torch.equal(g, whole[n]) for n, g in zip("qkv", grads, strict=True))


@pytest.mark.parametrize("size", SIZES)
def test_create_graph_gives_the_same_gradients(pools: Pools, size: int) -> None:
    assert all(shared(pools, size, graph_without_second_gradient))


def backward_again() -> bool:
    """retain_graph: a second pass adds the same again."""
    q, k, v = leaves()
    out = attend(q, k, v)
    out.backward(local()[1][0], retain_graph=True)
    once = [x.grad.clone() for x in (q, k, v)]  # pyright: ignore[reportOptionalMemberAccess]
    out.backward(local()[1][0])
    return all(torch.equal(x.grad, 2 * g) for x, g in zip((q, k, v), once, strict=True))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("size", SIZES)
def test_retain_graph(pools: Pools, size: int) -> None:
    assert all(shared(pools, size, backward_again))


# Checkpoints and micro-batches


class Layer(torch.nn.Module):
    """Projections around attention, the least that a model has."""

    def __init__(self, width: int = 32, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.qkv, self.out = torch.nn.Linear(width, 2 * width, bias=False), torch.nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (-1, 8)).split([4, 2, 2], 2)
        return x + self.out(attend(q, k, v).flatten(2))


def checkpointed(how: str, frozen: bool) -> list[Tensor]:
    layers = [Layer(seed=i) for i in range(2)]
    rank, size = place()
    x = torch.randn(2, 33, 32, generator=torch.Generator().manual_seed(0))
    x = CASE.layouts(size)[0].part(x, rank).clone().requires_grad_()
    if frozen:  # weights frozen: only the input needs a gradient (F12)
        for layer in layers:
            layer.requires_grad_(False)
    y = x
    for layer in layers:
        y = layer(y) if how == "none" else checkpoint(layer, y, use_reentrant=how == "reentrant")
    y.square().sum().backward()
    weights = [] if frozen else [w.grad for layer in layers for w in layer.parameters()]
    return [x.grad, *weights]  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("size", SIZES)
def test_f12_activation_checkpointing(pools: Pools, size: int, how: str, frozen: bool) -> None:
    plain, again = (shared(pools, size, checkpointed, h, frozen) for h in ("none", how))
    assert all(torch.equal(a, b) for x, y in zip(plain, again, strict=True) for a, b in zip(x, y, strict=True))


def micro_batches(together: bool) -> list[Tensor]:
    """Two batch rows at once, or one after the other; in the second way the passes interleave."""
    qkv, (dout, dlse) = leaves(), local()[1]
    rows = [slice(0, 2)] if together else [slice(0, 1), slice(1, 2)]
    outputs = [(attend(*(x[row] for x in qkv), return_lse=True), row) for row in rows]
    for (out, lse), row in outputs:
        torch.autograd.backward([out, lse], [dout[row], dlse[row]])
    return [x.grad for x in qkv]  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("size", SIZES)
def test_b12_two_micro_batches_equal_one_batch(pools: Pools, size: int) -> None:
    one, two = (shared(pools, size, micro_batches, together) for together in (True, False))
    assert all(close(b, a) for x, y in zip(one, two, strict=True) for a, b in zip(x, y, strict=True))


def test_same_bits_every_time(pools: Pools) -> None:
    for s, hosts in (("rotate", None), ("direct", None), ("hierarchical", (0, 1, 1))):
        first, second = (pools.run(3, run_cases, [replace(CASE, schedule=s, hosts=hosts)]) for _ in range(2))
        assert all(torch.equal(a, b) for x, y in zip(first, second, strict=True) for a, b in zip(x[0], y[0], strict=True))


def test_plain_results_are_right() -> None:
    """What this file compares with, against the oracle."""
    assert all(close(x, z) for x, z in zip(run_cases([CASE])[0], exact(CASE), strict=True))

"""Every mistake a caller can make: which exception, in which words, raised on every rank of the ring, and nothing hangs."""

import dataclasses
import datetime
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pools

import ringflash as rf
from ringflash import agreement, checks

TOKENS = 4  # of every rank
SIZE = 2
CAUSAL = rf.Mask(causal=True)


def tensors(nheads_q: int = 4, nheads_k: int = 2, headdim: int = 8, headdim_v: int = 8, **kwargs: Any) -> dict[str, Any]:
    """q, k, v of one rank, by default good."""
    batch, tokens, dtype = kwargs.get("batch", 1), kwargs.get("tokens", TOKENS), kwargs.get("dtype", torch.float32)
    shapes = {"q": (nheads_q, headdim), "k": (nheads_k, headdim), "v": (nheads_k, headdim_v)}
    return {name: torch.ones(batch, tokens, *shape, dtype=dtype) for name, shape in shapes.items()}


def good(size: int = SIZE) -> dict[str, Any]:
    return {**tensors(), "layout": rf.layouts.zigzag(TOKENS * size, size), "mask": CAUSAL}


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they are a prototype
        return torch.nested.nested_tensor([ones(3, 2, 8), ones(4, 2, 8)])


# What is wrong: keyword arguments of ring_attention, the exception, and words that its message holds
Wrong = tuple[Callable[[], dict[str, Any]], type[Exception], tuple[str, ...]]
LOCAL: dict[str, Wrong] = {
    "q no tensor": (lambda: {"q": [[1.0]]}, TypeError, ("q must be a torch.Tensor", "list")),
    "v none": (lambda: {"v": None}, TypeError, ("v must be a torch.Tensor", "NoneType")),
    "q 3-d": (lambda: {"q": ones(4, 4, 8)}, ValueError, ("(batch, seqlen, nheads, headdim)", "q.shape=(4, 4, 8)")),
    "k 5-d": (lambda: {"k": ones(1, 4, 2, 8, 1)}, ValueError, ("k must be", "k.shape=(1, 4, 2, 8, 1)")),
    "float64": (lambda: tensors(dtype=torch.float64), TypeError, ("float32, float16 or bfloat16", "q.dtype=torch.float64")),
    "int32": (lambda: tensors(dtype=torch.int32), TypeError, ("float32, float16 or bfloat16", "torch.int32")),
    "complex": (lambda: tensors(dtype=torch.complex64), TypeError, ("float32, float16 or bfloat16", "torch.complex64")),
    "float8": (lambda: {"v": ones(1, 4, 2, 8).to(torch.float8_e4m3fn)}, TypeError, ("v.dtype=torch.float8_e4m3fn",)),
    "mixed dtypes": (
        lambda: {"k": ones(1, 4, 2, 8, dtype=torch.bfloat16)},
        ValueError,
        ("one dtype", "q.dtype=torch.float32", "k.dtype=torch.bfloat16"),
    ),
    "mixed devices": (lambda: {"k": ones(1, 4, 2, 8).to("meta")}, ValueError, ("k.device=meta",)),
    "meta": (lambda: {k: v.to("meta") for k, v in tensors().items()}, ValueError, ("meta", "explain")),
    "sparse": (lambda: {"q": ones(1, 4, 4, 8).to_sparse()}, TypeError, ("q must be", "sparse")),
    "nested": (lambda: {"q": nested()}, TypeError, ("q must be a dense strided tensor", "a nested tensor")),
    "batch": (lambda: {"q": ones(3, 4, 4, 8)}, ValueError, ("one batch size", "(3, 4, 4, 8)", "(1, 4, 2, 8)")),
    "seqlen of v": (lambda: {"v": ones(1, 3, 2, 8)}, ValueError, ("same seqlen_k", "v.shape=(1, 3, 2, 8)")),
    "heads of v": (lambda: {"v": ones(1, 4, 1, 8)}, ValueError, ("nheads_k", "v.shape=(1, 4, 1, 8)")),
    "headdim of k": (lambda: {"k": ones(1, 4, 2, 16)}, ValueError, ("same headdim", "k.shape=(1, 4, 2, 16)")),
    "headdim 257": (lambda: tensors(headdim=257), ValueError, ("headdim must be in 1 ... 256", "headdim=257")),
    "headdim_v 264": (lambda: tensors(headdim_v=264), ValueError, ("headdim_v must be in 1 ... 256", "headdim_v=264")),
    "headdim 0": (lambda: tensors(headdim=0), ValueError, ("headdim must be in 1 ... 256", "headdim=0")),
    "no heads": (lambda: tensors(nheads_q=0, nheads_k=0), ValueError, ("at least 1",)),
    "heads 10 and 4": (
        lambda: tensors(nheads_q=10, nheads_k=4),
        ValueError,
        ("nheads_q must be a multiple of nheads_k", "nheads_q=10", "nheads_k=4"),
    ),
    "seqlen_q": (lambda: {"q": ones(1, 5, 4, 8)}, ValueError, ("q must hold", "seqlen_q=5", "layout")),
    "seqlen_k": (
        lambda: {"k": ones(1, 7, 2, 8), "v": ones(1, 7, 2, 8)},
        ValueError,
        ("k must hold", "seqlen_k=7", "kv_layout="),
    ),
    "kv_layout": (lambda: {"kv_layout": rf.layouts.zigzag(6, SIZE)}, ValueError, ("k must hold", "seqlen=6", "seqlen_k=4")),
    "layout of another size": (
        lambda: {"layout": rf.layouts.zigzag(12, 3)},
        ValueError,
        ("layout must be for this ring's size", "layout.size=3", "2"),
    ),
    "kv_layout of another size": (lambda: {"kv_layout": rf.layouts.zigzag(12, 3)}, ValueError, ("kv_layout.size=3",)),
    "layout name": (lambda: {"layout": "zig-zag"}, ValueError, ("'zigzag'", "layout='zig-zag'", "rf.Layout")),
    "layout name, long": (lambda: {"layout": "ж" * 3000}, ValueError, ("'zigzag'",)),
    "layout none": (lambda: {"layout": None}, TypeError, ("layout must be an rf.Layout", "layout=None")),
    "layout a function": (lambda: {"layout": rf.layouts.zigzag}, TypeError, ("layout must be an rf.Layout",)),
    "kv_layout a number": (lambda: {"kv_layout": 3}, TypeError, ("kv_layout must be", "kv_layout=3")),
    "mask none": (lambda: {"mask": None}, TypeError, ("mask must be an rf.Mask", "mask=None", "rf.Mask(causal=True)")),
    "mask a bool": (lambda: {"mask": True}, TypeError, ("mask must be an rf.Mask", "mask=True")),
    "options a dict": (lambda: {"options": {"check": "always"}}, TypeError, ("options must be an rf.Options", "'check'")),
    "scale nan": (lambda: {"scale": math.nan}, ValueError, ("scale must be a finite number", "scale=nan")),
    "scale a word": (lambda: {"scale": "auto"}, ValueError, ("scale must be a finite number", "scale='auto'")),
    "scale too large": (lambda: {"scale": 10**400}, ValueError, ("scale must be a finite number",)),
    "documents too short": (
        lambda: {"mask": rf.Mask(documents=(0, 3))},
        ValueError,
        ("documents must end at the sequence length", "3", "seqlen=8", "padding"),
    ),
    "documents of too many rows": (
        lambda: {"mask": rf.Mask(documents=((0, 8), (0, 8), (0, 2, 8)))},
        ValueError,
        ("one per batch row", "3 lists", "batch=1"),
    ),
    "triton on a CPU": (
        lambda: {"options": rf.Options(kernel="triton")},
        NotImplementedError,
        ("kernel='triton'", "cpu", "kernel='auto'"),
    ),
}

# Right on each rank by itself, but not together: what rank 1 passes instead, and the name that the message opens with
DIFFERENT: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "batch": (lambda: tensors(batch=2), "batch"),
    "nheads_q": (lambda: tensors(nheads_q=2), "nheads_q"),
    "nheads_k": (lambda: tensors(nheads_k=4), "nheads_k"),
    "headdim": (lambda: tensors(headdim=16), "headdim"),
    "headdim_v": (lambda: tensors(headdim_v=5), "headdim_v"),
    "dtype": (lambda: tensors(dtype=torch.bfloat16), "dtype"),
    "layout": (lambda: {"layout": rf.layouts.striped(8, SIZE)}, "layout"),
    "layout's positions": (lambda: {"layout": rf.layouts.balanced(rf.Mask(), 8, SIZE)}, "layout"),
    "length under a name": (lambda: {**tensors(tokens=5), "layout": "zigzag"}, "layout"),
    "kv_layout": (lambda: {"kv_layout": rf.layouts.contiguous(8, SIZE)}, "kv_layout"),
    "causal": (lambda: {"mask": rf.Mask()}, "mask"),
    "window": (lambda: {"mask": rf.Mask(causal=True, window=(2, 0))}, "mask"),
    "documents": (lambda: {"mask": rf.Mask(causal=True, documents=(0, 4, 8))}, "mask"),
    "other documents": (lambda: {"mask": rf.Mask(causal=True, documents=(0, 5, 8))}, "mask"),
    "prefix": (lambda: {"mask": rf.Mask(causal=True, prefix=1)}, "mask"),
    "scale": (lambda: {"scale": 0.5}, "scale"),
    "schedule": (lambda: {"options": rf.Options(schedule="direct")}, "options"),
    "deterministic": (lambda: {"options": rf.Options(deterministic=True)}, "options"),
    "kernel": (lambda: {"options": rf.Options(kernel="reference")}, "options"),
    "check": (lambda: {"options": rf.Options(check="never")}, "options"),
    "gradients": (lambda: {"v": ones(1, TOKENS, 2, 8).requires_grad_()}, "gradients"),
}


def raised(call: Callable[[], object]) -> tuple[str, str] | None:
    """(type, message) of what the call raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def attend(change: dict[str, Any], group: object = None, **more: Any) -> object:
    size = SIZE if dist.is_initialized() else 1
    return rf.ring_attention(**{**good(size), "group": group, **more, **change})


def in_ring(table: str, name: str, wrong_ranks: tuple[int, ...], earlier: int, check: str) -> tuple[Any, Any]:
    """On a fresh group after some good calls: what the wrong call raises, and then a good one (the ring still works)."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=8))
    options = {"options": rf.Options(check=check)}
    for _ in range(earlier):
        attend({}, group, **options)
    change = {"LOCAL": LOCAL, "DIFFERENT": DIFFERENT}[table][name][0]() if dist.get_rank() in wrong_ranks else {}
    if isinstance(change.get("options"), rf.Options) and check != "first":
        change["options"] = replace(change["options"], check=check)
    return raised(lambda: attend(change, group, **options)), raised(lambda: attend({}, group, **options))


@pytest.mark.parametrize("name", LOCAL)
def test_wrong_on_every_rank(pools: Pools, name: str) -> None:
    _, error, words = LOCAL[name]
    for found, after in pools.run(SIZE, in_ring, "LOCAL", name, (0, 1), 0, "first"):
        assert found[0] == error.__name__, found
        assert all(word in found[1] for word in words), found
        assert after is None


@pytest.mark.parametrize("earlier", [0, agreement.FIRST_CALLS + 1], ids=["first call", "later, check=always"])
@pytest.mark.parametrize("name", LOCAL)
def test_wrong_on_one_rank_is_raised_on_all(pools: Pools, name: str, earlier: int) -> None:
    """The wrong rank raises its own error, the others one that names the rank and repeats the message."""
    _, error, words = LOCAL[name]
    check = "always" if earlier else "first"
    (right, after), (wrong, after_wrong) = pools.run(SIZE, in_ring, "LOCAL", name, (1,), earlier, check)
    assert wrong[0] == error.__name__, wrong
    assert right[0] == "RuntimeError", right
    assert "rank 1 of the ring was called wrongly" in right[1]
    assert words[0] in right[1]
    assert after is after_wrong is None


# another check on one rank only is told to that rank alone, once the first call has agreed one
@pytest.mark.parametrize(
    ("name", "earlier"),
    [(n, e) for n in DIFFERENT for e in (0, agreement.FIRST_CALLS + 1) if not (n == "check" and e)],
)
def test_ranks_that_differ(pools: Pools, name: str, earlier: int) -> None:
    _, word = DIFFERENT[name]
    for found, after in pools.run(SIZE, in_ring, "DIFFERENT", name, (1,), earlier, "always" if earlier else "first"):
        assert found[0] == "ValueError", found
        assert found[1].startswith(f"{word} must be "), found
        assert "rank 0 has" in found[1]
        assert "rank 1 has" in found[1]
        assert after is None


def test_gradients_on_one_rank_only_say_what_to_do(pools: Pools) -> None:
    for found, _ in pools.run(SIZE, in_ring, "DIFFERENT", "gradients", (1,), 0, "first"):
        assert "give it inputs that require gradients" in found[1]


@pytest.mark.parametrize(
    "name", [n for n in LOCAL if n not in ("layout of another size", "kv_layout", "documents of too many rows")]
)
def test_wrong_without_a_ring(name: str) -> None:
    """Alone, without torch.distributed, the same words."""
    change, error, words = LOCAL[name]
    found = raised(lambda: attend(change()))
    assert found is not None
    assert found[0] == error.__name__, found
    assert words[0] in found[1]


# After the checked calls


def one_rank_leaves(seconds: float) -> tuple[Any, float]:
    """A ring of all ranks whose rank 1 raises in a call that no check guards, inside a group with a short timeout."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=seconds))
    size = dist.get_world_size()
    call = {**good(size), "group": group}
    for _ in range(agreement.FIRST_CALLS):
        rf.ring_attention(**call)
    begun = datetime.datetime.now()
    found = raised(lambda: rf.ring_attention(**{**call, **({"scale": "big"} if dist.get_rank() == 1 else {})}))
    return found, (datetime.datetime.now() - begun).total_seconds()


@pytest.mark.parametrize("size", [2, 4])
def test_f17_a_rank_that_raises_unchecked_is_named_within_the_timeout(pools: Pools, size: int) -> None:
    told = pools.run(size, one_rank_leaves, 3.0)
    assert told[1][0] == ("ValueError", "scale must be a finite number of at most 1e+30: scale='big'; None is headdim ** -0.5")
    for rank, (found, seconds) in enumerate(told):
        if rank != 1:
            assert found[0] == "ExchangeError", found
            assert "rank 1 raised in its call 17: scale must be a finite number of at most 1e+30: scale='big'" in found[1]
            assert seconds < 3.0 * size


def backward_fails(seconds: float) -> tuple[Any, float]:
    """Rank 1's own kernel fails in backward, where no check can see it coming."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=seconds))
    call = good()
    q = call["q"].clone().requires_grad_()
    out = rf.ring_attention(**{**call, "q": q, "group": group})
    if dist.get_rank() == 1:
        out.grad_fn.ring = dataclasses.replace(out.grad_fn.ring, tile=None)  # pyright: ignore
    begun = datetime.datetime.now()
    found = raised(lambda: out.sum().backward())  # pyright: ignore
    return found, (datetime.datetime.now() - begun).total_seconds()


def test_a_rank_whose_backward_fails_is_named(pools: Pools) -> None:
    (left, seconds), (failed, _) = pools.run(2, backward_fails, 3.0)
    assert failed[0] == "AttributeError"
    assert left[0] == "ExchangeError", left
    assert "rank 1 raised in its call 1: 'NoneType'" in left[1]
    assert seconds < 6.0


def backward_in_another_order() -> Any:
    call = {**good(), "group": dist.new_group()}
    call["q"] = call["q"].requires_grad_()
    first, second = (rf.ring_attention(**call).sum() for _ in range(2))  # pyright: ignore[reportAttributeAccessIssue]
    return raised(lambda: (second if dist.get_rank() == 1 else first).backward())


def test_backward_passes_in_another_order_are_told_to_all(pools: Pools) -> None:
    for found in pools.run(2, backward_in_another_order):
        assert found[0] == "ValueError", found
        assert (
            "same calls in the same order: rank 0 has the backward pass of call 1, rank 1 has the backward pass of call 2"
            in found[1]
        )


def backward_on_one_rank_only() -> Any:
    """Rank 1's loss does not reach attention, so it goes on to its next call while rank 0 is in backward."""
    call = {**good(), "group": dist.new_group()}
    call["q"] = call["q"].requires_grad_()
    out = rf.ring_attention(**call).sum()  # pyright: ignore[reportAttributeAccessIssue]
    return raised(out.backward if dist.get_rank() == 0 else lambda: rf.ring_attention(**call))


def test_a_backward_pass_of_one_rank_alone_is_told_to_all(pools: Pools) -> None:
    for found in pools.run(2, backward_on_one_rank_only):
        assert "rank 0 has the backward pass of call 1, rank 1 has attention" in found[1], found


def skips_a_bad_batch(seconds: float, mistake: str) -> Any:
    """Behind the checked calls, rank 1 catches its own mistake and goes on with the next call."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=seconds))
    call = {**good(), "group": group}
    call["q"] = call["q"].requires_grad_()
    for _ in range(agreement.FIRST_CALLS):
        rf.ring_attention(**call)
    out = rf.ring_attention(**call).sum()  # pyright: ignore[reportAttributeAccessIssue]
    out.backward(retain_graph=dist.get_rank() == 0)
    if dist.get_rank() == 1:
        mistakes = {
            "argument": lambda: rf.ring_attention(**{**call, "scale": "big"}),
            "transform": lambda: torch.func.grad(lambda q: rf.ring_attention(**{**call, "q": q}).sum())(call["q"].detach()),  # pyright: ignore[reportAttributeAccessIssue]
            "freed graph": out.backward,
        }
        assert raised(mistakes[mistake])
    elif mistake == "freed graph":
        return raised(out.backward)
    return raised(lambda: rf.ring_attention(**call))


@pytest.mark.parametrize(("mistake", "number"), [("argument", 18), ("transform", 18), ("freed graph", 17)])
def test_a_rank_that_skips_a_bad_batch_is_not_paired_with_the_wrong_call(pools: Pools, mistake: str, number: int) -> None:
    (left, skipped) = pools.run(2, skips_a_bad_batch, 3.0, mistake)
    assert left[0] == "ExchangeError", left
    assert f"rank 1 raised in its call {number}" in left[1]
    assert f"this ring is out of step since rank 1 raised in its call {number}" in skipped[1], skipped


def destroyed() -> Any:
    cp = rf.ContextParallel(dist.new_group())  # pyright: ignore[reportArgumentType]
    dist.destroy_process_group(cp._comm.groups["cpu"])
    call = good()
    return raised(lambda: cp.batch(TOKENS * SIZE, CAUSAL).attention(call["q"], call["k"], call["v"]))


def test_a_destroyed_ring_is_named(pools: Pools) -> None:
    for found in pools.run(2, destroyed):
        assert "this ring's process group was destroyed: make a new ContextParallel" in found[1], found


def caught_then_lost(seconds: float) -> tuple[Any, Any]:
    """An error in a checked call, caught on all ranks; later rank 1 stays away for another reason."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=seconds))
    call = {**good(), "group": group}
    first = raised(lambda: rf.ring_attention(**{**call, **({"scale": "big"} if dist.get_rank() == 1 else {})}))
    for _ in range(agreement.FIRST_CALLS):
        rf.ring_attention(**call)
    return first, raised(lambda: rf.ring_attention(**call)) if dist.get_rank() == 0 else None


def test_an_old_error_is_not_blamed_for_a_new_failure(pools: Pools) -> None:
    (first, later), _ = pools.run(2, caught_then_lost, 2.0)
    assert "scale" in first[1]
    assert later[0] == "RuntimeError"
    assert "scale" not in later[1], later


# The functions themselves


def test_scale() -> None:
    assert checks.scale(None, 16) == 0.25
    assert checks.scale(2, 16) == 2.0
    for bad in (math.inf, -math.inf, math.nan, True, "1", torch.tensor(1.0), 1j):
        with pytest.raises(ValueError, match=r"scale must be a finite number of at most 1e\+30: scale="):
            checks.scale(bad, 16)  # pyright: ignore[reportArgumentType]


def test_how_many_ranks_exchange_heads() -> None:
    shapes = [("auto", (6,)), ("p2p", (6,)), ("ulysses", (6,)), ("auto", (2, 3)), ("p2p", (2, 3)), ("ulysses", (1, 6))]
    assert [checks.heads_ranks(*shape) for shape in shapes] == [1, 1, 6, 3, 3, 6]
    with pytest.raises(ValueError, match=r"transport='ulysses' must have all ranks .* mesh of 2 x 3, \(ring, heads\); use"):
        checks.heads_ranks("ulysses", (2, 3))


def test_mask_words_are_short_and_tell_documents_apart() -> None:
    masks = [rf.Mask(documents=(0, *range(i, 3000))) for i in (1, 2)]
    words = [checks.mask_words(m) for m in masks]
    assert words[0] != words[1]
    assert max(map(len, words)) < 120
    assert (
        checks.mask_words(rf.Mask(documents=(0, 30, 64)))
        == "Mask(causal=False, window=None, documents=(0, 30, 64), prefix=None)"
    )

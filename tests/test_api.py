"""ring_attention as its signature promises it: names, defaults, returned kinds, groups, and nothing swallowed or changed."""

import gc
import inspect
import math
import sys
from typing import Any
from unittest import mock

import oracle
import pytest
import torch
import torch.distributed as dist
from pool import Pools
from ring_cases import CAUSAL, NAMES, Case, check, exact, masks
from torch import Tensor

import ringflash as rf
from ringflash.auto import Facts
from ringflash.plan import Plan
from ringflash.transport import nvlink
from ringflash.transport.communicator import Communicator
from ringflash.transport.nvlink import Link

CASE = Case(CAUSAL, 24, "zigzag")


def qkv() -> tuple[Tensor, Tensor, Tensor]:
    return CASE.inputs()[0]


def attend(**kwargs: Any) -> Any:
    q, k, v = qkv()
    return rf.ring_attention(q, k, v, **{"layout": "zigzag", "mask": CAUSAL, **kwargs})


def test_public_names() -> None:
    assert all(hasattr(rf, name) for name in rf.__all__)
    signature = inspect.signature(rf.ring_attention)
    names = ["q", "k", "v", "layout", "mask", "kv_layout", "group", "scale", "return_lse", "options"]
    assert list(signature.parameters) == names
    assert signature.parameters["layout"].default is inspect.Parameter.empty
    assert all(signature.parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in names[3:])
    assert list(inspect.signature(rf.Mask).parameters) == ["causal", "window", "documents", "prefix"]
    for name in ("contiguous", "zigzag", "striped", "per_document", "balanced"):
        assert callable(getattr(rf.layouts, name))


def test_layout_must_be_said_and_nothing_is_swallowed() -> None:
    q, k, v = qkv()
    with pytest.raises(TypeError, match="layout"):
        rf.ring_attention(q, k, v)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="dropout"):
        attend(dropout=0.1)
    with pytest.raises(TypeError, match="positional"):
        rf.ring_attention(q, k, v, "zigzag")  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_returned(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in qkv())
    out = rf.ring_attention(q, k, v, layout="zigzag", mask=CAUSAL)
    both = rf.ring_attention(q, k, v, layout="zigzag", mask=CAUSAL, return_lse=True)
    assert isinstance(out, Tensor)
    assert torch.equal(out, both[0])
    assert (out.dtype, out.shape, out.is_contiguous()) == (dtype, (2, 24, 4, 8), True)
    assert (both[1].dtype, both[1].shape) == (torch.float32, (2, 4, 24))
    assert not out.requires_grad


def test_lse_is_the_natural_logarithm() -> None:
    q, k, v = torch.zeros(1, 4, 1, 8), torch.zeros(1, 4, 1, 8), torch.ones(1, 4, 1, 8)
    _, lse = rf.ring_attention(q, k, v, layout="contiguous", mask=CAUSAL, return_lse=True)
    torch.testing.assert_close(lse[0, 0], torch.arange(1.0, 5.0).log())


def test_mask_defaults_to_full_and_scale_to_the_root() -> None:
    full = attend(mask=rf.Mask())
    q, k, v = qkv()
    assert torch.equal(rf.ring_attention(q, k, v, layout="zigzag"), full)  # pyright: ignore[reportArgumentType]
    assert torch.equal(attend(mask=rf.Mask(), scale=CASE.headdim[0] ** -0.5), full)


@pytest.mark.parametrize("kind", [torch.tensor, lambda x: torch.tensor(x, dtype=torch.int32), list, tuple])
def test_documents_of_any_kind(kind: Any) -> None:
    assert rf.Mask(documents=kind((0, 5, 24))) == rf.Mask(documents=(0, 5, 24))
    assert torch.equal(attend(mask=rf.Mask(documents=kind((0, 5, 24)))), attend(mask=rf.Mask(documents=(0, 5, 24))))


def test_inputs_are_not_changed() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    kept = [x.detach().clone() for x in (q, k, v)]
    rf.ring_attention(q, k, v, layout="zigzag", mask=CAUSAL).sum().backward()  # pyright: ignore[reportAttributeAccessIssue]
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), kept, strict=True))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_windows_without_bound_in_any_number(pools: Pools, size: int) -> None:
    """sys.maxsize and its kin mean unbounded to many; documents move the arithmetic away from 0."""
    documents = (0, 9, 33)
    wide = [2**31 - 1, 2**31, 2**62, sys.maxsize]
    windows = [rf.Mask(window=(n, n), documents=documents) for n in wide] + [rf.Mask(window=(2, n)) for n in wide]
    check(pools, size, [Case(mask) for mask in [*windows, rf.Mask(causal=True, prefix=sys.maxsize)]])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_keys_that_no_row_sees_may_hold_anything(bad: float) -> None:
    """Forward and backward: keys behind the last query under a causal mask."""
    q, k, v = CASE.inputs()[0]
    kv_layout = rf.layouts.contiguous(30, 1)
    tail = torch.full((2, 6, 2, 1), bad)
    k, v = (torch.cat([x, tail.expand(-1, -1, -1, x.shape[3])], 1).requires_grad_() for x in (k, v))
    out = rf.ring_attention(q, k, v, layout="contiguous", mask=CAUSAL, kv_layout=kv_layout)
    assert isinstance(out, Tensor)
    out.backward(CASE.inputs()[1][0])
    assert oracle.rms(out.detach(), exact(CASE).out) < 1e-6
    for x in (k, v):
        assert x.grad is not None
        assert x.grad.isfinite().all()
        assert not x.grad[:, 24:].any()


# In a ring


def by_name(name: str) -> list[bool]:
    """A name and the layout it stands for give the same bits; so do kv_layout's."""
    rank, size = dist.get_rank(), dist.get_world_size()
    q, k, v = (getattr(rf.layouts, name)(24, size).part(x, rank) for x in qkv())
    keys = [rf.layouts.striped(24, size).part(x, rank) for x in qkv()[1:]]
    long = rf.layouts.zigzag(24, size), rf.layouts.striped(24, size)
    a = rf.ring_attention(q, k, v, layout=name, mask=CAUSAL)
    b = rf.ring_attention(q, k, v, layout=getattr(rf.layouts, name)(24, size), mask=CAUSAL)
    c = rf.ring_attention(long[0].part(qkv()[0], rank), *keys, layout="zigzag", kv_layout="striped", mask=CAUSAL)
    d = rf.ring_attention(long[0].part(qkv()[0], rank), *keys, layout=long[0], kv_layout=long[1], mask=CAUSAL)
    return [torch.equal(a, b), torch.equal(c, d)]  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_names_stand_for_layouts(pools: Pools, size: int, name: str) -> None:
    assert pools.run(size, by_name, name) == [[True, True]] * size


def not_a_member() -> list[str]:
    """Every wrong group, on the rank that has it; the ranks outside of [0] hold what new_group gave them."""
    outside = dist.new_group([0])
    told = []
    for group in ["world", 0, [0, 1], *([outside] if dist.get_rank() else [])]:
        with pytest.raises(TypeError, match="group must be None, a ProcessGroup or a DeviceMesh") as error:
            attend(group=group)
        told.append(str(error.value))
    return told


def test_wrong_groups(pools: Pools) -> None:
    ranks = pools.run(2, not_a_member)
    assert "group='world'" in ranks[0][0]
    assert "is this rank a member?" in ranks[1][3]


def without_shared_memory() -> tuple[float, int, str]:
    """(error of a ring that would pull its keys, how often it looked for shared memory, what who asks for that is told)."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    looked: list[int] = []

    def connect(comm: Communicator) -> Link:
        looked.append(comm.calls)
        raise NotImplementedError("rank 1: no peer access")

    facts, layout = Facts.of, rf.layouts.zigzag(24, size)

    def ring(**more: Any) -> Any:
        q, k, v = (layout.part(x, rank) for x in qkv())
        return rf.ring_attention(q, k, v, layout=layout, mask=CAUSAL, group=group, **more)

    with (
        mock.patch.object(Facts, "of", lambda *args, **more: facts(*args, **more)._replace(device="cuda")),
        mock.patch.object(nvlink, "_connected", connect),
    ):
        out = ring()
        with pytest.raises(NotImplementedError) as error:
            ring(options=rf.Options(transport="nvlink"))
        assert torch.equal(ring(), out)
    return oracle.rms(out, layout.part(exact(CASE).out, rank)), len(looked), str(error.value)


def test_blocks_go_by_p2p_where_gpus_share_no_memory(pools: Pools) -> None:
    for error, looked, told in pools.run(2, without_shared_memory):
        assert error < 1e-6
        assert looked == 1
        assert "transport='nvlink' found no memory that all ranks' GPUs share (rank 1: no peer access); use" in told


def many_batches() -> tuple[bool, int]:
    """A mask of its own every step: right, and what is kept for them is bounded."""
    rank, size = dist.get_rank(), dist.get_world_size()
    right = True
    for n in range(64, 128):
        layout = rf.layouts.zigzag(n, size)
        mask = rf.Mask(causal=True, documents=(0, n // 3, n))
        x = torch.ones(1, layout.lengths[rank], 1, 8)
        right &= bool((rf.ring_attention(x, x, x, layout=layout, mask=mask) == 1).all())  # pyright: ignore
    gc.collect()
    return right, sum(type(x) is Plan for x in gc.get_objects())


def test_plans_are_kept_in_bounds(pools: Pools) -> None:
    for right, kept in pools.run(2, many_batches):
        assert right
        assert kept <= 32


def test_every_mask_hashes_and_is_one_plan() -> None:
    """Equal masks made twice are one."""
    assert [hash(m) for m in masks(33).values()] == [hash(m) for m in masks(33).values()]
    assert masks(33) == masks(33)

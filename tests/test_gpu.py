"""GPU tests: the Triton tile and the ring over NCCL on as many GPUs as this launch has ranks.

Run with `pytest -m gpu` for one GPU and `torchrun --nproc-per-node 2 -m pytest -m gpu` for two; skipped without a GPU.
"""

import itertools
import warnings

import pytest
import torch
from gpu_cases import DOCUMENTS, MASKS, case, check, unchecked
from torch.distributed.device_mesh import DeviceMesh

import ringflash as rf
from ringflash.cli.verify import verify
from ringflash.kernels import reference
from ringflash.kernels.reference import Segment
from ringflash.launch.bootstrap import Session
from ringflash.tile import pick
from ringflash.transport.communicator import communicator

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "per_document", "balanced"])
def test_ring_is_as_exact_as_one_kernel(session: Session, layout: str, mask: str) -> None:
    for schedule, dtype in itertools.product(("rotate", "direct"), ("float32", "bfloat16")):
        check(session, case(layout=layout, mask=MASKS[mask], schedule=schedule, dtype=dtype))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "per_document", "balanced"])
@pytest.mark.parametrize("transport", ["nvlink", "allgather"])
def test_gathered_keys_are_as_exact_as_one_kernel(session: Session, transport: str, layout: str, mask: str) -> None:
    for dtype in ("float32", "bfloat16"):
        check(session, case(layout=layout, mask=MASKS[mask], transport=transport, dtype=dtype))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "per_document", "balanced"])
@pytest.mark.parametrize("heads", [(4, 4), (3, 3)])
def test_rows_that_travel_are_as_exact_as_one_kernel(session: Session, heads: tuple[int, int], layout: str, mask: str) -> None:
    for schedule, dtype in itertools.product(("rotate", "direct"), ("float32", "bfloat16")):
        check(session, case(layout=layout, mask=MASKS[mask], heads=heads, schedule=schedule, dtype=dtype, transport="p2p"))


@pytest.mark.parametrize("transport", ["p2p", "nvlink", "allgather"])
@pytest.mark.parametrize("seqlen", [0, 1, 2, 7, 63, 100, 2999])
def test_any_length_runs(session: Session, seqlen: int, transport: str) -> None:
    check(session, case(seqlen=seqlen, dtype="float16", transport=transport))


@pytest.mark.parametrize("headdims", [(16, 16), (24, 40), (80, 80), (128, 128), (192, 128), (256, 256)])
def test_head_dimensions(session: Session, headdims: tuple[int, int]) -> None:
    check(session, case(headdims=headdims, heads=(28, 7), seqlen=300))


def test_benchmark_shape_against_the_oracle(session: Session) -> None:
    check(session, case(heads=(8, 2), headdims=(128, 128), seqlen=4096, batch=2))


def _segment_inputs(dtype: torch.dtype, seqlen_q: int = 257, seqlen_k: int = 391) -> tuple[torch.Tensor, Segment]:
    g = torch.Generator(device="cuda").manual_seed(1)
    q = torch.randn(2, seqlen_q, 4, 64, device="cuda", generator=g).to(dtype)
    k, v = (torch.randn(2, seqlen_k, 2, 64, device="cuda", generator=g).to(dtype) for _ in range(2))
    begin = torch.arange(seqlen_q, device="cuda", dtype=torch.int32)[None] // 2
    end = (begin + 150).clamp(max=200)
    return q, Segment(k, v, begin.minimum(end), end)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_unseen_keys_have_no_influence_whatever_they_hold(session: Session, dtype: torch.dtype) -> None:
    q, segment = _segment_inputs(dtype)
    poisoned = segment._replace(k=segment.k.clone(), v=segment.v.clone())
    poisoned.k[:, 200:], poisoned.v[:, 200:] = float("nan"), float("nan")
    for chosen in (segment, poisoned):
        out, lse = pick("triton", q, segment.v).forward(q, [chosen], 0.125)
        expected_out, expected_lse = reference.forward(
            q.float(), [segment._replace(k=segment.k.float(), v=segment.v.float())], 0.125
        )
        torch.testing.assert_close(lse, expected_lse, atol=1e-2 if dtype != torch.float32 else 1e-4, rtol=1e-3)
        assert (out.float() - expected_out).norm() <= 5e-3 * expected_out.norm()


def test_carried_state_equals_one_launch_bit_for_bit_where_nothing_is_seen(session: Session) -> None:
    q, segment = _segment_inputs(torch.bfloat16)
    tile = pick("triton", q, segment.v)
    nothing = segment._replace(begin=segment.begin * 0, end=segment.end * 0)
    state = tile.forward(q, [segment], 0.125, None, False)
    before = [x.clone() for x in state]
    after = tile.forward(q, [nothing], 0.125, state, False)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_segment_is_waited_for(session: Session) -> None:
    q, segment = _segment_inputs(torch.bfloat16)
    tile = pick("triton", q, segment.v)
    expected, _ = tile.forward(q, [segment], 0.125)
    ready = torch.zeros(1, dtype=torch.int32, device="cuda")
    landed = [torch.full((1,), n, dtype=torch.int32).pin_memory() for n in (1, 2)]
    k = segment.k.permute(2, 0, 1, 3).cpu().pin_memory()  # head by head
    late = segment._replace(k=torch.full(k.shape, float("nan"), dtype=k.dtype, device="cuda").permute(1, 2, 0, 3), ready=ready)
    tile.forward(q, [late._replace(ready=ready + 2)], 0.125)  # compiled before anything waits
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    out, _ = tile.forward(q, [late], 0.125)
    with torch.cuda.stream(side):  # copy engines only: the spinning programs hold multiprocessors
        for head, flag in enumerate(landed):
            late.k[:, :, head].copy_(k[head], non_blocking=True)
            ready.copy_(flag, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


def test_addresses_past_two_to_the_31(session: Session) -> None:
    """A row stride of 2**25 elements over one allocation of 4 GiB: row 64 and later lie past 2**31."""
    rows, stride = 65, 2**25
    room = torch.empty(rows * stride, dtype=torch.bfloat16, device="cuda")
    q, segment = _segment_inputs(torch.bfloat16, seqlen_q=rows, seqlen_k=rows)
    far = [torch.as_strided(room, (1, rows, 2, 64), (0, stride, 64, 1), offset) for offset in (0, 4096)]
    for x, y in zip(far, (segment.k, segment.v), strict=True):
        x.copy_(y[:1])
    whole = [torch.zeros_like(segment.begin), torch.full_like(segment.end, rows)]
    tile = pick("triton", q, segment.v)
    out, _ = tile.forward(q[:1], [Segment(far[0], far[1], whole[0], whole[1])], 0.125)
    expected, _ = tile.forward(q[:1], [Segment(segment.k[:1], segment.v[:1], whole[0], whole[1])], 0.125)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("transport", "options"), [("p2p", {}), ("nvlink", {}), ("allgather", {}), ("allgather", {"reproducible": True})], ids=str
)
def test_no_host_synchronisation_in_a_step(session: Session, transport: str, options: dict) -> None:
    cp = unchecked(transport, **options)
    batch = cp.batch(2048 * cp.size, rf.Mask(causal=True))
    q, k, v = (torch.randn(1, 2048, h, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (4, 2, 2))
    batch.attention(q, k, v).sum().backward()
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        batch.attention(q, k, v).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "options",
    [*({"deterministic": True, "transport": t} for t in ("p2p", "nvlink", "allgather")), {"reproducible": True}],
    ids=str,
)
def test_same_bits_every_time(session: Session, options: dict) -> None:
    cp = rf.ContextParallel(options=rf.Options(**options))
    batch = cp.batch(1000, rf.Mask(causal=True))
    whole = [torch.randn(1, 1000, h, 64, generator=torch.Generator().manual_seed(h)).cuda().bfloat16() for h in (4, 2, 2)]

    def grads() -> list[torch.Tensor]:
        q, k, v = (batch.shard(x).clone().requires_grad_() for x in whole)
        out = batch.attention(q, k, v)
        return [out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))]

    assert all(torch.equal(a, b) for a, b in zip(grads(), grads(), strict=True))


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("headdims", [(64, 64), (128, 128), (24, 40), (256, 256)])
def test_reproducible_has_the_bits_of_a_ring_of_one(session: Session, headdims: tuple[int, int], mask: rf.Mask) -> None:
    rank, size, options = session.world.rank, session.world.size, rf.Options(reproducible=True)
    one = [torch.distributed.new_group([r]) for r in range(size)][rank]
    named = [getattr(rf.layouts, name)(1025, size) for name in ("contiguous", "zigzag", "striped")]
    layouts = *named, rf.layouts.per_document("zigzag", DOCUMENTS, size), rf.layouts.balanced(mask, 1025, size)
    g = torch.Generator().manual_seed(0)
    shapes = (4, headdims[0]), (2, headdims[0]), (2, headdims[1])
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        whole = [torch.randn(2, 1025, *shape, generator=g).to(session.device, dtype) for shape in shapes]
        right = rf.ring_attention(*whole, layout="contiguous", mask=mask, group=one, return_lse=True, options=options)  # pyright: ignore
        for layout in layouts:
            parts = [layout.part(x, rank) for x in whole]
            found = rf.ring_attention(*parts, layout=layout, mask=mask, return_lse=True, options=options)  # pyright: ignore
            for dim, x, y in zip((1, 2), found, right, strict=True):
                assert torch.equal(x, layout.part(y, rank, dim)), (layout, dtype)


def test_autocast_with_backward_outside(session: Session) -> None:
    cp = rf.ContextParallel()
    batch = cp.batch(256, rf.Mask(causal=True))
    q, k, v = (torch.randn(1, 256 // cp.size, 2, 64, device="cuda", requires_grad=True) for _ in range(3))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = batch.attention(q, k, v)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert all(x.grad is not None and x.grad.dtype == torch.float32 and x.grad.isfinite().all() for x in (q, k, v))


def test_reversed_mesh(session: Session) -> None:
    if session.world.size == 1:
        pytest.skip("needs two ranks")
    mesh = DeviceMesh("cuda", list(range(session.world.size))[::-1])
    cp = rf.ContextParallel(mesh)
    assert cp.rank == session.world.size - 1 - session.world.rank
    lines = verify(case(), communicator(mesh), session.device)
    assert all(line.good for line in lines), lines


def test_memory_beyond_inputs_outputs_and_saved_tensors(session: Session) -> None:
    """Two K/V blocks in flight and one float32 state forward; three float32 dK/dV blocks and float32 dQ backward, and of at
    most one wave of key blocks, which the Hopper kernel cuts in two, the sums of both parts.
    """
    cp = unchecked("p2p")
    tokens, heads, heads_k, headdim = 32768, 8, 2, 128
    batch = cp.batch(tokens * cp.size, rf.Mask(causal=True))
    q, k, v = (
        torch.randn(1, tokens, h, headdim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for h in (heads, heads_k, heads_k)
    )
    batch.attention(q, k, v).sum().backward()  # kernels compiled, intervals made
    q.grad = k.grad = v.grad = None
    block = 2 * tokens * heads_k * headdim * 2
    state = tokens * heads * (headdim + 2) * 4
    dq, dkv = tokens * heads * headdim * 4, 2 * tokens * heads_k * headdim * 4
    sums = torch.cuda.get_device_properties(0).multi_processor_count * 2 * (2 * 128 * headdim * 4)

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = batch.attention(q, k, v)
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before
    forward = torch.cuda.max_memory_allocated() - before - kept
    dout = torch.randn_like(out)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = torch.autograd.grad(out, (q, k, v), dout)
    torch.cuda.synchronize()
    backward = torch.cuda.max_memory_allocated() - before - sum(x.numel() * x.element_size() for x in grads)
    slack = 2**20
    print(f"forward {forward / 2**20:.1f} MiB beyond kept, backward {backward / 2**20:.1f} MiB; "
          f"block {block / 2**20:.1f}, state {state / 2**20:.1f}, dq {dq / 2**20:.1f}, dkv {dkv / 2**20:.1f} MiB")  # fmt: skip
    assert forward <= 2 * block + state + slack
    assert backward <= 2 * block + dq + 3 * dkv + sums + slack


HEADS = [(8, 2), (6, 3), (4, 1), (5, 5), (1, 1)]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "per_document"])
@pytest.mark.parametrize("heads", HEADS)
def test_ulysses_is_as_exact_as_one_kernel(session: Session, heads: tuple[int, int], layout: str) -> None:
    for mask, dtype in itertools.product(("causal", "documents in a window"), ("float32", "bfloat16")):
        check(session, case(layout=layout, mask=MASKS[mask], heads=heads, dtype=dtype, transport="ulysses"))


@pytest.mark.parametrize("seqlen", [0, 1, 2, 63, 2999])
def test_ulysses_takes_any_length(session: Session, seqlen: int) -> None:
    check(session, case(seqlen=seqlen, headdims=(192, 128), batch=2, transport="ulysses"))


@pytest.mark.parametrize("rows", [1, 2])
def test_meshes_of_two_dimensions(session: Session, rows: int) -> None:
    if session.world.size % rows:
        pytest.skip(f"needs a multiple of {rows} ranks")
    mesh = DeviceMesh("cuda", torch.arange(session.world.size).view(rows, -1), mesh_dim_names=("ring", "heads"))
    for heads in HEADS:
        lines = verify(case(heads=heads), communicator(mesh), session.device)
        assert all(line.good for line in lines), (heads, lines)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("heads", [(4, 2), (3, 1)])
def test_no_host_synchronisation_in_an_exchange_of_heads(session: Session, heads: tuple[int, int], layout: str) -> None:
    group = torch.distributed.new_group()
    assert isinstance(group, torch.distributed.ProcessGroup)
    cp = rf.ContextParallel(group, layout, rf.Options(transport="ulysses", check="never"))
    batch = cp.batch(2048 * cp.size, rf.Mask(causal=True))
    q, k, v = (
        torch.randn(1, 2048, h, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for h in (heads[0], heads[1], heads[1])
    )
    batch.attention(q, k, v).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch.attention(q, k, v).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")

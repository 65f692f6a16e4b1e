"""The Hopper kernels on a GPU: as exact as the plain Triton tile on the same inputs, whatever the intervals, lengths, strides.

Run with `pytest -m gpu`; skipped where there is no sm_90.
"""

import itertools
import math
from typing import Any

import oracle
import pytest
import torch
from kernel_cases import intervals
from torch import Tensor

from ringflash.kernels import backward as plain_backward
from ringflash.kernels import forward as plain_forward
from ringflash.kernels.hopper import backward, forward, host
from ringflash.kernels.reference import Segment

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def hopper() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an sm_90 GPU")


def rows_of(kind: str, seqlen_q: int, seqlen_k: int, batch: int = 1) -> tuple[Tensor, Tensor]:
    """begin, end of a kind of mask, int32 (batch, seqlen_q) on the GPU."""
    row = torch.arange(seqlen_q)[None].expand(batch, -1)
    begin, end = torch.zeros_like(row), torch.full_like(row, seqlen_k)
    if kind == "causal":
        end = (row + 1 + seqlen_k - seqlen_q).clamp(0, seqlen_k)
    elif kind == "window":
        begin, end = (row - 200).clamp(0, seqlen_k), (row + 3).clamp(0, seqlen_k)
    elif kind == "documents":
        bounds = torch.tensor(sorted({0, min(3, seqlen_k), seqlen_k // 7, seqlen_k // 3 + 1, seqlen_k // 2}))
        begin = bounds[torch.searchsorted(bounds, row.clamp(max=seqlen_k - 1), right=True) - 1]
        end = (row + 1).clamp(max=seqlen_k)
    elif kind == "random":
        begin, end = intervals(seqlen_q, seqlen_k, batch, torch.Generator().manual_seed(seqlen_q))
    elif kind == "apart":  # two stretches of keys with a gap that no row sees between them
        begin = torch.where(row < seqlen_q // 2, 0, seqlen_k * 3 // 4)
        end = torch.where(row < seqlen_q // 2, seqlen_k // 4, seqlen_k)
    elif kind == "late":  # the first rows see nothing
        begin, end = torch.zeros_like(row), (row - 150).clamp(0, seqlen_k)
    return begin.minimum(end).int().cuda().contiguous(), end.int().cuda().contiguous()


class Inputs:
    """Tensors of a case, the float64 results, and keys that no row sees replaced by NaN."""

    def __init__(self, kind: str, seqlen_q: int, seqlen_k: int, *, headdims: tuple[int, int] = (128, 128), batch: int = 1,
                 nheads: tuple[int, int] = (4, 2), dtype: torch.dtype = torch.bfloat16, parts: int = 1, sharp: float = 1.0,
                 batched: bool = False) -> None:  # fmt: skip
        generator = torch.Generator(device="cuda").manual_seed(1)
        shapes = ((seqlen_q, nheads[0], headdims[0]), (seqlen_k, nheads[1], headdims[0]), (seqlen_k, nheads[1], headdims[1]),
                  (seqlen_q, nheads[0], headdims[1]))  # fmt: skip
        q, k, v, dout = (torch.randn(batch, *shape, device="cuda", generator=generator) for shape in shapes)
        self.q, self.k, self.v, self.dout = (x.to(dtype) for x in (q * sharp, k, v, dout))
        self.scale = headdims[0] ** -0.5
        begin, end = rows_of(kind, seqlen_q, seqlen_k, batch if batched else 1)
        keys = torch.arange(seqlen_k, device="cuda")
        sees = (keys >= begin[..., None]) & (keys < end[..., None])
        dlse = torch.zeros(batch, nheads[0], seqlen_q, device="cuda")
        self.exact = oracle.results((self.q, self.k, self.v), (self.dout, dlse), sees, self.scale)
        seen = sees.any(1).expand(batch, -1)
        k, v = self._poisoned(self.k, seen), self._poisoned(self.v, seen)
        cuts = [seqlen_k * i // parts for i in range(parts + 1)]
        flag = torch.ones(1, dtype=torch.int32, device="cuda")
        self.segments = [
            Segment(k[:, a:b], v[:, a:b], (begin - a).clamp(0, b - a), (end - a).clamp(0, b - a), flag if a else None)
            for a, b in itertools.pairwise(cuts)
        ]

    @staticmethod
    def _poisoned(x: Tensor, seen: Tensor) -> Tensor:
        buffer = x.new_full((x.shape[0], x.shape[1] + 200, *x.shape[2:]), math.nan)
        buffer[:, : x.shape[1]] = torch.where(seen[..., None, None], x, math.nan)
        return buffer[:, : x.shape[1]]

    @property
    def bound(self) -> float:
        """How much larger than the plain tile's an error may be: 5%, and what errors of few rows scatter."""
        rows = self.q.shape[1]
        return 1.05 if rows >= 700 else 1.05 + 3 / math.sqrt(rows)

    def forward_is_exact(self, **options: Any) -> Tensor:
        """Compare (out, lse); in one launch, and with the state carried from segment to segment. -> stats"""
        plain = plain_forward.forward(self.q, self.segments, self.scale)
        stats = torch.zeros(2, dtype=torch.int32, device="cuda")
        ways = [forward.forward(self.q, self.segments, self.scale, stats=stats, **options)]
        if len(self.segments) > 1:
            state: Any = None
            for segment in self.segments[:-1]:
                state = forward.forward(self.q, [segment], self.scale, state, False, **options)
            ways.append(forward.forward(self.q, self.segments[-1:], self.scale, state, **options))
        for way in ways:
            assert way[0].dtype == self.q.dtype
            assert way[0].is_contiguous()
            for ours, theirs, exact in zip(way, plain, self.exact, strict=False):
                as_good(ours, theirs, exact, self.bound)
        return stats

    def backward_is_exact(self, *, add: bool = True, rounded: bool = False, **options: Any) -> None:
        """Compare dq, dk, dv, added to what was there or stored over NaN; rounded: stored in 16 bits."""
        out, lse = plain_forward.forward(self.q, self.segments, self.scale)
        delta = plain_backward.delta(self.dout, out)
        results, one = [], 1 if add else 0
        for run in (backward.backward, plain_backward.backward):
            fill = {"fill_value": 1.0 if add else math.nan, "device": "cuda"}
            dtype = self.q.dtype if rounded else torch.float32
            dq = torch.full(self.q.shape, **fill)
            dkv = [(torch.full(s.k.shape, **fill).to(dtype), torch.full(s.v.shape, **fill).to(dtype)) for s in self.segments]
            more = options if run is backward.backward else {}
            run(self.dout, self.q, self.segments, lse, delta, self.scale, dq, dkv, add=add, add_dq=add, **more)
            results.append((dq - one, *(torch.cat(x, 1) - one for x in zip(*dkv, strict=True))))
        for ours, theirs, exact in zip(*results, self.exact[2:], strict=True):
            as_good(ours, theirs, exact, self.bound)


def as_good(ours: Tensor, theirs: Tensor, exact: Tensor, bound: float) -> None:
    """The error is at most `bound` times that of the plain tile; what float32 sums give is no error."""
    allowed = bound * oracle.rms(theirs, exact) + 1e-6 * oracle.norm(exact) + 2e-7
    assert oracle.rms(ours, exact) <= allowed, (oracle.rms(ours, exact), oracle.rms(theirs, exact))


KINDS = ["full", "causal", "window", "documents", "random", "apart", "late"]
LENGTHS = [
    (1, 1),
    (1, 300),
    (63, 64),
    (64, 127),
    (127, 127),
    (129, 129),
    (257, 200),
    (777, 777),
    (1024, 1024),
    (300, 1500),
    (1000, 333),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seqlens", LENGTHS, ids=str)
def test_intervals_and_lengths(kind: str, seqlens: tuple[int, int]) -> None:
    inputs = Inputs(kind, *seqlens)
    inputs.forward_is_exact()
    inputs.backward_is_exact()


@pytest.mark.parametrize("kind", ["causal", "random"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("headdims", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_head_dims(kind: str, dtype: torch.dtype, headdims: tuple[int, int]) -> None:
    inputs = Inputs(kind, 500, 777, headdims=headdims, dtype=dtype, parts=2)
    inputs.forward_is_exact()
    if headdims[0] == headdims[1] <= 128:
        inputs.backward_is_exact()


@pytest.mark.parametrize(("nheads", "batch"), [((7, 1), 1), ((3, 3), 3), ((8, 2), 2)])
def test_groups_and_batches(nheads: tuple[int, int], batch: int) -> None:
    inputs = Inputs("random", 333, 450, nheads=nheads, batch=batch, batched=True)
    inputs.forward_is_exact()
    inputs.backward_is_exact()


@pytest.mark.parametrize("parts", [2, 3, 8])
@pytest.mark.parametrize("kind", ["causal", "random"])
def test_segments(kind: str, parts: int) -> None:
    inputs = Inputs(kind, 900, 1200, parts=parts)
    inputs.forward_is_exact()
    inputs.backward_is_exact()
    inputs.backward_is_exact(add=False)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("headdim", [64, 128])
@pytest.mark.parametrize("kind", ["full", "causal", "documents", "late"])
@pytest.mark.parametrize("multiprocessors", [5, 132])
def test_items_in_parts(monkeypatch: pytest.MonkeyPatch, kind: str, headdim: int, rounded: bool, multiprocessors: int) -> None:
    """All items are in parts where there are more multiprocessors than items, else the last ones."""
    monkeypatch.setattr(host, "multiprocessors", lambda device: multiprocessors)
    inputs = Inputs(kind, 2100, 1500, headdims=(headdim, headdim), nheads=(8, 1), parts=2)
    inputs.backward_is_exact(add=not rounded, rounded=rounded)


@pytest.mark.parametrize("sharp", [0.3, 1.5, 2.0, 4.0, 10.0, 40.0])
@pytest.mark.parametrize("kind", ["causal", "full"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_softmax_from_flat_to_sharp(kind: str, sharp: float, dtype: torch.dtype) -> None:
    Inputs(kind, 2048, 2048, sharp=sharp, dtype=dtype, nheads=(2, 1)).forward_is_exact()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sum_out_of_range_is_computed_again(dtype: torch.dtype) -> None:
    inputs = Inputs("full", 1024, 4096, dtype=dtype, nheads=(2, 1))
    late = inputs.k.clone()
    late[:, 3000:3003] *= 300  # in no block that moves the reference
    inputs.segments = [inputs.segments[0]._replace(k=late)]
    sees = torch.ones(1, 1024, 4096, dtype=torch.bool, device="cuda")
    zeros = torch.zeros(1, 2, 1024, device="cuda")
    inputs.exact = oracle.results((inputs.q, late, inputs.v), (inputs.dout, zeros), sees, inputs.scale)
    halves, again = inputs.forward_is_exact().tolist()
    assert halves == 32
    assert again > 0
    assert inputs.forward_is_exact(exact=True).tolist() == [32, 0]


def test_deterministic_forward_where_items_are_computed_again() -> None:
    inputs = Inputs("full", 2048, 4096, nheads=(8, 2))
    late = inputs.k.clone()
    late[:, 3000:3003, :1] *= 300
    segment = inputs.segments[0]._replace(k=late)
    first = forward.forward(inputs.q, [segment], inputs.scale, deterministic=True)
    for _ in range(5):
        again = forward.forward(inputs.q, [segment], inputs.scale, deterministic=True)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_keys_that_may_not_have_come_are_not_copied() -> None:
    inputs = Inputs("causal", 200, 200)
    ready = torch.ones(1, dtype=torch.int32, device="cuda")
    odd = torch.cat([inputs.k, inputs.k[..., :3]], 3)[..., : inputs.k.shape[3]]
    segment = inputs.segments[0]._replace(k=odd, ready=ready)
    with pytest.raises(ValueError, match="copy engine reads them"):
        forward.forward(inputs.q, [segment], inputs.scale)
    told = segment._replace(k=inputs.k, late=torch.zeros_like(ready))
    with pytest.raises(ValueError, match="late must be given for all"):
        forward.forward(inputs.q, [told, segment._replace(k=inputs.k)], inputs.scale)


def test_deterministic_backward() -> None:
    inputs = Inputs("causal", 1500, 1500)
    inputs.backward_is_exact(deterministic=True)
    out, lse = forward.forward(inputs.q, inputs.segments, inputs.scale)
    delta = plain_backward.delta(inputs.dout, out)

    def dq() -> Tensor:
        grads = [torch.zeros(x.shape, device="cuda") for x in (inputs.q, inputs.k, inputs.v)]
        backward.backward(inputs.dout, inputs.q, inputs.segments, lse, delta, inputs.scale, grads[0], [(grads[1], grads[2])],
                          deterministic=True)  # fmt: skip
        return grads[0]

    first = dq()
    assert all(torch.equal(first, dq()) for _ in range(5))


def test_gradients_of_keys_have_the_same_bits_where_items_are_in_parts() -> None:
    inputs = Inputs("causal", 2048, 2048, nheads=(4, 1))
    out, lse = forward.forward(inputs.q, inputs.segments, inputs.scale)
    delta = plain_backward.delta(inputs.dout, out)

    def dkv() -> tuple[Tensor, Tensor]:
        dq, dk, dv = (torch.empty(x.shape, device="cuda") for x in (inputs.q, inputs.k, inputs.v))
        backward.backward(inputs.dout, inputs.q, inputs.segments, lse, delta, inputs.scale, dq, [(dk, dv)], add=False,
                          add_dq=False)  # fmt: skip
        return dk, dv

    first = dkv()
    for _ in range(5):
        assert all(torch.equal(x, y) for x, y in zip(first, dkv(), strict=True))


def test_strides() -> None:
    """Heads first, every other head, rows apart: any outer strides, and copies where the copy engine cannot read."""
    inputs = Inputs("causal", 400, 400)
    expected, _ = forward.forward(inputs.q, inputs.segments, inputs.scale)
    k, v = inputs.k, inputs.v
    for change in (
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: torch.stack([x, x], 3).flatten(2, 3)[:, :, ::2],
        lambda x: torch.cat([x, x], 3)[..., : x.shape[3]],
        lambda x: torch.cat([x, x[..., :3]], 3)[..., : x.shape[3]],
        lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    ):
        segment = inputs.segments[0]._replace(k=change(k), v=change(v))
        out, _ = forward.forward(change(inputs.q), [segment], inputs.scale)
        assert torch.equal(out, expected)


def test_rows_that_see_nothing_keep_the_carried_state() -> None:
    inputs = Inputs("random", 400, 500)
    state: Any = forward.forward(inputs.q, inputs.segments, inputs.scale, None, False)
    before = [x.clone() for x in state]
    nothing = inputs.segments[0]._replace(begin=inputs.segments[0].begin * 0, end=inputs.segments[0].end * 0)
    after = forward.forward(inputs.q, [nothing], inputs.scale, state, False)
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


@pytest.mark.parametrize("scale", [-0.2, 0.0])
def test_scale_may_be_negative_or_zero(scale: float) -> None:
    inputs = Inputs("causal", 300, 300)
    ours = forward.forward(inputs.q, inputs.segments, scale)
    theirs = plain_forward.forward(inputs.q, inputs.segments, scale)
    torch.testing.assert_close(ours[0], theirs[0], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(ours[1], theirs[1], atol=1e-5, rtol=1e-5)


def test_two_streams_at_once() -> None:
    inputs = Inputs("causal", 1024, 1024)
    expected, _ = forward.forward(inputs.q, inputs.segments, inputs.scale)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    for i in range(20):
        with torch.cuda.stream(streams[i % 2]):
            results.append(forward.forward(inputs.q, inputs.segments, inputs.scale)[0])
    torch.cuda.synchronize()
    assert all(torch.equal(x, expected) for x in results)


def test_launches_leave_their_counters_at_zero() -> None:
    """Also where items are computed again; a graph's launch, replayed between others, has a counter of its own."""
    inputs = Inputs("full", 1024, 4096, nheads=(8, 2))
    late = inputs.k.clone()
    late[:, 3000:3003, :1] *= 300
    segments = inputs.segments[0], inputs.segments[0]._replace(k=late)
    expected = [forward.forward(inputs.q, [s], inputs.scale, deterministic=True)[0] for s in segments]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        captured, _ = forward.forward(inputs.q, [segments[1]], inputs.scale, deterministic=True)
    with torch.cuda.stream(stream):
        for _ in range(3):
            graph.replay()
            assert torch.equal(captured, expected[1])
            for segment, right in zip(segments, expected, strict=True):
                assert torch.equal(forward.forward(inputs.q, [segment], inputs.scale, deterministic=True)[0], right)
    torch.cuda.synchronize()
    stats = torch.zeros(2, dtype=torch.int32, device="cuda")
    forward.forward(inputs.q, [segments[1]], inputs.scale, stats=stats)
    assert int(stats[1]) > 0
    assert len(host._COUNTERS) > 1
    assert not any(x.any() for x in host._COUNTERS.values())


def test_a_flag_that_never_comes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "LIMIT_NS", 50_000_000)
    inputs = Inputs("causal", 256, 256)
    late = torch.zeros(1, dtype=torch.int32).pin_memory()
    ready = torch.zeros(1, dtype=torch.int32, device="cuda")
    forward.forward(inputs.q, [inputs.segments[0]._replace(ready=ready, late=late)], inputs.scale)
    torch.cuda.synchronize()
    assert int(late) == 1

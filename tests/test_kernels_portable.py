"""The host side of launches: strides of views, alignment, which views a descriptor takes, arguments, how many launches."""

import kernel_cases
import pytest
import torch
from kernel_cases import random_case
from torch import Tensor

from ringflash.kernels import backward, config, forward, portable
from ringflash.kernels.reference import Segment

CHOICE = portable.Options()


def decode(x: int) -> int:
    """What blocks.size makes of an encoded number."""
    return (x - (1 << 40)) >> 1


def decoded(x: tuple[int, ...]) -> list[int]:
    return [decode(n) for n in x]


def half(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


def offset_of(x: Tensor, index: tuple[int, int, int]) -> int:
    """Elements from the first of x to x[index]."""
    return (x[index].data_ptr() - x.data_ptr()) // x.element_size()


def heads_first(*shape: int) -> Tensor:
    """(batch, seqlen, nheads, headdim) whose memory is (batch, nheads, seqlen, headdim)."""
    batch, seqlen, nheads, headdim = shape
    return half(batch, nheads, seqlen, headdim).transpose(1, 2)


# Views that a descriptor takes: it sees one matrix whose rows are `stride of a token` wide.
VIEWS = {
    "contiguous": half(2, 12, 3, 16),
    "heads first": heads_first(2, 12, 3, 16),
    "one head": half(2, 12, 3, 16)[:, :, 1:2],
    "part of the tokens": half(2, 20, 3, 16)[:, 3:15],
    "a part of q, k and v in one": half(2, 12, 9, 16)[:, :, 3:6],
    "expanded heads": half(2, 12, 1, 16).expand(-1, -1, 3, -1),
    "expanded batch": half(1, 12, 3, 16).expand(2, -1, -1, -1),
}
# Views that it does not take.
REFUSED = {
    "head dim that is no power of two": half(2, 12, 3, 24),
    "head dim below 16": half(2, 12, 3, 8),
    "rows off 16 bytes": half(2, 12, 52)[..., :48].unflatten(2, (3, 16)),
    "begins off 16 bytes": half(2, 12, 3, 24)[..., 4:20],
    "one token for all": half(2, 1, 3, 16).expand(-1, 12, -1, -1),
    "batch rows between tokens": half(12, 2, 3, 16).transpose(0, 1),
    "tokens 2**31 bytes apart": torch.empty_strided((2, 12, 3, 16), (0, 1 << 30, 16, 1), dtype=torch.bfloat16, device="meta"),
    "rows past 2**31": torch.empty_strided((2, 12, 3, 16), (1 << 38, 64, 16, 1), dtype=torch.bfloat16, device="meta"),
}


@pytest.mark.parametrize("name", VIEWS)
def test_strides_say_where_every_row_lies(name: str) -> None:
    x = VIEWS[name]
    align = portable.alignment([x])
    stride_b, stride_h, stride_n = (n * align for n in decoded(portable.strides_of(x, False, align)))
    for index in ((0, 0, 0), (1, 0, 0), (0, 11, 0), (1, 7, x.shape[2] - 1)):
        b, n, h = index
        assert b * stride_b + n * stride_n + h * stride_h == offset_of(x, index)


@pytest.mark.parametrize("name", VIEWS)
def test_a_descriptor_finds_every_row(name: str) -> None:
    x = VIEWS[name]
    assert portable.describable(x)
    made = portable.describe(x, 4)
    rows, width = made.shape
    assert made.strides == [width, 1]
    assert made.block_shape == [4, 16]
    batch_rows, head_rows, head_columns = decoded(portable.strides_of(x, True, 8))
    for index in ((0, 0, 0), (1, 0, 0), (0, 11, 0), (1, 11, x.shape[2] - 1)):
        b, n, h = index
        row, column = b * batch_rows + h * head_rows + n, h * head_columns
        assert row * width + column == offset_of(x, index)
        assert row < rows
        assert column + 16 <= width


@pytest.mark.parametrize("name", REFUSED)
def test_views_that_no_descriptor_takes(name: str) -> None:
    assert not portable.describable(REFUSED[name])


def test_vectors_that_no_descriptor_takes() -> None:
    x = torch.zeros(2, 3, 40)
    assert portable.describable_vectors(x, x[1:].clone())
    assert not portable.describable_vectors(x, x.flatten()[1:])
    assert not portable.describable_vectors(torch.zeros(1).expand(1 << 31))
    made = portable.describe_vector(x, 8)
    assert (made.shape, made.strides, made.block_shape) == ([240], [1], [8])


def test_dimensions_of_one_entry_have_no_stride() -> None:
    x = half(4, 12, 3, 16)[:1, :, :1]
    assert x.stride()[:3] == (576, 48, 16)
    assert portable.strides(x) == (0, 48, 0)
    odd = torch.zeros(100, dtype=torch.bfloat16).as_strided((1, 4, 1, 16), (7, 16, 3, 1))
    assert portable.alignment([odd]) == 8  # 7 and 3 are never used


def test_alignment_is_what_all_rows_share() -> None:
    assert portable.alignment([half(2, 12, 3, 16)]) == 8
    assert portable.alignment([torch.zeros(2, 12, 3, 16)]) == 4
    assert portable.alignment([half(2, 12, 3, 16), half(2, 12, 3, 12)]) == 1
    x = half(2, 12, 3, 12)
    assert decoded(portable.strides_of(x, False, 1)) == [432, 12, 36]


def test_a_copy_only_where_the_last_dimension_is_not_contiguous() -> None:
    x = half(1, 12, 3, 16)
    for view in (x, x.transpose(1, 2), x[..., :8], x[..., 3:4]):
        assert portable.unit_stride(view).data_ptr() == view.data_ptr()
    for view in (x.transpose(2, 3), x[..., ::2], x[..., :1].expand(-1, -1, -1, 4)):
        copy = portable.unit_stride(view)
        assert copy.stride(-1) == 1
        assert torch.equal(copy, view)


@pytest.mark.parametrize("value", [0, 1, 15, 16, (1 << 31) - 1, 1 << 31, (1 << 38) + 16])
def test_encoded_numbers_look_alike_to_triton(value: int) -> None:
    (x,) = portable.encode(value)
    assert decode(x) == value
    assert x % 2 == 1
    assert 1 << 40 < x < 1 << 63


def test_segment_arguments() -> None:
    case = random_case(10, (20, 30, 40), shared=True)
    ready = torch.zeros(1, dtype=torch.int32)
    per_batch = random_case(10, (40,)).segments[0]
    segments = [case.segments[0], case.segments[1]._replace(ready=ready), per_batch._replace(ready=ready)]
    args = portable.segment_arguments(segments, (case.q,), 16)
    begins, ends, strides, readys, waits = args.intervals
    assert [x.data_ptr() for x in begins] == [s.begin.data_ptr() for s in segments]
    assert [x.data_ptr() for x in ends] == [s.end.data_ptr() for s in segments]
    assert decoded(strides) == [0, 0, 10]  # intervals of one row serve the whole batch
    assert decode(waits) == 0b110
    assert [x is ready for x in readys] == [False, True, True]
    assert args.constexprs == {"SEGMENTS": 3, "WAIT": True, "ALIGN": args.align, "PRECISION": "ieee"}
    assert [x.shape for x in args.ks] == [s.k.shape for s in segments]
    for strides, xs in zip(args.keys, ([s.k for s in segments], [s.v for s in segments]), strict=True):
        assert strides == tuple(portable.strides_of(x, False, args.align) for x in xs)
    assert not portable.segment_arguments(segments[:1], (case.q,), 16).constexprs["WAIT"]


def test_segment_arguments_by_descriptor() -> None:
    segment = random_case(10, (20,)).segments[0]
    args = portable.segment_arguments([segment], (segment.k,), 16, tma=True)
    assert [x.block_shape for x in (*args.ks, *args.vs)] == [[16, 16], [16, 16]]
    assert portable.slots(args.ks) == args.ks + (None,) * (portable.MAX_SEGMENTS - 1)


def test_descriptors_are_for_chips_and_views_that_take_them() -> None:
    good, bad = (Segment(x, x, *torch.zeros(2, 1, 4).int()) for x in (half(2, 12, 3, 16), half(2, 12, 3, 24)))
    wanted, unwanted = portable.Options(tma=True), portable.Options(tma=False)
    assert portable.keys_by_descriptor([good], wanted)
    assert not portable.keys_by_descriptor([good, bad], wanted)
    assert not portable.keys_by_descriptor([good], unwanted)
    assert not portable.keys_by_descriptor([], wanted)
    assert not portable.has_descriptors(torch.device("cpu"))
    assert not portable.keys_by_descriptor([good], CHOICE)


def test_heads_together() -> None:
    fits = portable.CACHE_BYTES // 4
    assert portable.heads_together(fits, 3, 100) == 12  # four key heads in the cache, three query heads each
    assert portable.heads_together(fits, 3, 5) == 5
    assert portable.heads_together(portable.CACHE_BYTES * 2, 3, 100) == 3  # one does not fit: still a whole group
    assert portable.heads_together(0, 1, 7) == 7


def test_bytes_of_a_key_head() -> None:
    segments = random_case(4, (20, 30), headdims=(16, 24)).segments
    assert portable.key_bytes(segments) == 50 * 40 * 4


class Launches:
    """Stands for a kernel: notes the grid and SEGMENTS of each launch."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []
        self.segments: list[int] = []
        self.flags: list[tuple[bool, bool]] = []

    def __getitem__(self, grid: tuple[int, ...]):
        def launch(*args: object, **options: object) -> None:
            self.grids.append(grid)
            self.segments.append(options["SEGMENTS"])  # pyright: ignore[reportArgumentType]
            self.flags.append((bool(options.get("CARRIED")), bool(options.get("FINISH"))))

        return launch


def test_segments_in_launches() -> None:
    most = portable.MAX_SEGMENTS
    segments = random_case(3, (5, 0) * (most + 1), batch=1).segments
    assert [len(part) for part in portable.in_launches(segments)] == [most, 1]  # those without keys are not walked
    assert portable.in_launches([]) == [[]]
    assert [len(part) for part in portable.in_launches(segments[: 2 * most])] == [most]


@pytest.mark.parametrize(("count", "launches"), [(0, [0]), (1, [1]), (8, [8]), (9, [8, 1]), (17, [8, 8, 1])])
def test_launches_of_the_forward(monkeypatch: pytest.MonkeyPatch, count: int, launches: list[int]) -> None:
    kernel = Launches()
    monkeypatch.setattr(forward, "_kernel", kernel)
    case = random_case(40, (5,) * count, batch=2, nheads=(4, 2))
    forward.forward(case.q, case.segments, case.scale)
    assert kernel.segments == launches
    tile = config.lookup("cpu", torch.float32, 16, 16).forward
    assert kernel.grids == [(-(-40 // tile.block_q) * 2 * 4,)] * len(launches)
    last = len(launches) - 1  # the state goes from launch to launch, the last finishes
    assert kernel.flags == [(i > 0, i == last) for i in range(len(launches))]


@pytest.mark.parametrize(("count", "launches"), [(0, []), (1, [1]), (8, [8]), (9, [8, 1])])
def test_launches_of_the_backward(monkeypatch: pytest.MonkeyPatch, count: int, launches: list[int]) -> None:
    kernels = {name: Launches() for name in ("_dq_kernel", "_dkv_kernel")}
    for name, kernel in kernels.items():
        monkeypatch.setattr(backward, name, kernel)
    case = random_case(40, (5,) * count, batch=2, nheads=(4, 2))
    lse = torch.zeros(2, 4, 40)
    dkv = [(torch.zeros_like(s.k), torch.zeros_like(s.v)) for s in case.segments]
    backward.backward(case.dout, case.q, case.segments, lse, lse, case.scale, torch.zeros_like(case.q), dkv)
    assert [kernel.segments for kernel in kernels.values()] == [launches, launches]
    assert kernels["_dkv_kernel"].grids == [(n * 2 * 2,) for n in launches]  # a key block per segment, key heads only
    backward.backward(case.dout, case.q, case.segments, lse, lse, case.scale, None, dkv)
    assert [kernel.segments for kernel in kernels.values()] == [launches, launches * 2]
    backward.backward(case.dout, case.q, case.segments, lse, lse, case.scale, torch.zeros_like(case.q), None)
    assert [kernel.segments for kernel in kernels.values()] == [launches * 2, launches * 2]


def test_precision_follows_torch() -> None:
    assert portable.precision(torch.zeros(1)) == "ieee"
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert portable.precision(torch.zeros(1)) == "tf32"
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert portable.precision(half(1)) == "upcast"  # the interpreter


def test_pads_and_arch() -> None:
    assert portable.pads(24, 130) == {"HEADDIM_PAD": 32, "HEADDIM_V_PAD": 256}
    with portable.guard(torch.device("cpu")):
        assert portable.arch(torch.device("cpu")) == "cpu"
    assert kernel_cases.TARGETS.keys() == {arch for arch, _, _ in config.TABLE} - {"cpu"}

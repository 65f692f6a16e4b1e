"""What benchmarks/bench_peers.py compares is the same attention, and one contestant's failure is known to all ranks."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import bench_peers
import flash_attn_stand_in
import oracle
import pytest
import ring_peers
import rings
import timing_ranks
import torch
import torch.distributed as dist
from pool import Pools
from rings import Problem
from torch import Tensor

DOCUMENTS = {"causal": (64,), "packed": (23, 1, 28, 12)}


def whole(problem: Problem) -> dict[str, Tensor]:
    """out, dq, dk, dv of the whole sequence."""
    at = torch.arange(problem.seqlen)
    grads = problem.dout, torch.zeros(1, problem.q.shape[2], problem.seqlen)
    found = oracle.results((problem.q, problem.k, problem.v), grads, oracle.visible(problem.mask, at, at))
    return {name: getattr(found, name) for name in rings.NAMES}


@contextmanager
def plain(problem: Problem) -> Iterator[ring_peers.Attend]:
    at = torch.arange(problem.seqlen)
    sees = oracle.visible(problem.mask, at, at)
    yield lambda q, k, v: oracle.attention(q, k, v, sees)[0].to(q.dtype)


def compared(case: str) -> list[dict[str, float]]:
    """What Ulysses around plain attention, and the baselines, differ by."""
    problem = Problem(DOCUMENTS[case], torch.device("cpu"))
    expected, found = whole(problem), []
    with ring_peers.ulysses(problem, attend=plain) as one:
        found.append(rings.differences(one, expected))
    for layout in ("zigzag", "balanced", "per_document"):
        with rings.baseline(problem, layout) as one:
            found.append(rings.differences(one, expected))
    return found


@pytest.mark.parametrize("case", DOCUMENTS)
@pytest.mark.parametrize("size", [1, 2])
def test_contestants_compute_the_whole_sequences_attention(pools: Pools, size: int, case: str) -> None:
    for ulysses, *baselines in pools.run(size, compared, case):
        assert set(ulysses) == set(rings.NAMES)
        assert [set(x) for x in baselines] == [{"out", "dq"}] * 3


def too_wrong() -> str:
    problem = Problem((16,), torch.device("cpu"))
    expected = whole(problem)
    one = rings.entry(problem, problem.layout("zigzag").positions(problem.rank), lambda q, k, v: q + 0 * (k.sum() + v.sum()))
    with pytest.raises(RuntimeError) as found:
        rings.differences(one, expected)
    return str(found.value)


def test_something_else_is_found_out(pools: Pools) -> None:
    assert pools.run(1, too_wrong)[0].startswith("computes something else: out is ")


def fails_on(rank: int) -> tuple[str, str]:
    def call() -> None:
        if dist.get_rank() == rank:
            raise ValueError("no\nluck")

    group = timing_ranks.verdicts()
    return timing_ranks.attempt(call, group), timing_ranks.attempt(lambda: None, group)


def test_all_ranks_know_that_one_failed(pools: Pools) -> None:
    assert pools.run(2, fails_on, 1) == [("ValueError: no luck", "")] * 2


@pytest.mark.parametrize("size", [1, 2, 3])
def test_padded_zigzag_holds_each_token_once(size: int) -> None:
    lengths = (5, 1, 12, 24)
    parts = [ring_peers.padded_zigzag(lengths, rank, size) for rank in range(size)]
    positions = torch.cat([positions for positions, _ in parts])
    assert positions[positions >= 0].sort().values.tolist() == list(range(sum(lengths)))
    for positions, local in parts:
        assert len(positions) == sum(local)
        assert all(n % 2 == 0 for n in local)
        documents = positions.split(local)
        for document, begin, length in zip(documents, itertools.accumulate(lengths, initial=0), lengths, strict=False):
            assert document[document >= 0].tolist() == sorted(document[document >= 0].tolist())
            assert all(begin <= x < begin + length for x in document[document >= 0].tolist())


def test_ratios_are_to_the_baseline_of_the_layout_and_to_every_peer() -> None:
    def entry(by: str, ms: float, how: str = "isolated") -> bench_peers.Row:
        return {"by": by, "pass": "forward", "how": how, "ms": ms}

    rows = [
        entry("baseline zigzag", 9.0),
        entry("baseline balanced", 8.0),
        entry("ringflash auto zigzag", 10.0),
        entry("ulysses-fa4", 12.0),
        entry("ulysses-fa4", 99.0, "back to back"),
    ]
    bench_peers.add_ratios(rows)
    assert [row.get("ratios") for row in rows] == [None, None, {"baseline zigzag": 0.9, "ulysses-fa4": 1.2}, None, None]


def test_cases_are_named() -> None:
    assert rings.lengths_of("causal", 100) == (100,)
    assert sum(rings.lengths_of("packed", 16384)) == 16384
    with pytest.raises(ValueError, match="packed: packed, 100 tokens"):
        rings.lengths_of("packed", 100)


def test_the_stand_in_hands_on_what_it_is_called_with() -> None:
    seen: list[tuple] = []

    def forward(*args: object) -> tuple[Tensor, Tensor]:
        seen.append(args)
        return torch.zeros(1), torch.zeros(2)

    module = flash_attn_stand_in.interface(flash_attn_stand_in.Kernels(forward, lambda *args: seen.append(args)))
    q, k = torch.zeros(1, 6, 2, 4), torch.zeros(1, 8, 2, 4)
    common = {"dropout_p": 0.0, "softmax_scale": 0.5, "causal": True, "window_size": (-1, -1), "alibi_slopes": None}
    out, lse, *rest = module._flash_attn_forward(q=q, k=k, v=k, return_softmax=False, **common)
    assert (len(out), len(lse), rest) == (1, 2, [None, None])
    assert seen.pop() == (q, k, k, (None, None, 6, 8), 0.5, True)
    backward: Callable[..., None] = module._flash_attn_backward
    backward(dout=q, q=q, k=k, v=k, out=q, softmax_lse=lse, dq=1, dk=2, dv=3, deterministic=False, **common)
    assert seen.pop()[6:] == ((None, None, 6, 8), 0.5, True, (1, 2, 3))

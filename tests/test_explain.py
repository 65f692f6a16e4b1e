"""What explain says, against counting: pairs, bytes, schedule, and the errors ring_attention would raise."""

import re
import sys
from collections.abc import Sequence

import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ringflash as rf
from ringflash.plan import make_plan
from ringflash.tile import Inputs, Tile, pick

CAUSAL = rf.Mask(causal=True)


def shards(layout: rf.Layout, rank: int = 0, dtype: torch.dtype = torch.bfloat16, device: str = "meta") -> list[Tensor]:
    """q (2, tokens, 8, 64), k with 2 heads, v with headdim_v 32."""
    shapes = ((8, 64), (2, 64), (2, 32))
    return [torch.empty(2, layout.lengths[rank], *shape, dtype=dtype, device=device) for shape in shapes]


@given(
    st.sampled_from([CAUSAL, rf.Mask(), rf.Mask(causal=True, window=(9, 0)), rf.Mask(documents=(0, 11, 40))]),
    st.sampled_from(["zigzag", "contiguous", "striped"]),
    st.sampled_from(["auto", "rotate", "direct"]),
    st.integers(1, 4),
    st.data(),
)
@settings(max_examples=40)
def test_work_and_bytes_are_right(mask: rf.Mask, name: str, schedule: str, size: int, data: st.DataObject) -> None:
    layout, rank = getattr(rf.layouts, name)(40, size), data.draw(st.integers(0, size - 1))
    options = rf.Options(schedule=schedule, transport="p2p")
    told = rf.explain(*shards(layout, rank), layout=layout, mask=mask, rank=rank, options=options)
    plan = make_plan(layout, mask, schedule=schedule)
    position = torch.arange(40)
    pairs = oracle.visible(mask, position, position)[0]
    for step, turn in zip(told.steps, plan.forward.turns[rank], strict=True):
        seen = sum(int(pairs[layout.positions(rank)][:, layout.positions(block)].sum()) for block in step.attends)
        assert (step.attends, step.pairs) == (turn.attend, seen)
        element = 2 * 2 * (64 + 32)  # batch * nheads_k * (headdim + headdim_v)
        for told_bytes, hops, itemsize in (
            (step.bytes_sent, turn.hops.sends, 2),
            (step.bytes_received, turn.hops.recvs, 2),
            (step.grad_bytes_sent, turn.hops.grad_sends, 4),
            (step.grad_bytes_received, turn.hops.grad_recvs, 4),
        ):
            assert told_bytes == sum(layout.lengths[block] for block, _ in hops) * element * itemsize
    each = [int(pairs[layout.positions(r)].sum()) for r in range(size)]
    assert told.pairs_per_rank == tuple(each)
    assert told.flops == 2 * 2 * 8 * each[rank] * (64 + 32)
    assert told.imbalance == pytest.approx(max(each) * size / sum(each))
    assert told.schedule.startswith(plan.schedule)


def test_bytes_sent_in_a_rank_pass_equal_bytes_received_somewhere() -> None:
    layout = rf.layouts.zigzag(57, 4)
    told = [rf.explain(*shards(layout, rank), layout=layout, mask=CAUSAL, rank=rank) for rank in range(4)]
    for steps in zip(*(t.steps for t in told), strict=True):
        assert sum(s.bytes_sent for s in steps) == sum(s.bytes_received for s in steps)
        assert sum(s.grad_bytes_sent for s in steps) == sum(s.grad_bytes_received for s in steps)


def test_the_report_is_readable() -> None:
    layout = rf.layouts.zigzag(65536, 4)
    text = str(rf.explain(*shards(layout), layout=layout, mask=CAUSAL, options=rf.Options(transport="p2p")))
    for words in (
        "rank 0 of 4: Layout(zigzag, seqlen=65536, size=4), Mask(causal=True",
        "kernel     triton (hopper has headdim 64, 128, 192/128, 256, not 64/32; meta tensors: as on an sm_90 GPU)",
        "transport  p2p (asked for)",
        "schedule   rotate (moves 12 blocks between neighbours; direct would move as many)",
        "busiest rank 1.000 x the mean",
        "step  attends  visible pairs",
        "12 MiB",
    ):
        assert words in text
    assert max(map(len, text.splitlines())) <= 128


def test_gathered_keys_are_in_the_report() -> None:
    """One launch forward, and what is kept for all keys and their gradients."""
    layout = rf.layouts.zigzag(65536, 4)
    told = rf.explain(*shards(layout, 1), layout=layout, mask=CAUSAL, rank=1, options=rf.Options(transport="nvlink"))
    assert told.transport == "nvlink (asked for)"
    assert [step.attends for step in told.steps] == [(1, 0, 3, 2)]
    assert [step.attends for step in told.backward_steps] == [(0, 3, 2), (1,)]
    block = 65536 // 4 * 2 * 2 * (64 + 32) * 2
    assert [step.bytes_received for step in told.steps] == [3 * block]
    assert [step.grad_bytes_sent for step in told.backward_steps] == [0, 3 * 2 * block]
    assert told.buffer_bytes == 2 * block + 3 * (block + 2 * 2 * block)
    assert "schedule   gather" in str(told)
    assert "\nback  attends" in str(told)
    assert max(map(len, str(told).splitlines())) <= 128
    kept = rf.Options(transport="nvlink", max_buffer_bytes=told.buffer_bytes - 1)
    with pytest.raises(NotImplementedError, match=f"'nvlink' would keep {told.buffer_bytes} bytes of buffers"):
        rf.explain(*shards(layout), layout=layout, mask=CAUSAL, options=kept)


def test_meta_tensors_may_go_to_any_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = rf.layouts.zigzag(40, 2)
    q, k, _ = shards(layout)
    assert max(map(len, str(rf.explain(q, k, k, layout=layout)).splitlines())) <= 128
    asked = []

    def choose(kernel: str, inputs: Inputs, *, deterministic: bool, fixed: bool) -> Tile:
        asked.append((kernel, inputs, deterministic, fixed))
        return pick("reference", torch.empty(1, 64), torch.empty(1, 64))._replace(name="hopper", why="why")

    monkeypatch.setattr(sys.modules["ringflash.explain"], "choose", choose)
    told = rf.explain(q, k, k, layout=layout)
    assert told.kernel == "hopper on an sm_90 GPU, triton on another (meta tensors)"
    told = rf.explain(q, k, k, layout=layout, options=rf.Options(kernel="hopper", deterministic=True))
    assert told.kernel == "hopper (why; meta tensors: as on an sm_90 GPU)"
    inputs = Inputs("sm_90", torch.bfloat16, 64, 64)
    assert asked == [("auto", inputs, False, False), ("hopper", inputs, True, False)]


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), [7, 3, 7, 3], (0, 1, 2, 2), (4, 4, 4, 4)])
@pytest.mark.parametrize("schedule", ["auto", "rotate", "direct", "hierarchical"])
def test_bytes_over_host_borders(hosts: Sequence[int], schedule: str) -> None:
    layout, options = rf.layouts.contiguous(38, 4), rf.Options(schedule=schedule, transport="p2p")
    every = [rf.explain(*shards(layout, r), layout=layout, rank=r, hosts=hosts, options=options) for r in range(4)]
    plan = make_plan(layout, rf.Mask(), schedule=schedule, hosts=tuple(hosts))
    element = 2 * 2 * (64 + 32)  # batch * nheads_k * (headdim + headdim_v)

    def tokens(kind: str) -> int:
        hops = [(r, hop) for r in range(4) for turn in plan.forward.turns[r] for hop in getattr(turn.departing, kind)]
        return sum(layout.lengths[block] for rank, (block, to) in hops if hosts[rank] != hosts[to])

    for told, turns in zip(every, plan.forward.turns, strict=True):
        assert told.schedule == f"{plan.schedule} ({plan.why})"
        assert (told.border_bytes, told.grad_border_bytes) == (
            tokens("sends") * element * 2,
            tokens("grad_sends") * element * 4,
        )
        assert told.hosts == tuple(hosts)
        sent = [sum(layout.lengths[block] for block, _ in turn.departing.sends) * element * 2 for turn in turns]
        assert [step.bytes_sent for step in told.steps] == sent
        assert ("hosts" in str(told)) == (len(set(hosts)) > 1)


def test_hosts_and_what_crosses_their_borders_are_in_the_report() -> None:
    layout = rf.layouts.zigzag(65536, 8)
    text = str(rf.explain(*shards(layout), layout=layout, mask=CAUSAL, hosts=[0] * 4 + [1] * 4))
    assert "schedule   rotate (14 blocks cross host borders; direct 32; hierarchical, on request, would cross 8)" in text
    assert "hosts      2; 84 MiB of K and V cross their borders, in backward 168 MiB of dK and dV besides" in text
    assert max(map(len, text.splitlines())) <= 128


def test_heads_are_in_the_report() -> None:
    """8 query heads on 2 key heads: halves of a group; and thirds, which cut groups unevenly."""
    layout = rf.layouts.zigzag(65536, 4)
    told = rf.explain(*shards(layout), layout=layout, mask=CAUSAL, options=rf.Options(transport="ulysses"))
    assert told.transport == "ulysses (asked for)"
    assert (told.heads_per_rank, told.imbalance) == ((2, 2, 2, 2), 1.0)
    assert "heads      over 4 ranks; here 2 of queries, 1 of keys\n" in str(told)
    assert "exchange   54.75 MiB sent to the other 3 in forward, 115.5 MiB in backward\n" in str(told)
    assert told.pairs_per_rank == (65536 * 65537 // 2,) * 4
    assert told.flops == 2 * 2 * 2 * told.pairs_per_rank[0] * (64 + 32)
    assert [step.attends for step in told.steps] == [(0,)]

    layout = rf.layouts.zigzag(65536, 6)
    told = rf.explain(*shards(layout, 4), layout=layout, mask=CAUSAL, mesh=(2, 3), rank=4, hosts=[0, 0, 1, 1, 1, 2])
    assert told.transport.startswith(
        "hybrid (ring of 2 by p2p: keeps two blocks in flight; nvlink needs one ring of all ranks: "
    )
    assert told.heads_per_rank == (2, 3, 3, 2, 3, 3)
    assert told.imbalance == pytest.approx(9 / 8, rel=1e-4)
    assert [step.attends for step in told.steps][:2] == [(1,), (0,)]
    assert told.heads is not None
    assert (told.heads.nheads_q, told.heads.nheads_k, told.heads.repeated_k) == (3, 2, 3)
    assert 2 * told.heads.border_bytes == pytest.approx(told.heads.bytes_sent, rel=0.2)
    assert "heads      over 3 ranks; here 3 of queries, 2 of keys, attended as 3\n" in str(told)
    assert "in backward; of these 16.25 MiB and 40.5 MiB cross host borders\n" in str(told)
    assert max(map(len, str(told).splitlines())) <= 128


def test_what_crosses_borders_where_each_rank_is_a_host() -> None:
    layout, how = rf.layouts.zigzag(64, 4), {"mesh": (2, 2), "hosts": (0, 1, 2, 3), "mask": CAUSAL}
    told = [rf.explain(*shards(layout, rank), layout=layout, rank=rank, **how) for rank in range(4)]  # pyright: ignore
    assert {t.border_bytes for t in told} == {sum(step.bytes_sent for t in told for step in t.steps)}
    assert {t.grad_border_bytes for t in told} == {sum(step.grad_bytes_sent for t in told for step in t.steps)}
    for heads in (t.heads for t in told):
        assert heads is not None
        assert (heads.border_bytes, heads.grad_border_bytes) == (heads.bytes_sent, heads.grad_bytes_sent)


def test_a_mesh_without_an_exchange_of_heads_is_a_ring() -> None:
    layout = rf.layouts.zigzag(40, 4)
    ring = rf.explain(*shards(layout), layout=layout, mask=CAUSAL)
    assert rf.explain(*shards(layout), layout=layout, mask=CAUSAL, mesh=(4, 1)) == ring
    assert ring.heads is None


def test_no_work_is_balanced_and_one_rank_moves_nothing() -> None:
    layout = rf.layouts.zigzag(0, 1)
    told = rf.explain(*shards(layout), layout=layout)
    assert (told.imbalance, told.flops, told.buffer_bytes) == (1.0, 0, 0)
    assert told.transport == "none (one rank)"


def test_buffers_are_the_blocks_in_flight() -> None:
    layout, options = rf.layouts.contiguous(40, 4), rf.Options(transport="p2p")
    block = 10 * 2 * 2 * (64 + 32) * 2
    assert rf.explain(*shards(layout), layout=layout, options=options).buffer_bytes == 2 * block
    assert rf.explain(*shards(layout, 1), layout=layout, mask=CAUSAL, rank=1, options=options).buffer_bytes == block
    assert rf.explain(*shards(layout), layout=layout, mask=rf.Mask(window=(0, 0)), options=options).buffer_bytes == 0


def test_a_name_needs_a_size_and_tensors_on_a_cpu_get_the_reference() -> None:
    q, k, v = shards(rf.layouts.zigzag(40, 4), device="cpu")
    told = rf.explain(q, k, v, layout="zigzag", size=4)
    assert told.kernel == "reference (tensors on a CPU)"
    assert told.layout == "Layout(zigzag, seqlen=40, size=4)"
    with pytest.raises(ValueError, match="size must be given where layout is a name: layout='zigzag'"):
        rf.explain(q, k, v, layout="zigzag")


def test_keys_may_lie_elsewhere() -> None:
    layout, kv_layout = rf.layouts.contiguous(8, 2).shift(12), rf.layouts.striped(20, 2)
    q, (_, k, v) = shards(layout)[0], shards(kv_layout)
    told = rf.explain(q, k, v, layout=layout, kv_layout=kv_layout, mask=CAUSAL)
    assert sum(told.pairs_per_rank) == sum(range(13, 21))


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"rank": 2}, ValueError, "rank must be in 0 ... size-1: rank=2, size=2"),
        ({"size": 3}, ValueError, "layout must be for this ring's size: layout.size=2, ring size 3"),
        ({"hosts": (0, 0, 1)}, ValueError, "hosts must be one number per rank, such as (0, 0): hosts=(0, 0, 1)"),
        ({"hosts": "ab"}, ValueError, "hosts must be one number per rank, such as (0, 0): hosts='ab'"),
        ({"hosts": 2}, ValueError, "hosts must be one number per rank, such as (0, 0): hosts=2"),
        ({"mesh": (2, 2)}, ValueError, "mesh must hold as many ranks as the layout: mesh=(2, 2), size=2"),
        (
            {"mesh": (1, 1, 2)},
            ValueError,
            "mesh must be the shape of a DeviceMesh, such as (1, 2) for (ring, heads): mesh=(1, 1",
        ),
        ({"mesh": 2}, ValueError, "mesh must be the shape of a DeviceMesh"),
        ({"mesh": (2, 1), "options": rf.Options(transport="ulysses")}, ValueError, "transport='ulysses' must have all ranks"),
        ({"layout": rf.layouts.zigzag(42, 2)}, ValueError, "q must hold this rank's tokens of the layout"),
        ({"layout": 3}, TypeError, "layout must be an rf.Layout or the name of one: layout=3"),
        ({"layout": "ring", "size": 2}, ValueError, "layout must be one of 'contiguous', 'zigzag', 'striped'"),
        ({"mask": None}, TypeError, "mask must be an rf.Mask: mask=None"),
        ({"mask": rf.Mask(documents=(0, 4))}, ValueError, "documents must end at the sequence length"),
        ({"options": None}, TypeError, "options must be an rf.Options: options=None"),
        ({"options": rf.Options(kernel="hopper")}, NotImplementedError, "kernel='hopper' has headdim"),
    ],
    ids=str,
)
def test_refusals_are_those_of_ring_attention(change: dict, kind: type[Exception], words: str) -> None:
    layout = rf.layouts.zigzag(40, 2)
    with pytest.raises(kind, match=re.escape(words)):
        rf.explain(*shards(layout), **{"layout": layout, **change})

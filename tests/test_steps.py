"""A rank's steps as explain tells them: what goes to whom, and about how long a step takes."""

import pytest
import torch

import ringflash as rf
from ringflash import rates, steps
from ringflash.plan import make_plan

CAUSAL = rf.Mask(causal=True)


def shards(tokens: int, headdim: int = 128) -> list[torch.Tensor]:
    """q with 32 heads and k, v with 8, on no device."""
    return [torch.empty(1, tokens, heads, headdim, dtype=torch.bfloat16, device="meta") for heads in (32, 8, 8)]


@pytest.mark.parametrize("schedule", ["rotate", "direct", "gather"])
def test_links_carry_what_steps_send(schedule: str) -> None:
    plan = make_plan(rf.layouts.contiguous(100, 4), CAUSAL, schedule=schedule)
    for rank in range(4):
        links = steps.links(plan, rank, per_token=10, grads_per_token=100)
        sent = [step for step, _ in steps.reports(plan, plan.forward, rank, per_token=10, grads_per_token=100)]
        back = [step for step, _ in steps.reports(plan, plan.backward, rank, per_token=10, grads_per_token=100)]
        assert sum(there for _, there, _ in links) == sum(step.bytes_sent for step in sent)
        assert sum(home for *_, home in links) == sum(step.bytes_sent + step.grad_bytes_sent for step in back)
        assert all(to != rank for to, *_ in links)


def test_what_crosses_a_border_is_told() -> None:
    plan = make_plan(rf.layouts.contiguous(100, 4), rf.Mask(), schedule="rotate", hosts=(0, 0, 1, 1))
    assert next(away for _, away in steps.reports(plan, plan.forward, 1, per_token=10, grads_per_token=100))
    alone = make_plan(rf.layouts.contiguous(100, 4), rf.Mask(), schedule="rotate")
    assert not any(away for _, away in steps.reports(alone, alone.forward, 1, per_token=10, grads_per_token=100))


@pytest.mark.parametrize(("tokens", "bound"), [(256, "moving"), (65536, "attending")])
def test_a_step_takes_the_longer_of_attending_and_moving(tokens: int, bound: str) -> None:
    layout = rf.layouts.zigzag(2 * tokens, 2)
    told = rf.explain(*shards(tokens), layout=layout, mask=CAUSAL, options=rf.Options(transport="p2p"))
    step = told.steps[0]
    flops = 4 * 32 * 128 * step.pairs
    attending = rates.attend_ms(told.kernel, flops, backward=False)
    moving = rates.move_ms("p2p", step.bytes_sent, between_hosts=False)
    assert step.forward_ms == pytest.approx(moving if bound == "moving" else attending)
    assert step.forward_ms == max(attending or 0, moving)
    assert "about ms" in str(told)
    assert f"links      to 1 {steps.in_bytes(step.bytes_sent)}, in backward" in str(told)


def test_a_cpu_gets_no_times() -> None:
    q, k, v = (torch.empty(1, 8, heads, 16) for heads in (2, 1, 1))
    told = rf.explain(q, k, v, layout="zigzag", size=2)
    assert told.steps[0].forward_ms is None
    assert "about ms" not in str(told)


def test_an_all_gather_moves_every_block_before_it_attends() -> None:
    """A window that needs one block of another rank: all blocks come, padded to the longest, and then the kernel starts."""
    layout, mask = rf.layouts.contiguous(4 * 1024 + 2, 4), rf.Mask(causal=True, window=(100, 0))
    q, k, v = (torch.empty(1, layout.lengths[1], h, 128, dtype=torch.bfloat16, device="meta") for h in (32, 8, 8))
    told = rf.explain(q, k, v, layout=layout, mask=mask, rank=1, options=rf.Options(transport="allgather"))
    (step,), block = told.steps, max(layout.lengths) * 2 * 8 * 128 * 2
    assert (step.bytes_sent, step.bytes_received) == (3 * block, 3 * block)
    assert told.links == tuple((other, block, 3 * block) for other in (0, 2, 3))
    moving = rates.move_ms("allgather", 3 * block, between_hosts=False)
    attending = rates.attend_ms(told.kernel, 4 * 32 * 128 * step.pairs, backward=False)
    assert attending is not None
    assert step.forward_ms == pytest.approx(moving + attending)


@pytest.mark.parametrize(("mesh", "rank", "partner"), [((2, 2), 3, 1), ((2, 3), 1, 4)])
def test_links_of_a_mesh_name_ranks_of_the_mesh(mesh: tuple[int, int], rank: int, partner: int) -> None:
    size = mesh[0] * mesh[1]
    told = rf.explain(*shards(64), layout=rf.layouts.zigzag(64 * size, size), mesh=mesh, rank=rank)
    assert [to for to, *_ in told.links] == [partner]


@pytest.mark.parametrize("change", [{"dtype": torch.float32}, {"headdim": 256}])
def test_what_was_not_measured_is_not_predicted(change: dict) -> None:
    q, k, v = (x.to(change.get("dtype", x.dtype)) for x in shards(64, change.get("headdim", 128)))
    told = rf.explain(q, k, v, layout="zigzag", size=2, mask=CAUSAL)
    assert told.steps[0].forward_ms is None


def test_many_links_are_not_all_named() -> None:
    told = rf.explain(*shards(64), layout=rf.layouts.striped(64 * 8, 8), options=rf.Options(schedule="direct"))
    assert len(told.links) == 7
    assert "; and 4 more\n" in str(told)
    assert max(map(len, str(told).splitlines())) <= 128

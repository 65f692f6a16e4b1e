"""The copy task: what is to be predicted lies on another rank than its source, and a cut mask hides the source."""

import pytest
import torch

import ringflash as rf
from ringflash.demo.copy_task import BLANK, PAYLOAD, Outcome, copy_mask, draw_copies, lag, sequence_length
from ringflash.demo.parts import verdict
from ringflash.demo.train import IGNORE

SIZES = [2, 3, 4, 5, 7, 8, 16, 31, 32, 33, 64, 100]


def owners(layout: rf.Layout) -> torch.Tensor:
    """The rank that holds each position."""
    return torch.repeat_interleave(torch.arange(layout.size), torch.tensor(layout.lengths))


def test_labels_repeat_the_payload() -> None:
    tokens, labels = draw_copies(64, count=3, seed=0)
    targets = labels != IGNORE
    assert targets.sum(1).tolist() == [PAYLOAD] * 3
    assert torch.equal(labels[targets], tokens[targets])
    assert torch.equal(tokens[:, 1 : 1 + PAYLOAD], tokens[:, -PAYLOAD:])
    assert (tokens[:, 1 + PAYLOAD : lag(64)] == BLANK).all()
    assert not torch.equal(tokens[0], tokens[1])


@pytest.mark.parametrize("size", SIZES)
def test_source_and_target_lie_on_different_ranks(size: int) -> None:
    seqlen = sequence_length(size)
    owner = owners(rf.layouts.contiguous(seqlen, size))
    _, labels = draw_copies(seqlen, count=1, seed=0)
    for target in (labels[0] != IGNORE).nonzero().flatten().tolist():
        source, asking = target - lag(seqlen), target - 1  # the token before a target has to predict it
        assert owner[source] != owner[target]
        assert owner[source] != owner[asking]


@pytest.mark.parametrize("size", SIZES)
def test_a_cut_shows_each_rank_its_own_shard(size: int) -> None:
    seqlen = sequence_length(size)
    layout = rf.layouts.contiguous(seqlen, size)
    owner = owners(layout)
    (rows,) = copy_mask(layout, cut=True).document_rows(seqlen)
    assert torch.equal(torch.repeat_interleave(torch.arange(size), torch.from_numpy(rows).diff()), owner)
    assert copy_mask(layout, cut=False) == rf.Mask(causal=True)


def test_the_verdict_is_worded_as_what_it_is() -> None:
    rules = "(chance is 6.2%, at most 12.5%)"
    assert verdict(1.0, cut=False) == (True, "accuracy on fresh sequences 100.0% (at least 95%; chance is 6.2%)")
    assert verdict(0.9, cut=False)[0] is False
    near = f"accuracy on fresh sequences 6.2%: near chance, as it must be without the other shards {rules}"
    above = f"accuracy on fresh sequences 40.0%: above chance, which it cannot be without the other shards {rules}"
    assert verdict(0.0625, cut=True) == (True, near)
    assert verdict(0.4, cut=True) == (False, above)


def test_why_training_ended() -> None:
    assert Outcome(100, 1.0, 0.99).ending == "stopped at step 100 of at most 400: accuracy 100%"
    assert Outcome(400, 0.06, 0.07).ending == "all 400 steps done: accuracy 6%"

"""The demo's text: real bytes, and the same sequence on every rank."""

import torch

from ringflash.demo.text import draw_sequence, load_text


def test_text_is_python_help() -> None:
    text = load_text()
    assert text.dtype == torch.uint8
    assert text.numel() > 100_000
    assert b"lambda" in bytes(text.tolist())


def test_sequences_are_stretches_of_the_text() -> None:
    text = load_text()
    tokens = draw_sequence(text, seqlen=50, seed=1, step=2)
    assert tokens.shape == (1, 50)
    assert tokens.dtype == torch.int64
    assert bytes(tokens[0].tolist()) in bytes(text.tolist()) * 2


def test_seed_and_step_decide() -> None:
    text = load_text()
    first = draw_sequence(text, seqlen=50, seed=1, step=2)
    assert torch.equal(first, draw_sequence(text, seqlen=50, seed=1, step=2))
    assert not torch.equal(first, draw_sequence(text, seqlen=50, seed=1, step=3))
    assert not torch.equal(first, draw_sequence(text, seqlen=50, seed=2, step=2))


def test_a_short_text_is_read_again() -> None:
    tokens = draw_sequence(torch.arange(5, dtype=torch.uint8), seqlen=12, seed=0, step=0)
    assert torch.equal(tokens[0, 1:], (tokens[0, :-1] + 1) % 5)

"""The demo's model: shapes, RoPE against a direct complex rotation, and that nothing but attention looks sideways."""

import math

import pytest
import torch
from torch import Tensor

import ringflash as rf
from ringflash.demo.model import Config, Decoder, rope_angles, rotate

SMALL = Config(vocab=11, width=24, layers=2, nheads_q=4, nheads_k=2, headdim=6, hidden=20)


def whole(seqlen: int) -> rf.Batch:
    return rf.ContextParallel().batch(seqlen, rf.Mask(causal=True))


@pytest.mark.parametrize("seqlen", [1, 7, 100])
def test_logits_for_every_token(seqlen: int) -> None:
    logits = Decoder(SMALL)(torch.randint(SMALL.vocab, (2, seqlen)), whole(seqlen))
    assert logits.shape == (2, seqlen, SMALL.vocab)
    assert logits.dtype == torch.float32


def test_rope_is_a_complex_rotation() -> None:
    positions = torch.tensor([0, 3, 1000, 70_000])
    x = torch.randn(2, 4, 3, 8)
    turned = rotate(x, rope_angles(positions, headdim=8, base=10_000.0))
    pairs = torch.complex(x[..., :4].double(), x[..., 4:].double())
    for row, position in enumerate(positions.tolist()):
        for i in range(4):
            angle = position * 10_000.0 ** (-2 * i / 8)
            expected = pairs[:, row, :, i] * complex(math.cos(angle), math.sin(angle))
            found = torch.complex(turned[:, row, :, i].double(), turned[:, row, :, i + 4].double())
            # The angle itself is rounded to float32: at position 70,000 by up to 70,000 * 2 ** -24 radians.
            torch.testing.assert_close(found, expected, rtol=0, atol=4 * (position + 1) * 2.0**-24 + 1e-6)


def test_rope_products_depend_on_distance_only() -> None:
    q, k = torch.randn(2, 1, 1, 1, 32)

    def product(at_q: int, at_k: int) -> Tensor:
        angles = rope_angles(torch.tensor([at_q, at_k]), headdim=32, base=10_000.0)
        return (rotate(q, angles[:1]) * rotate(k, angles[1:])).sum()

    torch.testing.assert_close(product(5, 2), product(105, 102), rtol=1e-4, atol=1e-4)


def test_embedding_and_head_are_one_matrix() -> None:
    model = Decoder(SMALL)
    shapes = [tuple(p.shape) for p in model.parameters()]
    assert shapes.count((SMALL.vocab, SMALL.width)) == 1


def test_the_untrained_model_guesses_evenly() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(256, (1, 64))
    loss = torch.nn.functional.cross_entropy(Decoder(Config())(tokens, whole(64))[0, :-1], tokens[0, 1:])
    assert abs(loss.item() - math.log(256)) < 0.1


def test_a_token_changes_no_earlier_logits() -> None:
    torch.manual_seed(0)
    model, tokens = Decoder(SMALL), torch.randint(SMALL.vocab, (1, 9))
    changed = tokens.clone()
    changed[0, 5] = (tokens[0, 5] + 1) % SMALL.vocab
    before, after = model(tokens, whole(9)), model(changed, whole(9))
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 8], after[:, 8])

"""A small decoder language model in plain PyTorch, in which attention is the only line that another rank takes part in.

Everything else in a transformer treats each token on its own: embedding, norms, linear layers and the output head never
look sideways. So a model whose tokens are spread over ranks needs just two things from the outside, and `batch` gives
both: the tokens' true positions (for RoPE), and attention over the whole sequence.

    logits = Decoder(Config())(tokens, batch)    # tokens: this rank's shard, as batch.shard() cut it
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """Sizes of a Decoder; the defaults train in seconds on a CPU."""

    vocab: int = 256  # a token is a byte: no tokenizer to download, and any text works
    width: int = 128
    layers: int = 4
    nheads_q: int = 4
    nheads_k: int = 2  # fewer key/value heads (GQA): less K/V to send round the ring for the same queries
    headdim: int = 32
    hidden: int = 320  # SwiGLU has three matrices where a GELU MLP has two, hence less than the usual 4 * width
    rope_base: float = 10_000.0


class SequenceBatch(Protocol):
    """What the model asks of a ringflash batch."""

    def positions(self) -> Tensor:
        """Global position of each local token, (seqlen,)."""
        ...

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Local q, k, v (batch, seqlen, nheads, headdim) -> attention over all ranks' keys, in q's shape."""
        ...


def rope_angles(positions: Tensor, *, headdim: int, base: float) -> Tensor:
    """The angle by which RoPE turns each pair of channels: positions (seqlen,) -> float32 (seqlen, headdim / 2).

    Pair i turns by positions * base ** (-2 i / headdim): the first pairs tell neighbours apart, the last ones chapters.
    """
    pairs = torch.arange(0, headdim, 2, device=positions.device, dtype=torch.float32)
    return positions.float()[:, None] * base ** (-pairs / headdim)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn the pairs (x[i], x[i + headdim / 2]): x (batch, seqlen, nheads, headdim), angles (seqlen, headdim / 2).

    A dot product of two turned vectors depends on the difference of their angles only. That is why each rank may turn
    its own queries and keys before any key is sent: what arrives already carries its position.
    """
    cos, sin = angles.cos()[:, None, :], angles.sin()[:, None, :]  # one angle for all heads
    real, imag = x.float().chunk(2, dim=-1)
    return torch.cat((real * cos - imag * sin, real * sin + imag * cos), dim=-1).to(x.dtype)


class RMSNorm(nn.Module):
    """Scale each token to unit mean square, then by a learnt gain: (..., width) -> (..., width) in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalised in float32 also where x is bfloat16: the mean of squares needs the digits."""
        return F.rms_norm(x.float(), (x.shape[-1],), self.gain, eps=1e-6)


class Attention(nn.Module):
    """Grouped-query attention with RoPE: (batch, seqlen, width) -> (batch, seqlen, width)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.headdim = config.headdim
        self.query = nn.Linear(config.width, config.nheads_q * config.headdim, bias=False)
        self.key = nn.Linear(config.width, config.nheads_k * config.headdim, bias=False)
        self.value = nn.Linear(config.width, config.nheads_k * config.headdim, bias=False)
        self.output = nn.Linear(config.nheads_q * config.headdim, config.width, bias=False)

    def forward(self, x: Tensor, angles: Tensor, batch: SequenceBatch) -> Tensor:
        """What each token of this rank gathers from all tokens it sees, on whatever rank they lie."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self.headdim))  # (batch, seqlen, nheads, headdim)
            for project in (self.query, self.key, self.value)
        )
        # The one line that leaves this rank: keys and values of the other ranks pass by, and are not kept.
        out = batch.attention(rotate(q, angles), rotate(k, angles), v)
        return self.output(out.flatten(2))


class FeedForward(nn.Module):
    """SwiGLU, token by token: (batch, seqlen, width) -> (batch, seqlen, width)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.output = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """What each token makes of itself."""
        return self.output(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """Attention, then feed-forward, each added onto the residual stream: (batch, seqlen, width) -> the same."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config.width)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, angles: Tensor, batch: SequenceBatch) -> Tensor:
        """Each half reads the normalised stream and adds to the stream itself, an open path for gradients."""
        x = x + self.attention(self.attention_norm(x), angles, batch)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Decoder(nn.Module):
    """The language model: int64 tokens (batch, seqlen) -> float32 logits (batch, seqlen, vocab) for each next token."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            # Every sum over the inputs starts at unit variance, except that the 2 * layers writes into the residual
            # stream are scaled down so that together they do not drown the embedding.
            std = module.in_features**-0.5
            writes_residual = module.out_features == self.config.width
            nn.init.normal_(module.weight, std=std * (2 * self.config.layers) ** -0.5 if writes_residual else std)
        elif isinstance(module, nn.Embedding):
            # As the output head this matrix meets tokens of length sqrt(width), its own rows among them: any larger and
            # the untrained model would be sure that each byte repeats. As the input its scale is normalised away.
            nn.init.normal_(module.weight, std=1 / self.config.width)

    def forward(self, tokens: Tensor, batch: SequenceBatch) -> Tensor:
        """This rank's tokens -> its logits; all ranks of the ring make the call together."""
        positions = batch.positions().to(tokens.device)
        angles = rope_angles(positions, headdim=self.config.headdim, base=self.config.rope_base)
        x = F.rms_norm(self.embedding(tokens), (self.config.width,))  # the small embedding, at the stream's scale
        for layer in self.layers:
            x = layer(x, angles, batch)
        return F.linear(self.norm(x), self.embedding.weight).float()  # tied weights: embedding and head are one matrix

"""Heads over ranks: ranks exchange sequence for heads, each attends all their tokens with its share of heads, and back.

Around the exchange nothing changes: `inner` is the ring over the mesh's other dimension (a ring of one for Ulysses), whose
blocks are what the ranks of a mesh row hold together. dQ has one contribution and is rounded before it travels; dK and dV
too, unless ranks share a key head: then its float32 parts are added at home, in the order of ranks, and rounded once.

The exchange is that of DeepSpeed Ulysses (arXiv 2309.14509); with a ring around it, of USP (arXiv 2405.07719).
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ringflash.layout import Layout
from ringflash.mask import Mask
from ringflash.plan import Plan, TokenBytes, make_plan
from ringflash.ring import Ring, TileLike
from ringflash.shares import Share, are_shared, shares
from ringflash.transport.blocks import Pair

Transfers = list[tuple[Tensor, int]]


class Exchanges(Protocol):
    """What is needed of a transport: all of one exchange's transfers start in one batch."""

    def exchange(self, sends: Sequence[tuple[Tensor, int]], recvs: Sequence[tuple[Tensor, int]], /) -> Any:
        """Start the transfers, (contiguous tensor, other rank) each; the answer's wait() ends them."""
        ...


@dataclass(frozen=True, eq=False)
class Rows:
    """Where each rank's tokens stand among those of all ranks by position.

    order: index from there into the tokens one rank's after the other's; None where they lie in that order already.
    """

    lengths: tuple[int, ...]
    order: np.ndarray | None
    _tables: dict = field(default_factory=dict)

    def joined(self, x: Tensor) -> Tensor:
        """(tokens rank by rank, batch, ...) -> (batch, tokens by position, ...)."""
        return (x if self.order is None else x.index_select(0, self._index(x.device)[0])).transpose(0, 1)

    def apart(self, x: Tensor) -> tuple[Tensor, ...]:
        """(batch, tokens by position, ...) -> each rank's (tokens, batch, ...), contiguous."""
        x = x.transpose(0, 1)
        return (x.contiguous() if self.order is None else x.index_select(0, self._index(x.device)[1])).split(self.lengths)

    def _index(self, device: torch.device) -> Tensor:
        """The order and its inverse, made once per device and stream (another stream would have to wait for this one)."""
        stream = torch.accelerator.current_stream(device.index).stream_id if device.type == "cuda" else 0
        if (device, stream) in self._tables:
            return self._tables[device, stream]
        with torch.inference_mode(False), torch.no_grad():
            index = torch.from_numpy(np.stack([self.order, np.argsort(self.order)]))  # pyright: ignore
            index = index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index.to(device)
        if type(index) is Tensor:  # a tracer's fake tensor is for that call alone
            self._tables[device, stream] = index
        return index


@functools.lru_cache(maxsize=16)  # one entry keeps 8 bytes per token of the ranks on the host and 16 on the device
def rows(layout: Layout, ranks: range) -> Rows:
    """Where the tokens of these ranks stand among all of theirs."""
    order = layout.order(ranks)
    ascends = bool((np.diff(order) == 1).all())
    return Rows(tuple(layout.lengths[rank] for rank in ranks), None if ascends else order)


def inner_plan(
    layout: Layout,
    mask: Mask,
    kv_layout: Layout,
    *,
    size: int,
    rank: int,
    schedule: str,
    hosts: Sequence[int],
    token: TokenBytes | None = None,
) -> Plan:
    """The plan of the ring around the exchange of heads: of the `rank`-th ranks of every `size` that follow each other.

    token: as of make_plan, for a ring with no such exchange in it; around one keys travel.
    """
    layout, kv_layout, among = layout.merged(size), kv_layout.merged(size), tuple(hosts[rank::size])
    return make_plan(layout, mask, kv_layout, schedule=schedule, hosts=among, token=token if size == 1 else None)


class _Side(NamedTuple):
    """Queries or keys: where their tokens stand, and the heads of each rank."""

    rows: Rows
    heads: tuple[range, ...]


@dataclass(frozen=True, eq=False)
class Heads:
    """One rank's place among ranks that split heads, in place of a Ring.

    inner: attends what these ranks' tokens are together. rank: this one's place among them. q_rows, k_rows: where queries and
    keys stand. transport: between these ranks. before_backward: as of a Ring.
    """

    inner: Ring
    rank: int
    q_rows: Rows
    k_rows: Rows
    transport: Exchanges
    before_backward: Callable[[], None] | None = None

    @property
    def tile(self) -> TileLike:
        """The tile that attends."""
        return self.inner.tile

    def running(self) -> AbstractContextManager[None]:
        """An error inside is left as word for the ranks that wait for this one."""
        return self.inner.running()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse) of this rank's queries over the keys of all ranks."""
        every, queries, keys = self._split(q, k)
        whole = self._to_heads([(queries, q), (keys, k), (keys, v)])
        out, lse = self._attend(every[self.rank], *whole)
        outs, lses = self._to_tokens([(queries, out), (queries, lse.transpose(1, 2)[..., None])])
        return _beside(outs), _beside(lses)[..., 0].transpose(1, 2).contiguous()

    def _attend(self, share: Share, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse) of this rank's heads; all ranks of the inner ring have heads, or none has."""
        if not share.q:
            lse = torch.empty(q.shape[0], 0, q.shape[1], dtype=torch.float32, device=q.device)
            return q.new_empty(*q.shape[:3], v.shape[3]), lse
        return self.inner.forward(q, share.repeated(k), share.repeated(v))

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor) -> tuple[Tensor, Pair]:
        """dq and (dk, dv) of this rank's tokens, in float32 or as rounded once: the gradient of the sum over ranks of their
        local losses."""
        every, queries, keys = self._split(q, k)
        stats = torch.stack((lse, delta), -1).transpose(1, 2)  # (batch, seqlen_q, nheads_q, 2)
        whole = self._to_heads([(queries, dout), (queries, q), (queries, stats), (keys, k), (keys, v)])
        shared = are_shared(every, k.shape[2])
        dq, dk, dv = self._gradients(every[self.rank], *whole, parts=shared)
        if shared:
            dqs, dks, dvs = self._to_tokens([(queries, dq.to(q.dtype)), (keys, dk), (keys, dv)])
            return _beside(dqs), (_added(dks, keys.heads, k), _added(dvs, keys.heads, v))
        dqs, dks, dvs = self._to_tokens([(queries, dq.to(q.dtype)), (keys, dk.to(k.dtype)), (keys, dv.to(v.dtype))])
        return _beside(dqs), (_beside(dks), _beside(dvs))

    def _gradients(
        self, share: Share, dout: Tensor, q: Tensor, stats: Tensor, k: Tensor, v: Tensor, *, parts: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of this rank's heads; dk and dv in float32 where they are `parts` of sums over ranks."""
        if not share.q:
            dq, dk, dv = (x.float() for x in (q, k, v))
            return dq, dk, dv
        lse, delta = (x.transpose(1, 2).contiguous() for x in stats.unbind(-1))
        dq, (dk, dv) = self.inner.backward(dout, q, share.repeated(k), share.repeated(v), lse, delta, parts=parts)
        return dq, share.summed(dk), share.summed(dv)

    def _split(self, q: Tensor, k: Tensor) -> tuple[tuple[Share, ...], _Side, _Side]:
        """Each rank's share, and what of it are queries and keys."""
        every = shares(q.shape[2], k.shape[2], len(self.q_rows.lengths))
        return every, _Side(self.q_rows, tuple(x.q for x in every)), _Side(self.k_rows, tuple(x.k for x in every))

    def _to_heads(self, moved: Sequence[tuple[_Side, Tensor]]) -> list[Tensor]:
        """From (batch, this rank's tokens, all heads, width) to (batch, all tokens, this rank's heads, width), in one batch."""
        sends: Transfers = []
        recvs: Transfers = []
        wholes: list[Tensor] = []
        for side, x in moved:
            batch, _, _, width = x.shape
            whole = x.new_empty(sum(side.rows.lengths), batch, len(side.heads[self.rank]), width)
            places = whole.split(side.rows.lengths)
            for rank, heads in enumerate(side.heads):
                part = x[:, :, heads.start : heads.stop].transpose(0, 1)
                if rank == self.rank:
                    places[rank].copy_(part)
                else:
                    sends.append((part.contiguous(), rank))
                    recvs.append((places[rank], rank))
            wholes.append(whole)
        self.transport.exchange(sends, recvs).wait()
        return [side.rows.joined(whole) for (side, _), whole in zip(moved, wholes, strict=True)]

    def _to_tokens(self, moved: Sequence[tuple[_Side, Tensor]]) -> list[list[Tensor]]:
        """From (batch, all tokens, this rank's heads, width) to each rank's heads of (batch, this rank's tokens, ...)."""
        sends: Transfers = []
        recvs: Transfers = []
        found: list[list[Tensor]] = []
        for side, x in moved:
            parts = side.rows.apart(x)
            _, batch, _, width = parts[0].shape
            here = side.rows.lengths[self.rank]
            arriving = [x.new_empty(here, batch, len(heads), width) for heads in side.heads]
            arriving[self.rank] = parts[self.rank]
            others = [rank for rank in range(len(parts)) if rank != self.rank]
            sends += [(parts[rank], rank) for rank in others]
            recvs += [(arriving[rank], rank) for rank in others]
            found.append([part.transpose(0, 1) for part in arriving])
        self.transport.exchange(sends, recvs).wait()
        return found


def _beside(parts: list[Tensor]) -> Tensor:
    """The heads of all ranks, each of one rank."""
    return torch.cat(parts, 2)


def _added(parts: list[Tensor], heads: Sequence[range], like: Tensor) -> Tensor:
    """The float32 sum, shaped like the keys, of what each rank gives to its key heads; in the order of ranks."""
    total = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
    for part, its in zip(parts, heads, strict=True):
        total[:, :, its.start : its.stop] += part
    return total

"""The one call: exact attention of this rank's queries over the keys of all ranks of a group."""

import functools
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ringflash import agreement, checks
from ringflash.auto import Facts, Route, route
from ringflash.autograd import attend
from ringflash.heads import Heads, inner_plan, rows
from ringflash.layout import Layout
from ringflash.mask import Mask
from ringflash.options import Options
from ringflash.plan import TokenBytes
from ringflash.ring import Ring
from ringflash.tile import Tile, pick
from ringflash.transport.blocks import Transport
from ringflash.transport.communicator import Communicator, communicator
from ringflash.transport.gathered import AllGather
from ringflash.transport.nvlink import NVLink, nvlink
from ringflash.transport.p2p import P2P

Prepared = tuple[tuple[Tensor, Tensor, Tensor], Ring | Heads, checks.Call]
MOST_PREPARED = 16  # calls that a communicator knows: layers and shapes that differ; each keeps its plan
TRANSPORTS: dict[str, Callable[[Communicator], Transport]] = {"p2p": P2P, "nvlink": nvlink, "allgather": AllGather}


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Layout | str,
    mask: Mask = Mask(),
    kv_layout: Layout | str | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    options: Options = Options(),
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of this rank's queries over the keys of all ranks.

    q (batch, seqlen_q, nheads_q, headdim), k (batch, seqlen_k, nheads_k, headdim), v (batch, seqlen_k, nheads_k,
    headdim_v): this rank's shards, already laid out as `layout` says; float32, float16 or bfloat16, any strides; nheads_q a
    multiple of nheads_k; head dimensions 1 ... 256. Under autocast they are cast to its dtype, as torch's attention does.
    layout: an rf.Layout, or a name where every rank holds the same number of tokens. kv_layout: where keys lie otherwise.
    group: None (the default group, or a ring of one), a ProcessGroup, or a DeviceMesh: of one dimension, or of two
    named ("ring", "heads"), counted row by row: the ranks of a row exchange sequence for heads, and rows form the ring.
    scale: headdim ** -0.5.

    Returns out (batch, seqlen_q, nheads_q, headdim_v) in q's dtype; with return_lse also lse float32 (batch, nheads_q,
    seqlen_q), the natural logarithm of the softmax denominator. A query that sees no key gets out = 0, lse = -inf.
    Gradients of q, k, v are exact for the sum over ranks of the local losses, through out and lse.

    Raises ValueError, TypeError or NotImplementedError for wrong input, before anything moves; in the calls that ranks compare
    (Options.check) on every rank, the others a RuntimeError that says whose mistake it was. Later a rank that raises alone
    leaves word: the exchange of the others ends in ExchangeError with it when that process ends, or after the group's timeout
    (gloo), or in that timeout (NCCL).
    """
    given = checks.Given(layout, kv_layout, mask, scale, options)
    return attend_over(communicator(group), (q, k, v), given, return_lse=return_lse)


def attend_over(
    comm: Communicator, qkv: tuple[Tensor, Tensor, Tensor], given: checks.Given, *, return_lse: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """ring_attention on a communicator."""
    prepared = agreement.together(
        comm,
        lambda: _known(comm, qkv, given),
        facts=lambda prepared: checks.facts(*prepared[0], prepared[2]),
        check=given.check,
    )
    (q, k, v), ring, _ = _linked(comm, prepared, given)
    if agreement.is_checked(comm):
        ring = replace(ring, before_backward=functools.partial(agreement.same_backward, comm, comm.calls))
    out, lse = attend(q, k, v, ring=ring)
    return (out, lse) if return_lse else out


def _known(comm: Communicator, qkv: tuple[Tensor, Tensor, Tensor], given: checks.Given) -> Prepared:
    """_prepare, but for calls like an earlier one of this communicator nothing is looked at twice."""
    key = checks.likeness(qkv, given)
    try:
        known = comm.prepared.get(key)
    except TypeError:  # an argument of the wrong type, which is not to be hashed
        key = known = None
    if key is None:
        return _prepare(comm, qkv, given)
    if known is None:
        if len(comm.prepared) >= MOST_PREPARED:
            comm.prepared.clear()
        known = comm.prepared[key] = _prepare(comm, qkv, given)[1:]
    ring, call = known
    return qkv, ring, call


def _linked(comm: Communicator, prepared: Prepared, given: checks.Given) -> Prepared:
    """The same, or by another transport where the ranks' GPUs turn out to share no memory. A collective until that is known."""
    transport = getattr(prepared[1], "transport", None)
    if not isinstance(transport, NVLink) or transport.linked:
        return prepared
    comm.unlinked = transport.connect()
    if not comm.unlinked:
        return prepared
    comm.prepared.clear()
    return _prepare(comm, prepared[0], given)


def _prepare(comm: Communicator, qkv: tuple[Tensor, Tensor, Tensor], given: checks.Given) -> Prepared:
    """Everything that can go wrong on this rank alone, so that all ranks hear of it before anything moves."""
    qkv, call = checks.prepare(*qkv, given, rank=comm.rank, size=comm.size)
    q, k, v = qkv
    if comm.size > 1:
        comm.group_for(q.device.type)
    heads = checks.heads_ranks(call.options.transport, comm.mesh)
    facts = Facts.of(k, v, call.kv_layout.lengths, hosts=comm.hosts, heads=heads, unlinked=comm.unlinked)
    found = route(call.options, facts)
    tile = pick(call.options.kernel, q, v, **call.options.of_tile)
    return qkv, _ring(comm, call, found, tile, TokenBytes.of(q, v)), call


def _ring(comm: Communicator, call: checks.Call, found: Route, tile: Tile, token: TokenBytes) -> Ring | Heads:
    """This rank's ring, inside an exchange of heads where several ranks share them."""
    n = found.heads
    row, column = divmod(comm.rank, n)
    how = {"schedule": found.schedule, "hosts": comm.hosts, "token": token}
    plan = inner_plan(call.layout, call.mask, call.kv_layout, size=n, rank=column, **how)
    if n == 1:
        transport = TRANSPORTS[found.transport](comm) if comm.size > 1 else None
        return Ring(plan, row, tile, transport, call.scale, in_order=call.options.reproducible)
    ring = Ring(plan, row, tile, P2P(comm, range(column, comm.size, n)), call.scale)
    ranks = range(row * n, row * n + n)
    return Heads(ring, column, rows(call.layout, ranks), rows(call.kv_layout, ranks), P2P(comm, ranks))

"""The one call: exact attention of this rank's queries over the keys of all ranks of a group."""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ringflash import checks
from ringflash.autograd import attend
from ringflash.layout import Layout, named
from ringflash.mask import Mask
from ringflash.options import Options
from ringflash.plan import make_plan
from ringflash.ring import Ring
from ringflash.tile import pick
from ringflash.transport.communicator import Communicator, communicator
from ringflash.transport.p2p import P2P


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
    group: None (the default group, or a ring of one), a ProcessGroup, or a 1-D DeviceMesh. scale: headdim ** -0.5.

    Returns out (batch, seqlen_q, nheads_q, headdim_v) in q's dtype; with return_lse also lse float32 (batch, nheads_q,
    seqlen_q), the natural logarithm of the softmax denominator. A query that sees no key gets out = 0, lse = -inf.
    Gradients of q, k, v are exact for the sum over ranks of the local losses, through out and lse.

    Raises ValueError, TypeError or NotImplementedError for wrong input, on every rank, before anything moves.
    """
    return attend_over(communicator(group), q, k, v, given=(layout, kv_layout, mask, scale, options), return_lse=return_lse)


def attend_over(
    comm: Communicator, q: Tensor, k: Tensor, v: Tensor, *, given: tuple, return_lse: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """ring_attention on a communicator; given is (layout, kv_layout, mask, scale, options), not yet checked."""
    options = given[-1]
    (q, k, v), call = checks.together(
        comm,
        lambda: _prepare(q, k, v, comm, given),
        facts=lambda prepared: checks.facts(*prepared[0], prepared[1]),
        check=options.check if isinstance(options, Options) else None,
    )
    tile = pick(options.kernel, q.device.type)
    plan = make_plan(call.layout, call.mask, call.kv_layout, schedule=options.schedule)
    transport = P2P(comm) if comm.size > 1 else None
    out, lse = attend(q, k, v, ring=Ring(plan, comm.rank, tile, transport, call.scale), tile=tile)
    return (out, lse) if return_lse else out


_Prepared = tuple[tuple[Tensor, Tensor, Tensor], checks.Call]


def _prepare(q: Tensor, k: Tensor, v: Tensor, comm: Communicator, given: tuple) -> _Prepared:
    layout, kv_layout, mask, scale, options = given
    checks.kinds(layout, kv_layout, mask, options=options)
    q, k, v = (_autocast(x) for x in (q, k, v))
    checks.tensors(q, k, v)
    layout = _resolve(layout, q, comm.size)
    kv_layout = layout if kv_layout is None else _resolve(kv_layout, k, comm.size)
    call = checks.Call(layout, kv_layout, mask, checks.scale(scale, q.shape[3]), options)
    checks.shards(q, k, call, rank=comm.rank, size=comm.size)
    if comm.size > 1:
        comm.group_for(q.device.type)
    pick(options.kernel, q.device.type)
    return (q, k, v), call


def _resolve(layout: Layout | str, x: Tensor, size: int) -> Layout:
    return layout if isinstance(layout, Layout) else named(layout, x.shape[1] * size, size)


def _autocast(x: Tensor) -> Tensor:
    """x in autocast's dtype where autocast is on for its device."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64 or x.device.type == "meta":
        return x
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x

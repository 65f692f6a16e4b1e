"""Which implementation of the tile contract runs (kernels/README.md): picked per call, each loaded when first needed."""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringflash.kernels.hopper import support
from ringflash.kernels.hopper.support import Inputs
from ringflash.kernels.reference import Segment


class Tile(NamedTuple):
    """One implementation: its functions, and why it was picked.

    fused_backward: dq and (dk, dv) come from one kernel, so that asking for one at a time multiplies more.
    """

    name: str
    why: str
    segment: Callable[..., Segment]
    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., None]
    delta: Callable[..., Tensor]
    fused_backward: bool = False


_NOT_FIXED = "has no key blocks at fixed places, which reproducible=True needs"


def pick(kernel: str, q: Tensor, v: Tensor, *, deterministic: bool = False, fixed: bool = False) -> Tile:
    """The tile for q (..., headdim) and v (..., headdim_v). kernel "auto" chooses; a name asks for that implementation.

    fixed: its forward is called with fixed=True. Raises NotImplementedError where the one asked for cannot run.
    """
    inputs = Inputs(_arch(q.device), q.dtype, q.shape[-1], v.shape[-1])
    return choose(kernel, inputs, deterministic=deterministic, fixed=fixed)


@functools.lru_cache(maxsize=256)
def choose(kernel: str, inputs: Inputs, *, deterministic: bool = False, fixed: bool = False) -> Tile:
    """As pick, by what matters of the tensors."""
    if fixed and kernel == "hopper":
        raise NotImplementedError(f"kernel='hopper' {_NOT_FIXED}; use kernel='auto'")
    tile = _choice(kernel, inputs, deterministic, fixed)
    return tile._replace(forward=functools.partial(tile.forward, fixed=True)) if fixed else tile


def _choice(kernel: str, inputs: Inputs, deterministic: bool, fixed: bool) -> Tile:
    has_triton = importlib.util.find_spec("triton") is not None
    on_gpu = inputs.arch.startswith(("sm_", "gfx", "cuda"))
    if kernel == "reference":
        return _reference("asked for")
    if kernel == "hopper":
        return _hopper(inputs, "asked for", deterministic)
    if kernel == "triton":
        if not on_gpu or not has_triton:
            found = "triton is not installed" if not has_triton else f"the tensors are on {inputs.arch}"
            raise NotImplementedError(f"kernel='triton' needs a GPU and Triton: {found}; use kernel='auto'")
        return _triton("asked for")
    if not on_gpu or not has_triton:
        return _reference("Triton is not installed" if on_gpu else "tensors on a CPU")
    if fixed:
        return _triton(f"hopper {_NOT_FIXED}")
    reason = _why_not("forward", inputs)
    if reason is None:
        try:
            return _hopper(inputs, f"{inputs.arch}, {str(inputs.dtype).removeprefix('torch.')}", deterministic)
        except NotImplementedError as error:  # a build of that Triton without the names that Gluon should have
            return _triton(str(error))
    if _why_not("forward", inputs, asked=True) is None:
        support.say_untested(support.triton_version())
    return _triton(f"hopper {reason}")


def _arch(device: torch.device) -> str:
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return device.type
    from ringflash.kernels import portable

    return portable.arch(device)


def _why_not(part: str, inputs: Inputs, *, asked: bool = False) -> str | None:
    return support.why_not(part, inputs, triton=support.triton_version(), asked=asked)


def _reference(why: str) -> Tile:
    from ringflash.kernels import reference

    return Tile("reference", why, Segment, reference.forward, reference.backward, reference.delta)


def _triton(why: str) -> Tile:
    from ringflash.kernels import backward, forward

    return Tile("triton", why, Segment, forward.forward, backward.backward, backward.delta)


def _hopper(inputs: Inputs, why: str, deterministic: bool) -> Tile:
    """The Hopper forward, and the Hopper backward where there is one for such inputs."""
    reason = _why_not("forward", inputs, asked=True)
    if reason is not None:
        raise NotImplementedError(f"kernel='hopper' {reason}; use kernel='auto'")
    try:
        from ringflash.kernels.hopper import backward, forward
    except (ImportError, AttributeError) as error:  # Gluon's names moved
        reason = f"does not load with Triton {support.triton_version()} ({error})"
        raise NotImplementedError(f"kernel='hopper' {reason}; use kernel='auto'") from error
    tile = _triton(why)._replace(name="hopper", forward=_same_bits(forward.forward, deterministic))
    reason = _why_not("backward", inputs, asked=True)
    if reason is not None:
        return tile._replace(name="hopper forward, triton backward", why=f"{why}; the Hopper backward {reason}")
    return tile._replace(backward=_same_bits(backward.backward, deterministic), fused_backward=True)


def _same_bits(run: Callable[..., Any], deterministic: bool) -> Callable[..., Any]:
    return functools.partial(run, deterministic=True) if deterministic else run

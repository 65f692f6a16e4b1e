"""Which implementation of the tile contract runs (kernels/README.md), picked once per call and loaded when first needed."""

import functools
import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch

from ringflash.kernels.reference import Segment


class Tile(NamedTuple):
    """One implementation: its functions, and why it was picked."""

    name: str
    why: str
    segment: Callable[..., Segment]
    forward: Callable[..., tuple[torch.Tensor, ...]]
    backward: Callable[..., None]
    delta: Callable[..., torch.Tensor]


@functools.lru_cache(maxsize=64)
def pick(kernel: str, device_type: str) -> Tile:
    """The tile for tensors on this kind of device. kernel "auto" chooses; a name asks for that implementation.

    Raises NotImplementedError where the one asked for cannot run.
    """
    has_triton = importlib.util.find_spec("triton") is not None
    if kernel == "reference":
        return _reference("asked for")
    if kernel == "triton":
        if device_type != "cuda" or not has_triton:
            found = "triton is not installed" if not has_triton else f"the tensors are on {device_type}"
            raise NotImplementedError(f"kernel='triton' needs a GPU and Triton: {found}; use kernel='auto'")
        return _triton("asked for")
    if device_type == "cuda" and has_triton:
        return _triton("tensors on a GPU")
    return _reference("tensors on a CPU" if device_type != "cuda" else "Triton is not installed")


def _reference(why: str) -> Tile:
    from ringflash.kernels import reference

    return Tile("reference", why, Segment, reference.forward, reference.backward, reference.delta)


def _triton(why: str) -> Tile:
    from ringflash.kernels import backward, forward

    return Tile("triton", why, Segment, forward.forward, backward.backward, backward.delta)

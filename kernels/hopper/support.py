"""Where the Hopper kernels run and, in words, why not elsewhere; importing this touches neither Gluon nor a GPU."""

import functools
import importlib.util
import logging
from collections.abc import Collection
from typing import NamedTuple

import torch

# Triton versions with which these kernels were run on a GPU: Gluon is experimental, its names and meanings move.
TESTED = ("3.6", "3.8")
# (headdim, headdim_v) that each part is written for: the keys of the kernels' own tables, which import Gluon.
HEADDIMS: dict[str, Collection[tuple[int, int]]] = {
    "forward": ((64, 64), (128, 128), (192, 128), (256, 256)),
    "backward": ((64, 64), (128, 128)),
}
DTYPES = (torch.bfloat16, torch.float16)


class Inputs(NamedTuple):
    """What an implementation is picked by; arch: a GPU's as kernels.portable.arch says it ("sm_90"), else the device's type."""

    arch: str
    dtype: torch.dtype
    headdim: int
    headdim_v: int


def why_not(part: str, inputs: Inputs, *, triton: str, asked: bool = False) -> str | None:
    """Why the Hopper `part` ("forward", "backward") does not run on such inputs, None where it does.

    The reason goes on from "the Hopper kernel ...". triton: its version, "" where there is none. asked: by name, which is
    enough for a Triton that never ran these kernels.
    """
    if not triton:
        return "needs Triton with Gluon, none is installed"
    if inputs.arch != "sm_90":
        return f"needs an sm_90 GPU, not {inputs.arch}"
    if inputs.dtype not in DTYPES:
        return f"needs bfloat16 or float16, not {str(inputs.dtype).removeprefix('torch.')}"
    headdims = inputs.headdim, inputs.headdim_v
    if headdims not in HEADDIMS[part]:
        return f"has headdim {', '.join(map(_words, HEADDIMS[part]))}, not {_words(headdims)}"
    if not asked and not tested(triton):
        return f"never ran with Triton {triton}, only {'/'.join(TESTED)}; kernel='hopper' tries it"
    return None


def tested(triton: str) -> bool:
    """Whether that version of Triton ran these kernels on a GPU; patch releases count as their minor version."""
    return ".".join(triton.split(".")[:2]) in TESTED


def _words(headdims: tuple[int, int]) -> str:
    return str(headdims[0]) if headdims[0] == headdims[1] else "/".join(map(str, headdims))


@functools.cache
def triton_version() -> str:
    """The version of the installed Triton, "" where there is none or it is without Gluon. Looked up once."""
    try:
        if importlib.util.find_spec("triton.experimental.gluon") is None:
            return ""
    except ModuleNotFoundError:  # no triton, or none with `experimental`
        return ""
    import triton

    return triton.__version__


@functools.cache
def say_untested(triton: str) -> None:
    """Log, once, that an sm_90 GPU gets the portable kernels because of Triton's version."""
    logging.getLogger("ringflash").warning(
        "Triton %s has not run the Hopper kernels yet (only %s): the portable ones are used, at about two thirds of the speed; "
        "Options(kernel='hopper') tries them",
        triton,
        ", ".join(TESTED),
    )

"""Exact attention over sequences that span several GPUs: the same operator as on one, with bounded rounding error."""

from ringflash import layout as layouts
from ringflash import stats
from ringflash.api import ring_attention
from ringflash.context import Batch, ContextParallel
from ringflash.explain import Explanation, explain
from ringflash.layout import Layout
from ringflash.mask import Mask
from ringflash.options import Options

__all__ = [
    "Batch",
    "ContextParallel",
    "Explanation",
    "Layout",
    "Mask",
    "Options",
    "explain",
    "layouts",
    "ring_attention",
    "stats",
]

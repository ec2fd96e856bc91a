"""Whether steps are run by kernels, and how they are packed for them: decided once, when a model is loaded."""

from __future__ import annotations

import logging

import torch

import hypic_kernels
from hypic.engine.kernel_batch import Geometry
from hypic.engine.kernel_tiles import tiling_of
from hypic.engine.models import Model
from hypic.engine.pool import Layout
from hypic.errors import ConfigError

logger = logging.getLogger("hypic")
# Tokens of runs that a step must have: below, the kernels for them are more launches than work.
MIN_RUN_TOKENS = 1024


def geometry_of(model: Model, layout: Layout, kernels: str, device: torch.device) -> Geometry | None:
    """How steps are packed for kernels; ``None`` where plain torch runs them: on a CPU unless asked for, without
    Triton, and in other types of states than float32, which no kernel keeps."""
    if not _takes_kernels(kernels, device) or layout.state_dtype != torch.float32:
        return None
    gathers = model.linear_rotary is not None and any(shape.transition != "head" for shape in layout.linear)
    tiling = tiling_of(model.heads, layout.dtype, device)
    min_run_tokens = None if not model.runs_rows() else MIN_RUN_TOKENS if device.type == "cuda" else 0
    return Geometry(layout.conv_width, model.is_paged, gathers, tiling, min_run_tokens)


def _takes_kernels(kernels: str, device: torch.device) -> bool:
    """Raises ``ConfigError`` where they are asked for on a GPU that cannot run them."""
    if kernels == "off" or device.type != "cuda":
        return kernels == "on"
    if hypic_kernels.available():
        return True
    if kernels == "on":
        raise ConfigError(f"kernels is 'on', and {hypic_kernels.missing()}; choose 'auto' or 'off'.")
    logger.warning("steps run without kernels, several times slower: %s.", hypic_kernels.missing())
    return False


def path_of(geometry: Geometry | None, device: torch.device) -> str:
    """What computes entries, as ``Identity`` names it."""
    if geometry is None:
        return f"torch on {device.type}"
    has_fla = device.type == "cuda" and geometry.min_run_tokens is not None
    return f"{'kernels and fla' if has_fla else 'kernels'} on {device.type}"

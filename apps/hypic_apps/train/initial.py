"""The weights that training starts from."""

from __future__ import annotations

import math

import torch
from torch import nn

from hypic.engine.layers.gated_delta_net import GatedDeltaNet
from hypic_apps.train.model import Trainee

ENDS_OF_RESIDUALS = ("o_proj.weight", "out_proj.weight", "dense.weight", "down_proj.weight")


def initialise(model: Trainee, seed: int) -> None:
    """Normal weights, smaller where residuals add up; learned decays whose half-lives run evenly from 16 to 16k
    tokens."""
    torch.manual_seed(seed)
    scale = 0.02 * (768 / model.shape.hidden_size) ** 0.5
    depth = (2 * model.shape.num_hidden_layers) ** -0.5
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=scale * (depth if name.endswith(ENDS_OF_RESIDUALS) else 1.0))
        elif name.endswith("conv1d.weight"):
            _near_identity(parameter)
    linear = [m for m in model.modules() if isinstance(m, GatedDeltaNet)]
    for number, mixer in enumerate(linear):
        _spread_decays(mixer, number / max(1, len(linear)))


def _near_identity(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.normal_(std=0.15)
        weight[..., -1] += 0.5


def _spread_decays(mixer: GatedDeltaNet, offset: float) -> None:
    heads = mixer.shape.num_v_heads
    places = (torch.arange(heads) + offset) / heads
    half_life = 16.0 * 1024.0**places
    wanted = math.log(2.0) / half_life
    with torch.no_grad():
        mixer.dt_bias.copy_(torch.log(torch.expm1(wanted)))
        mixer.A_log.zero_()

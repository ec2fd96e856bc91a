"""What training needs to know of a model's shape, whatever its linear layers are."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn


class Architecture(Protocol):
    """What the loop needs of a model's shape, whatever its linear layers are."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def partial_rotary_factor(self) -> float: ...
    @property
    def rope_theta(self) -> float: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def conv_width(self) -> int:
        """Tokens that a short convolution sees; 1 without one."""
        ...

    @property
    def has_centred_norms(self) -> bool:
        """Whether norms' weights are centred at zero."""
        ...

    def block(self, depth: int) -> nn.Module:
        """The decoder layer of a depth: ``hidden [N, hidden]`` and the ``Grid`` -> hidden."""
        ...

    def checkpoint_name(self, name: str) -> str:
        """The checkpoint's name of a parameter."""
        ...

    def config(self) -> dict[str, Any]:
        """The content of ``config.json``."""
        ...

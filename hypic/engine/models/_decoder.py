"""What the models here share whatever their layers are: the pre-norm block, and a decoder made from ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from torch import Tensor, nn

from hypic.engine.layers.decoder import Decoder, Step, run_mixer
from hypic.engine.layers.moe import MoE
from hypic.engine.layers.norm import RMSNorm
from hypic.engine.layers.rotary import Rotary
from hypic.engine.models._config import context_from, read


class PreNormBlock(nn.Module):
    """``h += s mixer(norm(h)); h += s mlp(norm(h))``, with the scale ``s`` of both branches."""

    def __init__(
        self,
        mixer: nn.Module,
        layer: int,
        mlp: nn.Module,
        hidden_size: int,
        eps: float,
        scale: float = 1.0,
        *,
        zero_centred: bool = False,
    ) -> None:
        super().__init__()
        self.mixer, self.layer, self.mlp, self.scale = mixer, layer, mlp, scale
        self.input_layernorm = RMSNorm(hidden_size, eps, zero_centred=zero_centred)
        self.post_attention_layernorm = RMSNorm(hidden_size, eps, zero_centred=zero_centred)

    def forward(self, hidden: Tensor, step: Step) -> Tensor:
        mixed = run_mixer(self.mixer, self.input_layernorm(hidden), step, self.layer)
        if isinstance(self.mlp, MoE) and self.scale == 1.0:
            return self.mlp.behind(self.post_attention_layernorm, step.kept(hidden), mixed)
        normed, hidden = self.post_attention_layernorm.after(step.kept(hidden), self._scaled(mixed))
        return hidden + self._scaled(self.mlp(normed))

    def _scaled(self, branch: Tensor) -> Tensor:
        return branch if self.scale == 1.0 else branch * self.scale


class TextDecoder(Decoder):
    """A decoder that knows its layers' types and how many tokens it takes."""

    layer_types: Sequence[str]
    max_context: int

    @classmethod
    def of_blocks(
        cls,
        config: Mapping[str, Any],
        types: Sequence[str],
        blocks: Sequence[nn.Module],
        norm: nn.Module,
        rotary: Rotary | None,
        *,
        linear_rotary: Rotary | None = None,
        tied: bool | None = None,
    ) -> Self:
        """Blocks between embeddings and head; ``tied`` says whether these are one, where the file may leave it out.

        Raises:
            CheckpointError: a field is missing.
        """
        size, tied = read(config, "hidden_size", int), bool(config.get("tie_word_embeddings")) if tied is None else tied
        vocab_size = read(config, "vocab_size", int)
        model = cls(vocab_size, size, blocks, norm, rotary, linear_rotary=linear_rotary, tied=tied)
        model.layer_types, model.max_context = types, context_from(config)
        return model

    def is_tied_head(self, name: str) -> bool:
        """Whether a tensor of this name repeats the embeddings."""
        return name == "lm_head.weight" and self.lm_head.weight is self.embed_tokens.weight


def renamed(name: str, table: Sequence[tuple[str, str]]) -> str:
    """A tensor's name with parts of it replaced, in the table's order."""
    for theirs, ours in table:
        name = name.replace(theirs, ours)
    return name

"""The forward pass of a BERT encoder in plain torch, and mean pooling over it.

    h_0     = norm(word + position + type)
    a       = norm(h + W_o . softmax(q k^T / sqrt(d) + mask) v)        in each layer
    h       = norm(a + W_2 . gelu(W_1 a))
    vector  = sum over tokens of h / number of tokens

J. Devlin et al., "BERT" (2018); pooling as N. Reimers, I. Gurevych, "Sentence-BERT" (2019). Only
what a checkpoint of that kind needs: no training, no other position scheme. Importing this module
imports torch; ``embed`` does so when an encoder is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from hypic_retriever.errors import EmbedderError


@dataclass(frozen=True)
class BertConfig:
    """The fields of a ``config.json`` that decide the forward pass."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    layer_norm_eps: float

    @classmethod
    def from_json(cls, values: Mapping[str, object]) -> BertConfig:
        """Reads the fields.

        Raises:
            EmbedderError: another model type, activation or position scheme, or a missing field.
        """
        expected = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute"}
        for name, wanted in expected.items():
            if values.get(name, wanted) != wanted:
                raise EmbedderError(f"the encoder's {name} is {values[name]!r}; only {wanted!r} is supported.")
        try:
            return cls(
                hidden_size=int(str(values["hidden_size"])),
                num_hidden_layers=int(str(values["num_hidden_layers"])),
                num_attention_heads=int(str(values["num_attention_heads"])),
                max_position_embeddings=int(str(values["max_position_embeddings"])),
                layer_norm_eps=float(str(values.get("layer_norm_eps", 1e-12))),
            )
        except KeyError as error:
            raise EmbedderError(
                f"the encoder's config.json lacks {error}; use the folder of a whole BERT checkpoint."
            ) from error


class Bert:
    """A BERT encoder over checkpoint tensors, by their names in Hugging Face's ``BertModel``."""

    def __init__(self, config: BertConfig, tensors: Mapping[str, Tensor], device: str = "cpu") -> None:
        self.config = config
        self._tensors = {
            name.removeprefix("bert."): tensor.to(device, torch.float32) for name, tensor in tensors.items()
        }
        self._device = device
        missing = [name for name in self._names() if name not in self._tensors]
        if missing:
            raise EmbedderError(
                f"the encoder's weights lack {missing[0]!r}; use the folder of a whole BERT checkpoint."
            )

    def embed(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Mean-pooled vectors ``[N, hidden_size]`` of token ids ``[N, L]``; ``mask`` is 1 at tokens, 0 at padding."""
        with torch.inference_mode():
            ids, mask = ids.to(self._device), mask.to(self._device)
            hidden = self.forward(ids, mask)
            weights = mask.unsqueeze(-1).to(hidden.dtype)
            return ((hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9)).cpu()

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Hidden states ``[N, L, hidden_size]`` after the last layer."""
        table = self._tensors
        hidden = table["embeddings.word_embeddings.weight"][ids]
        hidden = hidden + table["embeddings.position_embeddings.weight"][: ids.shape[1]]
        hidden = self._norm(hidden + table["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
        allowed = mask[:, None, None, :].bool()
        for layer in range(self.config.num_hidden_layers):
            hidden = self._layer(hidden, allowed, f"encoder.layer.{layer}")
        return hidden

    def _layer(self, hidden: Tensor, allowed: Tensor, name: str) -> Tensor:
        parts = ("query", "key", "value")
        q, k, v = (self._heads(self._linear(hidden, f"{name}.attention.self.{part}")) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed).transpose(1, 2).flatten(2)
        attended = self._norm(
            hidden + self._linear(mixed, f"{name}.attention.output.dense"), f"{name}.attention.output.LayerNorm"
        )
        wide = functional.gelu(self._linear(attended, f"{name}.intermediate.dense"))
        return self._norm(attended + self._linear(wide, f"{name}.output.dense"), f"{name}.output.LayerNorm")

    def _heads(self, states: Tensor) -> Tensor:
        batch, length, width = states.shape
        heads = self.config.num_attention_heads
        return states.view(batch, length, heads, width // heads).transpose(1, 2)

    def _linear(self, states: Tensor, name: str) -> Tensor:
        return functional.linear(states, self._tensors[f"{name}.weight"], self._tensors[f"{name}.bias"])

    def _norm(self, states: Tensor, name: str) -> Tensor:
        size = (self.config.hidden_size,)
        return functional.layer_norm(
            states, size, self._tensors[f"{name}.weight"], self._tensors[f"{name}.bias"], self.config.layer_norm_eps
        )

    def _names(self) -> list[str]:
        parts = ["attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"]
        parts += ["attention.output.LayerNorm", "intermediate.dense", "output.dense", "output.LayerNorm"]
        modules = [f"encoder.layer.{i}.{part}" for i in range(self.config.num_hidden_layers) for part in parts]
        tables = [f"embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type")]
        return tables + [
            f"{module}.{leaf}" for module in ("embeddings.LayerNorm", *modules) for leaf in ("weight", "bias")
        ]

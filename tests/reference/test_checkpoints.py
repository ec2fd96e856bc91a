"""The tiny checkpoints are what they claim: same text model in every dress, and a tokenizer that fits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.checkpoints import add_tokenizer, minimax, qwen
from tests.reference import Reference
from tests.reference.checkpoint import read_weights

IDS = [5, 300, 17, 42, 8]


@pytest.mark.parametrize("tied", [False, True])
def test_wrapper_and_shards_hold_the_same_text_model(tmp_path: Path, tied: bool) -> None:
    plain = Reference(qwen(tmp_path / "plain", tie_word_embeddings=tied)).full(IDS).logits
    for name, num_shards in (("wrapper", 1), ("shards", 5)):
        wrapper = name == "wrapper"
        folder = qwen(tmp_path / name, tie_word_embeddings=tied, wrapper=wrapper, num_shards=num_shards)
        assert torch.equal(Reference(folder).full(IDS).logits, plain)
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) == 5
    assert ("lm_head.weight" in read_weights(tmp_path / "plain")) is not tied
    other = Reference(qwen(tmp_path / "other", tie_word_embeddings=tied, seed=1)).full(IDS).logits
    assert not torch.allclose(other, plain, atol=0.1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_type_on_disk(tmp_path: Path, dtype: torch.dtype) -> None:
    from safetensors.torch import load_file

    for folder in (qwen(tmp_path / "q", dtype=dtype), minimax(tmp_path / "m", dtype=dtype)):
        tensors = load_file(folder / "model.safetensors")
        buffers = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
        assert {t.dtype for name, t in tensors.items() if not name.endswith(buffers)} == {dtype}
        assert json.loads((folder / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("vocab_size", [259, 320, 512])
def test_tokenizer_fits(tmp_path: Path, vocab_size: int) -> None:
    from transformers import AutoTokenizer

    folder = qwen(tmp_path, vocab_size=vocab_size)
    add_tokenizer(folder, vocab_size)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "the rain in Spain,\n\n 北京 and naïve <tags>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text and max(ids) < 256 + max(0, vocab_size - 259)
    messages = [{"role": "user", "content": "hi"}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    specials = tokenizer.encode("<|endoftext|><|im_start|><|im_end|>", add_special_tokens=False)
    assert len(specials) == 3 and max(specials) < vocab_size
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == tokenizer.eos_token_id == specials[2]


def test_tokenizer_refuses_a_small_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="258"):
        add_tokenizer(tmp_path, 258)

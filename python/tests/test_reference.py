"""The same calls on encodle and on sentence-transformers.

Each row of `CALLS` is a call that runs with the classes of either package. Numbers differ by
at most 1e-6 (token embeddings and logits, whose values are about 10 times as large, by 1e-5);
integers, bits, tokens, names and dtypes are equal.
"""

import shutil
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import GOLDEN, MINILM, assert_close

import encodle

pytestmark = pytest.mark.reference

S = (GOLDEN / "sentences.txt").read_text().splitlines()
LONG = "A sentence that is repeated until the model truncates it. " * 40
ODD = ["", " ", "naïve café", "한국어 문장입니다", "[CLS] [MASK]", "zero\u200bwidth", "🥐" * 3]
PAIRS = [("bad cab", "a cab"), ("dead beef", "fade"), ("", "x"), ("a", LONG[:60])]
DOCUMENTS = ["a cab", "", "Café x", "yz", "fade"]
TOKENS = ("input_ids", "attention_mask", "token_type_ids")
RNG = np.random.default_rng(0)
VECTORS = RNG.normal(size=(200, 21)).astype(np.float32)

#: name: call with `p`, the models and functions of a package
CALLS: dict[str, Any] = {
    # encode: inputs
    "a list": lambda p: p.model.encode(S),
    "a text": lambda p: p.model.encode(S[0]),
    "a tuple": lambda p: p.model.encode(tuple(S)),
    "an array of str": lambda p: p.model.encode(np.array(S)),
    "an array of objects": lambda p: p.model.encode(np.array(S, dtype=object)),
    "a list of one": lambda p: p.model.encode(S[:1]),
    "no texts": lambda p: len(p.model.encode([])),
    "odd texts": lambda p: p.model.encode(ODD),
    "a long text": lambda p: p.model.encode([LONG, S[0]]),
    "equal texts": lambda p: p.model.encode([S[1], S[1]]),
    "batch_size": lambda p: p.model.encode(S, batch_size=3),
    "100 texts": lambda p: p.model.encode([f"{s} {i}" for i in range(10) for s in S]),
    # encode: outputs
    "shape": lambda p: p.model.encode(S).shape,
    "shape of a text": lambda p: p.model.encode("a").shape,
    "dtype": lambda p: str(p.model.encode("a").dtype),
    "normalize_embeddings": lambda p: p.model.encode(S, normalize_embeddings=True),
    "truncate_dim": lambda p: p.model.encode(S, truncate_dim=32),
    "truncate_dim of a text": lambda p: p.model.encode(S[0], truncate_dim=7),
    "truncate_dim beyond E": lambda p: p.model.encode(S[0], truncate_dim=1000),
    "truncate and normalize": lambda p: p.model.encode(
        S, truncate_dim=32, normalize_embeddings=True
    ),
    "convert_to_tensor": lambda p: p.model.encode(S, convert_to_tensor=True).numpy(),
    "dtype of the tensor": lambda p: str(p.model.encode("a", convert_to_tensor=True).dtype),
    "a list of tensors": lambda p: [v.numpy() for v in p.model.encode(S, convert_to_numpy=False)],
    "token embeddings": lambda p: list(
        map(np.asarray, p.model.encode(S, output_value="token_embeddings"))
    ),
    "token embeddings of a text": lambda p: np.asarray(
        p.model.encode(S[0], output_value="token_embeddings")
    ),
    # encode: precisions
    "binary": lambda p: p.model.encode(S, precision="binary"),
    "ubinary": lambda p: p.model.encode(S, precision="ubinary"),
    "binary of a text": lambda p: p.model.encode(S[0], precision="binary"),
    "dtype of int8": lambda p: str(p.model.encode(S, precision="int8").dtype),
    "dtype of uint8": lambda p: str(p.model.encode(S, precision="uint8").dtype),
    "quantize to int8": lambda p: p.quantize(VECTORS, "int8"),
    "quantize to uint8": lambda p: p.quantize(VECTORS, "uint8"),
    "quantize to binary": lambda p: p.quantize(VECTORS, "binary"),
    "quantize to ubinary": lambda p: p.quantize(VECTORS, "ubinary"),
    "quantize with ranges": lambda p: p.quantize(
        VECTORS[0], "int8", ranges=np.stack([VECTORS.min(axis=0), VECTORS.max(axis=0)])
    ),
    "quantize with calibration": lambda p: p.quantize(
        VECTORS[:5], "uint8", calibration_embeddings=VECTORS
    ),
    # prompts
    "default prompt": lambda p: p.prompted.encode(S),
    "encode_query": lambda p: p.prompted.encode_query(S),
    "encode_document": lambda p: p.prompted.encode_document(S),
    "prompt_name": lambda p: p.prompted.encode(S, prompt_name="passage"),
    "prompt": lambda p: p.prompted.encode(S, prompt="Say: "),
    "an empty prompt": lambda p: p.prompted.encode(S, prompt=""),
    "prompts": lambda p: dict(sorted(p.prompted.prompts.items())),
    "prompts without a file": lambda p: dict(sorted(p.model.prompts.items())),
    "default_prompt_name": lambda p: p.prompted.default_prompt_name,
    "prompt without prompts": lambda p: p.model.encode(S, prompt="query: "),
    # settings
    "truncate_dim of the files": lambda p: p.short.truncate_dim,
    "vectors with truncate_dim of the files": lambda p: p.short.encode(S),
    "truncate_embeddings": lambda p: encode_untruncated(p.short, S),
    "max_seq_length": lambda p: p.model.max_seq_length,
    "dimension": lambda p: p.model.get_sentence_embedding_dimension(),
    "similarity_fn_name": lambda p: p.model.similarity_fn_name,
    "tokenize": lambda p: [p.model.tokenize(S)[key].tolist() for key in TOKENS],
    # similarity
    "similarity": lambda p: np.asarray(p.model.similarity(VECTORS[:5], VECTORS[5:9])),
    "similarity of one vector": lambda p: np.asarray(p.model.similarity(VECTORS[0], VECTORS)),
    "similarity_pairwise": lambda p: np.asarray(
        p.model.similarity_pairwise(VECTORS[:100], VECTORS[100:])
    ),
    "similarity_pairwise of two vectors": lambda p: np.asarray(
        p.model.similarity_pairwise(VECTORS[0], VECTORS[1])
    ),
    "similarity_pairwise of one vector": lambda p: np.asarray(
        p.model.similarity_pairwise(VECTORS[0], VECTORS)
    ),
    # cross-encoders
    "predict": lambda p: p.ranker.predict(PAIRS),
    "predict one pair": lambda p: p.ranker.predict(PAIRS[0]),
    "predict lists": lambda p: p.ranker.predict([list(pair) for pair in PAIRS]),
    "predict logits": lambda p: p.ranker.predict(PAIRS, activation_fn=p.identity),
    "predict several labels": lambda p: p.labels.predict(PAIRS),
    "apply_softmax": lambda p: p.labels.predict(PAIRS, apply_softmax=True),
    "rank": lambda p: p.ranker.rank("bad cab", DOCUMENTS, top_k=4, return_documents=True),
}


@pytest.fixture(scope="module")
def prompted(tmp_path_factory):
    """A copy of all-MiniLM-L6-v2 with prompts."""
    folder = tmp_path_factory.mktemp("prompted")
    shutil.copytree(MINILM, folder, dirs_exist_ok=True)
    shutil.copy(GOLDEN / "sentence_chain/config_sentence_transformers.json", folder)
    return folder


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A copy of all-MiniLM-L6-v2 with a truncate_dim."""
    folder = tmp_path_factory.mktemp("short")
    shutil.copytree(MINILM, folder, dirs_exist_ok=True)
    (folder / "config_sentence_transformers.json").write_text('{"truncate_dim": 32}')
    return folder


def encode_untruncated(model, texts):
    with model.truncate_embeddings(None):
        return model.encode(texts)


@pytest.fixture(scope="module")
def packages(prompted, short):
    import sentence_transformers as reference
    import torch
    from torch import nn

    def of(package):
        # sentence-transformers computes in the dtype of the weights, which is f16 here.
        dtype = {"model_kwargs": {"dtype": torch.float32}} if package is reference else {}
        return SimpleNamespace(
            model=package.SentenceTransformer(str(MINILM), device="cpu", **dtype),
            prompted=package.SentenceTransformer(str(prompted), device="cpu", **dtype),
            short=package.SentenceTransformer(str(short), device="cpu", **dtype),
            ranker=package.CrossEncoder(str(GOLDEN / "heads/score"), device="cpu"),
            labels=package.CrossEncoder(str(GOLDEN / "heads/sequence"), device="cpu"),
            quantize=package.quantize_embeddings,
            identity=nn.Identity(),
        )

    return of(encodle), of(reference)


def assert_equal(got: Any, expected: Any, tolerance: float) -> None:
    if isinstance(expected, dict):
        assert got.keys() == expected.keys()
        got, expected = list(got.values()), list(expected.values())
    assert getattr(got, "dtype", None) == getattr(expected, "dtype", None)
    if isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)
        for one, other in zip(got, expected):
            assert_equal(one, other, tolerance)
    elif (
        isinstance(expected, (float, np.floating)) or getattr(expected, "dtype", None) == "float32"
    ):
        assert_close(got, expected, tolerance)
    elif isinstance(expected, np.ndarray):
        assert np.array_equal(got, expected)
    else:
        assert got == expected


def test_there_are_65_calls():
    assert len(CALLS) == 65


@pytest.mark.parametrize("name", CALLS)
def test_both_packages_give_equal_results(packages, name):
    ours, reference = (CALLS[name](package) for package in packages)
    # Logits are up to 4 in magnitude; the largest difference measured is 1.5e-6.
    larger = ("token embeddings", "predict logits", "predict several labels")
    assert_equal(ours, reference, 1e-5 if name.startswith(larger) else 1e-6)


def test_int8_vectors_differ_by_at_most_one_level(packages):
    """A value at the border of two levels may fall on either side. The minimum and the maximum of
    each dimension are such values."""
    ours, reference = (p.model.encode(S, precision="int8").astype(int) for p in packages)
    assert np.abs(ours - reference).max() <= 1
    assert np.mean(ours != reference) < 1e-2


QUICK_START = """
from sentence_transformers import SentenceTransformer

# Load a pretrained model by its name
model = SentenceTransformer("all-MiniLM-L6-v2")

sentences = [
    "The sky is clear this morning.",
    "What a bright, cloudless day!",
    "She parked the car at the station.",
]

# Compute the embeddings
embeddings = model.encode(sentences)
print(embeddings.shape)
assert tuple(embeddings.shape) == (3, 384)

# Compute the similarities of all pairs
similarities = model.similarity(embeddings, embeddings)
print(similarities)
assert tuple(similarities.shape) == (3, 3)
assert similarities[0, 1] > 0.3 > similarities[0, 2]
"""


def test_the_quick_start_runs_with_the_import_changed(packages):
    names: dict[str, Any] = {}
    exec(QUICK_START.replace("from sentence_transformers import", "from encodle import"), names)
    reference = packages[1].model
    vectors = reference.encode(names["sentences"])
    assert_close(names["embeddings"], vectors, 1e-6)
    assert_close(names["similarities"], reference.similarity(vectors, vectors), 1e-6)

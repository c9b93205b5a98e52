"""/embed_sparse, against sentence-transformers and the command, and its errors."""

import json
import re

import numpy as np
import pytest
from conftest import GOLDEN, MINILM, Server, assert_error, assert_same_json, encodle, f32
from test_memory import metric

SPARSE = GOLDEN / "sparse"
EXPECTED = json.loads((SPARSE / "expected.json").read_text())
TEXTS = EXPECTED["texts"]
LONG = "the cat dog bank " * 100  # a token per word
# sentence-transformers computes with PyTorch; the values differ by the order of sums.
TOLERANCE = 1e-5


def read_tensors(path):
    """The tensors of a safetensors file by name, flat."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header, data = json.loads(data[8 : 8 + size]), data[8 + size :]
    dtypes = {"F32": "<f4", "I64": "<i8", "I32": "<i4", "U32": "<u4"}
    return {
        name: np.frombuffer(data[slice(*info["data_offsets"])], dtypes[info["dtype"]])
        for name, info in header.items() if name != "__metadata__"
    }


@pytest.fixture(scope="module")
def tensors():
    return read_tensors(SPARSE / "expected.safetensors")


@pytest.fixture(scope="module")
def golden():
    """A server with all models of tests/golden/sparse."""
    models = [f"--model={name}={SPARSE / name}" for name in EXPECTED["decoded"]]
    server = Server(*models, "--kind", "masked_lm=sparse")
    yield server
    server.stop()


def assert_vectors(got, tensors, case):
    offsets = tensors[f"{case}.offsets"]
    assert len(got) == len(offsets) - 1 == len(TEXTS)
    for i, row in enumerate(got):
        part = slice(offsets[i], offsets[i + 1])
        indices, values = tensors[f"{case}.indices"][part], tensors[f"{case}.values"][part]
        assert [one["index"] for one in row] == indices.tolist(), f"{case}, text {i}"
        difference = np.abs(f32([one["value"] for one in row]) - values).max(initial=0)
        assert difference <= TOLERANCE, f"{case}, text {i}: {difference}"


def of_command(texts, *arguments):
    """The sparse vectors that `encodle embed` prints, in the form of /embed_sparse."""
    records = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    options = ["--input", "-", "--input-format", "jsonl", "--format", "jsonl", *arguments]
    rows = [record["embedding"] for record in encodle("embed", *options, stdin=records)]
    return [
        [{"index": i, "value": x} for i, x in zip(row["indices"], row["values"])] for row in rows
    ]


@pytest.mark.parametrize("model", EXPECTED["decoded"])
def test_vectors_equal_sentence_transformers(golden, tensors, model):
    for case, fields in [
        ("encode", {}), ("query", {"prompt_name": "query"}), ("document", {"prompt_name": "document"}),
    ]:
        got = golden.json("/embed_sparse", {"model": model, "inputs": TEXTS, **fields})
        assert_vectors(got, tensors, f"{model}.{case}")
        alone = golden.json("/embed_sparse", {"model": model, "inputs": TEXTS[0], **fields})
        assert_same_json(alone, got[:1])


def test_the_fields_have_the_meaning_of_the_command(models):
    for model in ("splade", "inference_free"):
        folder = SPARSE / {"splade": "splade_max"}.get(model, model)
        embed = lambda **fields: models.json("/embed_sparse", {"model": model, "inputs": TEXTS, **fields})
        assert_same_json(embed(), of_command(TEXTS, "--model", folder))
        queries = of_command(TEXTS, "--model", folder, "--prompt-name", "query")
        assert_same_json(embed(prompt_name="query"), queries)


def test_token_ids_are_those_of_tokenize(models):
    tokens = models.json("/tokenize", {"model": "splade", "inputs": TEXTS[:2]})
    ids = [[token["id"] for token in text] for text in tokens]
    embed = lambda inputs: models.json("/embed_sparse", {"model": "splade", "inputs": inputs})
    assert_same_json(embed(ids), embed(TEXTS[:2]))
    assert_same_json(embed(ids[0]), embed(TEXTS[0]))


def test_long_texts_are_truncated_on_either_side_or_refused(models):
    post = lambda **fields: models.post("/embed_sparse", {"model": "splade", "inputs": [LONG, "a"], **fields})
    [info] = [one for one in models.get("/info").json()["models"] if one["name"] == "splade"]
    inside = info["max_input_length"] - 2  # [CLS], [SEP]
    right, left = post(), post(truncation_direction="left")
    assert [right.headers["x-truncated-texts"], left.headers["x-truncated-texts"]] == ["1", "1"]
    words = LONG.split()
    for response, kept in [(right, words[:inside]), (left, words[-inside:])]:
        expected = models.json("/embed_sparse", {"model": "splade", "inputs": " ".join(kept)})
        assert_same_json(response.json()[:1], expected)
    assert_error(post(truncate=False), 413)


def test_a_text_without_tokens_has_the_vector_of_its_special_tokens_or_none(models):
    embed = lambda **fields: models.json("/embed_sparse", {"inputs": ["", "[CLS] [SEP]"], **fields})
    assert all(embed(model="splade"))
    empty, special = embed(model="inference_free", prompt_name="query")
    assert empty == []


@pytest.mark.parametrize("body, status", [
    ({"inputs": []}, 400),
    ({"inputs": ["a"] * 2049}, 413),
    ({"inputs": 5}, 422),
    ({"inputs": [[2, 3]] * 2, "prompt_name": "query"}, 400),
    ({"inputs": [[1, 10**6, 2]]}, 422),
    ({"inputs": [[7]]}, 422),  # without special tokens
    ({"inputs": "a", "prompt_name": "nope"}, 400),
    ({"inputs": "a", "normalize": True}, 422),  # as in text-embeddings-inference, no field
    ({"inputs": "a", "truncation_direction": "up"}, 422),
    ({"inputs": "a", "model": "nope"}, 404),
])
def test_bad_input_is_refused(models, body, status):
    assert_error(models.post("/embed_sparse", {"model": "splade"} | body), status)


@pytest.mark.parametrize("path, body, status, interface", [
    ("/embed", {"inputs": "a"}, 424, "tei"),
    ("/embed_all", {"inputs": "a"}, 424, "tei"),
    ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}, 424, "tei"),
    ("/v1/embeddings", {"input": "a"}, 400, "openai"),
])
def test_a_route_of_dense_vectors_names_the_route_of_sparse_ones(models, golden, path, body, status, interface):
    for server, model in [(models, "splade"), (golden, "splade_max")]:
        response = server.post(path, body | {"model": model})
        assert_error(response, status, interface)
        assert re.search(
            r'model \W*"\w+\W*" is for sparse_embedding \(/embed_sparse\): expected a model for '
            r"embedding \(dense vectors\)", response.text,
        ), response.text
    response = golden.post(path, body)  # no model is dense
    assert_error(response, status, interface)
    assert "this server has no model for embedding (dense vectors)" in response.text
    assert "for sparse_embedding (/embed_sparse)" in response.text


def test_embed_sparse_of_a_dense_model_names_embed(models, server):
    response = models.post("/embed_sparse", {"model": MINILM, "inputs": "a"})
    assert_error(response, 424)
    assert "is for embedding (/embed): expected a model for sparse_embedding" in response.text
    response = server.post("/embed_sparse", {"inputs": "a"})
    assert_error(response, 424)
    assert response.json()["error_type"] == "Backend"


def test_the_main_route_of_a_sparse_model_is_embed_sparse(models, golden):
    expected = golden.json("/embed_sparse", {"inputs": TEXTS})
    for path in ("/", "/invocations"):
        assert_same_json(golden.json(path, {"inputs": TEXTS}), expected)
    assert_error(golden.post("/", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}), 422)


def test_info_names_the_pooling_as_text_embeddings_inference_does(models, golden):
    info = golden.get("/info").json()
    assert info["model_type"]["embedding"]["pooling"] == "splade"
    assert {model["task"] for model in info["models"]} == {"sparse_embedding"}
    assert all(model["dimension"] > 0 for model in info["models"])
    assert "pooling" not in models.get("/info").json()["model_type"]["embedding"]


def test_other_routes_take_a_sparse_model(models):
    body = {"model": "splade", "inputs": "the cat"}
    tokens = models.json("/tokenize", body | {"prompt_name": "query"})[0]
    ids = [token["id"] for token in tokens]
    assert "the cat" in models.json("/decode", {"model": "splade", "ids": ids})[0]
    weights = np.array(models.json("/attention", body)["weights"])
    assert weights.shape[-1] == len(ids)
    assert_error(models.post("/fill_mask", {"model": "splade", "inputs": "a [MASK]"}), 424)


def test_texts_and_tokens_are_counted(serve):
    server = serve("--model", f"splade={SPARSE / 'splade_max'}")
    texts = TEXTS[:2]  # short
    server.json("/embed_sparse", {"inputs": texts})
    counted = lambda name: metric(server, f"encodle_{name}_total", model="splade")
    tokens = server.json("/tokenize", {"inputs": texts})
    assert counted("texts") == 4  # with those of /tokenize
    assert counted("tokens") == sum(len(text) for text in tokens)


def test_a_request_whose_vectors_could_need_too_much_memory_is_refused(serve):
    server = serve("--model", SPARSE / "splade_max", "--max-memory", "16", "--max-texts", "40000")
    refused = server.post("/embed_sparse", {"inputs": ["a"] * 40_000})
    assert_error(refused, 413)
    assert "of memory" in refused.json()["error"], refused.text
    server.json("/embed_sparse", {"inputs": ["a"] * 100})

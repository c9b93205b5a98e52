"""Multi-vector models by /embed_all and the rerank routes, against sentence-transformers, and the
errors of these routes."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conftest import GOLDEN, MINILM, Server, assert_error, f32
from test_sparse import read_tensors

FOLDER = GOLDEN / "multi_vector"
TEXTS = json.loads((FOLDER / "expected.json").read_text())["texts"]
MODELS = ["plain", "expansion", "expansion_min", "pooled", "pylate", "stanford"]


@pytest.fixture(scope="module")
def tensors():
    return read_tensors(FOLDER / "expected.safetensors")


@pytest.fixture(scope="module")
def golden():
    """A server with several models of tests/golden/multi_vector."""
    server = Server(*(f"--model={name}={FOLDER / name}" for name in MODELS))
    yield server
    server.stop()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("side", ["query", "document", "encode"])
def test_vectors_equal_sentence_transformers(golden, tensors, model, side):
    prompt = {} if side == "encode" else {"prompt_name": side}
    got = golden.json("/embed_all", {"model": model, "inputs": TEXTS, **prompt})
    offsets = tensors[f"{model}.{side}.offsets"]
    assert [len(rows) for rows in got] == np.diff(offsets).tolist()
    got = f32([row for rows in got for row in rows])
    expected = tensors[f"{model}.{side}.vectors"].reshape(got.shape)
    assert np.abs(got - expected).max() <= 1e-6


def test_the_route_of_jina_selects_the_side_by_input_type(golden):
    for side, fields in [("query", {"input_type": "query"}), ("document", {})]:
        for texts in (TEXTS[:3], TEXTS[0]):
            body = {"model": "expansion", "input": texts, "embedding_type": "float", "dimensions": 8}
            response = golden.json("/v1/multi-vector", body | fields)
            of_tei = {"model": "expansion", "inputs": texts, "prompt_name": side}
            data = response["data"]
            assert [one["embeddings"] for one in data] == golden.json("/embed_all", of_tei)
            assert [one["index"] for one in data] == list(range(len(data)))
            assert response["usage"]["total_tokens"] > 0


@pytest.mark.parametrize("path, texts, results, score", [
    ("/rerank", "texts", None, "score"),
    ("/v1/rerank", "documents", "results", "relevance_score"),
    ("/v2/rerank", "documents", "results", "relevance_score"),
])
def test_scores_equal_sentence_transformers(golden, tensors, path, texts, results, score):
    for model in ["expansion", "pylate"]:
        expected = tensors[f"{model}.similarity"].reshape(len(TEXTS), len(TEXTS))
        for query in (0, 10):
            body = {"model": model, "query": TEXTS[query], texts: TEXTS}
            response = golden.json(path, body)
            ranked = response[results] if results else response
            scores = {one["index"]: one[score] for one in ranked}
            assert [one[score] for one in ranked] == sorted(scores.values(), reverse=True)
            got = np.array([scores[i] for i in range(len(TEXTS))])
            assert np.abs(got - expected[query]).max() <= 1e-5


def test_the_main_route_embeds_or_ranks(golden):
    body = {"model": "plain", "inputs": TEXTS}
    assert golden.json("/", body) == golden.json("/embed_all", body)
    body = {"model": "plain", "query": TEXTS[0], "texts": TEXTS}
    assert golden.json("/", body) == golden.json("/rerank", body)
    info = golden.get("/info").json()["models"]
    assert {(one["task"], one["dimension"]) for one in info} == {("multi_vector_embedding", 8)}


@pytest.mark.parametrize("path, body, status, interface", [
    ("/embed", {"inputs": "a"}, 424, "tei"),
    ("/embed_sparse", {"inputs": "a"}, 424, "tei"),
    ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}, 424, "tei"),
    ("/v1/embeddings", {"input": "a"}, 400, "openai"),
])
def test_a_route_of_other_vectors_names_embed_all(golden, path, body, status, interface):
    response = golden.post(path, body | {"model": "plain"})
    assert_error(response, status, interface)
    assert "is for multi_vector_embedding (/embed_all)" in response.text


@pytest.mark.parametrize("path, body, status, interface", [
    ("/embed_all", {"inputs": []}, 400, "tei"),
    ("/embed_all", {"inputs": ["a"] * 2049}, 413, "tei"),
    ("/embed_all", {"inputs": "a", "prompt_name": "nope"}, 400, "tei"),
    ("/embed_all", {"inputs": "a", "normalize": True}, 422, "tei"),
    ("/v1/multi-vector", {"input": "a", "dimensions": 4}, 400, "openai"),
    ("/v1/multi-vector", {"input": "a", "input_type": "passage"}, 400, "openai"),
    ("/v1/multi-vector", {"input": "a", "embedding_type": "binary"}, 400, "openai"),
    ("/v1/multi-vector", {"input": [[2, 3]]}, 400, "openai"),
    ("/rerank", {"query": "", "texts": []}, 400, "tei"),
    ("/v1/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 3}, 400, "cohere"),
])
def test_bad_input_is_refused(golden, path, body, status, interface):
    assert_error(golden.post(path, body | {"model": "expansion"}), status, interface)


def test_texts_are_truncated_on_either_side_or_refused(golden):
    post = lambda **fields: golden.post("/embed_all", {
        "model": "expansion", "inputs": "the cat dog bank " * 30, "prompt_name": "document",
        **fields,
    })
    right, left = post(), post(truncation_direction="left")
    assert right.headers["x-truncated-texts"] == left.headers["x-truncated-texts"] == "1"
    # document_length is 14; the ":" of the prompt has no vector.
    assert [len(right.json()[0]), len(left.json()[0])] == [13, 14]
    assert right.json() != left.json()
    assert_error(post(truncate=False), 413)


def test_bge_m3_is_served_as_each_of_its_kinds():
    folder = GOLDEN / "bge_m3"
    texts = json.loads((folder / "expected.json").read_text())["texts"][:3]
    models = [f"--model={name}={folder}" for name in ("dense", "sparse", "multi")]
    server = Server(*models, "--kind", "sparse=sparse", "--kind", "multi=multi")
    try:
        expected = read_tensors(folder / "expected.safetensors")
        got = f32(server.json("/embed", {"model": "dense", "inputs": texts}))
        assert np.abs(got - expected["dense"].reshape(-1, 16)[:3]).max() <= 1e-5
        got = server.json("/embed_sparse", {"model": "sparse", "inputs": texts})
        end = expected["sparse.offsets"][3]
        assert [one["index"] for row in got for one in row] == expected["sparse.indices"][:end].tolist()
        got = server.json("/embed_all", {"model": "multi", "inputs": texts})
        end = expected["colbert.offsets"][3]
        got = f32([row for rows in got for row in rows])
        assert np.abs(got - expected["colbert.vectors"].reshape(-1, 16)[:end]).max() <= 1e-5
    finally:
        server.stop()


def test_one_model_of_all_kinds_answers_the_routes_of_each_kind():
    folder = GOLDEN / "bge_m3"
    texts = json.loads((folder / "expected.json").read_text())["texts"][:3]
    models = [f"--model={name}={folder}" for name in ("all", "sparse", "multi", "dense")]
    kinds = ["--kind=all=all", "--kind=sparse=sparse", "--kind=multi=multi"]
    server = Server(*models, *kinds)
    rank = {"query": texts[0], "texts": texts}
    try:
        for path, model, body in (
            ("/embed", "dense", {"inputs": texts}),
            ("/v1/embeddings", "dense", {"input": "a cat"}),  # refuses long texts
            ("/embed_sparse", "sparse", {"inputs": texts}),
            ("/embed_all", "multi", {"inputs": texts}),
            ("/v1/multi-vector", "multi", {"input": texts}),
            ("/rerank", "multi", rank),
        ):
            one, other = (server.json(path, body | {"model": name}) for name in ("all", model))
            for response in (one, other):
                if isinstance(response, dict):
                    response.pop("model")
            assert one == other, path
        # Requests of all kinds at the same time are not computed in the same batch.
        paths = ["/embed", "/embed_sparse", "/embed_all"] * 8
        post = lambda path: server.json(path, {"model": "all", "inputs": texts})
        expected = [post(path) for path in paths[:3]] * 8
        with ThreadPoolExecutor(len(paths)) as pool:
            assert list(pool.map(post, paths)) == expected
        info = server.get("/info").json()["models"][0]
        assert (info["name"], info["task"], info["dimension"]) == ("all", "embedding", 16)
    finally:
        server.stop()


def test_a_model_of_one_kind_cannot_be_served_as_all():
    with pytest.raises(AssertionError, match="expected a folder of BGE-M3, with sparse_linear.pt"):
        Server("--kind", "all")


def test_embed_all_of_a_dense_model_has_its_hidden_states(server):
    [rows] = server.json("/embed_all", {"model": MINILM, "inputs": "I love AI"})
    assert np.shape(rows) == (5, 384)

"""Embeddings with a vector per token, against the golden files of sentence-transformers."""

import copy
import json
import pickle
import sys

import numpy as np
import pytest
from conftest import GOLDEN, assert_close
from safetensors.numpy import load_file

import encodle

MULTI = GOLDEN / "multi_vector"
TEXTS = json.loads((MULTI / "expected.json").read_text())["texts"]
MODELS = sorted(path.name for path in MULTI.iterdir() if path.is_dir())
# PyTorch sums in another order.
TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def tensors():
    return load_file(MULTI / "expected.safetensors")


@pytest.fixture(scope="module")
def expansion():
    return encodle.MultiVectorEncoder(MULTI / "expansion")


def assert_vectors(got, tensors, case):
    """Compares lists of arrays with vectors that are stored one after another."""
    offsets = tensors[f"{case}.offsets"]
    assert [len(row) for row in got] == np.diff(offsets).tolist(), case
    assert all(row.dtype == np.float32 for row in got)
    assert_close(np.concatenate(got), tensors[f"{case}.vectors"], TOLERANCE)


@pytest.mark.parametrize("name", MODELS)
def test_vectors_and_scores_equal_sentence_transformers(name, tensors):
    model = encodle.MultiVectorEncoder(MULTI / name)
    queries = model.encode_query(TEXTS, convert_to_numpy=True)
    documents = model.encode_document(TEXTS, convert_to_numpy=True)
    assert_vectors(queries, tensors, f"{name}.query")
    assert_vectors(documents, tensors, f"{name}.document")
    assert_vectors(model.encode(TEXTS, convert_to_numpy=True), tensors, f"{name}.encode")
    assert queries[0].shape[1] == model.get_embedding_dimension()
    for function, case in [(None, "similarity"), ("maxsim", "maxsim"), ("mean_maxsim", "mean_maxsim")]:
        model.similarity_fn_name = function or model.similarity_fn_name
        expected = tensors[f"{name}.{case}"]
        # A text without vectors has the score -1e9.
        tolerance = 2e-5 * max(1, np.abs(expected[expected > -1e7], dtype=np.float32).max(initial=0))
        scores = model.similarity(queries, documents)
        assert ((scores < -1e7) == (expected < -1e7)).all()
        assert_close(np.maximum(scores, -1e7), np.maximum(expected, -1e7), tolerance)
        assert_close(model.similarity_pairwise(queries, documents), scores.diagonal(), 0)


def test_bge_m3_has_vectors_for_the_tokens_of_a_text(tensors):
    folder = GOLDEN / "bge_m3"
    expected = load_file(folder / "expected.safetensors")
    texts = json.loads((folder / "expected.json").read_text())["texts"]
    model = encodle.MultiVectorEncoder(folder)
    assert model.similarity_fn_name == "meanmaxsim"
    vectors = model.encode(texts, convert_to_numpy=True)
    assert [len(row) for row in vectors] == np.diff(expected["colbert.offsets"]).tolist()
    assert_close(np.concatenate(vectors), expected["colbert.vectors"], 1e-5)
    assert_close(model.similarity(vectors, vectors), expected["colbert_scores"], 1e-5)


def test_the_task_and_not_the_prompt_selects_the_side(tensors, expansion):
    encode = lambda **arguments: expansion.encode(TEXTS, convert_to_numpy=True, **arguments)
    assert_vectors(encode(task="query", prompt_name="query"), tensors, "expansion.query")
    assert_vectors(encode(task="document", prompt_name="document"), tensors, "expansion.document")
    assert all(len(row) == 12 for row in encode(task="query"))
    prompt = expansion.prompts["query"]
    for found in (encode(prompt_name="query"), encode(prompt=prompt)):
        assert any(len(row) != 12 for row in found)
    model = encodle.MultiVectorEncoder(MULTI / "prompts")
    for arguments in ({"prompt_name": "query"}, {"prompt": "query: "}):
        found = model.encode(TEXTS, convert_to_numpy=True, **arguments)
        assert_vectors(found, tensors, "prompts.named")
    with pytest.raises(ValueError, match="task 'x' is unknown"):
        encode(task="x")


def test_a_text_whose_tokens_are_skipped_has_no_vectors(expansion):
    torch = pytest.importorskip("torch")
    model = encodle.MultiVectorEncoder(MULTI / "two_dense")
    rows = model.encode_document(TEXTS, convert_to_numpy=True)
    empty = next(row for row in rows if not len(row))
    assert empty.shape == (0, model.get_embedding_dimension())
    assert model.similarity(rows[0], [empty]).tolist() == [[-1e9]]
    assert model.similarity([empty], [rows[0], empty]).tolist() == [[0, -1e9]]
    assert torch.from_numpy(empty).shape == (0, model.get_embedding_dimension())


def test_results_are_tensors_by_default(expansion):
    torch = pytest.importorskip("torch")
    expected = expansion.encode(TEXTS, convert_to_numpy=True)
    rows = expansion.encode(TEXTS)
    assert isinstance(rows, list) and all(row.dtype == torch.float32 for row in rows)
    assert all((row.numpy() == array).all() for row, array in zip(rows, expected, strict=True))
    one = expansion.encode(TEXTS[0])
    assert isinstance(one, torch.Tensor) and (one.numpy() == expected[0]).all()
    assert expansion.encode([]) == []
    scores = expansion.similarity(one, rows)
    assert isinstance(scores, torch.Tensor) and scores.shape == (1, len(TEXTS))
    assert (scores.numpy() == expansion.similarity(expected[:1], expected)).all()


def test_torch_is_needed_for_tensors_only(expansion, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # import raises ImportError
    with pytest.raises(encodle.EncodleError, match="needs the package torch, .* convert_to_numpy=True"):
        expansion.encode("a")
    assert expansion.encode("a", convert_to_numpy=True).ndim == 2


def test_vectors_are_scaled_to_length_1_if_requested():
    model = encodle.MultiVectorEncoder(MULTI / "no_dense")  # without Normalize
    vectors = model.encode_query(TEXTS, convert_to_numpy=True)
    scaled = model.encode_query(TEXTS, convert_to_numpy=True, normalize_embeddings=True)
    for before, after in zip(vectors, scaled, strict=True):
        lengths = np.linalg.norm(before, axis=1, keepdims=True)
        assert lengths.min() > 2
        assert_close(after, before / lengths, 1e-6)


def test_every_form_of_the_same_vectors_has_the_same_scores(expansion):
    torch = pytest.importorskip("torch")
    rows = expansion.encode_document(TEXTS, convert_to_numpy=True)
    query = expansion.encode_query("the cat", convert_to_numpy=True)
    expected = expansion.similarity([query], rows)
    padded = np.zeros((len(rows), max(map(len, rows)), rows[0].shape[1]), np.float32)
    for place, row in zip(padded, rows, strict=True):
        place[: len(row)] = row
    strided = [np.asfortranarray(row) for row in rows]
    doubles = [row.astype(np.float64) for row in rows]
    tensors = [torch.from_numpy(row) for row in rows]
    for form in (tuple(rows), padded, torch.from_numpy(padded), strided, doubles, tensors):
        assert (np.asarray(expansion.similarity(query, form)) == expected).all()
    queries = [query] * len(rows)
    assert (expansion.similarity_pairwise(queries, padded) == expected[0]).all()
    halves = [tensor.bfloat16() for tensor in tensors]
    assert_close(expansion.similarity(query, halves), expected, 0.1)
    assert expansion.similarity([], rows).shape == (0, len(rows))
    assert expansion.similarity(rows, []).shape == (len(rows), 0)
    assert expansion.similarity_pairwise([], []).shape == (0,)
    many = expansion.similarity_pairwise([query] * 200, [rows[0]] * 200)  # several parts
    assert (many == expected[0, 0]).all()


def test_vectors_of_other_lengths_and_shapes_are_errors(expansion):
    vectors = expansion.encode(TEXTS[:2], convert_to_numpy=True)
    for call in (expansion.similarity, expansion.similarity_pairwise):
        with pytest.raises(ValueError, match=r"vectors have \[3, 8\] values: expected equal lengths"):
            call(vectors, np.ones((2, 3)))
        with pytest.raises(ValueError, match=r"have the shape \(3,\): expected \(T, E\)"):
            call([np.ones(3)], vectors)
        with pytest.raises(TypeError, match="vectors are of type str"):
            call("a", vectors)
    with pytest.raises(ValueError, match="there are 2 queries and 1 documents: expected equal numbers"):
        expansion.similarity_pairwise(vectors, vectors[:1])


def test_similarity_functions_are_those_of_several_vectors():
    model = encodle.MultiVectorEncoder(MULTI / "plain", similarity_fn_name="meanmaxsim")
    assert model.similarity_fn_name == "meanmaxsim"
    model.similarity_fn_name = encodle.SimilarityFunction.MAXSIM
    assert model.similarity_fn_name == "maxsim"
    with pytest.raises(ValueError, match="'cosine' is unknown: expected one of"):
        model.similarity_fn_name = "cosine"
    with pytest.raises(ValueError, match="'maxsim' is unknown: expected one of"):
        encodle.SentenceTransformer(similarity_fn_name="maxsim")


def test_rank_orders_documents_by_their_scores(expansion):
    ranked = expansion.rank("the red cat", TEXTS, top_k=3, return_documents=True)
    query = expansion.encode_query("the red cat", convert_to_numpy=True)
    scores = expansion.similarity(query, expansion.encode_document(TEXTS, convert_to_numpy=True))[0]
    best = np.argsort(-scores, kind="stable")[:3]
    assert ranked == [{"corpus_id": i, "score": scores[i], "text": TEXTS[i]} for i in best.tolist()]
    assert len(expansion.rank("a", TEXTS)) == len(TEXTS) and expansion.rank("a", []) == []
    for message, call in [
        ("^query is 5", lambda: expansion.rank(5, TEXTS)),
        ("^documents is 'a'", lambda: expansion.rank("a", "a")),
        ("^top_k is '3'", lambda: expansion.rank("a", TEXTS, top_k="3")),
    ]:
        with pytest.raises(TypeError, match=message):
            call()


def test_a_model_can_be_pickled_copied_and_shortened(expansion):
    expected = expansion.encode(TEXTS, convert_to_numpy=True)
    for other in (pickle.loads(pickle.dumps(expansion)), copy.deepcopy(expansion)):
        found = other.encode(TEXTS, convert_to_numpy=True)
        assert all((a == b).all() for a, b in zip(found, expected, strict=True))
    short = copy.copy(expansion)
    short.max_seq_length = 5
    assert pickle.loads(pickle.dumps(short)).max_seq_length == short.get_max_seq_length() == 5
    assert len(short.encode(TEXTS[2], convert_to_numpy=True)) <= 5
    # The lengths of queries and documents are those of the model's files.
    assert len(short.encode_query(TEXTS[2], convert_to_numpy=True)) == 12
    assert len(short.encode_document(TEXTS[2], convert_to_numpy=True)) > 5
    with pytest.raises(encodle.EncodleError, match="text 2: "):
        short.encode(["cat", "dog", TEXTS[2]], convert_to_numpy=True, long_texts="refuse")
    windows = short.encode(TEXTS[2], convert_to_numpy=True, long_texts="windows")
    assert len(windows) > len(expected[2])
    assert expansion.tokenize(TEXTS[:2])["input_ids"].shape[0] == 2


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"output_value": None}, ValueError, "output_value None is not supported"),
        ({"batch_size": 0}, ValueError, "batch_size is 0"),
        ({"token_pooling": 5}, encodle.EncodleError, "token_pooling is not supported: expected None"),
        ({"pool": {}}, encodle.EncodleError, "pool is not supported"),
        ({"device": "cuda"}, encodle.EncodleError, "device 'cuda' is not supported"),
        ({"convert_to_tensor": True}, TypeError, "convert_to_tensor"),
        ({"long_texts": "x"}, ValueError, "long_texts \"x\" is unknown"),
    ],
)
def test_wrong_arguments_are_errors(expansion, arguments, kind, message):
    for call in (expansion.encode, expansion.encode_query, expansion.encode_document):
        with pytest.raises(kind, match=message):
            call("a", **{"convert_to_numpy": True, **arguments})


def test_a_model_of_another_kind_is_an_error():
    with pytest.raises(encodle.EncodleError, match="modules Transformer, Pooling, Normalize"):
        encodle.MultiVectorEncoder(GOLDEN.parents[1] / "weights/all-MiniLM-L6-v2")
    with pytest.raises(encodle.EncodleError):
        encodle.SentenceTransformer(MULTI / "plain")


def test_batches_get_a_column_of_lists_of_vectors(expansion):
    pa = pytest.importorskip("pyarrow")
    texts = ["the cat", None, "", "a dog!"]
    batch = pa.RecordBatch.from_pydict({"text": texts})
    valid = [text for text in texts if text is not None]
    for name, method in [
        (None, expansion.encode),
        ("query", expansion.encode_query),
        ("document", expansion.encode_document),
    ]:
        embedder = encodle.BatchEmbedder(MULTI / "expansion", prompt_name=name, on_error="skip")
        assert embedder.dimension == 8
        found = pickle.loads(pickle.dumps(embedder))(batch).column("embedding")
        assert str(found.type) == (
            "list<element: fixed_size_list<element: halffloat not null>[8] not null>"
        )
        expected = method(valid, convert_to_numpy=True)
        for value, row in zip(found, expected, strict=True):
            vectors = value.values.flatten().to_numpy(zero_copy_only=False).reshape(-1, 8)
            assert (vectors == row.astype(np.float16)).all()
    folder = MULTI / "two_dense"
    empty = encodle.BatchEmbedder(folder, prompt_name="document")(batch.slice(2, 1)).column("embedding")
    assert empty.to_pylist() == [[]]
    with pytest.raises(encodle.EncodleError, match="row 1, column 'text': the text is null"):
        encodle.BatchEmbedder(MULTI / "expansion")(batch)
    with pytest.raises(ValueError, match="truncate_dim has no meaning for a multi-vector model"):
        encodle.BatchEmbedder(MULTI / "expansion", truncate_dim=3)(batch)


def test_a_value_that_float16_cannot_hold_is_an_error_of_the_column(monkeypatch):
    pa = pytest.importorskip("pyarrow")
    rows = [np.full((1, 8), 1e5, np.float32)]
    monkeypatch.setattr(encodle.MultiVectorEncoder, "_embed_batch", lambda *_: (rows, []))
    embedder = encodle.BatchEmbedder(MULTI / "plain")
    with pytest.raises(encodle.EncodleError, match="a value that is not finite in float16"):
        embedder(pa.RecordBatch.from_pydict({"text": ["a"]}))


@pytest.mark.reference
@pytest.mark.parametrize("name", ["expansion", "expansion_min", "pooled", "prompts", "stanford"])
def test_the_surface_equals_sentence_transformers(name):
    kind = pytest.importorskip("sentence_transformers").MultiVectorEncoder
    reference = kind(str(MULTI / name), device="cpu")
    model = encodle.MultiVectorEncoder(MULTI / name)
    texts = TEXTS[:6]

    def compare():
        for method in ("encode", "encode_query", "encode_document"):
            ours, theirs = getattr(model, method)(texts), getattr(reference, method)(texts)
            assert type(ours) is type(theirs)
            for one, other in zip(ours, theirs, strict=True):
                assert_close(one, other, TOLERANCE)
        one, other = (each.encode_query(texts[0], convert_to_numpy=True) for each in (model, reference))
        assert type(one) is type(other)
        assert_close(one, other, TOLERANCE)
        documents = model.encode_document(texts)
        padded = np.stack([documents[0], documents[0] * 0])
        for b in (documents, documents[0], padded):
            assert_close(model.similarity(one, b), reference.similarity(one, b), 2e-5)
        pairs = (ours, documents)
        assert_close(model.similarity_pairwise(*pairs), reference.similarity_pairwise(*pairs), 2e-5)

    compare()
    assert model.max_seq_length == reference.max_seq_length
    assert model.similarity_fn_name == reference.similarity_fn_name
    assert model.get_embedding_dimension() == reference.get_embedding_dimension()
    assert model.prompts == {name: text or "" for name, text in reference.prompts.items()}
    model.max_seq_length = reference.max_seq_length = 5
    compare()

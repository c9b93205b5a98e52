"""Sparse embeddings, against the golden files of sentence-transformers."""

import copy
import json
import pickle
import sys

import numpy as np
import pytest
from conftest import GOLDEN, assert_close
from safetensors.numpy import load_file

import encodle
from encodle._sparse import SparseVectors

SPARSE = GOLDEN / "sparse"
EXPECTED = json.loads((SPARSE / "expected.json").read_text())
TEXTS = EXPECTED["texts"]
TOKENS = ("input_ids", "attention_mask", "token_type_ids")
# PyTorch sums in another order.
TOLERANCE = 1e-5

scipy_sparse = pytest.importorskip("scipy.sparse")


@pytest.fixture(scope="module")
def tensors():
    return load_file(SPARSE / "expected.safetensors")


@pytest.fixture(scope="module")
def splade():
    return encodle.SparseEncoder(SPARSE / "splade_max")


@pytest.fixture(scope="module")
def inference_free():
    return encodle.SparseEncoder(SPARSE / "inference_free")


def assert_vectors(got, tensors, case):
    assert isinstance(got, scipy_sparse.csr_array)
    assert (got.indptr == tensors[f"{case}.offsets"]).all(), case
    assert (got.indices == tensors[f"{case}.indices"]).all(), case
    assert_close(got.data, tensors[f"{case}.values"], TOLERANCE)


@pytest.mark.parametrize("name", EXPECTED["decoded"])
def test_vectors_and_similarities_equal_sentence_transformers(name, tensors):
    model = encodle.SparseEncoder(SPARSE / name)
    queries = model.encode_query(TEXTS, output="scipy")
    documents = model.encode_document(TEXTS, output="scipy")
    limited = model.encode_query(TEXTS, max_active_dims=5, output="scipy")
    assert_vectors(model.encode(TEXTS, output="scipy"), tensors, f"{name}.encode")
    assert_vectors(queries, tensors, f"{name}.query")
    assert_vectors(documents, tensors, f"{name}.document")
    assert_vectors(limited, tensors, f"{name}.query_5")
    similarities = model.similarity(queries, documents)
    largest = np.abs(similarities).max()
    assert_close(similarities, tensors[f"{name}.similarity"], TOLERANCE * max(1, largest))
    if not name.startswith("auto_encoder"):  # sentence-transformers prints tokens for its dimensions
        decoded = [" ".join(token for token, _ in row) for row in model.decode(queries, top_k=4)]
        # The last is that of a case with another number of tokens.
        for got, expected in zip(decoded, EXPECTED["decoded"][name], strict=False):
            assert got == expected


def test_a_limit_of_the_model_is_the_default_and_can_be_changed(tensors):
    model = encodle.SparseEncoder(SPARSE / "splade_max", max_active_dims=5)
    assert_vectors(model.encode_query(TEXTS, output="scipy"), tensors, "splade_max.query_5")
    model.max_active_dims = None
    assert_vectors(model.encode_query(TEXTS, output="scipy"), tensors, "splade_max.query")
    limited = encodle.SparseEncoder(SPARSE / "splade_limited")
    assert limited.max_active_dims == 4 and limited.similarity_fn_name == "cosine"
    with pytest.raises(ValueError, match="max_active_dims is 0: expected a positive integer"):
        model.max_active_dims = 0


def test_prompts_are_those_of_the_model_or_the_caller(tensors):
    model = encodle.SparseEncoder(SPARSE / "prompts")
    assert_vectors(model.encode(TEXTS, prompt_name="query", output="scipy"), tensors, "prompts.named")
    assert_vectors(model.encode(TEXTS, prompt="love ", output="scipy"), tensors, "prompts.text")
    with pytest.raises(ValueError, match="prompt_name 'nope' is unknown"):
        model.encode(TEXTS, prompt_name="nope", output="scipy")


def test_the_task_selects_the_weights_for_queries(inference_free, tensors):
    encode = lambda **arguments: inference_free.encode(TEXTS, output="scipy", **arguments)
    assert_vectors(encode(task="query"), tensors, "inference_free.query")
    assert_vectors(encode(task="document"), tensors, "inference_free.document")
    # As in sentence-transformers, the name of a prompt does not select them.
    assert_vectors(encode(prompt_name="query"), tensors, "inference_free.document")
    prompted = inference_free.encode_query("the dog", prompt="cat ", output="scipy")
    joined = inference_free.encode_query("cat the dog", output="scipy")
    assert (prompted != joined).nnz == 0
    with pytest.raises(ValueError, match="task 'x' is unknown"):
        encode(task="x")


def test_a_query_without_tokens_has_no_values(inference_free):
    row = inference_free.encode_query("", output="scipy")
    assert row.shape == (1, inference_free.get_embedding_dimension()) and row.nnz == 0
    assert inference_free.decode(row) == [[]]


def test_results_are_tensors_by_default(splade):
    torch = pytest.importorskip("torch")
    expected = splade.encode(TEXTS, output="scipy").toarray()
    tensor = splade.encode(TEXTS)
    assert tensor.layout == torch.sparse_coo and tensor.dtype == torch.float32
    assert (tensor.to_dense().numpy() == expected).all()
    assert (splade.encode(TEXTS, convert_to_sparse_tensor=False).numpy() == expected).all()
    rows = splade.encode(TEXTS, convert_to_tensor=False, save_to_cpu=True)
    assert isinstance(rows, list) and all(row.is_sparse for row in rows)
    assert (torch.stack(rows).to_dense().numpy() == expected).all()
    one = splade.encode(TEXTS[0])
    assert one.shape == (splade.get_embedding_dimension(),) and (one.to_dense().numpy() == expected[0]).all()
    assert splade.encode([]).shape == (0, splade.get_embedding_dimension())
    similarity = splade.similarity(one, rows)
    assert isinstance(similarity, torch.Tensor) and similarity.shape == (1, len(TEXTS))


@pytest.mark.parametrize(("package", "arguments"), [("torch", {}), ("scipy.sparse", {"output": "scipy"})])
def test_an_absent_package_is_an_error_that_names_it(splade, monkeypatch, package, arguments):
    monkeypatch.setitem(sys.modules, package, None)  # import raises ImportError
    with pytest.raises(encodle.EncodleError, match=f"needs the package {package.split('.')[0]}, "):
        splade.encode("a", **arguments)


@pytest.mark.parametrize("function", ["cosine", "dot", "euclidean", "manhattan"])
def test_similarities_equal_those_of_dense_vectors(splade, function, monkeypatch):
    monkeypatch.setattr("encodle.similarity.BLOCK", 5 * splade.get_embedding_dimension())  # several blocks
    splade.similarity_fn_name = function
    a, b = splade.encode(TEXTS, output="scipy"), splade.encode(TEXTS[::-1], output="scipy")
    dense = encodle.SentenceTransformer(similarity_fn_name=function)
    expected = dense.similarity(a.toarray(), b.toarray())
    tolerance = TOLERANCE * np.abs(expected).max()
    assert_close(splade.similarity(a, b), expected, tolerance)
    assert_close(splade.similarity(a.toarray(), list(b.toarray())), expected, tolerance)
    pairs = dense.similarity_pairwise(a.toarray(), b.toarray())
    assert_close(splade.similarity_pairwise(a, b), pairs, tolerance)
    first = dense.similarity_pairwise(a.toarray()[0], b.toarray())
    assert_close(splade.similarity_pairwise(a.toarray()[0], b), first, tolerance)
    assert np.shape(splade.similarity_pairwise(a.toarray()[0], b.toarray()[0])) == ()
    splade.similarity_fn_name = "dot"


def test_vectors_of_other_lengths_and_shapes_are_errors(splade):
    vectors = splade.encode(TEXTS[:2], output="scipy")
    with pytest.raises(ValueError, match="expected equal lengths"):
        splade.similarity(vectors, np.ones((2, 3)))
    with pytest.raises(ValueError, match="there are 2 and 3 vectors: expected equal numbers"):
        splade.similarity_pairwise(vectors, splade.encode(TEXTS[:3], output="scipy"))
    with pytest.raises(ValueError, match=r"vectors have the shape \(1, 1, 1\): expected \(B, E\)"):
        splade.sparsity(np.ones((1, 1, 1)))
    with pytest.raises(ValueError, match="vectors have 3 values: expected"):
        splade.decode(np.ones(3))
    with pytest.raises(TypeError, match="vectors are of type str"):
        splade.sparsity("a")


def test_decode_lists_tokens_in_descending_order_of_value(splade):
    matrix = splade.encode(TEXTS, output="scipy")
    decoded = splade.decode(matrix)
    for row, tokens in enumerate(decoded):
        values = [value for _, value in tokens]
        assert values == sorted(values, reverse=True)
        assert sorted(values) == sorted(matrix[[row]].data.tolist())
    assert splade.decode(matrix, top_k=2) == [tokens[:2] for tokens in decoded]
    assert splade.decode(matrix.toarray()[0]) == decoded[0]
    with pytest.raises(ValueError, match="top_k is 0"):
        splade.decode(matrix, top_k=0)


def test_sparsity_is_the_mean_over_the_vectors():
    vectors = np.array([[1, 0, 0, 2], [0, 0, 0, 1]], np.float32)
    expected = {"active_dims": 1.5, "sparsity_ratio": 0.625}
    assert encodle.SparseEncoder.sparsity(vectors) == expected
    assert encodle.SparseEncoder.sparsity(scipy_sparse.csr_array(vectors)) == expected
    assert encodle.SparseEncoder.sparsity(vectors[0]) == {"active_dims": 2.0, "sparsity_ratio": 0.5}
    assert encodle.SparseEncoder.sparsity(vectors[:0]) == {"active_dims": 0.0, "sparsity_ratio": 1.0}


def test_the_intersection_keeps_the_products_above_0():
    a = np.array([1, 0, 2, 3], np.float32)
    b = np.array([[2, 1, 0, -1], [0.5, 0, 1, 2]], np.float32)
    expected = [[2, 0, 0, 0], [0.5, 0, 2, 6]]
    assert encodle.SparseEncoder.intersection(a, b).toarray().tolist() == expected
    with pytest.raises(ValueError, match="embeddings_1 has 2 vectors: expected one"):
        encodle.SparseEncoder.intersection(b, a)
    torch = pytest.importorskip("torch")
    shared = encodle.SparseEncoder.intersection(torch.from_numpy(a).to_sparse(), torch.from_numpy(b))
    assert shared.is_sparse and shared.to_dense().tolist() == expected
    one = encodle.SparseEncoder.intersection(torch.from_numpy(a), torch.from_numpy(b[0]))
    assert one.to_dense().tolist() == expected[0]


def test_every_form_of_the_same_vectors_is_read_alike():
    dense = np.array([[0, 1, 0, 2], [0, 0, 0, 0], [3, 0, 0, -4]], np.float32)
    forms = [dense, list(dense), dense.tolist(), scipy_sparse.csr_array(dense), scipy_sparse.csr_matrix(dense),
             scipy_sparse.csc_array(dense), scipy_sparse.coo_array(dense), [scipy_sparse.csr_array(dense)]]
    unsorted = scipy_sparse.csr_array((np.float32([2, 1, -4, 3]), [3, 1, 3, 0], [0, 2, 2, 4]), shape=(3, 4))
    forms.append(unsorted)
    try:
        import torch
    except ImportError:
        pass
    else:
        tensor = torch.from_numpy(dense)
        forms += [tensor, tensor.bfloat16(), tensor.to_sparse(), tensor.to_sparse_csr(), list(tensor.to_sparse())]
    for form in forms:
        vectors, single = SparseVectors.of(form)
        assert not single and vectors.width == 4
        assert (vectors.offsets.tolist(), vectors.indices.tolist()) == ([0, 2, 2, 4], [1, 3, 0, 3]), form
        assert vectors.values.tolist() == [1, 2, 3, -4]


def test_a_model_can_be_pickled_copied_and_shortened(splade):
    expected = splade.encode(TEXTS, output="scipy")
    for other in (pickle.loads(pickle.dumps(splade)), copy.deepcopy(splade)):
        assert (other.encode(TEXTS, output="scipy") != expected).nnz == 0
    short = copy.copy(splade)
    short.max_seq_length = 5
    words = TEXTS[0].split()
    assert short.max_seq_length == short.get_max_seq_length() == 5
    cut = short.encode(TEXTS[0], output="scipy")
    assert (cut != splade.encode(" ".join(words[:3]), output="scipy")).nnz == 0
    with pytest.raises(encodle.EncodleError, match="text 0: "):
        short.encode(TEXTS, output="scipy", long_texts="refuse")
    tokens = splade.tokenize(TEXTS[:2])
    assert tuple(tokens) == TOKENS and tokens["input_ids"].shape[0] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"output": "numpy"}, "output 'numpy' is unknown"),
        ({"output": "scipy", "convert_to_tensor": False}, "need output=\"torch\""),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"max_active_dims": -1}, "max_active_dims is -1"),
    ],
)
def test_wrong_arguments_are_errors(splade, arguments, message):
    with pytest.raises(ValueError, match=message):
        splade.encode("a", **arguments)


def test_a_model_of_another_kind_is_an_error():
    with pytest.raises(encodle.EncodleError, match="modules Transformer, Pooling, Normalize"):
        encodle.SparseEncoder(GOLDEN.parents[1] / "weights/all-MiniLM-L6-v2")
    with pytest.raises(encodle.EncodleError):
        encodle.SentenceTransformer(SPARSE / "splade_max")


@pytest.mark.reference
def test_the_surface_equals_sentence_transformers(splade):
    reference = pytest.importorskip("sentence_transformers").SparseEncoder(str(SPARSE / "splade_max"), device="cpu")
    texts = TEXTS[:6]
    ours, theirs = splade.encode_query(texts), reference.encode_query(texts)
    assert ours.shape == theirs.shape and ours.layout == theirs.layout
    assert_close(ours.to_dense(), theirs.to_dense(), TOLERANCE)
    assert_close(splade.similarity(ours, ours), reference.similarity(theirs, theirs), 1e-4)
    assert splade.sparsity(ours) == pytest.approx(reference.sparsity(theirs))
    one = splade.intersection(ours[0], ours)
    assert_close(one.to_dense(), reference.intersection(theirs[0], theirs).to_dense(), 1e-4)
    for k in (None, 3):
        tokens = lambda decoded: [[token for token, _ in row] for row in decoded]
        assert tokens(splade.decode(ours, k)) == tokens(reference.decode(theirs, k))
    for name in ("max_seq_length", "max_active_dims", "similarity_fn_name"):
        assert getattr(splade, name) == getattr(reference, name)
    assert splade.get_embedding_dimension() == reference.get_embedding_dimension()
    assert splade.prompts == reference.prompts


def test_batches_get_a_column_of_pairs(inference_free):
    pa = pytest.importorskip("pyarrow")
    texts = ["the cat", None, "", "a dog"]
    batch = pa.RecordBatch.from_pydict({"text": texts})
    for name, method in [(None, inference_free.encode), ("query", inference_free.encode_query)]:
        embedder = encodle.BatchEmbedder(SPARSE / "inference_free", prompt_name=name, on_error="skip")
        assert embedder.dimension == inference_free.get_embedding_dimension()
        found = pickle.loads(pickle.dumps(embedder))(batch).column("embedding")
        assert str(found.type) == (
            "list<element: struct<index: uint32 not null, value: float not null> not null>"
        )
        expected = method([text for text in texts if text is not None], output="scipy")
        pairs = [
            [{"index": int(i), "value": float(x)} for i, x in zip(row.indices, row.data, strict=True)]
            for row in (expected[[i]] for i in range(3))
        ]
        assert found.to_pylist() == pairs
    with pytest.raises(encodle.EncodleError, match="row 1, column 'text': the text is null"):
        encodle.BatchEmbedder(SPARSE / "inference_free")(batch)
    with pytest.raises(ValueError, match="have no meaning for a sparse model"):
        encodle.BatchEmbedder(SPARSE / "inference_free", truncate_dim=3)(batch)

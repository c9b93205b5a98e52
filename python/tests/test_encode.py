"""SentenceTransformer: values, kinds of inputs and outputs, arguments, errors."""

import enum
import gc
import logging
import os
import pickle
import shutil
import subprocess
import sys
from types import ModuleType

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from conftest import GOLDEN, MINILM, assert_close, golden

import encodle
from encodle import similarity

TEXTS = ["A man is eating food.", "A man eats.", "It snows."]


def test_vectors_equal_sentence_transformers(model, sentences):
    assert_close(model.encode(sentences), golden("sentences.safetensors")["pooled"], 1e-6)


def test_encode_query_passes_positional_arguments_to_encode(chain):
    model = encodle.SentenceTransformer(chain)
    for method in (model.encode_query, model.encode_document):
        tokens = method("a", None, None, 32, None, "token_embeddings")
        assert tokens.ndim == 2


def test_truncate_embeddings_restores_the_dimension(model):
    with pytest.raises(KeyError), model.truncate_embeddings(3):
        assert model.encode("a").shape == (3,)
        raise KeyError
    assert model.truncate_dim is None and model.encode("a").shape == (384,)
    assert model.get_max_seq_length() == 256


def test_unknown_attributes_cannot_be_set():
    model = encodle.SentenceTransformer()
    with pytest.raises(AttributeError, match="SentenceTransformer has no attribute 'tokenizer': setting"):
        model.tokenizer = None
    with pytest.raises(AttributeError, match="threads"):
        model.threads = 1

    class Tagged(encodle.SentenceTransformer):
        pass

    tagged = Tagged()
    tagged.tag = "a"
    assert tagged.tag == "a"


def test_modules_and_prompts_equal_sentence_transformers(chain, sentences):
    expected = golden("sentence_chain.safetensors")
    model = encodle.SentenceTransformer(chain)
    assert model.prompts["query"] == "Find a sentence: "
    assert model.default_prompt_name == "topic"
    for name, got in [
        ("default", model.encode(sentences)),
        ("query", model.encode_query(sentences)),
        ("document", model.encode_document(sentences)),
        ("passage", model.encode(sentences, prompt_name="passage")),
        ("text", model.encode(sentences, prompt="Say: ")),
        ("cut", model.encode(sentences, truncate_dim=5, normalize_embeddings=True)),
    ]:
        assert_close(got, expected[name], 2e-6)
    with pytest.raises(ValueError, match="prompt_name 'title' is unknown: expected one of"):
        model.encode("a", prompt_name="title")


def test_prompts_of_the_caller_take_precedence(chain):
    model = encodle.SentenceTransformer(
        chain, prompts={"query": "Q: "}, default_prompt_name="query"
    )
    assert (model.encode("a") == model.encode("a", prompt="Q: ")).all()
    with pytest.raises(ValueError, match="default_prompt_name 'x' is unknown"):
        encodle.SentenceTransformer(chain, default_prompt_name="x")


@pytest.mark.parametrize(
    "texts",
    [
        tuple(TEXTS),
        iter(TEXTS),
        np.array(TEXTS),
        np.array(TEXTS, dtype=object),
        pd.Series(TEXTS),
        pd.Series(TEXTS, dtype=object),
        pa.array(TEXTS),
        pa.array(["left out", *TEXTS])[1:],
        pa.array(TEXTS, pa.large_string()),
        pa.array(TEXTS, pa.string_view()),
        pa.array(TEXTS).dictionary_encode(),
        pa.chunked_array([TEXTS[:1], [], TEXTS[1:]]),
    ],
    ids=lambda texts: type(texts).__name__,
)
def test_sequences_and_arrow_arrays_of_texts_give_equal_bits(model, texts):
    assert (model.encode(texts) == model.encode(TEXTS)).all()


def test_texts_may_be_named_inputs_or_sentences(model):
    vectors = model.encode(["a cab"])
    for encode in (model.encode, model.encode_query, model.encode_document):
        assert (encode(inputs=["a cab"]) == vectors).all() and (encode(sentences=["a cab"]) == vectors).all()
    for call in (lambda: model.encode("a", sentences="b"), lambda: model.encode(inputs="a", sentences="b")):
        with pytest.raises(TypeError, match="inputs and sentences are the same argument"):
            call()


def test_a_single_text_gives_one_dimension(model):
    named = enum.Enum("Named", {"SNOW": "It snows."}, type=str)
    for text in ["It snows.", np.str_("It snows."), np.array("It snows."), named.SNOW]:
        assert_close(model.encode(text), model.encode(TEXTS)[2], 0)
    assert model.encode([]).shape == (0, 384)
    assert model.encode(pa.array([], pa.string())).shape == (0, 384)


def test_assigned_prompts_may_lack_query_and_document():
    model = encodle.SentenceTransformer()
    model.prompts = {"passage": "It snows. "}
    assert (model.encode_query("a cab") == model.encode("a cab", prompt="")).all()
    assert (model.encode_document("a cab") == model.encode("It snows. a cab")).all()


def test_arrays_are_not_copied_and_outlive_the_model():
    vectors = encodle.SentenceTransformer().encode(TEXTS)
    gc.collect()
    assert vectors.flags.c_contiguous and vectors.flags.writeable and vectors.flags.aligned
    assert not isinstance(vectors.base, np.ndarray) and vectors.base is not None
    assert_close((vectors**2).sum(axis=1), np.ones(3), 1e-6)


def test_every_batch_and_number_of_threads_gives_equal_bits(model, sentences):
    expected = model.encode(sentences)
    assert all((model.encode(text) == row).all() for text, row in zip(sentences, expected))
    for threads in (1, 2, 3):
        other = encodle.SentenceTransformer(threads=threads, token_budget=64)
        assert other.threads == threads
        assert (other.encode(sentences * 2)[: len(sentences)] == expected).all()


def test_token_embeddings_are_the_last_hidden_states(model, sentences):
    expected = golden("sentences.safetensors")
    states = model.encode(sentences, output_value="token_embeddings")
    for i in range(3):
        assert_close(states[i], expected[f"last_layer.{i}"][0], 1e-5)
    assert (model.encode(sentences[0], output_value="token_embeddings") == states[0]).all()


def test_tokenize_pads_to_the_longest_text(model):
    tokens = model.tokenize(["hello!", "hello"])
    assert tokens["input_ids"].tolist() == [[101, 7592, 999, 102], [101, 7592, 102, 0]]
    assert tokens["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert tokens["token_type_ids"].sum() == 0


def test_precision_quantizes_the_vectors(model, sentences):
    vectors = model.encode(sentences)
    for precision in ("int8", "uint8", "binary", "ubinary"):
        got = model.encode(sentences, precision=precision)
        assert got.dtype == (np.int8 if precision in ("int8", "binary") else np.uint8)
        assert (got == encodle.quantize_embeddings(vectors, precision)).all()
    assert model.encode(sentences, precision="ubinary").shape == (10, 48)
    bits = np.unpackbits(model.encode(sentences[0], precision="ubinary"))
    assert (bits == (vectors[0] > 0)).all()
    with pytest.raises(ValueError, match="the ranges for int8 cannot be computed from a single vector"):
        model.encode("a", precision="int8")


def test_truncated_vectors_are_normalized_on_request(model):
    whole, cut = model.encode(TEXTS), model.encode(TEXTS, truncate_dim=16)
    assert (cut == whole[:, :16]).all()
    unit = model.encode(TEXTS, truncate_dim=16, normalize_embeddings=True)
    assert_close((unit**2).sum(axis=1), np.ones(3), 1e-6)
    other = encodle.SentenceTransformer(truncate_dim=16)
    assert other.get_sentence_embedding_dimension() == 16
    assert (other.encode(TEXTS) == cut).all()
    with pytest.raises(ValueError, match="truncate_dim is 0"):
        other.truncate_dim = 0


def test_an_explicit_truncate_dim_replaces_that_of_the_files(model, tmp_path):
    folder = shutil.copytree(MINILM, tmp_path / "model")
    (folder / "config_sentence_transformers.json").write_text('{"truncate_dim": 32}')
    of_files = encodle.SentenceTransformer(folder)
    whole = encodle.SentenceTransformer(MINILM).encode(TEXTS)
    assert (of_files.encode(TEXTS) == whole[:, :32]).all()
    assert (of_files.encode(TEXTS, truncate_dim=64) == whole[:, :64]).all()
    assert of_files.truncate_dim == 32
    with of_files.truncate_embeddings(None):
        assert of_files.get_embedding_dimension() == 384
        assert (of_files.encode(TEXTS) == whole).all()
    of_files.truncate_dim = 1000
    assert of_files.get_embedding_dimension() == 384
    assert (of_files.encode(TEXTS) == whole).all()
    batch = pa.RecordBatch.from_pydict({"text": TEXTS})
    for truncate_dim, size in [(None, 32), (64, 64)]:
        embedded = encodle.BatchEmbedder(folder, truncate_dim=truncate_dim)(batch)
        assert embedded.schema.field("embedding").type.list_size == size


def test_paths_are_independent_of_the_working_directory(model, tmp_path, monkeypatch):
    (tmp_path / "encoder").symlink_to(MINILM)
    (tmp_path / "ranker").symlink_to(GOLDEN / "heads/score")
    monkeypatch.chdir(tmp_path)
    pickled = [
        pickle.dumps(encodle.SentenceTransformer("encoder")),
        pickle.dumps(encodle.BatchEmbedder("encoder")),
        pickle.dumps(encodle.CrossEncoder("ranker")),
    ]
    monkeypatch.chdir("/")
    encoder, batches, ranker = map(pickle.loads, pickled)
    assert (encoder.encode("a") == model.encode("a")).all()
    assert batches.model == str(tmp_path / "encoder") and batches.dimension == 384
    assert ranker.num_labels == 1


def test_names_without_an_organisation_are_those_of_sentence_transformers(tmp_path):
    code = """
import encodle
for name in ("all-mpnet-base-v2", "all-mpnet-base-v2@main"):
    try:
        encodle.SentenceTransformer(name)
    except encodle.EncodleError as error:
        print(error)
try:
    encodle.CrossEncoder("ms-marco-MiniLM-L6-v2", revision="v1")
except encodle.EncodleError as error:
    print(error)
print(encodle.BatchEmbedder("all-mpnet-base-v2").model)
print(encodle.BatchEmbedder("all-MiniLM-L6-v2").model)
"""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    first, second, third, *models = done.stdout.splitlines()
    for error in (first, second):
        assert "model sentence-transformers/all-mpnet-base-v2 is not in the cache" in error
        assert "is named 'all-mpnet-base-v2', so it was read as sentence-transformers/" in error
    assert "model cross-encoder/ms-marco-MiniLM-L6-v2 is not in the cache" in third
    assert "was read as cross-encoder/ms-marco-MiniLM-L6-v2@v1 on the hub" in third
    assert models == ["sentence-transformers/all-mpnet-base-v2", "None"]


def cached(cache, name, folder):
    """Puts a folder into a cache of models of the hub."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    in_cache = cache / f"models--{name.replace('/', '--')}"
    for below in ("refs", "snapshots"):
        (in_cache / below).mkdir(parents=True)
    (in_cache / "refs/main").write_text(commit)
    (in_cache / "snapshots" / commit).symlink_to(folder)


def test_the_cache_of_sentence_transformers_is_used(model, tmp_path, monkeypatch):
    cached(tmp_path / "of_st", "org/encoder", MINILM)
    cached(tmp_path / "of_st", "org/ranker", GOLDEN / "heads/score")
    cached(tmp_path / "of_st", "org/classifier", GOLDEN / "heads/sequence")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "of_hub"))
    monkeypatch.setenv("SENTENCE_TRANSFORMERS_HOME", str(tmp_path / "of_st"))
    encoder = encodle.SentenceTransformer("org/encoder")
    for opened in (encoder, pickle.loads(pickle.dumps(encoder))):
        assert (opened.encode("a") == model.encode("a")).all()
    ranker = encodle.CrossEncoder("org/ranker")
    assert ranker.num_labels == pickle.loads(pickle.dumps(ranker)).num_labels == 1
    assert encodle.BatchEmbedder("org/encoder").dimension == 384
    assert len(encodle.TextClassifier("org/classifier").labels) == 3
    for empty in ("", None):
        if empty is None:
            monkeypatch.delenv("SENTENCE_TRANSFORMERS_HOME")
        else:
            monkeypatch.setenv("SENTENCE_TRANSFORMERS_HOME", empty)
        with pytest.raises(encodle.EncodleError, match="of_hub"):
            encodle.SentenceTransformer("org/encoder")


def test_offline_the_name_on_the_hub_means_the_built_in_model(model, tmp_path, monkeypatch, caplog):
    name = "sentence-transformers/all-MiniLM-L6-v2"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(encodle.EncodleError, match="cannot be fetched"):
        encodle.SentenceTransformer(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    opened = encodle.SentenceTransformer(name)
    assert caplog.messages == [
        f"model {name} is not in the cache: using the model of the package, whose weights are "
        "rounded to f16"
    ]
    assert (opened.encode("a") == model.encode("a")).all()
    assert encodle.BatchEmbedder(name).model is None
    assert encodle.AttentionReader(name).attentions("a")
    with pytest.raises(encodle.EncodleError, match="is not in the cache"):
        encodle.SentenceTransformer(name, revision="main")
    folder = shutil.copytree(MINILM, tmp_path / "copy")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 7, "do_lower_case": false}')
    cached(tmp_path, name, folder)
    of_cache, embedder = encodle.SentenceTransformer(name), encodle.BatchEmbedder(name)
    assert of_cache.max_seq_length == 7
    # Another process does not choose again.
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "empty"))
    for reopen in (lambda: pickle.loads(pickle.dumps(of_cache)), lambda: embedder.dimension):
        with pytest.raises(encodle.EncodleError, match="is not in the cache"):
            reopen()


def test_precisions_of_the_model_are_close_to_f32(model):
    for precision, minimum in [("bf16", 0.9999), ("int8", 0.998)]:
        other = encodle.SentenceTransformer(precision=precision)
        cosines = model.similarity_pairwise(other.encode(TEXTS), model.encode(TEXTS))
        assert (cosines > minimum).all() and (cosines < 1).all()


def test_long_texts_are_truncated_averaged_or_refused(model):
    long = "and " * 300
    assert (model.encode(long) == model.encode("and " * 254)).all()
    mean = 254 * model.encode("and " * 254) + 46 * model.encode("and " * 46)
    windows = model.encode(long, long_texts="windows")
    assert_close(windows, mean / np.linalg.norm(mean), 1e-6)
    with pytest.raises(encodle.EncodleError, match=r"^text 1: .*has 302 tokens"):
        model.encode(["short", long], long_texts="refuse")


def test_the_maximum_length_can_be_set():
    model = encodle.SentenceTransformer()
    assert model.max_seq_length == 256
    model.max_seq_length = 6
    assert (model.encode("a b c d e f") == model.encode("a b c d")).all()
    with pytest.raises(encodle.EncodleError, match="at most 512, the number of the model"):
        model.max_seq_length = 513


def test_a_pickled_model_has_the_same_settings(model):
    original = encodle.SentenceTransformer(truncate_dim=4, prompts={"query": "Q: "}, threads=1)
    original.max_seq_length = 8
    copy = pickle.loads(pickle.dumps(original))
    assert (copy.max_seq_length, copy.threads, copy.prompts) == (8, 1, original.prompts)
    assert (copy.encode(TEXTS) == original.encode(TEXTS)).all()
    error = pickle.loads(pickle.dumps(encodle.EncodleError("a message")))
    assert type(error) is encodle.EncodleError and str(error) == "a message"


def test_pooling_replaces_that_of_the_files(model):
    bare = encodle.SentenceTransformer(MINILM, pooling="mean")
    assert np.linalg.norm(bare.encode("a")) > 1.5
    assert_close(bare.encode("a", normalize_embeddings=True), model.encode("a"), 0)


def test_similarity_functions_have_the_expected_values():
    model = encodle.SentenceTransformer()
    a, b = np.array([[3.0, 4.0], [0.0, 0.0]]), np.array([[4.0, 3.0], [1.0, 0.0]])
    for name, expected in [
        ("cosine", [[0.96, 0.6], [0, 0]]),
        ("dot", [[24, 3], [0, 0]]),
        ("euclidean", [[-(2**0.5), -(20**0.5)], [-5, -1]]),
        ("manhattan", [[-2, -6], [-7, -1]]),
    ]:
        model.similarity_fn_name = name
        assert_close(model.similarity(a, b), expected, 1e-12)
        assert_close(model.similarity_pairwise(a, b), np.diag(expected), 1e-12)
        single = model.similarity_pairwise(a[0], b[0])
        assert single.shape == () and float(single) == pytest.approx(expected[0][0])
        assert_close(model.similarity_pairwise(a[0], b), expected[0], 1e-12)
        assert_close(model.similarity_pairwise(a, b[:1]), [row[0] for row in expected], 1e-12)
        assert_close(model.similarity(a[0], b[1]), [[expected[0][1]]], 1e-12)
    with pytest.raises(ValueError, match="similarity_fn_name 'l2' is unknown"):
        model.similarity_fn_name = "l2"
    for other in (b[:, :1], np.ones((3, 2))):
        with pytest.raises(ValueError, match=r"vectors have the shapes \(2, 2\) and"):
            model.similarity_pairwise(a, other)


def test_distances_have_the_same_bits_in_blocks_of_every_size(monkeypatch):
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(n, 19)).astype(np.float32) for n in (7, 11))
    for name in ("euclidean", "manhattan"):
        whole = similarity.similarity(name, a, b)
        assert similarity.similarity(name, a[:0], b).shape == (0, 11)
        assert similarity.similarity(name, a, b[:0]).shape == (7, 0)
        largest = []

        def norm(block, *args, original=np.linalg.norm, **arguments):
            largest.append(block.size)
            return original(block, *args, **arguments)

        for values in (1, 19 * 3, 19 * 11 * 2):
            monkeypatch.setattr(similarity, "BLOCK", values)
            with monkeypatch.context() as patched:
                patched.setattr(np.linalg, "norm", norm)
                blocks = similarity.similarity(name, a, b)
            assert blocks.dtype == np.float32 and (blocks == whole).all()
            assert max(largest) <= max(values, 19)
            largest.clear()
        monkeypatch.undo()


class BFloat16:
    """Stands for a bfloat16 tensor of torch, which NumPy cannot convert."""

    dtype = "torch.bfloat16"

    def __init__(self, values):
        self.values = np.float32(values)

    def __array__(self, *_, **__):
        raise TypeError("Got unsupported ScalarType BFloat16")

    def float(self):
        return self.values


def test_vectors_can_be_bfloat16_tensors(model):
    rows = [[3.0, 4.0], [4.0, 3.0]]
    for vectors in (BFloat16(rows), [BFloat16(row) for row in rows]):
        assert_close(model.similarity(vectors, rows), [[1, 0.96], [0.96, 1]], 1e-6)
        assert encodle.quantize_embeddings(vectors, "ubinary").tolist() == [[192], [192]]


def test_ranges_and_calibration_vectors_are_checked():
    vectors = np.float32([[0, 1, 2], [3, 5, 7]])
    ranges = [[0, 0, 0], [255, 255, 255]]
    quantize = encodle.quantize_embeddings
    assert quantize(vectors, "uint8", ranges=ranges).tolist() == vectors.tolist()
    assert quantize(vectors[1], "uint8", ranges=ranges).tolist() == vectors[1].tolist()
    assert quantize(vectors[1], "uint8", calibration_embeddings=ranges).tolist() == vectors[1].tolist()
    for call, kind, message in [
        (lambda: quantize(vectors, "int8", ranges=np.zeros((3, 2))), ValueError, r"ranges have the shape \(3, 2\): expected \(2, 3\)"),
        (lambda: quantize(vectors, "int8", calibration_embeddings=np.zeros((5, 2))), ValueError, r"shape \(5, 2\): expected \(C, 3\)"),
        (lambda: quantize(vectors, "int8", calibration_embeddings=np.zeros((5, 3), np.int8)), TypeError, "calibration_embeddings have dtype int8"),
        (lambda: quantize(vectors[None], "uint8"), ValueError, r"shape \(1, 2, 3\): expected \(B, E\)"),
    ]:
        with pytest.raises(kind, match=message):
            call()


@pytest.mark.parametrize(
    ("texts", "kind", "message"),
    [
        (["a", None], TypeError, "text 1 is NoneType: expected str"),
        (["a\ud800"], encodle.EncodleError, "text 0 has a lone surrogate"),
        ([b"a"], TypeError, "text 0 is bytes: expected str"),
        (
            5,
            TypeError,
            "texts are of type int: expected a str, a sequence of str, or an Arrow array",
        ),
        (np.zeros(3), TypeError, "texts are an array of dtype float64: expected strings"),
        (
            pa.array(["a", None]),
            encodle.EncodleError,
            "text 1: the text is null: expected a string",
        ),
        (pa.array([1]), encodle.EncodleError, "an Arrow array has type Int64: expected strings"),
        (
            pa.chunked_array([], pa.int64()),
            encodle.EncodleError,
            "an Arrow array has type Int64: expected strings",
        ),
        (pa.nulls(1), encodle.EncodleError, "text 0: the text is null"),
    ],
)
def test_errors_of_texts(model, texts, kind, message):
    with pytest.raises(kind, match=message):
        model.encode(texts)


def test_invalid_utf8_in_an_arrow_array_is_an_error(model):
    strings = pa.Array.from_buffers(pa.string(), 1, pa.array([b"a\xff"]).buffers())
    with pytest.raises(encodle.EncodleError, match="text 0: the text is not valid UTF-8"):
        model.encode(strings)


class DataFrame:
    """Stands for pandas.DataFrame: iteration gives the names of the columns."""

    __module__ = "pandas.core.frame"

    def __iter__(self):
        return iter(["id", "text"])


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda m: m.encode("a", bogus=1), TypeError, "bogus"),
        (lambda m: m.encode_query("a", bogus=1), TypeError, "bogus"),
        (lambda m: encodle.CrossEncoder("a", bogus=1), TypeError, "bogus"),
        (lambda m: m.encode(DataFrame()), TypeError, "pandas DataFrame: expected a list, or one of its columns"),
        (lambda m: m.encode("a", batch_size=0), ValueError, "batch_size is 0: expected a positive"),
        (lambda m: m.encode("a", truncate_dim=0), ValueError, "truncate_dim is 0"),
        (lambda m: m.encode("a", precision="int4"), ValueError, "precision 'int4' is unknown"),
        (
            lambda m: m.encode("a", output_value="vectors"),
            ValueError,
            "output_value 'vectors' is unknown",
        ),
        (lambda m: m.encode("a", long_texts="cut"), ValueError, 'long_texts "cut" is unknown'),
        (
            lambda m: m.encode("a", device="cuda"),
            encodle.EncodleError,
            "device 'cuda' is not supported",
        ),
        (lambda m: encodle.SentenceTransformer(device="cuda"), encodle.EncodleError, "on the CPU"),
        (lambda m: encodle.SentenceTransformer(threads=0), ValueError, "threads is 0"),
        (lambda m: encodle.SentenceTransformer(precision="f64"), ValueError, 'precision "f64"'),
        (lambda m: encodle.SentenceTransformer(pooling="sum"), ValueError, "sum"),
        (lambda m: encodle.SentenceTransformer(revision="v1"), ValueError, "revision 'v1' applies to a model on the hub"),
        (lambda m: encodle.SentenceTransformer(MINILM, revision="v1"), ValueError, "on the hub"),
        (
            lambda m: encodle.SentenceTransformer("bert-base-uncased"),
            encodle.EncodleError,
            'model "bert-base-uncased" not found: expected a folder, a weights file, or org/name',
        ),
        (lambda m: encodle.TextClassifier(MINILM), encodle.EncodleError, "is missing"),
        (lambda m: encodle.TextClassifier(MINILM, threads=0), ValueError, "threads is 0"),
    ],
)
def test_errors_of_arguments(model, call, kind, message):
    with pytest.raises(kind, match=message):
        call(model)


def test_torch_is_needed_for_tensors_only(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    model.encode("a")
    with pytest.raises(
        encodle.EncodleError, match="convert_to_tensor=True needs the package torch"
    ):
        model.encode("a", convert_to_tensor=True)
    torch = ModuleType("torch")
    torch.from_numpy = lambda array: ("tensor", array.shape)
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert model.encode(TEXTS, convert_to_tensor=True) == ("tensor", (3, 384))


def test_progress_is_shown_on_request(model, capsys):
    model.encode(TEXTS)
    assert capsys.readouterr().err == ""
    model.encode(TEXTS, show_progress_bar=True)
    assert capsys.readouterr().err.endswith("3 of 3 texts\n")


def test_a_prompt_is_a_str_without_surrogates(model):
    with pytest.raises(TypeError, match="^prompt is 5: expected str"):
        model.encode("a", prompt=5)
    with pytest.raises(encodle.EncodleError, match="^prompt has a lone surrogate: expected Unicode"):
        model.encode("a", prompt="\ud800")
    named = encodle.SentenceTransformer(prompts={"x": "\ud800"})
    with pytest.raises(encodle.EncodleError, match=r"^prompts\['x'\] has a lone surrogate"):
        named.encode("a", prompt_name="x")


def test_a_flag_may_be_any_value_with_a_truth_value(model):
    for flag in (1, None, np.True_):
        expected = model.encode("a", normalize_embeddings=bool(flag))
        assert (model.encode("a", normalize_embeddings=flag) == expected).all()


def test_prompt_name_beside_a_prompt_is_reported(model, caplog):
    with caplog.at_level(logging.WARNING, "encodle"):
        model.encode("a", prompt="x: ", prompt_name="query")
    assert "prompt_name is ignored" in caplog.text

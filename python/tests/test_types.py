"""The types of the package, and its examples."""

import doctest
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import encodle
from encodle import attention, batch, quantization, sentence_transformer

needs_mypy = pytest.mark.skipif(find_spec("mypy") is None, reason="mypy is not installed")


@needs_mypy
def test_mypy_finds_no_errors(tmp_path):
    config = Path(__file__).parents[1] / "pyproject.toml"
    command = [sys.executable, "-m", "mypy", "--config-file", config, "-p", "encodle"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_mypy
def test_the_stubs_describe_the_native_module(tmp_path):
    command = [sys.executable, "-m", "mypy.stubtest", "encodle._encodle"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


USES = """
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped, unused-ignore]
from typing_extensions import assert_type

import encodle
from encodle.types import Answers, Classification, Entity, Features, Ranked, Token

model = encodle.SentenceTransformer(model_kwargs={"dtype": "float32"}, backend="torch")
texts: list[str] = ["a", "b"]
vectors = model.encode(texts)
assert_type(vectors, np.ndarray)
assert_type(model.encode("a", precision="int8", normalize_embeddings=True, truncate_dim=8), np.ndarray)
assert_type(model.encode_query(np.array(texts), None, "query: "), np.ndarray)
assert_type(model.encode_document(iter(texts), long_texts="windows"), np.ndarray)
assert_type(model.encode("a", output_value="token_embeddings"), np.ndarray)
assert_type(model.encode(texts, output_value="token_embeddings"), list[np.ndarray])
assert_type(model.encode("a", output_value=None), Features)
assert_type(model.encode(texts, output_value=None), list[Features])
assert_type(model.similarity(vectors, vectors), np.ndarray)
assert_type(model.similarity_pairwise(vectors, [[0.5]]), np.ndarray)
model.encode(pa.array(texts))
model.similarity_fn_name = encodle.SimilarityFunction.DOT
sparse = encodle.SparseEncoder("m", max_active_dims=8, precision="int8")
rows = sparse.encode_query(texts, max_active_dims=3, output="scipy")
assert_type(sparse.sparsity(rows), dict[str, float])
assert_type(sparse.similarity(vectors, vectors), np.ndarray)
assert_type(sparse.max_active_dims, int | None)
multi = encodle.MultiVectorEncoder("m", similarity_fn_name="meanmaxsim", precision="int8")
tokens = multi.encode_query(texts, convert_to_numpy=True, normalize_embeddings=True)
assert_type(tokens, list[np.ndarray])
assert_type(multi.encode("a", task="query", convert_to_numpy=True), np.ndarray)
assert_type(multi.similarity(tokens, tokens), np.ndarray)
assert_type(multi.rank("a", texts, top_k=1), list[Ranked])
ranker = encodle.CrossEncoder("m", max_length=8, num_labels=1, activation_fn=np.tanh)
assert_type(ranker.predict([("a", "b")]), np.ndarray)
assert_type(ranker.predict(("a", "b")), np.float32 | np.ndarray)
assert_type(ranker.rank("a", texts), list[Ranked])
assert_type(encodle.TextClassifier("m").classify("a"), Classification)
assert_type(encodle.TextClassifier("m").classify(texts)[0]["scores"], dict[str, float])
assert_type(encodle.TokenClassifier("m").tag(texts, "first"), list[list[Entity]])
assert_type(encodle.QuestionAnswerer("m").answer("a", texts), list[Answers])
assert_type(encodle.QuestionAnswerer("m").answer("a", "b")["answers"][0]["start"], int)
assert_type(encodle.MaskFiller("m").fill_mask("a [MASK]"), list[list[Token]])
model.encode_query("a", normalise=True)  # error
model.encode(5)  # error
multi.encode("a", task="both")  # error
multi.encode("a", convert_to_tensor=True)  # error
model.encode({"a", "b"})  # error
model.encode("a", precision="int4")  # error
model.encode("a", output_value="vectors")  # error
model.encode("a", batch_size="8")  # error
model.encode("a").upper()  # error
model.encod("a")  # error
model.fit  # error
model.tokenizer = None  # error
ranker.predict("a")  # error
ranker.predict([("a", "b")], apply_softmaxx=True)  # error
ranker.rank("a", texts)[0]["scores"]  # error
encodle.TextClassifier("m").classify(texts).label  # error
encodle.TokenClassifier("m").tag("a", "longest")  # error
encodle.SentenceTransformer(backend="onnx")  # error
encodle.CrossEncoder("m", max_length="8")  # error
"""


@needs_mypy
def test_mypy_infers_results_and_finds_wrong_arguments_in_code_that_uses_the_package(tmp_path):
    (tmp_path / "uses.py").write_text(USES)
    command = [sys.executable, "-m", "mypy", "--strict", "uses.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    found = {int(line) for line in re.findall(r"^uses\.py:(\d+): error", done.stdout, re.MULTILINE)}
    marked = {i for i, line in enumerate(USES.splitlines(), 1) if line.endswith("# error")}
    assert found == marked and done.stderr == "", done.stdout + done.stderr


@pytest.mark.parametrize("module", [encodle, attention, batch, quantization, sentence_transformer])
def test_examples_of_docstrings(module):
    names = {**vars(module), **vars(encodle)}
    failed, tried = doctest.testmod(module, extraglobs=names)
    assert failed == 0 and tried > 0

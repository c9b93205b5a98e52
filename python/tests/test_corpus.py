"""Tests of embed_file and BatchEmbedder: the vectors of `encode`, the bytes of the command
`encodle embed`, resumed runs, invalid records and arguments."""

import json
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from clusters import vector_bytes
from conftest import GOLDEN, MINILM

import encodle

SENTENCES = GOLDEN / "sentences.txt"


def test_files_have_the_vectors_of_encode(model, sentences, tmp_path):
    table, array = tmp_path / "v.parquet", tmp_path / "v.npy"
    summary = encodle.embed_file(SENTENCES, table, model=model)
    assert summary == encodle.EmbedSummary(10, 10, 0, 0, [], [])
    embedded = pq.read_table(table)
    assert embedded.column("text").to_pylist() == sentences
    assert (np.array(embedded.column("embedding").to_pylist()) == model.encode(sentences)).all()
    assert embedded.schema.metadata[b"encodle"] == b'{"model":null,"pooling":[],"normalize":false}'
    encodle.embed_file(SENTENCES, array, prompt="x: ", output_dtype="f16")
    expected = model.encode(sentences, prompt="x: ").astype(np.float16)
    assert (np.load(array) == expected).all()


@pytest.mark.parametrize("extension", ["parquet", "arrow", "jsonl", "npy"])
@pytest.mark.parametrize("precision", ["f32", "int8"])
def test_files_have_the_bytes_of_the_command(program, sentences, tmp_path, extension, precision):
    records = tmp_path / "in.jsonl"
    lines = [{"id": i, "text": text} for i, text in enumerate(sentences * 30)]
    records.write_text("".join(json.dumps(line) + "\n" for line in lines))
    theirs, ours = tmp_path / f"command.{extension}", tmp_path / f"python.{extension}"
    command = [program, "embed", "--quiet", "--dtype", precision, "--input", records, "--output", theirs]
    subprocess.run(command, check=True, timeout=120)
    encodle.embed_file(records, ours, precision=precision)
    assert ours.read_bytes() == theirs.read_bytes()


def test_batch_embedder_gives_the_vectors_of_the_command(program, sentences, tmp_path):
    texts = tmp_path / "in.parquet"
    pq.write_table(pa.table({"id": range(10), "text": sentences}), texts)
    output = tmp_path / "out.parquet"
    subprocess.run([program, "embed", "--quiet", "--input", texts, "--output", output], check=True, timeout=60)
    expected, got = pq.read_table(output), encodle.BatchEmbedder()(pq.read_table(texts))
    assert got.drop_columns("embedding").equals(expected.drop_columns("embedding"))
    assert got.schema.field("embedding").type.list_size == 384
    assert vector_bytes(got) == vector_bytes(expected)


def test_invalid_records_stop_the_run_or_are_skipped(tmp_path):
    records = tmp_path / "in.jsonl"
    records.write_text('{"body": "a"}\n{"body": 3}\n{"body": "b"}\n')
    with pytest.raises(encodle.EncodleError, match="line 2"):
        encodle.embed_file(records, tmp_path / "a.npy", field="body")
    summary = encodle.embed_file(records, tmp_path / "b.npy", field="body", on_error="skip")
    assert (summary.read, summary.written, len(summary.skipped)) == (3, 2, 1)
    assert "line 2" in summary.skipped[0]


def test_changed_values_are_warnings(tmp_path, caplog):
    records = tmp_path / "in.jsonl"
    records.write_text('{"text": "a", "n": 18446744073709551616}\n\n{"text": "b", "n": 1}\n')
    summary = encodle.embed_file(records, tmp_path / "a.parquet")
    numbers, blank = summary.warnings
    assert 'field "n" has integers that a column of numbers' in numbers
    assert blank.endswith("in.jsonl: 1 blank line was skipped")
    logged = [record.getMessage() for record in caplog.records if record.name == "encodle"]
    assert logged == summary.warnings

    table = tmp_path / "in.parquet"
    pq.write_table(pa.table({"text": ["a"], "x": [float("nan")]}), table)
    summary = encodle.embed_file(table, tmp_path / "b.jsonl")
    assert summary.warnings == ['column "x": 1 NaN or infinite value was written as null']


def test_errors_of_arguments(model, tmp_path):
    with pytest.raises(encodle.EncodleError, match="cannot be read"):
        encodle.embed_file(tmp_path / "none.txt", tmp_path / "a.npy")
    with pytest.raises(encodle.EncodleError, match="expected"):
        encodle.embed_file(SENTENCES, tmp_path / "a.xyz")
    with pytest.raises(ValueError, match='input_format "json" is unknown'):
        encodle.embed_file(SENTENCES, tmp_path / "a.npy", input_format="json")
    with pytest.raises(ValueError, match="pass them to SentenceTransformer"):
        encodle.embed_file(SENTENCES, tmp_path / "a.npy", model=model, threads=1)
    with pytest.raises(TypeError, match="bogus"):
        encodle.embed_file(SENTENCES, tmp_path / "a.npy", bogus=1)


def test_files_have_the_truncate_dim_of_the_model_s_files(sentences, tmp_path):
    folder = shutil.copytree(MINILM, tmp_path / "model")
    (folder / "config_sentence_transformers.json").write_text('{"truncate_dim": 32}')
    model = encodle.SentenceTransformer(folder)
    encodle.embed_file(SENTENCES, tmp_path / "a.npy", model=model)
    assert (np.load(tmp_path / "a.npy") == model.encode(sentences)).all()
    for truncate_dim in (None, 16):
        model.truncate_dim = truncate_dim
        with pytest.raises(ValueError, match=f"truncate_dim of the model is {truncate_dim}: expected 32"):
            encodle.embed_file(SENTENCES, tmp_path / "b.npy", model=model)


def test_a_run_waits_for_the_interrupted_run_of_the_same_output(model, tmp_path):
    lines, output = tmp_path / "in.txt", tmp_path / "v.npy"
    lines.write_text("".join(f"{i} {'and ' * 250}\n" for i in range(16)))
    # A background job of a shell starts with SIGINT ignored.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(0.1, signal.raise_signal, [signal.SIGINT]).start()
            encodle.embed_file(lines, output, model=model)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert encodle.embed_file(lines, output, model=model, resume=True).written == 16


def test_an_interrupted_run_resumes_to_the_same_bytes(tmp_path):
    lines = tmp_path / "in.txt"
    lines.write_text("".join(f"line {i}\n" for i in range(4500)))
    output, whole = tmp_path / "v.npy", tmp_path / "w.npy"
    code = (
        "import encodle, signal, sys\n"
        # A background job of a shell starts with SIGINT ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "print('start', flush=True)\n"
        "try:\n"
        "    encodle.embed_file(*sys.argv[1:], resume=True)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted', flush=True)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, lines, output], stdout=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    state = tmp_path / "v.npy.partial.json"  # written with the first vectors
    end = time.monotonic() + 60
    while not state.exists() and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30)[0] == "interrupted\n"
    assert not output.exists()
    assert 0 < json.loads(state.read_text())["written"] < 4500
    encodle.embed_file(lines, output, resume=True)
    encodle.embed_file(lines, whole)
    assert output.read_bytes() == whole.read_bytes()

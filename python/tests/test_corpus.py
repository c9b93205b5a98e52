"""embed_file: files, resumed runs, invalid records."""

import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import GOLDEN

import encodle

SENTENCES = GOLDEN / "sentences.txt"


def test_files_have_the_vectors_of_encode(model, sentences, tmp_path):
    table, array = tmp_path / "v.parquet", tmp_path / "v.npy"
    summary = encodle.embed_file(SENTENCES, table, model=model)
    assert summary == encodle.EmbedSummary(10, 10, 0, [])
    embedded = pq.read_table(table)
    assert embedded.column("text").to_pylist() == sentences
    assert (np.array(embedded.column("embedding").to_pylist()) == model.encode(sentences)).all()
    assert embedded.schema.metadata[b"bert"] == b'{"model":null,"pooling":[],"normalize":false}'
    encodle.embed_file(SENTENCES, array, prompt="x: ", output_dtype="f16")
    expected = model.encode(sentences, prompt="x: ").astype(np.float16)
    assert (np.load(array) == expected).all()


def test_invalid_records_stop_the_run_or_are_skipped(tmp_path):
    records = tmp_path / "in.jsonl"
    records.write_text('{"body": "a"}\n{"body": 3}\n{"body": "b"}\n')
    with pytest.raises(encodle.EncodleError, match="line 2"):
        encodle.embed_file(records, tmp_path / "a.npy", field="body")
    summary = encodle.embed_file(records, tmp_path / "b.npy", field="body", on_error="skip")
    assert (summary.read, summary.written, len(summary.skipped)) == (3, 2, 1)
    assert "line 2" in summary.skipped[0]


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


def test_an_interrupted_run_resumes_to_the_same_bytes(tmp_path):
    lines = tmp_path / "in.txt"
    lines.write_text("".join(f"line {i}\n" for i in range(4500)))
    output, whole = tmp_path / "v.npy", tmp_path / "w.npy"
    code = (
        "import encodle, sys\n"
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
    partial = tmp_path / "v.npy.partial"
    end = time.monotonic() + 60
    while not partial.exists() and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30)[0] == "interrupted\n"
    assert not output.exists()
    encodle.embed_file(lines, output, resume=True)
    encodle.embed_file(lines, whole)
    assert output.read_bytes() == whole.read_bytes()

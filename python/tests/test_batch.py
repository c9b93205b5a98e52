"""BatchEmbedder: record batches and tables with null rows, without rows, in other processes."""

import logging
import pickle
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pytest

import encodle

BATCH = pa.RecordBatch.from_pydict({"id": [7, 8, 9], "text": ["a", None, "b"]})


def vectors(batch) -> np.ndarray:
    return np.array(batch.column("embedding").to_pylist(), dtype=np.float32)


def test_batches_and_tables_get_a_column_of_vectors(model):
    batch = pa.RecordBatch.from_pydict({"text": ["a", "b"], "id": [1, 2]}, metadata={"k": "v"})
    for data in (batch, pa.Table.from_batches([batch, batch])):
        embedded = encodle.BatchEmbedder()(data)
        assert type(embedded) is type(data)
        assert embedded.schema == encodle.BatchEmbedder().output_schema(data.schema)
        assert embedded.schema.metadata == {b"k": b"v"}
        assert embedded.schema.field("embedding").type.list_size == 384
        texts = data.column("text").to_pylist()
        assert (vectors(embedded) == model.encode(texts)).all()
        embedded.validate(full=True)


def test_a_null_row_is_an_error_that_names_the_row():
    with pytest.raises(encodle.EncodleError) as error:
        encodle.BatchEmbedder()(BATCH)
    assert str(error.value) == "row 1, column 'text': the text is null: expected a string"


def test_the_first_of_several_invalid_rows_is_reported():
    texts = pa.table({"text": ["a", "and " * 300, None]})
    with pytest.raises(encodle.EncodleError, match="^row 1, column 'text': text \"and and"):
        encodle.BatchEmbedder(long_texts="refuse")(texts)
    with pytest.raises(encodle.EncodleError, match="^row 2, column 'text': the text is null"):
        encodle.BatchEmbedder()(texts)


def test_skipped_rows_are_listed(model, caplog):
    embedder = encodle.BatchEmbedder(on_error="skip", long_texts="refuse")
    texts = ["a", None, "b", "and " * 300]
    table = pa.table({"id": [1, 2, 3, 4], "text": pa.chunked_array([texts[:2], texts[2:]])})
    with caplog.at_level(logging.WARNING, "encodle"):
        embedded = embedder(table)
    assert embedded.column("id").to_pylist() == [1, 3]
    assert (vectors(embedded) == model.encode(["a", "b"])).all()
    assert "2 of 4 rows skipped: row 1, column 'text': the text is null" in caplog.text
    assert "row 3, column 'text': text \"and and" in caplog.text
    only_nulls = BATCH.slice(1, 1)
    assert embedder(only_nulls).num_rows == 0


@pytest.mark.parametrize("data", [pa.RecordBatch, pa.Table])
def test_rows_are_skipped_in_columns_of_all_types(data):
    ids = pa.array([1, 1, 2, 3])
    columns = {
        "text": pa.array([None, "a", None, "b"], pa.string_view()),
        "bytes": pa.array([b"w", b"x", b"y", b"z"], pa.binary_view()),
        "id": pyarrow.compute.run_end_encode(ids),
        "name": ids.cast(pa.string()).dictionary_encode(),
    }
    embedded = encodle.BatchEmbedder(on_error="skip")(data.from_pydict(columns))
    embedded.validate(full=True)
    assert embedded.drop_columns("embedding").to_pydict() == {
        "text": ["a", "b"],
        "bytes": [b"x", b"z"],
        "id": [1, 3],
        "name": ["1", "3"],
    }


def test_empty_batches_have_the_schema_of_the_output():
    embedder = encodle.BatchEmbedder()
    empty = embedder(BATCH.slice(0, 0))
    assert (empty.num_rows, empty.schema) == (0, embedder.output_schema(BATCH.schema))
    table = embedder(BATCH.schema.empty_table())
    assert (table.num_rows, table.schema) == (0, empty.schema)


def test_settings_apply(model):
    batch = pa.RecordBatch.from_pydict({"body": ["a", "b"]})
    embedder = encodle.BatchEmbedder(
        column="body",
        output_column="v",
        prompt="x: ",
        truncate_dim=8,
        normalize_embeddings=True,
        threads=1,
    )
    expected = model.encode(["a", "b"], prompt="x: ", truncate_dim=8, normalize_embeddings=True)
    assert (np.array(embedder(batch).column("v").to_pylist(), np.float32) == expected).all()
    assert embedder.dimension == 8


@pytest.mark.parametrize(
    ("batch", "arguments", "message"),
    [
        (BATCH, {"column": "body"}, "column 'body' not found: expected one of"),
        (BATCH, {"output_column": "id"}, "column 'id' already exists: expected a new name"),
        (BATCH, {"column": "id"}, "an Arrow array has type Int64: expected strings"),
        (
            pa.Table.from_batches([], BATCH.schema),
            {"column": "id"},
            "an Arrow array has type Int64: expected strings",
        ),
    ],
)
def test_errors_of_columns(batch, arguments, message):
    with pytest.raises(encodle.EncodleError, match=message):
        encodle.BatchEmbedder(**arguments)(batch)


def test_errors_of_arguments():
    with pytest.raises(ValueError, match="on_error 'stop' is unknown"):
        encodle.BatchEmbedder(on_error="stop")
    with pytest.raises(TypeError, match="bogus"):
        encodle.BatchEmbedder(bogus=1)
    with pytest.raises(ValueError, match="threads is 0"):
        encodle.BatchEmbedder(threads=0)
    with pytest.raises(TypeError, match="prompt is 5: expected str"):
        encodle.BatchEmbedder(prompt=5)
    assert encodle.BatchEmbedder(normalize_embeddings=1).normalize_embeddings is True


def test_a_pickled_embedder_opens_the_model_in_another_process():
    embedder = encodle.BatchEmbedder(truncate_dim=2)
    embedder(BATCH.slice(0, 1))
    data = pickle.dumps(embedder)
    assert len(data) < 1000
    code = (
        "import pickle, sys, pyarrow as pa\n"
        "embedder = pickle.loads(bytes.fromhex(sys.argv[1]))\n"
        "batch = embedder(pa.RecordBatch.from_pydict({'text': ['a']}))\n"
        "print(batch.column('embedding').to_pylist())"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, data.hex()], capture_output=True, text=True, check=True
    )
    assert eval(out.stdout) == embedder(BATCH.slice(0, 1)).column("embedding").to_pylist()


def test_embedders_of_a_process_share_the_model():
    assert encodle.BatchEmbedder()._open() is encodle.BatchEmbedder(column="x")._open()

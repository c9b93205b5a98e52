"""Tests that pyarrow and NumPy read the outputs of `encodle embed`, and that `encodle embed` reads
files written by pyarrow.

    cargo build --release
    pip install numpy pyarrow
    python tests/tables.py [PROGRAM]

Vectors in f32 must be bit-identical to those that `encodle embed` prints for the same texts; vectors
in f16, to these values rounded to f16. All other columns must equal the input's, except that
dictionaries are decoded.
"""

import datetime
import decimal
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet

ENCODLE = sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1] / "target/release/encodle"
N = 600
TEXTS = [f"number {i}: {'na ' * (i % 9)}\u00e9t\u00e9 \U0001f600" for i in range(N)]


def encodle(*arguments: object) -> str:
    command = [str(argument) for argument in (ENCODLE, *arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def vectors(column: pa.ChunkedArray) -> np.ndarray:
    chunks = [chunk.flatten().to_numpy() for chunk in column.chunks]
    return np.concatenate(chunks).reshape(len(column), -1)


def check_same(what: str, got: np.ndarray, expected: np.ndarray) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape, what
    assert got.tobytes() == expected.tobytes(), what
    print(f"{what}: {got.shape} {got.dtype}, bit-identical")


def main(folder: Path) -> None:
    (folder / "in.txt").write_text("\n".join(TEXTS))
    printed = [json.loads(line) for line in encodle("embed", "--input", folder / "in.txt").splitlines()]
    expected = np.array([line["embedding"] for line in printed], dtype=np.float32)

    rows = pa.table(
        {
            "id": pa.array(range(N), pa.uint64()),
            "day": pa.array([datetime.date(2026, 1, 1)] * (N - 1) + [None]),
            "at": pa.array([datetime.datetime(2026, 1, 1, 12)] * N, pa.timestamp("us", "UTC")),
            "price": pa.array([decimal.Decimal("1.50")] * N),
            "kind": pa.array(["x", "y", None] * (N // 3)).dictionary_encode(),
            "tags": pa.array([["a", "b"], [], None] * (N // 3)),
            "point": pa.array([{"x": 1.5, "y": None}] * N),
            "bytes": pa.array([b"\xff\x00"] * N),
            "text": pa.array(TEXTS, pa.large_string()),
        }
    )
    plain = rows.set_column(4, "kind", rows["kind"].cast(pa.string()))
    for codec in ("none", "snappy", "gzip", "zstd", "lz4"):
        pa.parquet.write_table(rows, folder / f"{codec}.parquet", compression=codec, row_group_size=100)
    for codec in ("uncompressed", "zstd", "lz4"):
        pa.feather.write_feather(rows, folder / f"{codec}.feather", compression=codec)
    inputs = [*sorted(folder.glob("*.parquet")), *sorted(folder.glob("*.feather"))]

    for dtype in (np.float32, np.float16):
        name = {np.float32: "f32", np.float16: "f16"}[dtype]
        wanted = expected.astype(dtype)
        for ending in ("npy", "parquet", "arrow"):
            output = folder / f"out.{ending}"
            for source in [folder / "in.txt", *inputs]:
                encodle("embed", "--input", source, "--output", output, "--output-dtype", name)
                what = f"{source.name} to {ending}"
                if ending == "npy":
                    check_same(what, np.load(output), wanted)
                    continue
                read = pa.parquet.read_table if ending == "parquet" else pa.feather.read_table
                table = read(output)
                kind = pa.list_(pa.field("element", pa.from_numpy_dtype(dtype), False), 384)
                assert table.schema.field("embedding").type == kind, table.schema
                check_same(what, vectors(table["embedding"]), wanted)
                carried = table.drop_columns("embedding")
                given = pa.table([TEXTS], pa.schema([pa.field("text", pa.string(), False)])) if source.suffix == ".txt" else plain
                assert carried.equals(given), f"{what}: {carried.schema}"

    encodle("embed", "--input", folder / "zstd.parquet", "--output", folder / "out.jsonl")
    lines = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    check_same("zstd.parquet to jsonl", np.array([x["embedding"] for x in lines], np.float32), expected)
    assert [line["id"] for line in lines] == list(range(N))
    assert lines[2]["tags"] is None and lines[0]["day"] == "2026-01-01"


with tempfile.TemporaryDirectory() as name:
    main(Path(name))

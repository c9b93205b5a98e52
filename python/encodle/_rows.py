"""Columns of embeddings for the types of Spark and Daft."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pyarrow as pa

from encodle import BatchEmbedder


def embed_column(embed: BatchEmbedder, texts: pa.Array, name_of_row: Callable[[int], str]) -> list[Any]:
    """The embedding of each text, None for the rows that `on_error="skip"` left out: an array (E,); for
    a sparse model a list of dicts of `index` and `value`; for a multi-vector model a list of arrays (E,).

    `embed` must have the default `column` and `output_column`.
    """
    batch, left_out = embed.embed_valid(pa.RecordBatch.from_arrays([texts], ["text"]), name_of_row)
    rows, skipped = iter(_rows(batch.column("embedding"))), set(left_out)
    return [None if row in skipped else next(rows) for row in range(len(texts))]


def _rows(column: pa.Array) -> Iterable[Any]:
    """The embeddings in a column of `BatchEmbedder`."""
    if pa.types.is_fixed_size_list(column.type):
        return _matrix(column)
    if pa.types.is_struct(column.type.value_type):
        return column.to_pylist()
    ends = np.cumsum(column.value_lengths().to_numpy())
    return [list(vectors) for vectors in np.split(_matrix(column.flatten()), ends)]


def _matrix(vectors: pa.FixedSizeListArray) -> np.ndarray:
    """(B, E), the vectors in f32."""
    return vectors.flatten().to_numpy().astype(np.float32, copy=False).reshape(-1, vectors.type.list_size)

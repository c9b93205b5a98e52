"""Columns of vectors with null for the rows that were left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa

from encodle import BatchEmbedder, EncodleError


def check_dense(vector_type: pa.DataType) -> None:
    """Raises EncodleError for the type of a column of sparse vectors or of several vectors."""
    if not pa.types.is_fixed_size_list(vector_type):
        raise EncodleError(
            "the adapters for Spark and Daft have no columns of sparse vectors or of a vector per token: "
            "expected a dense model; use encodle.BatchEmbedder or encodle.ray"
        )


def embed_column(embed: BatchEmbedder, texts: pa.Array, name_of_row: Callable[[int], str]) -> list[Any]:
    """One vector of shape (E,) per text, None for the rows that `on_error="skip"` left out.

    `embed` must have the default `column` and `output_column`.
    """
    batch, left_out = embed.embed_valid(pa.RecordBatch.from_arrays([texts], ["text"]), name_of_row)
    column = batch.column("embedding")
    check_dense(column.type)
    vectors = iter(column.flatten().to_numpy().reshape(-1, column.type.list_size))  # (B, E)
    skipped = set(left_out)
    return [None if row in skipped else next(vectors) for row in range(len(texts))]

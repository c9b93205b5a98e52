"""Columns of vectors with null for the rows that were left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa

from encodle import BatchEmbedder


def embed_column(embed: BatchEmbedder, texts: pa.Array, name_of_row: Callable[[int], str]) -> list[Any]:
    """One vector of shape (E,) per text, None for the rows that `on_error="skip"` left out.

    `embed` must have the default `column` and `output_column`.
    """
    batch, left_out = embed.embed_valid(pa.RecordBatch.from_arrays([texts], ["text"]), name_of_row)
    column = batch.column("embedding")
    vectors = iter(column.flatten().to_numpy().reshape(-1, column.type.list_size))  # (B, E)
    skipped = set(left_out)
    return [None if row in skipped else next(vectors) for row in range(len(texts))]

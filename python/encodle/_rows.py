"""What the adapters for engines share: names of rows in errors, and rows that were left out."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from encodle import BatchEmbedder, EncodleError

_ROW = "__encodle_row"


def embed_numbered(embed: BatchEmbedder, batch: Any, name_of_row: Callable[[int], str]) -> tuple[Any, list[int]]:
    """The embedded batch or table, and the numbers of the rows that `on_error="skip"` left out.

    `BatchEmbedder` counts rows from the start of the batch. Raises `EncodleError` with the name
    that `name_of_row` gives to this number.
    """
    numbered = batch.append_column(_ROW, pa.array(range(batch.num_rows), pa.int64()))
    try:
        embedded = embed(numbered)
    except EncodleError as error:
        found = re.match(r"row (\d+), (.*)", str(error), re.DOTALL)
        if found is None:
            raise
        raise EncodleError(f"{name_of_row(int(found[1]))}, {found[2]}") from error
    left_out: list[int] = []
    if embedded.num_rows < batch.num_rows:
        left_out = sorted(set(range(batch.num_rows)).difference(embedded.column(_ROW).to_pylist()))
    return embedded.drop_columns([_ROW]), left_out


def embed_column(embed: BatchEmbedder, texts: pa.Array, name_of_row: Callable[[int], str]) -> list[Any]:
    """One vector of shape (E,) per text, None for the rows that `on_error="skip"` left out.

    `embed` has the default names of columns.
    """
    batch, left_out = embed_numbered(embed, pa.RecordBatch.from_arrays([texts], ["text"]), name_of_row)
    column = batch.column("embedding")
    vectors = iter(column.flatten().to_numpy().reshape(-1, column.type.list_size))  # (B, E)
    none = set(left_out)
    return [None if row in none else next(vectors) for row in range(len(texts))]

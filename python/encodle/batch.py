"""Adds a column of vectors to Arrow record batches; the adapters for Ray, Spark and Daft use it."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from . import _arguments, _encodle
from ._encodle import EncodleError
from ._embedding_model import EmbeddingModel
from .multi_vector_encoder import MultiVectorEncoder
from .sentence_transformer import SentenceTransformer
from .sparse_encoder import SparseEncoder
from .types import LongTexts, ModelPrecision

if TYPE_CHECKING:
    import pyarrow

    Batch = TypeVar("Batch", pyarrow.RecordBatch, pyarrow.Table)

logger = logging.getLogger("encodle")

#: The maximum number of invalid rows that a warning names.
MAX_LOGGED_ROWS = 100

#: The models of this process, by the arguments that they were opened with. A worker process may
#: unpickle an embedder for each task, but the process opens the model only once.
_models: dict[tuple[Any, ...], EmbeddingModel[Any]] = {}
_models_lock = threading.Lock()


def _replace_lock() -> None:
    """Replaces the lock: another thread, which a fork does not copy, may hold the old one."""
    global _models_lock
    _models_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_replace_lock)


class BatchEmbedder:
    """Appends a column of vectors to Arrow record batches and tables.

    model: see `SentenceTransformer`, or a sparse model (see `SparseEncoder`) or multi-vector model (see
        `MultiVectorEncoder`) if its files name this kind; a path that exists becomes absolute
    column: the name of the column of texts
    output_column: the name of the column of vectors: fixed_size_list<float32>[E]; for a sparse model
        list<struct<index: uint32, value: float32>>; for a multi-vector model
        list<fixed_size_list<float16>[E]>
    precision, pooling: see `SentenceTransformer`
    prompt_name, prompt, normalize_embeddings, truncate_dim, long_texts: see
        `SentenceTransformer.encode`. For a sparse model, `prompt_name="query"` also selects the
        weights for queries, and `normalize_embeddings` and `truncate_dim` raise ValueError. For a
        multi-vector model, `prompt_name="query"` and "document" also select the task, and
        `truncate_dim` raises ValueError
    on_error: "raise" raises EncodleError for an invalid row (null, not UTF-8, no tokens, or too
        long with `long_texts="refuse"`); "skip" leaves the row out and lists it in a warning of the
        logger "encodle"
    threads: see `SentenceTransformer`

    An embedder can be pickled. It holds its arguments, and opens the model at the first call in
    each process. Embedders with the same `model`, `precision`, `pooling` and `threads` share one
    opened model per process. The model stays open until the process ends.

    >>> import pyarrow
    >>> batch = pyarrow.RecordBatch.from_pydict({"text": ["I love AI", "It snows."]})
    >>> BatchEmbedder()(batch).schema.field("embedding").type.list_size
    384
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        column: str = "text",
        output_column: str = "embedding",
        precision: ModelPrecision = "f32",
        pooling: str | Sequence[str] | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        long_texts: LongTexts = "truncate",
        on_error: Literal["raise", "skip"] = "raise",
        threads: int | None = None,
    ) -> None:
        if on_error not in ("raise", "skip"):
            raise ValueError(f'on_error {on_error!r} is unknown: expected "raise" or "skip"')
        for name, value, values in (
            ("precision", precision, get_args(ModelPrecision)),
            ("long_texts", long_texts, get_args(LongTexts)),
        ):
            if value not in values:
                raise ValueError(f"{name} {value!r} is unknown: expected one of {values}")
        _arguments.check_positive(truncate_dim=truncate_dim, threads=threads)
        _arguments.check_str(prompt="" if prompt is None else prompt)
        self.model = _arguments.embedding_model(model)
        self.column = column
        self.output_column = output_column
        self.precision = precision
        self.pooling = tuple(_arguments.pooling_modes(pooling))
        self.prompt_name = prompt_name
        self.prompt = prompt
        self.normalize_embeddings = bool(normalize_embeddings)
        self.truncate_dim = truncate_dim
        self.long_texts = long_texts
        self.on_error = on_error
        self.threads = threads

    def _open(self) -> EmbeddingModel[Any]:
        """The model, which is opened at the first call in a process."""
        key = (self.model, self.precision, self.pooling, self.threads)
        with _models_lock:
            if key not in _models:
                _models[key] = self._opened()
            return _models[key]

    def _opened(self) -> EmbeddingModel[Any]:
        path, kind = _arguments.model_path(self.model), self._kind()
        if kind == "sparse":
            return SparseEncoder(path, precision=self.precision, threads=self.threads)
        if kind == "multi":
            return MultiVectorEncoder(path, precision=self.precision, threads=self.threads)
        return SentenceTransformer(
            self.model, precision=self.precision, pooling=self.pooling, threads=self.threads
        )

    def _kind(self) -> str:
        """The kind of the model: "dense", "sparse" or "multi". Does not open the model.

        Raises EncodleError if the settings of the model cannot be read.
        """
        return "dense" if self.pooling else _encodle.embedding_kind(_arguments.model_path(self.model))

    @property
    def dimension(self) -> int:
        """E, the length of each vector."""
        return self._open()._dimension(self)

    def output_schema(self, schema: pyarrow.Schema) -> pyarrow.Schema:
        """The schema of the output for an input schema.

        Raises EncodleError if the column of texts is missing, if several columns have its name, or
        if the column of vectors exists already.
        """
        import pyarrow as pa

        if self.column not in schema.names:
            raise EncodleError(f"column {self.column!r} not found: expected one of {schema.names}")
        if schema.names.count(self.column) > 1:
            raise EncodleError(f"several columns are named {self.column!r}: expected one")
        if self.output_column in schema.names:
            raise EncodleError(
                f"column {self.output_column!r} already exists: expected a new name for the "
                "vectors; pass output_column"
            )
        vector_type = self._open()._column_type(self)
        return schema.append(pa.field(self.output_column, vector_type, nullable=False))

    def __call__(self, batch: Batch) -> Batch:
        """The batch with the column of vectors.

        Raises EncodleError for the first invalid row if `on_error` is "raise", and for a column of
        texts that does not contain strings; the errors of `output_schema`; ValueError for an
        unknown `prompt_name`.
        """
        embedded, _ = self.embed_valid(batch, "row {}".format)
        return embedded

    def embed_valid(
        self, batch: Batch, name_of_row: Callable[[int], str]
    ) -> tuple[Batch, list[int]]:
        """The batch with the column of vectors, and the numbers of the rows that are left out.

        name_of_row: a function from the number of a row in the batch, from 0, to its name in errors
            and warnings

        Raises the errors of `__call__`.
        """
        schema = self.output_schema(batch.schema)
        column, invalid = self._open()._column(batch.column(self.column), self)
        left_out = [row for row, _ in invalid]
        columns: list[Any] = batch.columns
        if invalid:
            shown = invalid[: 1 if self.on_error == "raise" else MAX_LOGGED_ROWS]
            rows = [f"{name_of_row(row)}, column {self.column!r}: {why}" for row, why in shown]
            if self.on_error == "raise":
                raise EncodleError(rows[0])
            rows += ["..."] if len(invalid) > len(shown) else []
            logger.warning(
                "%d of %d rows skipped: %s", len(invalid), batch.num_rows, "; ".join(rows)
            )
            columns = _columns_without(batch, left_out)
        return type(batch).from_arrays([*columns, column], schema=schema), left_out


def _columns_without(batch: Batch, left_out: list[int]) -> list[Any]:
    """The columns without some rows, whose numbers ascend.

    Concatenates slices, because `take` does not support views and run-end encoding.
    """
    import pyarrow as pa

    starts, ends = [0, *(row + 1 for row in left_out)], [*left_out, batch.num_rows]
    ranges = [(start, end) for start, end in zip(starts, ends, strict=True) if start < end]
    slices = [batch.slice(start, end - start) for start, end in ranges] or [batch.slice(0, 0)]
    if isinstance(batch, pa.Table):
        return list(pa.concat_tables(slices).combine_chunks().columns)
    parts = zip(*(part.columns for part in slices), strict=True)
    return [pa.concat_arrays(arrays) for arrays in parts]

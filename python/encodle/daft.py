"""Embed texts with Daft: a provider for `daft.functions.embed_text`.

Importing this module adds the provider `"encodle"` to those of Daft.

Requires the extra `daft`: `pip install './python[daft]'` in a clone of the repository.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from daft import DataType
from daft.ai.protocols import TextEmbedder, TextEmbedderDescriptor
from daft.ai.provider import PROVIDERS, Provider
from daft.ai.typing import EmbeddingDimensions, UDFOptions

from encodle import BatchEmbedder, _arguments
from encodle._rows import embed_column

__all__ = ["EncodleProvider"]


class EncodleProvider(Provider):
    """A provider whose text embedder is `encodle.BatchEmbedder`.

    The column is an embedding of Daft; for a sparse model a list of structs of `index` and `value`; for
    a multi-vector model a list of lists.

    `embed_text` takes `model` (by default the built-in model), `dimensions` (the number of values
    to keep of each vector), and the options `batch_size`, `max_retries` and `on_error`, as with
    Daft's own providers. `on_error="log"` or `"ignore"` gives null for the rows of a failed batch.

    Parameters
    ----------
    name
        The name of the provider in a Daft session. Default: `"encodle"`.
    skip_invalid
        Give null for an invalid row (null, no tokens, or too long with `long_texts="refuse"`), and
        log the row (logger "encodle"). Default: raise `encodle.EncodleError`.
    **settings
        The arguments `precision`, `pooling`, `prompt_name`, `prompt`, `normalize_embeddings`,
        `long_texts` and `threads` of `encodle.BatchEmbedder`.

    Examples
    --------
    >>> import daft
    >>> import encodle.daft
    >>> from daft.functions import embed_text
    >>> texts = daft.from_pydict({"text": ["I love AI"]})
    >>> vectors = texts.with_column("embedding", embed_text(daft.col("text"), provider="encodle"))
    >>> len(vectors.to_pydict()["embedding"][0])
    384

    With settings:

    >>> provider = encodle.daft.EncodleProvider(precision="int8", threads=4)
    >>> vectors = texts.with_column("embedding", embed_text(daft.col("text"), provider=provider))
    """

    def __init__(self, name: str | None = None, *, skip_invalid: bool = False, **settings: Any) -> None:
        refused = {
            "model": "pass model to embed_text",
            "column": "pass the column to embed_text",
            "output_column": "embed_text returns a column",
            "truncate_dim": "pass dimensions to embed_text",
            "on_error": "pass on_error to embed_text",
        }
        for argument, advice in refused.items():
            if argument in settings:
                raise TypeError(f"EncodleProvider has no argument {argument}: {advice}")
        self._name = name or "encodle"
        self._settings = {**settings, "on_error": "skip" if skip_invalid else "raise"}
        BatchEmbedder(**self._settings)  # checks the arguments; does not open the model

    @property
    def name(self) -> str:
        return self._name

    def get_text_embedder(
        self, model: str | None = None, dimensions: int | None = None, **options: Any
    ) -> TextEmbedderDescriptor:
        unknown = set(options) - {"batch_size", "max_retries", "on_error"}
        if unknown:
            raise TypeError(
                f"unknown options {sorted(unknown)}: expected batch_size, max_retries or on_error; "
                "settings of the model are arguments of EncodleProvider"
            )
        _arguments.check_positive(batch_size=options.get("batch_size"), dimensions=dimensions)
        # Workers have another working directory: the path of a model becomes absolute here.
        model = _arguments.embedding_model(model)
        return _Descriptor(self._name, model, {**self._settings, "truncate_dim": dimensions}, options)


#: The type of the column by the kind of the model, if the model is not dense.
_TYPES = {
    "sparse": DataType.list(DataType.struct({"index": DataType.uint32(), "value": DataType.float32()})),
    "multi": DataType.list(DataType.list(DataType.float32())),
}


@dataclass
class _ListColumn(EmbeddingDimensions):
    """The dimensions of a model whose column is not an embedding of Daft."""

    column_type: DataType

    def as_dtype(self) -> DataType:
        return self.column_type


@dataclass
class _Descriptor(TextEmbedderDescriptor):
    provider: str
    model: str | None
    settings: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)

    def get_provider(self) -> str:
        return self.provider

    def get_model(self) -> str:
        return self.model or "sentence-transformers/all-MiniLM-L6-v2"

    def get_options(self) -> dict[str, Any]:
        return dict(self.options)

    def get_udf_options(self) -> UDFOptions:
        # A retry with the same input fails again. Retries are for providers that call a service.
        return UDFOptions(**{"batch_size": 2048, "max_retries": 0, **self.options})

    def get_dimensions(self) -> EmbeddingDimensions:
        embedder = BatchEmbedder(self.model, **self.settings)
        size, dimensions, kind = embedder.dimension, self.settings["truncate_dim"], embedder._kind()
        if kind == "dense":
            if dimensions is not None and dimensions > size:
                raise ValueError(f"dimensions is {dimensions}: expected at most {size}, the model's dimension")
            return EmbeddingDimensions(size=size, dtype=DataType.float32())
        if dimensions is not None:
            raise ValueError(f"dimensions has no meaning for a {kind} model: leave it out")
        embedder._open()._column_type(embedder)  # checks the other settings
        return _ListColumn(size, DataType.float32(), _TYPES[kind])

    def instantiate(self) -> TextEmbedder:
        return _Embedder(self.model, self.settings)


class _Embedder(TextEmbedder):
    def __init__(self, model: str | None, settings: dict[str, Any]) -> None:
        self._embed = BatchEmbedder(model, **settings)

    def embed_text(self, text: list[str]) -> list[Any]:
        """One embedding per text; Daft passes None for a null."""
        return embed_column(self._embed, pa.array(text, pa.string()), lambda row: f"row {row} of a batch")


PROVIDERS["encodle"] = EncodleProvider  # type: ignore[index,unused-ignore]

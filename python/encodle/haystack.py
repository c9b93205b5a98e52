"""Haystack embedders and ranker.

Requires the extra `haystack`: `pip install './python[haystack]'` in a clone of the repository.

To load a saved pipeline, allow this module:
`Pipeline.loads(text, allowed_modules=["encodle.haystack"])`.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from haystack import Document, component

from encodle import CrossEncoder, SentenceTransformer, _arguments

__all__ = ["EncodleDocumentEmbedder", "EncodleRanker", "EncodleTextEmbedder"]


class _Model:
    """A model that is opened when it is first used.

    Haystack serialises a component from the attributes that have the names of its arguments.
    """

    model: Any
    settings: dict[str, Any]
    _opened: Any = None

    def warm_up(self) -> None:
        """Open the model."""
        self._open()

    async def warm_up_async(self) -> None:
        """Open the model on another thread, so that the event loop does not wait."""
        await asyncio.to_thread(self._open)

    def _load(self) -> Any:
        return SentenceTransformer(self.model, **self.settings)

    def _open(self) -> Any:
        if self._opened is None:
            self._opened = self._load()
        return self._opened


def _check_documents(documents: Any, instead: str = "") -> None:
    """Raises `TypeError` unless `documents` is a list of documents."""
    if not isinstance(documents, list):
        raise TypeError(f"documents is a {type(documents).__name__}: expected a list of Document{instead}")
    for i, item in enumerate(documents):
        if not isinstance(item, Document):
            raise TypeError(f"documents[{i}] is a {type(item).__name__}: expected a Document")


def _text(document: Document, fields: list[str], separator: str) -> str:
    """The values of metadata fields and the content, joined by the separator."""
    values = [document.meta.get(name) for name in fields]
    parts = [str(value) for value in values if value is not None]
    return separator.join([*parts, document.content or ""])


@component
class EncodleTextEmbedder(_Model):
    """Embeds a query, with the model's prompt "query" if it has one.

    Parameters
    ----------
    model
        The argument `model_name_or_path` of `SentenceTransformer`. Default: the built-in model.
    prefix, suffix
        Text to put before and after the query.
    normalize_embeddings
        Scale the vector to length 1.
    settings
        Other arguments of `SentenceTransformer`.

    The model is opened by `warm_up`, or at the first run.

    Examples
    --------
    >>> from encodle.haystack import EncodleTextEmbedder
    >>> len(EncodleTextEmbedder().run("I love AI")["embedding"])
    384
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        prefix: str = "",
        suffix: str = "",
        normalize_embeddings: bool = False,
        settings: dict[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.prefix = prefix
        self.suffix = suffix
        self.normalize_embeddings = normalize_embeddings
        self.settings = settings or {}

    @component.output_types(embedding=list[float])
    def run(self, text: str) -> dict[str, list[float]]:
        """The vector of a query.

        Raises `TypeError` if `text` is not a string.
        """
        if not isinstance(text, str):
            raise TypeError(
                f"text is a {type(text).__name__}: expected a string; "
                "for a list of documents, use EncodleDocumentEmbedder"
            )
        model = self._open()
        text = self.prefix + text + self.suffix
        vector = model.encode_query(text, normalize_embeddings=self.normalize_embeddings)
        return {"embedding": vector.tolist()}


@component
class EncodleDocumentEmbedder(_Model):
    """Embeds documents, with the model's prompt "document" if it has one.

    The text of a document is the values of `meta_fields_to_embed` and its content, joined by
    `embedding_separator`.

    Parameters
    ----------
    model
        The argument `model_name_or_path` of `SentenceTransformer`. Default: the built-in model.
    prefix, suffix
        Text to put before and after each document's text.
    normalize_embeddings
        Scale the vectors to length 1.
    meta_fields_to_embed
        Names of metadata fields.
    embedding_separator
        Text between the fields and the content.
    settings
        Other arguments of `SentenceTransformer`.

    The model is opened by `warm_up`, or at the first run.

    Examples
    --------
    >>> from haystack import Document
    >>> from encodle.haystack import EncodleDocumentEmbedder
    >>> documents = EncodleDocumentEmbedder().run([Document(content="I love AI")])["documents"]
    >>> len(documents[0].embedding)
    384
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        prefix: str = "",
        suffix: str = "",
        normalize_embeddings: bool = False,
        meta_fields_to_embed: list[str] | None = None,
        embedding_separator: str = "\n",
        settings: dict[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.prefix = prefix
        self.suffix = suffix
        self.normalize_embeddings = normalize_embeddings
        self.meta_fields_to_embed = meta_fields_to_embed or []
        self.embedding_separator = embedding_separator
        self.settings = settings or {}

    @component.output_types(documents=list[Document])
    def run(self, documents: list[Document]) -> dict[str, list[Document]]:
        """Copies of the documents with their vectors.

        Missing content counts as the empty string. Raises `TypeError` if `documents` is not a list
        of documents, and `encodle.EncodleError` for a text without tokens.
        """
        _check_documents(documents, "; for a string, use EncodleTextEmbedder")
        if not documents:
            return {"documents": []}
        model = self._open()
        fields, separator = self.meta_fields_to_embed, self.embedding_separator
        texts = [self.prefix + _text(d, fields, separator) + self.suffix for d in documents]
        vectors = model.encode_document(texts, normalize_embeddings=self.normalize_embeddings)
        return {
            "documents": [
                replace(document, embedding=vector) for document, vector in zip(documents, vectors.tolist())
            ]
        }


@component
class EncodleRanker(_Model):
    """Sorts documents by their relevance to a query.

    The text of a document is the values of `meta_fields_to_embed` and its content, joined by
    `embedding_separator`.

    Parameters
    ----------
    model
        The argument `model_name_or_path` of `CrossEncoder`; the model has one label.
    top_k
        The number of documents that are kept; by default all.
    meta_fields_to_embed
        Names of metadata fields.
    embedding_separator
        Text between the fields and the content.
    settings
        Other arguments of `CrossEncoder`.

    The model is opened by `warm_up`, or at the first run.

    Examples
    --------
    >>> from encodle.haystack import EncodleRanker
    >>> EncodleRanker("ms-marco-MiniLM-L6-v2", top_k=5)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: str,
        *,
        top_k: int | None = None,
        meta_fields_to_embed: list[str] | None = None,
        embedding_separator: str = "\n",
        settings: dict[str, Any] | None = None,
    ) -> None:
        _arguments.check_positive(top_k=top_k)
        self.model = model
        self.top_k = top_k
        self.meta_fields_to_embed = meta_fields_to_embed or []
        self.embedding_separator = embedding_separator
        self.settings = settings or {}

    def _load(self) -> Any:
        return CrossEncoder(self.model, **self.settings)

    @component.output_types(documents=list[Document])
    def run(
        self, query: str, documents: list[Document], top_k: int | None = None
    ) -> dict[str, list[Document]]:
        """Copies of the documents with their scores, in descending order.

        top_k: replaces that of the constructor

        Missing content counts as the empty string. Raises `TypeError` if `documents` is not a list
        of documents or `query` is not a string.
        """
        _check_documents(documents)
        _arguments.check_str(query=query)
        texts = [_text(d, self.meta_fields_to_embed, self.embedding_separator) for d in documents]
        ranked = self._open().rank(query, texts, top_k=self.top_k if top_k is None else top_k)
        return {"documents": [replace(documents[hit["corpus_id"]], score=hit["score"]) for hit in ranked]}

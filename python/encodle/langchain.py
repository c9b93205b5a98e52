"""LangChain embeddings and reranker.

Requires the extra `langchain`: `pip install './python[langchain]'` in a clone of the repository.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.embeddings import Embeddings
from pydantic import ConfigDict

from encodle import CrossEncoder, SentenceTransformer, _arguments

__all__ = ["EncodleEmbeddings", "EncodleReranker"]

Model = TypeVar("Model", SentenceTransformer, CrossEncoder)


def _opened(model: Any, kind: type[Model], settings: dict[str, Any], adapter: str) -> Model:
    """The model, which is opened unless it is one already."""
    if not isinstance(model, kind):
        return kind(model, **settings)
    if settings:
        raise TypeError(
            f"arguments {sorted(settings)} apply only if {adapter} opens the model: expected a name or "
            f"path as model, got a {type(model).__name__}"
        )
    return model


class EncodleEmbeddings(Embeddings):
    """`langchain_core.embeddings.Embeddings` with a model of encodle.

    Documents are embedded by `SentenceTransformer.encode_document` and queries by `encode_query`, with
    the prompts that these methods choose.

    Parameters
    ----------
    model
        A `SentenceTransformer`, or the argument `model_name_or_path` of one.
    normalize_embeddings
        Scale the vectors to length 1.
    **settings
        Other arguments of `SentenceTransformer`.

    Raises
    ------
    encodle.EncodleError
        The model cannot be opened, or a text has no tokens.

    Examples
    --------
    >>> from encodle.langchain import EncodleEmbeddings
    >>> embeddings = EncodleEmbeddings()
    >>> len(embeddings.embed_query("I love AI"))
    384
    """

    def __init__(
        self,
        model: str | SentenceTransformer | None = None,
        *,
        normalize_embeddings: bool = False,
        **settings: Any,
    ) -> None:
        self.model = _opened(model, SentenceTransformer, settings, "EncodleEmbeddings")
        self.normalize_embeddings = normalize_embeddings

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """One vector per text."""
        return self.model.encode_document(texts, normalize_embeddings=self.normalize_embeddings).tolist()

    def embed_query(self, text: str) -> list[float]:
        """The vector of a query."""
        return self.model.encode_query(text, normalize_embeddings=self.normalize_embeddings).tolist()


class EncodleReranker(BaseDocumentCompressor):
    """`langchain_core.documents.BaseDocumentCompressor` with a `CrossEncoder` of encodle.

    Parameters
    ----------
    model
        A `CrossEncoder` with one label, or the argument `model_name_or_path` of one.
    top_n
        The number of documents that are kept; by default all.
    **settings
        Other arguments of `CrossEncoder`.

    Raises
    ------
    encodle.EncodleError
        The model cannot be opened.

    Examples
    --------
    >>> from encodle.langchain import EncodleReranker
    >>> EncodleReranker("ms-marco-MiniLM-L6-v2", top_n=5)  # doctest: +SKIP
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    model: CrossEncoder
    top_n: int | None = None

    def __init__(self, model: str | CrossEncoder, *, top_n: int | None = None, **settings: Any) -> None:
        _arguments.check_positive(top_n=top_n)
        super().__init__(model=_opened(model, CrossEncoder, settings, "EncodleReranker"), top_n=top_n)

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Any = None
    ) -> list[Document]:
        """Copies of the documents in descending order of their relevance to the query, with the score in
        the metadata `relevance_score`."""
        ranked = self.model.rank(query, [d.page_content for d in documents], top_k=self.top_n)
        return [_scored(documents[hit["corpus_id"]], hit["score"]) for hit in ranked]


def _scored(document: Document, score: float) -> Document:
    metadata = {**document.metadata, "relevance_score": score}
    return document.model_copy(update={"metadata": metadata})

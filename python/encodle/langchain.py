"""LangChain embeddings.

Requires the extra `langchain`: `pip install './python[langchain]'` in a clone of the repository.
"""

from __future__ import annotations

from typing import Any

from langchain_core.embeddings import Embeddings

from encodle import SentenceTransformer

__all__ = ["EncodleEmbeddings"]


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
        if isinstance(model, SentenceTransformer):
            if settings:
                raise TypeError(
                    f"arguments {sorted(settings)} apply only if EncodleEmbeddings opens the model: "
                    "expected a name or path as model, got a SentenceTransformer"
                )
            self.model = model
        else:
            self.model = SentenceTransformer(model, **settings)
        self.normalize_embeddings = normalize_embeddings

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """One vector per text."""
        return self.model.encode_document(texts, normalize_embeddings=self.normalize_embeddings).tolist()

    def embed_query(self, text: str) -> list[float]:
        """The vector of a query."""
        return self.model.encode_query(text, normalize_embeddings=self.normalize_embeddings).tolist()

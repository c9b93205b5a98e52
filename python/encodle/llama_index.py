"""LlamaIndex embeddings.

Requires the extra `llama-index`: `pip install './python[llama-index]'` in a clone of the repository.
"""

from __future__ import annotations

import asyncio
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import PrivateAttr

from encodle import SentenceTransformer
from encodle._arguments import BUILTIN_NAME

__all__ = ["EncodleEmbedding"]


class EncodleEmbedding(BaseEmbedding):
    """`llama_index.core.embeddings.BaseEmbedding` with a model of encodle.

    Nodes are embedded by `SentenceTransformer.encode_document` and queries by `encode_query`, with
    the prompts that these methods choose.

    Parameters
    ----------
    model_name
        The argument `model_name_or_path` of `SentenceTransformer`. Default: the built-in model. The
        name "all-MiniLM-L6-v2" always means the built-in model, even if a folder has this name.
    normalize
        Scale the vectors to length 1.
    settings
        Other arguments of `SentenceTransformer`.
    embed_batch_size, callback_manager, num_workers, embeddings_cache, rate_limiter
        See `BaseEmbedding`.

    Raises
    ------
    encodle.EncodleError
        The model cannot be opened, or a text has no tokens.
    TypeError
        An argument is unknown.

    Examples
    --------
    >>> from encodle.llama_index import EncodleEmbedding
    >>> embedding = EncodleEmbedding(settings={"precision": "int8"})
    >>> len(embedding.get_text_embedding("I love AI"))
    384
    """

    model_name: str = BUILTIN_NAME
    normalize: bool = False
    settings: dict[str, Any] = {}

    _model: SentenceTransformer = PrivateAttr()

    def __init__(self, model_name: str | None = None, **arguments: Any) -> None:
        arguments.pop("class_name", None)  # `model_dump` adds it
        unknown = set(arguments) - set(type(self).model_fields)
        if unknown:
            raise TypeError(
                f"unknown arguments {sorted(unknown)}: pass arguments of SentenceTransformer in the dict "
                "`settings`"
            )
        if model_name is not None:
            arguments["model_name"] = model_name
        super().__init__(**arguments)
        # The default name stands for the built-in model, even if a folder has this name.
        named = None if self.model_name == BUILTIN_NAME else self.model_name
        self._model = SentenceTransformer(named, **self.settings)

    @classmethod
    def class_name(cls) -> str:
        return "EncodleEmbedding"

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._model.encode_query(query, normalize_embeddings=self.normalize).tolist()

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return self._model.encode_document(texts, normalize_embeddings=self.normalize).tolist()

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return await asyncio.to_thread(self._get_query_embedding, query)

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return await asyncio.to_thread(self._get_text_embedding, text)

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return await asyncio.to_thread(self._get_text_embeddings, texts)

"""LlamaIndex embeddings and reranker.

Requires the extra `llama-index`: `pip install './python[llama-index]'` in a clone of the repository.
"""

from __future__ import annotations

import asyncio
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle

from encodle import CrossEncoder, SentenceTransformer
from encodle._arguments import BUILTIN_NAME

__all__ = ["EncodleEmbedding", "EncodleRerank"]


def _check_names(adapter: Any, arguments: dict[str, Any], model: str) -> None:
    """Raises TypeError for an argument that is not a field of the adapter: pydantic ignores it."""
    arguments.pop("class_name", None)  # `model_dump` adds it
    unknown = set(arguments) - set(type(adapter).model_fields)
    if unknown:
        raise TypeError(
            f"unknown arguments {sorted(unknown)}: pass arguments of {model} in the dict `settings`"
        )


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
        _check_names(self, arguments, "SentenceTransformer")
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


class EncodleRerank(BaseNodePostprocessor):
    """`llama_index.core.postprocessor.types.BaseNodePostprocessor` with a `CrossEncoder` of encodle.

    Parameters
    ----------
    model
        The argument `model_name_or_path` of `CrossEncoder`; the model has one label.
    top_n
        The number of nodes that are kept.
    settings
        Other arguments of `CrossEncoder`.
    callback_manager
        See `BaseNodePostprocessor`.

    Raises
    ------
    encodle.EncodleError
        The model cannot be opened.
    TypeError
        An argument is unknown.

    Examples
    --------
    >>> from encodle.llama_index import EncodleRerank
    >>> EncodleRerank("ms-marco-MiniLM-L6-v2", top_n=3)  # doctest: +SKIP
    """

    model: str
    top_n: int = 2
    settings: dict[str, Any] = {}

    _model: CrossEncoder = PrivateAttr()

    def __init__(self, model: str, **arguments: Any) -> None:
        _check_names(self, arguments, "CrossEncoder")
        super().__init__(model=model, **arguments)
        self._model = CrossEncoder(self.model, **self.settings)

    @classmethod
    def class_name(cls) -> str:
        return "EncodleRerank"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        if query_bundle is None:
            raise ValueError("query is missing: expected query_str or query_bundle")
        texts = [node.node.get_content(metadata_mode=MetadataMode.EMBED) for node in nodes]
        ranked = self._model.rank(query_bundle.query_str, texts, top_k=self.top_n)
        return [NodeWithScore(node=nodes[hit["corpus_id"]].node, score=hit["score"]) for hit in ranked]

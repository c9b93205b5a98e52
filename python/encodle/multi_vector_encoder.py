"""Embeddings with a vector per token."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from . import _arguments, _encodle, _ranking, similarity
from ._embedding_model import EmbeddingModel
from ._encodle import EncodleError
from .similarity import SimilarityFunction
from .types import LongTexts, ModelPrecision, Ranked, Texts

if TYPE_CHECKING:
    from .batch import BatchEmbedder


class MultiVectorEncoder(EmbeddingModel[_encodle.MultiVectorEmbedder]):
    """A model with a vector per token (late interaction): ColBERT, or BGE-M3.

    The interface is that of `sentence_transformers.MultiVectorEncoder`. A model can be pickled;
    unpickling opens it again. A copy shares the weights.

    model_name_or_path: a folder, or `org/name[@revision]` on the Hugging Face hub, in the form of
        sentence-transformers, PyLate or Stanford's ColBERT, or BGE-M3
    similarity_fn_name: "maxsim", the sum over the query's vectors of the largest dot product with a
        vector of the document; "meanmaxsim", its quotient by the number of the query's vectors; or a
        `SimilarityFunction`. By default that of the model
    revision, precision, prompts, default_prompt_name, device, threads, backend, model_kwargs,
        cache_folder, token, local_files_only, model_card_data, trust_remote_code: see
        `SentenceTransformer`

    The attribute `max_seq_length` is the maximum length of the texts for whose task the model's files
    name no length.
    """

    SUPPORTED_SIMILARITY_FN_NAMES: ClassVar[tuple[str, ...]] = similarity.MULTI_VECTOR_NAMES
    _organization = ""
    _native_class = _encodle.MultiVectorEmbedder
    _native: _encodle.MultiVectorEmbedder

    def __init__(
        self,
        model_name_or_path: str | os.PathLike[str],
        *,
        revision: str | None = None,
        precision: ModelPrecision = "f32",
        prompts: Mapping[str, str] | None = None,
        default_prompt_name: str | None = None,
        similarity_fn_name: str | SimilarityFunction | None = None,
        device: Any = "cpu",
        threads: int | None = None,
        backend: Literal["torch"] = "torch",
        model_kwargs: Mapping[str, Any] | None = None,
        cache_folder: str | os.PathLike[str] | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
        model_card_data: Any = None,
        trust_remote_code: bool = False,
    ) -> None:
        _arguments.check_device(device)
        precision = _arguments.model_precision(precision, backend, model_kwargs)
        _arguments.check_positive(threads=threads)
        super().__init__(
            model_name_or_path,
            revision,
            _arguments.Hub(cache_folder, token, local_files_only),
            (precision, threads),
            prompts,
            default_prompt_name,
            similarity_fn_name,
            model_card_data,
        )

    def _column_type(self, batches: BatchEmbedder) -> Any:
        import pyarrow as pa

        if batches.truncate_dim is not None:
            raise ValueError("truncate_dim has no meaning for a multi-vector model")
        # As in the files of `encodle embed`: a text takes much memory.
        value = pa.field("element", pa.float16(), nullable=False)
        vectors = pa.list_(value, self.get_embedding_dimension())
        return pa.list_(pa.field("element", vectors, nullable=False))

    def _column(self, texts: Any, batches: BatchEmbedder) -> tuple[Any, list[tuple[int, str]]]:
        import pyarrow as pa

        task = batches.prompt_name if batches.prompt_name in ("query", "document") else None
        rows, invalid = self._embed_batch(texts, batches, task)
        column_type = self._column_type(batches)
        values = np.empty((sum(map(len, rows)), self.get_embedding_dimension()), np.float16)
        offsets = np.cumsum([0, *map(len, rows)])
        with np.errstate(over="ignore"):
            for start, row in zip(offsets, rows, strict=False):
                values[start : start + len(row)] = _normalized(row, batches.normalize_embeddings)
        if not np.isfinite(values).all():
            raise EncodleError("the vectors have a value that is not finite in float16")
        flat = pa.FixedSizeListArray.from_arrays(
            pa.array(values.reshape(-1)), type=column_type.value_type
        )
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), flat, type=column_type), invalid

    def _test_values(self, text: str) -> np.ndarray:
        rows, _ = self._native.embed([text], "", None, "truncate", False, None)
        return rows[0].reshape(-1)

    @_arguments.multi_vector_encode_method
    def encode(
        self,
        inputs: str | Texts,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        output_value: Literal["token_embeddings"] = "token_embeddings",
        convert_to_numpy: bool = False,
        device: Any = None,
        normalize_embeddings: bool = False,
        pool: None = None,
        chunk_size: int | None = None,
        token_pooling: None = None,
        task: Literal["query", "document"] | None = None,
        *,
        long_texts: LongTexts = "truncate",
    ) -> Any:
        """The vectors of texts.

        output_value: "token_embeddings"; other values raise ValueError
        convert_to_numpy: return arrays, without torch
        normalize_embeddings: scale each vector to length 1
        token_pooling: None; other values raise EncodleError. The pooling of the model's files is
            applied
        task: "query" or "document" selects the maximum length, the skipped tokens and, for queries,
            the expansion of the model's files. With None, the tokens of documents are skipped
        long_texts: "truncate", "refuse" and "windows" as in `SentenceTransformer.encode`; a text in
            windows has the vectors of all windows
        inputs, prompt_name, prompt, batch_size, show_progress_bar, device, pool, chunk_size: see
            `SentenceTransformer.encode`

        Returns a list of tensors of torch, or of arrays of float32, with one vector per token, (T, E);
        one tensor or array for a str. T differs between texts, and is 0 if all tokens are skipped.

        Raises EncodleError if torch is needed and not installed, and the errors of
        `SentenceTransformer.encode`.
        """
        _arguments.check_single_process(device, pool, chunk_size)
        _arguments.check_positive(batch_size=batch_size)
        _arguments.check_task(task)
        if output_value != "token_embeddings":
            raise ValueError(
                f'output_value {output_value!r} is not supported: expected "token_embeddings"'
            )
        if token_pooling is not None:
            raise EncodleError(
                "token_pooling is not supported: expected None (the pooling of the model's files is applied)"
            )
        # The error for an absent package comes before the computation.
        torch: Any = None
        if not convert_to_numpy:
            instead = "pass convert_to_numpy=True"
            torch = _arguments.import_torch("convert_to_numpy=False", instead)
        single, texts = _arguments.is_single(inputs), _arguments.text_list(inputs)
        text = self._resolve_prompt(prompt, prompt_name)
        with _arguments.Progress.of(texts, show_progress_bar) as progress:
            rows = self._embed(texts, text, (task,), long_texts, progress)
        results: list[Any] = [_normalized(row, normalize_embeddings) for row in rows]
        if torch is not None:
            results = [torch.from_numpy(row) for row in results]
        return results[0] if single else results

    @_arguments.multi_vector_encode_method
    def encode_query(
        self,
        inputs: str | Texts,
        prompt_name: str | None = None,
        prompt: str | None = None,
        *positional: Any,
        **arguments: Any,
    ) -> Any:
        """`encode` with the task "query", and with the prompt "query" of the model, if it has one,
        unless another is given."""
        given = (inputs, prompt_name, prompt, *positional)
        return self._encode_as("query", ("query",), given, arguments)

    @_arguments.multi_vector_encode_method
    def encode_document(
        self,
        inputs: str | Texts,
        prompt_name: str | None = None,
        prompt: str | None = None,
        *positional: Any,
        **arguments: Any,
    ) -> Any:
        """`encode` with the task "document", and with the first of the prompts "document", "passage"
        and "corpus" that the model has, unless another is given."""
        given = (inputs, prompt_name, prompt, *positional)
        return self._encode_as("document", ("document", "passage", "corpus"), given, arguments)

    @_arguments.similarity_method
    def similarity(self, embeddings1: Any, embeddings2: Any) -> Any:
        """(A, B), the score of each query of the first argument and each document of the second; a
        tensor if an argument has tensors of torch.

        An argument is a list of the vectors of texts, (T, E), as tensors or arrays; the vectors of one
        text, (T, E); or a tensor or array (A, T, E), in which vectors of zeros are padding. The scores
        are computed in float32. The score of a document without vectors is -1e9.

        Raises ValueError if the lengths of the vectors differ, or for other shapes.
        """
        queries, documents = _pair(embeddings1, embeddings2)
        return self._native.similarity(queries, documents, self.similarity_fn_name)

    @_arguments.similarity_method
    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Any:
        """(A,), the score of query i of the first argument and document i of the second, as
        `similarity`.

        Raises ValueError if the numbers of texts differ, and the errors of `similarity`.
        """
        queries, documents = _pair(embeddings1, embeddings2)
        if len(queries) != len(documents):
            raise ValueError(
                f"there are {len(queries)} queries and {len(documents)} documents: expected equal numbers"
            )
        return self._native.similarity_pairwise(queries, documents, self.similarity_fn_name)

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        top_k: int | None = None,
        return_documents: bool = False,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        device: Any = None,
    ) -> list[Ranked]:
        """The documents in descending order of their scores for the query, as `CrossEncoder.rank`.

        batch_size, show_progress_bar, device: see `encode`
        """
        _arguments.check_not_negative(top_k=top_k)
        _arguments.check_str(query=query)
        documents = _ranking.document_list(documents)
        arguments = {"batch_size": batch_size, "device": device, "convert_to_numpy": True}
        vectors = self.encode_query(query, **arguments)
        rows = self.encode_document(documents, show_progress_bar=show_progress_bar, **arguments)
        scores = self.similarity([vectors], rows)[0]
        return _ranking.ranked(documents, scores, top_k, return_documents)


def _normalized(vectors: np.ndarray, normalize: bool) -> np.ndarray:
    return similarity.normalized(vectors) if normalize else vectors


def _rows(embeddings: Any) -> list[np.ndarray]:
    """The vectors of each text of an argument of `similarity`.

    Raises ValueError for other shapes than (T, E) and (B, T, E).
    """
    if isinstance(embeddings, (list, tuple)):
        rows = [similarity.floats(row) for row in embeddings]
    else:
        array = similarity.floats(embeddings)
        is_padded = array.ndim == 3
        rows = [text[text.any(axis=1)] for text in array] if is_padded else [array]
    for row in rows:
        if row.ndim != 2:
            raise ValueError(f"the vectors of a text have the shape {row.shape}: expected (T, E)")
    return [row.astype(np.float32, copy=False) for row in rows]


def _pair(a: Any, b: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The vectors of each text of both arguments.

    Raises ValueError if the lengths of the vectors differ.
    """
    left, right = _rows(a), _rows(b)
    widths = {row.shape[1] for row in (*left, *right)}
    if len(widths) > 1:
        raise ValueError(f"vectors have {sorted(widths)} values: expected equal lengths")
    return left, right


MultiVectorEncoder._signature = inspect.signature(MultiVectorEncoder.encode)

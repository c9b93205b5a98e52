"""Sparse embeddings."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from . import _arguments, _encodle, _sparse
from ._embedding_model import EmbeddingModel
from ._sparse import SparseVectors
from .similarity import SimilarityFunction
from .types import LongTexts, ModelPrecision, Texts

if TYPE_CHECKING:
    from .batch import BatchEmbedder


class SparseEncoder(EmbeddingModel[_encodle.SparseEmbedder]):
    """A sparse embedding model: SPLADE, an inference-free model, a sparse autoencoder, or BGE-M3.

    The interface is that of `sentence_transformers.SparseEncoder`. A model can be pickled; unpickling
    opens it again. A copy shares the weights.

    model_name_or_path: a folder, a weights file, or `org/name[@revision]` on the Hugging Face hub; a
        name without `org` means a model of the organisation `sparse-encoder`. A masked language model
        without modules.json is a SPLADE model whose logits are pooled by their maximum
    similarity_fn_name: see `SentenceTransformer`; by default that of the model, or else "dot"
    max_active_dims: the attribute `max_active_dims`
    revision, precision, prompts, default_prompt_name, device, threads, backend, model_kwargs,
        cache_folder, token, local_files_only, model_card_data, trust_remote_code: see
        `SentenceTransformer`
    """

    _organization = "sparse-encoder"
    _native_class = _encodle.SparseEmbedder
    _native: _encodle.SparseEmbedder

    def __init__(
        self,
        model_name_or_path: str | os.PathLike[str],
        *,
        revision: str | None = None,
        precision: ModelPrecision = "f32",
        max_active_dims: int | None = None,
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
        self.max_active_dims = max_active_dims

    @property
    def max_active_dims(self) -> int | None:
        """The maximum number of values of a vector, the largest in magnitude; None for no limit.
        Setting it to None restores the limit of the model's files."""
        return self._max_active_dims

    @max_active_dims.setter
    def max_active_dims(self, count: int | None) -> None:
        _arguments.check_positive(max_active_dims=count)
        self._max_active_dims = self._native.max_active_dims if count is None else count

    def _column_type(self, batches: BatchEmbedder) -> Any:
        import pyarrow as pa

        if batches.normalize_embeddings or batches.truncate_dim is not None:
            raise ValueError("normalize_embeddings and truncate_dim have no meaning for a sparse model")
        index = pa.field("index", pa.uint32(), nullable=False)
        value = pa.field("value", pa.float32(), nullable=False)
        return pa.list_(pa.field("element", pa.struct([index, value]), nullable=False))

    def _column(self, texts: Any, batches: BatchEmbedder) -> tuple[Any, list[tuple[int, str]]]:
        import pyarrow as pa

        is_query = self._native.has_queries and batches.prompt_name == "query"
        rows, invalid = self._embed_batch(texts, batches, is_query, self.max_active_dims)
        offsets, indices, values = rows
        column_type = self._column_type(batches)
        pairs = pa.StructArray.from_arrays(
            [pa.array(indices), pa.array(values)], fields=list(column_type.value_type)
        )
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pairs, type=column_type), invalid

    def _test_values(self, text: str) -> np.ndarray:
        (_, _, values), _ = self._native.embed([text], "", False, None, "truncate", False, None)
        return values

    @_arguments.sparse_encode_method
    def encode(
        self,
        inputs: str | Texts,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        convert_to_tensor: bool = True,
        convert_to_sparse_tensor: bool = True,
        save_to_cpu: bool = False,
        device: Any = None,
        max_active_dims: int | None = None,
        pool: None = None,
        chunk_size: int | None = None,
        *,
        task: str | None = None,
        output: Literal["torch", "scipy"] = "torch",
        long_texts: LongTexts = "truncate",
    ) -> Any:
        """The sparse vectors of texts.

        convert_to_tensor: if False, return a list of tensors
        convert_to_sparse_tensor: if False, return dense tensors
        save_to_cpu: not used: the vectors are on the CPU
        max_active_dims: the maximum number of values of a vector; by default that of the model
        task: "query" selects the weights for queries of an inference-free model; "document" and None
            select the model of documents. Not used for other models
        output: "torch"; "scipy" for a `scipy.sparse.csr_array`, without torch
        long_texts: "truncate", "refuse" and "windows" as in `SentenceTransformer.encode`; the vector
            of a text in windows has the largest value of the windows in each dimension
        inputs, prompt_name, prompt, batch_size, show_progress_bar, device, pool, chunk_size: see
            `SentenceTransformer.encode`

        Returns a sparse tensor of torch, (B, E), or (E,) for a str; with output="scipy", a csr_array
        (B, E), which has one row for a str.

        Raises EncodleError if torch or SciPy is needed and not installed, and the errors of
        `SentenceTransformer.encode`.
        """
        _arguments.check_single_process(device, pool, chunk_size)
        _arguments.check_positive(batch_size=batch_size, max_active_dims=max_active_dims)
        if output not in ("torch", "scipy"):
            raise ValueError(f'output {output!r} is unknown: expected "torch" or "scipy"')
        if output == "scipy" and not (convert_to_tensor and convert_to_sparse_tensor):
            raise ValueError('convert_to_tensor and convert_to_sparse_tensor need output="torch"')
        has_queries = self._native.has_queries
        if has_queries:
            _arguments.check_task(task)
        # The error for an absent package comes before the computation.
        _ = _sparse.import_scipy() if output == "scipy" else _sparse.import_torch()
        single, texts = _arguments.is_single(inputs), _arguments.text_list(inputs)
        text = self._resolve_prompt(prompt, prompt_name)
        limit = self.max_active_dims if max_active_dims is None else max_active_dims
        settings = (has_queries and task == "query", limit)
        with _arguments.Progress.of(texts, show_progress_bar) as progress:
            offsets, indices, values = self._embed(texts, text, settings, long_texts, progress)
        vectors = SparseVectors(offsets, indices, values, self.get_embedding_dimension())
        if output == "scipy":
            return vectors.to_scipy()
        tensors = vectors.to_torch(single)
        if not convert_to_sparse_tensor:
            tensors = tensors.to_dense()
        return tensors if convert_to_tensor or single else list(tensors)

    @_arguments.sparse_encode_method
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

    @_arguments.sparse_encode_method
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
        """(A, B), the similarity of each vector of the first argument to each of the second; a tensor
        if an argument has tensors of torch.

        The arguments are tensors of torch, matrices of SciPy, arrays, or lists of these.
        """
        return _sparse.similarities(self.similarity_fn_name, embeddings1, embeddings2)

    @_arguments.similarity_method
    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Any:
        """(B,), the similarity of row i of the first argument to row i of the second, as
        `similarity`. A single vector (E,) is compared with every row."""
        return _sparse.similarities_pairwise(self.similarity_fn_name, embeddings1, embeddings2)

    @staticmethod
    def sparsity(embeddings: Any) -> dict[str, float]:
        """`active_dims`, the mean number of values that are not 0, and `sparsity_ratio`, the mean
        share of the values that are 0.

        embeddings: as for `similarity`
        """
        vectors, _ = SparseVectors.of(embeddings)
        if not len(vectors) or not vectors.width:
            return {"active_dims": 0.0, "sparsity_ratio": 1.0}
        mean = len(vectors.values) / len(vectors)
        return {"active_dims": mean, "sparsity_ratio": 1.0 - mean / vectors.width}

    @staticmethod
    def intersection(embeddings_1: Any, embeddings_2: Any) -> Any:
        """The products of the first vector (E,) and each of the second argument in the dimensions in
        which the product is above 0: a sparse tensor of torch if an argument has tensors, else a
        csr_array of SciPy.

        Raises ValueError if the first argument has several vectors.
        """
        vectors, single = _sparse.intersection(embeddings_1, embeddings_2)
        if _arguments.has_tensors(embeddings_1) or _arguments.has_tensors(embeddings_2):
            return vectors.to_torch(single)
        return vectors.to_scipy()

    def decode(
        self, embeddings: Any, top_k: int | None = None
    ) -> list[tuple[str, float]] | list[list[tuple[str, float]]]:
        """The tokens of each vector's dimensions with their values, in descending order of value; of a
        single vector (E,), one such list.

        embeddings: as for `similarity`
        top_k: the maximum number of tokens per vector

        A dimension without a token, as of a sparse autoencoder, is written as a number.
        """
        _arguments.check_positive(top_k=top_k)
        vectors, single = SparseVectors.of(embeddings)
        if vectors.width != self.get_embedding_dimension():
            expected = self.get_embedding_dimension()
            raise ValueError(f"vectors have {vectors.width} values: expected {expected}")
        indices, values = vectors.indices.astype(np.uint32), vectors.values.astype(np.float32)
        parts = [slice(*ends) for ends in zip(vectors.offsets[:-1], vectors.offsets[1:], strict=True)]
        decoded = [self._native.decode(indices[part], values[part])[:top_k] for part in parts]
        return decoded[0] if single else decoded


SparseEncoder._signature = inspect.signature(SparseEncoder.encode)

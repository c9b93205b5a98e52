"""Sentence embeddings."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from . import _arguments, _encodle
from ._embedding_model import FEATURES, EmbeddingModel
from .quantization import PRECISIONS, quantize_embeddings
from .similarity import SimilarityFunction
from .types import LongTexts, ModelPrecision, Precision, Texts

if TYPE_CHECKING:
    from .batch import BatchEmbedder


class SentenceTransformer(EmbeddingModel[_encodle.Embedder]):
    """A sentence embedding model.

    The interface is that of `sentence_transformers.SentenceTransformer`.

    model_name_or_path: a folder, a weights file, or `org/name[@revision]` on the Hugging Face
        hub; a name without `org` means a model of the organisation `sentence-transformers`; by
        default "all-MiniLM-L6-v2", which is part of the package (weights rounded to f16)
    precision: the number format of matrix products: "f32", "f16" (slow on a CPU), "bf16" or "int8"
    revision: the branch, tag or commit of a model on the hub
    truncate_dim: the number of values that are kept of each vector, if it has more; by default
        that of the model's files
    device: "cpu"; other values raise EncodleError
    prompts: prompts by name, in addition to those of the model's files
    default_prompt_name: the prompt that `encode` uses by default; by default that of the model
    similarity_fn_name: "cosine", "dot", "euclidean" or "manhattan", or a `SimilarityFunction`; by
        default that of the model
    pooling: pooling modes, such as "mean" or ["cls", "max"], that replace the pooling of the
        model's files and the modules after it (Dense, Normalize); required for a model without
        modules.json
    threads: the number of threads; by default the environment variable RAYON_NUM_THREADS, or the
        number of CPUs that the process may use (affinity and cgroup limit). At most 4 per CPU; a
        larger number is reduced, with a warning
    token_budget: the maximum number of tokens per batch
    backend: "torch"; other values raise ValueError
    model_kwargs: the settings `dtype` and `torch_dtype` (float32, float16, bfloat16), which replace
        `precision`; settings that cannot change the result, such as `attn_implementation`, are
        ignored; others raise ValueError
    cache_folder: the folder of the models of the hub, instead of that of the environment variable
        SENTENCE_TRANSFORMERS_HOME or of `huggingface_hub`
    token: the access token for the hub; False for none; True and None for the one of the environment
    local_files_only: do not use the network
    model_card_data: an object for the evaluators of sentence-transformers; by default a
        `ModelCardData`
    trust_remote_code: accepted and not used: code from a model's repository is never run

    A model is safe to use from many threads. It computes on threads that a fork does not copy: in a
    forked process it raises EncodleError. A model can be pickled; unpickling opens it again. A copy
    shares the weights.

    >>> model = SentenceTransformer()
    >>> vectors = model.encode(["A man is eating food.", "A man eats."])
    >>> vectors.shape, vectors.dtype.name
    ((2, 384), 'float32')
    >>> round(float(model.similarity(vectors[0], vectors[1])[0, 0]), 3)
    0.913
    """

    _native_class = _encodle.Embedder
    _native: _encodle.Embedder

    def __init__(
        self,
        model_name_or_path: str | os.PathLike[str] | None = None,
        *,
        revision: str | None = None,
        precision: ModelPrecision = "f32",
        truncate_dim: int | None = None,
        prompts: Mapping[str, str] | None = None,
        default_prompt_name: str | None = None,
        similarity_fn_name: str | SimilarityFunction | None = None,
        pooling: str | Sequence[str] | None = None,
        device: Any = "cpu",
        threads: int | None = None,
        token_budget: int | None = None,
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
        _arguments.check_positive(threads=threads, token_budget=token_budget)
        modes = _arguments.pooling_modes(pooling)
        hub = _arguments.Hub(cache_folder, token, local_files_only)
        super().__init__(
            model_name_or_path,
            revision,
            hub,
            (precision, modes, token_budget, threads),
            prompts,
            default_prompt_name,
            similarity_fn_name,
            model_card_data,
        )
        self._pooling = modes
        self.truncate_dim = self._native.truncate_dim if truncate_dim is None else truncate_dim

    @property
    def truncate_dim(self) -> int | None:
        """The number of values that are kept of each vector; None for all."""
        return self._truncate_dim

    @truncate_dim.setter
    def truncate_dim(self, dimension: int | None) -> None:
        _arguments.check_positive(truncate_dim=dimension)
        self._truncate_dim = dimension

    @contextmanager
    def truncate_embeddings(self, truncate_dim: int | None) -> Iterator[None]:
        """Sets `truncate_dim` within a `with` statement.

        >>> model = SentenceTransformer()
        >>> with model.truncate_embeddings(8):
        ...     model.encode("a text").shape
        (8,)
        >>> model.truncate_dim is None
        True
        """
        before = self.truncate_dim
        self.truncate_dim = truncate_dim
        try:
            yield
        finally:
            self.truncate_dim = before

    def get_embedding_dimension(self) -> int:
        """E, the length of each vector."""
        return self._native.dimension(self.truncate_dim)

    def _description(self) -> str:
        """The description of the model for vector files; `encodle search` opens the model from it."""
        name = self._name
        if name is not None and os.path.isdir(name):
            name = os.path.realpath(name)
        elif name is not None and os.path.exists(name):
            # The target of a link to a file may have no config beside it.
            folder, file = os.path.split(os.path.abspath(name))
            name = os.path.join(os.path.realpath(folder), file)
        model = {"model": name, "pooling": self._pooling, "normalize": False}
        return json.dumps(model, ensure_ascii=False, separators=(",", ":"))

    def _truncate_dim_of(self, batches: BatchEmbedder) -> int | None:
        return self.truncate_dim if batches.truncate_dim is None else batches.truncate_dim

    def _dimension(self, batches: BatchEmbedder) -> int:
        return self._native.dimension(self._truncate_dim_of(batches))

    def _column_type(self, batches: BatchEmbedder) -> Any:
        import pyarrow as pa

        element = pa.field("element", pa.float32(), nullable=False)
        return pa.list_(element, self._dimension(batches))

    def _column(self, texts: Any, batches: BatchEmbedder) -> tuple[Any, list[tuple[int, str]]]:
        import pyarrow as pa

        settings = (batches.normalize_embeddings, self._truncate_dim_of(batches))
        vectors, invalid = self._embed_batch(texts, batches, *settings)
        values, vector_type = pa.array(vectors.reshape(-1)), self._column_type(batches)
        return pa.FixedSizeListArray.from_arrays(values, type=vector_type), invalid

    def _test_values(self, text: str) -> np.ndarray:
        return self.encode(text, prompt="")

    @_arguments.encode_method
    def encode(
        self,
        inputs: str | Texts,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        output_value: Literal["sentence_embedding", "token_embeddings"]
        | None = "sentence_embedding",
        precision: Precision | None = "float32",
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: Any = None,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        pool: None = None,
        chunk_size: int | None = None,
        *,
        task: str | None = None,
        long_texts: LongTexts = "truncate",
    ) -> Any:
        """The vectors of texts.

        inputs: a str, a sequence of str (list, tuple, numpy array, pandas Series), or an Arrow
            array of strings (any object with `__arrow_c_array__` or `__arrow_c_stream__`)
        prompt, prompt_name: the text to put before each text, or the name of a prompt of the model
        batch_size: checked, but not used; batches are formed by number of tokens, and in f32, bf16
            and int8 a vector has the same bits in every batch
        show_progress_bar: show the number of encoded texts on standard error
        output_value: "sentence_embedding"; "token_embeddings" for the last hidden states; None for
            the `Features` of each text
        precision: see `quantize_embeddings`; None means "float32"
        convert_to_numpy: if False, return a list of torch tensors
        convert_to_tensor: return one torch tensor
        normalize_embeddings: scale the vectors to length 1
        truncate_dim: the number of values to keep of each vector; by default that of the model
        pool, chunk_size: None; a pool of processes raises EncodleError
        task: not used: it selects modules of models with a Router
        long_texts: how to handle texts longer than `max_seq_length`: "truncate"; "refuse", which
            raises EncodleError; "windows", which averages the vectors of the text's parts

        Returns a (B, E) array of float32, or (E,) for a str, unless `precision` or a `convert_`
        argument asks for another type; binary precisions have E/8 columns, rounded up. With
        "token_embeddings", a list of (T, E) arrays, or one array for a str; with None, a list of
        `Features`, or one for a str.

        Raises EncodleError for a null in an Arrow array, for a text or a prompt that is not valid
        Unicode, and for a text that has no tokens or is refused; TypeError for a prompt or an
        element of a list that is not a str; ValueError for an unknown value of an argument, for
        arguments that cannot be combined, and for an int8 or uint8 `precision` of a single vector.
        Ctrl-C raises KeyboardInterrupt within a second.
        """
        _arguments.check_single_process(device, pool, chunk_size)
        _arguments.check_positive(batch_size=batch_size, truncate_dim=truncate_dim)
        precision = "float32" if precision is None else precision
        if precision not in PRECISIONS:
            raise ValueError(f"precision {precision!r} is unknown: expected one of {PRECISIONS}")
        if output_value not in ("sentence_embedding", "token_embeddings", None):
            raise ValueError(
                f"output_value {output_value!r} is unknown: expected "
                '"sentence_embedding", "token_embeddings" or None'
            )
        convert = _arguments.Conversion(convert_to_numpy, convert_to_tensor)
        single, texts = _arguments.is_single(inputs), _arguments.text_list(inputs)
        text = self._resolve_prompt(prompt, prompt_name)
        if output_value != "sentence_embedding":
            of_vectors = normalize_embeddings or truncate_dim is not None
            if precision != "float32" or (output_value is not None and of_vectors):
                raise ValueError(
                    "precision, normalize_embeddings and truncate_dim apply to sentence "
                    f"embeddings: expected their defaults with output_value={output_value!r}"
                )
            if long_texts != "truncate":
                raise ValueError('token embeddings are computed with long_texts="truncate" only')
        results: Any
        with _arguments.Progress.of(texts, show_progress_bar) as progress:
            if output_value != "sentence_embedding":
                states = self._native.token_embeddings(texts, text, progress.callback)
                results = [convert.array(state) for state in states]
            if output_value != "token_embeddings":
                dimension = self.truncate_dim if truncate_dim is None else truncate_dim
                settings = (bool(normalize_embeddings), dimension)
                vectors = self._embed(texts, text, settings, long_texts, progress)
        if output_value == "sentence_embedding":
            quantized = precision != "float32"
            results = convert(quantize_embeddings(vectors, precision) if quantized else vectors)
        elif output_value is None:
            tokens = self._native.tokenize(texts, text)
            for i, state in enumerate(results):
                rows = [convert.array(array[i, : len(state)]) for array in tokens]
                results[i] = {
                    "sentence_embedding": convert.array(vectors[i]),
                    "token_embeddings": state,
                    **dict(zip(FEATURES, rows, strict=True)),
                }
        return results[0] if single else results

    @_arguments.encode_method
    def encode_query(
        self,
        inputs: str | Texts,
        prompt_name: str | None = None,
        prompt: str | None = None,
        *positional: Any,
        **arguments: Any,
    ) -> Any:
        """`encode` with the prompt "query" of the model, if it has one, unless another is given."""
        given = (inputs, prompt_name, prompt, *positional)
        return self._encode_as("query", ("query",), given, arguments)

    @_arguments.encode_method
    def encode_document(
        self,
        inputs: str | Texts,
        prompt_name: str | None = None,
        prompt: str | None = None,
        *positional: Any,
        **arguments: Any,
    ) -> Any:
        """`encode` with the first of the prompts "document", "passage" and "corpus" that the model
        has, unless another is given."""
        given = (inputs, prompt_name, prompt, *positional)
        return self._encode_as("document", ("document", "passage", "corpus"), given, arguments)

SentenceTransformer._signature = inspect.signature(SentenceTransformer.encode)

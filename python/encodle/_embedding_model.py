"""What the embedding models share, of all kinds of embeddings."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from . import _arguments, _prompts, similarity
from ._encodle import EncodleError
from ._model import Model, ModelCardData
from ._pipeline import Native
from .similarity import SimilarityFunction
from .types import LongTexts, Texts

if TYPE_CHECKING:
    from .batch import BatchEmbedder

FEATURES = ("input_ids", "attention_mask", "token_type_ids")


class EmbeddingModel(Model[Native]):
    """A model that turns each text into an embedding."""

    SUPPORTED_SIMILARITY_FN_NAMES: ClassVar[tuple[str, ...]] = similarity.NAMES
    #: The organisation on the hub of a name without one.
    _organization: ClassVar[str] = "sentence-transformers"
    #: The class of the native part.
    _native_class: ClassVar[Callable[..., Any]]
    #: The signature of `encode`.
    _signature: ClassVar[inspect.Signature]

    _native: Any

    def __init__(
        self,
        model: str | os.PathLike[str] | None,
        revision: str | None,
        hub: _arguments.Hub,
        settings: tuple[Any, ...],
        prompts: Mapping[str, str] | None,
        default_prompt_name: str | None,
        similarity_fn_name: str | SimilarityFunction | None,
        model_card_data: Any,
    ) -> None:
        """Opens the model; `settings` are the arguments of the native class after the model."""
        self._hub = hub
        self._name = _arguments.embedding_model(model, revision, hub, self._organization)
        self._settings = settings
        with _arguments.explained(model, self._name):
            self._native = self._open()
        defaults = {"query": "", "document": ""}
        self.prompts = _prompts.merged(defaults, self._native.prompts, prompts)
        default = default_prompt_name or self._native.default_prompt_name
        self.default_prompt_name = _prompts.check_default(self.prompts, default)
        self.similarity_fn_name = similarity_fn_name or self._native.similarity_fn_name
        self.model_card_data = ModelCardData() if model_card_data is None else model_card_data

    def _open(self) -> Any:
        source = self._hub.source(_arguments.model_path(self._name))
        return self._native_class(source, *self._settings)

    def encode(self, *positional: Any, **arguments: Any) -> Any:
        """The embeddings of texts."""
        raise NotImplementedError

    @property
    def similarity_fn_name(self) -> str:
        """The function that `similarity` and `similarity_pairwise` compute."""
        return self._similarity_fn_name

    @similarity_fn_name.setter
    def similarity_fn_name(self, name: str | SimilarityFunction) -> None:
        self._similarity_fn_name = similarity.canonical_name(name, self.SUPPORTED_SIMILARITY_FN_NAMES)

    def get_max_seq_length(self) -> int:
        """`max_seq_length`."""
        return self.max_seq_length

    @property
    def threads(self) -> int:
        """The number of threads that the model computes on."""
        return int(self._native.threads)

    def get_embedding_dimension(self) -> int:
        """E, the length of each vector."""
        return int(self._native.dimension)

    def get_sentence_embedding_dimension(self) -> int:
        """E, the length of each vector; the older name of `get_embedding_dimension`."""
        return self.get_embedding_dimension()

    def _dimension(self, batches: BatchEmbedder) -> int:
        """The length of each vector in the column of `batches`."""
        return self.get_embedding_dimension()

    def _column_type(self, batches: BatchEmbedder) -> Any:
        """The Arrow type of the column of `batches`."""
        raise NotImplementedError

    def _column(self, texts: Any, batches: BatchEmbedder) -> tuple[Any, list[tuple[int, str]]]:
        """The Arrow array of the embeddings of the valid texts, and the other rows with reasons."""
        raise NotImplementedError

    def _embed(
        self,
        texts: Any,
        prompt: str,
        settings: tuple[Any, ...],
        long_texts: LongTexts,
        progress: _arguments.Progress,
    ) -> Any:
        """The embeddings of the native class; `settings` are the arguments of its method `embed` after
        the prompt.

        Raises EncodleError for the first invalid text.
        """
        embeddings, invalid = self._native.embed(
            texts, prompt, *settings, long_texts, False, progress.callback
        )
        if invalid:
            row, reason = invalid[0]
            raise EncodleError(f"text {row}: {reason}")
        return embeddings

    def _embed_batch(self, texts: Any, batches: BatchEmbedder, *settings: Any) -> Any:
        """The embeddings of the native class for the column of `batches`, with `settings` as for
        `_embed`, and the rows without embeddings with reasons."""
        prompt = self._resolve_prompt(batches.prompt, batches.prompt_name)
        skip = batches.on_error == "skip"
        return self._native.embed(texts, prompt, *settings, batches.long_texts, skip, None)

    def _test_values(self, text: str) -> np.ndarray:
        """The values of the embedding of a text without a prompt, to detect changed weights."""
        raise NotImplementedError

    def _resolve_prompt(self, prompt: str | None, prompt_name: str | None) -> str:
        return _prompts.resolve(self.prompts, self.default_prompt_name, prompt, prompt_name)

    def is_singular_input(self, inputs: Any) -> bool:
        """Whether `encode` takes the argument as one text."""
        return _arguments.is_single(inputs)

    def _encode_as(
        self,
        task: str,
        prompt_names: Sequence[str],
        positional: tuple[Any, ...],
        arguments: dict[str, Any],
    ) -> Any:
        """`encode` with the first of `prompt_names` that the model has, unless a prompt is given."""
        given = self._signature.bind(self, *positional).arguments
        del given["self"]
        if given["prompt_name"] is None and given["prompt"] is None:
            names = (name for name in prompt_names if name in self.prompts)
            given["prompt_name"] = next(names, None)
        return self.encode(**given, **arguments, task=task)

    @_arguments.similarity_method
    def similarity(self, embeddings1: Any, embeddings2: Any) -> Any:
        """(A, B), the similarity of each vector of the first argument to each of the second; a tensor
        if an argument has tensors of torch.

        Euclidean and Manhattan distances are negated, so that larger values are more similar.
        """
        return similarity.similarity(self.similarity_fn_name, embeddings1, embeddings2)

    @_arguments.similarity_method
    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Any:
        """(B,), the similarity of row i of the first argument to row i of the second; a tensor if an
        argument has tensors of torch.

        A single vector (E,) is compared with every row; two single vectors give a result without
        dimensions.
        """
        return similarity.similarity_pairwise(self.similarity_fn_name, embeddings1, embeddings2)

    def tokenize(self, texts: str | Texts) -> dict[str, np.ndarray]:
        """`preprocess` without a prompt; its name in sentence-transformers before version 6."""
        return self.preprocess(texts)

    def preprocess(self, inputs: str | Texts, prompt: str | None = None) -> dict[str, np.ndarray]:
        """`input_ids`, `attention_mask` and `token_type_ids`, each a (B, T) array of int64.

        prompt: the text to put before each text

        Shorter texts are padded at the end; the attention mask is 1 for tokens and 0 for padding.
        """
        text = _prompts.resolve({}, None, prompt, None)
        arrays = self._native.tokenize(_arguments.text_list(inputs), text)
        return dict(zip(FEATURES, arrays, strict=True))

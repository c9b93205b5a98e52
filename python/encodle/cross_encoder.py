"""Scores of pairs of texts."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from . import _arguments, _encodle, _prompts
from ._model import Model, ModelCardData
from ._ranking import check_sequence, document_list, ranked
from .types import Activation, ModelPrecision, Pair, Pairs, Ranked


class CrossEncoder(Model[_encodle.CrossEncoder]):
    """A model that scores pairs of texts.

    The interface is that of `sentence_transformers.CrossEncoder`. A model can be pickled; unpickling
    opens it again. A copy shares the weights.

    model_name_or_path: a folder, a weights file, or `org/name[@revision]` on the Hugging Face
        hub; a name without `org` means a model of the organisation `cross-encoder`
    num_labels: the number of labels that the model must have
    max_length: the maximum number of tokens of a pair; by default that of the model
    activation_fn: the attribute `activation_fn`
    precision, prompts, default_prompt_name, threads, backend, model_kwargs, cache_folder, token,
        local_files_only, model_card_data, trust_remote_code: see `SentenceTransformer`
    """

    _native: _encodle.CrossEncoder

    def __init__(
        self,
        model_name_or_path: str | os.PathLike[str],
        *,
        revision: str | None = None,
        precision: ModelPrecision = "f32",
        prompts: Mapping[str, str] | None = None,
        default_prompt_name: str | None = None,
        num_labels: int | None = None,
        max_length: int | None = None,
        activation_fn: Activation | None = None,
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
        _arguments.check_positive(threads=threads, num_labels=num_labels, max_length=max_length)
        precision = _arguments.model_precision(precision, backend, model_kwargs)
        self._hub = _arguments.Hub(cache_folder, token, local_files_only)
        self._path = _arguments.model_path(model_name_or_path, revision, "cross-encoder", self._hub)
        self._settings = (precision, threads)
        with _arguments.explained(model_name_or_path, self._path):
            self._native = self._open()
        if num_labels not in (None, self.num_labels):
            raise ValueError(
                f"num_labels is {num_labels}: expected {self.num_labels}, the number of labels of the "
                "model (this package does not add an untrained head)"
            )
        if max_length is not None:
            self.max_length = max_length
        self.activation_fn = activation_fn
        self.prompts = _prompts.merged({}, self._native.prompts, prompts)
        default = default_prompt_name or self._native.default_prompt_name
        self.default_prompt_name = _prompts.check_default(self.prompts, default)
        self.model_card_data = ModelCardData() if model_card_data is None else model_card_data

    def _open(self) -> _encodle.CrossEncoder:
        return _encodle.CrossEncoder(self._hub.source(self._path), *self._settings)

    @property
    def labels(self) -> list[str]:
        """The labels of the model."""
        return self._native.labels

    @property
    def num_labels(self) -> int:
        """The number of labels; `rank` requires 1."""
        return len(self.labels)

    @property
    def max_length(self) -> int:
        """`max_seq_length`."""
        return self.max_seq_length

    @max_length.setter
    def max_length(self, tokens: int) -> None:
        self.max_seq_length = tokens

    @property
    def activation_fn(self) -> Activation | None:
        """The function that `predict` and `rank` apply to logits if their own `activation_fn` is
        None. The value None means the activation of the model."""
        return self._activation_fn

    @activation_fn.setter
    def activation_fn(self, function: Activation | None) -> None:
        if function is not None and not callable(function):
            raise TypeError(f"activation_fn is {function!r}: expected a function or None")
        self._activation_fn = function

    def is_singular_input(self, inputs: Any) -> bool:
        """Whether `predict` takes the argument as one pair."""
        return _pairs(inputs)[0]

    @_arguments.predict_method
    def predict(
        self,
        inputs: Pair | Pairs,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        activation_fn: Activation | None = None,
        apply_softmax: bool = False,
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: Any = None,
        pool: None = None,
        chunk_size: int | None = None,
    ) -> Any:
        """The scores of pairs.

        inputs: a pair of texts, or a sequence of pairs
        prompt, prompt_name: the text to put before the first text of each pair, or the system
            message of a chat template; or the name of a prompt of the model
        activation_fn: a function from logits (B, labels) to scores of this shape. A tensor is passed
            to a function or module of torch, an array to other functions. Default: the attribute
            `activation_fn`, or else the activation that the model's files name, or else the
            sigmoid for one label and the identity for several
        apply_softmax: apply the softmax to the scores of a model with several labels
        batch_size, show_progress_bar, convert_to_numpy, convert_to_tensor, pool, chunk_size: see
            `SentenceTransformer.encode`

        Returns an array of float32: (B,) for a model with one label, (B, labels) for several;
        without the first dimension for a single pair.

        Raises TypeError for an element that is not a pair of str; ValueError for an unknown
        `prompt_name`, and for an `activation_fn` whose result has another shape than the logits;
        EncodleError for a chat template that cannot render a pair.
        """
        _arguments.check_single_process(device, pool, chunk_size)
        _arguments.check_positive(batch_size=batch_size)
        convert = _arguments.Conversion(convert_to_numpy, convert_to_tensor)
        activation_fn = self.activation_fn if activation_fn is None else activation_fn
        single, pairs = _pairs(inputs)
        text = _prompts.resolve(self.prompts, self.default_prompt_name, prompt, prompt_name)
        with _arguments.Progress(len(pairs), show_progress_bar, "pairs") as progress:
            first, second = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            use_model_activation = activation_fn is None
            scores: Any = self._native.score_pairs(
                first, second, text, use_model_activation, progress.callback
            )
        if activation_fn is not None:
            activated = _activated(activation_fn, scores)
            if self.num_labels == 1 and activated.shape == scores.shape[:1]:
                activated = activated[:, None]
            if activated.shape != scores.shape:
                raise ValueError(
                    f"activation_fn returned scores of shape {activated.shape}: expected "
                    f"{scores.shape}, the shape of the logits"
                )
            scores = activated
        if self.num_labels == 1:
            scores = scores[:, 0]
        elif apply_softmax:
            scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
            scores /= scores.sum(axis=-1, keepdims=True)
        scores = convert(scores)
        return scores[0] if single else scores

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        top_k: int | None = None,
        return_documents: bool = False,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        activation_fn: Activation | None = None,
        device: Any = None,
    ) -> list[Ranked]:
        """The documents in descending order of their relevance to the query.

        Returns dicts with the keys `corpus_id` (the index of the document), `score`, and `text` if
        `return_documents` is set; `top_k` of them, or all.

        Raises ValueError for a model with several labels, and the errors of `predict`.
        """
        _arguments.check_not_negative(top_k=top_k)
        if self.num_labels != 1:
            raise ValueError(
                f"the model has {self.num_labels} labels: expected 1, for reranking; use "
                "predict for the scores of all labels"
            )
        documents = document_list(documents)
        scores = self.predict(
            [(query, document) for document in documents],
            prompt_name=prompt_name,
            prompt=prompt,
            batch_size=batch_size,
            show_progress_bar=show_progress_bar,
            activation_fn=activation_fn,
            device=device,
        )
        return ranked(documents, scores, top_k, return_documents)


def _pairs(inputs: Any) -> tuple[bool, list[tuple[str, str]]]:
    """Whether the argument is a single pair, and the pairs.

    Raises TypeError for an argument that is neither a pair of str nor a sequence of such pairs.
    """
    check_sequence("inputs", inputs, "a pair of texts, or a list of pairs")
    items = inputs.tolist() if isinstance(inputs, np.ndarray) else list(inputs)
    single = bool(items) and isinstance(items[0], str)
    pairs = [items] if single else items
    for i, pair in enumerate(pairs):
        if not isinstance(pair, (list, tuple, np.ndarray)) or len(pair) != 2:
            raise TypeError(f"pair {i} is {pair!r}: expected two texts")
        for text in pair:
            if not isinstance(text, str):
                raise TypeError(f"pair {i} contains {text!r}: expected two str")
    return single, [(first, second) for first, second in pairs]


def _activated(activation_fn: Activation, logits: np.ndarray) -> np.ndarray:
    """Calls `activation_fn` with the logits: a tensor for a function of torch, else an array."""
    function = activation_fn
    while isinstance(function, functools.partial):
        function = function.func
    # Detects functions of torch by the `__module__` of the function, of its class (for a
    # `torch.nn.Module`), or of the class that defines it (`__objclass__`, for a tensor's method).
    # A built-in function such as `torch.sigmoid` may have no `__module__`: it is looked up in torch
    # by its name.
    types = [kind.__module__ for kind in type(function).__mro__]
    owner = getattr(getattr(function, "__objclass__", None), "__module__", "")
    modules = [getattr(function, "__module__", None) or "", owner, *types]
    loaded = sys.modules.get("torch")
    of_torch = loaded is not None and getattr(loaded, getattr(function, "__name__", ""), None)
    if of_torch is function or any(name.split(".")[0] == "torch" for name in modules):
        import torch

        return np.asarray(activation_fn(torch.from_numpy(logits)).detach().float().numpy())
    return np.asarray(activation_fn(logits), dtype=np.float32)

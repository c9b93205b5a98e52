"""What embedding models and `CrossEncoder` share of the interface of sentence-transformers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypeVar

from . import _arguments
from ._pipeline import Native, Reopened

Self = TypeVar("Self", bound="Model[Any]")

#: The attributes that are not properties.
_ATTRIBUTES = ("prompts", "default_prompt_name", "model_card_data")

_TRAIN = "this package does not train; train with sentence-transformers, and open the saved folder"
_SAVE = "this package does not write models; copy the model's folder"
_PROCESSES = (
    "encode and predict use all CPUs of the process with threads; use encodle.BatchEmbedder in workers, "
    "or encodle.embed_file for files"
)
_PRECISION = "the number format is the argument precision of the constructor"
_MODULE = "the model is not a module of torch"

#: What to use instead of attributes of sentence-transformers.
_INSTEAD = {
    name: instead
    for names, instead in [
        ("fit old_fit train gradient_checkpointing_enable", _TRAIN),
        ("add_adapter load_adapter set_adapter", _TRAIN),
        ("save save_pretrained save_to_hub push_to_hub", _SAVE),
        ("start_multi_process_pool stop_multi_process_pool encode_multi_process", _PROCESSES),
        ("half float bfloat16 dtype", _PRECISION),
        ("cuda", 'this package computes on the CPU: expected to("cpu")'),
        ("forward modules children parameters state_dict compile", _MODULE),
        ("model auto_model transformers_model config processor", _MODULE),
        ("tokenizer", "SentenceTransformer.tokenize returns the tokens of texts"),
        ("default_activation_function", "the name is activation_fn"),
    ]
    for name in names.split()
}


class Device(str):
    """The name of a device. It is equal to the `torch.device` of this name."""

    @property
    def type(self) -> str:
        return self.partition(":")[0]

    def __eq__(self, other: object) -> bool:
        return str(self) == str(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class ModelCardData:
    """The results of the evaluators of sentence-transformers, and any other attribute.

    metrics: the last metrics of each evaluator
    """

    def __init__(self) -> None:
        self.metrics: dict[Any, dict[str, Any]] = {}

    def set_evaluation_metrics(
        self, evaluator: Any, metrics: dict[str, Any], epoch: int = 0, step: int = 0
    ) -> None:
        """Stores the metrics; `epoch` and `step` belong to training and are not used."""
        self.metrics[evaluator] = dict(metrics)


class Model(Reopened[Native]):
    """The attributes and methods that all classes have."""

    prompts: dict[str, str]
    default_prompt_name: str | None
    model_card_data: Any
    _native: Any
    _hub: _arguments.Hub

    def __getstate__(self) -> dict[str, Any]:
        state = {**super().__getstate__(), "_hub": self._hub.without_token()}
        return {**state, "max_seq_length": self.max_seq_length}

    def __setstate__(self, state: dict[str, Any]) -> None:
        max_seq_length = state.pop("max_seq_length")
        super().__setstate__(state)
        self.max_seq_length = max_seq_length

    @property
    def max_seq_length(self) -> int:
        """The maximum number of tokens of a text or a pair, special tokens included.

        Setting it raises EncodleError if the model has fewer positions, or if the special tokens
        leave no room for text.
        """
        return int(self._native.max_seq_length)

    @max_seq_length.setter
    def max_seq_length(self, tokens: int) -> None:
        _arguments.check_positive(max_seq_length=tokens)
        self._native = self._native.with_max_seq_length(tokens)

    if not TYPE_CHECKING:  # a type checker would accept every attribute of a class with these methods

        def __setattr__(self, name: str, value: Any) -> None:
            known = hasattr(type(self), name) or name in _ATTRIBUTES or name.startswith("_")
            # A subclass may have attributes of its own.
            if not known and type(self).__module__.startswith("encodle."):
                raise AttributeError(
                    f"{type(self).__name__} has no attribute {name!r}: setting it would have no effect"
                )
            super().__setattr__(name, value)

        def __getattr__(self, name: str) -> Any:
            instead = _INSTEAD.get(name)
            raise AttributeError(
                f"{type(self).__name__} has no attribute {name!r}" + (f": {instead}" if instead else ""),
                name=name,
                obj=self,
            )

    @property
    def modalities(self) -> list[str]:
        """The kinds of inputs: text."""
        return ["text"]

    def supports(self, modality: str | tuple[str, ...]) -> bool:
        """Whether the model takes inputs of a kind, or of a combination of kinds."""
        kinds = self.modalities
        combined = isinstance(modality, tuple) and "message" in kinds and set(modality) <= set(kinds)
        return modality in kinds or combined

    @property
    def device(self) -> Device:
        """Always "cpu"."""
        return Device("cpu")

    def to(self: Self, device: Any) -> Self:
        """The model itself. Raises EncodleError for another device than the CPU."""
        _arguments.check_device(device)
        return self

    def cpu(self: Self) -> Self:
        """The model itself."""
        return self

    def eval(self: Self) -> Self:
        """The model itself, which is never in training mode."""
        return self

    def evaluate(self, evaluator: Any, output_path: str | os.PathLike[str] | None = None) -> Any:
        """The result of an evaluator of sentence-transformers, or of any function of a model and a
        folder, which is created."""
        if output_path is not None:
            os.makedirs(output_path, exist_ok=True)
        return evaluator(self, output_path)

"""Models for mteb, the Massive Text Embedding Benchmark.

Requires the extra `mteb`: `pip install './python[mteb]'` in a clone of the repository. mteb itself
depends on torch.
"""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Any

from mteb.models import ModelMeta
from mteb.models.abs_encoder import AbsEncoder
from mteb.models.model_meta import ScoringFunction
from mteb.types import PromptType

from encodle import CrossEncoder, SentenceTransformer, _arguments
from encodle.types import Precision

__all__ = ["EncodleCrossEncoder", "EncodleEncoder"]

#: The settings that do not change the results. The access token must not be written to a file.
_NOT_RECORDED = ("cache_folder", "local_files_only", "token")
_SIMILARITIES = {"cosine": ScoringFunction.COSINE, "dot": ScoringFunction.DOT_PRODUCT}


def _metadata(name: str, revision: str | None, settings: dict[str, Any], **more: Any) -> ModelMeta:
    recorded = {key: value for key, value in settings.items() if key not in _NOT_RECORDED}
    return ModelMeta.create_empty(
        {
            "name": name if name.count("/") == 1 else f"local/{name.strip('/').replace('/', '__')}",
            # mteb reuses results of a model with the same name, revision and arguments.
            "revision": revision or f"encodle-{version('encodle')}",
            "experiment_kwargs": recorded or None,
            "framework": [],
            **more,
        }
    )


def _texts(inputs: Any) -> list[str]:
    """The texts of a data loader."""
    return [text for batch in inputs for text in batch["text"]]


class EncodleEncoder(AbsEncoder):
    """`mteb.models.EncoderProtocol` with a model of encodle.

    mteb chooses the prompt by name: the name of the task or of its type, alone or followed by
    "-query" or "-document"; or "query" or "document" alone.

    Parameters
    ----------
    model_name
        The argument `model_name_or_path` of `SentenceTransformer`. Default: the built-in model.
    revision, **settings
        Other arguments of `SentenceTransformer`.

    Examples
    --------
    >>> import mteb
    >>> from encodle.mteb import EncodleEncoder
    >>> model = EncodleEncoder(precision="int8")
    >>> mteb.evaluate(model, mteb.get_tasks(["STS12"]))  # doctest: +SKIP
    """

    def __init__(
        self,
        model_name: str | os.PathLike[str] | None = None,
        revision: str | None = None,
        *,
        device: str | None = None,
        **settings: Any,
    ) -> None:
        model_name = None if model_name is None else os.fspath(model_name)
        self.model = SentenceTransformer(model_name, revision=revision, device=device, **settings)
        self.model_prompts = {name: text for name, text in self.model.prompts.items() if text}
        name = model_name or f"encodle/{_arguments.BUILTIN_NAME}"
        self.mteb_model_meta = _metadata(
            name,
            revision,
            settings,
            loader=type(self),
            max_tokens=self.model.max_seq_length,
            embed_dim=self.model.get_embedding_dimension(),
            # For other similarity functions mteb calls `self.model.similarity`.
            similarity_fn_name=_SIMILARITIES.get(self.model.similarity_fn_name),
        )

    def encode(
        self,
        inputs: Any,
        *,
        task_metadata: Any,
        hf_split: str,
        hf_subset: str,
        prompt_type: PromptType | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        precision: Precision = "float32",
    ) -> Any:
        """(B, E), the vectors of a data loader's texts.

        `hf_split` and `hf_subset` are part of the protocol and do not change the vectors.
        """
        name = self.get_prompt_name(task_metadata, prompt_type)
        # If `get_prompt_name` finds no prompt, the texts get the prompt that mteb's own adapter
        # gives them. Without a `prompt_type`, this is the model's default prompt. For a query or a
        # document, it is the prompt "query" or "document", which every model has. That prompt is
        # empty: otherwise `get_prompt_name` would have found it.
        default = None if prompt_type is None else ""
        return self.model.encode(
            _texts(inputs),
            prompt=self.model_prompts.get(name, "") if name else default,
            batch_size=batch_size,
            show_progress_bar=show_progress_bar,
            precision=precision,
        )


class EncodleCrossEncoder:
    """`mteb.models.CrossEncoderProtocol` with a `CrossEncoder` of encodle.

    Parameters
    ----------
    model_name
        The argument `model_name_or_path` of `CrossEncoder`; the model has one label.
    revision, **settings
        Other arguments of `CrossEncoder`.

    Examples
    --------
    >>> from encodle.mteb import EncodleCrossEncoder
    >>> EncodleCrossEncoder("ms-marco-MiniLM-L6-v2", precision="int8")  # doctest: +SKIP
    """

    def __init__(
        self,
        model_name: str | os.PathLike[str],
        revision: str | None = None,
        *,
        device: str | None = None,
        **settings: Any,
    ) -> None:
        name = os.fspath(model_name)
        self.model = CrossEncoder(name, revision=revision, device=device, **settings)
        self.mteb_model_meta = _metadata(
            name,
            revision,
            settings,
            loader=type(self),
            max_tokens=self.model.max_seq_length,
            model_type=["cross-encoder"],
        )

    def predict(
        self,
        inputs1: Any,
        inputs2: Any,
        *,
        task_metadata: Any,
        hf_split: str,
        hf_subset: str,
        prompt_type: PromptType | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
    ) -> Any:
        """(B,), the scores of the pairs of two data loaders' texts.

        `task_metadata`, `hf_split`, `hf_subset` and `prompt_type` are part of the protocol and do not
        change the scores.
        """
        pairs = list(zip(_texts(inputs1), _texts(inputs2), strict=True))
        return self.model.predict(pairs, batch_size=batch_size, show_progress_bar=show_progress_bar)

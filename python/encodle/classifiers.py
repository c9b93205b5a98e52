"""Pipelines with a head: labels, entities, answers, and tokens for masks."""

from __future__ import annotations

from typing import Any, overload

from . import _arguments, _encodle
from ._pipeline import Pipeline
from .types import Aggregation, Answers, Classification, Entity, Texts, Token


class _Task(Pipeline[_encodle.Task]):
    """A model for a task.

    model: a folder, a weights file, or `org/name[@revision]` on the Hugging Face hub
    revision, precision, threads, trust_remote_code: see `SentenceTransformer`
    """

    #: The name of the task.
    _task: str

    def _open(self) -> _encodle.Task:
        return _encodle.Task(self._task, _arguments.model_path(self._name), *self._settings)

    @property
    def labels(self) -> list[str]:
        """The labels of the model; empty for a model without labels."""
        return self._native.labels

    def _run(self, texts: str | Texts, field: str | None = None, **parameters: Any) -> Any:
        """The result of each text, or of the only text: a dict, or a field of it."""
        single = _arguments.is_single(texts)
        results = self._native.run(_arguments.text_list(texts), parameters)
        of_texts = results if field is None else [result[field] for result in results]
        return of_texts[0] if single else of_texts


class TextClassifier(_Task):
    """A text classification model.

    model: a folder, a weights file, or `org/name[@revision]` on the Hugging Face hub
    revision, precision, threads, trust_remote_code: see `SentenceTransformer`
    """

    _task = "sequence_classification"

    @overload
    def classify(  # type: ignore[overload-overlap] # see Texts
        self, texts: str
    ) -> Classification: ...
    @overload
    def classify(self, texts: Texts) -> list[Classification]: ...
    def classify(self, texts: str | Texts) -> Classification | list[Classification]:
        """The most likely label and the score of each label.

        texts: a str, a sequence of str, or an Arrow array of strings; texts are truncated to the
            model's maximum length

        Returns a `Classification` for each text. A name that several labels share is followed by the
        label's id, as in "a (2)". The scores are probabilities, or logits if the model's
        `problem_type` is regression.
        """
        results: Classification | list[Classification] = self._run(texts)
        return results


class TokenClassifier(_Task):
    """A token classification model, for example for named entities.

    model: a folder, a weights file, or `org/name[@revision]` on the Hugging Face hub
    revision, precision, threads, trust_remote_code: see `SentenceTransformer`
    """

    _task = "token_classification"

    @overload
    def tag(  # type: ignore[overload-overlap] # see Texts
        self, texts: str, aggregation: Aggregation = "simple"
    ) -> list[Entity]: ...
    @overload
    def tag(self, texts: Texts, aggregation: Aggregation = "simple") -> list[list[Entity]]: ...
    def tag(
        self, texts: str | Texts, aggregation: Aggregation = "simple"
    ) -> list[Entity] | list[list[Entity]]:
        """The entities of each text, as `transformers`' token classification pipeline finds them.

        aggregation: how tokens are merged into entities: "none", "simple", "first",
            "average", "max"

        Returns a list of `Entity` for each text.
        """
        results: list[Entity] | list[list[Entity]] = self._run(
            texts, "entities", aggregation=aggregation
        )
        return results


class QuestionAnswerer(_Task):
    """An extractive question answering model.

    model: a folder, a weights file, or `org/name[@revision]` on the Hugging Face hub
    revision, precision, threads, trust_remote_code: see `SentenceTransformer`
    """

    _task = "question_answering"

    @overload
    def answer(  # type: ignore[overload-overlap] # see Texts
        self, question: str, texts: str, top_k: int = 1
    ) -> Answers: ...
    @overload
    def answer(self, question: str, texts: Texts, top_k: int = 1) -> list[Answers]: ...
    def answer(self, question: str, texts: str | Texts, top_k: int = 1) -> Answers | list[Answers]:
        """The most likely answers to a question in each text.

        Returns `Answers` for each text.
        """
        _arguments.check_str(question=question)
        _arguments.check_positive(top_k=top_k)
        results: Answers | list[Answers] = self._run(texts, question=question, top=top_k)
        return results


class MaskFiller(_Task):
    """A masked language model.

    model: a folder, a weights file, or `org/name[@revision]` on the Hugging Face hub
    revision, precision, threads, trust_remote_code: see `SentenceTransformer`
    """

    _task = "fill_mask"

    @overload
    def fill_mask(  # type: ignore[overload-overlap] # see Texts
        self, texts: str, top_k: int = 5
    ) -> list[list[Token]]: ...
    @overload
    def fill_mask(self, texts: Texts, top_k: int = 5) -> list[list[list[Token]]]: ...
    def fill_mask(self, texts: str | Texts, top_k: int = 5) -> list[list[Token]] | list[list[list[Token]]]:
        """The most likely tokens for each mask token of each text.

        Returns, for each text and each of its mask tokens, a list of `Token` in descending order of
        score.
        """
        _arguments.check_positive(top_k=top_k)
        results: list[list[Token]] | list[list[list[Token]]] = self._run(
            texts, "masks", top=top_k
        )
        return results

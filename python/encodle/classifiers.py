"""Pipelines with a head: labels, entities, answers, and tokens for masks."""

from __future__ import annotations

from typing import overload

from . import _arguments, _encodle
from ._pipeline import Pipeline
from .types import Aggregation, Answers, Classification, Entity, Span, Texts, Token


def _span(span: tuple[float, str, int, int]) -> Span:
    score, text, start, end = span
    return {"score": score, "text": text, "start": start, "end": end}


class TextClassifier(Pipeline[_encodle.TextClassifier]):
    """A text classification model.

    model: a folder, a weights file, or `org/name[@revision]` on the Hugging Face hub
    revision, precision, threads, trust_remote_code: see `SentenceTransformer`
    """

    _native_class = _encodle.TextClassifier

    @property
    def labels(self) -> list[str]:
        """The labels of the model."""
        return self._native.labels

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
        single = _arguments.is_single(texts)
        labels = self._native.distinct_labels
        results: list[Classification] = []
        for scores in self._native.classify(_arguments.text_list(texts)):
            best = int(scores.argmax())
            by_label = dict(zip(labels, map(float, scores), strict=True))
            results.append(
                {"label": labels[best], "score": float(scores[best]), "scores": by_label}
            )
        return results[0] if single else results


class TokenClassifier(Pipeline[_encodle.TokenClassifier]):
    """A token classification model, for example for named entities.

    model: a folder, a weights file, or `org/name[@revision]` on the Hugging Face hub
    revision, precision, threads, trust_remote_code: see `SentenceTransformer`
    """

    _native_class = _encodle.TokenClassifier

    @property
    def labels(self) -> list[str]:
        """The labels of the model."""
        return self._native.labels

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
        single = _arguments.is_single(texts)
        tagged = self._native.tag(_arguments.text_list(texts), aggregation)
        results: list[list[Entity]] = [
            [{"label": label, **_span(span)} for label, span in text] for text in tagged
        ]
        return results[0] if single else results


class QuestionAnswerer(Pipeline[_encodle.QuestionAnswerer]):
    """An extractive question answering model.

    model: a folder, a weights file, or `org/name[@revision]` on the Hugging Face hub
    revision, precision, threads, trust_remote_code: see `SentenceTransformer`
    """

    _native_class = _encodle.QuestionAnswerer

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
        single = _arguments.is_single(texts)
        found = self._native.answer(question, _arguments.text_list(texts), top_k)
        results: list[Answers] = [
            {"answers": [_span(span) for span in spans], "no_answer": no_answer}
            for spans, no_answer in found
        ]
        return results[0] if single else results


class MaskFiller(Pipeline[_encodle.MaskFiller]):
    """A masked language model.

    model: a folder, a weights file, or `org/name[@revision]` on the Hugging Face hub
    revision, precision, threads, trust_remote_code: see `SentenceTransformer`
    """

    _native_class = _encodle.MaskFiller

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
        single = _arguments.is_single(texts)
        filled = self._native.fill_mask(_arguments.text_list(texts), top_k)
        results: list[list[list[Token]]] = [
            [
                [{"token_id": i, "token": token, "score": score} for i, token, score in mask]
                for mask in text
            ]
            for text in filled
        ]
        return results[0] if single else results

"""Pipelines with a head: labels, entities, answers, and tokens for masks."""

from __future__ import annotations

from typing import Any, Literal

from . import _arguments, _encodle
from ._pipeline import Pipeline

Aggregation = Literal["none", "simple", "first", "average", "max"]


def _span(span: tuple[float, str, int, int]) -> dict[str, Any]:
    return dict(zip(("score", "text", "start", "end"), span, strict=True))


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

    def classify(self, texts: Any) -> Any:
        """The most likely label and the score of each label.

        texts: a str, a sequence of str, or an Arrow array of strings; texts are truncated to the
            model's maximum length

        Returns a dict with the keys `label`, `score` and `scores` (label to score) for each text. A
        name that several labels share is followed by the label's id, as in "a (2)".
        The scores are probabilities, or logits if the model's `problem_type` is regression.
        """
        single = _arguments.is_single(texts)
        labels = self._native.distinct_labels
        results = []
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

    def tag(self, texts: Any, aggregation: Aggregation = "simple") -> Any:
        """The entities of each text, as `transformers`' token classification pipeline finds them.

        aggregation: how tokens are merged into entities: "none", "simple", "first",
            "average", "max"

        Returns a list of dicts with the keys `label`, `score`, `text`, `start` and `end` for each
        text. `start` and `end` count characters.
        """
        single = _arguments.is_single(texts)
        tagged = self._native.tag(_arguments.text_list(texts), aggregation)
        results = [[{"label": label, **_span(span)} for label, span in text] for text in tagged]
        return results[0] if single else results


class QuestionAnswerer(Pipeline[_encodle.QuestionAnswerer]):
    """An extractive question answering model.

    model: a folder, a weights file, or `org/name[@revision]` on the Hugging Face hub
    revision, precision, threads, trust_remote_code: see `SentenceTransformer`
    """

    _native_class = _encodle.QuestionAnswerer

    def answer(self, question: str, texts: Any, top_k: int = 1) -> Any:
        """The most likely answers to a question in each text.

        Returns a dict for each text: `answers`, a list of dicts with the keys `score`, `text`,
        `start` and `end` (in characters), and `no_answer`, the score of "no answer".
        """
        _arguments.check_str(question=question)
        _arguments.check_positive(top_k=top_k)
        single = _arguments.is_single(texts)
        found = self._native.answer(question, _arguments.text_list(texts), top_k)
        results = [
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

    def fill_mask(self, texts: Any, top_k: int = 5) -> Any:
        """The most likely tokens for each mask token of each text.

        Returns, for each text and each of its mask tokens, a list of dicts in descending order of
        score, with the keys `token_id`, `token` and `score`.
        """
        _arguments.check_positive(top_k=top_k)
        single = _arguments.is_single(texts)
        filled = self._native.fill_mask(_arguments.text_list(texts), top_k)
        keys = ("token_id", "token", "score")
        results = [
            [[dict(zip(keys, token, strict=True)) for token in mask] for mask in text]
            for text in filled
        ]
        return results[0] if single else results

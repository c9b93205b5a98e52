"""Documents in the order of their scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from . import _arguments
from .types import Ranked


def check_sequence(name: str, value: Any, expected: str) -> None:
    """Raises TypeError for a str and for a value that is not a sequence."""
    _arguments.check_not_data_frame(**{name: value})
    is_collection = hasattr(value, "__iter__")
    if not is_collection or isinstance(value, (str, bytes, Mapping, set, frozenset)):
        raise TypeError(f"{name} is {value!r}: expected {expected}")


def document_list(documents: Sequence[str]) -> list[str]:
    """The argument `documents` of `rank` as a list. Raises the errors of `check_sequence`."""
    check_sequence("documents", documents, "a list of texts")
    return list(documents)


def ranked(
    documents: list[str], scores: np.ndarray, top_k: int | None, return_documents: bool
) -> list[Ranked]:
    """The documents in descending order of their scores (B,): `top_k` of them, or all."""
    results: list[Ranked] = []
    for i in sorted(range(len(documents)), key=lambda i: -scores[i])[:top_k]:
        results.append({"corpus_id": i, "score": float(scores[i])})
        if return_documents:
            results[-1]["text"] = documents[i]
    return results

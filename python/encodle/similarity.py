"""Similarity of vectors, as `SimilarityFunction` of sentence-transformers computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ._arguments import as_array

#: The smallest length that vectors are divided by.
EPSILON = 1e-12
#: The number of values of the differences that are in memory at once.
BLOCK = 1 << 24

NAMES = ("cosine", "dot", "euclidean", "manhattan")


def _matrix(vectors: Any) -> np.ndarray:
    """Vectors as a (B, E) array of floats."""
    matrix = np.atleast_2d(as_array(vectors))
    # The sum of squares of a vector exceeds float16.
    return matrix if matrix.dtype in (np.float32, np.float64) else matrix.astype(np.float32)


def normalized(vectors: np.ndarray) -> np.ndarray:
    """The vectors divided by their lengths."""
    lengths: np.ndarray = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, EPSILON))


def _distances(a: np.ndarray, b: np.ndarray, norm: int) -> np.ndarray:
    """(A, B), the norm of each difference; blocks of rows bound the memory."""
    rows = max(1, BLOCK // max(1, b.size))
    blocks = (a[i : i + rows, None, :] - b[None, :, :] for i in range(0, len(a), rows))
    distances = [np.linalg.norm(block, ord=norm, axis=-1) for block in blocks]
    return np.concatenate(distances) if distances else np.zeros((0, len(b)), a.dtype)


_ALL: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "cosine": lambda a, b: normalized(a) @ normalized(b).T,
    "dot": lambda a, b: a @ b.T,
    "euclidean": lambda a, b: -_distances(a, b, 2),
    "manhattan": lambda a, b: -_distances(a, b, 1),
}

_PAIRS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "cosine": lambda a, b: (normalized(a) * normalized(b)).sum(axis=-1),
    "dot": lambda a, b: (a * b).sum(axis=-1),
    "euclidean": lambda a, b: -np.linalg.norm(a - b, axis=-1),
    "manhattan": lambda a, b: -np.abs(a - b).sum(axis=-1),
}


def check_name(name: str) -> str:
    """Raises ValueError for an unknown similarity function."""
    if name not in NAMES:
        raise ValueError(f"similarity_fn_name {name!r} is unknown: expected one of {NAMES}")
    return name


def similarity(name: str, a: Any, b: Any) -> np.ndarray:
    """(A, B), the similarity of each vector of `a` to each vector of `b`.

    Raises ValueError if their lengths differ.
    """
    left, right = _matrix(a), _matrix(b)
    if left.shape[1] != right.shape[1]:
        raise ValueError(f"vectors have {left.shape[1]} and {right.shape[1]} values: expected equal")
    return _ALL[name](left, right)


def similarity_pairwise(name: str, a: Any, b: Any) -> np.ndarray:
    """(B,), the similarity of each vector of `a` to the vector of `b` in the same row.

    Raises ValueError if the shapes differ.
    """
    left, right = _matrix(a), _matrix(b)
    if left.shape != right.shape:
        raise ValueError(f"vectors have the shapes {left.shape} and {right.shape}: expected equal")
    return _PAIRS[name](left, right)

"""Similarity of vectors, as `SimilarityFunction` of sentence-transformers computes it."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np

from ._arguments import as_array

#: The minimum divisor when a vector is divided by its Euclidean norm.
EPSILON = 1e-12
#: The maximum number of values of a block of differences, unless a single vector has more.
BLOCK = 1 << 24

#: The functions of single vectors.
NAMES = ("cosine", "dot", "euclidean", "manhattan")
#: The functions of texts with several vectors.
MULTI_VECTOR_NAMES = ("maxsim", "meanmaxsim")
#: The names of these functions in `sentence_transformers.util`.
ALIASES = {
    "cos_sim": "cosine",
    "dot_score": "dot",
    "euclidean_sim": "euclidean",
    "manhattan_sim": "manhattan",
    "mean_maxsim": "meanmaxsim",
}


class SimilarityFunction(Enum):
    """The names of the similarity functions."""

    COSINE = "cosine"
    DOT_PRODUCT = "dot"
    DOT = "dot"
    EUCLIDEAN = "euclidean"
    MANHATTAN = "manhattan"
    MAXSIM = "maxsim"
    MEAN_MAXSIM = "meanmaxsim"

    @staticmethod
    def possible_values() -> list[str]:
        """The names."""
        return [*NAMES, *MULTI_VECTOR_NAMES]


def floats(vectors: Any) -> np.ndarray:
    """Vectors as an array of float32 or float64 of any shape."""
    array = as_array(vectors)
    # The sum of squares of a vector can exceed the range of float16.
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)


def normalized(vectors: np.ndarray) -> np.ndarray:
    """The vectors divided by their Euclidean norms."""
    lengths: np.ndarray = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, EPSILON))


def _distances(a: np.ndarray, b: np.ndarray, norm: int) -> np.ndarray:
    """(A, B), the norm of each difference, computed in blocks to bound the memory."""
    distances = np.empty((len(a), len(b)), np.result_type(a, b))
    width = max(1, a.shape[1])
    columns = max(1, min(len(b), BLOCK // width))
    rows = max(1, BLOCK // (columns * width))
    for i in range(0, len(a), rows):
        for j in range(0, len(b), columns):
            block = a[i : i + rows, None, :] - b[None, j : j + columns, :]
            distances[i : i + rows, j : j + columns] = np.linalg.norm(block, ord=norm, axis=-1)
    return distances


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


def canonical_name(function: str | Enum, names: tuple[str, ...]) -> str:
    """The name of a similarity function: a value of a `SimilarityFunction` (of this package or of
    sentence-transformers), a name or an alias.

    Raises ValueError for a name that is not in `names`.
    """
    name = function.value if isinstance(function, Enum) else function
    name = ALIASES.get(name, name) if isinstance(name, str) else name
    if name not in names:
        raise ValueError(f"similarity_fn_name {name!r} is unknown: expected one of {names}")
    return str(name)


def similarity(name: str, a: Any, b: Any) -> np.ndarray:
    """(A, B), the similarity of each vector of `a` to each vector of `b`. A single vector (E,) counts
    as (1, E).

    Raises ValueError if the lengths of the vectors differ.
    """
    left, right = np.atleast_2d(floats(a)), np.atleast_2d(floats(b))
    if left.shape[1] != right.shape[1]:
        raise ValueError(
            f"vectors have {left.shape[1]} and {right.shape[1]} values: expected equal lengths"
        )
    return _ALL[name](left, right)


def similarity_pairwise(name: str, a: Any, b: Any) -> np.ndarray:
    """(B,), the similarity of each vector of `a` to the vector of `b` in the same row. A single vector
    (E,) is compared with every row; two single vectors give a result without dimensions.

    Raises ValueError if the numbers of rows or the lengths of the vectors differ.
    """
    left, right = floats(a), floats(b)
    rows = {vectors.shape[:-1] for vectors in (left, right)} - {(), (1,)}
    if left.shape[-1:] != right.shape[-1:] or len(rows) > 1:
        raise ValueError(
            f"vectors have the shapes {left.shape} and {right.shape}: expected equal shapes, or a "
            "single vector of the same length"
        )
    return np.asarray(_PAIRS[name](left, right))

"""Sparse vectors in the forms of torch, SciPy and NumPy."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import similarity
from ._arguments import as_array, import_package


def import_torch() -> Any:
    """The module torch. Raises EncodleError if it is not installed."""
    return import_package("torch", "a sparse tensor", 'pass output="scipy"')


def import_scipy() -> Any:
    """The module scipy.sparse. Raises EncodleError if it is not installed."""
    return import_package("scipy.sparse", "a csr_array", 'pass output="torch"')


@dataclass(frozen=True)
class SparseVectors:
    """The rows of a matrix (B, E) in compressed form: row i has the indices and values from
    `offsets[i]` to `offsets[i + 1]`, in ascending order of index."""

    offsets: np.ndarray
    indices: np.ndarray
    values: np.ndarray
    width: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @staticmethod
    def of(vectors: Any) -> tuple[SparseVectors, bool]:
        """The vectors of a tensor of torch, of a matrix of SciPy, of an array, or of a list of these,
        and whether they are a single vector (E,).

        Raises TypeError for other types; ValueError for other shapes than (B, E) and (E,).
        """
        torch, scipy = sys.modules.get("torch"), sys.modules.get("scipy.sparse")
        if isinstance(vectors, (list, tuple)) and vectors and not np.isscalar(vectors[0]):
            return _joined([SparseVectors.of(vector)[0] for vector in vectors]), False
        if torch is not None and isinstance(vectors, torch.Tensor):
            vectors = vectors.detach().cpu()
            vectors = vectors.float() if vectors.dtype == torch.bfloat16 else vectors
            if vectors.layout != torch.strided:
                _check_shape(vectors.shape)
                vectors = (vectors if vectors.is_sparse else vectors.to_sparse_coo()).coalesce()
                positions, values = vectors.indices().numpy(), vectors.values().numpy()
                return _of_positions(positions, values, tuple(vectors.shape))
        elif scipy is not None and scipy.issparse(vectors):
            _check_shape(vectors.shape)
            vectors = vectors.tocoo(copy=True)
            vectors.sum_duplicates()  # also sorts
            single = len(vectors.shape) == 1
            positions = (vectors.coords[0],) if single else (vectors.row, vectors.col)
            order = np.lexsort(positions[::-1])
            sorted_positions = np.stack([position[order] for position in positions])
            return _of_positions(sorted_positions, vectors.data[order], vectors.shape)
        array = as_array(vectors)
        _check_shape(array.shape)
        positions = np.stack(array.nonzero())
        return _of_positions(positions, array[tuple(positions)], array.shape)

    def rows(self, start: int, stop: int) -> SparseVectors:
        """Some of the rows."""
        offsets = self.offsets[start : stop + 1]
        part = slice(offsets[0], offsets[-1])
        return SparseVectors(offsets - offsets[0], self.indices[part], self.values[part], self.width)

    def row_numbers(self) -> np.ndarray:
        """The row of each value."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    def dense(self, columns: np.ndarray) -> np.ndarray:
        """(B, columns), the values in some columns, which must include those of all values."""
        dense = np.zeros((len(self), len(columns)), np.result_type(self.values, np.float32))
        dense[self.row_numbers(), np.searchsorted(columns, self.indices)] = self.values
        return dense

    def to_scipy(self) -> Any:
        """A csr_array of SciPy."""
        arrays = (self.values, self.indices.astype(np.int64), self.offsets)
        return import_scipy().csr_array(arrays, shape=(len(self), self.width))

    def to_torch(self, single: bool) -> Any:
        """A sparse tensor of torch, (B, E), or (E,) for a single vector."""
        torch = import_torch()
        indices = self.indices.astype(np.int64)
        positions = indices[None] if single else np.stack([self.row_numbers(), indices])
        shape = (self.width,) if single else (len(self), self.width)
        values = torch.from_numpy(self.values)
        return torch.sparse_coo_tensor(
            torch.from_numpy(positions), values, shape, check_invariants=False
        ).coalesce()


def _check_shape(shape: Any) -> None:
    if len(shape) not in (1, 2):
        raise ValueError(f"vectors have the shape {tuple(shape)}: expected (B, E), or (E,)")


def _of_positions(
    positions: np.ndarray, values: np.ndarray, shape: tuple[int, ...]
) -> tuple[SparseVectors, bool]:
    """The vectors with values at sorted positions, whose last row has the columns."""
    single = len(shape) == 1
    rows = np.zeros(len(values), np.int64) if single else positions[0]
    counts = np.bincount(rows, minlength=1 if single else shape[0])
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    return SparseVectors(offsets, positions[-1], values, shape[-1]), single


def _joined(parts: list[SparseVectors]) -> SparseVectors:
    """The rows of all parts.

    Raises ValueError if the lengths of the vectors differ.
    """
    widths = {part.width for part in parts}
    if len(widths) > 1:
        raise ValueError(f"vectors have {sorted(widths)} values: expected equal lengths")
    starts = np.cumsum([0, *(len(part.values) for part in parts)])
    offsets = [part.offsets[1:] + start for part, start in zip(parts, starts[:-1], strict=True)]
    return SparseVectors(
        np.concatenate([np.zeros(1, np.int64), *offsets]),
        np.concatenate([part.indices for part in parts]),
        np.concatenate([part.values for part in parts]),
        parts[0].width,
    )


def _pair(a: Any, b: Any) -> tuple[tuple[SparseVectors, bool], tuple[SparseVectors, bool]]:
    """The vectors of both arguments.

    Raises ValueError if the lengths of the vectors differ.
    """
    left, right = SparseVectors.of(a), SparseVectors.of(b)
    if left[0].width != right[0].width:
        raise ValueError(
            f"vectors have {left[0].width} and {right[0].width} values: expected equal lengths"
        )
    return left, right


def _blocks(rows: int, width: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows, so that the rows of a range have at most `similarity.BLOCK` values."""
    step = max(1, similarity.BLOCK // max(1, width))
    return ((start, min(start + step, rows)) for start in range(0, rows, step))


def _dense(a: SparseVectors, b: SparseVectors) -> tuple[np.ndarray, np.ndarray]:
    """The vectors without the columns in which none has a value. They have the same similarity."""
    columns = np.union1d(a.indices, b.indices)
    return a.dense(columns), b.dense(columns)


def similarities(name: str, a: Any, b: Any) -> np.ndarray:
    """(A, B), the similarity of each vector of `a` to each vector of `b`. A single vector (E,) counts
    as (1, E).

    Raises ValueError if the lengths of the vectors differ.
    """
    (left, _), (right, _) = _pair(a, b)
    result = np.zeros((len(left), len(right)), np.result_type(left.values, right.values))
    for i, i_end in _blocks(len(left), left.width):
        for j, j_end in _blocks(len(right), right.width):
            dense = _dense(left.rows(i, i_end), right.rows(j, j_end))
            result[i:i_end, j:j_end] = similarity.similarity(name, *dense)
    return result


def similarities_pairwise(name: str, a: Any, b: Any) -> np.ndarray:
    """(B,), the similarity of each vector of `a` to the vector of `b` in the same row. A single vector
    (E,) is compared with every row; two single vectors give a result without dimensions.

    Raises ValueError if the numbers of rows or the lengths of the vectors differ.
    """
    (left, left_single), (right, right_single) = _pair(a, b)
    rows = {len(vectors) for vectors in (left, right)} - {1} or {1}
    if len(rows) > 1:
        raise ValueError(f"there are {len(left)} and {len(right)} vectors: expected equal numbers")
    count = rows.pop()
    result = np.zeros(count, np.result_type(left.values, right.values))
    for i, end in _blocks(count, left.width):
        parts = [vectors if len(vectors) == 1 else vectors.rows(i, end) for vectors in (left, right)]
        result[i:end] = similarity.similarity_pairwise(name, *_dense(*parts))
    return result[0] if left_single and right_single else result


def intersection(a: Any, b: Any) -> tuple[SparseVectors, bool]:
    """The products of the vector `a` (E,) and each vector of `b` that are above 0, and whether `b` is
    a single vector.

    Raises ValueError if `a` has several vectors, or if the lengths of the vectors differ.
    """
    (left, _), (right, single) = _pair(a, b)
    if len(left) != 1:
        raise ValueError(f"embeddings_1 has {len(left)} vectors: expected one")
    weights = np.zeros(left.width, left.values.dtype)
    weights[left.indices] = left.values
    products = weights[right.indices] * right.values
    kept = products > 0
    counts = np.bincount(right.row_numbers()[kept], minlength=len(right))
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    return SparseVectors(offsets, right.indices[kept], products[kept], right.width), single

"""Vectors in fewer bits."""

from __future__ import annotations

import logging
from typing import Any, get_args

import numpy as np

from ._arguments import as_array
from .types import Precision

logger = logging.getLogger("encodle")

PRECISIONS = get_args(Precision)


def quantize_embeddings(
    embeddings: Any,
    precision: Precision,
    ranges: Any = None,
    calibration_embeddings: Any = None,
) -> np.ndarray:
    """Quantises vectors as `sentence_transformers.quantize_embeddings` does.

    embeddings: (B, E) or (E,) floats
    precision: "int8" and "uint8" divide the range of each dimension into 255 steps; "binary" and
        "ubinary" keep the sign of each value, 8 values in a byte
    ranges: (2, E), the minimum and the maximum of each dimension, for int8 and uint8; by default
        those of `calibration_embeddings`, (C, E) floats, or else of `embeddings`

    Returns an array of the shape of `embeddings`, of float32, int8 ("int8", "binary") or uint8
    ("uint8", "ubinary"); the last axis is ⌈E / 8⌉ for "binary" and "ubinary".

    Raises ValueError for an unknown precision and, with int8 or uint8, for a single vector without
    `ranges` and `calibration_embeddings`, and for an array of a shape other than those above;
    TypeError for vectors that are quantised already.

    >>> quantize_embeddings(np.array([[0.1, -0.2, 0.3]]), "ubinary").tolist()  # bits 101
    [[160]]
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision {precision!r} is unknown: expected one of {PRECISIONS}")
    values = _floats("embeddings", embeddings)
    if precision == "float32":
        return values.astype(np.float32)
    if precision in ("binary", "ubinary"):
        bits = np.packbits(values > 0, axis=-1)
        return np.asarray(bits if precision == "ubinary" else (bits - 128).astype(np.int8))
    if values.ndim not in (1, 2):
        raise ValueError(f"embeddings have the shape {values.shape}: expected (B, E) or (E,)")
    if len(values) == 0:
        return np.zeros(values.shape, dtype=precision)
    if ranges is None:
        ranges = _ranges(values, precision, calibration_embeddings)
    limits = as_array(ranges).astype(np.float32)
    if limits.shape != (2, values.shape[-1]):
        raise ValueError(
            f"ranges have the shape {limits.shape}: expected (2, {values.shape[-1]}), the minimum and "
            "the maximum of each dimension"
        )
    lowest, highest = limits
    steps = (highest - lowest) / 255
    steps = np.where(steps == 0, 1, steps)
    levels: np.ndarray = np.clip(np.floor((values - lowest) / steps), 0, 255)
    return levels.astype(np.uint8) if precision == "uint8" else (levels - 128).astype(np.int8)


def _floats(argument: str, vectors: Any) -> np.ndarray:
    values = as_array(vectors)
    if values.dtype in (np.int8, np.uint8):
        raise TypeError(
            f"{argument} have dtype {values.dtype}: expected floats, not quantised vectors"
        )
    return values


def _ranges(values: np.ndarray, precision: str, calibration: Any) -> np.ndarray:
    if calibration is not None:
        calibration = _floats("calibration_embeddings", calibration)
        if calibration.ndim != 2 or calibration.shape[1] != values.shape[-1] or not len(calibration):
            raise ValueError(
                f"calibration_embeddings have the shape {calibration.shape}: expected "
                f"(C, {values.shape[-1]}) with C > 0"
            )
    else:
        if values.ndim == 1 or len(values) == 1:
            raise ValueError(
                f"the ranges for {precision} cannot be computed from a single vector: expected "
                "several vectors; call quantize_embeddings with ranges or calibration_embeddings"
            )
        if len(values) < 100:
            logger.warning(
                "%s ranges are computed from %d vectors: expected 100 or more for stable ranges",
                precision,
                len(values),
            )
        calibration = values
    return np.vstack((np.min(calibration, axis=0), np.max(calibration, axis=0)))

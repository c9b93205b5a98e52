"""Embeds files of records into files of vectors."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Literal

from . import _arguments, _encodle
from .sentence_transformer import SentenceTransformer
from .types import LongTexts, ModelPrecision

logger = logging.getLogger("encodle")

InputFormat = Literal["lines", "jsonl", "csv", "tsv", "parquet", "arrow"]
OutputFormat = Literal["jsonl", "npy", "parquet", "arrow"]


@dataclass(frozen=True)
class EmbedSummary:
    """The outcome of `embed_file`.

    read: the number of records that were read, including invalid ones and those of an interrupted
        run
    written: the number of vectors that were written, including those of an interrupted run
    truncated_texts: the number of texts that this run truncated
    repeated_texts: the number of texts whose vectors are those of an equal text before them, so that
        this run did not compute them
    skipped: the messages of the invalid records that this run skipped
    warnings: messages about values that this run changed or left out: numbers and
        booleans written as text, NaN and infinity written as null, blank lines
    """

    read: int
    written: int
    truncated_texts: int
    repeated_texts: int
    skipped: list[str]
    warnings: list[str]


def embed_file(
    input: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    model: str | os.PathLike[str] | SentenceTransformer | None = None,
    field: str | None = None,
    input_format: InputFormat | None = None,
    output_format: OutputFormat | None = None,
    output_dtype: Literal["f32", "f16"] = "f32",
    prompt_name: str | None = None,
    prompt: str | None = None,
    long_texts: LongTexts = "truncate",
    resume: bool = False,
    on_error: Literal["raise", "skip"] = "raise",
    show_progress_bar: bool = False,
    precision: ModelPrecision = "f32",
    threads: int | None = None,
) -> EmbedSummary:
    """Embeds a file of any size in constant memory, as the command `encodle embed` does.

    Only the messages of skipped records stay in memory.

    input: text lines, JSONL, CSV, TSV, Parquet or Arrow, by the extension or `input_format`
    output: Parquet, Arrow or JSONL with all fields of the records, or .npy with the vectors only.
        It is written under a temporary name and renamed when it is complete
    model: a SentenceTransformer, whose `truncate_dim` must be that of the model's files; or the
        first argument of a SentenceTransformer, which is then opened with `precision` and `threads`
    field: the name of the field with the text, "text" by default
    resume: continue an interrupted run with the same output and settings; the output has the same
        bytes as that of an uninterrupted run. If there is no such run, a new one starts
    on_error: "raise" raises EncodleError for the first invalid record; "skip" leaves invalid records
        out, warns of each in the logger "encodle", and lists their messages in the summary

    The `warnings` of the summary are also written to the logger "encodle".

    Ctrl-C raises KeyboardInterrupt; the vectors so far are kept for `resume`. The interrupted run
    ends after its current batch; a call in the same process with the same `output` waits for its
    end.

    Raises EncodleError if the run fails, for example because the input cannot be read; ValueError
    for an unknown value of an argument, for a SentenceTransformer with another `truncate_dim` than
    the model's files, and for `precision` or `threads` together with a SentenceTransformer.
    """
    if on_error not in ("raise", "skip"):
        raise ValueError(f'on_error {on_error!r} is unknown: expected "raise" or "skip"')
    if not isinstance(model, SentenceTransformer):
        model = SentenceTransformer(model, precision=precision, threads=threads)
    elif precision != "f32" or threads is not None:
        raise ValueError(
            "precision and threads belong to the model: pass them to SentenceTransformer"
        )
    native = model._native
    if native.dimension(model.truncate_dim) != native.dimension(native.truncate_dim):
        raise ValueError(
            f"truncate_dim of the model is {model.truncate_dim}: expected {native.truncate_dim}, the "
            "value in the model's files; embed_file cannot truncate to another length"
        )
    with _arguments.Progress(0, show_progress_bar, "records") as progress:
        read, written, truncated, repeated, skipped, warnings = _encodle.embed_file(
            native,
            _arguments.path_text("input", input),
            _arguments.path_text("output", output),
            input_format,
            output_format,
            field,
            output_dtype,
            model._resolve_prompt(prompt, prompt_name),
            long_texts,
            bool(resume),
            on_error == "skip",
            model._description(),
            lambda record: logger.warning("%s; skipped", record),
            progress.callback,
        )
    for warning in warnings:
        logger.warning("%s", warning)
    return EmbedSummary(read, written, truncated, repeated, skipped, warnings)

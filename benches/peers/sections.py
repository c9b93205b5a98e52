"""The sections of the benchmark: their cases and systems."""

from dataclasses import dataclass

import cases


@dataclass(frozen=True)
class Section:
    title: str
    model: str
    cases: tuple[str, ...]
    systems: tuple[str, ...]
    reference: str  # the system whose outputs the others are compared with
    difference: float = 0.0  # maximum difference from the reference in f32


F32 = (
    "ours-f32",
    "candle-f32",
    "torch-f32",
    "torch-compile-f32",
    "ort-f32",
    "ort-optimized-f32",
    "openvino-f32",
    "ctranslate2-f32",
)
REDUCED = (
    "ours-bf16",
    "torch-bf16",
    "openvino-bf16",
    "ours-int8",
    "torch-int8",
    "ort-int8",
    "openvino-int8",
    "ctranslate2-int8",
)
EMBEDDED = (
    "ours-f32",
    "sentence-transformers-f32",
    "ort-f32",
    "ort-optimized-f32",
    "openvino-f32",
    "ctranslate2-f32",
    "ours-bf16",
    "openvino-bf16",
    "ours-int8",
    "ort-int8",
    "openvino-int8",
    "ctranslate2-int8",
)
ENCODER = (
    "ours-f32",
    "torch-f32",
    "torch-compile-f32",
    "ort-f32",
    "openvino-f32",
    "ours-bf16",
    "torch-bf16",
    "openvino-bf16",
)
SCALED = tuple(f"{n} sentences" for n in (64, 256, 1024, 4096))

SECTIONS = {
    "bert-base": Section(
        "BERT-base, f32", "bert-base", ("1×128", "8×128", "1×512"), F32, "torch-f32", 1e-4
    ),
    "mixed": Section(
        "BERT-base: 64 sequences of 7 to 84 tokens",
        "bert-base",
        ("mixed",),
        (*F32, *REDUCED),
        "torch-f32",
        1e-4,
    ),
    "sentences": Section(
        "all-MiniLM-L6-v2: 1,000 sentences, from text to normalised vectors",
        "minilm",
        ("1000 sentences",),
        EMBEDDED,
        "sentence-transformers-f32",
        1e-5,
    ),
    "reduced": Section(
        "BERT-base, bf16 and int8",
        "bert-base",
        ("1×128", "8×128", "1×512"),
        ("ours-f32", *REDUCED),
        "torch-f32",
        1e-4,
    ),
    "mpnet-base": Section(
        "MPNet-base, f32 and bf16", "mpnet-base", ("8×128", "1×512"), ENCODER, "torch-f32", 1e-4
    ),
    "modernbert-base": Section(
        "ModernBERT-base, f32 and bf16",
        "modernbert-base",
        ("8×128", "1×512"),
        ENCODER,
        "torch-f32",
        1e-4,
    ),
    "modernbert-long": Section(
        "ModernBERT-base, f32: 8,192 tokens",
        "modernbert-base",
        ("1×8192",),
        ("ours-f32", "torch-f32", "torch-compile-f32"),
        "torch-f32",
        1e-4,
    ),
    "xlm-r-base": Section(
        "XLM-R-base, f32 and bf16: 64 sequences of 7 to 84 tokens",
        "xlm-r-base",
        ("mixed",),
        ENCODER,
        "torch-f32",
        1e-4,
    ),
    "deberta-v3-base": Section(
        "DeBERTa-v3-base, f32 and bf16",
        "deberta-v3-base",
        ("8×128", "1×512"),
        ENCODER,
        "torch-f32",
        1e-4,
    ),
    "attention": Section(
        f"Attention alone, f32 and bf16: B = 1, H = {cases.HEADS}, D = {cases.HEAD_DIM}",
        "attention",
        tuple(map(str, cases.ATTENTION_LENGTHS)),
        ("ours-f32", "torch-attention-f32", "ours-bf16", "torch-attention-bf16"),
        "torch-attention-f32",
        1e-5,
    ),
    "cold-start": Section(
        "Cold start: one sentence, from the start of the process to its end",
        "minilm",
        (),
        ("ours-f32", "sentence-transformers-f32"),
        "sentence-transformers-f32",
        1e-5,
    ),
    "scaling": Section("Scaling", "", ("8×128", *SCALED), ("ours-f32",), ""),
}
COSINE = {"f16": 0.999, "bf16": 0.999, "int8": 0.9}  # minimum mean cosine

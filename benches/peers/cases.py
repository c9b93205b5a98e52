"""The inputs of the benchmarks: the same for every system.

A case is a list of token sequences (encoders with random weights), a list of sentences (MiniLM), or
q, k and v of one attention. B is the batch size, T the length, S the length of the queries and keys
of one attention, H the number of heads, D the head size.
"""

import ast
import hashlib
import json
import re
import sysconfig
from pathlib import Path

import numpy as np

SEED = 20260
VOCABULARY = 30_522
CLS, SEP, FIRST_WORD = 101, 102, 1000
HEADS, HEAD_DIM = 12, 64
ATTENTION_LENGTHS = [512, 2048, 8192]
# The length of the call before a memory measurement, so that the memory that a library allocates at
# its first call is not attributed to a case.
ATTENTION_WARM_UP = 128
SENTENCE_COUNTS = [64, 256, 1000, 1024, 4096]
SENTENCE = re.compile(r"[A-Z][\w ,;:'\"()/.-]*[.!?]")


def sequences(b: int, t: int) -> list[list[int]]:
    """B sequences of T tokens."""
    return of_lengths([t] * b)


def of_lengths(lengths: list[int]) -> list[list[int]]:
    rng = np.random.default_rng([SEED, *lengths])
    words = [rng.integers(FIRST_WORD, VOCABULARY, n - 2).tolist() for n in lengths]
    return [[CLS, *sequence, SEP] for sequence in words]


def mixed() -> list[list[int]]:
    """64 sequences of 7 to 84 tokens, 27 on average, with log-normal lengths, like those of sentences."""
    lengths = np.random.default_rng(SEED).lognormal(np.log(24), 0.55, 64)
    return of_lengths(np.clip(lengths.round().astype(int), 6, 128).tolist())


def hidden_states() -> dict[str, list[list[int]]]:
    """The cases of encoders with random weights."""
    return {
        "1×128": sequences(1, 128),
        "8×128": sequences(8, 128),
        "1×512": sequences(1, 512),
        "1×8192": sequences(1, 8192),
        "mixed": mixed(),
    }


def sentences() -> list[str]:
    """Sentences from the docstrings of Python's standard library.

    Distinct sentences of 50 to 250 characters that have only words and punctuation, shuffled.
    """
    library = Path(sysconfig.get_path("stdlib"))
    found: dict[str, None] = {}
    for path in sorted(library.rglob("*.py")):
        if not {"site-packages", "test", "tests", "lib2to3"} & set(path.parts):
            for text in docstrings(path):
                found |= dict.fromkeys(filter(is_sentence, split(text)))
    order = np.random.default_rng(SEED).permutation(len(found))
    texts = list(found)
    return [texts[i] for i in order[: max(SENTENCE_COUNTS)]]


def docstrings(path: Path) -> list[str]:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = ast.walk(ast.parse(path.read_bytes()))
    return [ast.get_docstring(node) or "" for node in nodes if isinstance(node, documented)]


def split(text: str) -> list[str]:
    paragraphs = [" ".join(p.split()) for p in re.split(r"\n\s*\n", text)]
    return [s for p in paragraphs for s in re.split(r"(?<=[.!?])\s+(?=[A-Z])", p)]


def is_sentence(text: str) -> bool:
    return 50 <= len(text) <= 250 and text.count(" ") >= 5 and bool(SENTENCE.fullmatch(text))


def embeddings() -> dict[str, list[str]]:
    """The cases of MiniLM."""
    texts = sentences()
    return {f"{n} sentences": texts[:n] for n in SENTENCE_COUNTS}


def fingerprint(texts: list[str]) -> str:
    """A hash of the sentences, to check that two machines embedded the same ones."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]


def attention(s: int) -> dict[str, np.ndarray]:
    """q, k and v `(1, H, S, D)` of standard normals."""
    rng = np.random.default_rng([SEED, s])
    shape = (1, HEADS, s, HEAD_DIM)
    return {name: rng.standard_normal(shape, np.float32) for name in "qkv"}


def operations(model: str, folder: Path) -> dict[str, int]:
    """The operations of the matrix products of each case, without padding: a multiply-add is two.
    Empty for models other than `bert-base` and `attention`."""
    if model == "attention":
        return {str(s): 4 * s * s * HEADS * HEAD_DIM for s in ATTENTION_LENGTHS}
    if model != "bert-base":
        return {}
    config = json.loads((folder / "hf/config.json").read_text())
    width, layers = config["hidden_size"], config["num_hidden_layers"]
    weights = width * (4 * width + 2 * config["intermediate_size"])

    def of(sequences: list[list[int]]) -> int:
        return sum(layers * (2 * weights * t + 4 * t * t * width) for t in map(len, sequences))

    return {name: of(sequences) for name, sequences in hidden_states().items()}


def padded(sequences: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Ids and mask `(B, T)` of i64; 1 = a token, 0 = padding."""
    lengths = np.array([len(sequence) for sequence in sequences])
    mask = np.arange(lengths.max()) < lengths[:, None]
    ids = np.zeros(mask.shape, np.int64)
    ids[mask] = np.concatenate(sequences)
    return ids, mask.astype(np.int64)


def batches(lengths: list[int], size: int = 32) -> list[list[int]]:
    """Indices in batches of similar length, which keeps padding small."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    return [order[i : i + size] for i in range(0, len(order), size)]

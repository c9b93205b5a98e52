"""Compares `encodle` with transformers, sentence-transformers and pyarrow on random cases.

    cargo build --release
    pip install -r tests/golden/requirements.txt pyarrow
    python tests/oracle.py [--program target/release/encodle] [--cases 1000] [--seed 0]

A case creates a small random model or file, runs `encodle` on it and computes the same in Python. The
seed of a case determines it completely: `--only 123` repeats case 123. There are four kinds of
cases, which alternate with the seed: embeddings, tokenizers, heads, tables. `--kind` selects one of
them. `--keep DIR` keeps the files of the cases and prints their command lines.

Each case ends in one of four ways:

    agreed      tokens and table data are equal, numbers differ by at most a tolerance
    both fail   Python raises an error and `encodle` reports one
    refused     the case has a setting of REFUSALS, and the error of `encodle` names the setting
    disagreed   anything else: other values, missing data, another error, a panic, a timeout

The output is a line for each case that disagreed and a table of the counts. The exit code is 1 if a
case disagreed.
"""

import argparse
import csv
import gzip
import itertools
import json
import logging
import os
import random
import re
import shlex
import shutil
import string
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import torch
import transformers
from safetensors.torch import save_file
from sentence_transformers import CrossEncoder, SentenceTransformer
from torch import nn
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    BertTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    pipeline,
)

TIMEOUT = 60  # seconds for one run of `encodle`
RAW = 2e-5  # the tolerance of logits, hidden states and vectors of any length
UNIT = 2e-6  # the tolerance of probabilities and vectors of length 1
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

# Settings that `encodle` may refuse, each with a pattern that the error must match. A case with such a
# setting also agrees if `encodle` accepts the setting and computes the same values.
REFUSALS = {
    "config.json: position_embedding_type": r"config\.json.*position_embedding_type",
    "config.json: pruned_heads": r"config\.json.*pruned_heads",
    "Dense: an activation that is not of torch.nn": r"Dense/config\.json.*activation_function",
    "Dense: an activation that is not implemented": r"Dense/config\.json.*activation_function",
    "Dense: another input": r"Dense/config\.json.*input",
    "sentence_bert_config.json: add_special_tokens": r"sentence_bert_config\.json.*processing_kwargs",
    "sentence_bert_config.json: query_length": r"sentence_bert_config\.json.*query_length",
    "sentence_bert_config.json: processor_kwargs": r"sentence_bert_config\.json.*processor_kwargs",
    "tokenizer_class of other word pieces": r"tokenizer_config\.json.*tokenizer_class",
    "activation_fn that is not of torch.nn": r"config\.json.*activation_f",
    "a mask beyond the maximum length": r"truncation would remove \d+ of its mask tokens",
    "a column named embedding": r'"embedding"',
    "objects beside numbers": r'"mixed"',
}


class Failed(Exception):
    """`encodle` reported an error."""


class Disagreement(Exception):
    """`encodle` and Python differ."""

    def __init__(self, expected: Any, got: Any) -> None:
        super().__init__(f"expected {short(expected)}, got {short(got)}")


def short(value: Any) -> str:
    """A value in one line of at most 300 characters."""
    text = " ".join((value if isinstance(value, str) else repr(value)).split())
    return text if len(text) <= 300 else f"{text[:300]}…"


@dataclass
class Case:
    """One case: its random numbers, its folder and the runs of `encodle` on it."""

    seed: int
    folder: Path
    program: Path
    table_model: Path  # the sentence-transformers folder for the cases of tables
    rng: random.Random = field(init=False)
    refusable: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        torch.manual_seed(self.seed)

    def maybe(self, probability: float) -> bool:
        return self.rng.random() < probability

    def pick(self, options: Any) -> Any:
        return self.rng.choice(list(options))

    def some(self, options: Any, least: int, most: int) -> list[Any]:
        """Different options, in random order."""
        options = list(options)
        return self.rng.sample(options, min(len(options), self.rng.randint(least, most)))

    def note_refusable(self, setting: str) -> None:
        """Records that the case has a setting of REFUSALS."""
        assert setting in REFUSALS, setting
        self.refusable.append(setting)

    def run(self, *arguments: object) -> str:
        """Runs `encodle`; returns its stdout."""
        command = [str(argument) for argument in (self.program, *arguments)]
        self.log.append(shlex.join(command))
        null = subprocess.DEVNULL
        try:
            done = subprocess.run(command, stdin=null, capture_output=True, timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            raise Disagreement("an exit", f"no exit within {TIMEOUT} seconds") from None
        error = done.stderr.decode(errors="replace").strip()
        if done.returncode not in (0, 1) or "panicked at" in error:
            raise Disagreement("exit code 0 or 1", f"exit code {done.returncode}: {error}")
        if done.returncode == 1:
            raise Failed(error)
        return done.stdout.decode()

    def run_lines(self, *arguments: object) -> list[Any]:
        """Runs `encodle`; returns the JSON lines of its stdout."""
        return [json.loads(line) for line in lines_of(self.run(*arguments))]


def lines_of(text: str) -> list[str]:
    r"""Splits at \n only: str.splitlines also splits at characters that JSON strings may contain."""
    return text.removesuffix("\n").split("\n") if text else []


def settle(
    case: Case,
    oracle: Callable[[], Any],
    program: Callable[[], Any],
    compare: Callable[[Any, Any], None],
) -> str:
    """Runs both sides; returns the outcome. `compare` raises Disagreement if the results differ."""
    expected, failure = None, None
    try:
        expected = oracle()
    except Exception as error:  # any error of a library, for a setting that it does not support
        failure = error
        case.log.append(f"Python: {short(error)}")
    try:
        got = program()
    except Failed as error:
        case.log.append(str(error))
        if any(re.search(REFUSALS[setting], str(error)) for setting in case.refusable):
            return "refused"
        if failure is not None:
            return "both fail"
        raise Disagreement(expected, str(error)) from None
    if failure is not None:
        raise Disagreement(f"{type(failure).__name__}: {failure}", got)
    compare(expected, got)
    return "agreed"


def check_equal(expected: Any, got: Any) -> None:
    if expected != got:
        raise Disagreement(expected, got)


def check_close(expected: Any, got: Any, tolerance: float) -> None:
    """Compares arrays; the tolerance is relative for values above 1."""
    expected, got = np.asarray(expected, np.float64), np.asarray(got, np.float64)
    check_equal(expected.shape, got.shape)
    difference = np.abs(expected - got) / np.maximum(1, np.abs(expected))
    if not (difference <= tolerance).all():
        first = [array.ravel()[:6].round(6).tolist() for array in (expected, got)]
        raise Disagreement(first[0], f"{first[1]}, which differ by up to {difference.max():.2g}")


def check_ranking(
    expected: list[tuple[Any, float]], got: list[tuple[Any, float]], top: int, tolerance: float
) -> None:
    """Compares `got` with the best `top` of `expected`; keys of equal score may be in any order."""
    best = sorted((score for _, score in expected), reverse=True)[:top]
    check_close(best, [score for _, score in got], tolerance)
    rest = list(expected)
    for key, score in got:
        same = [i for i, (k, s) in enumerate(rest) if key == k and abs(score - s) <= tolerance * max(1, abs(s))]
        if not same:
            raise Disagreement(expected[:top], got)
        del rest[same[0]]


# Texts and tokenizers

WORDS = "the cat sat on mat bad cab fed face deal query document passage movie food bread".split()
ENDINGS = "##s ##ing ##ed ##é ##ab ##京 ##1".split()
OTHERS = "Café cafe naive É é ß straße Straße 東 京 日 本 語 ж и з н ь Cat The B C — … ½".split()
LETTERS = [*string.ascii_lowercase, *string.digits, *".,!?'-:;()[]#$"]
LETTERS += [f"##{letter}" for letter in string.ascii_lowercase]
POOL = list(dict.fromkeys([*LETTERS, *WORDS, *ENDINGS, *OTHERS]))

# Parts of texts. In PLAIN every token has the length of its part of the text, since transformers
# compares these lengths to find continuations of words.
PLAIN = "cats facing Bread CABBED café naïve ÅNGSTRÖM Straße 東京 日本語 жизнь 3.14 don't".split()
PLAIN += [*WORDS, "e-mail", "(x)", "a.b,c", "C++", "$5", "#1", "–", "q" * 101]
NASTY = "e\u0301te\u0301 İstanbul ﬁne 한글 हिन्दी ภาษา 🇩🇪 𠀀𠮷 \U000f0000 a\u200bb soft\u00adhyphen".split()
NASTY += ["\u00a0", "\u3000", "\t", "\x07", "\x7f", "\u200d", "\ufeff", "\ufffd", "\u2028", "\u0300"]
NASTY += ["👩\u200d👩\u200d👧", "   "]
NASTY += "## ##s -- [SEP] [MASK] [CLS] [UNK] [PAD] [sep] <s>".split()

KEYS = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
SQUARE = dict(zip(KEYS, "[PAD] [UNK] [CLS] [SEP] [MASK]".split()))
ANGLED = dict(zip(KEYS, "<pad> <unk> <s> </s> <mask>".split()))
ADDED = ["<e1>", "[NEW]", "new word", "Ünï", "xyz", "cat"]
FLAGS = ("lstrip", "rstrip", "single_word", "normalized")
SWITCHES = {
    "do_lower_case": [True, False],
    "strip_accents": [None, True, False],
    "tokenize_chinese_chars": [True, False],
}
LIMITS = {
    "model_max_length": [8, 12, 20, 512, int(1e30)],
    "truncation_side": ["left", "left", "right"],
    "padding_side": ["left"],
    "split_special_tokens": [True, True, False],
    "model_input_names": [["input_ids", "attention_mask"], BertTokenizer.model_input_names],
}


def any_text(case: Case, parts: list[str], longest: int = 8) -> str:
    """Random parts: usually a few, sometimes none, sometimes more than a model's maximum length."""
    size = case.rng.random()
    count = 0 if size < 0.08 else case.rng.randint(1, longest)
    if size > 0.85 and longest == 8:
        count = case.rng.randint(40, 90)
    gaps = case.pick([[" "], [" "], ["", " ", "  "]])
    return "".join(case.pick(parts) + case.pick(gaps) for _ in range(count))


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def any_tokenizer(case: Case, folder: Path, plain: bool = False) -> list[str]:
    """Writes a tokenizer; returns literals for its texts: the special tokens, then the added tokens.

    A plain tokenizer has the default special tokens and no added tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = ANGLED if not plain and case.maybe(0.2) else SQUARE
    pieces = [*names.values(), *case.some(POOL, 60, len(POOL))]
    if case.maybe(0.2):
        case.rng.shuffle(pieces)
    as_json = case.maybe(0.5)
    switches = {key: case.pick(values) for key, values in SWITCHES.items() if case.maybe(0.4)}
    config = {key: case.pick(values) for key, values in LIMITS.items() if case.maybe(0.25)}
    classes = ["BertTokenizer", "BertTokenizerFast", None, "PreTrainedTokenizerFast"]
    config["tokenizer_class"] = case.pick(classes if as_json else classes[:3])
    if not plain and not as_json and case.maybe(0.05):
        case.note_refusable("tokenizer_class of other word pieces")
        config["tokenizer_class"] = "BertJapaneseTokenizer"
    if not as_json or case.maybe(0.7):
        config |= switches
    special = name_special_tokens(case, names, config)
    added = [] if plain or case.maybe(0.6) else case.some(ADDED, 1, 3)
    baked = add_tokens(case, folder, pieces, added, config, special, as_json)
    if as_json:
        vocabulary = {piece: i for i, piece in enumerate(pieces)}
        tokenizer = BertTokenizer(vocabulary, **switches, **names).backend_tokenizer
        tokenizer.add_tokens(baked)
        if case.maybe(0.15):
            tokenizer.enable_truncation(9, direction=case.pick(["left", "right"]))
            tokenizer.enable_padding(length=11)
        tokenizer.save(str(folder / "tokenizer.json"))
    if not as_json or case.maybe(0.3):
        (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces))
    config = {key: value for key, value in config.items() if value is not None or key in SWITCHES}
    for name, content in {"tokenizer_config.json": config, "special_tokens_map.json": special}.items():
        if content:
            write_json(folder / name, content)
    return [*names.values(), *added]


def name_special_tokens(case: Case, names: dict[str, str], config: dict[str, Any]) -> dict[str, Any]:
    """Writes the names of the special tokens to `config`, or returns them for special_tokens_map.json;
    may do neither if they are the defaults of the class."""
    if config["tokenizer_class"] != "PreTrainedTokenizerFast" and names is SQUARE and case.maybe(0.5):
        return {}
    if case.maybe(0.3):
        return {key: {"content": name, **dict.fromkeys(FLAGS, False)} for key, name in names.items()}
    if case.maybe(0.3):
        return dict(names)
    config |= names
    return {}


def add_tokens(
    case: Case, folder: Path, pieces: list[str], added: list[str], config: dict[str, Any],
    special: dict[str, Any], as_json: bool,
) -> list[str]:  # fmt: skip
    """Writes the added tokens to one of the files; returns those that belong in tokenizer.json."""
    if not added:
        return []
    ids = {token: len(pieces) + i for i, token in enumerate(x for x in added if x not in pieces)}
    layouts = ["additional_special_tokens", "extra_special_tokens", "special_tokens_map.json"]
    layouts.append("tokenizer.json" if as_json else "added_tokens.json")
    layout = case.pick(layouts if special else [*layouts, "added_tokens_decoder"])
    if layout == "tokenizer.json":
        return added
    if layout == "added_tokens.json":
        write_json(folder / layout, ids)
        if case.maybe(0.5):
            config["additional_special_tokens"] = added[:1]
    elif layout == "added_tokens_decoder":
        flags = {flag: case.maybe(0.3) for flag in (*FLAGS, "special")}
        config[layout] = {str(i): {"content": token, **flags} for token, i in ids.items()}
    elif layout == "special_tokens_map.json":
        special["additional_special_tokens"] = added
    else:
        config[layout] = added
    return []


# Models


def load_tokenizer(folder: Path, positions: int) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a folder, with a maximum length of at most `positions` tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.model_max_length = min(tokenizer.model_max_length, positions)
    return tokenizer


def any_model(
    case: Case, model_class: type[PreTrainedModel], folder: Path, positions: int = 0, **more: Any
) -> BertConfig:
    """Writes a small model into its tokenizer's folder: config.json and the weights."""
    write_json(folder / "config.json", {"model_type": "bert"})
    heads = case.pick([1, 2, 4])
    config = BertConfig(
        vocab_size=len(load_tokenizer(folder, 0)),
        hidden_size=heads * case.pick([4, 8, 12]),
        num_hidden_layers=case.rng.randint(1, 3),
        num_attention_heads=heads,
        intermediate_size=case.pick([20, 32, 40]),
        max_position_embeddings=positions or case.rng.randint(24, 48),
        hidden_act=case.pick(["gelu", "gelu_new", "relu", "silu", "tanh"]),
        layer_norm_eps=case.pick([1e-12, 1e-12, 1e-5, 0.1]),
        **more,
    )
    any_weights(case, model_class(config), folder)
    return config


def any_weights(case: Case, model: PreTrainedModel, folder: Path) -> None:
    """Sets random weights, large enough for outputs far from uniform, and writes them in one of the
    file formats."""
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, mean=float("LayerNorm.weight" in name), std=0.3)
    dtype = case.pick([torch.float32, torch.float32, torch.float16, torch.bfloat16])
    prefix, left_out = "", ["cls.predictions.decoder."]  # tied to the word embeddings
    if isinstance(model, BertModel):
        prefix = case.pick(["", "bert."])
        left_out += ["pooler."] if case.maybe(0.5) else []
    state = {
        prefix + name: x.to(dtype)
        for name, x in model.state_dict().items()
        if not name.startswith(tuple(left_out))
    }
    if case.maybe(0.7):
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        torch.save(state, folder / "pytorch_model.bin")
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    config["dtype"] = str(dtype).removeprefix("torch.")
    if case.maybe(0.02):  # transformers 5 ignores these two
        refused = {"position_embedding_type": "relative_key", "pruned_heads": {"0": [0]}}
        key = case.pick(refused)
        case.note_refusable(f"config.json: {key}")
        config[key] = refused[key]
    write_json(folder / "config.json", config)


# Embeddings

CLASSES = {
    "Transformer": "sentence_transformers.base.modules.transformer.Transformer",
    "Pooling": "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
    "Dense": "sentence_transformers.base.modules.dense.Dense",
    "Normalize": "sentence_transformers.base.modules.normalize.Normalize",
}
MODES = {
    "cls": "cls_token",
    "max": "max_tokens",
    "mean": "mean_tokens",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean": "weightedmean_tokens",
    "lasttoken": "lasttoken",
}
ACTIVATIONS = [f"torch.nn.modules.activation.{x}" for x in "Sigmoid Tanh ReLU GELU SiLU Mish".split()]
ACTIVATIONS.append("torch.nn.modules.linear.Identity")
PROMPTS = {"query": "query: ", "document": "passage: ", "topic": "The Topic - ", "none": ""}
LOADING = {"device": "cpu", "model_kwargs": {"dtype": torch.float32}, "local_files_only": True}


def embeddings(case: Case) -> str:
    folder = case.folder / "model"
    literals, normal, prompts = sentence_folder(case, folder)
    texts = [any_text(case, [*PLAIN, *NASTY, *literals]) for _ in range(case.rng.randint(1, 5))]
    unknown = ["topic"] if case.maybe(0.1) else []
    name = case.pick([None, None, "query", "document", *prompts, *prompts, *unknown])

    def oracle() -> np.ndarray:
        model = SentenceTransformer(str(folder), **LOADING)
        encode = {"query": model.encode_query, "document": model.encode_document}.get(name, model.encode)
        more = {} if name in (None, "query", "document") else {"prompt_name": name}
        return encode(texts, batch_size=1, **more)

    def program() -> Any:
        embed = ["embed", "--model", folder, *([f"--prompt-name={name}"] if name else [])]
        if case.maybe(0.7):
            lines = case.run_lines(*embed, "--format", "jsonl", "--", *texts)
            check_equal(texts, [line["text"] for line in lines])
            return [line["embedding"] for line in lines]
        source, output = case.folder / "in.jsonl", case.folder / "out.npy"
        source.write_text("".join(json.dumps({"f": text}) + "\n" for text in texts))
        case.run(*embed, "--input", source, "--field", "f", "--output", output)
        return np.load(output)

    return settle(case, oracle, program, lambda a, b: check_close(a, b, UNIT if normal else RAW))


def sentence_folder(case: Case, folder: Path) -> tuple[list[str], bool, list[str]]:
    """Writes a sentence-transformers folder; returns literals for its texts, whether its vectors have
    length 1, and the names of its prompts."""
    path = case.pick(["", "", "0_Transformer"])
    literals = any_tokenizer(case, folder / path)
    config = any_model(case, BertModel, folder / path)
    any_sentence_config(case, folder / path, config.max_position_embeddings)
    width = any_pooling(case, folder / "1_Pooling", config.hidden_size)
    modules = [("Transformer", path), ("Pooling", "1_Pooling")]
    for i in range(2, 2 + case.pick([0, 1, 1, 2, 3])):
        name = case.pick(["Normalize", "Dense"])
        modules.append((name, f"{i}_{name}"))
        width = any_dense(case, folder / f"{i}_Dense", width) if name == "Dense" else width
    old = {name: f"sentence_transformers.models.{name}" for name in CLASSES}
    classes = old if case.maybe(0.4) else CLASSES
    entries = [
        {"idx": i, "name": str(i), "path": at, "type": classes[name]}
        for i, (name, at) in enumerate(modules)
    ]
    write_json(folder / "modules.json", entries)
    return literals, modules[-1][0] == "Normalize", any_prompts(case, folder, width)


def any_sentence_config(case: Case, folder: Path, positions: int) -> None:
    """Writes sentence_bert_config.json in the layout of an old or a new version, or no file."""
    length = case.rng.randint(5, positions)
    layout = case.pick(["none", "old", "old", "new", "new"])
    config: dict[str, Any] = {}
    if layout == "old":
        config = {"max_seq_length": case.pick([length, None]), "do_lower_case": case.maybe(0.3)}
    elif layout == "new":
        modality = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
        config = {"transformer_task": "feature-extraction", "modality_config": modality}
        config["module_output_name"] = "token_embeddings"
        if case.maybe(0.6):
            config["processing_kwargs"] = {"text": {"max_length": length, "truncation": True}}
    elif case.maybe(0.2):
        rare = {
            "add_special_tokens": {"processing_kwargs": {"text": {"add_special_tokens": False}}},
            "query_length": {"query_length": length},
            "processor_kwargs": {"processor_kwargs": {"model_max_length": length}},
        }
        key = case.pick(rare)
        case.note_refusable(f"sentence_bert_config.json: {key}")
        config = rare[key]
    if config:
        write_json(folder / "sentence_bert_config.json", config)


def any_pooling(case: Case, folder: Path, width: int) -> int:
    """Writes a Pooling module; returns the width of its vectors."""
    chosen = ["mean"] if case.maybe(0.4) else case.some(MODES, 1, 2)
    modes = [mode for mode in MODES if mode in chosen]
    config: dict[str, Any] = {"embedding_dimension": width}
    config["pooling_mode"] = modes if len(modes) > 1 else modes[0]
    if case.maybe(0.5):
        active = [] if modes == ["mean"] and case.maybe(0.3) else modes  # no active mode means mean
        config = {f"pooling_mode_{key}": mode in active for mode, key in MODES.items()}
        config["word_embedding_dimension"] = width
    if case.maybe(0.4):
        config["include_prompt"] = case.maybe(0.4)
    write_json(folder / "config.json", config)
    return width * len(modes)


def any_dense(case: Case, folder: Path, width: int) -> int:
    """Writes a Dense module; returns the width of its vectors."""
    out = case.pick([width, 6, 10])
    config: dict[str, Any] = {"in_features": width, "out_features": out, "bias": case.maybe(0.7)}
    if case.maybe(0.8):
        config["activation_function"] = case.pick(ACTIVATIONS)
    if case.maybe(0.5):
        config |= dict.fromkeys(["module_input_name", "module_output_name"], "sentence_embedding")
    if case.maybe(0.3):
        config["use_residual"] = True
    if case.maybe(0.06):
        refused = {
            "an activation that is not of torch.nn": {"activation_function": "mine.Tanh"},
            "an activation that is not implemented": {"activation_function": "torch.nn.ELU"},
            "another input": {"module_input_name": "token_embeddings", "module_output_name": "x"},
        }
        setting = case.pick(refused)
        case.note_refusable(f"Dense: {setting}")
        config |= refused[setting]
    state = {"linear.weight": torch.randn(out, width) / width**0.5}
    if config["bias"]:
        state["linear.bias"] = torch.randn(out) / 4
    if "use_residual" in config and out != width:
        state["residual.weight"] = torch.randn(out, width) / width**0.5
    write_json(folder / "config.json", config)
    save_file(state, folder / "model.safetensors")
    return out


def any_prompts(case: Case, folder: Path, width: int) -> list[str]:
    """Writes config_sentence_transformers.json, or no file; returns the names of its prompts."""
    if case.maybe(0.2):
        return []
    config: dict[str, Any] = {"__version__": {"sentence_transformers": "6.2.0"}, "prompts": {}}
    if case.maybe(0.7):
        config["prompts"] = {name: PROMPTS[name] for name in case.some(PROMPTS, 2, 4)}
        if case.maybe(0.1):
            config["prompts"]["query"] = None
        config["default_prompt_name"] = case.pick([None, *config["prompts"]])
    if case.maybe(0.2):
        config["truncate_dim"] = case.rng.randint(3, width + 1)
    write_json(folder / "config_sentence_transformers.json", config)
    return list(config["prompts"])


# Tokenizers


def tokenizers(case: Case) -> str:
    folder = case.folder / "model"
    literals = any_tokenizer(case, folder)
    config = any_model(case, BertModel, folder)
    text = any_text(case, [*PLAIN, *NASTY, *literals, *literals])
    pair = any_text(case, [*PLAIN, *NASTY, *literals]) if case.maybe(0.4) else None

    def oracle() -> tuple[list[str], np.ndarray]:
        tokenizer = load_tokenizer(folder, config.max_position_embeddings)
        texts = [[text]] if pair is None else [[text], [pair]]
        inputs = tokenizer(*texts, truncation=True, return_tensors="pt")
        model = BertModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
        out = model.eval()(**inputs, output_attentions=True)
        tokens = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0].tolist())
        return tokens, torch.cat(out.attentions).numpy()

    def program() -> tuple[list[str], list[Any]]:
        output = case.folder / "attention.json"
        second = [] if pair is None else [f"--pair={pair}"]
        case.run("attention", "--model", folder, "--output", output, *second, "--", text)
        found = json.loads(output.read_text())
        return found["tokens"], found["weights"]

    def compare(expected: tuple[list[str], np.ndarray], got: tuple[list[str], list[Any]]) -> None:
        check_equal(expected[0], got[0])
        check_close(expected[1], got[1], RAW)

    return settle(case, oracle, program, compare)


# Heads

LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "LABEL_0", "", "é è", "a-b-c", "true", "B-", '"x"']


def heads(case: Case) -> str:
    return case.pick([classify, rerank, rerank, tag, answer, fill_mask])(case)


def head_pipeline(task: str, folder: Path, tokenizer: PreTrainedTokenizerBase) -> transformers.Pipeline:
    return pipeline(task, str(folder), tokenizer=tokenizer, device="cpu", dtype=torch.float32)


def classify(case: Case) -> str:
    folder, labels = case.folder / "model", case.some(LABELS, 1, 4)
    problems = [None, "multi_label_classification", "regression"]
    problems += ["single_label_classification"] if len(labels) > 1 else []
    more = {"id2label": dict(enumerate(labels)), "problem_type": case.pick(problems)}
    literals = any_tokenizer(case, folder, plain=True)
    config = any_model(case, BertForSequenceClassification, folder, **more)
    texts = [any_text(case, [*PLAIN, *NASTY, *literals]) for _ in range(case.rng.randint(1, 4))]

    def oracle() -> list[dict[str, float]]:
        tokenizer = load_tokenizer(folder, config.max_position_embeddings)
        model = head_pipeline("text-classification", folder, tokenizer)
        found = model(texts, top_k=None, truncation=True)
        return [{x["label"]: x["score"] for x in scores} for scores in found]

    def compare(expected: list[dict[str, float]], got: list[dict[str, Any]]) -> None:
        check_equal(texts, [line["text"] for line in got])
        tolerance = RAW if config.problem_type == "regression" else UNIT
        for scores, line in zip(expected, got, strict=True):
            check_equal(labels, list(line["scores"]))
            check_close([scores[label] for label in labels], [*line["scores"].values()], tolerance)
            best = line["scores"][line["label"]]
            check_equal((best, best), (line["score"], max(line["scores"].values())))

    run = ["classify", "--model", folder, "--", *texts]
    return settle(case, oracle, lambda: case.run_lines(*run), compare)


def rerank(case: Case) -> str:
    folder, activation = case.folder / "model", case.pick([None, *ACTIVATIONS])
    more: dict[str, Any] = {"num_labels": 1 if case.maybe(0.95) else 2}
    modern = case.maybe(0.5)
    if activation is not None and not modern:
        if case.maybe(0.1):
            case.note_refusable("activation_fn that is not of torch.nn")
            activation = "mine.Sigmoid"
        old = {"sbert_ce_default_activation_function": activation}
        more |= case.pick([old, {"sentence_transformers": {"activation_fn": activation}}])
    parts = [*PLAIN, *NASTY, *any_tokenizer(case, folder, plain=True)]
    any_model(case, BertForSequenceClassification, folder, **more)
    if modern:
        cross_encoder_files(case, folder, activation)
    query = any_text(case, parts)
    documents = [any_text(case, parts) for _ in range(case.rng.randint(1, 5))]

    def oracle() -> list[tuple[int, float]]:
        found = CrossEncoder(str(folder), **LOADING).rank(query, documents, batch_size=1)
        return [(x["corpus_id"], x["score"]) for x in found]

    def program() -> list[tuple[int, float]]:
        lines = case.run_lines("rerank", "--model", folder, f"--query={query}", "--", *documents)
        for line in lines:
            check_equal(documents[line["document"] - 1], line["text"])
        return [(line["document"] - 1, line["score"]) for line in lines]

    return settle(case, oracle, program, lambda a, b: check_ranking(a, b, len(documents), RAW))


def cross_encoder_files(case: Case, folder: Path, activation: str | None) -> None:
    """Writes the files that sentence-transformers 6 adds to a cross-encoder."""
    entry = {"idx": 0, "name": "0", "path": "", "type": CLASSES["Transformer"]}
    write_json(folder / "modules.json", [entry])
    modality = {"text": {"method": "forward", "method_output_name": "logits"}}
    config: dict[str, Any] = {"transformer_task": "sequence-classification", "modality_config": modality}
    config["module_output_name"] = "scores"
    if case.maybe(0.3):
        config["processing_kwargs"] = {"text": {"max_length": case.rng.randint(8, 24)}}
    write_json(folder / "sentence_bert_config.json", config)
    config = {"model_type": "CrossEncoder"}
    if activation is not None:
        config["activation_fn"] = activation
    if case.maybe(0.5):
        config["prompts"] = {name: PROMPTS[name] for name in case.some(PROMPTS, 1, 3)}
        config["default_prompt_name"] = case.pick([None, *config["prompts"]])
    write_json(folder / "config_sentence_transformers.json", config)


def tag(case: Case) -> str:
    folder, labels = case.folder / "model", case.some(LABELS, 1, 6)
    any_tokenizer(case, folder, plain=True)
    any_model(case, BertForTokenClassification, folder, 300, id2label=dict(enumerate(labels)))
    tokenizer = load_tokenizer(folder, 300)
    text = shortened(tokenizer, any_text(case, PLAIN, 10), tokenizer.model_max_length - 2)
    join = case.pick(["none", "simple", "first", "average", "max"])

    def oracle() -> list[dict[str, Any]]:
        model = head_pipeline("token-classification", folder, tokenizer)
        key = "entity" if join == "none" else "entity_group"
        return [
            {"label": x[key], "score": float(x["score"]), "start": x["start"], "end": x["end"]}
            | {"text": text[x["start"] : x["end"]]}
            for x in model(text, aggregation_strategy=join)
        ]

    def compare(expected: list[dict[str, Any]], got: list[dict[str, Any]]) -> None:
        scores = [[entity.pop("score") for entity in entities] for entities in (expected, got)]
        check_equal(expected, got)
        check_close(*scores, UNIT)

    run = ["tag", "--model", folder, "--aggregation", join, "--", text]
    return settle(case, oracle, lambda: case.run_lines(*run)[0]["entities"], compare)


def shortened(tokenizer: PreTrainedTokenizerBase, text: str, room: int) -> str:
    """The beginning of a text, at most `room` tokens long."""
    while len(tokenizer(text, add_special_tokens=False)["input_ids"]) > room:
        text = text[: len(text) * 2 // 3]
    return text


def answer(case: Case) -> str:
    folder = case.folder / "model"
    any_tokenizer(case, folder, plain=True)
    any_model(case, BertForQuestionAnswering, folder, 300)
    tokenizer = load_tokenizer(folder, 300)
    room = (tokenizer.model_max_length - 3) // 2
    question, text = (shortened(tokenizer, any_text(case, [*PLAIN, *NASTY], 6), room) for _ in range(2))
    top = case.pick([1, 3, 1000])

    def compare(expected: tuple[dict[tuple[int, int], float], float], got: list[dict[str, Any]]) -> None:
        [line] = got
        check_close(expected[1], line["no_answer"], UNIT)
        found = [((x["start"], x["end"]), x["score"]) for x in line["answers"]]
        check_ranking([*expected[0].items()], found, top, UNIT)
        check_equal([text[start:end] for (start, end), _ in found], [x["text"] for x in line["answers"]])

    run = ["answer", "--model", folder, f"--question={question}", "--top", top, "--", text]
    return settle(case, lambda: answers(folder, question, text), lambda: case.run_lines(*run), compare)


def answers(folder: Path, question: str, text: str) -> tuple[dict[tuple[int, int], float], float]:
    """The probability of each span of at most 15 tokens, extended to whole words, and of no answer. The
    definition is that of encoder's `QuestionAnswerer`; the logits are those of transformers."""
    model = BertForQuestionAnswering.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoding = tokenizer([question], [text], return_tensors="pt", return_offsets_mapping=True)
    offsets = encoding.pop("offset_mapping")[0].tolist()
    out = model(**encoding)
    inside = [i for i, sequence in enumerate(encoding.sequence_ids(0)) if sequence == 1]
    excluded = torch.ones(len(offsets), dtype=torch.bool)
    excluded[[0, *inside]] = False  # position 0 is the score of no answer
    logits = (out.start_logits[0], out.end_logits[0])
    start, end = (x.masked_fill(excluded, float("-inf")).softmax(0) for x in logits)
    words = encoding.word_ids(0)
    found: dict[tuple[int, int], float] = {}
    for i in inside:
        for j in (j for j in inside if i <= j < i + 15):
            first = next(k for k in inside if words[k] == words[i])
            last = next(k for k in reversed(inside) if words[k] == words[j])
            span = (offsets[first][0], offsets[last][1])
            found[span] = max(found.get(span, 0), float(start[i] * end[j]))
    return found, float(start[0] * end[0])


def fill_mask(case: Case) -> str:
    folder, top = case.folder / "model", case.pick([1, 5, 20])
    literals = any_tokenizer(case, folder, plain=True)
    config = any_model(case, BertForMaskedLM, folder)
    text = any_text(case, [*PLAIN, *NASTY, *literals])
    text = text if case.maybe(0.1) else f"[MASK] {text}"
    tokenizer = load_tokenizer(folder, config.max_position_embeddings)
    ids = [tokenizer(text, truncation=cut)["input_ids"] for cut in (True, False)]
    if ids[0].count(tokenizer.mask_token_id) < ids[1].count(tokenizer.mask_token_id):
        case.note_refusable("a mask beyond the maximum length")

    def oracle() -> list[list[tuple[str, float]]]:
        options = {"top_k": config.vocab_size, "tokenizer_kwargs": {"truncation": True}}
        found = head_pipeline("fill-mask", folder, tokenizer)(text, **options)
        gaps = found if isinstance(found[0], list) else [found]
        return [[(x["token_str"], x["score"]) for x in gap] for gap in gaps]

    def compare(expected: list[list[tuple[str, float]]], got: list[dict[str, Any]]) -> None:
        for candidates, gap in zip(expected, got[0]["masks"], strict=True):
            check_ranking(candidates, [(x["token"], x["score"]) for x in gap], top, UNIT)

    run = ["fill-mask", "--model", folder, "--top", top, "--", text]
    return settle(case, oracle, lambda: case.run_lines(*run), compare)


# Tables


class Number(str):
    """A JSON number as written in the file."""


Rows = pa.Table | list[dict[str, Any]]


@dataclass
class Given:
    """An input file, the name of its text column, and the rows that the output should have."""

    path: Path
    text: str
    rows: Rows
    arguments: list[str] = field(default_factory=list)

    def texts(self) -> list[str]:
        if isinstance(self.rows, pa.Table):
            return self.rows[self.text].to_pylist()
        return [row[self.text] for row in self.rows]


STRINGS = "plain 😀 e\u0301é \uffff\U0010ffff \ufeff null 1.50 [1] '=1+1 a,b;c 𠀀𠮷\U0002a6d6".split()
STRINGS += ["", 'a "quote"', "back\\slash", "tab\t", "line\nline", "\u2028", "carriage\rreturn", "nul\0"]
STRINGS += [" padded "]
NAMES = ["id", "a b", "é", "x.y", "Text", "", "list", "_embedding", "日付", 'q"uote']
METADATA = {
    "pandas": '{"index_columns": [], "columns": []}',
    "huggingface": '{"info": {"features": {"text": {"dtype": "string"}}}}',
    "own key": "a value: é",
}


def tables(case: Case) -> str:
    inputs = [json_lines, json_lines, csv_rows, parquet_file, parquet_file, arrow_file]
    given = case.pick(inputs)(case)
    kind = case.pick(["jsonl", "parquet", "parquet", "arrow", "npy"])
    dtype = np.float16 if kind != "jsonl" and case.maybe(0.2) else np.float32
    output = case.folder / f"out.{kind.upper() if case.maybe(0.1) else kind}"
    embed = ["embed", "--model", case.table_model, "--input"]

    def program() -> tuple[np.ndarray, Any]:
        reference = case.folder / "reference.jsonl"
        reference.write_text("".join(json.dumps({"text": text}) + "\n" for text in given.texts()))
        lines = case.run_lines(*embed, reference, "--format", "jsonl")
        more = [*given.arguments, *(["--output-dtype", "f16"] if dtype is np.float16 else [])]
        case.run(*embed, given.path, f"--field={given.text}", "--output", output, *more)
        vectors = np.array([line["embedding"] for line in lines], np.float32).astype(dtype)
        return vectors, read_output(output, kind)

    def compare(rows: Rows, got: tuple[np.ndarray, tuple[np.ndarray, Rows | None]]) -> None:
        vectors, (written, carried) = got
        if vectors.dtype != written.dtype or not np.array_equal(vectors, written):
            raise Disagreement(vectors, written)
        if kind == "jsonl":
            check_lines(rows, carried)
        elif kind != "npy":
            check_table(rows, carried, kind)

    return settle(case, lambda: given.rows, program, compare)


def read_json(line: str) -> Any:
    return json.loads(line, parse_int=Number, parse_float=Number)


def read_output(path: Path, kind: str) -> tuple[np.ndarray, Rows | None]:
    """The vectors of an output file, and its other columns."""
    if kind == "npy":
        return np.load(path), None
    if kind == "jsonl":
        lines = [read_json(line) for line in lines_of(path.read_text())]
        return np.array([line.pop("embedding") for line in lines], np.float32), lines
    table = pa.parquet.read_table(path) if kind == "parquet" else pa.feather.read_table(path)
    column = table["embedding"].combine_chunks()
    vectors = column.flatten().to_numpy(zero_copy_only=False).reshape(len(column), -1)
    return vectors, table.drop_columns("embedding")


def check_lines(rows: Rows, got: list[dict[str, Any]]) -> None:
    """Compares JSON lines with the input rows."""
    if isinstance(rows, list):
        check_equal([list(row.items()) for row in rows], [list(line.items()) for line in got])
        return
    check_equal(rows.num_rows, len(got))
    for column in rows.schema:
        for value, line in zip(rows[column.name], got):
            expected, found = canonical(value, json=True), from_json(line[column.name], column.type)
            if expected != found:
                raise Disagreement(f"{column.name!r} {column.type} {expected!r}", line[column.name])


def check_table(rows: Rows, got: pa.Table, kind: str) -> None:
    """Compares a table with the input rows."""
    metadata = got.schema.metadata or {}
    check_equal(True, b"encodle" in metadata)
    if isinstance(rows, pa.Table):
        check_equal({}, {k: v for k, v in (rows.schema.metadata or {}).items() if metadata.get(k) != v})
        check_equal(rows.column_names, got.column_names)
        for name in rows.column_names:
            check_column(name, rows[name], got[name], kind)
        return
    names = sorted({name for row in rows for name in row})
    check_equal((len(rows), names), (got.num_rows, sorted(got.column_names)))
    for name, (row, record) in itertools.product(names, zip(rows, got.to_pylist())):
        if not same_value(row.get(name), record[name]):
            found = f"{got.schema.field(name).type} {record[name]!r}"
            raise Disagreement(f"{name!r}: {row.get(name)}", found)


def check_column(name: str, expected: pa.ChunkedArray, got: pa.ChunkedArray, kind: str) -> None:
    """Compares a column, allowing for the documented changes of its type."""
    own, wanted = expected.type, documented(expected.type, kind)
    # For some Parquet files pyarrow reads the first type of a pair and `encodle` the second.
    if (wanted, got.type) in [(pa.string(), pa.large_string()), (pa.date32(), pa.date64())]:
        wanted = got.type
    if got.type != wanted:
        raise Disagreement(f"column {name!r} of {wanted}", str(got.type))
    expected = expected.cast(wanted)
    for a, b in zip(map(canonical, expected), map(canonical, got), strict=True):
        if a != b:
            raise Disagreement(f"{name!r} {own} {a!r}", b)


def documented(kind: pa.DataType, output: str) -> pa.DataType:
    """The documented output type: a dictionary type becomes the type of its values; Parquet has no
    times in seconds and no dates in milliseconds."""
    types = pa.types
    if types.is_dictionary(kind):
        return documented(kind.value_type, output)
    if types.is_struct(kind):
        return pa.struct([column.with_type(documented(column.type, output)) for column in kind])
    if types.is_list(kind):
        return pa.list_(kind.value_field.with_type(documented(kind.value_type, output)))
    if output == "parquet" and types.is_timestamp(kind) and kind.unit == "s":
        return pa.timestamp("ms", kind.tz)
    changes = {pa.time32("s"): pa.time32("ms"), pa.date64(): pa.date32()}
    return changes.get(kind, kind) if output == "parquet" else kind


def same_value(expected: Any, got: Any) -> bool:
    """Whether a table's value equals a JSON value; a number or boolean may be its JSON text."""
    match expected:
        case bool():
            return got is expected or got == json.dumps(expected)
        case Number():
            if isinstance(got, str | None):
                return got == expected
            whole = re.fullmatch(r"-?\d+", expected)
            return Fraction(got) == Fraction(expected) if whole else float(got) == float(expected)
        case list():
            fits = isinstance(got, list) and len(got) == len(expected)
            return fits and all(map(same_value, expected, got))
        case dict():
            fits = isinstance(got, dict) and expected.keys() <= got.keys()
            return fits and all(same_value(expected.get(key), got[key]) for key in got)
    return expected == got


def canonical(value: pa.Scalar, json: bool = False) -> Any:
    """A representation for comparing scalars: NaN equals NaN, and -0 differs from 0. JSON has null
    for floats that are not finite."""
    kind, types = value.type, pa.types
    if not value.is_valid:
        return None
    if types.is_temporal(kind):
        return value.value
    if types.is_floating(kind):
        number = float(value.as_py())
        return None if json and not np.isfinite(number) else repr(number)
    if types.is_struct(kind):
        return {column.name: canonical(value[column.name], json) for column in kind}
    if types.is_nested(kind) and not types.is_map(kind) and not types.is_dictionary(kind):
        return [canonical(item, json) for item in value.values]
    return value.as_py()


def from_json(cell: Any, kind: pa.DataType) -> Any:
    """The canonical representation of a table's value, from its JSON representation."""
    types = pa.types
    if cell is None or types.is_dictionary(kind):
        return cell
    if types.is_temporal(kind):
        return time_from_json(cell, kind)
    if types.is_floating(kind):
        return repr(float(kind.to_pandas_dtype()(float(cell))))
    if types.is_integer(kind) or types.is_decimal(kind):
        return int(cell) if types.is_integer(kind) else Decimal(cell)
    if "binary" in str(kind):
        return bytes.fromhex(cell)
    if types.is_map(kind):
        return [(key, from_json(item, kind.item_type)) for key, item in cell.items()]
    if types.is_struct(kind):
        return {column.name: from_json(cell[column.name], column.type) for column in kind}
    if types.is_nested(kind):
        return [from_json(item, kind.value_type) for item in cell]
    return cell


def time_from_json(cell: str, kind: pa.DataType) -> int:
    """The integer that a table stores for a time, date, timestamp or duration."""
    if pa.types.is_duration(kind):
        sign, days, seconds = re.fullmatch(r"(-?)P(?:(\d+)D)?(?:T([\d.]+)S)?", cell).groups()
        total = int(days or 0) * 86400 + Fraction(seconds or 0)
        total = -total if sign else total
    else:
        cell = f"1970-01-01T{cell}" if pa.types.is_time(kind) else cell
        pattern = r"([\d-]{10})(?:T([\d:]{8})(\.\d+)?)?(Z|[+-][\d:]{5,8})?"
        day, clock, fraction, zone = re.fullmatch(pattern, cell).groups("")
        moment = datetime.fromisoformat(f"{day}T{clock or '00:00:00'}{zone or 'Z'}")
        total = (moment - EPOCH) // timedelta(seconds=1) + Fraction(fraction or 0)
    if pa.types.is_date32(kind):
        return int(total / 86400)
    unit = "ms" if pa.types.is_date64(kind) else kind.unit
    return int(total * {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit])


# Inputs of records

Column = Callable[[Case], Any]  # creates a value


def integers(least: int, most: int) -> Column:
    return lambda case: case.pick([least, most, case.rng.randint(least, most)])


FRACTIONS = ["0.5", "-0.0", "1.50", "1e3", "2.5E-7", "0.1", "1e300", "0.30000000000000004"]
SCALARS: list[Column] = [
    integers(-100, 100),
    lambda case: case.pick([-1, 1]) * case.rng.randint(2**53, 2**63 - 1),
    integers(2**63, 2**64 - 1),
    integers(2**64, 10**25),
    lambda case: case.pick(FRACTIONS),
    lambda case: case.pick(["true", "false"]),
    lambda case: json.dumps(case.pick(STRINGS), ensure_ascii=case.maybe(0.5)),
]


def json_column(case: Case, depth: int = 0) -> Column:
    """A function that creates the values of a column, as JSON."""
    kind = case.pick(["scalar", "scalar", "scalar", "list", "object"]) if depth < 2 else "scalar"
    if kind == "list":
        element = json_column(case, depth + 1)
        several = lambda case: [str(element(case)) for _ in range(case.rng.randint(0, 3))]
        return lambda case: f"[{', '.join(several(case))}]"
    if kind == "object":
        columns = {name: json_column(case, depth + 1) for name in case.some(NAMES, 1, 3)}
        some = lambda case: case.some(columns, 1, 3)
        return lambda case: json_object({name: columns[name](case) for name in some(case)})
    scalars = case.some(SCALARS, 1, 2)
    if case.maybe(0.2):
        scalars = [case.pick(SCALARS[1:4]), SCALARS[4]]  # integers that f64 would round
    return lambda case: "null" if case.maybe(0.15) else case.pick(scalars)(case)


def json_object(values: dict[str, Any]) -> str:
    return "{%s}" % ", ".join(f"{json.dumps(name)}: {value}" for name, value in values.items())


def table_texts(case: Case) -> list[str]:
    return [any_text(case, [*PLAIN, *NASTY, *STRINGS], 6) for _ in range(case.rng.randint(1, 9))]


def json_lines(case: Case) -> Given:
    text = case.pick(["text", "body", "é"])
    columns = {name: json_column(case) for name in case.some((name for name in NAMES if name != text), 0, 4)}
    if case.maybe(0.03):
        case.note_refusable("a column named embedding")
        columns["embedding"] = SCALARS[0]
    if case.maybe(0.03):
        case.note_refusable("objects beside numbers")
        columns["mixed"] = lambda case: case.pick(["1", '{"a": 1}'])
    lines = []
    for given in table_texts(case):
        values = {name: column(case) for name, column in columns.items() if case.maybe(0.9)}
        lines.append(json_object(values | {text: json.dumps(given, ensure_ascii=case.maybe(0.5))}))
    rows = [read_json(line) for line in lines]
    skip = case.maybe(0.15)
    if skip:
        bad = [f'{{"{text}": null}}', f'{{"{text}": 1}}', "{}"]
        lines.insert(case.rng.randint(0, len(lines)), case.pick(bad))
    if case.maybe(0.2):
        lines.insert(case.rng.randint(0, len(lines)), case.pick(["", "  ", "\t"]))
    end = case.pick(["\n", "\n", "\r\n"])
    content = end.join(lines) + case.pick(["", end, end])
    path = write_text(case, content, case.pick(["jsonl", "ndjson"]))
    return Given(path, text, rows, ["--on-error", "skip"] if skip else [])


def csv_rows(case: Case) -> Given:
    kind = case.pick(["csv", "csv", "tsv"])
    names = [*case.some(NAMES, 0, 4), "body"]
    case.rng.shuffle(names)
    texts = table_texts(case)
    rows = [{name: case.pick(STRINGS) for name in names} | {"body": text} for text in texts]
    end, quoting = case.pick([("\n", csv.QUOTE_ALL), ("\r\n", csv.QUOTE_MINIMAL)])
    options = {"delimiter": "," if kind == "csv" else "\t", "lineterminator": end, "quoting": quoting}
    path = case.folder / "plain.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, **options)
        writer.writeheader()
        writer.writerows(rows)
    return Given(write_text(case, path.read_bytes().decode(), kind), "body", rows)


def write_text(case: Case, content: str, kind: str) -> Path:
    """Writes a text file, sometimes with a byte order mark, sometimes compressed."""
    data = content.encode("utf-8-sig" if case.maybe(0.1) else "utf-8")
    name = f"in.{kind.upper() if case.maybe(0.1) else kind}"
    codec = case.pick(["", "", "", "", ".gz", ".zst"])
    path = case.folder / f"{name}{codec}"
    if codec == ".zst":
        with pa.CompressedOutputStream(str(path), "zstd") as file:
            file.write(data)
    else:
        path.write_bytes(gzip.compress(data) if codec else data)
    return path


# Inputs of typed columns


def number_columns() -> list[tuple[pa.DataType, Column]]:
    columns: list[tuple[pa.DataType, Column]] = []
    for bits in (8, 16, 32, 64):
        half = 2 ** (bits - 1)
        columns.append((getattr(pa, f"int{bits}")(), integers(-half, half - 1)))
        columns.append((getattr(pa, f"uint{bits}")(), integers(0, 2 * half - 1)))
    special, floats = [0.0, -0.0, 1.5, -0.1, float("nan"), float("inf")], ("float16", "float32", "float64")
    columns += [(getattr(pa, name)(), lambda case: case.pick(special)) for name in floats]
    cents = integers(-(10**7), 10**7)
    decimals = (pa.decimal128(10, 2), pa.decimal256(50, 2), pa.decimal128(38, 2))
    columns += [(kind, lambda case: Decimal(cents(case)).scaleb(-2)) for kind in decimals]
    return columns


def time_columns() -> list[tuple[pa.DataType, Column]]:
    """Times in the years 5 to 9909; nanoseconds are limited to the range of 64 bits."""
    columns: list[tuple[pa.DataType, Column]] = []
    for unit, second in (("s", 1), ("ms", 10**3), ("us", 10**6), ("ns", 10**9)):
        moments = integers(-62_000_000_000 * second, 250_000_000_000 * second)
        moments = integers(1 - 2**63, 2**63 - 1) if unit == "ns" else moments
        columns += [(pa.timestamp(unit, zone), moments) for zone in (None, "UTC", "Europe/Paris", "+05:30")]
        columns.append((pa.duration(unit), integers(-(10**6) * second, 10**6 * second)))
        clock = pa.time32 if unit in ("s", "ms") else pa.time64
        columns.append((clock(unit), integers(0, 86400 * second - 1)))
    days = integers(-700_000, 2_900_000)
    return [*columns, (pa.date32(), days), (pa.date64(), lambda case: days(case) * 86_400_000)]


def other_columns() -> list[tuple[pa.DataType, Column]]:
    text, data = lambda case: case.pick(STRINGS), lambda case: case.pick(STRINGS).encode()
    texts = (pa.string(), pa.large_string(), pa.string_view())
    categories = (pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.int32(), pa.large_string()))
    columns = [(kind, text) for kind in (*texts, *categories)]
    columns += [(kind, data) for kind in (pa.binary(), pa.large_binary(), pa.binary_view())]
    several = lambda case: [case.pick([1, -1, None]) for _ in range(case.rng.randint(0, 3))]
    columns += [(pa.list_(pa.int64()), several), (pa.large_list(pa.int16()), several)]
    point = pa.struct({"x": pa.float64(), "y": pa.timestamp("s"), "z": categories[0]})
    return [
        *columns,
        (pa.bool_(), lambda case: case.maybe(0.5)),
        (pa.binary(3), lambda case: case.pick([b"\xff\x00a", b"abc"])),
        (pa.list_(pa.float32(), 2), lambda case: [0.5, case.rng.randint(0, 9)]),
        (pa.list_(pa.timestamp("s")), several),
        # arrow-rs 60.1 refuses the dictionary keys that pyarrow writes for "z" in null structs if
        # all structs are null, so `typed_table` fills row 0.
        (point, lambda case: {"x": 1.5, "y": case.pick([None, 7]), "z": case.pick("ab")}),
        (pa.list_(pa.struct({"k": pa.string()})), lambda case: [{"k": case.pick(STRINGS)}, None]),
        (pa.map_(pa.string(), pa.int64()), lambda case: [("a", 1), ("é", None)]),
        (pa.null(), lambda case: None),
    ]


def typed_table(case: Case) -> pa.Table:
    """A table with texts in the column body; one text may be null."""
    texts: list[str | None] = [*table_texts(case)]
    if case.maybe(0.1):
        texts.insert(case.rng.randint(0, len(texts)), None)
    groups = [number_columns(), time_columns(), time_columns(), other_columns()]
    columns = [case.pick(case.pick(groups)) for _ in range(case.rng.randint(1, 5))]
    arrays = {}
    for name, (kind, column) in zip(case.some(NAMES, 5, 5), columns):
        values = [None if case.maybe(0.2) else column(case) for _ in texts]
        if pa.types.is_struct(kind):
            values[0] = column(case)
        plain = kind.value_type if pa.types.is_dictionary(kind) else kind
        arrays[name] = pa.array(values, plain).cast(kind)
    kinds = [pa.string(), pa.string(), pa.large_string(), pa.dictionary(pa.int16(), pa.string())]
    kind = case.pick(kinds)
    arrays["body"] = pa.array(texts, pa.string()).cast(kind)
    metadata = {key: METADATA[key] for key in case.some(METADATA, 0, 2)}
    return pa.table(arrays).replace_schema_metadata(metadata or None)


def given_table(path: Path, rows: pa.Table) -> Given:
    """An input with these rows; `encodle` should skip a row whose text is null."""
    texts = rows["body"].to_pylist()
    if None not in texts:
        return Given(path, "body", rows)
    null = texts.index(None)
    rows = pa.concat_tables([rows.slice(0, null), rows.slice(null + 1)])
    return Given(path, "body", rows, ["--on-error", "skip"])


def parquet_file(case: Case) -> Given:
    path = case.folder / case.pick(["in.parquet", "in.parquet", "in.PARQUET"])
    pa.parquet.write_table(
        typed_table(case),
        path,
        compression=case.pick(["none", "snappy", "gzip", "brotli", "zstd", "lz4"]),
        row_group_size=case.pick([3, 1000]),
        store_schema=case.maybe(0.8),
        data_page_version=case.pick(["1.0", "2.0"]),
    )
    return given_table(path, pa.parquet.read_table(path))


def arrow_file(case: Case) -> Given:
    table = typed_table(case)
    path = case.folder / case.pick(["in.arrow", "in.feather", "in.ipc", "in.ARROW"])
    options = pa.ipc.IpcWriteOptions(compression=case.pick([None, "lz4", "zstd"]))
    new = case.pick([pa.ipc.new_file, pa.ipc.new_stream])
    with new(str(path), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=case.pick([2, 1000]))
    return given_table(path, table)


def table_model(folder: Path) -> Path:
    """Writes the model for all cases of tables."""
    write_json(folder / "1_Pooling/config.json", {"embedding_dimension": 16, "pooling_mode": "mean"})
    modules = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    entries = [{"path": at, "type": CLASSES[name]} for name, at in modules.items()]
    write_json(folder / "modules.json", entries)
    pieces = [*SQUARE.values(), *POOL]
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces))
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 20}
    config = BertConfig(vocab_size=len(pieces), max_position_embeddings=32, **sizes)
    any_weights(Case(0, folder, Path(), folder), BertModel(config), folder)
    return folder


# The program

KINDS: dict[str, Callable[[Case], str]] = {
    "embeddings": embeddings,
    "tokenizers": tokenizers,
    "heads": heads,
    "tables": tables,
}
OUTCOMES = ("agreed", "both fail", "refused", "disagreed")


def kind_of(seed: int) -> str:
    return list(KINDS)[seed % len(KINDS)]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    release = Path(__file__).parents[1] / "target/release/encodle"
    parser.add_argument("--program", type=Path, default=release)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first case")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--only", metavar="SEED[,SEED...]", help="run only these cases")
    chosen.add_argument("--kind", choices=KINDS)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the cases' files here")
    return parser.parse_args()


def run_case(case: Case, keep: bool) -> str:
    """Runs a case; prints a disagreement; returns the outcome."""
    kind = kind_of(case.seed)
    shutil.rmtree(case.folder, ignore_errors=True)
    case.folder.mkdir(parents=True)
    try:
        outcome = KINDS[kind](case)
    except Exception as error:
        outcome, what = "disagreed", str(error)
        if not isinstance(error, Disagreement):  # an unexpected output format, or a bug in this script
            what = short("".join(traceback.format_exception(error)[-3:]))
        print(f"{case.seed} {kind}: {what}", flush=True)
    if keep:
        print(f"{case.seed} {kind}: {outcome}", *case.log, sep="\n  ", flush=True)
    else:
        shutil.rmtree(case.folder)
    return outcome


def main() -> None:
    given = arguments()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    chosen = (seed for seed in itertools.count(given.seed) if given.kind in (None, kind_of(seed)))
    seeds = map(int, given.only.split(",")) if given.only else itertools.islice(chosen, given.cases)
    counts: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (given.keep or Path(temporary)).absolute()
        model = table_model(folder / "table_model")
        for seed in seeds:
            case = Case(seed, folder / f"case-{seed}", given.program.absolute(), model)
            counts[kind_of(seed), run_case(case, given.keep is not None)] += 1
    print(f"{'':12}{'cases':>10}", *(f"{outcome:>10}" for outcome in OUTCOMES))
    for kind in KINDS:
        row = [counts[kind, outcome] for outcome in OUTCOMES]
        print(f"{kind:12}{sum(row):10}", *(f"{count:10}" for count in row))
    sys.exit(any(counts[kind, "disagreed"] for kind in KINDS))


if __name__ == "__main__":
    main()

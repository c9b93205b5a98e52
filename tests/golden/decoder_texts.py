"""Creates the golden files of texts in decoders/: the token ids of their tokenizers (tokenizers/),
embeddings (sentences/) and relevance scores (rerank/) of small random models, from Hugging Face
tokenizers and sentence-transformers. Run from the repository's root:

    pip install -r tests/golden/requirements.txt
    python tests/golden/decoder_texts.py [tokenizers|sentences|rerank ...]
"""

import json
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import torch
from decoders import FOLDER, OF_TYPE, SIZES, double_precision, random_model
from generate import HERE, SEED, nasty_texts, save, widen
from kinds import fresh, run, write
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)
from transformers.utils import logging

# The maximum number of tokens of the tokenizers in tokenizers/.
LENGTH = 64
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
# The template of Qwen3-Reranker. Jinja removes the last line break.
RERANKER = (
    f"<|im_start|>system\n{JUDGE}<|im_end|>\n<|im_start|>user\n"
    '<Instruct>: {{ messages | selectattr("role", "eq", "system") | map(attribute="content") | first '
    f'| default("{INSTRUCTION}") }}}}\n'
    '<Query>: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}\n'
    '<Document>: {{ messages | selectattr("role", "eq", "document") | map(attribute="content") '
    "| first }}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
# A template with a loop, conditions and the variable add_generation_prompt.
CHAT = """\
{%- for message in messages %}
    {%- if message.role == "query" %}
        {{- "<|im_start|>system\\n" + message.content | trim + "<|im_end|>\\n" }}
    {%- elif message["role"] == "document" %}
        {{- "<|im_start|>user\\n" + message["content"] + "<|im_end|>\\n" }}
    {%- else %}
        {{- "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\\n" }}
{%- endif %}
"""
LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
APOSTROPHES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
QWEN = rf"{APOSTROPHES}|{LETTERS}|\p{{N}}|{REST}"
LLAMA = rf"{APOSTROPHES}|{LETTERS}|\p{{N}}{{1,3}}|{REST}"


def corpus():
    words = [JUDGE, INSTRUCTION, "system user assistant", "yes", "no", "Yes", "No", " yes no"] * 20
    return nasty_texts(500) + (HERE / "sentences.txt").read_text().splitlines() + words


def trained(tokenizer, size, special=(), **options):
    trainer = BpeTrainer(
        vocab_size=size, special_tokens=list(special), show_progress=False, **options
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def byte_level(pattern, size):
    """Byte-level BPE that first splits texts by a pattern."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    return trained(tokenizer, size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def byte_fallback(special, size):
    """BPE in which characters without a token become tokens of their bytes."""
    tokenizer = Tokenizer(BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    counts = Counter("▁".join(corpus()))
    alphabet = sorted(counts, key=lambda c: (-counts[c], c))[:110]
    options = {"initial_alphabet": alphabet, "limit_alphabet": len(alphabet)}
    trained(tokenizer, size, [*special, *bytes_], **options)
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [x for x in state["added_tokens"] if x["content"] in special]
    return Tokenizer.from_str(json.dumps(state))


def template(tokenizer, start="", end=""):
    """Puts a token before and after each text."""

    def around(text, kind):
        parts = [start, text, end]
        return " ".join(f"{part}:{kind}" for part in parts if part)

    return processors.TemplateProcessing(
        single=around("$A", 0), pair=f"{around('$A', 0)} {around('$B', 1)}",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (start, end) if token],
    )  # fmt: skip


def qwen(end=""):
    """The tokenizer of Qwen 2 and 3."""
    tokenizer = byte_level(QWEN, 600)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken(x, normalized=False) for x in ("<think>", "</think>")])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    if end:
        parts = [tokenizer.post_processor, template(tokenizer, end=end)]
        tokenizer.post_processor = processors.Sequence(parts)
    settings = {
        "add_bos_token": False, "add_prefix_space": False, "bos_token": None,
        "eos_token": "<|im_end|>", "errors": "replace", "pad_token": "<|endoftext|>",
        "split_special_tokens": False, "tokenizer_class": "Qwen2Tokenizer", "unk_token": None,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    }  # fmt: skip
    return tokenizer, settings, "qwen3"


def qwen3():
    """The tokenizer of Qwen3-Embedding."""
    return qwen("<|endoftext|>")


def llama3(end=""):
    """The tokenizer of Llama 3: a word that is a token needs no merges. Every fourth merge is
    absent, so that this makes a difference."""
    tokenizer = byte_level(LLAMA, 600)
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|mask|>"])
    state = json.loads(tokenizer.to_str())
    state["model"]["ignore_merges"] = True
    state["model"]["merges"] = [x for i, x in enumerate(state["model"]["merges"]) if i % 4 != 3]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    start = "<|begin_of_text|>"
    parts = [processors.ByteLevel(trim_offsets=False), template(tokenizer, start, end)]
    tokenizer.post_processor = processors.Sequence(parts)
    settings = {
        "bos_token": start, "eos_token": "<|end_of_text|>", "pad_token": "<|end_of_text|>",
        "clean_up_tokenization_spaces": True, "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
    }  # fmt: skip
    return tokenizer, settings, "llama"


def eurobert():
    tokenizer, settings, _ = llama3("<|end_of_text|>")
    return tokenizer, settings | {"mask_token": "<|mask|>"}, "eurobert"


def gemma():
    """The tokenizer of Gemma 3, with the end token of EmbeddingGemma."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    tokenizer = byte_fallback(special, 640)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.add_special_tokens(["<start_of_turn>"])
    tokenizer.add_tokens([AddedToken(x, normalized=False) for x in ("\n\n", "▁▁", "<table>")])
    tokenizer.post_processor = template(tokenizer, "<bos>", "<eos>")
    settings = {
        "add_bos_token": True, "add_eos_token": True, "bos_token": "<bos>", "eos_token": "<eos>",
        "mask_token": "<mask>", "pad_token": "<pad>", "unk_token": "<unk>", "padding_side": "right",
        "clean_up_tokenization_spaces": False, "spaces_between_special_tokens": False,
        "tokenizer_class": "GemmaTokenizer",
    }  # fmt: skip
    return tokenizer, settings, "gemma3_text"


def mistral():
    """The tokenizer of Mistral 7B, with the keys of E5-Mistral."""
    tokenizer = byte_fallback(["<unk>", "<s>", "</s>"], 620)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.pre_tokenizer = None
    tokenizer.post_processor = template(tokenizer, "<s>")
    settings = {
        "add_bos_token": True, "add_eos_token": True, "bos_token": "<s>", "eos_token": "</s>",
        "legacy": True, "pad_token": "</s>", "clean_up_tokenization_spaces": False,
        "tokenizer_class": "LlamaTokenizer", "unk_token": "<unk>", "use_default_system_prompt": False,
    }  # fmt: skip
    return tokenizer, settings, "mistral"


def metaspace():
    """The tokenizer of Llama 2 and of Mistral, as transformers 5 saves it."""
    tokenizer, settings, _ = mistral()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first", split=False)
    return tokenizer, {key: x for key, x in settings.items() if key[:4] != "add_"}, "llama"


# For each tokenizer, the changes of tokenizer_config.json to test. `model_type` is that of
# config.json.
TOKENIZERS = {
    "qwen": (qwen, {"default": {"model_type": "qwen2"}, "qwen3": {"model_type": "qwen3"}}),
    "qwen3": (qwen3, {"default": {}, "add_eos": {"add_eos_token": True}}),
    "llama3": (llama3, {"default": {}, "class": {"tokenizer_class": "LlamaTokenizer"}}),
    "eurobert": (eurobert, {"default": {}}),
    "gemma": (gemma, {"default": {}, "no_eos": {"add_eos_token": False}}),
    "mistral": (mistral, {"default": {}, "llama": {"model_type": "llama"}}),
    "metaspace": (metaspace, {"default": {}, "no_prefix": {"add_prefix_space": False}}),
}
WITH_ALL_TEXTS = ("qwen", "llama3", "gemma", "mistral")
# Texts after those of nasty_texts.json.
MORE_TEXTS = [
    "a <|endoftext|> b", "<|im_start|>user\nc<|im_end|>\n", "<think>\n\n</think>\n\n",
    "<bos>a<eos> <unk>", "<s>x</s> <mask>", "<|begin_of_text|>a<|eot_id|>", "<0x0A> <0xE2>",
    "  two  spaces   and more    ", "1234567 12,345.67", "It's we'LL DON'T they'Re",
    "\n\n a\n\n\nb \r\n c\r\n\r\nd", "<table>a</table>", "▁a▁▁b", "<start_of_turn>user\n",
    "yes", "no", " yes\n", "e\u0301\u0323 \u1e0d\u0307", "a\u00a0b \u2003c",
]  # fmt: skip


def write_tokenizer(folder, create, **changes):
    """Writes the files of a tokenizer, and a config.json that only names the architecture."""
    tokenizer, settings, model_type = create()
    settings = {"model_max_length": LENGTH} | settings | changes
    write(folder / "config.json", {"model_type": settings.pop("model_type", model_type)})
    write(folder / "tokenizer_config.json", settings)
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    compact(folder / "tokenizer.json")


def compact(path):
    """Removes the white space of a JSON file."""
    state = json.loads(path.read_text())
    path.write_text(json.dumps(state, ensure_ascii=False, separators=(",", ":")) + "\n")


def packed(name, sequences):
    """Token ids of all sequences one after the other, and their lengths."""
    return {
        f"{name}.lengths": torch.tensor([len(x) for x in sequences], dtype=torch.int32),
        f"{name}.ids": torch.tensor([i for x in sequences for i in x], dtype=torch.int32),
    }


def tokenizers():
    """Token ids of the texts of nasty_texts.json and texts.json, truncated to LENGTH tokens: of all
    texts in the first case of WITH_ALL_TEXTS, otherwise of texts 400 and later. The first case also
    has pairs: texts 60 to 159, each with the seventh text after it."""
    torch.manual_seed(SEED)
    folder = FOLDER / "tokenizers"
    write(folder / "texts.json", MORE_TEXTS)
    texts = nasty_texts(500) + MORE_TEXTS
    for name, (create, cases) in TOKENIZERS.items():
        tensors = {}
        write_tokenizer(fresh(folder / name), create, **next(iter(cases.values())))
        for case, changes in cases.items():
            with tempfile.TemporaryDirectory() as copy:
                write_tokenizer(Path(copy), create, **changes)
                tokenizer = AutoTokenizer.from_pretrained(copy)
            print(name, case, type(tokenizer).__name__, len(tokenizer))
            assert len(tokenizer) < 1000
            is_first = case == next(iter(cases))
            start = 0 if is_first and name in WITH_ALL_TEXTS else 400
            found = [tokenizer(text, truncation=True)["input_ids"] for text in texts[start:]]
            tensors |= packed(f"{case}.texts", found)
            if is_first:
                pairs = list(zip(texts, texts[7:]))[60:160]
                found = [tokenizer(*pair, truncation=True)["input_ids"] for pair in pairs]
                tensors |= packed(f"{case}.pairs", found)
        save(folder / name / "expected.safetensors", tensors)


def write_model(folder, create, model_class, length, seed, tokenizer=None, **more):
    """Writes a random model with the tokenizer that `create` returns, changed by `tokenizer`."""
    write_tokenizer(folder, create, model_max_length=length, **tokenizer or {})
    loaded = AutoTokenizer.from_pretrained(folder)
    ids = {f"{key}_token_id": getattr(loaded, f"{key}_token_id") for key in ("bos", "eos", "pad")}
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    settings = SIZES | OF_TYPE.get(model_type, {}) | ids | {"vocab_size": len(loaded)}
    settings |= {"max_position_embeddings": length} | more
    torch.manual_seed(SEED + seed)
    random_model(model_class, model_type, settings).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


# The encoders: the tokenizer, changes of its settings, settings of the model, the pooling mode, the
# modules after it, and the prompts.
ENCODERS = {
    # The files of Qwen3-Embedding. Its chat template is not used.
    "qwen3": (
        qwen3, {"padding_side": "left", "chat_template": CHAT}, {"tie_word_embeddings": True},
        "lasttoken", lambda: [Normalize()],
        {"query": f"Instruct: {INSTRUCTION}\nQuery:", "document": ""},
    ),
    # The modules and prompts of EmbeddingGemma, whose second Dense has no bias either.
    "gemma": (
        gemma, {},
        {"use_bidirectional_attention": True, "sliding_window": 10,
         "layer_types": ["sliding_attention", "full_attention"]},
        "mean",
        lambda: [dense(12, 20, bias=False), dense(20, 12), Normalize()],
        {"query": "task: search result | query: ", "document": "title: none | text: ",
         "STS": "task: sentence similarity | query: "},
    ),
    "eurobert": (eurobert, {}, {"mask_token_id": 603}, "mean", list, {}),
    # A bidirectional Llama with the prompts of llama-nemotron-embed.
    "llama": (
        llama3, {}, {"is_causal": False, "head_dim": 10}, "mean", lambda: [Normalize()],
        {"query": "query: ", "document": "passage: "},
    ),
    "mistral": (
        mistral, {}, {"sliding_window": 16}, "lasttoken", lambda: [Normalize()],
        {"web_search_query": f"Instruct: {INSTRUCTION}\nQuery: "},
    ),
}  # fmt: skip
QUERY_PROMPTS = dict.fromkeys(ENCODERS, "query") | {"mistral": "web_search_query"}
# The maximum number of tokens. A prompt of Qwen3 has 22.
ENCODER_LENGTH = 72


def dense(rows, columns, **options):
    return widen(Dense(rows, columns, activation_function=nn.Identity(), **options))


def visible_ids(features):
    return [
        ids[mask == 1].tolist()
        for ids, mask in zip(features["input_ids"], features["attention_mask"])
    ]


def unpadded(model, results):
    """The results of each text alone, that is, without padding, computed in f64. In f32 they are
    almost the same."""
    found = results(1)
    assert (results(32) - found).abs().max() < 1e-5  # padding on the left moves all positions
    with double_precision(model[0].model):
        model.double()
        exact = results(1)
    model.float()
    error = (exact - found).abs().max()
    print(f"{type(model).__name__}: f64 {error:.1e}")
    assert error < 5e-6 and found.dtype == torch.float32
    return exact.float()


def publish(folder, source, width):
    """Replaces files of a SentenceTransformer by those of earlier versions: the tokenizer as it is
    in the folder `source`, the first keys of Pooling, and no file that allows the chat template."""
    (folder / "sentence_bert_config.json").unlink()
    (folder / "chat_template.jinja").unlink()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / file, folder / file)
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")
    modes += ("weightedmean_tokens", "lasttoken")
    pooling = {f"pooling_mode_{mode}": mode == "lasttoken" for mode in modes}
    pooling = {"word_embedding_dimension": width} | pooling | {"include_prompt": True}
    write(folder / "1_Pooling/config.json", pooling)


def sentences():
    """Token ids and embeddings of texts: as queries, as documents, and without a prompt."""
    folder = FOLDER / "sentences"
    texts = (HERE / "sentences.txt").read_text().splitlines()
    texts += ["", "a <|endoftext|> b </s> c <eos>", "no yes " * 60]
    write(folder / "texts.json", texts)
    for seed, (name, case) in enumerate(ENCODERS.items()):
        create, changes, more, pooling, modules, prompts = case
        path = fresh(folder / name)
        with tempfile.TemporaryDirectory() as copy:
            copy = Path(copy)
            write_model(copy, create, AutoModel, ENCODER_LENGTH, 90 + seed, changes, **more)
            first = Transformer(str(copy))
            pool = Pooling(first.get_embedding_dimension(), pooling_mode=pooling)
            model = SentenceTransformer(
                modules=[first, pool, *modules()], prompts=prompts, device="cpu"
            )
            model.save_pretrained(str(path), create_model_card=False)
            if name == "qwen3":
                publish(path, copy, first.get_embedding_dimension())
        compact(path / "tokenizer.json")
        model = SentenceTransformer(str(path), device="cpu", local_files_only=True)
        names = {"query": QUERY_PROMPTS[name], "document": "document", "plain": None}
        tensors = {}
        for side, prompt_name in names.items():
            prompt = model.prompts.get(prompt_name)
            options = {"prompt": prompt, "convert_to_tensor": True}
            tensors[side] = unpadded(
                model, lambda size: model.encode(texts, batch_size=size, **options)
            )
            tensors |= packed(side, visible_ids(model[0].preprocess(texts, prompt=prompt)))
        save(path / "expected.safetensors", tensors)


def logit_score(folder, seed, changes, score, kwargs=None, **options):
    """A folder of a CrossEncoder with the logits of a causal language model. `score` has the tokens
    whose logits are compared."""
    with tempfile.TemporaryDirectory() as copy:
        more = {"tie_word_embeddings": True}
        write_model(Path(copy), qwen, AutoModelForCausalLM, RERANKER_LENGTH, seed, changes, **more)
        first = Transformer(
            copy, transformer_task="text-generation", processing_kwargs=kwargs or {}
        )
        ids = {key: first.tokenizer.convert_tokens_to_ids(token) for key, token in score.items()}
        model = CrossEncoder(modules=[first, LogitScore(**ids)], device="cpu", **options)
        model.save_pretrained(str(folder), create_model_card=False)


def sequence_score(folder, seed, changes, **options):
    """A folder of a CrossEncoder with a head that scores the last token."""
    model_class, more = AutoModelForSequenceClassification, {"num_labels": 1}
    with tempfile.TemporaryDirectory() as copy:
        write_model(Path(copy), qwen, model_class, RERANKER_LENGTH, seed, changes, **more)
        model = CrossEncoder(copy, device="cpu", **options)
        model.save_pretrained(str(folder), create_model_card=False)


RERANKER_LENGTH = 160
YES_NO = {"true_token_id": "yes", "false_token_id": "no"}
RERANKERS = {
    "qwen3": lambda folder: logit_score(
        folder, 100, {"chat_template": RERANKER}, YES_NO, activation_fn=nn.Identity(),
        prompts={"web_search": INSTRUCTION, "duplicates": "Find texts with the same meaning"},
        default_prompt_name="web_search",
    ),
    "true_only": lambda folder: logit_score(
        folder, 101, {"chat_template": CHAT}, {"true_token_id": "Yes"},
        {"chat_template": {"add_generation_prompt": True}},
    ),
    "no_template": lambda folder: logit_score(folder, 102, {}, YES_NO),
    "sequence": lambda folder: sequence_score(folder, 103, {"chat_template": RERANKER}),
    "sequence_no_template": lambda folder: sequence_score(
        folder, 104, {}, prompts={"query": "query: "}, default_prompt_name="query",
    ),
}  # fmt: skip
MODULES = ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json")
PROMPT = "Choose"


def scores(model, pairs, **options):
    options |= {"convert_to_tensor": True}
    return unpadded(model, lambda size: model.predict(pairs, batch_size=size, **options))


def rerank():
    """Token ids and scores of pairs, with the folder's activation, without one, and without one and
    with PROMPT; and scores of the folder without the files MODULES, but with its template."""
    folder = FOLDER / "rerank"
    lines = (HERE / "sentences.txt").read_text().splitlines()
    pairs = [(lines[3], line) for line in lines[:5]]
    pairs += [("  what? ", ""), ("a <|im_end|> b", "<think> é"), ("no", "yes no " * 120)]
    write(folder / "pairs.json", pairs)
    for name, create in RERANKERS.items():
        path = fresh(folder / name)
        create(path)
        (path / "generation_config.json").unlink(missing_ok=True)
        model = CrossEncoder(str(path), device="cpu", local_files_only=True)
        compact(path / "tokenizer.json")
        default = model.prompts.get(model.default_prompt_name)
        tensors = {
            "scores": scores(model, pairs),
            "logits": scores(model, pairs, activation_fn=nn.Identity()),
            "prompt": scores(model, pairs, activation_fn=nn.Identity(), prompt=PROMPT),
            **packed("scores", visible_ids(model[0].preprocess(pairs, prompt=default))),
            **packed("prompt", visible_ids(model[0].preprocess(pairs, prompt=PROMPT))),
        }
        with tempfile.TemporaryDirectory() as copy:
            shutil.copytree(path, copy, dirs_exist_ok=True)
            for file in MODULES:
                (Path(copy) / file).unlink()
            model = CrossEncoder(copy, device="cpu", local_files_only=True)
            tensors["bare"] = scores(model, pairs)
        save(path / "expected.safetensors", tensors)


if __name__ == "__main__":
    logging.disable_progress_bar()
    run({"tokenizers": tokenizers, "sentences": sentences, "rerank": rerank})

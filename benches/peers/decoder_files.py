"""A decoder of Qwen3-0.6B's size with random weights: folders of an embedder and of a reranker.

The tokenizer has the size and the rules of Qwen's: a word of WORDS is one token with the space
before it, so that texts with a given number of tokens can be written. The weights are in bf16, as
those of the published models are.
"""

import json
import os
import shutil
from pathlib import Path

import numpy as np

import cases

DECODERS = ("qwen3-0.6b",)
VOCABULARY, BYTE_PAIRS = 151_936, 151_387
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
CONFIG = {
    "vocab_size": VOCABULARY, "hidden_size": 1024, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 3072, "max_position_embeddings": 32_768, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "use_cache": False,
    "pad_token_id": 151_643, "eos_token_id": 151_645,
}  # fmt: skip
DOCUMENTS, QUERY_TOKENS, TEMPLATE_TOKENS, DOCUMENT_TOKENS = 50, 40, 80, 60
# Qwen's rule for the parts of a text that are tokenized separately.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
MODULES = {
    "embedder": [
        "base.modules.transformer.Transformer",
        "sentence_transformer.modules.pooling.Pooling",
        "base.modules.normalize.Normalize",
    ],
    "reranker": [
        "base.modules.transformer.Transformer",
        "cross_encoder.modules.logit_score.LogitScore",
    ],
}


def tokenizer_json() -> dict:
    """A byte-level BPE with as many tokens as Qwen's: pairs of letters, words of four letters, and
    these words after a space."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    pairs = [a + b for a in letters for b in letters]
    count = (BYTE_PAIRS - len(pairs)) // 2
    chosen = np.random.default_rng(cases.SEED).choice(len(pairs) ** 2, count + 1, replace=False)
    halves = [(pairs[i // len(pairs)], pairs[i % len(pairs)]) for i in chosen]
    merges = [*map(tuple, pairs), *halves, *(("Ġ", a + b) for a, b in halves)][:BYTE_PAIRS]
    tokens = [*bytes_to_unicode().values(), *(a + b for a, b in merges)]
    end = {"SpecialToken": {"id": SPECIAL[0], "type_id": 0}}
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": len(tokens) + i, "content": token, "special": True} | added
            for i, token in enumerate(SPECIAL)
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
                | {"use_regex": False},
            ],
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}, end],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {
                SPECIAL[0]: {"id": SPECIAL[0], "ids": [len(tokens)], "tokens": [SPECIAL[0]]}
            },
        },
        "decoder": None,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges,
        },
    }  # fmt: skip


class Words:
    """Writes texts with a given number of tokens."""

    def __init__(self, tokenizer: Path) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(tokenizer))
        self.random = np.random.default_rng(cases.SEED)
        found = [token for token in self.tokenizer.get_vocab() if token.isascii() and len(token) == 4]
        found = sorted(found)[:: len(found) // 4000]
        after_space = self.tokenizer.encode_batch([f" {word}" for word in found], add_special_tokens=False)
        first = self.tokenizer.encode_batch(found, add_special_tokens=False)
        self.words = [w for w, a, b in zip(found, after_space, first) if len(a.ids) == len(b.ids) == 1]

    def text(self, tokens: int) -> str:
        """A text that is `tokens` tokens, without special tokens."""
        text = " ".join(self.random.choice(self.words, tokens))
        assert self.count(text) == tokens
        return text

    def count(self, text: str) -> int:
        return len(self.tokenizer.encode(text, add_special_tokens=False).ids)


def texts(words: Words) -> dict[str, list[str]]:
    """The cases of the embedder. A text has one token more in the model, at its end."""
    mixed = [len(sequence) for sequence in cases.mixed()]
    lengths = {"8×128": [128] * 8, "1×512": [512], "mixed": mixed, "first": [16]}
    return {name: [words.text(n - 1) for n in of_case] for name, of_case in lengths.items()}


def template(words: Words) -> tuple[str, str, str]:
    """The parts of a chat template before the query, before the document, and after it, as long as
    those of Qwen3-Reranker."""
    before = "<|im_start|>" + words.text(64) + " "
    between = " " + words.text(5) + " "
    after = "<|im_end|><|im_start|>" + words.text(6) + "<think></think>"
    return before, between, after


def write_embedder(model: str, folder: Path, layers: int | None) -> None:
    """The weights, the tokenizer, the modules of sentence-transformers, and the cases."""
    import torch
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(cases.SEED)
    config = AutoConfig.for_model("qwen3", **CONFIG)
    if layers:
        config.num_hidden_layers, config.layer_types = layers, config.layer_types[:layers]
    decoder = AutoModel.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
    decoder.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(), ensure_ascii=False))
    settings = {"tokenizer_class": "Qwen2Tokenizer", "pad_token": SPECIAL[0], "eos_token": SPECIAL[2]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": 32_768}))
    (folder / "1_Pooling").mkdir()
    (folder / "2_Normalize").mkdir()
    pooling = {"word_embedding_dimension": CONFIG["hidden_size"], "pooling_mode": "lasttoken"}
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    write_modules(folder, "embedder", ["", "1_Pooling", "2_Normalize"])
    inputs = texts(Words(folder / "tokenizer.json"))
    (folder / "cases.json").write_text(json.dumps(inputs))


def write_modules(folder: Path, kind: str, paths: list[str]) -> None:
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.{module}"}
        for i, (path, module) in enumerate(zip(paths, MODULES[kind]))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))


def reranker(folder: Path, target: Path) -> None:
    """The same model as a reranker in the form of Qwen3-Reranker, and the query and the documents of
    a request, in rerank.json."""
    hf = folder / "hf"
    target.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(hf / name, target)
    os.link(hf / "model.safetensors", target / "model.safetensors")
    config = json.loads((hf / "config.json").read_text()) | {"architectures": ["Qwen3ForCausalLM"]}
    (target / "config.json").write_text(json.dumps(config))
    words = Words(hf / "tokenizer.json")
    before, between, after = template(words)
    assert words.count(before.strip() + after) + words.count(between.strip()) == TEMPLATE_TOKENS
    of_role = '{{{{ messages | selectattr("role", "eq", "{}") | map(attribute="content") | first }}}}'
    text = before + of_role.format("query") + between + of_role.format("document") + after
    (target / "chat_template.jinja").write_text(text)
    output = {"method": "forward", "method_output_name": "logits"}
    settings = {
        "transformer_task": "text-generation",
        "modality_config": {"text": output, "message": output | {"format": "flat"}},
        "module_output_name": "causal_logits",
    }
    (target / "sentence_bert_config.json").write_text(json.dumps(settings))
    model = {"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.linear.Identity"}
    (target / "config_sentence_transformers.json").write_text(json.dumps(model))
    (target / "1_LogitScore").mkdir()
    score = {"true_token_id": 9693, "false_token_id": 2152, "module_input_name": "causal_logits"}
    (target / "1_LogitScore/config.json").write_text(json.dumps(score))
    write_modules(target, "reranker", ["", "1_LogitScore"])
    query, documents = words.text(QUERY_TOKENS), [words.text(DOCUMENT_TOKENS) for _ in range(DOCUMENTS)]
    tokens = words.count(before + query + between + documents[0] + after)
    assert tokens == TEMPLATE_TOKENS + QUERY_TOKENS + DOCUMENT_TOKENS
    request = {"query": query, "documents": documents}
    (target / "rerank.json").write_text(json.dumps(request))


# The names of llama.cpp for the tensors of a layer.
GGUF_LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor of transformers' `Qwen3Model`."""
    if name.startswith("layers."):
        _, layer, *module, _ = name.split(".")
        return f"blk.{layer}.{GGUF_LAYER['.'.join(module)]}.weight"
    return {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}[name]


def gguf(quantized: str, folder: Path, target: Path) -> None:
    """The model for llama.cpp. As its converter does, keeps vectors in f32, and quantises matrices,
    the word embeddings included, to `quantized`: F16 or Q8_0."""
    import torch
    from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, PoolingType, quants
    from safetensors.torch import load_file

    kind = GGMLQuantizationType[quantized]
    config = json.loads((folder / "hf/config.json").read_text())
    tokenizer = json.loads((folder / "hf/tokenizer.json").read_text())
    target.mkdir()
    writer = GGUFWriter(target / "model.gguf", "qwen3")
    writer.add_file_type(LlamaFileType[f"MOSTLY_{quantized}"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_pooling_type(PoolingType.LAST)
    words = [*tokenizer["model"]["vocab"], *SPECIAL]
    unused = [f"[unused{i}]" for i in range(config["vocab_size"] - len(words))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*words, *unused])
    normal, control, none = 1, 3, 5  # llama.cpp's types of tokens
    kinds = [normal] * (len(words) - len(SPECIAL)) + [control] * len(SPECIAL) + [none] * len(unused)
    writer.add_token_types(kinds)
    writer.add_eos_token_id(config["pad_token_id"])
    writer.add_add_eos_token(True)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    for name, tensor in load_file(folder / "hf/model.safetensors").items():
        values = tensor.to(torch.float32).numpy()
        of_kind = kind if values.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), quants.quantize(values, of_kind), raw_dtype=of_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

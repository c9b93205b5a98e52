"""Creates the golden files: results of PyTorch, Hugging Face transformers and
sentence-transformers, with which the tests compare. Run from the repository's root:

    pip install -r tests/golden/requirements.txt
    python tests/golden/generate.py

The files that `save` writes have the library versions and the seed in their metadata. All arithmetic is f32.
"""

import json
import random
import shutil
import tempfile
from pathlib import Path

import sentence_transformers
import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers.models import Dense, Normalize, Pooling, Transformer
from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForNextSentencePrediction,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertLMHeadModel,
    BertModel,
    BertTokenizer,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    pipeline,
)
from transformers.activations import ACT2FN

HERE = Path(__file__).parent
MINILM = HERE.parent.parent / "weights/all-MiniLM-L6-v2"
SEED = 20260


def save(path, tensors, **metadata):
    path.parent.mkdir(exist_ok=True)
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    versions = {m.__name__: m.__version__ for m in (torch, transformers, sentence_transformers)}
    save_file(tensors, path, metadata={"seed": str(torch.initial_seed()), **versions, **metadata})
    sort_metadata(path)
    print(path.relative_to(HERE), path.stat().st_size)


def sort_metadata(path):
    """Sorts the metadata of a file: safetensors writes it in a random order."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    path.write_bytes(data[:8] + text.ljust(end - 8) + data[end:])


# Cases of torch.nn.MultiheadAttention: sizes [B, T, S, E, H], arguments, and features of the inputs
# and masks. tests/golden_attention.rs has the same table.
ATTENTION = {
    "padding": ([7, 13, 15, 32, 4], {}, {"padding"}),
    "self": ([2, 5, 5, 12, 3], {}, {"self"}),
    "causal": ([2, 5, 5, 12, 3], {}, {"self", "causal"}),
    "cross": ([3, 4, 7, 12, 3], {}, {"cross", "padding"}),
    "padding_causal": ([3, 6, 6, 12, 2], {}, {"self", "causal", "padding"}),
    "float_mask": ([2, 4, 7, 12, 3], {}, {"bias"}),
    "kdim_vdim": ([2, 4, 7, 12, 3], {"kdim": 10, "vdim": 14}, {"padding"}),
    "no_bias": ([2, 4, 7, 12, 3], {"bias": False}, set()),
    "one_head": ([2, 4, 7, 12, 1], {}, {"padding"}),
    "long": ([1, 211, 307, 8, 2], {}, {"padding"}),
}


def attention(name, sizes, arguments, features):
    """One case: parameters, inputs, output, attention weights, and gradients of mean(output²)."""
    b, t, s, e, h = sizes
    module = nn.MultiheadAttention(e, h, batch_first=True, **arguments).eval()
    for bias in (module.in_proj_bias, module.out_proj.bias):
        if bias is not None:
            nn.init.normal_(bias, std=0.1)
    query = torch.randn(b, t, e, requires_grad=True)
    key = torch.randn(b, s, module.kdim, requires_grad=True)
    value = torch.randn(b, s, module.vdim, requires_grad=True)
    if "self" in features:
        key = value = query
    if "cross" in features:
        value = key
    inputs = {"in.query": query, "in.key": key, "in.value": value}
    masks = {}
    if "padding" in features:
        # the first key is always visible, so that every query of a causal mask sees a key
        lens = torch.randint(1, s + 1, (b,))
        # 1 = may attend; PyTorch's key_padding_mask is the opposite
        padding = torch.arange(s) < lens[:, None]
        masks["key_padding_mask"] = ~padding
        inputs |= {"in.padding": padding.to(torch.uint8), "in.valid_lens": lens}
    if "causal" in features:
        masks["attn_mask"] = torch.ones(t, s, dtype=torch.bool).triu(1)
    if "bias" in features:
        masks["attn_mask"] = torch.randn(t, s)
        masks["attn_mask"][1, 2] = float("-inf")
        inputs["in.bias"] = masks["attn_mask"]
    output, weights = module(query, key, value, average_attn_weights=False, **masks)
    output.square().mean().backward()

    names = ("query", "key", "value")
    qkv = module.in_proj_weight
    if qkv is None:
        parameters = {f"{n}.weight": getattr(module, f"{n[0]}_proj_weight") for n in names}
        gradients = {f"{n}.weight": p.grad for n, p in zip(names, parameters.values())}
    else:
        parameters = {f"{n}.weight": w for n, w in zip(names, qkv.chunk(3))}
        gradients = {f"{n}.weight": w for n, w in zip(names, qkv.grad.chunk(3))}
    if module.in_proj_bias is not None:
        bias = module.in_proj_bias
        parameters |= {f"{n}.bias": w for n, w in zip(names, bias.chunk(3))}
        gradients |= {f"{n}.bias": w for n, w in zip(names, bias.grad.chunk(3))}
        parameters["output.bias"] = module.out_proj.bias
        gradients["output.bias"] = module.out_proj.bias.grad
    parameters["output.weight"] = module.out_proj.weight
    gradients["output.weight"] = module.out_proj.weight.grad
    gradients["in.query"] = query.grad
    tensors = parameters | inputs | {"out.output": output}
    if name != "long":
        tensors["out.weights"] = weights
    if name in ("self", "padding_causal", "cross", "kdim_vdim"):
        tensors |= {f"grad.{n}": g for n, g in gradients.items()}
    return {f"{name}.{n}": tensor for n, tensor in tensors.items()}


def attentions():
    torch.manual_seed(SEED)
    tensors = {}
    with torch.enable_grad():
        for name, case in ATTENTION.items():
            tensors |= attention(name, *case)
    b, h, t, s, d, value_d = 2, 6, 5, 9, 4, 3
    q, k = torch.randn(b, h, t, d), torch.randn(b, h, s, d)
    v, bias = torch.randn(b, h, s, value_d), torch.randn(b, 1, t, s)
    keep = torch.rand(b, h, t, s) < 0.6
    keep[0, 0, 0] = False  # a query with no visible key
    attend = F.scaled_dot_product_attention
    grouped_k, grouped_v = k[:, :2].contiguous(), v[:, :2].contiguous()
    tensors |= {
        "sdpa.q": q, "sdpa.k": k, "sdpa.v": v, "sdpa.bias": bias, "sdpa.keep": keep.to(torch.uint8),
        "sdpa.none": attend(q, k, v),
        "sdpa.scale": attend(q, k, v, scale=0.3),
        "sdpa.keep.out": attend(q, k, v, attn_mask=keep),
        "sdpa.bias.out": attend(q, k, v, attn_mask=bias),
        "sdpa.causal": attend(q, k[:, :, :t], v[:, :, :t], is_causal=True),
        "sdpa.grouped": attend(q, grouped_k, grouped_v, enable_gqa=True),
    }  # fmt: skip
    save(HERE / "attention.safetensors", tensors)


def activations():
    x = torch.cat([torch.linspace(-20, 20, 401), torch.linspace(-1, 1, 201)])
    names = ["gelu", "gelu_python", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "silu"]
    names += ["swish", "tanh", "quick_gelu", "mish", "sigmoid"]
    save(HERE / "activations.safetensors", {"x": x} | {name: ACT2FN[name](x) for name in names})


def tiny_bert(activation, prefix="", gamma_beta=False):
    """A BertModel with padding on both sides: hidden states, attentions, pooler output."""
    config = BertConfig(
        vocab_size=101, hidden_size=24, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=40, max_position_embeddings=19, type_vocab_size=2,
        hidden_act=activation, layer_norm_eps=1e-6, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(SEED)
    model = widen(BertModel(config))
    b, t = 5, 17
    input_ids = torch.randint(0, 101, (b, t))
    token_type_ids = torch.randint(0, 2, (b, t))
    mask = torch.ones(b, t, dtype=torch.int64)
    for row, (first, last) in enumerate([(0, 17), (0, 1), (0, 9), (4, 17), (3, 12)]):
        mask[row, :first], mask[row, last:] = 0, 0
    out = model(
        input_ids, attention_mask=mask, token_type_ids=token_type_ids,
        output_hidden_states=True, output_attentions=True,
    )  # fmt: skip
    tensors = {"input_ids": input_ids, "token_type_ids": token_type_ids, "mask": mask}
    tensors |= {f"hidden_states.{i}": x for i, x in enumerate(out.hidden_states)}
    tensors |= {f"attentions.{i}": x for i, x in enumerate(out.attentions)}
    tensors |= {"pooler_output": out.pooler_output}
    folder = HERE / f"bert_{activation}"
    save(folder / "expected.safetensors", tensors)

    state = {f"{prefix}{name}": x for name, x in model.state_dict().items()}
    if gamma_beta:
        old_names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        for new, old in old_names.items():
            state = {name.replace(new, old): x for name, x in state.items()}
    save(folder / "model.safetensors", state)
    (folder / "config.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n")


def widen(model, std=0.3):
    """Replaces all parameters by random ones of a larger variance, so that outputs are far from
    uniform. The weights of normalisations, the only vectors named `weight`, have mean 1."""
    for name, parameter in model.named_parameters():
        is_norm_weight = name.endswith("weight") and parameter.ndim == 1
        nn.init.normal_(parameter, mean=float(is_norm_weight), std=std)
    return model.eval()


TINY = dict(
    vocab_size=53, hidden_size=24, num_hidden_layers=2, num_attention_heads=3,
    intermediate_size=40, max_position_embeddings=32, type_vocab_size=2,
    attn_implementation="eager",
)  # fmt: skip


def lm_head():
    """BertLMHeadModel as a decoder, alone and with cross-attention."""
    for cross in (False, True):
        torch.manual_seed(SEED + 1)
        config = BertConfig(**TINY, is_decoder=True, add_cross_attention=cross, use_cache=True)
        model = widen(BertLMHeadModel(config))
        b, t, s = 3, 9, 6
        input_ids = torch.randint(0, config.vocab_size, (b, t))
        mask = torch.ones(b, t, dtype=torch.int64)
        mask[1, 7:], mask[2, 3:] = 0, 0
        tensors = {"input_ids": input_ids, "mask": mask}
        arguments = {"attention_mask": mask}
        if cross:
            memory_mask = torch.ones(b, s, dtype=torch.int64)
            memory_mask[0, 4:], memory_mask[2, 1:] = 0, 0
            memory = torch.randn(b, s, config.hidden_size)
            arguments |= {"encoder_hidden_states": memory, "encoder_attention_mask": memory_mask}
            tensors |= {"memory": memory, "memory_mask": memory_mask}
        out = model(input_ids, **arguments, output_attentions=True)
        tensors["logits"] = out.logits
        folder = HERE / ("bert_lm_cross" if cross else "bert_lm")
        attentions = {"causal": torch.stack(out.attentions)}
        if cross:
            attentions["cross"] = torch.stack(out.cross_attentions)
        save(folder / "attentions.safetensors", attentions)
        save(folder / "expected.safetensors", tensors)
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)


def bert2bert():
    """EncoderDecoderModel: logits, and the outputs of greedy and beam search."""
    torch.manual_seed(SEED + 5)
    encoder = BertConfig(**TINY)
    own = dict(vocab_size=47, tie_word_embeddings=False)
    decoder = BertConfig(**TINY | own, is_decoder=True, add_cross_attention=True)
    config = EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id, config.eos_token_id = 1, 0, 2
    config.tie_word_embeddings = False
    model = widen(EncoderDecoderModel(config=config))
    for name, parameter in model.decoder.named_parameters():
        # so that tokens differ from step to step, and some sequences end early
        parameter *= 4 if "embeddings.weight" in name else 0.1 if "bias" in name else 1
    model.decoder.cls.predictions.decoder.bias[2] += 2
    b, s, t = 4, 7, 5
    input_ids = torch.randint(3, encoder.vocab_size, (b, s))
    mask = torch.ones(b, s, dtype=torch.int64)
    mask[1, 5:], mask[3, 2:] = 0, 0
    decoder_input_ids = torch.randint(3, decoder.vocab_size, (b, t))
    out = model(input_ids, attention_mask=mask, decoder_input_ids=decoder_input_ids)
    arguments = dict(attention_mask=mask, max_length=12, decoder_start_token_id=1, eos_token_id=2,
                     pad_token_id=0, do_sample=False)  # fmt: skip
    beam = dict(num_beams=3, early_stopping=False)
    save(HERE / "bert2bert/expected.safetensors", {
        "input_ids": input_ids, "mask": mask, "decoder_input_ids": decoder_input_ids,
        "logits": out.logits,
        "greedy": model.generate(input_ids, **arguments),
        "beam": model.generate(input_ids, **arguments, **beam, length_penalty=1.0),
        "beam_short": model.generate(input_ids, **arguments, **beam, length_penalty=-2.0),
    })  # fmt: skip
    model.save_pretrained(HERE / "bert2bert")
    (HERE / "bert2bert/generation_config.json").unlink(missing_ok=True)


def bert2bert_wide():
    """An encoder and a decoder of different widths; beam search with early stopping."""
    torch.manual_seed(SEED + 5)
    encoder = BertConfig(**TINY | dict(hidden_size=16, num_attention_heads=2, vocab_size=31))
    decoder = BertConfig(**TINY | dict(vocab_size=29), is_decoder=True, add_cross_attention=True)
    config = EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id, config.eos_token_id = 1, 0, 2
    model = widen(EncoderDecoderModel(config=config))
    input_ids = torch.randint(3, encoder.vocab_size, (3, 6))
    decoder_input_ids = torch.randint(3, decoder.vocab_size, (3, 5))
    out = model(input_ids, decoder_input_ids=decoder_input_ids)
    beams = dict(num_beams=4, early_stopping=True, length_penalty=0.5, do_sample=False)
    ids = dict(decoder_start_token_id=1, eos_token_id=2, pad_token_id=0, max_length=12)
    written = model.generate(input_ids, **beams, **ids, attention_mask=input_ids.ge(0).long())
    save(HERE / "bert2bert_wide/expected.safetensors", {
        "input_ids": input_ids, "decoder_input_ids": decoder_input_ids, "logits": out.logits,
        "beam_early": written,
    })  # fmt: skip
    model.save_pretrained(HERE / "bert2bert_wide")
    (HERE / "bert2bert_wide/generation_config.json").unlink(missing_ok=True)


def sentences():
    """The built-in model: all stages for three sentences, and the embeddings of all sentences."""
    texts = (HERE / "sentences.txt").read_text().splitlines()
    edge_cases = json.loads((HERE / "edge_cases.json").read_text())
    pipeline = sentence_transformers.SentenceTransformer(
        str(MINILM), device="cpu", model_kwargs={"torch_dtype": "float32"}
    )
    ids = [pipeline.tokenizer(text, truncation=True)["input_ids"] for text in texts]
    tensors = {f"input_ids.{i}": torch.tensor(x) for i, x in enumerate(ids)}
    model = BertModel.from_pretrained(
        MINILM, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for i in range(3):
        out = model(torch.tensor([ids[i]]), output_hidden_states=True, output_attentions=True)
        tensors |= {f"embeddings.{i}": out.hidden_states[0]}
        tensors |= {f"layer_0_attention.{i}": out.attentions[0]}
        tensors |= {f"layer_0_output.{i}": out.hidden_states[1]}
        tensors |= {f"last_layer.{i}": out.hidden_states[-1]}
    tensors |= {"pooled": pipeline.encode(texts, convert_to_tensor=True)}
    tensors |= {"edge_cases": pipeline.encode(edge_cases, convert_to_tensor=True)}
    save(HERE / "sentences.safetensors", tensors, model=MINILM.name)


# The heads: class, activation of the encoder, and other settings.
HEADS = {
    "masked_lm": (BertForMaskedLM, "gelu_new", {}),
    "next_sentence": (BertForNextSentencePrediction, "silu", {}),
    "sequence": (BertForSequenceClassification, "quick_gelu", {"num_labels": 3}),
    "score": (BertForSequenceClassification, "tanh", {"num_labels": 1}),
    "token": (BertForTokenClassification, "mish", {"num_labels": 5}),
    "answer": (BertForQuestionAnswering, "relu", {}),
}


def heads():
    """Models with heads: checkpoints, logits of padded pairs, and outputs of pipelines."""
    for name, (model_class, activation, more) in HEADS.items():
        torch.manual_seed(SEED + 9)
        config = BertConfig(**TINY | {"num_hidden_layers": 1}, hidden_act=activation, **more)
        model = widen(model_class(config))
        b, t = 3, 9
        input_ids = torch.randint(0, config.vocab_size, (b, t))
        token_type_ids = (torch.arange(t) >= 4).long().expand(b, t)
        mask = torch.ones(b, t, dtype=torch.int64)
        mask[1, 7:], mask[2, 3:] = 0, 0
        tensors = {"input_ids": input_ids, "token_type_ids": token_type_ids, "mask": mask}
        out = model(input_ids, attention_mask=mask, token_type_ids=token_type_ids)
        for key in ["logits", "start_logits", "end_logits"]:
            if key in out:
                tensors[key] = out[key]
        folder = HERE / f"heads/{name}"
        folder.mkdir(parents=True, exist_ok=True)
        save(folder / "expected.safetensors", tensors)
        model.save_pretrained(folder)
    # Subtract the mean logits, so that the tokens get different labels.
    tagger = BertForTokenClassification.from_pretrained(HERE / "heads/token")
    golden = load_file(HERE / "heads/token/expected.safetensors")
    tagger.classifier.bias -= golden["logits"].mean((0, 1))
    tagger.config.id2label = dict(enumerate(TAGS))
    tagger.save_pretrained(HERE / "heads/tagger")
    letters = "abcdefghijklmnopqrstuvwx"
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{x}" for x in letters)]
    for name in ("sequence", "score", "masked_lm", "tagger", "answer"):
        folder = HERE / f"heads/{name}"
        (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces))
        own = {"tokenizer_class": "BertTokenizer", "model_max_length": 32}
        (folder / "tokenizer_config.json").write_text(json.dumps(own) + "\n")
    texts = ["a cab", "", "Café x", "dead beef " * 9, "yz", "fade"]
    classify = pipeline("text-classification", str(HERE / "heads/sequence"), device="cpu", top_k=None)
    labels = [{x["label"]: x["score"] for x in found} for found in classify(texts, truncation=True)]
    encoder = sentence_transformers.CrossEncoder(str(HERE / "heads/score"), device="cpu")
    tensors = {}
    for query in ("bad cab", "dead beef " * 4):
        tensors[f"rerank.{query.strip()}"] = encoder.predict(
            [(query, text) for text in texts], convert_to_tensor=True
        )
    logits = encoder.predict(
        [("bad cab", text) for text in texts], activation_fn=nn.Identity(), convert_to_tensor=True
    )
    fill = pipeline("fill-mask", str(HERE / "heads/masked_lm"), device="cpu", top_k=5)
    found = fill("a [MASK] cab [MASK] bad")
    tensors |= {"fill.tokens": torch.tensor([[x["token"] for x in gap] for gap in found])}
    tensors |= {"fill.scores": torch.tensor([[x["score"] for x in gap] for gap in found])}
    tensors |= entities(HERE / "heads/tagger")
    tensors["answer.spans"], tensors["answer.none"] = answers(HERE / "heads/answer")
    scores = [[found[label] for label in sorted(found)] for found in labels]
    save(HERE / "heads/texts.safetensors",
         tensors | {"classify": torch.tensor(scores), "rerank_logits": logits})  # fmt: skip


GROUPS = ["O", "PER", "LOC"]
TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
TAGGED = "Café bead, Abba (cab) ébb faced"
QUESTION, CONTEXT = "bad?", "A café fed, a cab: bead"


def entities(folder):
    """The entities of the token-classification pipeline for each aggregation, with ranges in bytes,
    as in Rust."""
    tag = pipeline("token-classification", str(folder), device="cpu")
    tensors = {}
    for strategy in ("none", "simple", "first", "average", "max"):
        found = [
            [TAGS.index(key) if (key := x.get("entity")) else GROUPS.index(x["entity_group"]),
             len(TAGGED[: x["start"]].encode()), len(TAGGED[: x["end"]].encode()), x["score"]]
            for x in tag(TAGGED, aggregation_strategy=strategy)
        ]  # fmt: skip
        tensors[f"tag.{strategy}"] = torch.tensor(found, dtype=torch.float64)
    return tensors


def answers(folder):
    """The five most probable spans of at most 15 tokens, in bytes and extended to whole words, and
    the probability of no answer, computed span by span from the definition."""
    model = BertForQuestionAnswering.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoding = tokenizer(QUESTION, CONTEXT, return_tensors="pt", return_offsets_mapping=True)
    offsets = encoding.pop("offset_mapping")[0].tolist()
    out = model(**encoding)
    in_context = [i for i, s in enumerate(encoding.sequence_ids(0)) if s == 1]
    allowed = torch.zeros(len(offsets), dtype=torch.bool)
    allowed[[0, *in_context]] = True  # the scores at position 0 are those of no answer
    start, end = (
        logits[0].masked_fill(~allowed, float("-inf")).softmax(0)
        for logits in (out.start_logits, out.end_logits)
    )
    words = encoding.word_ids(0)
    found = []
    for i in in_context:
        for j in (j for j in in_context if i <= j < i + 15):
            first = min(k for k in in_context if words[k] == words[i])
            last = max(k for k in in_context if words[k] == words[j])
            span = [len(CONTEXT[:k].encode()) for k in (offsets[first][0], offsets[last][1])]
            found.append([*span, float(start[i] * end[j])])
    found.sort(key=lambda span: -span[2])
    return torch.tensor(found[:5], dtype=torch.float64), start[0] * end[0]


def pickles():
    """A state dict in the current format of torch.save and in the format before PyTorch 1.6, with
    views of storages, transposed strides and parameters. The older file also has f64, a nested
    dictionary and the state of an optimizer."""
    state = BertForSequenceClassification.from_pretrained(HERE / "heads/sequence").state_dict()
    state["bert.embeddings.position_ids"] = torch.arange(19)[None]
    layer = "bert.encoder.layer.0.attention.self"
    for kind in ("weight", "bias"):
        parts = [f"{layer}.{part}.{kind}" for part in ("query", "key", "value")]
        fused = torch.cat([state[part] for part in parts])
        state |= dict(zip(parts, fused.chunk(3)))
    for name in [name for name in state if name.endswith("dense.weight")]:
        state[name] = state[name].t().contiguous().t()
    state["classifier.bias"] = nn.Parameter(state["classifier.bias"])
    folder = HERE / "pickled"
    folder.mkdir(exist_ok=True)
    torch.save(state, folder / "archive.bin")
    state["classifier.weight"] = state["classifier.weight"].double()
    moments = {"step": 3, "exp_avg": torch.ones(7), "exp_avg_sq": torch.ones(7)}
    optimizer = {"state": {0: moments}, "param_groups": [{"lr": 1e-3, "params": [0]}]}
    early = {"state_dict": state, "epoch": 3, "optimizer": optimizer}
    torch.save(early, folder / "early.bin", _use_new_zipfile_serialization=False)


POOLING_MODES = ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]


def poolings():
    """All pooling modes on padded hidden states, with and without a prompt of two tokens."""
    torch.manual_seed(SEED)
    lengths = [5, 3, 4]
    hidden = torch.randn(len(lengths), max(lengths), 7)
    mask = torch.tensor([[int(i < n) for i in range(max(lengths))] for n in lengths])
    tensors = {"hidden": hidden, "lengths": torch.tensor(lengths)}
    for name in [*POOLING_MODES, "max+lasttoken"]:
        for prompt in [0, 2]:
            pooling = Pooling(7, pooling_mode=name.split("+"), include_prompt=prompt == 0)
            features = {"token_embeddings": hidden, "attention_mask": mask, "prompt_length": prompt}
            tensors[f"{name}.{prompt}"] = pooling(features)["sentence_embedding"]
    save(HERE / "pooling.safetensors", tensors)


def sentence_chain():
    """The built-in model followed by other modules, with prompts. The folder does not contain the
    model's files."""
    torch.manual_seed(SEED)
    folder = HERE / "sentence_chain"
    texts = (HERE / "sentences.txt").read_text().splitlines()
    transformer = Transformer(str(MINILM), model_kwargs={"torch_dtype": "float32"})
    width = transformer.get_embedding_dimension()
    pooling = Pooling(width, pooling_mode=("cls", "weightedmean"), include_prompt=False)
    dense = [
        Dense(2 * width, 12, activation_function=nn.Tanh()),
        Dense(12, 12, bias=False, activation_function=nn.Identity(), use_residual=True),
        Dense(12, 9, activation_function=nn.GELU(), use_residual=True),
    ]
    prompts = {"query": "Find a sentence: ", "passage": "A passage: ", "topic": "Topic: "}
    pipeline = sentence_transformers.SentenceTransformer(
        modules=[transformer, pooling, *dense, Normalize()],
        prompts=prompts,
        default_prompt_name="topic",
        device="cpu",
    )
    encode = {
        "default": pipeline.encode,
        "query": pipeline.encode_query,
        "document": pipeline.encode_document,
        "passage": lambda texts, **k: pipeline.encode(texts, prompt_name="passage", **k),
        "text": lambda texts, **k: pipeline.encode(texts, prompt="Say: ", **k),
        "cut": lambda texts, **k: pipeline.encode(
            texts, truncate_dim=5, normalize_embeddings=True, **k
        ),
    }
    tensors = {name: f(texts, convert_to_tensor=True) for name, f in encode.items()}
    save(HERE / "sentence_chain.safetensors", tensors, model=MINILM.name)
    with tempfile.TemporaryDirectory() as saved:
        pipeline.save(saved, create_model_card=False)
        shutil.rmtree(folder, ignore_errors=True)
        for module in [Path(saved), *Path(saved).glob("[1-9]_*")]:
            own = folder / module.relative_to(saved)
            own.mkdir(parents=True)
            names = ["modules.json", "config_sentence_transformers.json"]
            if own != folder:
                names = ["config.json", "model.safetensors"]
            for name in names:
                if (module / name).exists():
                    shutil.copy(module / name, own)


# Settings of tokenizer_config.json for each kind of normalisation.
WORD_PIECES = {
    "default": {},
    "cased": {"do_lower_case": False},
    "accents": {"strip_accents": False},
    "cased_without_accents": {"do_lower_case": False, "strip_accents": True},
    "chinese_words": {"tokenize_chinese_chars": False},
}


def nasty_texts(count):
    """Random texts with characters that are difficult for a normaliser."""
    chance = random.Random(SEED)
    parts = [
        *"Café naïve ÅNGSTRÖM e\u0301te\u0301 ﬁne Straße İstanbul ΣΑΣ ǅungla ñandú Zürich".split(),
        *"東京 日本語テキスト 中文字符 𠀀𠮷 한국어 한글 ภาษาไทย हिन्दी עִבְרִית اللُّغَةُ Ελληνικά".split(),
        *"👩‍👩‍👧‍👦 🇩🇪 👍🏽 ☃️ 🏴‍☠️ ❤ ½ ² Ⅷ № ™ … — “quoted” ‘x’ «y» ¿qué? a_b a-b a.b,c don't".split(),
        *"[MASK] [CLS] [SEP] [UNK] [PAD] [mask] [ MASK ] ##s ##ing # ## $%^&* \\ /path <b> {}".split(),
        *"http://x.y/z?q=1#f user@example.com 3.14159 1,000,000 0x1F C++ #hashtag ЖизНЬ mixedСкрипт".split(),
        *["x" * 99, "x" * 100, "x" * 101, "é" * 100, "supercalifragilistic" * 4, "\u00a0", "\u3000"],
        *["\t", "\n", "\r\n", "\x00", "\x07", "\x7f", "\u200b", "\u200d", "\ufeff", "\ufffd", "\u2028"],
        *["\u0300", "a\u0300\u0301\u0302", "\u1e9b\u0323", "\ue000", "\U000f0000", "\u00ad", "\u0000x"],
    ]
    texts = ["", " ", "\n", "hello", *parts]
    while len(texts) < count:
        some = [chance.choice(parts) for _ in range(chance.randint(1, 8))]
        texts.append("".join(part + chance.choice(["", " ", "  "]) for part in some))
    return texts[:count]


def word_pieces():
    """Token ids of the nasty texts, with the built-in model's vocabulary as vocab.txt."""
    texts = nasty_texts(500)
    (HERE / "nasty_texts.json").write_text(json.dumps(texts, ensure_ascii=True, indent=0) + "\n")
    pieces = json.loads((MINILM / "tokenizer.json").read_text())["model"]["vocab"]
    lines = "".join(f"{piece}\n" for piece in sorted(pieces, key=pieces.get))
    tensors = {}
    for name, config in WORD_PIECES.items():
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "vocab.txt").write_text(lines)
            config |= {"tokenizer_class": "BertTokenizer", "model_max_length": 100}
            (Path(folder) / "tokenizer_config.json").write_text(json.dumps(config))
            (Path(folder) / "config.json").write_text('{"model_type": "bert"}')
            tokenizer = BertTokenizer.from_pretrained(folder)
        ids = [tokenizer(text, truncation=True)["input_ids"] for text in texts]
        tensors[f"{name}.lengths"] = torch.tensor([len(x) for x in ids], dtype=torch.int32)
        tensors[f"{name}.ids"] = torch.tensor([i for x in ids for i in x], dtype=torch.int32)
    save(HERE / "nasty_texts.safetensors", tensors)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    attentions()
    activations()
    tiny_bert("gelu")
    tiny_bert("relu", prefix="bert.", gamma_beta=True)
    lm_head()
    bert2bert()
    bert2bert_wide()
    sentences()
    poolings()
    sentence_chain()
    word_pieces()
    heads()
    pickles()

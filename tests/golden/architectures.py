"""Creates the golden files in architectures/: small random checkpoints of every architecture but
BERT, with the results of Hugging Face transformers, and the token ids of their tokenizers. Run from
the repository's root:

    pip install -r tests/golden/requirements.txt
    python tests/golden/architectures.py [NAME ...]
"""

import inspect
import io
import json
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import jina_bert
import sentence_transformers
import sentencepiece
import torch
from generate import HERE, SEED, TAGGED, TAGS, entities, nasty_texts, save, widen
from safetensors.torch import load_file, save_file
from sentence_transformers.models import Normalize, Pooling, Transformer
from sentencepiece import sentencepiece_model_pb2
from torch.nn import functional as F
from tokenizers import BertWordPieceTokenizer, ByteLevelBPETokenizer
from transformers import (
    AlbertTokenizer,
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DebertaV2Tokenizer,
    MPNetTokenizer,
    RobertaTokenizer,
    XLMRobertaTokenizer,
    pipeline,
)
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

FOLDER = HERE / "architectures"

# Standard deviation of the weights: so small that attention weights in f32 are accurate to 1e-6.
STD = 0.2
# The settings that all architectures share, unless ARCHITECTURES overrides them.
SIZES = dict(
    vocab_size=47, hidden_size=20, num_hidden_layers=3, num_attention_heads=5,
    intermediate_size=28, max_position_embeddings=21, hidden_act="gelu",
)  # fmt: skip
# The models, the settings in which they differ from SIZES, and whether transformers has a head of
# the architecture that answers questions.
ARCHITECTURES = json.loads((HERE / "architectures.json").read_text())
HEADS = {
    "masked_lm": (AutoModelForMaskedLM, {}),
    "sequence": (AutoModelForSequenceClassification, {"num_labels": 3}),
    "token": (AutoModelForTokenClassification, {"num_labels": 4}),
    "answer": (AutoModelForQuestionAnswering, {}),
}


def inputs(config):
    """Padded sequences: no token hidden, padding on the right, padding on the left, padding ids among
    the visible tokens and a hidden token between them, and hidden tokens at both ends."""
    b, t = 5, 150 if config.max_position_embeddings > 150 else 15
    pad = config.pad_token_id
    ids = torch.randint(4, config.vocab_size, (b, t))
    mask = torch.ones(b, t, dtype=torch.int64)
    ids[1, 9:], mask[1, 9:] = pad, 0
    ids[2, :4], mask[2, :4] = pad, 0
    ids[3, 5], ids[3, 11] = pad, pad
    mask[3, 8], mask[4, 12:], mask[4, :2] = 0, 0, 0
    types = torch.zeros(b, t, dtype=torch.int64)
    if getattr(config, "type_vocab_size", 0) > 1:
        types[:, 7:] = 1
    return {"input_ids": ids, "token_type_ids": types, "attention_mask": mask}


def arguments(model, tensors):
    """The inputs that the model accepts."""
    accepted = inspect.signature(model.forward).parameters
    return {name: tensor for name, tensor in tensors.items() if name in accepted}


def create(name, model_class, **more):
    """A model with random weights; `None` if transformers has no such class."""
    architecture = ARCHITECTURES[name]
    if model_class is AutoModelForQuestionAnswering and not architecture["answers"]:
        return None
    settings = SIZES | architecture["config"] | more
    config = AutoConfig.for_model(architecture["model_type"], **settings)
    model = model_class.from_config(config)
    if "jina" in name:
        return jina_bert.with_zero_positions(widen(jina_bert.gated(model), STD))
    return widen(model, STD)


def outputs(name, model, tensors, **options):
    """The results of a model of the architecture `name`."""
    tensors = arguments(model, tensors)
    if "jina" in name:
        heads = model.config.num_attention_heads
        tensors["attention_mask"] = jina_bert.attention_bias(tensors["attention_mask"], heads)
    if name == "nomic_bert_ntk":
        return alone(model, tensors, **options)
    return model(**tensors, **options)


def alone(model, tensors, **options):
    """The results of each sequence, computed without the hidden tokens at its ends. transformers
    takes dynamic frequencies from the longest sequence of the batch, or of an earlier batch."""
    b, t = tensors["input_ids"].shape
    joined = {}
    for i in range(b):
        for module in model.modules():
            if hasattr(module, "original_inv_freq"):
                module.max_seq_len_cached = module.original_max_seq_len
                module.inv_freq = module.original_inv_freq.clone()
        visible = tensors["attention_mask"][i].nonzero().flatten()
        start, end = visible[0].item(), visible[-1].item() + 1
        out = model(**{key: x[i : i + 1, start:end] for key, x in tensors.items()}, **options)
        for key, value in out.items():
            is_tuple = isinstance(value, tuple)
            for j, x in enumerate(value if is_tuple else (value,)):
                pads = {"attentions": (start, t - end, start, t - end)}
                if key == "logits" and x.dim() == 2:  # logits of sequences, not of tokens
                    pad = ()
                else:
                    pad = pads.get(key, (0, 0, start, t - end))
                joined.setdefault(key, {}).setdefault(j, []).append(F.pad(x, pad))
    for key, values in joined.items():
        stacked = tuple(torch.cat(parts) for parts in values.values())
        joined[key] = stacked if key in ("hidden_states", "attentions") else stacked[0]
    return SimpleNamespace(**joined)


def checkpoints(name):
    """The encoder with all hidden states and attentions, and a model with each head."""
    model_type = ARCHITECTURES[name]["model_type"]
    torch.manual_seed(SEED + 20)
    model = create(name, AutoModel, attn_implementation="eager")
    tensors = inputs(model.config)
    out = outputs(name, model, tensors, output_hidden_states=True, output_attentions=True)
    expected = {f"hidden_states.{i}": x for i, x in enumerate(out.hidden_states)}
    expected |= {f"attentions.{i}": x for i, x in enumerate(out.attentions)}
    if getattr(out, "pooler_output", None) is not None:
        expected["pooler_output"] = out.pooler_output
    write(name, "encoder", model, tensors | expected)
    older = {"modernbert": older_modernbert, "nomic_bert": older_nomic_bert}
    older |= {"gte": older_gte} if name == "gte" else {}
    if model_type in older:
        path = FOLDER / name / "encoder/config.json"
        path.write_text(json.dumps(older[model_type](json.loads(path.read_text())), indent=2) + "\n")
    for head, (model_class, more) in HEADS.items():
        model = create(name, model_class, num_hidden_layers=1, **more)
        if model is None:
            continue
        out = vars(outputs(name, model, tensors))
        keys = ("logits", "start_logits", "end_logits")
        found = {key: out[key] for key in keys if out.get(key) is not None}
        write(name, head, model, tensors | found)


def older_modernbert(config):
    """The keys of the first ModernBERT checkpoints."""
    rope = config.pop("rope_parameters")
    del config["layer_types"]
    thetas = {
        "global_rope_theta": rope["full_attention"]["rope_theta"],
        "local_rope_theta": rope["sliding_attention"]["rope_theta"],
    }
    return config | {"global_attn_every_n_layers": 3} | thetas


def older_nomic_bert(config):
    """The keys of the first NomicBERT checkpoints. The vocabulary is padded to a multiple of 8."""
    rope = config["rope_parameters"]
    is_scaled = rope["rope_type"] == "dynamic"
    code = "nomic-ai/nomic-bert-2048--"
    return {
        "activation_function": "swiglu",
        "architectures": ["NomicBertModel"],
        "auto_map": {
            "AutoConfig": code + "configuration_hf_nomic_bert.NomicBertConfig",
            "AutoModel": code + "modeling_hf_nomic_bert.NomicBertModel",
        },
        "causal": False,
        "layer_norm_epsilon": config["layer_norm_eps"],
        "max_trained_positions": config["max_position_embeddings"] if is_scaled else 2048,
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
        "model_type": "nomic_bert",
        "n_embd": config["hidden_size"],
        "n_head": config["num_attention_heads"],
        "n_inner": config["intermediate_size"],
        "n_layer": config["num_hidden_layers"],
        "n_positions": 32 if is_scaled else config["max_position_embeddings"],
        "pad_vocab_size_multiple": 1 if is_scaled else 8,
        "parallel_block": False,
        "prenorm": False,
        "qkv_proj_bias": False,
        "rotary_emb_base": int(rope["rope_theta"]),
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "rotary_scaling_factor": rope["factor"] if is_scaled else None,
        "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True,
        "tie_word_embeddings": True,
        "type_vocab_size": config["type_vocab_size"],
        "use_rms_norm": False,
        "vocab_size": config["vocab_size"] if is_scaled else config["vocab_size"] - 1,
    }


def older_gte(config):
    """The keys of the first GTE checkpoints."""
    rope = config.pop("rope_parameters")
    d = config["hidden_size"] // config["num_attention_heads"]
    factor = round(rope["factor"] ** (d / 2), 6)
    return config | {
        "architectures": ["NewModel"],
        "auto_map": {
            "AutoConfig": "Alibaba-NLP/new-impl--configuration.NewConfig",
            "AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel",
        },
        "layer_norm_type": "layer_norm",
        "logn_attention_clip1": False,
        "logn_attention_scale": False,
        "model_type": "new",
        "pack_qkv": True,
        "position_embedding_type": "rope",
        "rope_scaling": {"factor": factor, "type": "ntk"},
        "rope_theta": int(rope["rope_theta"] / factor),
        "unpad_inputs": False,
        "use_memory_efficient_attention": False,
    }


# save_pretrained writes the tensor names of the first checkpoints. For these architectures, the
# models with a head get the module names of transformers 5 instead.
CURRENT_NAMES = ("nomic_bert", "gte")
# The prefix in the first checkpoints, and the prefix of transformers.
PREFIXES = {"nomic_bert_ntk": ("bert.", "nomic_bert."), "gte_no_types": ("new.", "gte.")}


def write(name, kind, model, tensors):
    folder = FOLDER / name / kind
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    has_current_names = name in CURRENT_NAMES and kind != "encoder"
    model.save_pretrained(folder, save_original_format=not has_current_names)
    if name in PREFIXES:
        first, current = PREFIXES[name]
        path = folder / "model.safetensors"
        saved = {key.replace(current, first): tensor for key, tensor in load_file(path).items()}
        save_file(saved, path, metadata={"format": "pt"})
    if "jina" in name:
        jina_bert.rename(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    save(folder / "expected.safetensors", tensors)


def byte_bpe(folder):
    """RobertaTokenizer with a vocabulary of 400 tokens, as tokenizer.json, and as vocab.json and
    merges.txt."""
    trainer = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    texts = nasty_texts(500)
    trainer.train_from_iterator(texts, vocab_size=400, special_tokens=special, show_progress=False)
    folder.mkdir(parents=True, exist_ok=True)
    trainer.save_model(str(folder))
    state = json.loads(trainer.to_str())["model"]
    merges = [tuple(merge) for merge in state["merges"]]
    tokenizer = RobertaTokenizer(vocab=state["vocab"], merges=merges, model_max_length=64)
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "roberta"}')


def sentence_piece(**settings):
    """A SentencePiece model with a Unigram vocabulary."""
    model = io.BytesIO()
    texts = [text for text in nasty_texts(500) if text.strip()]
    texts += (HERE / "sentences.txt").read_text().splitlines()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, vocab_size=420, model_type="unigram",
        character_coverage=0.98, num_threads=1, minloglevel=2, hard_vocab_limit=False, **settings,
    )  # fmt: skip
    return model.getvalue()


def pieces(**settings):
    """A Unigram vocabulary, without special tokens, and the character map of SentencePiece."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(sentence_piece(**settings))
    vocab = [(piece.piece, piece.score) for piece in proto.pieces][3:]
    return vocab, proto.normalizer_spec.precompiled_charsmap


def unigram(folder):
    """XLMRobertaTokenizer with a character map."""
    vocab, character_map = pieces()
    special = [(token, 0.0) for token in ("<s>", "<pad>", "</s>", "<unk>")]
    tokenizer = XLMRobertaTokenizer(
        vocab=special + vocab + [("<mask>", 0.0)],
        _spm_precompiled_charsmap=character_map,
        model_max_length=64,
    )
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "xlm-roberta"}')


def albert_unigram(folder):
    """AlbertTokenizer without a character map."""
    vocab, _ = pieces(normalization_rule_name="identity")
    special = [(token, 0.0) for token in ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")]
    tokenizer = AlbertTokenizer(vocab=special + vocab, model_max_length=64)
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "albert"}')


def mpnet_word_pieces(folder):
    """MPNetTokenizer with a vocabulary of 300 word pieces."""
    trainer = BertWordPieceTokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "[UNK]", "<mask>"]
    trainer.train_from_iterator(
        nasty_texts(500), vocab_size=300, special_tokens=special, show_progress=False
    )
    vocab = json.loads(trainer.to_str())["model"]["vocab"]
    MPNetTokenizer(vocab=vocab, model_max_length=64).save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "mpnet"}')


def deberta_unigram(folder):
    """DebertaV2Tokenizer."""
    vocab, _ = pieces(normalization_rule_name="identity")
    special = [(token, 0.0) for token in ("[PAD]", "[CLS]", "[SEP]", "[UNK]")]
    vocab = special + vocab + [("[MASK]", 0.0)]
    DebertaV2Tokenizer(vocab=vocab, model_max_length=64).save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "deberta-v2"}')


def camembert_unigram(folder):
    """CamembertTokenizer with a character map."""
    with tempfile.TemporaryDirectory() as source:
        camembert_model(Path(source))
        AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    del settings["extra_special_tokens"]  # so that the class has its default
    path.write_text(json.dumps(settings, indent=2))
    (folder / "config.json").write_text('{"model_type": "camembert"}')


def sentence_piece_folder(folder, file, tokenizer_class, model_type, **settings):
    """A folder with a SentencePiece model and without a tokenizer.json, as transformers 4 saved
    it. The small character map has the same kinds of rules as the default one."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", suffix=".tsv") as rules:
        for a, b in (("…", "..."), ("ﬁ", "fi"), ("e\u0301", "é"), ("Ａ", "A"), ("\t", " ")):
            rules.write(" ".join(f"{ord(c):X}" for c in a))
            rules.write("\t" + " ".join(f"{ord(c):X}" for c in b) + "\n")
        rules.flush()
        model = sentence_piece(normalization_rule_tsv=rules.name, **settings)
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    proto.normalizer_spec.ClearField("normalization_rule_tsv")  # a temporary path
    (folder / file).write_bytes(proto.SerializeToString(deterministic=True))
    tokenizer = {"tokenizer_class": tokenizer_class, "model_max_length": 64}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))


def xlm_roberta_model(folder):
    """XLMRobertaTokenizer with a sentencepiece.bpe.model."""
    sentence_piece_folder(folder, "sentencepiece.bpe.model", "XLMRobertaTokenizer", "xlm-roberta")


def camembert_model(folder):
    """CamembertTokenizer with a sentencepiece.bpe.model."""
    sentence_piece_folder(folder, "sentencepiece.bpe.model", "CamembertTokenizer", "camembert")


def albert_model(folder):
    """AlbertTokenizer with a spiece.model that has user-defined symbols."""
    sentence_piece_folder(
        folder, "spiece.model", "AlbertTokenizer", "albert", pad_id=0, unk_id=1, bos_id=-1,
        eos_id=-1, pad_piece="<pad>", control_symbols=["[CLS]", "[SEP]", "[MASK]"],
        user_defined_symbols=["(", ")", ".", "-"],
    )  # fmt: skip


def deberta_model(folder):
    """DebertaV2Tokenizer with a spm.model and an added_tokens.json."""
    sentence_piece_folder(
        folder, "spm.model", "DebertaV2Tokenizer", "deberta-v2", pad_id=0, bos_id=1, eos_id=2,
        unk_id=3, pad_piece="[PAD]", bos_piece="[CLS]", eos_piece="[SEP]", unk_piece="[UNK]",
    )  # fmt: skip
    proto = sentencepiece_model_pb2.ModelProto.FromString((folder / "spm.model").read_bytes())
    (folder / "added_tokens.json").write_text(json.dumps({"[MASK]": len(proto.pieces)}))


SPECIAL = "special_tokens_map.json"

CONFIG = "config.json"

# For each tokenizer: the function that creates it, and settings of tokenizer_config.json to test.
# The keys SPECIAL and CONFIG have the contents of the files of these names.
TOKENIZERS = {
    "byte_bpe": (byte_bpe, {"default": {}, "prefix_space": {"add_prefix_space": True}}),
    "unigram": (unigram, {"default": {}, "no_prefix_space": {"add_prefix_space": False}}),
    "mpnet_word_pieces": (
        mpnet_word_pieces,
        {
            "default": {},
            "cased": {"do_lower_case": False},
            # The class is ignored, and with it `do_lower_case`: tokenizer.json has all rules.
            "modernbert": {
                "tokenizer_class": "BertTokenizerFast",
                "do_lower_case": False,
                CONFIG: {"model_type": "modernbert"},
            },
        },
    ),
    "albert_unigram": (
        albert_unigram,
        {"default": {}, "cased": {"do_lower_case": False, "keep_accents": True}},
    ),
    "deberta_unigram": (
        deberta_unigram,
        {"default": {}, "punctuation": {"do_lower_case": True, "split_by_punct": True}},
    ),
    "camembert_unigram": (
        camembert_unigram,
        {"default": {}, "no_prefix_space": {"add_prefix_space": False}},
    ),
    "xlm_roberta_model": (
        xlm_roberta_model,
        {
            "default": {},
            "no_prefix_space": {"add_prefix_space": False},
            # `eos_token` has the same text, without options.
            "strips": {
                "sep_token": {"__type": "AddedToken", "content": "</s>", "lstrip": True, "special": True}
            },
            "names": {
                "extra_special_tokens": {"image_token": "ab"},
                SPECIAL: {"extra_special_tokens": ["the"]},
            },
        },
    ),
    "camembert_model": (
        camembert_model,
        {
            "default": {},
            "extra": {"additional_special_tokens": ["ab", "<unk>NOTUSED"]},
            "map": {SPECIAL: {"additional_special_tokens": ["ab", "<unk>NOTUSED"]}},
        },
    ),
    "albert_model": (
        albert_model,
        {
            "default": {},
            "no_symbols": {"additional_special_tokens": [], "keep_accents": True},
            "null": {"extra_special_tokens": None},
            "map": {SPECIAL: {"additional_special_tokens": []}},
        },
    ),
    "deberta_model": (
        deberta_model,
        {"default": {}, "punctuation": {"do_lower_case": True, "split_by_punct": True}},
    ),
}


CLASSES = (
    "RobertaTokenizer",
    "XLMRobertaTokenizer",
    "CamembertTokenizer",
    "AlbertTokenizer",
    "MPNetTokenizer",
    "DebertaV2Tokenizer",
    "TokenizersBackend",
)


def tokenizers(name):
    """Token ids of the nasty texts, of texts with special tokens in them, and of pairs."""
    create, cases = TOKENIZERS[name]
    folder = FOLDER / "tokenizers" / name
    shutil.rmtree(folder, ignore_errors=True)
    create(folder)
    texts = nasty_texts(500) + ["a <pad> b <mask>, <s>c</s> <unk>", "<pad>", " <mask> <mask>x"]
    texts += ["the <s>NOTUSED ab, <unk>NOTUSED", "(ab) [MASK]-(cab).", "a  </s> Cab"]
    (folder.parent / "texts.json").write_text(json.dumps(texts, indent=0) + "\n")
    tensors = {}
    for case, settings in cases.items():
        with tempfile.TemporaryDirectory() as copy:
            shutil.copytree(folder, copy, dirs_exist_ok=True)
            path = Path(copy) / "tokenizer_config.json"
            settings = dict(settings)
            for file in (SPECIAL, CONFIG):
                if file in settings:
                    (Path(copy) / file).write_text(json.dumps(settings.pop(file)))
            path.write_text(json.dumps(json.loads(path.read_text()) | settings))
            tokenizer = AutoTokenizer.from_pretrained(copy)
        assert type(tokenizer).__name__ in CLASSES
        ids = [tokenizer(text, truncation=True)["input_ids"] for text in texts]
        pairs = [tokenizer(a, b, truncation=True)["input_ids"] for a, b in zip(texts, texts[7:])]
        for kind, found in (("texts", ids), ("pairs", pairs)):
            lengths = [len(x) for x in found]
            tensors[f"{case}.{kind}.lengths"] = torch.tensor(lengths, dtype=torch.int32)
            all_ids = [i for x in found for i in x]
            tensors[f"{case}.{kind}.ids"] = torch.tensor(all_ids, dtype=torch.int32)
    save(folder / "expected.safetensors", tensors)


# Folders of sentence-transformers: the architecture, its tokenizer, and the pooling mode.
SENTENCES = {
    "roberta": ("byte_bpe", "mean"),
    "xlm_roberta": ("unigram", "cls"),
    "mpnet": ("mpnet_word_pieces", "mean"),
    "albert": ("albert_unigram", "max"),
    "modernbert": ("byte_bpe", "cls"),
    "deberta": ("deberta_unigram", "mean"),
    "gte": ("unigram", "cls"),
}


def sentences(name):
    """A sentence-transformers folder with prompts, and embeddings without and with a prompt."""
    tokenizer, pooling = SENTENCES[name]
    folder = FOLDER / "sentences" / name
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as source:
        shutil.copytree(FOLDER / "tokenizers" / tokenizer, source, dirs_exist_ok=True)
        model_type, sizes = ARCHITECTURES[name]["model_type"], ARCHITECTURES[name]["config"]
        if model_type == "modernbert":  # which has no tokenizer class of its own
            path = Path(source) / "tokenizer_config.json"
            settings = json.loads(path.read_text()) | {"tokenizer_class": "TokenizersBackend"}
            path.write_text(json.dumps(settings))
        vocab_size = len(AutoTokenizer.from_pretrained(source))
        sizes = SIZES | sizes | dict(vocab_size=vocab_size, max_position_embeddings=90)
        torch.manual_seed(SEED + 30)
        config = AutoConfig.for_model(model_type, **sizes)
        widen(AutoModel.from_config(config), STD).save_pretrained(source)
        transformer = Transformer(source)
        chain = [transformer, Pooling(config.hidden_size, pooling_mode=pooling), Normalize()]
        model = sentence_transformers.SentenceTransformer(
            modules=chain, device="cpu", prompts={"query": "find: ", "document": ""}
        )
        model.save_pretrained(str(folder), create_model_card=False)
    model = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    texts = nasty_texts(40) + ["a <pad> b <mask>", "word " * 200]
    tensors = {
        "embeddings": model.encode(texts, convert_to_tensor=True),
        "queries": model.encode(texts, prompt_name="query", convert_to_tensor=True),
    }
    save(folder / "expected.safetensors", tensors)


def pipelines():
    """RoBERTa with byte-level BPE in pipelines: tags, masks and ranks."""
    folder = FOLDER / "pipelines"
    shutil.rmtree(folder, ignore_errors=True)
    model_type, sizes = ARCHITECTURES["roberta"]["model_type"], ARCHITECTURES["roberta"]["config"]
    for name, model_class, more in (
        ("tagger", AutoModelForTokenClassification, {"id2label": dict(enumerate(TAGS))}),
        ("masked_lm", AutoModelForMaskedLM, {}),
        ("score", AutoModelForSequenceClassification, {"num_labels": 1}),
    ):
        shutil.copytree(FOLDER / "tokenizers/byte_bpe", folder / name)
        for file in ("expected.safetensors", "vocab.json", "merges.txt"):
            (folder / name / file).unlink()
        sizes = SIZES | sizes | dict(vocab_size=400, max_position_embeddings=90)
        torch.manual_seed(SEED + 40)
        model = widen(model_class.from_config(AutoConfig.for_model(model_type, **sizes, **more)), STD)
        if name == "tagger":  # subtract the mean logits, so that the tokens get different labels
            ids = AutoTokenizer.from_pretrained(folder / name)(TAGGED, return_tensors="pt")
            model.classifier.bias -= model(**ids).logits.mean((0, 1))
        model.save_pretrained(folder / name)
    tensors = entities(folder / "tagger")
    fill = pipeline("fill-mask", str(folder / "masked_lm"), device="cpu", top_k=5)
    found = fill("a <mask> cab <mask> bad")
    tensors |= {"fill.tokens": torch.tensor([[x["token"] for x in gap] for gap in found])}
    tensors |= {"fill.scores": torch.tensor([[x["score"] for x in gap] for gap in found])}
    encoder = sentence_transformers.CrossEncoder(str(folder / "score"), device="cpu")
    pairs = [("bad cab", text) for text in nasty_texts(30)]
    tensors["rerank"] = encoder.predict(pairs, convert_to_tensor=True)
    save(folder / "expected.safetensors", tensors)


def relative_buckets():
    """MPNet's bucket of each distance from -300 to 300, and DeBERTa's position of each distance from
    -600 to 600."""
    buckets = MPNetEncoder.relative_position_bucket(torch.arange(-300, 301))
    positions = make_log_bucket_position(torch.arange(-600, 601), 256, 512)
    tensors = {"buckets": buckets, "positions": positions}
    tensors = {name: x.to(torch.int32) for name, x in tensors.items()}
    save(FOLDER / "relative_buckets.safetensors", tensors)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    only = sys.argv[1:]
    known = {*ARCHITECTURES, *TOKENIZERS, *SENTENCES, "pipelines", "relative_buckets"}
    if unknown := set(only) - known:
        sys.exit(f"unknown names {sorted(unknown)}: expected some of {sorted(known)}")
    for name in ARCHITECTURES:
        if not only or name in only:
            checkpoints(name)
    if not only or "relative_buckets" in only:
        relative_buckets()
    for name in TOKENIZERS:
        if not only or name in only:
            tokenizers(name)
    for name in SENTENCES:
        if not only or name in only:
            sentences(name)
    if not only or "pipelines" in only:
        pipelines()

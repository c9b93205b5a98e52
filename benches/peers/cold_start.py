"""The equivalent of `encodle embed TEXT` with sentence-transformers.

python cold_start.py FOLDER THREADS TEXT
"""

import json
import sys

import torch
from sentence_transformers import SentenceTransformer

torch.set_num_threads(int(sys.argv[2]))
model = SentenceTransformer(sys.argv[1], device="cpu")
print(json.dumps({"text": sys.argv[3], "embedding": model.encode([sys.argv[3]])[0].tolist()}))

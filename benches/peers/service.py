"""An embedding service of FastAPI and sentence-transformers: service.py FOLDER PORT THREADS

The route computes on the event loop, so one request is computed at a time. Computing requests in
FastAPI's thread pool is slower: their PyTorch threads compete for the cores.
"""

import sys

import orjson
import torch
import uvicorn
from fastapi import FastAPI, Response
from pydantic import BaseModel
from sentence_transformers import SentenceTransformer

folder, port, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(threads)
model = SentenceTransformer(folder, device="cpu")
app = FastAPI()


class Embeddings(BaseModel):
    model: str
    input: str | list[str]


@app.post("/v1/embeddings")
async def embeddings(request: Embeddings) -> Response:
    texts = [request.input] if isinstance(request.input, str) else request.input
    vectors = model.encode(texts, batch_size=32, show_progress_bar=False)
    data = [{"object": "embedding", "index": i, "embedding": v} for i, v in enumerate(vectors)]
    body = {"object": "list", "data": data, "model": request.model}
    content = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(content, media_type="application/json")


uvicorn.run(app, port=port, log_level="warning")

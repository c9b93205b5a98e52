"""The worker process for one Python system.

Reads requests from stdin and writes answers to stdout, one line of JSON each: load a model, run a
case, write its output. The Rust worker, ours.rs, uses the same protocol.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

import cases
from decoder_files import DECODERS
from systems import SYSTEMS


class Case:
    """`call` is timed; `rows` converts its result to rows of f32."""

    def __init__(self, call: Callable[[], Any], rows: Callable[[Any], np.ndarray]) -> None:
        self.call = call
        self.rows = rows


def hidden_states(system: Any, sequences: list[list[int]]) -> Case:
    """`(N, E)`: the hidden states of all tokens, computed in padded batches of similar length."""
    order = cases.batches([len(sequence) for sequence in sequences])
    padded = [cases.padded([sequences[i] for i in batch]) for batch in order]
    inputs = [system.prepare(*batch) for batch in padded]

    def rows(outputs: list[Any]) -> np.ndarray:
        of_sequence: list[Any] = [None] * len(sequences)
        for batch, output in zip(order, outputs):
            for i, hidden in zip(batch, system.numpy(output)):
                of_sequence[i] = hidden[: len(sequences[i])]
        return np.concatenate(of_sequence)

    return Case(lambda: [system.forward(batch) for batch in inputs], rows)


def embeddings(system: Any, texts: list[str], tokenizer: Tokenizer) -> Case:
    """`(B, E)`: normalised means of texts, in padded batches of similar length."""
    if hasattr(system, "embed"):
        return Case(lambda: system.embed(texts), lambda vectors: vectors)

    def call() -> np.ndarray:
        tokens = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]
        vectors: list[Any] = [None] * len(texts)
        for batch in cases.batches([len(ids) for ids in tokens]):
            ids, mask = cases.padded([tokens[i] for i in batch])
            hidden = system.numpy(system.forward(system.prepare(ids, mask)))
            # The sum is a multiple of the mean, so normalising either gives the same vector.
            sums = (mask[:, None, :].astype(np.float32) @ hidden)[:, 0]
            for i, vector in zip(batch, sums / np.linalg.norm(sums, axis=1, keepdims=True)):
                vectors[i] = vector
        return np.stack(vectors)

    return Case(call, lambda vectors: vectors)


def last_tokens(system: Any, texts: list[str], tokenizer: Tokenizer) -> Case:
    """`(B, E)`: normalised hidden states of the last token of each text, which is tokenized before
    the timed call unless the system does it."""
    if hasattr(system, "embed"):
        return Case(lambda: system.embed(texts), normalized)
    sequences = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    states = hidden_states(system, sequences)
    last = np.cumsum([len(sequence) for sequence in sequences]) - 1
    return Case(states.call, lambda outputs: normalized(states.rows(outputs)[last]))


def normalized(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def attention(system: Any, qkv: dict[str, np.ndarray]) -> Case:
    """`(H·S, D)`: the output of one attention."""
    inputs = system.prepare(*(qkv[name] for name in "qkv"))
    return Case(
        lambda: system.forward(inputs), lambda x: system.numpy(x).reshape(-1, cases.HEAD_DIM)
    )


class Worker:
    def __init__(self, system: str, threads: int) -> None:
        self.system = SYSTEMS[system]
        self.threads = threads

    def load(self, model: str, folder: str, cases: list[str]) -> dict[str, Any]:
        """Loads a model and prepares cases."""
        hf = Path(folder) / "hf"
        assert self.system.load, "ours.rs runs this system"
        system = self.system.load(Path(folder), self.threads, *self.system.options)
        if model == "attention":
            self.cases = {s: attention(system, load_file(hf / f"{s}.safetensors")) for s in cases}
            return {}
        inputs = json.loads((hf / "cases.json").read_text())
        if model == "minilm" or model in DECODERS:
            tokenizer = Tokenizer.from_file(str(hf / "tokenizer.json"))
            tokenizer.no_padding()
            case = embeddings if model == "minilm" else last_tokens
            self.cases = {name: case(system, inputs[name], tokenizer) for name in cases}
        else:
            self.cases = {name: hidden_states(system, inputs[name]) for name in cases}
        return {}

    def run(self, case: str, warm_ups: int, seconds: float) -> dict[str, Any]:
        """Times at least one call, and further calls until all have taken `seconds`."""
        call = self.cases[case].call
        for _ in range(warm_ups):
            call()
        ms: list[float] = []
        while sum(ms) < seconds * 1e3 or not ms:
            start = time.perf_counter()
            call()
            ms.append((time.perf_counter() - start) * 1e3)
        return {"ms": ms}

    def output(self, case: str, path: str) -> dict[str, Any]:
        chosen = self.cases[case]
        np.save(path, chosen.rows(chosen.call()))
        return {}


def main() -> None:
    # Redirect stdout to stderr, so that libraries cannot print into the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker(sys.argv[1], int(sys.argv[2]))
    operations: dict[str, Callable[..., dict[str, Any]]]
    operations = {"load": worker.load, "run": worker.run, "output": worker.output}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = operations[request.pop("op")](**request)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()

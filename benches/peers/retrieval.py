"""Compares sparse and multi-vector embeddings of models of BERT-base's size, and MaxSim, with
sentence-transformers and NumPy, in turns.

    pip install -r benches/peers/requirements.txt
    python benches/peers/retrieval.py [--part PART] [--rounds N] [--documents N] [--only-print]

- SPLADE: 64 texts of 7 to 84 tokens, 30,522 words.
- ColBERT: 64 queries, filled up to 32 tokens, and 1,000 documents; vectors of 128 values.
- MaxSim: a query of 32 vectors and documents of 60 vectors of 128 values in f16, beside the time to
  read the documents from memory.

The weights are random. Checks that the results are equal. The tables are printed and appended to
the file of this machine and month in benches/results/.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from cases import SEED, sentences
from processes import Worker, status_mb
from results import ROOT, Results, facts, measured_with, table, this_cpu
from run import build
from sentence_transformers import MultiVectorEncoder, SparseEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.util.similarity import maxsim
from transformers import BertConfig, BertForMaskedLM, BertModel

THREADS, WIDTH, QUERY, VECTORS = 2, 128, 32, 60
MINILM = ROOT / "weights/all-MiniLM-L6-v2"


def bert(folder: Path, model_class: type) -> None:
    """A model of BERT-base's size with the tokenizer of all-MiniLM-L6-v2."""
    torch.manual_seed(SEED)
    model = model_class(BertConfig())
    if model_class is BertForMaskedLM:
        # A few hundred values of a text are above 0.
        model.cls.predictions.bias.data.fill_(-1.2)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MINILM / name, folder / name)


def colbert(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        bert(Path(name), BertModel)
        expansion = {"strategy": "fixed", "length": QUERY}
        transformer = Transformer(name, query_expansion=expansion, document_length=300)
    identity = torch.nn.Identity()
    names = {"module_input_name": "token_embeddings"}
    dense = Dense(768, WIDTH, bias=False, activation_function=identity, **names)
    modules = [transformer, dense, MultiVectorMask(list("!?.,")), Normalize("token_embeddings")]
    model = MultiVectorEncoder(modules=modules, device="cpu")
    model.save_pretrained(str(folder), create_model_card=False)


def mixed_texts() -> list[str]:
    """64 texts of 5 to 82 words that are one token each."""
    vocabulary = json.loads((MINILM / "tokenizer.json").read_text())["model"]["vocab"]
    words = [word for word in vocabulary if word.isascii() and word.isalpha() and len(word) > 2]
    random = np.random.default_rng(SEED)
    counts = np.clip(random.lognormal(np.log(24), 0.55, 64), 7, 84).astype(int) - 2
    return [" ".join(random.choice(words, count)) for count in counts]


def seconds(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def in_turns(calls: dict, rounds: int) -> dict[str, list[float]]:
    found = {name: [] for name in calls}
    for round in range(rounds + 1):  # the first round warms up
        for name, call in calls.items():
            time_of_call = seconds(call)
            if round > 0:
                found[name].append(time_of_call)
    return found


def lines(found: dict[str, list[float]], ours: list[str], extra=lambda name: []) -> list[list[str]]:
    """A row per system: its time, and its time divided by that of each of `ours`."""
    ratio = lambda times, own: statistics.median(a / b for a, b in zip(times, found[own]))
    return [
        [name, f"{1e3 * statistics.median(times):,.1f} ms",
         *(f"{ratio(times, own):.2f}×" for own in ours), *extra(name)]
        for name, times in found.items()
    ]  # fmt: skip


def splade(folder: Path, program: Path, rounds: int) -> str:
    hf, texts = folder / "hf", mixed_texts()
    bert(hf, BertForMaskedLM)
    (hf / "cases.json").write_text(json.dumps({"mixed": texts}))
    peer = SparseEncoder(str(hf), device="cpu")
    encode = lambda: peer.encode(texts, batch_size=32)
    expected = encode().to_dense().numpy()
    torch_mb = status_mb(Path("/proc/self"), "VmHWM")
    workers = {f"ours, {dtype}": Worker(f"ours-{dtype}", THREADS, program, folder) for dtype in ("f32", "int8")}
    for worker in workers.values():
        worker.load("splade", folder, ["mixed"])
    difference = np.abs(workers["ours, f32"].output("mixed") - expected).max()
    assert difference < 1e-4, f"the vectors differ by {difference}"
    run = lambda worker: lambda: worker.run("mixed", 0, 0)
    calls = {name: run(worker) for name, worker in workers.items()}
    found = in_turns(calls | {"sentence-transformers": encode}, rounds)
    peaks = {name: worker.peak_mb("mixed")[1] for name, worker in workers.items()}
    peaks["sentence-transformers"] = torch_mb
    for worker in workers.values():
        worker.close()
    rows = lines(found, list(workers), lambda name: [f"{peaks[name]:,.0f} MB"])
    values = np.count_nonzero(expected) / len(texts)
    about = f"SPLADE, 64 texts of 7 to 84 tokens, {values:.0f} values per vector on average; largest difference {difference:.1e}"
    header = ["system", "time", "/ ours f32", "/ ours int8", "peak of the process"]
    return f"{about}\n\n{table(header, rows)}"


def multi_vector(folder: Path, program: Path, rounds: int) -> str:
    hf, texts = folder / "hf", sentences()
    colbert(hf)
    cases = {"query": [" ".join(text.split()[:8]) for text in texts[:64]], "document": texts[64:1064]}
    (hf / "cases.json").write_text(json.dumps(cases))
    peer = MultiVectorEncoder(str(hf), device="cpu")
    worker = Worker("ours-f32", THREADS, program, folder)
    worker.load("colbert", folder, list(cases))
    rows = []
    for case, encode in {"query": peer.encode_query, "document": peer.encode_document}.items():
        call = lambda: encode(cases[case], batch_size=32)
        expected = torch.cat(call()).numpy()
        difference = np.abs(worker.output(case) - expected).max()
        assert difference < 1e-4, f"the vectors differ by {difference}"
        calls = {"ours": lambda: worker.run(case, 0, 0), "sentence-transformers": call}
        found = in_turns(calls, rounds)
        title = f"{len(cases[case]):,} {'queries' if case == 'query' else 'documents'}"
        rows += [[title, *row] for row in lines(found, ["ours"])]
    worker.close()
    about = f"ColBERT, vectors of {WIDTH} values, f32"
    return f"{about}\n\n{table(['', 'system', 'time', '/ ours'], rows)}"


def max_sim(folder: Path, program: Path, rounds: int, count: int) -> str:
    random = np.random.default_rng(SEED)
    query = random.standard_normal((QUERY, WIDTH), dtype=np.float32)
    query /= np.linalg.norm(query, axis=1, keepdims=True)
    corpus = np.empty((count, VECTORS, WIDTH), np.float16)
    for part in np.array_split(corpus, max(count // 2000, 1)):
        values = random.standard_normal(part.shape, dtype=np.float32)
        part[:] = values / np.linalg.norm(values, axis=-1, keepdims=True)
    np.save(folder / "query.npy", query)
    np.save(folder / "corpus.npy", corpus)
    worker = Worker("ours-f32", THREADS, program, folder)
    worker.load("max-sim", folder, ["scores", "read"])
    (folder / "corpus.npy").unlink()

    def by_numpy():
        parts = np.array_split(corpus, max(count // 500, 1))
        products = (part.astype(np.float32).reshape(-1, WIDTH) @ query.T for part in parts)
        return np.concatenate([x.reshape(-1, VECTORS, QUERY).max(1).sum(1) for x in products])

    tensors = torch.from_numpy(query), torch.from_numpy(corpus)
    by_torch = lambda: maxsim(tensors[0][None].half(), tensors[1])
    difference = np.abs(worker.output("scores")[0] - by_numpy()).max()
    assert difference < 1e-4, f"the scores differ by {difference}"
    calls = {
        "reading the documents": lambda: worker.run("read", 0, 0),
        "ours": lambda: worker.run("scores", 0, 0),
        "NumPy, in f32": by_numpy,
        "sentence-transformers": by_torch,
    }
    found = in_turns(calls, rounds)
    worker.close()
    rates = {"ours": 2 * count * VECTORS * QUERY * WIDTH / statistics.median(found["ours"]) / 1e9}
    about = (
        f"MaxSim of {QUERY} vectors and {count:,} documents of {VECTORS} vectors of {WIDTH} values in "
        f"f16, {corpus.nbytes / 1e9:.2f} GB; ours: {rates['ours']:.0f} GFLOP/s"
    )
    rows = lines(found, ["reading the documents", "ours"])
    return f"{about}\n\n{table(['system', 'time', '/ reading', '/ ours'], rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--documents", type=int, default=100_000)
    parts = {"splade": splade, "colbert": multi_vector, "max-sim": max_sim}
    parser.add_argument("--part", choices=list(parts), action="append", help="default: all")
    parser.add_argument("--only-print", action="store_true", help="write no file")
    args = parser.parse_args()
    torch.set_num_threads(THREADS)
    program, sections = build() / "release/peers", []
    for part in map(parts.get, args.part or parts):
        # The folder must exist until the workers end, because their logs are in the folder.
        with tempfile.TemporaryDirectory() as name:
            more = [args.documents] if part is max_sim else []
            sections.append(part(Path(name), program, args.rounds, *more))
            print(sections[-1], flush=True)
    text = "\n\n".join([f"Medians of {args.rounds} rounds.", *sections, measured_with(facts(THREADS))])
    if not args.only_print:
        Results(this_cpu()).write(text)


main()

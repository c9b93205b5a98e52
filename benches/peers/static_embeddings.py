"""Compares static embeddings with model2vec and with sentence-transformers, in turns.

    pip install -r benches/peers/requirements.txt
    python benches/peers/static_embeddings.py [--texts N] [--rounds N] [--only-print]

The table has random values for the vocabulary of all-MiniLM-L6-v2, and the widths of two published
models: 256 (potion-base-8M) and 1024 (static-retrieval-mrl-en-v1). Checks that the vectors are
equal. The table is printed and appended to the file of this machine and month in benches/results/.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from cases import SEED, sentences
from model2vec import StaticModel
from processes import Worker
from results import ROOT, Results, facts, measured_with, table, this_cpu
from run import build
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer

THREADS, WIDTHS = 2, (256, 1024)
DIFFERENCE = 1e-6


def create(folder: Path, width: int) -> None:
    """A folder of model2vec, which sentence-transformers loads too."""
    tokenizer = Tokenizer.from_file(str(ROOT / "weights/all-MiniLM-L6-v2/tokenizer.json"))
    random = np.random.default_rng(SEED)
    vectors = random.standard_normal((tokenizer.get_vocab_size(), width), dtype=np.float32)
    config = {"model_type": "model2vec"}
    model = StaticModel(vectors, tokenizer, config, normalize=True, max_length=None)
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)


def measured(call, cpu_seconds) -> tuple[float, float]:
    """The time of a call and its CPU time, in seconds."""
    cpu, start = cpu_seconds(), time.perf_counter()
    call()
    return time.perf_counter() - start, cpu_seconds() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=40_960)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only-print", action="store_true", help="write no file")
    args = parser.parse_args()
    texts = sentences()
    texts = (texts * (args.texts // len(texts) + 1))[: args.texts]
    torch.set_num_threads(THREADS)
    program, lines = build() / "release/peers", []
    for width in WIDTHS:
        # The folder must exist until the worker ends, because the worker's log is in the folder.
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            create(folder / "hf", width)
            (folder / "hf/cases.json").write_text(json.dumps({"all": texts, "few": texts[:500]}))
            worker = Worker("ours-f32", THREADS, program, folder)
            worker.load("static", folder, ["all", "few"])
            model2vec = StaticModel.from_pretrained(folder / "hf", force_download=False)
            transformer = SentenceTransformer(str(folder / "hf"), device="cpu")
            calls = {
                "ours": (lambda: worker.run("all", 0, 0), worker.cpu_seconds),
                "model2vec": (lambda: model2vec.encode(texts), time.process_time),
                "sentence-transformers": (
                    lambda: transformer.encode(texts, batch_size=1024, show_progress_bar=False),
                    time.process_time,
                ),
            }
            few = worker.output("few")
            for theirs in (model2vec.encode(texts[:500]), transformer.encode(texts[:500])):
                assert np.abs(few - theirs).max() < DIFFERENCE, "the vectors differ"
            found = {system: [] for system in calls}
            for round in range(args.rounds + 1):  # the first round warms up
                for system, (call, cpu_seconds) in calls.items():
                    result = measured(call, cpu_seconds)
                    if round > 0:
                        found[system].append(result)
            worker.close()
        for system, results in found.items():
            seconds, cpu = (statistics.median(column) for column in zip(*results))
            ratios = [
                statistics.median(theirs[i] / ours[i] for ours, theirs in zip(found["ours"], results))
                for i in (0, 1)
            ]
            lines.append([
                f"{system}, width {width}", f"{len(texts) / seconds:,.0f}",
                f"{1e6 * cpu / len(texts):.1f} µs", f"{ratios[0]:.2f}×", f"{ratios[1]:.2f}×",
            ])  # fmt: skip
    words = statistics.mean(len(text.split()) for text in texts)
    about = (
        f"{len(texts)} sentences of {words:.0f} words on average; medians of {args.rounds} rounds; "
        "the ratios are the peer's time and CPU time divided by ours"
    )
    header = ["system", "texts/s", "CPU time per text", "time", "CPU time"]
    text = f"{about}\n\n{table(header, lines)}\n\n{measured_with(facts(THREADS))}"
    if args.only_print:
        print(text)
    else:
        Results(this_cpu()).write(text)


main()

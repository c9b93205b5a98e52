"""Compares decoders of Qwen3-0.6B's size with PyTorch, OpenVINO, ONNX Runtime and llama.cpp.

    pip install -r benches/peers/requirements.txt -r benches/peers/requirements-decoders.txt
    python benches/peers/decoders.py [--part PART...] [--rounds N] [--layers N] [--only-print]

The weights are random, in bf16. A text becomes the normalised hidden state of its last token.

- `files`: creates the model files of the peers, which the other parts create if they are missing.
- `f32`, `bf16`, `int8`: the time of 8 texts of 128 tokens, one of 512, and 64 of 7 to 84, and the
  peak memory of each process. All systems of a part are in memory at once.
- `load`: the time from the start of a process to its first vector, and its peak memory.
- `rerank`: a request with a query of 40 tokens and 50 documents of 60, in a template of 80. The
  request is also split into one per document, and, with `--baseline PROGRAM`, sent to the worker
  `peers` of another version of this project. All scores must be the same bits.

The outputs are compared with those of PyTorch in f32 before the systems are timed; of the reranker,
the scores of the first documents, with sentence-transformers. The tables are
printed and appended to the file of this machine and month in benches/results/. Exit status: 1 if a
system failed or disagreed.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np

import tables
from campaign import Campaign, agreement, disagrees, progress
from processes import Failed, Worker
from results import Results, measured_with, table, this_cpu
from run import build, machine, positive, version
from sections import Section
from systems import SYSTEMS

MODEL, REFERENCE, CASES = "qwen3-0.6b", "torch-f32", ("8×128", "1×512", "mixed")
SECTIONS = {
    dtype: Section(f"Qwen3-0.6B, {dtype}", MODEL, CASES, systems, REFERENCE, 1e-5)
    for dtype, systems in {
        "f32": ("ours-f32", "torch-f32", "openvino-f32", "ort-f32"),
        "bf16": ("ours-bf16", "torch-bf16", "openvino-bf16", "llama-f16"),
        "int8": ("ours-int8", "openvino-weights-int8", "ort-int8", "llama-q8_0"),
    }.items()
}
LOADED = (
    *(f"ours{packed}-{dtype}" for packed in ("", "-packed") for dtype in ("f32", "bf16", "int8")),
    *("torch-f32", "torch-bf16", "openvino-f32", "openvino-weights-int8", "llama-f16", "llama-q8_0"),
)
FIRST = Section("", MODEL, ("first",), LOADED, REFERENCE, 1e-5)
ONE, PER_DOCUMENT = "one request", "a request per document"
COMPARED, SCORE_DIFFERENCE = 4, 1e-4  # documents; of a difference of two logits, in f32


def chosen(options: argparse.Namespace, systems: tuple[str, ...]) -> list[str]:
    """Those of `systems` that the options name and whose packages are installed."""
    named = [s for s in systems if s in options.systems]
    missing = {s: [p for p in SYSTEMS[s].packages if not version(p)] for s in named}
    for system, packages in missing.items():
        if packages:
            progress(f"{system} is left out, since packages are missing: {', '.join(packages)}")
    return [s for s in named if not missing[s]]


def files(campaign: Campaign, options: argparse.Namespace) -> None:
    systems = {s for section in [*SECTIONS.values(), FIRST] for s in section.systems}
    campaign.export(MODEL, chosen(options, tuple(sorted(systems))))


def speed(campaign: Campaign, options: argparse.Namespace, dtype: str) -> str:
    section = SECTIONS[dtype]
    # The comparison of the outputs is a call of each case.
    found = campaign.compare(section, chosen(options, section.systems), warm_ups=0)
    return f"### {section.title}\n\n{tables.compared(section, found, peaks=True)}"


def load(campaign: Campaign, options: argparse.Namespace) -> str:
    """The first round fills the file cache and writes the packed weights."""
    systems = campaign.export(MODEL, chosen(options, LOADED))
    reference = campaign.reference(FIRST)["first"]
    ms: dict[str, list[float]] = {system: [] for system in systems}
    agrees, peak = {}, {}
    for _ in range(campaign.rounds + 1):
        for system in list(ms):
            start = time.perf_counter()
            try:
                worker = campaign.start(system, MODEL, ["first"])
                try:
                    vector = worker.output("first")
                    ms[system].append((time.perf_counter() - start) * 1e3)
                    peak[system] = worker.peak_rss_mb()
                finally:
                    worker.close()
                agrees[system] = {"first": agreement(vector, reference)}
                if disagrees(system, agrees[system]["first"], FIRST):
                    raise Failed(f"{system}: the first vector differs: {agrees[system]['first']}")
            except Failed as failed:
                campaign.fail(str(failed))
                del ms[system]
    rows = [
        [tables.label(system), f"{statistics.median(times[1:]) / 1e3:.2f} s"]
        + [f"{peak[system]:,.0f} MB", tables.error(system, agrees)]
        for system, times in ms.items()
    ]
    header = ["system", "start to first vector", "peak RSS", f"difference from {tables.label(REFERENCE)}"]
    return f"### Qwen3-0.6B, from the start of a process to the first vector\n\n{table(header, rows)}"


def reference_scores(folder: Path) -> np.ndarray:
    """The scores of the first documents by sentence-transformers in f32."""
    from sentence_transformers import CrossEncoder

    request = json.loads((folder / "rerank.json").read_text())
    model = CrossEncoder(str(folder), device="cpu", model_kwargs={"dtype": "float32"})
    pairs = [(request["query"], document) for document in request["documents"][:COMPARED]]
    return model.predict(pairs, show_progress_bar=False)


def rerank(campaign: Campaign, options: argparse.Namespace) -> str:
    """One process at a time: our versions with the same weights in one precision."""
    if not campaign.create(MODEL, "reranker"):
        return ""
    programs = {"": campaign.rust} | ({", baseline": options.baseline} if options.baseline else {})
    expected = reference_scores(campaign.folder(MODEL) / "reranker")
    rows = []
    for dtype in ("f32", "bf16", "int8"):
        ms: dict[str, list[float]] = {}
        scores: dict[str, np.ndarray] = {}
        workers = {
            name: Worker(f"ours-{dtype}", campaign.threads, program, campaign.cache / "logs")
            for name, program in programs.items()
        }
        try:
            for name, worker in workers.items():
                worker.load("rerank", campaign.folder(MODEL), [ONE, PER_DOCUMENT])
            turns = [("", ONE), *((name, ONE) for name in programs if name), ("", PER_DOCUMENT)]
            for name, case in turns:
                scores[case + name] = workers[name].output(case)[:, 0]
            difference = float(np.abs(scores[ONE][:COMPARED] - expected).max())
            if dtype == "f32" and not difference <= SCORE_DIFFERENCE:
                raise Failed(f"the scores differ from those of sentence-transformers: {difference}")
            for _ in range(campaign.rounds):
                for name, case in turns:
                    ms.setdefault(case + name, []).extend(workers[name].run(case, 0, 0))
        except Failed as failed:
            campaign.fail(str(failed))
            continue
        finally:
            for worker in workers.values():
                worker.close()
        for turn, times in ms.items():
            if not np.array_equal(scores[turn], scores[ONE]):
                campaign.fail(f"{turn}, {dtype}: the scores differ from those of {ONE}")
            ratio = statistics.median(theirs / own for theirs, own in zip(times, ms[ONE]))
            time_of_turn = f"{statistics.median(times):,.0f} ms"
            rows.append([f"{turn}, {dtype}", time_of_turn, f"{ratio:.2f}×", f"{difference:.1e}"])
    title = "Qwen3-0.6B as a reranker: a query of 40 tokens, a template of 80, 50 documents of 60"
    header = ["ours", "time", f"time / {ONE}", "difference from sentence-transformers, f32"]
    spread = f"The scores of sentence-transformers are {expected.min():.3f} to {expected.max():.3f}."
    return f"### {title}\n\n{table(header, rows)}\n\n{spread}"


PARTS = {dtype: (lambda c, o, dtype=dtype: speed(c, o, dtype)) for dtype in SECTIONS}
PARTS |= {"load": load, "rerank": rerank, "files": files}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = [part for part in PARTS if part != "files"]
    parser.add_argument("--part", nargs="+", choices=PARTS, default=default, help="default: all")
    systems = sorted({*LOADED, *(s for section in SECTIONS.values() for s in section.systems)})
    parser.add_argument("--systems", nargs="+", choices=systems, default=systems, metavar="SYSTEM")
    parser.add_argument("--threads", type=positive, default=2, help="default: 2")
    parser.add_argument("--rounds", type=positive, default=3, help="default: 3")
    parser.add_argument("--layers", type=positive, help="number of layers; default: 28")
    parser.add_argument(
        "--cache", type=Path, help="folder for the models; default: Cargo's target/peers"
    )
    parser.add_argument(
        "--baseline", type=Path, help="the program `peers` of another version, for `rerank`"
    )
    parser.add_argument("--only-print", action="store_true", help="write no file")
    options = parser.parse_args()
    campaign = Campaign(options, build())
    sections = [text for part in options.part if (text := PARTS[part](campaign, options))]
    if sections:
        count = f" The model had {options.layers} layers." if options.layers else ""
        failed = "".join(f"\n- {text}" for text in campaign.failures)
        about = (
            f"Random weights, medians of {options.rounds} rounds in which the systems run in turn.{count} "
            "In brackets: the median over the rounds of the time divided by ours in the same precision. "
            "The cosines are the lowest mean of a case and the lowest of a text."
        )
        llama = f"llama-cpp-python {version('llama-cpp-python') or 'missing'}"
        facts = machine(options.threads) | {"llama.cpp": llama}
        text = [*sections, about, measured_with(facts)]
        text += [f"Failures:\n{failed}"] * bool(failed)
        if options.only_print:
            print("\n\n".join(text))
        else:
            Results(this_cpu()).write("\n\n".join(text))
    return 1 if campaign.failures else 0


if __name__ == "__main__":
    sys.exit(main())

"""A measurement campaign: create the models, compare the outputs, then time the systems in turn."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

import cases
from export import ENCODERS
from processes import Failed, Worker, alone, in_turn
from sections import COSINE, SECTIONS, Section
from systems import SYSTEMS

HERE = Path(__file__).parent


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def agreement(output: np.ndarray, reference: np.ndarray) -> dict[str, float]:
    if output.shape != reference.shape:
        raise Failed(f"wrong output shape: expected {reference.shape}, got {output.shape}")
    a, b = output.astype(np.float64), reference.astype(np.float64)
    cosines = (a * b).sum(1) / np.maximum(
        np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1), 1e-30
    )
    return {
        "difference": float(np.abs(a - b).max()),
        "cosine": float(cosines.mean()),
        "lowest_cosine": float(cosines.min()),
    }


def disagrees(system: str, found: dict[str, float], section: Section) -> bool:
    dtype = SYSTEMS[system].dtype
    if dtype == "f32":
        return not found["difference"] <= section.difference
    return not found["cosine"] >= COSINE[dtype]


class Campaign:
    """The options of a campaign and its failures so far."""

    def __init__(self, options: argparse.Namespace, target: Path) -> None:
        self.threads: int = options.threads
        self.rounds: int = options.rounds
        self.layers: int | None = options.layers
        self.cache: Path = options.cache or target / "peers"
        self.rust = target / "release/peers"
        self.program = target / "release/encodle"
        self.failures: list[str] = []

    def folder(self, model: str) -> Path:
        return self.cache / (f"{model}-{self.layers}" if self.layers else model)

    def export(self, model: str, systems: list[str]) -> list[str]:
        """Creates the model files that the systems load; returns the systems whose files exist."""
        made: list[str] = []
        wanted = {system: SYSTEMS[system].artefact for system in systems}
        for artefact in [None, *dict.fromkeys(filter(None, wanted.values()))]:
            if self.create(model, artefact):
                made += [system for system in systems if wanted[system] == artefact]
        return [system for system in systems if system in made]

    def create(self, model: str, artefact: str | None) -> bool:
        """Creates an artefact of a model, or its weights, unless it exists. Returns whether it
        exists."""
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        self.cache.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(HERE / "export.py"), model, str(self.folder(model))]
        command += ["--layers", str(self.layers)] if self.layers else []
        command += ["--artefact", artefact] if artefact else []
        log = self.cache / f"export-{model}-{artefact or 'hf'}.log"
        with log.open("w") as file:
            done = subprocess.run(command, stdout=2, stderr=file, env=environment)
        if done.returncode != 0:
            lines = log.read_text().splitlines()
            why = lines[-1] if lines else f"exit status {done.returncode}"
            self.fail(f"cannot create {artefact or 'the weights'} of {model}: {why}; see {log}")
        return done.returncode == 0

    def fail(self, text: str) -> None:
        self.failures.append(text)
        progress(text)

    def start(
        self, system: str, model: str, names: list[str], threads: int | None = None
    ) -> Worker:
        """Starts a worker and loads its model."""
        worker = Worker(system, threads or self.threads, self.rust, self.cache / "logs")
        try:
            worker.load(model, self.folder(model), names)
        except Failed:
            worker.close()
            raise
        return worker

    def reference(self, section: Section) -> dict[str, np.ndarray]:
        worker = self.start(section.reference, section.model, list(section.cases))
        try:
            return {case: worker.output(case) for case in section.cases}
        finally:
            worker.close()

    def compare(self, section: Section, systems: list[str], warm_ups: int = 1) -> dict[str, Any]:
        """Compares the outputs with the reference, then times the systems that agree, each call
        after `warm_ups` others."""
        systems = self.export(section.model, systems)
        reference = self.reference(section)
        found: dict[str, Any] = {"agreement": {}, "ms": {}}
        with ExitStack() as stack:
            workers: dict[str, Worker] = {}
            for system in systems:
                progress(f"  {system}")
                try:
                    worker = self.start(system, section.model, list(section.cases))
                    stack.callback(worker.close)
                    agrees = {c: agreement(worker.output(c), reference[c]) for c in section.cases}
                except Failed as failed:
                    self.fail(str(failed))
                    continue
                found["agreement"][system] = agrees
                bad = [c for c in section.cases if disagrees(system, agrees[c], section)]
                if bad:
                    self.fail(
                        f"{system}: the output differs from that of {section.reference}: {bad[0]}, "
                        f"{agrees[bad[0]]}"
                    )
                else:
                    workers[system] = worker
            turns = {(s, c): (workers[s], c) for c in section.cases for s in workers}
            ms, idle, failed = in_turn(turns, self.rounds, warm_ups) if turns else ({}, 0.0, {})
            found["idle"] = idle
            found["peak_rates"] = {s: worker.peak_rates for s, worker in workers.items()}
            found["operations"] = cases.operations(section.model, self.folder(section.model))
            found["peak_rss"] = {s: worker.peak_rss_mb() for s, worker in workers.items()}
        for (system, case), why in failed.items():
            self.fail(f"{system}, {case}: {why}")
        for (system, case), values in ms.items():
            found["ms"].setdefault(system, {})[case] = values
        return found

    def encoder(self, section: Section, systems: list[str]) -> dict[str, Any]:
        return self.with_peaks(section, systems, "1×128")

    def attention(self, section: Section, systems: list[str]) -> dict[str, Any]:
        return self.with_peaks(section, systems, str(cases.ATTENTION_WARM_UP))

    def with_peaks(self, section: Section, systems: list[str], warm_up: str) -> dict[str, Any]:
        """Times, and the memory of the first call of each case after a call of `warm_up`."""
        found = self.compare(section, systems)
        found["peak"] = {system: {} for system in found["ms"]}
        for system, peaks in found["peak"].items():
            for case in section.cases:
                try:
                    peaks[case] = self.peak(system, section.model, case, warm_up)
                except Failed as failed:
                    self.fail(f"{system}, memory of {case}: {failed}")
        return found

    def peak(self, system: str, model: str, case: str, warm_up: str) -> dict[str, float]:
        """Memory of a call of `case`, in a new process after one call of `warm_up`."""
        worker = self.start(system, model, list({warm_up, case}))
        try:
            worker.run(warm_up, warm_ups=0, seconds=0)
            before, most = worker.peak_mb(case)
        finally:
            worker.close()
        return {"before_mb": before, "most_mb": most}

    def cold_start(self, section: Section, systems: list[str]) -> dict[str, Any]:
        self.export(section.model, [])
        folder, text = str(self.folder(section.model) / "hf"), "hello"
        peer = [sys.executable, str(HERE / "cold_start.py"), folder, str(self.threads), text]
        commands = {
            "ours-f32": [str(self.program), "embed", "--no-cache", text],
            "sentence-transformers-f32": peer,
        }
        found: dict[str, Any] = {"agreement": {}, "ms": {}, "peak": {}}
        systems = list(systems)
        vectors: dict[str, np.ndarray] = {}
        with tempfile.TemporaryDirectory() as scratch:
            for _ in range(self.rounds + 1):  # the first round fills the file cache
                for system in list(systems):
                    output = Path(scratch) / system
                    try:
                        run = alone(commands[system], self.threads, output)
                    except Failed as failed:
                        self.fail(str(failed))
                        systems.remove(system)
                        found["ms"].pop(system, None)
                        found["peak"].pop(system, None)
                        continue
                    vectors[system] = np.array([json.loads(output.read_text())["embedding"]])
                    found["ms"].setdefault(system, {}).setdefault(text, []).append(run["ms"])
                    found["peak"].setdefault(system, []).append(run["peak_mb"])
        for system in systems:
            del found["ms"][system][text][0], found["peak"][system][0]
            if section.reference in vectors:
                agrees = agreement(vectors[system], vectors[section.reference])
                found["agreement"][system] = {text: agrees}
                if disagrees(system, agrees, section):
                    self.fail(
                        f"{system}: the output differs from that of {section.reference}: {agrees}"
                    )
        return found

    def scaling(self, section: Section, systems: list[str]) -> dict[str, Any]:
        [system] = systems
        self.export("bert-base", systems)
        self.export("minilm", systems)
        case, *embedded = section.cases
        with ExitStack() as stack:
            turns: dict[str, tuple[Worker, str]] = {}
            for threads in sorted({1, self.threads}):
                worker = self.start(system, "bert-base", [case], threads)
                stack.callback(worker.close)
                turns[f"{threads} thread{'s'[: threads > 1]}"] = (worker, case)
            worker = self.start(system, "minilm", embedded)
            stack.callback(worker.close)
            turns |= {name: (worker, name) for name in embedded}
            ms, idle, failed = in_turn(turns, self.rounds)
        if failed:
            raise Failed("; ".join(f"{turn}: {why}" for turn, why in failed.items()))
        peak = {name: self.peak(system, "minilm", name, embedded[0]) for name in embedded}
        texts = self.texts(embedded)
        return {"ms": {system: ms}, "peak": {system: peak}, "idle": idle, "texts": texts}

    def sentences(self, section: Section, systems: list[str]) -> dict[str, Any]:
        return self.compare(section, systems) | {"texts": self.texts(list(section.cases))}

    def texts(self, names: list[str]) -> dict[str, Any]:
        """Fingerprint and number of tokens of each set of sentences."""
        hf = self.folder("minilm") / "hf"
        inputs = json.loads((hf / "cases.json").read_text())
        tokenizer = Tokenizer.from_file(str(hf / "tokenizer.json"))
        tokenizer.no_padding()
        return {
            name: {
                "fingerprint": cases.fingerprint(inputs[name]),
                "tokens": sum(len(e.ids) for e in tokenizer.encode_batch(inputs[name])),
            }
            for name in names
        }

    def measure(self, name: str, systems: list[str]) -> dict[str, Any] | None:
        """The results of a section; None if the section failed."""
        section = SECTIONS[name]
        encoders = {n for n, s in SECTIONS.items() if s.model in ENCODERS.keys() - {"bert-base"}}
        special = dict.fromkeys(encoders, self.encoder) | {
            "attention": self.attention,
            "cold-start": self.cold_start,
            "scaling": self.scaling,
            "sentences": self.sentences,
        }
        try:
            return special.get(name, self.compare)(section, systems)
        except Failed as failed:
            self.fail(str(failed))
            return None

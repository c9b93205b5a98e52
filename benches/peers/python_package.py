"""Compares the Python package with its peers: speed, time to the first vector, memory and size.

    pip install -r benches/peers/requirements.txt
    python benches/peers/python_package.py [--systems SYSTEM...] [--encodle WHEEL] [--json FILE]

Installs each package in a virtual environment of its own, exports the model for ONNX Runtime and
OpenVINO, compares the vectors of the smallest of --counts with those of sentence-transformers if
it is among the systems, times one system after another in rounds, prints a Markdown table and
appends it to the file of this machine and month in benches/results/.
Every system computes all-MiniLM-L6-v2, in f32 unless its name says otherwise. Exit status: 1 if a
system failed or disagreed (the others are still measured).
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import cases
import export
import run
from campaign import agreement, progress
from processes import HERE, SETTLE, Failed, Worker, alone, environment, status_mb
from results import ROOT, Results, facts, measured_with, table, this_cpu
from sections import COSINE

DIFFERENCE = 1e-5  # maximum difference from the reference


@dataclass(frozen=True)
class Package:
    """A Python package. `open` is code that defines `encode`, from texts to vectors.

    In `open` and `export`, `{hf}` stands for the folder of the f32 model, `{folder}` for the folder
    that `export` writes and `open` reads, `{threads}` for the number of threads.
    """

    install: str  # argument of `pip install`
    open: str
    export: str = ""
    dtype: str = "f32"


def encodle(dtype: str) -> Package:
    code = "import encodle\nmodel = encodle.SentenceTransformer(threads={threads}, precision='DTYPE')\n"
    return Package("{encodle}", code.replace("DTYPE", dtype) + "encode = model.encode\n", "", dtype)


def sentence_transformers(backend: str, settings: str, dtype: str = "f32") -> Package:
    """`settings` is code that assigns the variable `settings`, which is passed as `model_kwargs`."""
    install = "sentence-transformers" + (f"[{backend}]" if backend != "torch" else "")
    start = "import torch\nfrom sentence_transformers import SentenceTransformer\n"
    start += "torch.set_num_threads({threads})\n"
    model = f"model = SentenceTransformer({{FOLDER!r}}, device='cpu', backend='{backend}'"
    export = start + model.replace("FOLDER", "hf") + ")\nmodel.save_pretrained({folder!r})\n"
    model = model.replace("FOLDER", "hf" if backend == "torch" else "folder")
    code = start + settings + model + ", model_kwargs=settings)\nencode = model.encode\n"
    return Package(install, code, "" if backend == "torch" else export, dtype)


def openvino(dtype: str) -> Package:
    # Without INFERENCE_PRECISION_HINT, OpenVINO computes in bf16 on CPUs that have instructions for it.
    settings = "config = dict(INFERENCE_NUM_THREADS={threads}, INFERENCE_PRECISION_HINT='DTYPE')\n"
    settings += "settings = dict(ov_config=config)\n"
    return sentence_transformers("openvino", settings.replace("DTYPE", dtype), dtype)


REFERENCE, ONNX = "sentence-transformers", "sentence-transformers, ONNX Runtime"
PACKAGES = {
    "encodle": encodle("f32"),
    REFERENCE: sentence_transformers("torch", "settings = {{}}\n"),
    ONNX: sentence_transformers(
        "onnx",
        "import onnxruntime\n"
        "options = onnxruntime.SessionOptions()\n"
        "options.intra_op_num_threads = {threads}\n"
        "settings = dict(session_options=options)\n",
    ),
    "sentence-transformers, OpenVINO": openvino("f32"),
    "fastembed": Package(
        "fastembed",
        "import numpy\n"
        "from fastembed import TextEmbedding\n"
        "name = 'sentence-transformers/all-MiniLM-L6-v2'\n"
        "model = TextEmbedding(name, specific_model_path={folder!r}, threads={threads})\n"
        "encode = lambda texts: numpy.stack(list(model.embed(texts, batch_size=32)))\n",
    ),
    "encodle, bf16": encodle("bf16"),
    "sentence-transformers, OpenVINO, bf16": openvino("bf16"),
}
RUST, COMMAND = "Rust, `Embedder::embed`", "`encodle embed`, whole process"
SYSTEMS = [*PACKAGES, RUST, COMMAND]


def folder_name(system: str) -> str:
    """The name of the folders of a package's environment and model. Systems of one package share both."""
    return PACKAGES[system].install.strip("{}")


class Comparison:
    """The virtual environments, the models, and the results so far."""

    def __init__(self, options: argparse.Namespace, target: Path) -> None:
        self.threads: int = options.threads
        self.encodle: str = options.encodle
        self.counts: list[int] = options.counts
        self.rounds: dict[int, int] = dict(zip(options.counts, options.rounds))
        self.rust = target / "release/peers"
        self.program = target / "release/encodle"
        self.cache = ((options.cache or target / "peers") / "python").resolve()
        self.model = self.cache / "model"
        self.json: Path | None = options.json
        self.failures: list[str] = []
        self.found: dict[str, dict[str, Any]] = {}
        self.reference: np.ndarray | None = None
        self.installed: set[Path] = set()  # environments that this run has checked or created

    def save(self) -> None:
        if self.json:
            figures = {"machine": run.machine(self.threads), "systems": self.found}
            run.save(figures | {"failures": self.failures}, self.json)

    def fail(self, text: str) -> None:
        self.failures.append(text)
        progress(text)

    def home(self, system: str) -> Path:
        return self.cache / "environments" / folder_name(system)

    def write_inputs(self) -> None:
        """Writes the weights in f32, and the sentences, which repeat if there are too few."""
        hf = self.model / "hf"
        if not hf.exists():
            self.model.mkdir(parents=True, exist_ok=True)
            part = self.model / "hf.part"
            shutil.rmtree(part, ignore_errors=True)
            export.hugging_face("minilm", 0, part)
            part.rename(hf)
        texts = cases.sentences()
        texts *= max(self.counts) // len(texts) + 1
        (hf / "cases.json").write_text(json.dumps({n: texts[:n] for n in self.counts}))
        for n in self.counts:
            self.lines(n).write_text("".join(f"{text}\n" for text in texts[:n]))

    def lines(self, n: int) -> Path:
        return self.cache / f"{n}.txt"

    def install(self, system: str) -> None:
        """Creates the virtual environment, and notes the size of what pip installed. The environment of
        encodle is created anew in each run, because its source may have changed."""
        home = self.home(system)
        if home in self.installed:
            return  # another system of the same package may run in it
        if PACKAGES[system].install == "{encodle}" or not (home / "sizes.json").exists():
            shutil.rmtree(home, ignore_errors=True)
            checked([sys.executable, "-m", "venv", str(home)], self.threads)
            before = sizes(home)
            package = PACKAGES[system].install.format(encodle=self.encodle)
            checked([str(home / "bin/pip"), "install", "--quiet", package], self.threads)
            added = {name: size - before.get(name, 0) for name, size in sizes(home).items()}
            (home / "sizes.json").write_text(json.dumps(added, indent=1))
        self.installed.add(home)

    def command(self, system: str, code: str) -> list[str]:
        folders = {"hf": str(self.model / "hf"), "folder": str(self.model / folder_name(system))}
        return [str(self.home(system) / "bin/python"), "-c", code.format(**folders, threads=self.threads)]

    def export(self, system: str) -> None:
        """Creates the model of a package that does not read safetensors."""
        target, onnx = self.model / folder_name(system), self.model / folder_name(ONNX)
        if target.exists():
            return
        if PACKAGES[system].export:
            checked(self.command(system, PACKAGES[system].export), self.threads)
        elif system == "fastembed":
            if not onnx.exists():
                raise Failed(f"fastembed reads the ONNX file of {ONNX!r}: add it to --systems")
            ignored = shutil.ignore_patterns("*.safetensors", "cases.json")
            shutil.copytree(self.model / "hf", target, ignore=ignored)
            shutil.copy(onnx / "onnx/model.onnx", target)

    def start(self, system: str) -> Worker:
        command, logs = None, self.cache / "logs"
        if system in PACKAGES:
            python, _, code = self.command(system, PACKAGES[system].open)
            command = [python, str(HERE / "python_worker.py"), code]
        name = system if command else "ours-f32"
        worker = Worker(name, self.threads, self.rust, logs, command)
        try:
            worker.load("minilm", self.model, [str(n) for n in self.counts])
        except Failed:
            worker.close()
            raise
        return worker

    def embed_file(self, n: int) -> dict[str, float]:
        """Wall time and peak memory of `encodle embed` on a file. Compares the vectors of the smallest file."""
        with tempfile.TemporaryDirectory() as scratch:
            command = [str(self.program), "embed", "--quiet", "--threads", str(self.threads)]
            command += ["--input", str(self.lines(n)), "--output", f"{scratch}/vectors.npy"]
            found = alone(command, self.threads, Path(scratch) / "stdout")
            if n == min(self.counts):
                self.found[COMMAND].update(self.compared(COMMAND, np.load(f"{scratch}/vectors.npy")))
            return found

    def first_vector(self, system: str) -> dict[str, float]:
        """Wall time and peak memory of a process that opens the model and encodes one sentence."""
        command = [str(self.program), "embed", "hello"]
        if system in PACKAGES:
            command = self.command(system, PACKAGES[system].open + "encode(['hello'])\n")
        with tempfile.TemporaryDirectory() as scratch:
            return alone(command, self.threads, Path(scratch) / "stdout")

    def measure(self, systems: list[str]) -> None:
        self.write_inputs()
        smallest = str(min(self.counts))
        with ExitStack() as stack:
            workers: dict[str, Worker] = {}
            # The reference first: the others are compared with it.
            for system in sorted(systems, key=lambda system: system != REFERENCE):
                progress(system)
                try:
                    if system in PACKAGES:
                        self.install(system)
                        self.export(system)
                    if system != COMMAND:
                        worker = self.start(system)
                        stack.callback(worker.close)
                        vectors = worker.output(smallest)
                        self.reference = vectors if system == REFERENCE else self.reference
                        self.found[system] = self.compared(system, vectors)
                        workers[system] = worker
                    else:
                        self.found[system] = {}
                except Failed as failed:
                    self.fail(str(failed))
            measured = [system for system in systems if system in self.found]
            for n in self.counts:
                for r in range(self.rounds[n]):
                    # Reversed in every second round, so that the order of two systems varies.
                    for system in measured[:: -1 if r % 2 else 1]:
                        time.sleep(SETTLE)
                        try:
                            if system == COMMAND:
                                found = self.embed_file(n)
                                ms, peak = found["ms"], found["peak_mb"]
                            else:
                                worker = workers[system]
                                ms = worker.run(str(n), warm_ups=0)[0]
                                peak = status_mb(Path(f"/proc/{worker.process.pid}"), "VmHWM")
                        except Failed as failed:
                            self.fail(str(failed))
                            del self.found[system]
                            measured.remove(system)
                            continue
                        self.found[system].setdefault("ms", {}).setdefault(n, []).append(ms)
                        self.found[system].setdefault("peak_mb", {})[n] = peak
                    progress(f"{n} sentences, round {r + 1}")
                    self.save()
        for r in range(max(self.rounds.values()) + 1):  # the first round fills the file cache
            for system in measured:
                if system != RUST:
                    try:
                        first = self.first_vector(system)
                    except Failed as failed:
                        self.fail(str(failed))
                        continue
                    if r:
                        for key, value in first.items():
                            self.found[system].setdefault("first", {}).setdefault(key, []).append(value)
        for system in measured:
            if system in PACKAGES:
                added = json.loads((self.home(system) / "sizes.json").read_text())
                self.found[system]["sizes"] = added
        self.save()

    def compared(self, system: str, vectors: np.ndarray) -> dict[str, Any]:
        """The differences from the reference; none if sentence-transformers is not among the systems."""
        if self.reference is None:
            return {}
        found = agreement(vectors, self.reference)
        dtype = PACKAGES[system].dtype if system in PACKAGES else "f32"
        if dtype == "f32" and not found["difference"] <= DIFFERENCE:
            raise Failed(f"{system}: the output differs from that of {REFERENCE}: {found}")
        if dtype != "f32" and not found["cosine"] >= COSINE[dtype]:
            raise Failed(f"{system}: the output differs from that of {REFERENCE}: {found}")
        return found


def checked(command: list[str], threads: int) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env=environment(threads))
    if done.returncode:
        raise Failed(f"{' '.join(command)}: {done.stderr.strip().splitlines()[-1:]}")


def sizes(home: Path) -> dict[str, float]:
    """Megabytes of each entry of a virtual environment's site-packages, as on disk."""
    [site] = home.glob("lib/python*/site-packages")
    return {
        entry.name: sum(
            path.lstat().st_blocks * 512 / 1e6 for path in [entry, *entry.rglob("*")]
        )
        for entry in site.iterdir()
    }


def size(added: dict[str, float]) -> str:
    """The size of an installation, and the size without NVIDIA's packages and Triton if present."""
    cuda = ("nvidia", "triton", "cuda")
    without = sum(mb for name, mb in added.items() if not name.startswith(cuda))
    total = sum(added.values())
    return f"{total:.0f} MB" + (f" ({without:.0f} MB without NVIDIA's packages and Triton)" if total - without > 1 else "")


def agrees(system: str, values: dict[str, Any]) -> str:
    if "difference" not in values:
        return ""
    if system in PACKAGES and PACKAGES[system].dtype != "f32":
        return f"cos {values['cosine']:.6f}, lowest {values['lowest_cosine']:.6f}"
    return f"{values['difference']:.1e}"


def results(found: dict[str, dict[str, Any]], counts: list[int], best: bool) -> str:
    """The table. A time is the median over the rounds, or with `best` the shortest."""
    over = np.min if best else np.median

    def ratio(system: str, n: int) -> str:
        if system == "encodle" or "encodle" not in found:
            return ""
        ms, ours = (np.array(found[s]["ms"][n]) for s in (system, "encodle"))
        times = ms.min() / ours.min() if best else np.median(ms / ours)
        return f" ({times:.2f}×)"

    rows = []
    for system, values in found.items():
        row = [system]
        row += [f"{n / over(values['ms'][n]) * 1e3:.0f}{ratio(system, n)}" for n in counts]
        first = values.get("first")
        row.append(f"{over(first['ms']) / 1e3:.2f} s" if first else "")
        row.append(f"{np.median(first['peak_mb']):.0f} MB" if first else "")
        row += [f"{values['peak_mb'][n]:.0f} MB" for n in counts]
        row.append(size(values["sizes"]) if "sizes" in values else "")
        row.append(agrees(system, values))
        rows.append(row)
    header = ["system", *(f"sentences/s, {n:,}" for n in counts), "first vector", "peak RSS, first vector"]
    header += [*(f"peak RSS, {n:,}" for n in counts), "installed", f"difference from {REFERENCE}"]
    return table(header, rows)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS, metavar="SYSTEM", help="systems to compare"
    )
    parser.add_argument(
        "--encodle", default=str(ROOT / "python"), help="wheel or source folder of the package"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--counts", type=int, nargs="+", default=[1000, 10_000], help="numbers of sentences"
    )
    parser.add_argument(
        "--rounds", type=int, nargs="+", default=[5, 3], help="rounds for each of --counts"
    )
    parser.add_argument(
        "--best",
        action="store_true",
        help="print the fastest round instead of the median, for a machine that runs other programs",
    )
    parser.add_argument(
        "--target",
        type=Path,
        help="Cargo's target folder with release/encodle and release/peers; without this option, "
        "both programs are built",
    )
    parser.add_argument(
        "--cache", type=Path, help="folder for environments and models; Cargo's target/peers if none"
    )
    parser.add_argument("--json", type=Path, help="write all figures here, after each round")
    options = parser.parse_args()
    if len(options.counts) != len(options.rounds):
        parser.error("--rounds: expected one number for each of --counts")
    return options


def main() -> int:
    options = arguments()
    comparison = Comparison(options, options.target or run.build())
    comparison.measure(options.systems)
    found = {system: comparison.found[system] for system in options.systems if system in comparison.found}
    parts = [results(found, options.counts, options.best)]
    parts.append(measured_with(facts(options.threads)))
    if comparison.failures:
        parts.append("\n".join(f"- {text}" for text in comparison.failures))
    Results(this_cpu()).write("\n\n".join(parts))
    return 1 if comparison.failures else 0


if __name__ == "__main__":
    sys.exit(main())

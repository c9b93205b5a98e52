"""Compares `encodle serve` with other embedding servers under load, on the loopback interface.

    python benches/peers/servers.py --encodle target/release/encodle --infinity VENV/bin/infinity_emb \
        --llama-server PATH --gguf FILE --python VENV/bin/python --model CACHE/hf [--json FILE]

The Python servers load a folder with all-MiniLM-L6-v2 in f32 and a model.onnx. To create it:

    python benches/peers/export.py minilm CACHE --artefact onnx-optimized
    cp CACHE/onnx-optimized/model.onnx CACHE/hf

The model for llama-server comes from llama.cpp's convert_hf_to_gguf.py --outtype f32. A system is
measured if its program is given; requirements-infinity.txt and requirements-service.txt have the
packages of the Python servers. The source distribution of llama-cpp-python contains llama.cpp.

All servers get the same requests, POST /v1/embeddings, from the same generator, which runs in this
process. One server runs at a time. Each round starts every server once, compares its vectors with
those of the first server, and measures all loads:

- closed loop: each client sends its next request when the response to the previous one is complete.
  Requests are sent for --seconds; the measurement ends with the last response.
- open loop, only in the first --open-rounds rounds: requests at a constant rate, independently of
  the responses. The latency counts from the time at which the request was due.

--part saturation compares `encodle serve` with `encodle embed` on the same sentences, --part batch-tokens
compares values of --max-batch-tokens, --part overload sends four times the requests that the server
can compute, for values of --max-requests, and --part memory samples the memory of the first of
--systems about every 15 s for --memory-seconds.

Prints the figures and appends them to the file of this machine and month in benches/results/.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tests/server"))

import load
from processes import environment, status_mb
from results import Results, facts, measured_with, table, this_cpu

NAME = "all-MiniLM-L6-v2"
ADDRESS = ("127.0.0.1", 18080)
TOKENS = (8, 128)
SINGLE, BATCH = 1, 32  # sentences per request
CLOSED = [(1, SINGLE), (4, SINGLE), (16, SINGLE), (64, SINGLE), (1, BATCH), (16, BATCH)]
RATE = 50.0  # requests per second of the open loop, as in text-embeddings-inference's load test
WARM_UP = 1.0  # seconds
SATURATION = 64  # requests
BATCH_TOKENS = [128, 256, 512, 1024, 2048]
MAX_REQUESTS = [2, 3, 4]
COSINE = {"f32": 0.9999, "int8": 0.998}


def requests(batch: int, count: int = load.REQUESTS) -> list[bytes]:
    """Requests of `batch` sentences."""
    texts = sentences(batch, count)
    groups = (texts[i : i + batch] for i in range(0, len(texts), batch))
    bodies = ({"model": NAME, "input": group} for group in groups)
    return [load.encode("/v1/embeddings", body) for body in bodies]


def sentences(batch: int, count: int) -> list[str]:
    return load.texts(count * batch, *TOKENS)


class Load:
    """The latencies and failures of a load, and the generator's CPU time."""

    def __init__(self) -> None:
        self.latencies: list[float] = []
        self.failures = 0
        self.start, self.cpu = time.perf_counter(), time.process_time()

    def add(self, began: float, outcome: int | str) -> None:
        if outcome == 200:
            self.latencies.append(time.perf_counter() - began)
        else:
            self.failures += 1

    def results(self, batch: int) -> dict[str, float]:
        seconds = time.perf_counter() - self.start
        rate = len(self.latencies) / seconds
        p50, p99 = np.percentile(self.latencies, [50, 99]) * 1e3 if self.latencies else (0, 0)
        return {
            "requests_per_second": rate,
            "texts_per_second": rate * batch,
            "p50_ms": float(p50),
            "p99_ms": float(p99),
            "answers": len(self.latencies),
            "failures": self.failures,
            "generator_cpu": (time.process_time() - self.cpu) / seconds,
        }


async def closed_loop(turns: Iterator[bytes], clients: int) -> Load:
    """The clients share the requests of `turns`; a client sends one request at a time."""
    found = Load()

    async def client() -> None:
        connection = None
        for data in turns:
            began = time.perf_counter()
            connection, outcome = await load.attempt(connection, ADDRESS, data)
            found.add(began, outcome)

    await asyncio.gather(*(client() for _ in range(clients)))
    return found


async def open_loop(turns: Iterator[bytes], rate: float) -> Load:
    """Sends the requests of `turns` at a constant rate, on as many connections as needed."""
    found, free, running = Load(), [], set()

    async def arrival(due: float, data: bytes) -> None:
        connection, outcome = await load.attempt(free.pop() if free else None, ADDRESS, data)
        free.append(connection)
        found.add(due, outcome)

    due = time.perf_counter()
    for data in turns:
        await asyncio.sleep(max(0, due - time.perf_counter()))
        task = asyncio.create_task(arrival(due, data))
        running.add(task)
        task.add_done_callback(running.discard)
        due += 1 / rate
    await asyncio.gather(*running)
    return found


def until(seconds: float, requests: list[bytes]) -> Iterator[bytes]:
    end = time.perf_counter() + seconds
    return itertools.takewhile(lambda _: time.perf_counter() < end, itertools.cycle(requests))


@dataclass(frozen=True)
class System:
    name: str
    dtype: str
    program: str  # the option that gives the program
    command: Callable[[argparse.Namespace], list[str]]


def ours(dtype: str, *options: str) -> System:
    def command(o: argparse.Namespace) -> list[str]:
        model = str(ROOT / "weights" / NAME)
        command = ["serve", "--port", str(ADDRESS[1]), "--threads", str(o.threads)]
        return [*command, "--model", model, "--dtype", dtype, *options]

    return System(" ".join(["ours", *options]), dtype, "encodle", command)


def infinity(engine: str, name: str) -> System:
    def command(o: argparse.Namespace) -> list[str]:
        # The model is the working directory: infinity passes other folders as absolute paths, which
        # optimum refuses.
        model = ["v2", "--model-id", ".", "--served-model-name", NAME]
        where = ["--host", ADDRESS[0], "--port", str(ADDRESS[1]), "--url-prefix", "/v1"]
        how = ["--engine", engine, "--device", "cpu", "--dtype", "float32"]
        how += ["--pooling-method", "mean", "--log-level", "warning"]
        return [*model, *where, *how]

    return System(name, "f32", "infinity", command)


def llama(o: argparse.Namespace) -> list[str]:
    where = ["--host", ADDRESS[0], "--port", str(ADDRESS[1]), "--threads-http", "256"]
    model = ["--model", str(o.gguf), "--alias", NAME, "--embedding", "--pooling", "mean"]
    model += ["--log-disable"]
    threads = ["--threads", str(o.threads), "--threads-batch", str(o.threads)]
    return [*where, *model, *threads, "--parallel", "4", "--ctx-size", "2048"]


def service(o: argparse.Namespace) -> list[str]:
    return [str(HERE / "service.py"), str(o.model), str(ADDRESS[1]), str(o.threads)]


SYSTEMS = {
    "ours-f32": ours("f32"),
    "ours-int8": ours("int8"),
    "infinity-torch": infinity("torch", "infinity, PyTorch"),
    "infinity-onnx": infinity("optimum", "infinity, ONNX Runtime"),
    "llama": System("llama.cpp", "f32", "llama_server", llama),
    "service": System("FastAPI + sentence-transformers", "f32", "python", service),
}


@contextmanager
def running(system: System, options: argparse.Namespace) -> Iterator[subprocess.Popen]:
    """Starts a server and waits until it responds."""
    command = [str(getattr(options, system.program)), *system.command(options)]
    settings = environment(options.threads) | {"DO_NOT_TRACK": "1"}
    folder = options.model if system.program == "infinity" else None
    with tempfile.TemporaryFile("w+") as log:
        with contextlib.suppress(OSError), socket.create_connection(ADDRESS, 1):
            sys.exit(f"another program listens on {ADDRESS[0]}:{ADDRESS[1]}: expected a free port")
        process = subprocess.Popen(command, stdout=log, stderr=log, env=settings, cwd=folder)
        try:
            end = time.monotonic() + 120
            while not responds():
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    sys.exit(f"{system.name} does not respond:\n{log.read()[-2000:]}")
                time.sleep(0.1)
            if process.poll() is not None:
                sys.exit(f"{system.name} has ended, and another program responds on its port")
            yield process
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def responds() -> bool:
    try:
        return len(embed(["ready"])) == 1
    except OSError:
        return False


def embed(texts: list[str]) -> np.ndarray:
    body = json.dumps({"model": NAME, "input": texts}).encode()
    url = f"http://{ADDRESS[0]}:{ADDRESS[1]}/v1/embeddings"
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        data = json.load(response)["data"]
    vectors = sorted(data, key=lambda item: item["index"])
    return np.array([item["embedding"] for item in vectors], np.float64)


def sample() -> np.ndarray:
    """Vectors of 64 sentences: one half in one request, the other in one request per sentence."""
    texts = sentences(BATCH, 2)
    return np.concatenate([embed(texts[:BATCH]), *(embed([text]) for text in texts[BATCH:])])


def lowest_cosine(a: np.ndarray, b: np.ndarray) -> float:
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return float(((a * b).sum(1) / norms).min())


def busy() -> float:
    """Seconds of CPU time that were not idle: used by a process, or taken by the host (steal)."""
    fields = [int(x) for x in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def quiet() -> float:
    """Waits, at most a minute, until other programs use less than 5 % of a core; returns their use."""
    for _ in range(60):
        before = busy()
        time.sleep(1)
        if (use := busy() - before) < 0.05:
            break
    return use


def servers(options: argparse.Namespace, found: dict[str, Any]) -> None:
    """All loads of all systems, round by round."""
    streams = {batch: requests(batch) for batch in (SINGLE, BATCH)}
    reference: np.ndarray | None = None
    for r in range(options.rounds):
        for key in options.systems[:: -1 if r % 2 else 1]:
            system = SYSTEMS[key]
            result: dict[str, Any] = {"round": r, "other_programs": quiet()}
            with running(system, options) as process:
                vectors = sample()
                if reference is None:
                    reference, first = vectors, key
                result["cosine"] = lowest_cosine(vectors, reference)
                limit = min(COSINE[system.dtype], COSINE[SYSTEMS[first].dtype])
                if result["cosine"] < limit:
                    sys.exit(
                        f"{key}: the output differs from that of {first}: lowest cosine "
                        f"{result['cosine']}"
                    )
                for clients, batch in options.loads:
                    measured = closed(streams[batch], clients, options.seconds, batch)
                    result[f"{clients}x{batch}"] = measured
                    progress(key, f"{clients}x{batch}", measured)
                if r < options.open_rounds:
                    turns = itertools.islice(
                        itertools.cycle(streams[SINGLE]), int(RATE * options.open_seconds)
                    )
                    measured = asyncio.run(open_loop(turns, RATE)).results(SINGLE)
                    result["open"] = measured
                    progress(key, "open", measured)
                result["rss_mb"] = status_mb(Path(f"/proc/{process.pid}"), "VmRSS")
            found.setdefault(key, []).append(result)
            save(options, found)


def closed(requests: list[bytes], clients: int, seconds: float, batch: int) -> dict[str, float]:
    asyncio.run(closed_loop(until(WARM_UP, requests[::-1]), clients))
    return asyncio.run(closed_loop(until(seconds, requests), clients)).results(batch)


def saturation(options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Sentences per second of `encodle serve` (16 clients, warm) and of `encodle embed` (a whole run)."""
    stream = requests(BATCH, SATURATION)
    texts = sentences(BATCH, SATURATION)
    with tempfile.TemporaryDirectory() as folder:
        lines, output = Path(folder) / "texts.txt", Path(folder) / "vectors.npy"
        lines.write_text("\n".join(texts) + "\n")
        for r in range(options.rounds):
            for dtype in ("f32", "int8"):
                rates: dict[str, float] = {}
                for turn in ("serve", "embed")[:: -1 if r % 2 else 1]:
                    if turn == "serve":
                        with running(ours(dtype), options):
                            closed(stream, 16, 0.1, BATCH)
                            done = asyncio.run(closed_loop(iter(stream), 16)).results(BATCH)
                        rates[turn] = done["texts_per_second"]
                    else:
                        command = [str(options.encodle), "embed", "--dtype", dtype]
                        command += ["--threads", str(options.threads), "--input", str(lines)]
                        start = time.perf_counter()
                        subprocess.run([*command, "--output", str(output)], check=True)
                        rates[turn] = len(texts) / (time.perf_counter() - start)
                        output.unlink()
                found.setdefault(dtype, []).append(rates)
                print(dtype, rates, file=sys.stderr, flush=True)
                save(options, found)


def batch_tokens(options: argparse.Namespace, found: dict[str, Any]) -> None:
    """The loads in closed loop, for each value of --max-batch-tokens."""
    streams = {batch: requests(batch) for batch in (SINGLE, BATCH)}
    for r in range(options.rounds):
        for dtype in ("f32", "int8"):
            for tokens in BATCH_TOKENS[:: -1 if r % 2 else 1]:
                with running(ours(dtype, "--max-batch-tokens", str(tokens)), options):
                    for clients, batch in options.loads:
                        measured = closed(streams[batch], clients, options.seconds, batch)
                        key = f"{dtype} {tokens} {clients}x{batch}"
                        found.setdefault(key, []).append(measured)
                        progress(key, "", measured)
                save(options, found)


def memory(options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Memory of a server under 16 clients, whose requests have one and 32 sentences in turn."""
    streams = {batch: requests(batch) for batch in (SINGLE, BATCH)}
    with running(SYSTEMS[options.systems[0]], options) as process:
        start = time.monotonic()
        while time.monotonic() - start < options.memory_seconds:
            for batch in (SINGLE, BATCH):
                asyncio.run(closed_loop(until(7, streams[batch]), 16))
            seconds = time.monotonic() - start
            fields = ("VmHWM", "VmRSS", "RssAnon")
            mb = {f: status_mb(Path(f"/proc/{process.pid}"), f) for f in fields}
            found.setdefault(options.systems[0], []).append({"seconds": seconds, **mb})
            print(seconds, mb, file=sys.stderr, flush=True)
            save(options, found)


def overload(options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Four times the requests that the server can compute, for values of --max-requests."""
    stream = requests(SINGLE)
    for r in range(options.rounds):
        for limit in MAX_REQUESTS[:: -1 if r % 2 else 1]:
            with running(ours("f32", "--max-requests", str(limit)), options):
                alone = closed(stream, 1, options.seconds, SINGLE)
                rate = 4 * closed(stream, limit, options.seconds, SINGLE)["requests_per_second"]
                turns = itertools.islice(itertools.cycle(stream), int(rate * options.seconds))
                overloaded = asyncio.run(open_loop(turns, rate)).results(SINGLE)
            measured = {"alone": alone, "overloaded": overloaded, "rate": rate}
            found.setdefault(str(limit), []).append(measured)
            progress(f"--max-requests {limit}", "alone", alone)
            progress(f"--max-requests {limit}", f"{rate:.0f} requests/s", overloaded)
            save(options, found)


def progress(system: str, name: str, measured: dict[str, float]) -> None:
    fields = " ".join(f"{key} {value:.4g}" for key, value in measured.items())
    print(f"{system} {name}: {fields}", file=sys.stderr, flush=True)


def save(options: argparse.Namespace, found: dict[str, Any]) -> None:
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def tables(found: dict[str, Any], loads: list[tuple[int, int]]) -> str:
    """One table per load: the medians over the rounds."""
    parts = []
    names = [f"{clients}x{batch}" for clients, batch in loads] + ["open"]
    for name in names:
        rows = []
        for key, rounds in found.items():
            measured = [r[name] for r in rounds if name in r]
            if not measured:
                continue
            median = {f: float(np.median([m[f] for m in measured])) for f in measured[0]}
            fields = ["requests_per_second", "texts_per_second", "p50_ms", "p99_ms"]
            system = SYSTEMS[key]
            label = f"{system.name}, {system.dtype}"
            rows.append([label, *(f"{median[f]:.1f}" for f in fields), f"{median['failures']:.0f}"])
        if rows:
            header = ["system", "requests/s", "texts/s", "p50, ms", "p99, ms", "failures"]
            parts.append(f"{name}\n\n{table(header, rows)}")
    return "\n\n".join(parts)


PARTS = {
    "servers": servers,
    "saturation": saturation,
    "batch-tokens": batch_tokens,
    "overload": overload,
    "memory": memory,
}


def pair(text: str) -> tuple[int, int]:
    clients, _, batch = text.partition("x")
    return int(clients), int(batch)


def path(text: str) -> Path:
    return Path(text).absolute()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=PARTS, default="servers")
    parser.add_argument("--encodle", type=path, default=ROOT / "target/release/encodle")
    parser.add_argument("--infinity", type=path, help="infinity_emb")
    parser.add_argument("--llama-server", type=path)
    parser.add_argument("--gguf", type=path, help="the model for llama-server")
    parser.add_argument("--python", type=path, help="interpreter of service.py")
    parser.add_argument("--model", type=path, help="folder of the model for the Python servers")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, help="default: those with a program")
    parser.add_argument("--loads", nargs="+", type=pair, default=CLOSED, metavar="CLIENTSxTEXTS")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--open-seconds", type=float, default=30)
    parser.add_argument("--memory-seconds", type=float, default=600)
    parser.add_argument("--open-rounds", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures of every round here")
    options = parser.parse_args()
    for name in options.systems or []:
        if not getattr(options, SYSTEMS[name].program):
            option = SYSTEMS[name].program.replace("_", "-")
            parser.error(f"system {name}: its program is missing; pass --{option} PATH")
    if (options.infinity or options.python) and not options.model:
        parser.error("the servers in Python need --model")
    if options.llama_server and not options.gguf:
        parser.error("--llama-server needs --gguf")
    options.systems = options.systems or [s for s in SYSTEMS if getattr(options, SYSTEMS[s].program)]
    return options


def main() -> None:
    options = arguments()
    found: dict[str, Any] = {}
    PARTS[options.part](options, found)
    if options.part == "servers":
        text = tables(found, options.loads)
    else:
        text = f"```json\n{json.dumps(found, indent=1)}\n```"
    Results(this_cpu()).write(f"{text}\n\n{measured_with(facts(options.threads))}")


if __name__ == "__main__":
    main()

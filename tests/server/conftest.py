"""Tests of `encodle serve` over HTTP, against its documentation in docs/server.md.

    pip install -r tests/server/requirements.txt
    cargo build --release
    pytest tests/server

The tests start the binary that the environment variable ENCODLE names; the default is
target/release/encodle. `-m "not slow"` leaves out the tests that take more than about ten seconds.
"""

import json
import os
import re
import resource
import signal
import subprocess
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
ENCODLE = Path(os.environ.get("ENCODLE", ROOT / "target/release/encodle")).resolve()
GOLDEN = ROOT / "tests/golden"
MINILM = "all-MiniLM-L6-v2"
# The models of the fixture `models`: all-MiniLM-L6-v2, and tiny models with random weights.
MODELS = {
    MINILM: ROOT / "weights/all-MiniLM-L6-v2",
    "sentences": GOLDEN / "architectures/sentences/mpnet",  # has the prompts "query" and "document"
    "sequence": GOLDEN / "heads/sequence",  # three labels
    "ranker": GOLDEN / "heads/score",  # one label
    "tagger": GOLDEN / "heads/tagger",
    "answer": GOLDEN / "heads/answer",
    "masked_lm": GOLDEN / "heads/masked_lm",
    "splade": GOLDEN / "sparse/splade_max",
    "colbert": GOLDEN / "multi_vector/expansion",
    "inference_free": GOLDEN / "sparse/inference_free",  # has stored weights for queries
}
KEYS = ["first-key", "second-key"]
LISTENING = re.compile(r"listening on http://([^\s\"]+):(\d+)")

for variable in [name for name in os.environ if name.startswith("ENCODLE_")]:
    os.environ.pop(variable)
os.environ["NO_PROXY"] = "127.0.0.1,localhost"
os.environ["ENCODLE_PACKED_CACHE"] = "off"  # write no files to the user's cache
os.environ["ENCODLE_DEVICE"] = "cpu"
for variable in (
    "RUST_LOG",  # of the server
    "CO_API_KEY", "HF_HUB_OFFLINE", "HF_TOKEN", "OPENAI_API_KEY",  # of the clients
):
    os.environ.pop(variable, None)


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes more than about ten seconds")
    # Some tests open thousands of connections.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def pytest_collection_modifyitems(items):
    missing = pytest.mark.skip(reason=f"{ENCODLE} not found: run cargo build --release, or set ENCODLE")
    for item in items:
        if not ENCODLE.exists():
            item.add_marker(missing)
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(180))


class Server:
    """A running `encodle serve` on a free port."""

    def __init__(self, *arguments, env=None):
        command = [ENCODLE, "serve", "--port", "0", *map(str, arguments)]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"HF_HUB_OFFLINE": "1"} | (env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self.log = []
        self.address = None
        listening = threading.Event()
        self.reader = threading.Thread(target=self.read_log, args=(listening,), daemon=True)
        self.reader.start()
        listening.wait(60)
        if self.address is None:
            self.process.kill()
            self.process.wait()
            raise AssertionError(
                f"{' '.join(map(str, command))} did not print its address:\n{self.tail()}"
            )
        self.host, self.port = self.address
        self.url = f"http://{self.host}:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=60, trust_env=False)
        try:
            wait_until(self.is_healthy, 60, "GET /health returns 200")
        except AssertionError:
            self.kill()
            raise
        self.memory = psutil.Process(self.process.pid).memory_info

    def read_log(self, listening):
        for line in self.process.stderr:
            self.log.append(line.rstrip("\n"))
            if self.address is None and (found := LISTENING.search(line)):
                self.address = found[1], int(found[2])
                listening.set()
        listening.set()

    def tail(self, lines=20):
        return "\n".join(self.log[-lines:])

    def is_healthy(self):
        assert self.process.poll() is None, f"the server exited:\n{self.tail()}"
        try:
            return self.client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def get(self, path, **options):
        return self.client.get(path, **options)

    def post(self, path, body, **options):
        return self.client.post(path, json=body, **options)

    def json(self, path, body, **options):
        """The JSON of a response that must have status 200."""
        response = self.post(path, body, **options)
        assert response.status_code == 200, f"{path} {shorten(body)}: {describe(response)}"
        return response.json()

    def signal(self, number):
        self.process.send_signal(number)

    def stop(self):
        """Stop with SIGTERM. The exit code must be 0, and the log must show no panic."""
        self.client.close()
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
        try:
            code = self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(
                f"the server did not exit within 30 s of SIGTERM:\n{self.tail()}"
            ) from None
        self.reader.join(10)
        assert code == 0, f"exit code after SIGTERM: expected 0, got {code}:\n{self.tail()}"
        panics = [line for line in self.log if "panicked" in line]
        assert not panics, f"the server panicked: {panics[:3]}"

    def kill(self):
        self.client.close()
        self.process.kill()
        self.process.wait(10)


@pytest.fixture(scope="session")
def server():
    """A server with the built-in model."""
    server = Server()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def models():
    """A server with the models in MODELS."""
    arguments = [f"--model={name}={folder}" for name, folder in MODELS.items()]
    server = Server(*arguments)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def keyed(tmp_path_factory):
    """A server that requires one of KEYS: the first is in a file, the second in the environment."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"{KEYS[0]}\n")
    file.chmod(0o600)
    server = Server("--api-key-file", file, env={"ENCODLE_API_KEYS": KEYS[1]})
    yield server
    server.stop()


@pytest.fixture
def serve():
    """Starts servers with other options. They are stopped after the test."""
    servers = []

    def start(*arguments, env=None):
        servers.append(Server(*arguments, env=env))
        return servers[-1]

    yield start
    # A server that the test has ended itself is not stopped again.
    running = [server for server in servers if server.process.poll() is None]
    for server in running:
        server.stop()


@pytest.fixture(scope="session")
def heads(tmp_path_factory):
    """Folders of models of the size of all-MiniLM-L6-v2 with random heads: `answer` and `tagger`."""
    source = ROOT / "weights" / MINILM
    data = (source / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    tensors, rest = json.loads(data[8 : 8 + size]), data[8 + size :]
    tensors = {
        name if name.startswith("__") else f"bert.{name}": info for name, info in tensors.items()
    }
    config = json.loads((source / "config.json").read_text())
    width = config["hidden_size"]
    random = np.random.default_rng(0)
    folders = {}
    for name, layer, rows, architecture in [
        ("answer", "qa_outputs", 2, "BertForQuestionAnswering"),
        ("tagger", "classifier", 3, "BertForTokenClassification"),
    ]:
        folder = folders[name] = tmp_path_factory.mktemp(name)
        header, body = dict(tensors), rest
        for tensor, shape in [("weight", [rows, width]), ("bias", [rows])]:
            values = random.normal(size=shape).astype("<f2").tobytes()
            offsets = [len(body), len(body) + len(values)]
            header[f"{layer}.{tensor}"] = {"dtype": "F16", "shape": shape, "data_offsets": offsets}
            body += values
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)
        labels = {"id2label": {"0": "O", "1": "B-A", "2": "I-A"}} if name == "tagger" else {}
        (folder / "config.json").write_text(
            json.dumps(config | labels | {"architectures": [architecture]})
        )
        for file in ["tokenizer.json", "tokenizer_config.json"]:
            if (source / file).exists():
                (folder / file).write_bytes((source / file).read_bytes())
    return folders


# What the commands print.


def encodle(*arguments, stdin=""):
    """The JSON lines that a command prints."""
    command = [ENCODLE, *map(str, arguments)]
    run = subprocess.run(command, input=stdin, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, f"{' '.join(map(str, command))}: {run.stderr}"
    # `splitlines` would also split at U+2028 in a JSON string.
    return [json.loads(line) for line in run.stdout.removesuffix("\n").split("\n")]


def encodle_embed(texts, *arguments):
    """The vectors (texts, dimensions) that `encodle embed` prints."""
    records = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    options = ["--input", "-", "--input-format", "jsonl", "--format", "jsonl", *arguments]
    return f32([record["embedding"] for record in encodle("embed", *options, stdin=records)])


# Comparisons.


def f32(values):
    """JSON numbers as f32. The server writes the shortest decimal that identifies each f32.
    Parsing this decimal gives the same f32, even if it is parsed as f64 first."""
    return np.asarray(values, dtype=np.float64).astype(np.float32)


def assert_same_bits(actual, expected, what="vectors"):
    actual, expected = f32(actual), f32(expected)
    assert actual.shape == expected.shape, (
        f"{what}: expected the shape {expected.shape}, got {actual.shape}"
    )
    differs = actual.view(np.uint32) != expected.view(np.uint32)
    if differs.any():
        where = tuple(int(i) for i in np.argwhere(differs)[0])
        largest = np.abs(actual - expected).max()
        raise AssertionError(
            f"{what}: {differs.sum()} of {differs.size} values differ, by {largest} at most; "
            f"the first at {where}: expected {expected[where]!r}, got {actual[where]!r}"
        )


def assert_same_json(actual, expected, at="response"):
    """Equal JSON values. Numbers must be equal as f32."""
    if isinstance(expected, dict):
        assert isinstance(actual, dict) and actual.keys() == expected.keys(), (
            f"{at}: expected the fields {list(expected)}, got {shorten(actual)}"
        )
        for key in expected:
            assert_same_json(actual[key], expected[key], f"{at}.{key}")
    elif isinstance(expected, list):
        assert isinstance(actual, list) and len(actual) == len(expected), (
            f"{at}: expected {len(expected)} elements, got {shorten(actual)}"
        )
        for i, (a, e) in enumerate(zip(actual, expected)):
            assert_same_json(a, e, f"{at}[{i}]")
    elif isinstance(expected, float):
        assert isinstance(actual, (int, float)) and f32(actual) == f32(expected), (
            f"{at}: expected {expected}, got {actual}"
        )
    else:
        assert actual == expected, f"{at}: expected {expected!r}, got {actual!r}"


def is_error(response, interface):
    """Whether the body of a response is an error in the form of an interface."""
    try:
        body = response.json()
    except ValueError:
        return False
    if not isinstance(body, dict):
        return False
    text = lambda value: isinstance(value, str) and value.strip() != ""
    if interface == "openai":
        error = body.get("error")
        return (
            isinstance(error, dict)
            and {"message", "type", "param", "code"} <= error.keys()
            and text(error["message"])
            and text(error["type"])
        )
    if interface == "tei":
        return text(body.get("error")) and text(body.get("error_type"))
    return text(body.get("message"))


def assert_error(response, status, interface="tei"):
    """`status` is one status, or several that docs/server.md allows."""
    allowed = {status} if isinstance(status, int) else set(status)
    assert response.status_code in allowed, f"expected status {status}, got {describe(response)}"
    assert "application/json" in response.headers.get("content-type", ""), (
        f"the type of an error's body: expected application/json, got {describe(response)}"
    )
    assert is_error(response, interface), (
        f"no error in the form of {interface}: {describe(response)}"
    )


# Utilities.


def wait_until(condition, seconds, what):
    """Poll until the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not true after {seconds} s: {what}"
        time.sleep(0.01)


def shorten(value, length=200):
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= length else text[:length] + "…"


def describe(response):
    kind = response.headers.get("content-type")
    return f"status {response.status_code}, {kind}: {shorten(response.text)}"

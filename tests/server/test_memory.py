"""The memory of requests, and long computations beside short requests."""

import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from conftest import ROOT, assert_error, wait_until
from wire import Wire, request

WORDS = "a man is eating food and a piece of bread while the new movie is awesome".split()
MIB = 1 << 20


def words(n, seed=0):
    return " ".join(random.Random(seed).choices(WORDS, k=n))


def peak_memory(server, reset=False):
    """The peak of the resident memory of the process since the last reset, in bytes."""
    process = Path(f"/proc/{server.process.pid}")
    if reset:
        (process / "clear_refs").write_text("5")
    return int((process / "status").read_text().split("VmHWM:")[1].split()[0]) << 10


def metric(server, name, **labels):
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return sample.value
    raise AssertionError(f"no metric {name} {labels}")


def computed(server):
    """The number of batches so far."""
    return metric(server, "encodle_stage_duration_seconds_count", stage="compute")


# Small bodies whose responses or computations are as large as the limits allow.
WORST = {
    "tokenize": ("/tokenize", {"inputs": ["a " * 520_000] * 2}),
    "embed_all": ("/embed_all", {"inputs": [words(20, i) for i in range(1900)]}),
    "attention": ("/attention", {"inputs": words(250)}),
    "embed": ("/embed", {"inputs": [f"{i} " + "a " * 2000 for i in range(2048)], "truncate": True}),
    "openai": (
        "/v1/embeddings",
        {"model": "all-MiniLM-L6-v2", "input": [words(5, i) for i in range(2048)]},
    ),
    "similarity": (
        "/similarity",
        {"inputs": {"source_sentence": "a", "sentences": [words(5, i) for i in range(2000)]}},
    ),
    "decode": ("/decode", {"ids": [[2000 + i % 1000 for i in range(1000)]] * 1000}),
    "ids": ("/embed", {"inputs": [[101, 2000 + i] + [2000] * 253 + [102] for i in range(500)]}),
    "tag": ("/tag", {"model": "tagger", "inputs": [words(12_000, i) for i in range(4)]}),
    "answer": (
        "/answer",
        {"model": "answer", "question": words(300), "inputs": [words(2_000, i) for i in range(4)], "top": 1000},
    ),
}


@pytest.fixture
def with_heads(serve, heads):
    def start(*options):
        models = {"all-MiniLM-L6-v2": ROOT / "weights/all-MiniLM-L6-v2", **heads}
        return serve(*[f"--model={name}={path}" for name, path in models.items()], *options)

    return start


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [30])
def test_the_worst_legal_requests_stay_below_max_memory(with_heads, seconds):
    server = with_heads("--timeout", "20")
    server.json("/embed", {"inputs": "warm up"})
    before = peak_memory(server, reset=True)  # without the memory of loading
    end = time.monotonic() + seconds
    statuses = {}

    def client(number):
        order = random.Random(number)
        with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as http:
            while time.monotonic() < end:
                name, (path, body) = order.choice(list(WORST.items()))
                status = http.post(path, json=body).status_code
                statuses.setdefault(name, []).append(status)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(client, range(16)))
    used = peak_memory(server) - before
    allowed = {200, 408, 413, 429}
    counts = {name: dict(Counter(found)) for name, found in statuses.items()}
    print(f"{used / MIB:.0f} MiB above {before / MIB:.0f} MiB; {counts}")
    assert all(set(found) <= allowed for found in statuses.values()), counts
    assert used < 200 * MIB
    server.json("/embed", {"inputs": "still here"})


def test_a_request_that_needs_too_much_memory_is_refused_and_others_wait(serve):
    server = serve("--max-memory", "32")
    path, body = WORST["embed_all"]
    refused = server.post(path, body)
    assert_error(refused, 413)
    assert "MiB of memory: expected at most 12 MiB" in refused.json()["error"]
    small = {"inputs": body["inputs"][:200]}  # about 7 MiB each
    with ThreadPoolExecutor(4) as pool:
        responses = list(pool.map(lambda _: server.post(path, small), range(4)))
    assert [response.status_code for response in responses] == [200] * 4
    assert all(response.json() == responses[0].json() for response in responses)


def test_a_text_that_cannot_be_split_is_tokenized_alone_or_refused(serve):
    server = serve()
    tokens = server.json("/tokenize", {"inputs": "\u5b57" * 100_000})
    assert len(tokens[0]) == 100_002
    refused = server.post("/tokenize", {"inputs": "\u5b57" * 190_000}, timeout=10)
    assert_error(refused, 413)
    openai = {"model": "m", "input": "\u5b57" * 190_000}
    assert server.post("/v1/embeddings", openai).json()["error"]["param"] == "input"


def test_windows_are_counted_before_they_take_memory(with_heads):
    server = with_heads()
    question = "a " * 378  # leaves room for 3 tokens of the text, of 384
    body = {"model": "answer", "question": question, "inputs": [f"{i} " + "a " * 32_000 for i in range(8)]}
    before = peak_memory(server, reset=True)
    assert_error(server.post("/answer", body), 413)
    assert peak_memory(server) - before < 100 * MIB


@pytest.mark.parametrize(
    "path, body",
    [
        (
            "/answer",
            {"model": "answer", "question": words(300), "inputs": [words(4_000, i) for i in range(8)]},
        ),
        ("/tag", {"model": "tagger", "inputs": [words(12_000, i) for i in range(8)]}),
    ],
)
def test_a_long_computation_delays_no_others_and_ends_when_its_client_leaves(
    with_heads, path, body
):
    server = with_heads()

    def latencies(count):
        """The times of `count` requests of each of 8 clients, in seconds, sorted."""

        def client(number):
            with httpx.Client(base_url=server.url, timeout=30, trust_env=False) as http:
                times = []
                for i in range(count):
                    start = time.perf_counter()
                    response = http.post("/embed", json={"inputs": words(12, number * 100 + i)})
                    times.append(time.perf_counter() - start)
                    assert response.status_code == 200
                return times

        with ThreadPoolExecutor(8) as pool:
            return sorted(sum(pool.map(client, range(8)), []))

    latencies(5)  # warm up
    alone = latencies(25)
    with Wire(server) as long:
        started = computed(server)
        long.send(request(path, body))
        wait_until(lambda: computed(server) > started, 30, "the long computation has begun")
        seconds = lambda: metric(server, "encodle_stage_duration_seconds_sum", stage="compute")
        before = seconds(), computed(server)
        time.sleep(1)
        batch = (seconds() - before[0]) / (computed(server) - before[1])
        beside = latencies(15)
        assert metric(server, "encodle_queue_tokens") > 0, "the long computation ended too early"
    p99 = lambda times: times[int(len(times) * 0.99)]
    print(
        f"{path}: p99 {p99(alone) * 1e3:.0f} ms alone, {p99(beside) * 1e3:.0f} ms beside batches of "
        f"{batch * 1e3:.0f} ms"
    )
    # A short request waits for the batch in progress, and for another if it misses its turn. The
    # rest is a margin.
    assert p99(beside) < 2 * p99(alone) + 3 * batch
    time.sleep(1)
    stopped = computed(server)
    time.sleep(0.5)
    assert computed(server) == stopped and metric(server, "encodle_queue_tokens") == 0


def test_windows_of_a_long_question_advance_by_half_their_room(with_heads):
    server = with_heads()
    question, text = words(300), words(500)
    start = time.monotonic()
    answers = server.json("/answer", {"model": "answer", "question": question, "inputs": text})
    assert time.monotonic() - start < 10
    assert len(answers[0]["answers"]) == 1


def test_clients_in_bulk_wait_and_are_not_refused(serve):
    """As the official client of OpenAI with 16 threads: 32 requests of 64 texts."""
    server = serve()
    server.json("/embed", {"inputs": words(50)})

    def post(number):
        texts = [words(60, number * 64 + i) for i in range(64)]
        return server.post("/embed", {"inputs": texts}).status_code

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(post, range(32))) == [200] * 32


def test_refused_clients_are_asked_to_return_one_after_another(serve):
    server = serve("--max-wait", "0.05")
    server.json("/embed", {"inputs": [words(100, i) for i in range(32)]})  # measures the speed
    texts = [words(100, i) for i in range(200)]
    responses = []

    def post(_):
        responses.append(server.post("/embed", {"inputs": texts}))

    threads = [threading.Thread(target=post, args=(i,)) for i in range(16)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    after = [int(r.headers["retry-after"]) for r in responses if r.status_code == 429]
    assert len(after) >= 8
    assert len(set(after)) > len(after) / 3, sorted(after)


def test_the_longest_responses_are_complete(serve):
    server = serve()
    tokens = server.json("/tokenize", {"inputs": ["a b " * 20_000, "", "né à"]})
    assert [len(text) for text in tokens] == [40_002, 2, 4]
    assert tokens[0][40_000] == {
        "id": 1038, "text": "b", "special": False, "start": 79_998, "stop": 79_999,
    }
    assert tokens[2][2] == {"id": 1037, "text": "à", "special": False, "start": 3, "stop": 4}
    states = server.json("/embed_all", {"inputs": ["a b"] * 300})
    assert [(len(text), len(text[0])) for text in states] == [(4, 384)] * 300
    wait_until(lambda: metric(server, "encodle_requests_in_progress") <= 1, 5, "requests end")

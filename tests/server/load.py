"""Load generator for `bert serve`: POST /v1/embeddings or /embed over keep-alive connections.

    python tests/server/load.py --url http://127.0.0.1:8080 --clients 16 --batch 1 --seconds 10
    python tests/server/load.py --clients 256 --rate 200 --seconds 10

Without --rate, the load is closed-loop: each client sends its next request when the answer to the
previous one is complete. With --rate, the load is open-loop: requests arrive by a Poisson process,
independently of the answers, and the latency of a request counts from its arrival, including the
time in which it waits for a free connection.

All requests are encoded before the measurement, and the answers of the measurement are not decoded,
so that the generator needs little CPU; its CPU time is printed.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[2]
SEED = 20260
REQUESTS = 512  # number of distinct requests


class Connection(asyncio.Protocol):
    """A keep-alive connection that has at most one request in progress."""

    def __init__(self):
        self.received = bytearray()
        self.answer = None
        self.transport = None

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.received += data
        head, separator, rest = self.received.partition(b"\r\n\r\n")
        if not separator or self.answer is None or self.answer.done():
            return
        length = header(head, b"content-length")
        if length is None:  # chunked; JSON does not contain this end
            complete = rest.endswith(b"0\r\n\r\n")
        else:
            complete = len(rest) >= int(length)
        if complete:
            self.received.clear()
            if header(head, b"connection") == b"close":
                self.transport.close()
            body = bytes(rest) if length is not None else join_chunks(bytes(rest))
            self.answer.set_result((int(head[9:12]), bytes(head), body))

    def connection_lost(self, error):
        if self.answer is not None and not self.answer.done():
            self.answer.set_exception(error or ConnectionResetError("closed without an answer"))

    async def request(self, data):
        """Send one request; return the status, the head and the body of its answer."""
        self.answer = asyncio.get_running_loop().create_future()
        self.transport.write(data)
        return await self.answer


def join_chunks(data):
    body = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        size = int(size, 16)
        body, data = body + data[:size], data[size + 2 :]
    return body


def header(head, name):
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.lower() == name:
            return value.strip().lower()
    return None


async def connect(host, port):
    _, connection = await asyncio.get_running_loop().create_connection(Connection, host, port)
    return connection


def encode(path, body, host="localhost", headers=()):
    """The bytes of a POST request."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", f"host: {host}", "content-type: application/json"]
    lines += [f"content-length: {len(body)}", *(f"{k}: {v}" for k, v in headers)]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@cache
def words():
    """Words of the benchmarks' sentences that are one token of all-MiniLM-L6-v2."""
    sys.path.insert(0, str(ROOT / "benches" / "peers"))
    from cases import sentences

    tokenizer = json.loads((ROOT / "weights/all-MiniLM-L6-v2/tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    found = {word for text in sentences() for word in text.lower().split()}
    return sorted(word for word in found if word.isalpha() and word in vocabulary)


def texts(count, low, high, seed=SEED):
    """`count` texts of `low` to `high` tokens, [CLS] and [SEP] included."""
    generator = random.Random(seed)
    lengths = [generator.randint(low, high) for _ in range(count)]
    return [" ".join(generator.choices(words(), k=max(1, n - 2))) for n in lengths]


class Measurement:
    def __init__(self, start, end):
        self.start, self.end = start, end
        self.latencies = []
        self.errors = Counter()

    def add(self, began, outcome):
        """Count a request whose answer came between start and end."""
        now = time.perf_counter()
        if not self.start <= now < self.end:
            return
        if outcome == 200:
            self.latencies.append(now - began)
        else:
            self.errors[str(outcome)] += 1

    def percentile(self, share):
        if not self.latencies:
            return None
        position = min(len(self.latencies) - 1, int(share * len(self.latencies)))
        return round(1e3 * self.latencies[position], 3)


async def attempt(connection, address, data):
    """Send a request, on a new connection if there is none; return the connection and the outcome."""
    try:
        if connection is None or connection.transport.is_closing():
            connection = await connect(*address)
        status, _, _ = await connection.request(data)
        return connection, status
    except (OSError, ValueError) as error:
        if connection is not None:
            connection.transport.abort()
        return None, type(error).__name__


async def closed_loop(address, requests, clients, measurement):
    async def client(number):
        connection, turn = None, number
        while (began := time.perf_counter()) < measurement.end:
            data = requests[turn % len(requests)]
            connection, outcome = await attempt(connection, address, data)
            measurement.add(began, outcome)
            turn += clients
            if outcome != 200:
                await asyncio.sleep(0.01)  # do not spin on a server that refuses

    await asyncio.gather(*map(client, range(clients)))


async def open_loop(address, requests, clients, rate, measurement):
    free = asyncio.LifoQueue()
    for _ in range(clients):
        free.put_nowait(None)
    running = set()

    async def arrival(arrived, data):
        connection = await free.get()
        connection, outcome = await attempt(connection, address, data)
        free.put_nowait(connection)
        measurement.add(arrived, outcome)

    generator = random.Random(SEED)
    arrived = time.perf_counter()
    for turn in range(sys.maxsize):
        arrived += generator.expovariate(rate)
        if arrived >= measurement.end:
            break
        if (wait := arrived - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        task = asyncio.create_task(arrival(arrived, requests[turn % len(requests)]))
        running.add(task)
        task.add_done_callback(running.discard)
    # Answers after the end do not count, so requests that are still running are dropped.
    if running:
        await asyncio.wait(running, timeout=max(0, measurement.end - time.perf_counter()))
    unanswered = len(running)
    for task in running:
        task.cancel()
    return unanswered


async def run(arguments):
    url = urlsplit(arguments.url)
    if url.scheme != "http" or url.hostname is None:
        sys.exit(f"--url is {arguments.url!r}: expected http://HOST:PORT")
    if arguments.rate is not None and arguments.rate <= 0:
        sys.exit(f"--rate is {arguments.rate}: expected a number above 0")
    address = (url.hostname, url.port or 80)
    low, high = arguments.tokens
    pool = texts(REQUESTS * arguments.batch, low, high, arguments.seed)
    batches = [pool[i::REQUESTS] for i in range(REQUESTS)]
    headers = [("authorization", f"Bearer {arguments.api_key}")] if arguments.api_key else []
    if arguments.format == "openai":
        bodies = ({"model": arguments.model, "input": batch} for batch in batches)
        if arguments.base64:
            bodies = ({**body, "encoding_format": "base64"} for body in bodies)
        path = "/v1/embeddings"
    else:
        path, bodies = "/embed", ({"inputs": batch} for batch in batches)
    requests = [encode(path, body, url.netloc, headers) for body in bodies]

    first = await connect(*address)
    status, _, body = await first.request(requests[0])
    if status != 200:
        sys.exit(f"{path} answers {status}: {body[:500].decode(errors='replace')}")
    answer = json.loads(body)
    vectors = answer["data"] if arguments.format == "openai" else answer
    if len(vectors) != arguments.batch:
        sys.exit(f"{path} answers {len(vectors)} vectors: expected {arguments.batch}")
    first.transport.close()

    start = time.perf_counter() + arguments.warmup
    measurement = Measurement(start, start + arguments.seconds)
    cpu, wall = time.process_time(), time.perf_counter()
    unanswered = 0
    if arguments.rate:
        unanswered = await open_loop(
            address, requests, arguments.clients, arguments.rate, measurement
        )
    else:
        await closed_loop(address, requests, arguments.clients, measurement)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall

    measurement.latencies.sort()
    answered = len(measurement.latencies)
    tokens = sum(len(text.split()) + 2 for text in pool) / len(pool)
    return {
        "load": "open" if arguments.rate else "closed",
        "format": arguments.format,
        "clients": arguments.clients,
        "rate": arguments.rate,
        "batch": arguments.batch,
        "tokens": [low, high],
        "seconds": arguments.seconds,
        "answered": answered,
        "unanswered_at_end": unanswered,
        "requests_per_second": round(answered / arguments.seconds, 2),
        "texts_per_second": round(answered * arguments.batch / arguments.seconds, 2),
        "tokens_per_second": round(answered * arguments.batch * tokens / arguments.seconds),
        "latency_ms": {
            "p50": measurement.percentile(0.50),
            "p90": measurement.percentile(0.90),
            "p99": measurement.percentile(0.99),
            "max": measurement.percentile(1),
        },
        "errors": dict(measurement.errors),
        "generator_cpu_seconds": round(cpu, 3),
        "generator_cpu_share": round(cpu / wall, 4),
    }


def token_range(value):
    low, _, high = value.partition("-")
    low, high = int(low), int(high or low)
    if not 3 <= low <= high:
        raise argparse.ArgumentTypeError("expected MIN-MAX with 3 <= MIN <= MAX")
    return low, high


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--format", choices=["openai", "tei"], default="openai")
    parser.add_argument("--model", default="all-MiniLM-L6-v2", help="field model of --format openai")
    parser.add_argument("--base64", action="store_true", help="ask for vectors in base64 (openai)")
    parser.add_argument("--api-key")
    parser.add_argument("--clients", type=int, default=16, help="number of connections")
    parser.add_argument("--batch", type=int, default=1, help="texts per request")
    parser.add_argument("--rate", type=float, help="requests per second of an open-loop load")
    parser.add_argument("--seconds", type=float, default=10, help="duration of the measurement")
    parser.add_argument("--warmup", type=float, default=1, help="seconds before the measurement")
    parser.add_argument("--tokens", type=token_range, default=(8, 128), metavar="MIN-MAX")
    parser.add_argument("--seed", type=int, default=SEED)
    print(json.dumps(asyncio.run(run(parser.parse_args())), indent=2))


if __name__ == "__main__":
    main()

"""Keep-alive connections and requests for load tests of a server, and texts of given lengths.

Requests are encoded before they are sent, and responses are not decoded, so that a load generator
needs little CPU time.
"""

import asyncio
import json
import random
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SEED = 20260
REQUESTS = 512  # number of distinct requests


class Connection(asyncio.Protocol):
    """A keep-alive connection that has at most one request in progress."""

    def __init__(self):
        self.received = bytearray()
        self.response = None
        self.transport = None

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.received += data
        head, separator, rest = self.received.partition(b"\r\n\r\n")
        if not separator or self.response is None or self.response.done():
            return
        length = header(head, b"content-length")
        if length is None:  # chunked; JSON does not contain the bytes of the last chunk
            complete = rest.endswith(b"0\r\n\r\n")
        else:
            complete = len(rest) >= int(length)
        if complete:
            self.received.clear()
            if header(head, b"connection") == b"close":
                self.transport.close()
            body = bytes(rest) if length is not None else join_chunks(bytes(rest))
            self.response.set_result((int(head[9:12]), bytes(head), body))

    def connection_lost(self, error):
        if self.response is not None and not self.response.done():
            self.response.set_exception(error or ConnectionResetError("closed without a response"))

    async def request(self, data):
        """Send one request; return the status, the head and the body of its response."""
        self.response = asyncio.get_running_loop().create_future()
        self.transport.write(data)
        return await self.response


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


async def attempt(connection, address, data):
    """Send a request, on a new connection if `connection` is None or closing. Return the
    connection, or None after an error, and the outcome: the status, or the name of the error."""
    try:
        if connection is None or connection.transport.is_closing():
            connection = await connect(*address)
        status, _, _ = await connection.request(data)
        return connection, status
    except (OSError, ValueError) as error:
        if connection is not None:
            connection.transport.abort()
        return None, type(error).__name__

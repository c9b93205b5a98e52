"""Raw bytes on a socket, for requests that HTTP clients cannot send."""

import json
import socket
import struct
import time
from typing import NamedTuple


class Response(NamedTuple):
    version: str
    status: int
    headers: dict
    body: bytes


class Wire:
    """A connection to the server."""

    def __init__(self, server, timeout=15):
        self.socket = socket.create_connection((server.host, server.port), timeout)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.file = self.socket.makefile("rb")
        self.continues = 0  # the number of responses 100 Continue

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()
        self.socket.close()

    def send(self, data):
        """Send all bytes. False if the server closed the connection."""
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def response(self):
        """The next response, or None if the server closed the connection without one."""
        try:
            return self.read()
        except (ConnectionResetError, BrokenPipeError, EOFError):
            return None
        except TimeoutError:
            raise AssertionError("the server neither answered nor closed the connection") from None

    def read(self):
        line = self.file.readline()
        if not line:
            raise EOFError
        version, status, *_ = line.decode("latin-1").split(" ")
        headers = {}
        while (line := self.line()):
            key, _, value = line.decode("latin-1").partition(":")
            headers[key.lower()] = value.strip()
        if int(status) in (100, 204, 304):
            body = b""
        elif "content-length" in headers:
            body = self.bytes(int(headers["content-length"]))
        elif headers.get("transfer-encoding") == "chunked":
            body = b""
            while size := int(self.line(), 16):
                body += self.bytes(size)
                self.line()
            self.line()
        else:
            body = self.file.read()
        response = Response(version, int(status), headers, body)
        if response.status == 100:
            self.continues += 1
            return self.read()
        return response

    def line(self):
        line = self.file.readline()
        assert line.endswith(b"\r\n"), f"the response is cut off after {line!r}"
        return line.strip()

    def bytes(self, size):
        data = self.file.read(size)
        assert len(data) == size, f"the response is cut off after {len(data)} of {size} bytes"
        return data

    def is_closed(self, within=5):
        """Whether the server closes the connection without sending more."""
        self.socket.settimeout(within)
        try:
            return self.file.read(1) == b""
        except (ConnectionResetError, BrokenPipeError):
            return True
        except TimeoutError:
            return False

    def reset(self):
        """Close with a TCP reset."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.file.close()
        self.socket.close()


def request(path, body=b"", headers=(), method="POST", version="1.1"):
    """The bytes of a request. The body is JSON unless it is bytes."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/{version}", "Host: localhost"]
    lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    lines += [f"{key}: {value}" for key, value in headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def exchange(server, data, timeout=15):
    """Send bytes; return the response, or None if the server closed the connection without one."""
    with Wire(server, timeout) as wire:
        wire.send(data)
        return wire.response()


def elapsed(function):
    """The result of a call, and the seconds that it took."""
    start = time.perf_counter()
    result = function()
    return result, time.perf_counter() - start

"""Malformed and malicious input gets a clear status or a closed connection.

After each test the server must respond correctly, and its memory must have grown by at most
`GROWTH` since the warm-up.
"""

import gzip
import json
import select
import selectors
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from conftest import MINILM, Server, assert_error, assert_same_bits, describe
from wire import Wire, elapsed, exchange, request

MIB = 1 << 20
TIMEOUT = 5  # --timeout of the server, after which it also closes an idle connection
SOON = 2  # seconds, less than TIMEOUT
# The bodies in memory have at most 64 MiB, and the allocator keeps a part of freed memory.
GROWTH = 128 * MIB
TEXT = "a man is eating food"


@pytest.fixture(scope="module")
def hostile():
    server = Server("--timeout", TIMEOUT)
    server.vector = server.json("/embed", {"inputs": TEXT})
    # Warm-up: bodies just below the limit of 16 MiB (a string without end, deeply nested lists),
    # then many clients at once.
    for body in (b'{"inputs": "' + b"a" * 15 * MIB, b"[" * 15 * MIB):
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: exchange(server, request("/embed", body)), range(8)))
    bodies = [{"inputs": [f"{j} " + "word " * (i % 200) for j in range(8)]} for i in range(200)]
    with ThreadPoolExecutor(32) as pool:
        list(pool.map(lambda body: server.post("/embed", body), bodies))
    server.base = server.memory().rss
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def works_normally(hostile):
    """After each test, the server responds correctly and soon, and its memory is bounded."""
    yield
    assert hostile.process.poll() is None, f"the server exited:\n{hostile.tail()}"
    response, seconds = elapsed(lambda: hostile.json("/embed", {"inputs": TEXT}))
    assert_same_bits(response, hostile.vector)
    assert seconds < 2, f"after the test, a short text takes {seconds:.2f} s"
    end = time.monotonic() + 30  # jemalloc returns unused memory over 10 s
    while (memory := hostile.memory().rss) - hostile.base > GROWTH and time.monotonic() < end:
        time.sleep(0.1)
    # After a failure, the base is raised, so that the tests that follow do not fail too.
    growth, hostile.base = memory - hostile.base, max(hostile.base, memory - GROWTH)
    assert growth <= GROWTH, f"the memory grew by {growth // MIB} MiB to {memory // MIB} MiB"
    assert not [line for line in hostile.log if "panicked" in line], hostile.tail()


def refused(server, data, statuses, timeout=TIMEOUT + 10):
    """Send bytes. The response has one of the statuses, or the server closes the connection."""
    response = exchange(server, data, timeout)
    if response is not None:
        assert response.status in statuses, (
            f"expected {statuses} or a closed connection, got {response.status}: "
            f"{response.body[:200]}"
        )
    return response


class TestBodies:
    @pytest.mark.parametrize("path", ["/embed", "/v1/embeddings", "/v2/rerank", "/no/such/route"])
    def test_a_truncated_body_times_out(self, hostile, path):
        whole = request(path, {"inputs": TEXT})
        for end in (len(whole) - 1, len(whole) - 10):
            with Wire(hostile) as wire:
                wire.send(whole[:end])
                response, seconds = elapsed(wire.response)
                status = 404 if "no" in path else 408
                assert response is not None and response.status == status, response
                assert seconds < TIMEOUT + 3, f"the server waited {seconds:.1f} s"
                # The rest of the body must not be taken for a request.
                assert response.headers.get("connection", "").lower() == "close", response.headers
                assert wire.is_closed(SOON)

    def test_a_body_that_the_client_cuts_off_does_no_harm(self, hostile):
        whole = request("/embed", {"inputs": TEXT})
        for end in range(1, len(whole), 7):
            with Wire(hostile) as wire:
                wire.send(whole[:end])
                if end % 2:
                    wire.reset()

    def test_a_half_closed_connection_is_answered_400_or_closed(self, hostile):
        with Wire(hostile) as wire:
            wire.send(request("/embed", {"inputs": TEXT})[:-5])
            wire.socket.shutdown(socket.SHUT_WR)
            response = wire.response()
            assert response is None or response.status == 400

    def test_100_mb_with_a_content_length_are_refused(self, hostile):
        body = b'{"inputs": "' + b"a" * 100 * MIB + b'"}'
        response, seconds = elapsed(lambda: refused(hostile, request("/embed", body), {413}, 60))
        assert seconds < 10

    def test_100_mb_announced_but_not_sent_are_refused(self, hostile):
        head = request("/embed", b"", [("Expect", "100-continue")])
        head = head.replace(b"Content-Length: 0", b"Content-Length: 104857600")
        with Wire(hostile) as wire:
            wire.send(head)
            response, seconds = elapsed(wire.response)
        assert response is not None and response.status == 413
        assert seconds < 2, "the size is known before the body arrives"

    def test_100_mb_in_chunks_are_refused(self, hostile):
        head = (
            b"POST /embed HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        chunk = b"100000\r\n" + b"a" * MIB + b"\r\n"
        with Wire(hostile, 60) as wire:
            sent = wire.send(head) and all(wire.send(chunk) for _ in range(100))
            response = wire.response()
        assert response is None or response.status == 413
        assert response is not None or not sent, "100 MiB were accepted without a response"

    def test_a_client_sees_status_413(self, hostile):
        response = hostile.client.post(
            "/embed",
            content=b'{"inputs": "' + b"a" * 17 * MIB + b'"}',
            headers={"content-type": "application/json"},
        )
        assert_error(response, 413)

    def test_many_large_bodies_at_once_use_bounded_memory(self, hostile):
        # 32 × 15 MiB. Bodies that are held at the same time must not use unbounded memory.
        body = request("/embed", b'{"inputs": "' + b"a" * 15 * MIB + b'"}')
        peak = [0]

        def send(_):
            response = refused(hostile, body, {408, 413, 429, 503}, 60)
            peak[0] = max(peak[0], hostile.memory().rss)
            return response

        with ThreadPoolExecutor(32) as pool:
            list(pool.map(send, range(32)))
        # The growth is 64 MiB of bodies, and the copies while they are parsed. Without the limit on
        # bodies, the growth is 1.8 GiB.
        assert peak[0] - hostile.base < 512 * MIB

    def test_an_empty_body_is_refused(self, hostile):
        for path in ("/embed", "/v1/embeddings", "/v1/rerank", "/attention"):
            response = exchange(hostile, request(path, b""))
            assert response is not None and response.status in (400, 415), response

    def test_a_request_without_content_length_is_refused(self, hostile):
        data = b"POST /embed HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n\r\n"
        response = refused(hostile, data, {400, 411})
        assert response is not None

    @pytest.mark.parametrize("body", [
        b"\xff\xfe\x00", b'{"inputs": "\xff"}', b'{"inputs": "\xed\xa0\x80"}',
        b'{"inputs": "\\ud800"}', b'{"inputs": "a\x00"}', b'{"inputs": "a\n"}',
    ])
    def test_invalid_utf_8_and_invalid_strings_are_refused(self, hostile, body):
        response = hostile.client.post(
            "/embed", content=body, headers={"content-type": "application/json"}
        )
        assert_error(response, {400, 422})

    @pytest.mark.parametrize("value", [
        "NaN", "Infinity", "-Infinity", "1e400", "1" * 10_000, "-1", "1.5", "01", "0x10",
        "9" * 20, "18446744073709551616", "null", "true", '"16"', "[16]", "{}",
    ])
    @pytest.mark.parametrize("path, body, interface", [
        ("/embed", '{{"inputs": "a", "dimensions": {}}}', "tei"),
        ("/embed", '{{"inputs": [[101, {}, 102]]}}', "tei"),
        ("/v1/embeddings", '{{"model": "all-MiniLM-L6-v2", "input": "a", "dimensions": {}}}', "openai"),
        ("/decode", '{{"ids": [{}]}}', "tei"),
        ("/attention", '{{"inputs": "a", "layer": {}}}', "tei"),
    ])
    def test_unusual_numbers_are_refused(self, hostile, path, body, interface, value):
        response = hostile.client.post(
            path, content=body.format(value), headers={"content-type": "application/json"}
        )
        if value in ("null", "{}") and response.status_code == 200 and "[" not in body:
            return  # as if the field were absent
        if path == "/decode" and value == "[16]" and response.status_code == 200:
            return  # a list of lists
        assert_error(response, 400 if interface == "openai" else {400, 422}, interface)

    @pytest.mark.parametrize("opening, closing", [("[", "]"), ('{"inputs": ', "}"), ('{"a": [', "]}")])
    def test_deep_nesting_is_refused(self, hostile, opening, closing):
        for path, interface in (("/embed", "tei"), ("/v1/embeddings", "openai"), ("/decode", "tei")):
            nested = opening * 100_000 + "1" + closing * 100_000
            for body in (nested, f'{{"inputs": {nested}}}', f'{{"ids": {nested}}}'):
                response = hostile.client.post(
                    path, content=body, headers={"content-type": "application/json"}
                )
                assert_error(response, 400 if interface == "openai" else {400, 422}, interface)

    def test_a_repeated_field_is_refused(self, hostile):
        body = b'{"inputs": "a", "inputs": "b"}'
        response = exchange(hostile, request("/embed", body))
        assert response is not None and response.status in (400, 422)

    def test_500_000_fields_are_refused(self, hostile):
        body = json.dumps({str(i): i for i in range(500_000)}).encode()
        response = exchange(hostile, request("/embed", body))
        assert response is not None and response.status in (400, 422)

    def test_errors_repeat_at_most_1_kib_of_a_request(self, hostile):
        long = "\u0001" * (2 * MIB)
        for path, body in [
            ("/embed", {"inputs": "a", long: 1}),
            ("/embed", {"inputs": "a", "model": long}),
            ("/embed", {"inputs": "a", "truncate": long}),
            ("/v1/embeddings", {"model": MINILM, "input": "a", long: 1}),
            ("/v2/rerank", {"query": "a", "documents": ["b"], long: 1}),
        ]:
            response = exchange(hostile, request(path, body), 30)
            assert response is not None and response.status in (400, 404, 422), response
            assert len(response.body) < 16 << 10, f"{path}: {len(response.body)} bytes"

    def test_lists_of_too_many_elements_are_refused(self, hostile):
        texts = [""] * ((1 << 21) + 1)
        for path, body, status in [
            ("/embed", {"inputs": texts}, 422),
            ("/rerank", {"query": "a", "texts": texts}, 422),
            ("/similarity", {"inputs": {"source_sentence": "a", "sentences": texts}}, 422),
            ("/v1/rerank", {"query": "a", "documents": texts}, 400),
            ("/v2/rerank", {"query": "a", "documents": texts}, 400),
        ]:
            body = json.dumps(body, separators=(",", ":")).encode()
            response = exchange(hostile, request(path, body), 30)
            assert response is not None and response.status == status, (path, response)
            assert b"a list has more than 2097152 elements" in response.body, response.body

    def test_a_text_of_more_than_1_mib_is_refused_quickly(self, hostile):
        for text in ("a" * 15 * MIB, "a " * 7 * MIB, "é" * 3 * MIB, "\u0000" * 2 * MIB):
            body = json.dumps({"inputs": text}, ensure_ascii=False).encode()
            response, seconds = elapsed(lambda: exchange(hostile, request("/embed", body), 30))
            assert response is not None and response.status == 413, response
            assert seconds < TIMEOUT + 3, f"took {seconds:.1f} s"

    def test_a_gzip_body_is_not_decompressed(self, hostile):
        bomb = gzip.compress(b" " * 100 * MIB)
        response = exchange(hostile, request("/embed", bomb, [("Content-Encoding", "gzip")]))
        assert response is not None and response.status == 415


class TestHeaders:
    def test_1000_headers_are_refused(self, hostile):
        headers = [(f"X-{i}", "a") for i in range(1000)]
        refused(hostile, request("/embed", {"inputs": TEXT}, headers), {431})

    def test_a_header_of_1_mb_is_refused(self, hostile):
        refused(hostile, request("/embed", {"inputs": TEXT}, [("X-A", "a" * MIB)]), {431})

    def test_a_path_of_1_mb_is_refused(self, hostile):
        refused(hostile, request("/" + "a" * MIB, {}), {400, 404, 414, 431})

    def test_a_request_id_that_is_not_short_ascii_is_replaced(self, hostile):
        for value in ("a" * 4000, "\x80\xff", "{}\t<script>", ""):
            response = exchange(
                hostile, request("/embed", {"inputs": TEXT}, [("X-Request-Id", value)])
            )
            assert response is not None and response.status == 200, value
            is_kept = len(value) in range(1, 129) and value.isascii()
            assert response.headers["x-request-id"]
            assert (response.headers["x-request-id"] == value) == is_kept, value

    @pytest.mark.parametrize("key", ["Bearer", "Bearer ", "bearer", "Basic YTpi", "Bearer \xff", "a" * 4000])
    def test_malformed_keys_are_refused(self, keyed, key):
        response = exchange(keyed, request("/embed", {"inputs": TEXT}, [("Authorization", key)]))
        assert response is not None and response.status in (400, 401)

    @pytest.mark.parametrize("data", [
        b"\r\n\r\n\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS handshake
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00" * 100,
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"NO SPACE HERE\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost : a\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nX: \x00\r\n\r\n",
        b"POST /embed HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        b"POST /embed HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"POST /embed HTTP/1.1\r\nHost: a\r\nContent-Length: 1, 2\r\n\r\na",
        b"\x00" * 10_000,
        b"A" * MIB,
    ], ids=lambda data: repr(data[:40]))
    def test_bytes_that_are_not_http(self, hostile, data):
        refused(hostile, data, {400, 404, 405, 408, 413, 414, 431, 501, 505})

    def test_unusual_methods_and_paths(self, hostile):
        for method in ("DELETE", "TRACE", "CONNECT", "PATCH", "X" * 100):
            response = exchange(hostile, request("/embed", b"", method=method))
            assert response is None or response.status in (400, 404, 405, 501), (method, response)
        for path in ("/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/v1/models/..%2f..%2fetc",
                     "/v1/models/%ff", "/v1/models/%00", "//embed", "/embed/", "/docs/../info"):
            response = exchange(hostile, request(path, b"", method="GET"))
            assert response is not None and response.status in (400, 404, 405), (path, response)


    @pytest.mark.parametrize("hosts", [
        [], ["a", "a"], ["a", "b"], ["a b"], ["a/b"], ["user@a"],
    ], ids=str)
    def test_a_request_needs_one_valid_host(self, hostile, hosts):
        for path, interface in (("/embed", "tei"), ("/v1/embeddings", "openai"), ("/live", "tei")):
            data = request(path, {"inputs": TEXT}).replace(
                b"Host: localhost\r\n", b"".join(b"Host: %s\r\n" % host.encode() for host in hosts)
            )
            with Wire(hostile) as wire:
                wire.send(data)
                response = wire.response()
                assert response is not None and response.status == 400, response
                body = json.loads(response.body)
                message = body["error"]["message"] if interface == "openai" else body["error"]
                assert message.startswith("the header Host is "), message
                assert response.headers["x-request-id"]
                wire.send(request("/live", b"", method="GET"))
                assert wire.response().status == 200, "the body was read"

    def test_a_request_of_http_1_0_needs_no_host(self, hostile):
        data = request("/live", b"", method="GET", version="1.0").replace(b"Host: localhost\r\n", b"")
        assert exchange(hostile, data).status == 200

    @pytest.mark.parametrize("host", ["", "[::1]:80", "a.example:8080"])
    def test_other_valid_hosts_are_accepted(self, hostile, host):
        data = request("/live", b"", method="GET")
        data = data.replace(b"Host: localhost", b"Host: " + host.encode())
        assert exchange(hostile, data).status == 200


class TestExpect:
    """A request that its header decides gets no `100 Continue`, which would ask for its body."""

    def refused(self, server, status, path="/embed", method="POST", **changes):
        headers = {"Content-Type": "application/json", "Content-Length": "1000"} | {
            name.replace("_", "-"): value for name, value in changes.items()
        }
        lines = [f"{method} {path} HTTP/1.1", "Host: a", "Expect: 100-continue"]
        lines += [f"{name}: {value}" for name, value in headers.items() if value]
        with Wire(server) as wire:
            wire.send("\r\n".join(lines).encode() + b"\r\n\r\n")
            response, seconds = elapsed(wire.response)
            assert response is not None and response.status == status, response
            assert wire.continues == 0, f"100 Continue was sent before {status}"
            assert seconds < 0.9, "the server waited for the body"
            # A client cannot know whether the body is still expected.
            assert response.headers.get("connection", "").lower() == "close", response.headers
            assert wire.is_closed(SOON)

    def test_401_without_a_key(self, keyed):
        self.refused(keyed, 401)

    def test_404_of_an_unknown_route(self, hostile):
        self.refused(hostile, 404, "/no/such/route")

    def test_405_of_another_method(self, hostile):
        self.refused(hostile, 405, method="DELETE")

    def test_413_of_a_declared_length(self, hostile):
        self.refused(hostile, 413, Content_Length=str(17 * MIB))

    def test_415_of_another_type(self, hostile):
        self.refused(hostile, 415, Content_Type="text/plain")
        self.refused(hostile, 415, Content_Encoding="gzip")

    def test_501_of_another_transfer_coding(self, hostile):
        self.refused(hostile, 501, Content_Length=None, Transfer_Encoding="gzip, chunked")

    def test_a_route_that_reads_no_body_answers_without_it(self, hostile):
        with Wire(hostile) as wire:
            wire.send(request("/live", b"x" * 9, [("Expect", "100-continue")], method="GET")[:-9])
            assert wire.response().status == 200 and wire.continues == 0

    def test_an_accepted_request_gets_100_and_then_its_response(self, hostile):
        data = request("/embed", {"inputs": TEXT}, [("Expect", "100-continue")])
        end = data.index(b"\r\n\r\n") + 4
        with Wire(hostile) as wire:
            for _ in range(2):
                wire.continues = 0
                wire.send(data[:end])
                assert wire.file.readline().startswith(b"HTTP/1.1 100")
                assert wire.file.readline() == b"\r\n"
                wire.send(data[end:])
                response = wire.response()
                assert response.status == 200
                assert_same_bits(json.loads(response.body), hostile.vector)


class TestSmuggling:
    """After a request whose end is ambiguous, the server closes the connection."""

    SECOND = b"GET /live HTTP/1.1\r\nHost: a\r\n\r\n"

    def check(self, hostile, data):
        with Wire(hostile, TIMEOUT + 5) as wire:
            wire.send(data)
            first = wire.response()
            if first is None:
                return
            assert first.status < 500
            assert wire.is_closed(SOON), (
                f"status {first.status}, then the connection stayed open or answered the bytes that "
                "follow the ambiguous request"
            )

    def head(self, *lines):
        return b"POST /embed HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n" + b"".join(
            line + b"\r\n" for line in lines
        ) + b"\r\n"

    def test_content_length_and_transfer_encoding(self, hostile):
        # RFC 9112, section 6.1: the server must close the connection after the response.
        body = b"0\r\n\r\n"
        length = b"Content-Length: %d" % (len(body) + len(self.SECOND))
        chunked = b"Transfer-Encoding: chunked"
        self.check(hostile, self.head(length, chunked) + body + self.SECOND)
        self.check(hostile, self.head(chunked, length) + body + self.SECOND)

    def test_two_content_lengths(self, hostile):
        both = self.head(b"Content-Length: 2", b"Content-Length: 3")
        self.check(hostile, both + b"{}" + self.SECOND)

    @pytest.mark.parametrize("encoding", [b"xchunked", b"identity", b"chunked, identity", b"gzip"])
    def test_other_transfer_encodings(self, hostile, encoding):
        head = self.head(b"Transfer-Encoding: " + encoding)
        self.check(hostile, head + b"0\r\n\r\n" + self.SECOND)

    @pytest.mark.parametrize("encoding", [b"gzip, chunked", b"chunked, chunked"])
    def test_a_transfer_coding_that_is_not_implemented(self, hostile, encoding):
        # RFC 9112, section 6.1: 501 for a transfer coding that the server does not understand.
        # The body ends with its last chunk, but the server closes the connection all the same.
        data = self.head(b"Transfer-Encoding: " + encoding) + b"2\r\n{}\r\n0\r\n\r\n"
        with Wire(hostile) as wire:
            wire.send(data + self.SECOND)
            response = wire.response()
            assert response is not None and response.status == 501, response
            assert "expected chunked alone" in json.loads(response.body)["error"]
            assert wire.is_closed(SOON)

    @pytest.mark.parametrize("chunk", [b"-1\r\n", b"zz\r\n", b"FFFFFFFFFFFFFFFFF\r\n", b"2\r\n{}x\r\n"])
    def test_invalid_chunks(self, hostile, chunk):
        self.check(hostile, self.head(b"Transfer-Encoding: chunked") + chunk + self.SECOND)


class TestConnections:
    def test_pipelined_requests_are_answered_in_order(self, hostile):
        texts = [f"{TEXT} {i}" for i in range(20)]
        data = b"".join(request("/tokenize", {"inputs": text}) for text in texts)
        with Wire(hostile) as wire:
            wire.send(data)
            responses = [wire.response() for _ in texts]
        found = [len(json.loads(response.body)[0]) for response in responses]
        expected = [len(hostile.json("/tokenize", {"inputs": text})[0]) for text in texts]
        assert found == expected
        ids = lambda response: [token["id"] for token in json.loads(response.body)[0]]
        assert len({tuple(ids(response)) for response in responses}) == len(texts)

    def test_http_1_0_is_answered_without_chunks_and_closed(self, hostile):
        with Wire(hostile) as wire:
            wire.send(request("/embed", {"inputs": TEXT}, version="1.0"))
            response = wire.response()
            assert response.status == 200
            assert "transfer-encoding" not in response.headers
            assert_same_bits(json.loads(response.body), hostile.vector)
            assert wire.is_closed(SOON)

    def test_connection_close_closes_the_connection(self, hostile):
        with Wire(hostile) as wire:
            wire.send(request("/embed", {"inputs": TEXT}, [("Connection", "close")]))
            assert wire.response().status == 200
            assert wire.is_closed(SOON)

    @pytest.mark.parametrize("path, headers", [
        ("/no/such/route", []),
        ("/embed", [("Content-Type", "text/plain")]),
        ("/live", []),
        ("/v1/models", []),
    ])
    def test_a_response_before_the_body_arrives(self, hostile, path, headers):
        """The response announces a closed connection, or the connection serves another request."""
        data = request(path, b"x" * 1000, headers)
        if headers:
            data = data.replace(b"Content-Type: application/json\r\n", b"")
        self.check_reuse(hostile, data)

    def test_a_refused_key_before_the_body_arrives(self, keyed):
        self.check_reuse(keyed, request("/embed", b"x" * 1000))

    def check_reuse(self, server, data):
        head, body = data[:-1000], data[-1000:]
        with Wire(server) as wire:
            wire.send(head)
            # The server may wait for the body, or respond at once.
            early, _, _ = select.select([wire.socket], [], [], 1)
            response = wire.response() if early else None
            sent = wire.send(body)
            if not early:
                response = wire.response()
            assert response is not None, "closed without a response"
            assert 400 <= response.status < 500, response
            if response.headers.get("connection", "").lower() == "close":
                return
            assert sent and wire.send(request("/live", b"", method="GET")), (
                "closed without `Connection: close`"
            )
            following = wire.response()
            assert following is not None and following.status == 200, (
                f"the connection is closed, but the response with status {response.status} lacks "
                "`Connection: close`"
            )

    def test_one_connection_serves_many_requests(self, hostile):
        with Wire(hostile) as wire:
            for _ in range(200):
                wire.send(request("/live", b"", method="GET"))
                assert wire.response().status == 200

    def test_a_keep_alive_connection_outlives_the_timeout_of_a_request(self, hostile):
        # Three requests of half of --timeout each, which together take longer than --timeout.
        data = request("/embed", {"inputs": TEXT})
        with Wire(hostile) as wire:
            for _ in range(3):
                for part in (data[:50], data[50:]):
                    assert wire.send(part)
                    time.sleep(TIMEOUT * 0.25)
                response = wire.response()
                assert response is not None and response.status == 200

    @pytest.mark.slow
    def test_10_000_connections_do_no_harm(self, hostile):
        whole = request("/embed", {"inputs": TEXT})
        for i in range(10_000):
            with Wire(hostile) as wire:
                if i % 4 == 1:
                    wire.send(whole[: i % len(whole)])
                elif i % 4 == 2:
                    wire.reset()
                elif i % 1000 == 3:
                    wire.send(whole)
                    assert wire.response().status == 200

    @pytest.mark.slow
    def test_500_slow_clients_are_closed_and_do_not_delay_others(self, hostile):
        """For 20 s, each connection that the server closes is replaced by a new one."""
        connections, duration = 500, 20
        whole = request("/embed", {"inputs": "a" * 200})
        body_starts = whole.index(b"\r\n\r\n") + 4
        selector = selectors.DefaultSelector()
        lifetimes, statuses = [], set()

        def open_one(number):
            sock = socket.create_connection((hostile.host, hostile.port), 10)
            # Clients with odd numbers send the head, the others the body, at one byte per second.
            sent = 0 if number % 2 else body_starts + 1
            sock.send(whole[:sent] or whole[:1])
            state = {"number": number, "sent": max(sent, 1), "since": time.monotonic()}
            sock.setblocking(False)
            selector.register(sock, selectors.EVENT_READ, state)

        def close_one(key):
            lifetimes.append(time.monotonic() - key.data["since"])
            selector.unregister(key.fileobj)
            key.fileobj.close()

        def closed_by_server(key):
            try:
                data = key.fileobj.recv(4096)
            except (ConnectionResetError, BrokenPipeError):
                return True
            if data[:5] == b"HTTP/":
                statuses.add(int(data[9:12]))
            return data == b""

        for number in range(connections):
            open_one(number)
        end = time.monotonic() + duration
        # A normal client, in a thread of its own.
        with ThreadPoolExecutor(1) as pool:
            def normal():
                slowest = 0
                with httpx.Client(base_url=hostile.url, timeout=10, trust_env=False) as client:
                    while time.monotonic() < end:
                        response, seconds = elapsed(
                            lambda: client.post("/embed", json={"inputs": TEXT})
                        )
                        assert response.status_code == 200, describe(response)
                        slowest = max(slowest, seconds)
                        time.sleep(0.1)
                return slowest

            client = pool.submit(normal)
            next_byte = time.monotonic() + 1
            while time.monotonic() < end:
                for key, _ in selector.select(timeout=0.1):
                    if closed_by_server(key):
                        close_one(key)
                        open_one(key.data["number"])
                if time.monotonic() >= next_byte:
                    next_byte += 1
                    for key in list(selector.get_map().values()):
                        sent = key.data["sent"]
                        try:
                            key.fileobj.send(whole[sent : sent + 1])
                            key.data["sent"] += 1
                        except (ConnectionResetError, BrokenPipeError):
                            close_one(key)
                            open_one(key.data["number"])
            slowest = client.result()
        # The server must close the remaining connections although no more bytes arrive.
        end = time.monotonic() + TIMEOUT + 5
        while selector.get_map() and time.monotonic() < end:
            for key, _ in selector.select(timeout=0.1):
                if closed_by_server(key):
                    close_one(key)
        left = len(selector.get_map())
        for key in list(selector.get_map().values()):
            key.fileobj.close()
        assert left == 0, f"{left} slow connections were not closed by --timeout {TIMEOUT}"
        assert max(lifetimes) < TIMEOUT + 4, f"a connection lived for {max(lifetimes):.1f} s"
        assert statuses <= {408}, f"slow requests got the statuses {statuses}"
        assert slowest < 2, f"a normal request took {slowest:.2f} s"

    @pytest.mark.slow
    def test_clients_that_do_not_read_their_responses_do_not_block_others(self, hostile):
        """Responses of several MiB fill the buffers of the sockets. Another client is answered."""
        body = request("/embed_all", {"inputs": ["word " * 200] * 20})  # about 16 MB of JSON
        wires = [Wire(hostile) for _ in range(8)]
        for wire in wires:
            wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            wire.send(body)
        response, seconds = elapsed(lambda: hostile.json("/embed", {"inputs": TEXT}))
        assert_same_bits(response, hostile.vector)
        assert seconds < TIMEOUT + 5
        for wire in wires:
            wire.reset()

"""Stop, reload, overload, clients that disconnect, and metrics."""

import asyncio
import json
import os
import select
import shutil
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import load
import openai
import pytest
from conftest import GOLDEN, MINILM, MODELS, assert_same_bits, encodle_embed, describe, f32, wait_until
from prometheus_client.parser import text_string_to_metric_families
from wire import Wire, elapsed, request

TEXT = "A man is eating food."
LETTERS = ["a bad cab", "a bead"]


class Load:
    """Closed-loop clients in a thread: each response is kept with the times of its request."""

    def __init__(self, server, clients, bodies, path="/embed"):
        self.server, self.clients = server, clients
        self.requests = [load.encode(path, body) for body in bodies]
        self.outcomes = []  # (sent, answered, status or name of the error, head, body)
        self.running = True
        self.thread = threading.Thread(target=lambda: asyncio.run(self.run()))

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self, seconds=60):
        """Stop sending requests, and wait for the requests in progress."""
        self.running = False
        self.thread.join(seconds)
        assert not self.thread.is_alive(), f"requests still hang {seconds} s after the end of the load"

    async def run(self):
        await asyncio.gather(*map(self.client, range(self.clients)))

    async def client(self, number):
        connection, turn = None, number
        while self.running:
            sent, head, body = None, b"", b""
            try:
                if connection is None or connection.transport.is_closing():
                    if connection is not None:
                        connection.transport.close()
                    connection = await load.connect(self.server.host, self.server.port)
                sent = time.monotonic()
                status, head, body = await connection.request(
                    self.requests[turn % len(self.requests)]
                )
                outcome = status
            except OSError as error:
                connection, outcome = None, type(error).__name__
            self.outcomes.append((sent or time.monotonic(), time.monotonic(), outcome, head, body))
            turn += self.clients
            if outcome != 200:
                await asyncio.sleep(0.02)

    def answered(self):
        return sum(outcome == 200 for _, _, outcome, _, _ in self.outcomes)


def heavy(texts=16):
    """Bodies whose computation takes long enough that requests wait for each other."""
    return [{"inputs": load.texts(texts, 60, 120, seed)} for seed in range(8)]


class TestStop:
    @pytest.mark.slow
    def test_sigterm_under_load_loses_no_request_of_keep_alive_connections(self, serve):
        server = serve("--max-wait", "60")
        with Load(server, 16, heavy(4)) as clients:
            wait_until(lambda: clients.answered() >= 32, 60, "32 requests are answered")
            stopped = time.monotonic()
            server.signal(signal.SIGTERM)
            code = server.process.wait(60)
            seconds = time.monotonic() - stopped
        assert code == 0, f"exit code {code}:\n{server.tail()}"
        # Bytes that were sent at the very moment of the signal may be unread by the server.
        margin = 0.1
        waiting = [
            outcome for sent, answered, outcome, _, _ in clients.outcomes
            if sent < stopped - margin and answered > stopped
        ]
        assert waiting, "no request was in progress at the signal"
        lost = [outcome for outcome in waiting if outcome != 200]
        assert not lost, f"{len(lost)} of {len(waiting)} requests in progress were lost: {lost}"
        later = {
            outcome for sent, _, outcome, _, _ in clients.outcomes if sent > stopped + margin
        }
        allowed = {200, 503, "ConnectionRefusedError", "ConnectionResetError", "BrokenPipeError"}
        assert later <= allowed, f"requests after the signal got {later}"
        assert seconds < 30
        assert not [line for line in server.log if "panicked" in line], server.tail()

    def test_sigterm_without_load_is_quick(self, serve):
        server = serve()
        with Wire(server) as idle:  # an idle keep-alive connection does not delay the stop
            idle.send(request("/live", b"", method="GET"))
            assert idle.response().status == 200
            _, seconds = elapsed(server.stop)
        assert seconds < 3, f"the stop took {seconds:.1f} s"

    def test_sigint_stops_as_sigterm_does(self, serve):
        server = serve()
        server.signal(signal.SIGINT)
        assert server.process.wait(30) == 0

    def test_a_client_that_sends_slowly_does_not_delay_the_stop_beyond_the_timeout(self, serve):
        server = serve("--timeout", "3")
        with Wire(server) as wire:
            wire.send(request("/embed", {"inputs": TEXT})[:-3])
            _, seconds = elapsed(server.stop)
        assert seconds < 8, f"the stop took {seconds:.1f} s"

    def test_kill_under_load_resets_connections(self, serve):
        server = serve()
        with Load(server, 16, heavy()) as clients:
            wait_until(lambda: clients.answered() >= 8, 60, "8 requests are answered")
            killed = time.monotonic()
            server.process.kill()
            server.process.wait(10)
            clients.stop(10)
        after = [(a, o) for sent, a, o, _, _ in clients.outcomes if a > killed]
        failed = [(a, o) for a, o in after if o != 200]
        assert failed, "no request was in progress at the kill"
        assert {o for _, o in failed} <= {
            "ConnectionResetError", "ConnectionRefusedError", "BrokenPipeError"
        }
        assert max(a for a, _ in failed) - killed < 5


class TestReload:
    def test_sighup_loads_changed_files(self, serve, tmp_path):
        current, other = tmp_path / "current", tmp_path / "other"
        shutil.copytree(MODELS["sentences"], current)
        shutil.copytree(GOLDEN / "architectures/sentences/roberta", other)
        server = serve("--model", f"m={current}")
        found = lambda: f32(server.json("/embed", {"inputs": LETTERS}))
        assert_same_bits(found(), encodle_embed(LETTERS, "--model", current))
        os.rename(current, tmp_path / "old")
        os.rename(other, current)
        expected = encodle_embed(LETTERS, "--model", current)
        server.signal(signal.SIGHUP)
        wait_until(
            lambda: found().tobytes() == expected.tobytes(), 30, "the new model answers"
        )

    def test_sighup_with_a_missing_file_keeps_the_old_models(self, serve, tmp_path):
        current = tmp_path / "current"
        shutil.copytree(MODELS["sentences"], current)
        expected = encodle_embed(LETTERS, "--model", current)
        server = serve("--model", f"m={current}")
        (current / "config.json").rename(current / "config.json.old")
        lines = len(server.log)
        server.signal(signal.SIGHUP)
        wait_until(lambda: any("config.json" in line for line in server.log[lines:]), 30,
                   "the log names the missing file")
        assert server.process.poll() is None
        assert_same_bits(server.json("/embed", {"inputs": LETTERS}), expected)


    def test_sighup_reads_the_api_keys_again(self, serve, tmp_path):
        file = tmp_path / "keys"
        file.write_text("old\n")
        server = serve("--api-key-file", file, env={"ENCODLE_API_KEYS": "constant"})

        def status(key):
            headers = {"authorization": f"Bearer {key}"}
            return server.post("/embed", {"inputs": TEXT}, headers=headers).status_code

        def reload(content, message):
            file.write_text(content)
            lines = len(server.log)
            server.signal(signal.SIGHUP)
            wait_until(lambda: any(message in line for line in server.log[lines:]), 30, message)

        assert [status(key) for key in ("old", "new", "constant")] == [200, 401, 200]
        reload("new\n", "API keys reloaded")
        assert [status(key) for key in ("old", "new", "constant")] == [401, 200, 200]
        # A file that the server would not start with changes nothing.
        reload("n\u00e9w\n", "API keys not reloaded")
        assert [status(key) for key in ("old", "new", "constant")] == [401, 200, 200]
        assert not [line for line in server.log if "n\u00e9w" in line], "the log contains a key"

    def test_sighup_without_keys_for_all_keeps_the_server_closed(self, serve, tmp_path):
        file = tmp_path / "keys"
        file.write_text("key\n")
        server = serve("--api-key-file", file)
        file.write_text("\n")
        server.signal(signal.SIGHUP)
        wait_until(
            lambda: any("has no API keys" in line for line in server.log), 30, "the log has the error"
        )
        assert server.post("/embed", {"inputs": TEXT}).status_code == 401


class TestOverload:
    @pytest.mark.slow
    def test_requests_beyond_max_requests_are_refused_and_do_not_slow_the_others(self, serve):
        server = serve("--max-requests", "4")
        body = heavy(8)
        alone = sorted(elapsed(lambda: server.json("/embed", b))[1] for b in body)[len(body) // 2]
        with Load(server, 64, body) as clients:
            start = time.monotonic()
            wait_until(lambda: time.monotonic() - start > 5, 10, "5 s")
        statuses = {outcome for _, _, outcome, _, _ in clients.outcomes}
        assert statuses == {200, 429}, f"expected the statuses 200 and 429, got {statuses}"
        for _, _, outcome, head, response in clients.outcomes:
            if outcome == 429:
                seconds = load.header(head, b"retry-after")
                assert seconds is not None and int(seconds) >= 1, head
                error = json.loads(response)
                assert error["error"] and error["error_type"], error
        accepted = sorted(a - s for s, a, outcome, _, _ in clients.outcomes if outcome == 200)
        refused = sorted(a - s for s, a, outcome, _, _ in clients.outcomes if outcome == 429)
        p99 = accepted[int(0.99 * len(accepted))]
        # At most 4 requests are in progress, so a request takes up to 4 · alone. The second factor
        # of 4 and the 0.5 s are a margin: the clients use the same CPUs.
        assert p99 < 4 * 4 * alone + 0.5, (
            f"p99 of {len(accepted)} accepted requests is {p99:.2f} s; alone {alone:.2f} s"
        )
        assert refused[len(refused) // 2] < 0.2, "a refusal takes long"

    def test_max_wait_refuses_requests_that_would_wait_too_long(self, serve):
        server = serve("--max-wait", "1")
        bodies = heavy(128)
        server.json("/embed", bodies[0])  # the server estimates waits from a measured speed
        with ThreadPoolExecutor(64) as pool:
            responses = list(pool.map(lambda i: server.post("/embed", bodies[i % 8]), range(64)))
        statuses = {response.status_code for response in responses}
        assert statuses == {200, 429}, statuses
        for response in responses:
            if response.status_code == 429:
                assert int(response.headers["retry-after"]) >= 1, describe(response)

    def test_the_client_of_openai_tries_again(self, serve):
        server = serve("--max-requests", "1", "--batch-delay", "1500")
        statuses = []
        hooks = {"response": [lambda response: statuses.append(response.status_code)]}
        http = openai.DefaultHttpxClient(event_hooks=hooks)
        with openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="-", max_retries=8, http_client=http
        ) as client:
            with ThreadPoolExecutor(2) as pool:
                create = lambda i: client.embeddings.create(model=MINILM, input=TEXT)
                responses = list(pool.map(create, range(2)))
        assert 429 in statuses
        expected = encodle_embed([TEXT])[0]
        for response in responses:
            assert_same_bits(response.data[0].embedding, expected)

    def test_a_large_request_does_not_block_a_small_one(self, serve):
        server = serve()
        large = {"inputs": load.texts(512, 60, 120)}
        small = lambda: elapsed(lambda: server.json("/embed", {"inputs": TEXT}))[1]
        _, alone = elapsed(lambda: server.json("/embed", large))
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(server.json, "/embed", large)
            seconds = []
            while not running.done():
                seconds.append(small())
            running.result()
        assert len(seconds) > 2 and sorted(seconds)[len(seconds) // 2] < alone / 4, (
            f"small requests beside a large one of {alone:.2f} s take {seconds[:5]} s"
        )


class TestDisconnect:
    def test_a_client_that_leaves_is_counted_and_logged_with_status_499(self, serve):
        server = serve("--batch-delay", "3000")
        with Wire(server) as wire:
            assert wire.send(request("/embed", {"inputs": TEXT}))
            # A request is not counted if the client leaves before the server has read it.
            in_progress = lambda: "encodle_requests_in_progress 2" in server.get("/metrics").text
            wait_until(in_progress, 5, "the requests for /embed and /metrics are in progress")
        count = f'encodle_requests_total{{model="{MINILM}",route="/embed",status="499"}} 1'
        wait_until(lambda: count in server.get("/metrics").text, 10, "the request is counted")
        closed = "the client closed the connection"
        logged = lambda: any(closed in line and "/embed" in line for line in server.log)
        wait_until(logged, 5, "the request is logged")

    @pytest.mark.slow
    def test_requests_of_reset_connections_are_not_computed(self, serve):
        server = serve()
        body = {"inputs": load.texts(128, 60, 120)}
        data = request("/embed", body)
        server.json("/embed", body)
        _, one = elapsed(lambda: server.json("/embed", body))
        count = 40
        for _ in range(count):
            with Wire(server) as wire:
                assert wire.send(data)
                wire.reset()
        _, seconds = elapsed(lambda: server.json("/embed", {"inputs": TEXT}))
        _, again = elapsed(lambda: server.json("/embed", body))
        assert seconds + again < 0.3 * count * one + 1, (
            f"after {count} abandoned requests of {one:.2f} s, a small and a large request take "
            f"{seconds:.2f} and {again:.2f} s"
        )


class TestConnectionLimit:
    """The servers have `--max-connections 4`."""

    LIVE = request("/live", b"", method="GET")

    def idle(self, server, count=4):
        """Connections between two requests, in the order in which they became idle."""
        wires = [Wire(server) for _ in range(count)]
        for wire in wires:
            wire.send(self.LIVE)
            assert wire.response().status == 200
        return wires

    def start(self, serve, *arguments):
        server = serve("--max-connections", 4, *arguments)
        server.client.close()  # one of the connections
        return server

    def test_the_connection_that_is_idle_for_the_longest_time_makes_place(self, serve):
        server = self.start(serve)
        wires = self.idle(server)
        wires[0].send(self.LIVE)  # now the second one is idle for the longest time
        assert wires[0].response().status == 200
        busy = []
        for closed in (1, 2, 3, 0):
            busy.append(Wire(server))
            busy[-1].send(self.LIVE)
            response, seconds = elapsed(busy[-1].response)
            assert response is not None and response.status == 200
            assert seconds < 3, f"a new client waited {seconds:.1f} s"
            assert wires[closed].is_closed(2), f"connection {closed} is still open"
            wires[closed] = None
            # A closed socket would be readable.
            left = [wire.socket for wire in wires if wire]
            assert not select.select(left, [], [], 0.1)[0], "only one place was needed"
            busy[-1].send(request("/embed", {"inputs": TEXT})[:-1])

    def test_connections_without_a_request_make_place(self, serve):
        server = self.start(serve)
        silent = [Wire(server) for _ in range(2)]
        partial = [Wire(server) for _ in range(2)]
        for wire in partial:
            wire.send(self.LIVE[:-5])
        with Wire(server) as new:
            new.send(self.LIVE)
            response, seconds = elapsed(new.response)
        assert response is not None and response.status == 200
        assert seconds < 3, f"a new client waited {seconds:.1f} s"
        assert silent[0].is_closed(2)

    def test_requests_in_progress_are_not_cut_off(self, serve):
        server = self.start(serve, "--batch-delay", "4000")
        busy = [Wire(server) for _ in range(4)]
        for wire in busy:
            wire.send(request("/embed", {"inputs": TEXT}))
        with Wire(server) as new:
            new.send(self.LIVE)
            assert [wire.response().status for wire in busy] == [200] * 4
            assert new.response().status == 200

    def test_many_clients_at_once_are_all_answered(self, serve):
        server = self.start(serve)
        wires = [Wire(server, 60) for _ in range(40)]
        for wire in wires:
            wire.send(request("/live", b"", [("Connection", "close")], method="GET"))
        assert [wire.response().status for wire in wires] == [200] * len(wires)


class TestClientsThatDoNotRead:
    def test_such_a_client_is_logged_with_the_id_of_its_request(self, serve):
        server = serve("--timeout", "4")
        # About 6 MB of JSON, more than the buffers of the sockets hold.
        body = {"inputs": [[101] + [2158] * 200 + [102]] * 8}
        with Wire(server) as wire:
            wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            wire.send(request("/embed_all", body, [("X-Request-Id", "never-read")]))
            lines = lambda: [line for line in server.log if "disconnected" in line]
            wait_until(lines, 20, "the log has a line")
        [line] = lines()
        for part in ("never-read", "/embed_all", "does not read the response"):
            assert part in line, line

    def test_so_is_a_client_that_does_not_read_small_responses(self, serve):
        server = serve("--timeout", "2")
        data = request("/docs", b"", [("X-Request-Id", "never-read")], method="GET")
        with Wire(server) as wire:
            wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            wire.send(data * 400)  # about 10 MB of responses
            lines = lambda: [line for line in server.log if "disconnected" in line]
            wait_until(lines, 15, "the log has a line")
        assert "never-read" in lines()[0] and "/docs" in lines()[0]


def families(server):
    response = server.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    return {family.name: family for family in text_string_to_metric_families(response.text)}


class TestMetrics:
    def test_the_format_of_prometheus(self, server):
        server.json("/embed", {"inputs": TEXT})
        found = families(server)
        assert found
        for family in found.values():
            assert family.documentation, f"{family.name} has no HELP"
            assert family.type != "unknown", f"{family.name} has no TYPE"

    def test_histograms_are_cumulative(self, server):
        found = families(server).values()
        histograms = [family for family in found if family.type == "histogram"]
        assert histograms
        for family in histograms:
            series = {}
            for sample in family.samples:
                if sample.name.endswith("_bucket"):
                    key = tuple(sorted((k, v) for k, v in sample.labels.items() if k != "le"))
                    series.setdefault(key, []).append((float(sample.labels["le"]), sample.value))
            for buckets in series.values():
                values = [value for _, value in sorted(buckets)]
                assert values == sorted(values), family.name
                assert max(bound for bound, _ in buckets) == float("inf"), family.name

    def test_counters_count_requests_and_never_decrease(self, server):
        def counters():
            return {
                (sample.name, tuple(sorted(sample.labels.items()))): sample.value
                for family in families(server).values() if family.type == "counter"
                for sample in family.samples if not sample.name.endswith("_created")
            }

        before = counters()
        for _ in range(10):
            server.json("/embed", {"inputs": TEXT})
        after = counters()
        smaller = [key for key in before if after.get(key, 0) < before[key]]
        assert not smaller, f"counters that decreased: {smaller}"
        by_ten = [key for key in after if after[key] - before.get(key, 0) == 10]
        assert by_ten, "no counter increased by 10 after 10 requests"

    def value(self, server, name, **labels):
        for family in families(server).values():
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return sample.value
        return 0

    def test_requests_texts_and_tokens_are_counted_by_model(self, models):
        def counts(model):
            return [
                self.value(models, "encodle_requests_total", route="/embed", model=model, status="200"),
                self.value(
                    models, "encodle_request_duration_seconds_count", route="/embed", model=model
                ),
                self.value(models, "encodle_texts_total", model=model),
                self.value(models, "encodle_tokens_total", model=model),
            ]

        before = {model: counts(model) for model in (MINILM, "sentences")}
        body = {"inputs": LETTERS, "model": "sentences"}
        models.json("/embed", body)
        tokens = sum(map(len, models.json("/tokenize", body)))
        models.json("/embed", {"inputs": "a"})  # the default model
        after = {model: counts(model) for model in before}
        grown = {
            model: [a - b for a, b in zip(after[model], before[model])] for model in before
        }
        assert grown["sentences"][:2] == [1, 1] and grown["sentences"][3] == tokens
        assert grown["sentences"][2] == 2 * len(LETTERS)  # /embed and /tokenize
        assert grown[MINILM] == [1, 1, 1, 3]

    @pytest.mark.parametrize("body, model, status", [
        ({"inputs": "a " * 600, "truncate": False}, MINILM, 413),
        ({"inputs": "a", "model": "tagger"}, "tagger", 424),
        ({"inputs": "a", "model": "nope"}, "", 404),
        ({"inputs": 5}, "", 422),
    ])
    def test_failed_requests_are_counted_by_model_too(self, models, body, model, status):
        labels = {"route": "/embed", "model": model, "status": str(status)}
        before = self.value(models, "encodle_requests_total", **labels)
        assert models.post("/embed", body).status_code == status
        assert self.value(models, "encodle_requests_total", **labels) == before + 1

    def test_the_age_of_the_oldest_waiting_request(self, serve):
        server = serve("--batch-delay", "2000")
        age = lambda: self.value(server, "encodle_queue_oldest_seconds")
        assert age() == 0
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(server.json, "/embed", {"inputs": TEXT})
            wait_until(lambda: age() > 0, 1.5, "a request waits")
            first, start = age(), time.monotonic()
            time.sleep(0.5)
            grown, seconds = age() - first, time.monotonic() - start
            assert 0.4 < grown <= seconds + 0.1
            waiting.result()
        assert age() == 0

    def test_labels_are_bounded(self, server):
        """Paths and names of models that do not exist do not create series."""
        count = lambda: sum(len(family.samples) for family in families(server).values())
        server.post("/no/such/route", {})
        server.post("/embed", {"inputs": "a", "model": "nope"})
        before = count()
        for i in range(50):
            server.post(f"/no/such/route/{i}", {})
            server.post("/embed", {"inputs": "a", "model": f"nope-{i}"})
        assert count() <= before + 5

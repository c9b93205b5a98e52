"""Options, health, keys, logs and the pages of the server."""

import json
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import (
    ENCODLE, KEYS, MINILM, MODELS, ROOT, assert_error, assert_same_bits, encodle_embed, describe, wait_until,
)

LETTERS = ["a bad cab", "a bead"]


def test_the_routes_of_sagemaker(server, models, keyed):
    assert server.get("/ping").status_code == 200
    body = {"inputs": ["A man is eating food."]}
    assert server.json("/invocations", body) == server.json("/", body)
    ranked = {"model": "ranker", "query": "a", "texts": ["b", "c"]}
    assert models.json("/invocations", ranked) == models.json("/rerank", ranked)
    assert keyed.post("/invocations", body).status_code == 401


def test_pages(server):
    for path in ("/", "/docs"):
        response = server.get(path)
        assert response.status_code == 200, describe(response)
        assert response.headers["content-type"].startswith("text/html")
        assert "<html" in response.text.lower()


def test_the_pages_load_nothing_from_other_hosts(server):
    for path in ("/", "/docs"):
        page = server.get(path).text
        for attribute in ('src="http', "src='http", 'href="http', "@import", 'src="//'):
            lines = [line for line in page.splitlines() if attribute in line and "<a " not in line]
            assert not lines, f"{path} loads from another host: {lines[0][:200]}"


@pytest.mark.parametrize("path, body", [
    ("/embed", {"inputs": "a"}),
    ("/embed", {"inputs": 5}),
    ("/v1/embeddings", {"model": "nope", "input": "a"}),
    ("/no/such/route", {}),
])
def test_every_response_has_a_request_id(server, path, body):
    first = server.post(path, body).headers["x-request-id"]
    second = server.post(path, body).headers["x-request-id"]
    assert first and second and first != second
    given = server.post(path, body, headers={"x-request-id": "given-1"})
    assert given.headers["x-request-id"] == "given-1"


def test_cors(serve, server):
    headers = {
        "origin": "https://example.org",
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type,authorization",
    }
    refused = server.client.options("/embed", headers=headers)
    assert "access-control-allow-origin" not in refused.headers
    allowing = serve("--cors", "https://example.org", "--cors", "https://example.com")
    preflight = allowing.client.options("/embed", headers=headers)
    assert preflight.status_code in (200, 204)
    assert preflight.headers["access-control-allow-origin"] == "https://example.org"
    assert "content-type" in preflight.headers["access-control-allow-headers"].lower()
    response = allowing.post("/embed", {"inputs": "a"}, headers={"origin": "https://example.com"})
    assert response.headers["access-control-allow-origin"] == "https://example.com"
    other = allowing.post("/embed", {"inputs": "a"}, headers={"origin": "https://example.net"})
    assert "access-control-allow-origin" not in other.headers


def test_options_come_from_the_environment(serve, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(f"{KEYS[0]}\n")
    server = serve(env={
        "ENCODLE_MODEL": f"small={MODELS[MINILM]}\ntiny={MODELS['sentences']}",
        "ENCODLE_DTYPE": "small=int8",
        "ENCODLE_POOLING": "tiny=cls,mean",
        "ENCODLE_HOST": "localhost",
        "ENCODLE_PORT": "1",  # the option takes precedence
        "ENCODLE_MAX_TEXTS": "2",
        "ENCODLE_AUTO_TRUNCATE": "1",
        "ENCODLE_API_KEY_FILE": str(keys),
        "ENCODLE_CORS": "https://example.org\nhttps://example.com",
        "ENCODLE_LOG": "json",
    })
    headers = {"authorization": f"Bearer {KEYS[0]}", "origin": "https://example.com"}
    info = server.get("/info", headers=headers).json()
    assert [model["name"] for model in info["models"]] == ["small", "tiny"]
    assert info["models"][0]["dtype"] == "int8"
    assert info["models"][1]["dimension"] == 2 * info["models"][1]["hidden_size"]
    assert info["max_client_batch_size"] == 2 and info["auto_truncate"] is True
    response = server.post("/embed", {"inputs": ["a"] * 3}, headers=headers)
    assert response.status_code == 413
    assert response.headers["access-control-allow-origin"] == "https://example.com"
    server.stop()
    assert all(isinstance(json.loads(line), dict) for line in server.log)


@pytest.mark.parametrize("variable, value", [
    ("ENCODLE_PORT", "tcp://10.0.0.1:80"),  # of a service `encodle` of Kubernetes
    ("ENCODLE_LOG_TEXTS", "maybe"),
    ("ENCODLE_MAX_BODY", "0"),
    ("ENCODLE_MODEL", "a=x\n"),
])
def test_a_wrong_variable_names_its_option(variable, value):
    env = os.environ | {variable: value}
    run = subprocess.run([ENCODLE, "serve"], env=env, capture_output=True, text=True, timeout=20, cwd=ROOT)
    assert run.returncode == 2, run.stderr
    assert "--" + variable.removeprefix("ENCODLE_").lower().replace("_", "-") in run.stderr


def test_cors_of_a_server_with_keys(serve):
    # A browser sends a preflight request without the key.
    server = serve("--cors", "*", env={"ENCODLE_API_KEYS": KEYS[0]})
    headers = {"origin": "https://example.org", "access-control-request-method": "POST"}
    preflight = server.client.options("/embed", headers=headers)
    assert preflight.status_code in (200, 204), describe(preflight)
    refused = server.post("/embed", {"inputs": "a"}, headers={"origin": "https://example.org"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] in ("*", "https://example.org")


def test_dtype_and_pooling_of_one_model(serve):
    folder = MODELS["sentences"]
    server = serve(
        f"--model=small={ROOT / 'weights/all-MiniLM-L6-v2'}", f"--model=tiny={folder}",
        "--dtype", "small=int8", "--pooling", "tiny=cls,mean",
    )
    small = encodle_embed(LETTERS, "--dtype", "int8")
    assert_same_bits(server.json("/embed", {"inputs": LETTERS, "model": "small"}), small)
    response = server.json("/v1/embeddings", {"input": LETTERS, "model": "tiny"})
    expected = encodle_embed(LETTERS, "--model", folder, "--pooling", "cls,mean")
    assert_same_bits([data["embedding"] for data in response["data"]], expected)


def test_the_log_contains_no_texts_unless_asked_for(serve):
    secret = "a very secret sentence"
    server = serve(env={"RUST_LOG": "trace"})
    server.json("/embed", {"inputs": secret})
    server.post("/embed", {"inputs": secret, "no_such_field": 1})
    server.post("/embed", {"inputs": secret * 1000})
    server.stop()
    assert not [line for line in server.log if secret in line], "the log contains a text"
    server = serve("--log-texts")
    server.json("/embed", {"inputs": secret})
    wait_until(lambda: any(secret in line for line in server.log), 5, "the text is in the log")
    # A body with a line break and an escape sequence, which must be escaped in the log.
    body = b'{\n2026-01-01 INFO forged \x1b[31m'
    server.client.post("/embed", content=body, headers={"content-type": "application/json"})
    wait_until(lambda: any("forged" in line for line in server.log), 5, "the body is in the log")
    [line] = [line for line in server.log if "forged" in line and "body" in line]
    assert "\\n2026" in line and "\x1b" not in line, line


def test_the_log_contains_no_keys(serve):
    server = serve(env={"ENCODLE_API_KEYS": "secret-key", "RUST_LOG": "trace"})
    server.json("/embed", {"inputs": "a"}, headers={"authorization": "Bearer secret-key"})
    server.post("/embed", {"inputs": "a"}, headers={"authorization": "Bearer secret-key-2"})
    server.stop()
    assert not [line for line in server.log if "secret-key" in line], "the log contains a key"


def test_json_log(serve):
    server = serve("--log", "json")
    server.json("/embed", {"inputs": "a"}, headers={"x-request-id": "find-me"})
    server.stop()
    for line in server.log:
        assert isinstance(json.loads(line), dict), line
    assert any("find-me" in line for line in server.log)


@pytest.mark.parametrize("arguments, code, message", [
    (["--no-such-option"], 2, "--no-such-option"),
    (["--max-requests", "x"], 2, "max-requests"),
    (["--model", "no/such/folder/here"], 1, "no/such/folder/here"),
    (["--model", f"a={MODELS['tagger']}", "--model", f"a={MODELS['answer']}"], 2,
     'two models have the name "a"'),
    (["--api-key-file", "/no/such/file"], 1, "/no/such/file"),
    (["--cors", "not an origin"], 1, "is not a web origin"),
])
def test_invalid_options_are_refused(arguments, code, message):
    command = [ENCODLE, "serve", "--port", "0", *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=ROOT)
    assert run.returncode == code, f"exit code {run.returncode}: {run.stderr}"
    assert message in run.stderr
    assert "panicked" not in run.stderr


def test_the_host_may_be_a_name(serve):
    server = serve("--host", "localhost")
    # /etc/hosts has an IPv4 address for this name, which is preferred.
    assert server.host == "127.0.0.1"
    assert server.get("/live").status_code == 200


def test_a_host_that_cannot_be_resolved_is_named():
    command = [ENCODLE, "serve", "--port", "0", "--host", "no-such-host.invalid"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=ROOT)
    assert run.returncode == 1, run.stderr
    assert '--host "no-such-host.invalid" cannot be resolved: expected an IP address' in run.stderr


@pytest.mark.parametrize("change, param", [
    ({"model": "nope"}, "model"),
    ({"model": 5}, "model"),
    ({"model": "tagger"}, "model"),  # has another task
    ({"input": ...}, "input"),
    ({"input": []}, "input"),
    ({"input": [[]]}, "input"),
    ({"input": "a " * 600}, "input"),
    ({"input": "a" * (1 << 20) + "a"}, "input"),
    ({"input": [5]}, "input"),
    ({"input": [[101, 5, 102], [101, 10**9, 102]]}, "input"),
    ({"input": [{}]}, "input[0]"),
    ({"dimensions": 0}, "dimensions"),
    ({"dimensions": -1}, "dimensions"),
    ({"dimensions": 10**6}, "dimensions"),
    ({"encoding_format": "hex"}, "encoding_format"),
    ({"no_such_field": 1}, "no_such_field"),
], ids=lambda value: str(value)[:40])
def test_errors_of_openai_name_the_field(models, change, param):
    body = {"model": MINILM, "input": "a", **change}
    body = {key: value for key, value in body.items() if value is not ...}
    response = models.post("/v1/embeddings", body)
    assert_error(response, {400, 404}, "openai")
    error = response.json()["error"]
    assert error["param"] == param, error


def test_a_port_in_use_is_an_error(server):
    command = [ENCODLE, "serve", "--port", str(server.port)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=ROOT)
    assert run.returncode == 1
    assert str(server.port) in run.stderr


def test_a_request_within_the_batch_delay_joins_the_batch(serve):
    server = serve("--batch-delay", "300")
    start = time.perf_counter()
    with ThreadPoolExecutor(8) as pool:
        bodies = [{"inputs": f"text {i}"} for i in range(8)]
        found = list(pool.map(lambda body: server.json("/embed", body)[0], bodies))
    seconds = time.perf_counter() - start
    assert_same_bits(found, encodle_embed([body["inputs"] for body in bodies]))
    assert 0.3 <= seconds < 8 * 0.3, f"8 requests took {seconds:.2f} s"
    metrics = server.client.get("/metrics").text.splitlines()
    assert "encodle_batch_sequences_sum 8" in metrics and "encodle_batch_sequences_count 1" in metrics


def test_a_request_longer_than_the_timeout_is_ended(serve):
    server = serve("--timeout", "1")
    texts = [f"{i} " + "one two three four five six seven eight nine ten " * 20 for i in range(2048)]
    start = time.perf_counter()
    response = server.post("/embed", {"inputs": texts})
    seconds = time.perf_counter() - start
    assert response.status_code == 408, describe(response)
    assert seconds < 4
    # The abandoned texts do not delay the next request.
    start = time.perf_counter()
    server.json("/v1/embeddings", {"model": MINILM, "input": "a"})
    assert time.perf_counter() - start < 2

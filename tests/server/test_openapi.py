"""The responses to generated requests conform to /openapi.json.

schemathesis generates valid and invalid requests for every operation. No response may have a status
of 500 or more, a status or content type that is not documented, or a body that its schema excludes.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import MODELS, ROOT

CHECKS = [
    "not_a_server_error", "status_code_conformance", "content_type_conformance",
    "response_headers_conformance", "response_schema_conformance",
]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_responses_conform_to_their_schemas(models, tmp_path):
    # Run schemathesis as a command: its pytest plugin (version 4.32) does not work with pytest 9.
    command = [
        Path(sys.executable).parent / "schemathesis", "run", f"{models.url}/openapi.json",
        "--checks", ",".join(CHECKS), "--phases", "examples,coverage,fuzzing",
        "--max-examples", "20", "--request-timeout", "30",
        "--generation-deterministic", "--continue-on-failure", "--no-color",
    ]
    # The working directory is an empty folder, so that schemathesis finds no configuration file.
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-12_000:] + run.stderr


@pytest.fixture(scope="module")
def document(models):
    response = models.get("/openapi.json")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("application/json")
    return response.json()


def documented_routes():
    """(method, path) of the table of routes in docs/server.md."""
    section = (ROOT / "docs/server.md").read_text().split("## Routes\n\n", 1)[1]
    table = section.split("\n\n", 1)[0]
    routes, method = [], None
    for found in re.findall(r"(GET|POST)?\s*(/[\w{}/.-]*)", " ".join(re.findall(r"`([^`]*)`", table))):
        method = found[0] or method
        routes.append((method, found[1]))
    assert len(set(routes)) > 20, routes
    return routes


def test_the_document_lists_every_route(document):
    assert document["openapi"].startswith("3.")
    paths = document["paths"].items()
    listed = {(method.upper(), path) for path, item in paths for method in item}
    # The pages and the document itself need not be described.
    undescribed = {("GET", "/"), ("GET", "/docs"), ("GET", "/openapi.json")}
    expected = set(documented_routes()) - undescribed
    assert not expected - listed, f"not in /openapi.json: {sorted(expected - listed)}"


def test_every_json_body_has_an_example(document):
    """The page /docs fills its forms with the examples, and supports path parameters only."""
    for path, item in document["paths"].items():
        for method, operation in item.items():
            assert method in ("get", "post"), path
            assert {"path"} >= {parameter["in"] for parameter in operation.get("parameters", [])}, path
            for kind, content in operation.get("requestBody", {}).get("content", {}).items():
                assert kind == "application/json" and content["example"], path


def parts(document, schema, path=()):
    """(path, schema without `$ref`) of a schema and of everything in it."""
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    yield path, schema
    for choice in schema.get("oneOf", []) + schema.get("anyOf", []):
        yield from parts(document, choice, path)
    for name, field in schema.get("properties", {}).items():
        yield from parts(document, field, (*path, name))
    if "items" in schema:
        yield from parts(document, schema["items"], (*path, 0))


def bodies_with(document, kind):
    """(path, schema, body) for each schema of this type in a request: `body(value)` is the example
    of the route with `value` in the place of the schema."""
    for path, item in document["paths"].items():
        content = item.get("post", {}).get("requestBody", {}).get("content", {})
        for media in content.values():
            for place, schema in parts(document, media["schema"]):
                if kind in (schema.get("type"), *(schema.get("type") or [])):
                    def body(value, place=place, example=media["example"]):
                        *outer, name = [key for key in place if key != 0]
                        at = copy = json.loads(json.dumps(example))
                        for key in outer:
                            at = at.setdefault(key, {})
                        for _ in range(place.count(0)):  # no list contains objects with lists
                            value = [value]
                        at[name] = value
                        return copy
                    yield path + " " + ".".join(map(str, place)), path, schema, body


def test_lists_have_min_items_exactly_if_an_empty_list_is_refused(models, document):
    checked = set()
    for name, path, schema, body in bodies_with(document, "array"):
        status = models.post(path, body([])).status_code
        assert status in (200, 400, 422), f"{name}: {status}"
        least = schema.get("minItems", 0)
        assert (status != 200) == (least > 0), f"{name}: [] has status {status}, minItems is {least}"
        checked.add(name)
    assert len(checked) > 20, checked


def test_numbers_have_the_bounds_that_the_server_checks(models, document):
    checked = set()
    for name, path, schema, body in bodies_with(document, "integer"):
        assert "minimum" in schema, f"{name} has no minimum"
        refused = lambda value: models.post(path, body(value)).status_code != 200
        assert refused(schema["minimum"] - 1), f"{name}: less than the minimum is accepted"
        if "maximum" in schema:
            assert refused(schema["maximum"] + 1), f"{name}: more than the maximum is accepted"
        if schema["minimum"] == 0 and not name.endswith("0"):  # an id alone is no text
            assert not refused(0), f"{name}: 0 is refused, but the minimum is 0"
        checked.add(name)
    assert len(checked) > 10, checked


def test_every_post_route_documents_its_errors(document):
    missing = []
    for path, item in document["paths"].items():
        operation = item.get("post")
        if operation is None:
            continue
        statuses = set(operation["responses"])
        # OpenAPI 3.1 requires a description of each response.
        assert all(response.get("description") for response in operation["responses"].values()), path
        required = {"200", "400", "401", "404", "408", "413", "415", "429", "500", "503"}
        # OpenAI's and Cohere's routes return 400 where the other routes return 422 or 424.
        if not path.startswith(("/v1/", "/v2/")):
            required |= {"422", "424"}
        if required - statuses:
            missing.append(f"{path}: {sorted(required - statuses)}")
    assert not missing, "statuses that are not documented: " + "; ".join(missing)


def test_examples_in_the_document_are_answered(models, document):
    """Every example of a request body is answered with status 200."""
    answered = 0
    for path, item in document["paths"].items():
        content = item.get("post", {}).get("requestBody", {}).get("content", {})
        media = content.get("application/json", {})
        examples = [e["value"] for e in media.get("examples", {}).values() if "value" in e]
        examples += [media["example"]] if "example" in media else []
        for example in examples:
            if example.get("model") in (None, *MODELS):
                response = models.post(path, example)
                assert response.status_code == 200, f"{path} {example}: {response.text[:300]}"
                answered += 1
    assert answered

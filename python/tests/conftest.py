"""Fixtures: models, and the golden files of the repository's tests."""

import importlib.util
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import encodle

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/golden"
MINILM = ROOT / "weights/all-MiniLM-L6-v2"


# The tests write no files to the user's cache of packed weights.
os.environ["ENCODLE_PACKED_CACHE"] = "off"
# Haystack, Ray and Daft send no usage statistics: the tests need no network.
os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "false"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["DAFT_ANALYTICS_ENABLED"] = "0"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("sentence_transformers") is None:
        skip = pytest.mark.skip(reason="sentence-transformers is not installed")
        for item in items:
            if item.get_closest_marker("reference"):
                item.add_marker(skip)


@pytest.fixture(scope="session")
def model() -> encodle.SentenceTransformer:
    return encodle.SentenceTransformer()


@pytest.fixture(scope="session")
def program() -> Path:
    """The command `encodle`, built from this repository: ENCODLE_TEST_COMMAND, or target/release/encodle."""
    path = Path(os.environ.get("ENCODLE_TEST_COMMAND", ROOT / "target/release/encodle"))
    if not path.is_file():
        pytest.skip(f"{path} does not exist: run cargo build --release, or set ENCODLE_TEST_COMMAND")
    return path


@pytest.fixture(scope="session")
def sentences() -> list[str]:
    return (GOLDEN / "sentences.txt").read_text().splitlines()


@pytest.fixture(scope="session")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of all-MiniLM-L6-v2 with prompts, two poolings, Dense modules and Normalize."""
    folder = tmp_path_factory.mktemp("chain")
    for name in ("config.json", "model.safetensors", "tokenizer.json", "sentence_bert_config.json"):
        shutil.copy(MINILM / name, folder)
    shutil.copytree(GOLDEN / "sentence_chain", folder, dirs_exist_ok=True)
    return folder


def golden(name: str) -> dict[str, np.ndarray]:
    return load_file(GOLDEN / name)


def assert_close(got: object, expected: object, tolerance: float) -> None:
    """Compares shapes and values; shows the largest difference."""
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape
    difference = np.abs(got.astype(np.float64) - expected).max(initial=0)
    assert difference <= tolerance, f"largest difference {difference}, tolerance {tolerance}"

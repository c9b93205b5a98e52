"""The types of the package, and its examples."""

import doctest
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import encodle
from encodle import attention, batch, quantization, sentence_transformer

needs_mypy = pytest.mark.skipif(find_spec("mypy") is None, reason="mypy is not installed")


@needs_mypy
def test_mypy_finds_no_errors(tmp_path):
    config = Path(__file__).parents[1] / "pyproject.toml"
    command = [sys.executable, "-m", "mypy", "--config-file", config, "-p", "encodle"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_mypy
def test_the_stubs_describe_the_native_module(tmp_path):
    command = [sys.executable, "-m", "mypy.stubtest", "encodle._encodle"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("module", [encodle, attention, batch, quantization, sentence_transformer])
def test_examples_of_docstrings(module):
    names = {**vars(module), **vars(encodle)}
    failed, tried = doctest.testmod(module, extraglobs=names)
    assert failed == 0 and tried > 0

"""Runs the Python blocks of docs/python.md in order. The text block after a Python block is the
expected output."""

import contextlib
import io
import re

import pytest
from conftest import ROOT

BLOCK = re.compile(r"```python\n(.*?)```(?:\n+```text\n(.*?)```)?", re.DOTALL)


def test_each_python_block_of_the_guide_prints_the_text_block_after_it(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    pytest.importorskip("langchain_core")
    guide = (ROOT / "docs/python.md").read_text()
    (tmp_path / "sentences.txt").write_text((ROOT / "tests/golden/sentences.txt").read_text())
    (tmp_path / "models").symlink_to(ROOT / "tests/golden/heads")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    blocks = BLOCK.findall(guide)
    assert len(blocks) > 10
    for code, expected in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "docs/python.md", "exec"), names)
        assert printed.getvalue() == expected, code

"""Runs the Python blocks of docs/python.md and of the package's README in order. The text block after
a Python block is the expected output."""

import contextlib
import io
import re

import pytest
from conftest import ROOT

BLOCK = re.compile(r"```python\n(.*?)```(?:\n+```text\n(.*?)```)?", re.DOTALL)


@pytest.mark.parametrize(("page", "least"), [("docs/python.md", 11), ("python/README.md", 1)])
def test_each_python_block_of_a_page_prints_the_text_block_after_it(
    page, least, tmp_path, monkeypatch
):
    pytest.importorskip("pyarrow")
    pytest.importorskip("langchain_core")
    text = (ROOT / page).read_text()
    (tmp_path / "sentences.txt").write_text((ROOT / "tests/golden/sentences.txt").read_text())
    (tmp_path / "models").symlink_to(ROOT / "tests/golden/heads")
    (tmp_path / "multi_vector").symlink_to(ROOT / "tests/golden/multi_vector")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    blocks = BLOCK.findall(text)
    assert len(blocks) >= least
    for code, expected in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page, "exec"), names)
        assert printed.getvalue() == expected, code

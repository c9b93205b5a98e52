"""Packed weights on disk: the same bits, and a damaged file is reported and replaced."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import logging, sys
import encodle
logging.basicConfig(level=logging.WARNING)
print(encodle.SentenceTransformer().encode("I love AI").tobytes().hex())
"""


def embed(cache: str) -> tuple[str, str]:
    """The bytes of a vector, and the log, of a process with this cache."""
    environment = {**os.environ, "ENCODLE_PACKED_CACHE": cache}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, check=True, capture_output=True, text=True
    )
    return done.stdout, done.stderr


def test_packed_weights_on_disk_give_the_same_bits(tmp_path: Path) -> None:
    expected, _ = embed("off")
    assert embed(str(tmp_path)) == (expected, "")
    (file,) = tmp_path.glob("*.safetensors")
    written = file.stat().st_mtime_ns
    assert embed(str(tmp_path)) == (expected, "")
    assert file.stat().st_mtime_ns == written

    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    vector, log = embed(str(tmp_path))
    assert vector == expected
    assert "WARNING:encodle:packed weights in" in log and "the file's checksum does not match" in log
    assert embed(str(tmp_path)) == (expected, "")

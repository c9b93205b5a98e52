"""Helpers for the tests with Ray, Spark and Daft: shards of texts, vectors, processes to kill."""

import os
import signal
import threading
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

import encodle

WORDS = "a man is eating food while the girl carries her baby and the sun shines on some old houses".split()


def text(row: int) -> str:
    """3 to 40 words and the row number, so that each text is different."""
    return " ".join(WORDS[(row * 7 + word * word) % len(WORDS)] for word in range(3 + row % 38)) + f" {row}"


def write_shards(folder: Path, shards: int, rows: int, null_rows: tuple[int, ...] = ()) -> Path:
    """Parquet files of the columns `id` and `text`; `null_rows` are ids without a text."""
    folder.mkdir(parents=True)
    for shard in range(shards):
        ids = range(shard * rows, (shard + 1) * rows)
        texts = [None if row in null_rows else text(row) for row in ids]
        pq.write_table(pa.table({"id": ids, "text": texts}), folder / f"part-{shard:03}.parquet")
    return folder


def embed_here(table: pa.Table, **settings) -> pa.Table:
    """The table with the column of vectors, computed in this process."""
    return encodle.BatchEmbedder(**settings)(table)


def vector_bytes(table: pa.Table) -> dict[int, bytes]:
    """The bytes of each row's vector by id; fails if an id occurs twice."""
    vectors = table.column("embedding").combine_chunks().flatten().to_numpy().reshape(len(table), -1)
    rows = dict(zip(table.column("id").to_pylist(), (vector.tobytes() for vector in vectors)))
    assert len(rows) == len(table)
    return rows


def descendants(pid: int) -> list[int]:
    """The descendants of a process."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
    found = [child for child, parent in parents.items() if parent == pid]
    for child in found:
        found += [other for other, parent in parents.items() if parent == child]
    return found


def command(pid: int) -> str:
    """The command line of a process, "" if it ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def kill(pids: list[int]) -> None:
    """SIGKILL to each process."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


class When:
    """Runs `action` in a thread once `condition` is true.

    `result` is what `action` returned, or None if the block ended first.

    >>> with When(lambda: len(os.listdir(folder)) > 2, lambda: kill([pid])) as killed: ...
    """

    def __init__(self, condition, action):
        self._condition, self._action = condition, action
        self._stop, self.result = threading.Event(), None
        self._thread = threading.Thread(target=self._wait)

    def _wait(self):
        while not self._condition():
            if self._stop.wait(0.02):
                return
        self.result = self._action()

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()


def wait_for(condition, seconds: float = 60):
    """The first true value of `condition`; fails after `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"the condition is false after {seconds} s")

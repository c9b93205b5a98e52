"""Compares our exact search with NumPy's matrix product and argpartition, alternately, each on two
threads.

    pip install -r benches/peers/requirements.txt
    python benches/peers/search.py [--rows N] [--rounds N]

Checks that both find the same rows. The corpus is random and in memory for both. The table is
printed and appended to the file of this machine and month in benches/results/.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from processes import Worker
from results import Results, facts, measured_with, table, this_cpu
from run import build
from threadpoolctl import threadpool_limits

THREADS, WIDTH, TOP = 2, 384, 10


def nearest(corpus, queries):
    scores = queries @ corpus.T
    top = np.argpartition(-scores, TOP, axis=1)[:, :TOP]
    order = np.argsort(-np.take_along_axis(scores, top, 1), axis=1)
    return np.take_along_axis(top, order, 1)


def milliseconds(call) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    if args.rows <= TOP:
        parser.error(f"--rows is {args.rows}: expected more than {TOP}")
    random = np.random.default_rng(0)

    def vectors(count):
        rows = random.standard_normal((count, WIDTH), dtype=np.float32)
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    corpus, queries, counts = vectors(args.rows), vectors(100), (1, 10, 100)
    # The folder must exist until the worker ends, because the worker's log is in the folder.
    with tempfile.TemporaryDirectory() as name, threadpool_limits(THREADS):
        folder = Path(name)
        np.save(folder / "corpus.npy", corpus)
        np.save(folder / "queries.npy", queries)
        worker = Worker("ours-f32", THREADS, build() / "release/peers", folder)
        worker.load("search", folder, [str(count) for count in counts])
        lines = []
        for count in counts:
            rows = nearest(corpus, queries[:count])
            case = str(count)
            assert (worker.output(case) == rows).all(), "the two systems find different rows"
            ours, theirs = [], []
            for _ in range(args.rounds):
                ours.append(worker.run(case, warm_ups=0, seconds=0)[0])
                theirs.append(milliseconds(lambda: nearest(corpus, queries[:count])))
            ratio = statistics.median(theirs / ours for ours, theirs in zip(ours, theirs))
            ours, theirs = statistics.median(ours), statistics.median(theirs)
            lines.append([str(count), f"{ours:.0f} ms", f"{theirs:.0f} ms", f"{ratio:.2f}×"])
        worker.close()
    about = f"{TOP} nearest of {args.rows} × {WIDTH} values; medians of {args.rounds} rounds"
    compared = table(["queries", "ours", "NumPy", "NumPy / ours"], lines)
    Results(this_cpu()).write(f"{about}\n\n{compared}\n\n{measured_with(facts(THREADS))}")


main()

"""Compares our search of sparse vectors with SciPy's sparse matrices, alternately.

    pip install -r benches/peers/requirements.txt
    python benches/peers/sparse_search.py [--rows N] [--rounds N]

The peers multiply the rows in CSR by the query, or the columns of the query in CSC by its values,
and take the best rows with NumPy's argpartition. SciPy uses one thread. Building our index is
compared with the conversion from CSR to CSC. Checks that all find the same rows.

The dimensions are drawn from p(r) ∝ 1 / (r + 50), r = 0 to 30,521. All is in memory. The table is
printed and appended to the file of this machine and month in benches/results/.
"""

import argparse
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import scipy
from processes import Worker
from results import Results, facts, measured_with, table, this_cpu
from run import build
from scipy.sparse import csr_array

DIMENSION, VALUES, QUERY_VALUES, TOP = 30_522, 120, 30, 10
THREADS = (1, 2)


def vectors(random: np.random.Generator, count: int, values: int) -> csr_array:
    """Rows of at most `values` values, on average a few per cent less."""
    weights = 1 / (np.arange(DIMENSION) + 50)
    indices = random.choice(DIMENSION, (count, values), p=weights / weights.sum())
    rows = np.repeat(np.arange(count), values)
    numbers = random.gamma(2, 0.5, count * values).astype(np.float32)
    vectors = csr_array((numbers, (rows, indices.ravel())), (count, DIMENSION))
    vectors.sum_duplicates()
    return vectors


def best(scores: np.ndarray) -> np.ndarray:
    """The best rows per query, of scores (rows, queries)."""
    top = np.argpartition(-scores, TOP, axis=0)[:TOP]
    order = np.argsort(-np.take_along_axis(scores, top, 0), axis=0)
    return np.take_along_axis(top, order, 0).T


def milliseconds(call) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    if args.rows <= TOP:
        parser.error(f"--rows is {args.rows}: expected more than {TOP}")
    random = np.random.default_rng(0)
    corpus = vectors(random, args.rows, VALUES)
    queries = vectors(random, 100, QUERY_VALUES)
    columns = corpus.tocsc()

    def by_rows(count):
        return best(corpus @ queries[:count].toarray().T)

    def by_columns(count):
        one = (queries[[i]] for i in range(count))
        return np.concatenate([best((columns[:, q.indices] @ q.data)[:, None]) for q in one])

    counts = (1, 100)
    # The folder must exist until the workers end, because their logs are in the folder.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for name, matrix in (("corpus", corpus), ("queries", queries)):
            np.save(folder / f"{name}-offsets.npy", matrix.indptr.astype(np.uint32))
            np.save(folder / f"{name}-indices.npy", matrix.indices.astype(np.uint32))
            np.save(folder / f"{name}-values.npy", matrix.data)
        program = build() / "release/peers"
        workers = [Worker("ours-f32", threads, program, folder) for threads in THREADS]
        for worker in workers:
            worker.load("sparse-search", folder, ["build", *map(str, counts)])
            for count in counts:
                rows = worker.output(str(count))
                assert (rows == by_rows(count)).all(), "ours and CSR find different rows"
                assert (rows == by_columns(count)).all(), "ours and CSC find different rows"
        peers = {"build": [corpus.tocsc]}
        peers |= {str(n): [partial(by_rows, n), partial(by_columns, n)] for n in counts}
        lines = []
        for case, calls in peers.items():
            times = []
            for _ in range(args.rounds):
                ours = [worker.run(case, warm_ups=0, seconds=0)[0] for worker in workers]
                times.append([*ours, *map(milliseconds, calls)])
            medians = [f"{statistics.median(column):.2f} ms" for column in zip(*times)]
            if case == "build":
                lines.append(["build", *medians[:-1], "–", medians[-1]])
            else:
                lines.append([f"queries: {case}", *medians])
        for worker in workers:
            worker.close()
    about = (
        f"{TOP} best of {args.rows} sparse rows with {corpus.nnz / args.rows:.0f} of {DIMENSION} "
        f"values, queries of {queries.nnz / 100:.0f}; medians of {args.rounds} rounds"
    )
    header = ["", *(f"ours, {threads} thread{'s' * (threads > 1)}" for threads in THREADS)]
    compared = table([*header, "SciPy CSR", "SciPy CSC"], lines)
    measured = measured_with(facts(max(THREADS)) | {"SciPy": scipy.__version__})
    Results(this_cpu()).write(f"{about}\n\n{compared}\n\n{measured}")


main()

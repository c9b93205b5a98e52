"""Compares the throughput of the adapters for Ray, Spark and Daft with that of one process.

    pip install './python[ray,daft,spark]' numpy
    python benches/peers/engines.py [--systems SYSTEM...] [--rows N] [--rounds N] [--json FILE]

Every system reads Parquet files of the columns `id` and `text`, and writes Parquet files with the
vectors of all-MiniLM-L6-v2 in f32. Each measurement is a new process. It embeds `--warm-up` rows,
which starts the engine, then the same number of rows again, then `--rows` rows. `short` and `long`
are the seconds of the last two jobs. The rate without the start of a job is
`(rows - warm_up) / (long - short)`.

Exit status: 1 if a system failed, or if its vectors differ from those of the first system.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import cases

Job = Callable[[Path, Path], None]  # embeds the files of a folder into a new folder
FILE_ROWS = 500
BATCH_ROWS = 250


def one_process(threads: int) -> Job:
    import encodle

    embed = encodle.BatchEmbedder(threads=threads)

    def job(inputs: Path, outputs: Path) -> None:
        outputs.mkdir()
        for path in sorted(inputs.iterdir()):
            pq.write_table(embed(pq.read_table(path)), outputs / path.name, use_dictionary=["text"])

    return job


def embed_file(threads: int) -> Job:
    import encodle

    model = encodle.SentenceTransformer(threads=threads)

    def job(inputs: Path, outputs: Path) -> None:
        outputs.mkdir()
        for path in sorted(inputs.iterdir()):
            encodle.embed_file(path, outputs / path.name, model=model)

    return job


def start_ray(cpus: int) -> None:
    import ray
    import ray.data

    # Ray reads and writes in tasks that need one CPU each.
    ray.init(num_cpus=cpus + 2, include_dashboard=False, log_to_driver=False)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False


def ray_embedder(workers: int, threads: int) -> Job:
    start_ray(workers * threads)
    import ray.data
    from encodle.ray import Embedder

    def job(inputs: Path, outputs: Path) -> None:
        texts = ray.data.read_parquet(str(inputs))
        # Ray reads small files into one block, and a block is a task of one actor.
        texts.repartition(target_num_rows_per_block=BATCH_ROWS).map_batches(
            Embedder,
            batch_format="pyarrow",
            batch_size=BATCH_ROWS,
            num_cpus=threads,
            compute=ray.data.ActorPoolStrategy(size=workers),
        ).write_parquet(str(outputs))

    return job


def ray_embed_parquet(workers: int, threads: int) -> Job:
    start_ray(workers * threads)
    from encodle.ray import embed_parquet

    def job(inputs: Path, outputs: Path) -> None:
        embed_parquet(str(inputs), str(outputs), num_cpus=threads, actors=workers)

    return job


def spark(workers: int, threads: int) -> Job:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from encodle.spark import embed
    from pyspark.sql import SparkSession

    session = (
        SparkSession.builder.master(f"local[{workers * threads}]")
        .config("spark.task.cpus", threads)
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "localhost")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.log.level", "OFF")
        .config("spark.sql.execution.arrow.maxRecordsPerBatch", BATCH_ROWS)
        .getOrCreate()
    )

    def job(inputs: Path, outputs: Path) -> None:
        texts = session.read.parquet(str(inputs)).repartition(2 * workers)
        embed(texts).write.parquet(str(outputs))

    return job


def daft(threads: int) -> Job:
    import daft as engine
    import encodle.daft
    from daft.functions import embed_text

    provider = encodle.daft.EncodleProvider(threads=threads)

    def job(inputs: Path, outputs: Path) -> None:
        texts = engine.read_parquet(f"{inputs}/*.parquet")
        vectors = embed_text(engine.col("text"), provider=provider, batch_size=BATCH_ROWS)
        texts.with_column("embedding", vectors).write_parquet(str(outputs))

    return job


ONE = "one process, `BatchEmbedder`"
SYSTEMS: dict[str, Callable[[], Job]] = {
    ONE: lambda: one_process(2),
    "one process, `embed_file`": lambda: embed_file(2),
    "Ray, `Embedder`, 1 actor of 2 threads": lambda: ray_embedder(1, 2),
    "Ray, `Embedder`, 2 actors of 1 thread": lambda: ray_embedder(2, 1),
    "Ray, `embed_parquet`, 2 actors of 1 thread": lambda: ray_embed_parquet(2, 1),
    "Spark, `embed`, 1 task of 2 threads": lambda: spark(1, 2),
    "Spark, `embed`, 2 tasks of 1 thread": lambda: spark(2, 1),
    "Daft, `embed_text`, 2 threads": lambda: daft(2),
}


def write_inputs(folder: Path, rows: int) -> None:
    """Files of FILE_ROWS sentences; the sentences repeat if there are too few."""
    texts = cases.sentences()
    texts *= rows // len(texts) + 1
    folder.mkdir()
    for start in range(0, rows, FILE_ROWS):
        ids = range(start, min(start + FILE_ROWS, rows))
        table = pa.table({"id": ids, "text": [texts[i] for i in ids]})
        pq.write_table(table, folder / f"part-{start // FILE_ROWS:03}.parquet")


def vectors(folder: Path) -> np.ndarray:
    """The vectors `(B, E)` in the order of their ids."""
    files = [pq.read_table(path) for path in sorted(folder.glob("*.parquet"))]
    ids = np.concatenate([file.column("id").to_numpy() for file in files])
    values = [file.column("embedding").combine_chunks().flatten().to_numpy() for file in files]
    return np.concatenate(values).reshape(len(ids), -1)[np.argsort(ids)]


def measure(system: str, folder: Path) -> None:
    """The measuring process: prints the times as JSON, and leaves the vectors in `folder`."""
    os.environ["ENCODLE_PACKED_CACHE"] = str(folder.parent / "packed")
    job = SYSTEMS[system]()
    seconds = {}
    for run in ("warm-up", "short", "long"):
        start = time.perf_counter()
        job(folder.parent / ("long-texts" if run == "long" else "short-texts"), folder / run)
        seconds[run] = time.perf_counter() - start
    print(json.dumps(seconds))


def compare(options: argparse.Namespace) -> bool:
    figures: dict[str, list[dict[str, float]]] = {system: [] for system in options.systems}
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        write_inputs(root / "short-texts", options.warm_up)
        write_inputs(root / "long-texts", options.rows)
        expected = None
        for r in range(options.rounds):
            for system in options.systems[:: -1 if r % 2 else 1]:
                folder = root / f"{r}-{options.systems.index(system)}"
                folder.mkdir()
                command = [sys.executable, __file__, "--measure", system, str(folder)]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    print(f"{system}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
                    failed = True
                    if system == options.systems[0]:
                        return failed  # the other systems are compared with this one
                    continue
                # Engines print lines of their own.
                [line] = (x for x in done.stdout.splitlines() if x.startswith('{"warm-up"'))
                seconds = json.loads(line)
                got = vectors(folder / "long")
                expected = got if expected is None else expected
                if not np.array_equal(got, expected):
                    print(f"{system}: its vectors differ from the first system's", file=sys.stderr)
                    failed = True
                figures[system].append(seconds)
                print(f"round {r + 1}, {system}: {seconds}", file=sys.stderr, flush=True)
                if options.json:
                    options.json.write_text(json.dumps(figures, indent=1))
    print(table(figures, options))
    return failed


def table(figures: dict[str, list[dict[str, float]]], options: argparse.Namespace) -> str:
    """Medians over the rounds, or minima. The ratio is to the first system."""
    over = np.min if options.best else np.median
    lines = [
        "| system | rows/s | ratio | rows/s with the start of the job |",
        "| --- | ---: | ---: | ---: |",
    ]
    base = None
    for system, rounds in figures.items():
        if rounds:
            long, short = (over([seconds[run] for seconds in rounds]) for run in ("long", "short"))
            rate = (options.rows - options.warm_up) / (long - short)
            base = base or rate
            lines.append(f"| {system} | {rate:.0f} | {rate / base:.2f} | {options.rows / long:.0f} |")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--systems", nargs="+", choices=SYSTEMS, default=[*SYSTEMS], metavar="SYSTEM",
        help="systems to measure; the others are compared with the first",
    )  # fmt: skip
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--warm-up", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--best",
        action="store_true",
        help="report the fastest round instead of the median, separately for the short and the long "
        "job; for a machine that runs other programs",
    )
    parser.add_argument("--json", type=Path, help="write the times of every round here")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rows <= options.warm_up:
        parser.error(f"--rows is {options.rows}: expected more than --warm-up, {options.warm_up}")
    return options


if __name__ == "__main__":
    options = arguments()
    if options.measure:
        measure(options.measure[0], Path(options.measure[1]))
    else:
        sys.exit(compare(options))

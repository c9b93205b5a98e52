"""Threads, forks, signals, and the installed wheel."""

import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import GOLDEN

import encodle


def run(code: str, **environment: str) -> str:
    """The output of `code` in a new process."""
    environment = {**os.environ, **environment}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_many_python_threads_get_equal_bits(model, sentences):
    expected = model.encode(sentences)
    with ThreadPoolExecutor(16) as pool:
        all_vectors = list(pool.map(lambda _: model.encode(sentences), range(64)))
    assert all((vectors == expected).all() for vectors in all_vectors)


def test_other_python_threads_run_during_encode(model):
    counts, stop = [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            counts[0] += 1
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    before, start = counts[0], time.monotonic()
    try:
        model.encode([f"{i} {'and ' * 250}" for i in range(50)])
        seconds = time.monotonic() - start
    finally:
        stop.set()
        thread.join()
    assert counts[0] - before > 50 * seconds


@pytest.mark.parametrize("long_call", ["encode", "predict", "embed_file"])
def test_a_short_call_does_not_wait_for_the_end_of_a_long_one(long_call, tmp_path):
    model = encodle.SentenceTransformer(threads=1)
    ranker = encodle.CrossEncoder(GOLDEN / "heads/score", threads=1)
    letters = [" ".join(word) for word in itertools.product("abcde", repeat=6)]
    texts = tmp_path / "texts.txt"
    texts.write_text("".join(f"{i} and so on, word by word\n" for i in range(1000)))

    def run() -> None:
        if long_call == "encode":
            model.encode([f"{i} {'and ' * 100}" for i in range(200)])
        elif long_call == "predict":
            ranker.predict([(text, text) for text in letters])
        else:
            encodle.embed_file(texts, tmp_path / "vectors.npy", model=model)

    expected = model.encode_query("a cab")
    start = time.monotonic()
    run()
    alone = time.monotonic() - start
    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(alone / 10)
    start = time.monotonic()
    assert (model.encode_query("a cab") == expected).all()
    short = time.monotonic() - start
    thread.join()
    assert short < alone / 2, (short, alone)


@pytest.fixture
def one_cpu() -> Iterator[Path]:
    """A control group whose processes may use the time of one CPU; skips if it cannot be created."""
    groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    paths = {name: path.lstrip("/") for _, names, path in groups for name in names.split(",")}
    root = Path("/sys/fs/cgroup")
    if (root / "cgroup.controllers").exists():  # version 2
        group, limits = root / paths.get("", ""), {"cpu.max": "100000 100000"}
    else:
        group = root / "cpu" / paths.get("cpu", "")
        limits = {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "100000"}
    group /= f"encodle-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"a control group cannot be created: {error}")
    try:
        for name, limit in limits.items():
            (group / name).write_text(limit)
    except OSError as error:
        group.rmdir()
        pytest.skip(f"the CPU of a control group cannot be limited: {error}")
    yield group
    group.rmdir()


@pytest.mark.skipif(not Path("/proc/self/cgroup").exists(), reason="control groups exist only on Linux")
def test_the_default_number_of_threads_respects_a_cpu_quota(one_cpu):
    code = "import encodle; print(encodle.SentenceTransformer().threads)"
    join = f"open({str(one_cpu / 'cgroup.procs')!r}, 'w').write('0')\n"  # 0: this process
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("this process may use one CPU only")
    if int(run(code, RAYON_NUM_THREADS="")) < 2:
        pytest.skip("the CPU quota of this process is below 2")
    assert int(run(join + code, RAYON_NUM_THREADS="")) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_fork_after_use_is_an_error():
    code = """
import os, warnings, encodle
warnings.simplefilter("ignore")
model = encodle.SentenceTransformer()
child = os.fork()
if child == 0:
    for call in (lambda: model.encode("a"), encodle.SentenceTransformer):
        try:
            call()
        except encodle.EncodleError as error:
            print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
assert model.encode("a").shape == (384,)
"""
    first, second = run(code).splitlines()
    assert first == second
    assert "was forked from process" in first and '"spawn" or "forkserver"' in first


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_fork_while_another_thread_opens_a_model_is_an_error():
    code = """
import os, threading, warnings, encodle
warnings.simplefilter("ignore")
model = encodle.SentenceTransformer()
held, forked = threading.Event(), threading.Event()
def hold():
    with encodle.batch._models_lock:
        held.set()
        forked.wait()
threading.Thread(target=hold).start()
held.wait()
child = os.fork()
if child == 0:
    try:
        encodle.BatchEmbedder().dimension
    except encodle.EncodleError as error:
        print(error, flush=True)
    os._exit(0)
forked.set()
os.waitpid(child, 0)
"""
    assert "was forked from process" in run(code)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_fork_before_use_works():
    code = """
import os, encodle
child = os.fork()
shape = encodle.SentenceTransformer().encode("a").shape
if child == 0:
    os._exit(shape != (384,))
print(shape, os.waitpid(child, 0)[1])
"""
    assert run(code) == "(384,) 0\n"


TAGGER = f"encodle.TokenClassifier({str(GOLDEN / 'heads/tagger')!r}).tag"


@pytest.mark.parametrize(
    "function, texts",
    [
        ("model.encode", '[f"{i} {\'and \' * 250}" for i in range(5000)]'),
        ("model.encode", '[f"{i} {\'and \' * 25000}" for i in range(500)]'),
        (TAGGER, '[" ".join(random.choices("abcdef", k=900_000))]'),
    ],
)
def test_ctrl_c_interrupts_a_call_and_the_next_call_does_not_wait(function, texts):
    code = f"""
import os, random, signal, threading, time, encodle
model = encodle.SentenceTransformer()
function, texts = {function}, {texts}
""" + """
def interrupt():
    global sent
    time.sleep(1)
    sent = time.monotonic()
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    function(texts)
except KeyboardInterrupt:
    print(time.monotonic() - sent)
start = time.monotonic()
assert model.encode("a").shape == (384,)
print(time.monotonic() - start)
"""
    interrupted, next_call = map(float, run(code).split())
    assert interrupted < 1 and next_call < 3, (interrupted, next_call)


def test_the_argument_the_environment_and_the_affinity_set_the_number_of_threads():
    code = "import encodle; print(encodle.SentenceTransformer().threads)"
    assert run(code, RAYON_NUM_THREADS="3") == "3\n"
    assert encodle.SentenceTransformer(threads=3).threads == 3
    if hasattr(os, "sched_setaffinity"):
        pin = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); "
        environment = dict(os.environ)
        environment.pop("RAYON_NUM_THREADS", None)
        done = subprocess.run(
            [sys.executable, "-c", pin + code], env=environment, capture_output=True, text=True
        )
        assert done.stdout == "1\n"


def test_a_model_can_be_called_by_del_while_the_interpreter_shuts_down():
    code = f"""
import encodle, sys

class Holder:
    def __init__(self):
        self.model = encodle.SentenceTransformer()
        self.ranker = encodle.CrossEncoder({str(GOLDEN / "heads/score")!r})

    def __del__(self):
        shapes = self.model.encode("a").shape, self.ranker.predict([("a", "b")]).shape
        print(*shapes, sys.meta_path, file=sys.__stdout__)

holder = Holder()
holder.itself = holder
"""
    # `meta_path` is None once nothing can be imported.
    assert run(code).splitlines() == ["(384,) (1,) None"]
def number_of_cpus() -> int:
    code = "import encodle; print(encodle.SentenceTransformer().threads)"
    return int(run(code, RAYON_NUM_THREADS=""))


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_threads_are_limited_to_4_per_cpu(by, tmp_path):
    (tmp_path / "texts.txt").write_text("a text\n" * 9)
    argument = "threads=20_000" if by == "argument" else ""
    code = f"""
import logging, os, sys, encodle
logging.basicConfig(stream=sys.stdout, format="%(name)s %(message)s")
model = encodle.SentenceTransformer({argument})
encodle.embed_file("{tmp_path}/texts.txt", "{tmp_path}/vectors.npy", model=model)
tasks = "/proc/self/task"
print(model.threads, len(os.listdir(tasks)) if os.path.exists(tasks) else 0)
"""
    variable = "20000" if by == "environment" else ""
    warning, numbers = run(code, RAYON_NUM_THREADS=variable).splitlines()
    most = 4 * number_of_cpus()
    assert warning == f"encodle using {most} threads instead of 20000: the maximum is 4 per CPU"
    threads, all_threads = map(int, numbers.split())
    # All: the pool of the model, that of the run, rayon's global pool, and a few others.
    assert threads == most and all_threads < 3 * most + 10


def test_threads_beyond_the_number_of_cpus_cost_no_cpu_time():
    def cpu_time(threads: int) -> float:
        return float(run(f"""
import time, encodle
model = encodle.SentenceTransformer(threads={threads})
times = []
for _ in range(6):
    start = time.process_time()
    model.encode([f"word by word {{i}}" for i in range(300)])
    times.append(time.process_time() - start)
print(min(times))
"""))

    cpus = number_of_cpus()
    few, many = cpu_time(cpus), cpu_time(4 * cpus)
    assert many < 1.3 * few, (few, many)  # 1.6 with workers that spin without a CPU


def test_the_package_works_offline_in_another_folder(tmp_path):
    code = """
import sys, encodle
assert encodle.SentenceTransformer().encode(["I love AI"]).shape == (1, 384)
assert not {"torch", "transformers", "pandas", "pyarrow"} & set(sys.modules)
"""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_model_that_is_not_cached_is_an_error_offline(tmp_path):
    code = """
import encodle
try:
    encodle.SentenceTransformer("org/name")
except encodle.EncodleError as error:
    print(error)
"""
    out = run(code, HF_HUB_OFFLINE="1", HF_HUB_CACHE=str(tmp_path))
    assert "model org/name is not in the cache" in out

"""Worker processes, of which one computes at a time, and their CPU time and memory from /proc."""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from systems import SYSTEMS

HERE = Path(__file__).parent
SETTLE = 0.2  # seconds for the threads of the previous worker to go to sleep


class Failed(Exception):
    """A worker failed."""


def environment(threads: int) -> dict[str, str]:
    """Environment variables of a worker: the number of threads of OpenMP, MKL and Rayon, no downloads."""
    names = ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"]
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true"}
    return os.environ | offline | {name: str(threads) for name in names}


class Worker:
    """One system in its own process; its stderr goes to a log in the cache.

    `command` is the command of a system that is not in `SYSTEMS`.
    """

    _numbers = itertools.count(1)  # two workers of one system have different logs

    def __init__(
        self, system: str, threads: int, rust: Path, logs: Path, command: list[str] | None = None
    ) -> None:
        self.system = system
        self.peak_rates: dict[str, list[float]] = {}
        if command is None:
            command = [sys.executable, str(HERE / "worker.py"), system, str(threads)]
            if SYSTEMS[system].load is None:
                command = [str(rust), *system.rsplit("-", 1)]
        logs.mkdir(parents=True, exist_ok=True)
        self.log = logs / f"{system}-{next(Worker._numbers)}.log"
        with self.log.open("w") as log:
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=environment(threads)
            )
        assert self.process.stdin and self.process.stdout
        self.questions, self.answers = self.process.stdin, self.process.stdout

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        try:
            print(json.dumps({"op": op, **arguments}), file=self.questions, flush=True)
            answer = json.loads(self.answers.readline())
        except (BrokenPipeError, json.JSONDecodeError):
            lines = self.log.read_text().splitlines()
            last = lines[-1] if lines else "the log is empty"
            raise Failed(f"{self.system} ended: {last}") from None
        if "error" in answer:
            raise Failed(f"{self.system}: {answer['error']}")
        return answer

    def load(self, model: str, folder: Path, cases: list[str]) -> None:
        self.ask("load", model=model, folder=str(folder), cases=cases)

    def run(self, case: str, warm_ups: int = 1, seconds: float = 0.3) -> list[float]:
        """Milliseconds of each call. Adds the peak rate that ours.rs measured before the calls, in
        operations per second, to `peak_rates`."""
        answer = self.ask("run", case=case, warm_ups=warm_ups, seconds=seconds)
        if "peak_rate" in answer:
            self.peak_rates.setdefault(case, []).append(answer["peak_rate"])
        return answer["ms"]

    def output(self, case: str) -> np.ndarray:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "output.npy"
            self.ask("output", case=case, path=str(path))
            return np.load(path)

    def peak_mb(self, case: str) -> tuple[float, float]:
        """Memory before a call, and the peak during the call."""
        process = Path(f"/proc/{self.process.pid}")
        (process / "clear_refs").write_text("5")  # reset the peak
        before = status_mb(process, "VmRSS")
        self.run(case, warm_ups=0, seconds=0)
        return before, status_mb(process, "VmHWM")

    def peak_rss_mb(self) -> float:
        """The peak memory since the start of the process."""
        return status_mb(Path(f"/proc/{self.process.pid}"), "VmHWM")

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        with suppress(BrokenPipeError):  # the process may have ended already
            self.questions.close()
        self.answers.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def status_mb(process: Path, field: str) -> float:
    for line in (process / "status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024 / 1e6
    raise KeyError(field)


def alone(command: list[str], threads: int, output: Path) -> dict[str, float]:
    """Wall time and peak memory of a command."""
    launcher = [sys.executable, "-S", str(HERE / "alone.py"), str(output), *command]
    done = subprocess.run(launcher, capture_output=True, text=True, env=environment(threads))
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise Failed(f"{command[0]}: {lines[-1] if lines else 'failed without a message'}")
    return json.loads(done.stdout)


def in_turn(
    turns: dict[Any, tuple[Worker, str]], rounds: int, warm_ups: int = 1
) -> tuple[dict[Any, list[float]], float, dict[Any, str]]:
    """Runs each turn (a worker and a case) once per round. Returns the median time of a call for
    each turn and round, the CPU use of the idle workers, and the errors of the turns that failed,
    which have no times.

    Every second round runs in reverse order, so that the order of two turns varies.
    """
    turns, failed = dict(turns), {}
    ms: dict[Any, list[float]] = {key: [] for key in turns}
    idle = elapsed = 0.0
    for r in range(rounds):
        for key, (worker, case) in list(turns.items())[:: -1 if r % 2 else 1]:
            time.sleep(SETTLE)
            others = {id(w): w for w, _ in turns.values() if w is not worker}.values()
            cpu, start = sum(w.cpu_seconds() for w in others), time.perf_counter()
            try:
                ms[key].append(float(np.median(worker.run(case, warm_ups))))
            except Failed as error:
                failed[key] = str(error)
                del turns[key], ms[key]
            elapsed += time.perf_counter() - start
            idle += sum(w.cpu_seconds() for w in others) - cpu
    return ms, idle / elapsed if elapsed else 0.0, failed

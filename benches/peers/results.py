"""The files of benches/results/: one per machine and month, to which the comparisons append."""

import datetime
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benches/results"
# The first model number of each generation, by AMD's family.
ZEN = {23: [(0, 1), (0x30, 2)], 25: [(0, 3), (0x10, 4), (0x20, 3), (0x60, 4)], 26: [(0, 5)]}


def table(header: list[str], rows: list[list[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, rule, *rows])


def output_of(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


def cpu_name(cpuinfo: str, cores: int) -> str:
    """The name of a machine by its processor, such as epyc-zen4-2c or xeon-amx-2c."""
    fields = dict(re.findall(r"^(.+?)\s*: (.*)$", cpuinfo, re.MULTILINE))
    brand = re.search(r"epyc|ryzen|xeon|core", fields.get("model name", "").lower())
    flags = fields.get("flags", "").split()
    family, model = (int(fields.get(key, 0)) for key in ("cpu family", "model"))
    kind = next((isa for isa in ("amx", "avx512", "avx2") if any(f.startswith(isa) for f in flags)), "")
    if fields.get("vendor_id") == "AuthenticAMD" and family in ZEN:
        kind = f"zen{[zen for first, zen in ZEN[family] if first <= model][-1]}"
    return "-".join(filter(None, [brand[0] if brand else platform.machine(), kind, f"{cores}c"]))


def this_cpu() -> str:
    return cpu_name(Path("/proc/cpuinfo").read_text(), os.cpu_count() or 1)


def facts(threads: int) -> dict[str, str]:
    """The machine and the versions of the programs of this project."""
    cpu = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    candle = re.search(r'name = "candle-core"\nversion = "(.*)"', (ROOT / "Cargo.lock").read_text())
    return {
        "CPU": f"{cpu[1] if cpu else platform.machine()}, {os.cpu_count()} cores",
        "threads": str(threads),
        "kernel": f"{platform.system()} {platform.release()}",
        "commit": output_of("git", "describe", "--always", "--dirty", "--exclude=*"),
        "Rust": output_of("rustc", "--version").split()[1],
        "candle": candle[1] if candle else "unknown",
        "Python": platform.python_version(),
    }


def measured_with(facts: dict[str, str]) -> str:
    return table(["measured with", ""], [[*fact] for fact in facts.items()])


class Results:
    """Prints Markdown, and appends it to FOLDER/MACHINE-YEAR-MONTH.md below the command and date."""

    def __init__(self, machine: str, folder: Path = FOLDER) -> None:
        self.today = datetime.date.today()
        self.machine = machine
        self.path = folder / f"{machine}-{self.today:%Y-%m}.md"
        command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
        self.heading = f"\n## `{command}`, {self.today}\n"

    def write(self, text: str) -> None:
        print(text, end="\n\n", flush=True)
        if not self.path.exists():
            method = "[docs/performance.md](../../docs/performance.md#method)"
            self.path.write_text(f"# {self.machine}, {self.today:%B %Y}\n\nMethod: {method}.\n")
        with self.path.open("a") as file:
            file.write(f"{self.heading}\n{text}\n")
        self.heading = ""

"""Compares the speed of this project with that of other libraries on the same inputs.

All systems use the same weights and number of threads.

    pip install -r benches/peers/requirements.txt
    python benches/peers/run.py [--sections SECTION...] [--systems SYSTEM...] [--json FILE]

Builds the Rust programs, creates missing models of the peers, checks that all outputs agree, times
one worker at a time in rounds, prints Markdown tables and appends them to the file of this machine
and month in benches/results/. Exit status: 1 if a system failed or disagreed (the others are still
measured), 2 if a package is missing.
"""

import argparse
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

from results import ROOT, Results, facts, output_of, this_cpu

HERE = Path(__file__).parent

try:
    import tables
    from campaign import Campaign, progress
    from sections import SECTIONS
    from systems import ALWAYS, SYSTEMS
except ModuleNotFoundError as missing:
    advice = "pip install -r benches/peers/requirements.txt"
    print(f"{missing.name} is missing: {advice}", file=sys.stderr)
    sys.exit(2)


def build() -> Path:
    """Builds the Rust worker and `encodle`; returns Cargo's target folder."""
    output_of("cargo", "build", "--release", "--bin", "encodle")
    output_of("cargo", "build", "--release", "-p", "encodle-benches", "--bin", "peers")
    metadata = output_of("cargo", "metadata", "--format-version", "1", "--no-deps")
    return Path(json.loads(metadata)["target_directory"])


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def pinned() -> dict[str, str]:
    """The line of requirements.txt for each package."""
    lines = (HERE / "requirements.txt").read_text().split()
    return {line.partition("==")[0]: line for line in lines}


def machine(threads: int) -> dict[str, str]:
    return facts(threads) | {
        "packages": ", ".join(f"{name} {version(name) or 'missing'}" for name in pinned()),
    }


def save(results: dict[str, Any], path: Path) -> None:
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(json.dumps(results, indent=1))
    unfinished.rename(path)


def positive(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {count}")
    return count


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=[*SECTIONS], help="default: all")
    systems = f"default: all of {', '.join(SYSTEMS)}"
    parser.add_argument(
        "--systems", nargs="+", choices=SYSTEMS, default=[*SYSTEMS], metavar="SYSTEM", help=systems
    )
    parser.add_argument("--threads", type=positive, default=2, help="default: 2")
    parser.add_argument("--rounds", type=positive, default=7, help="default: 7")
    parser.add_argument(
        "--layers",
        type=positive,
        help="number of layers of the encoders with random weights; default: as published",
    )
    parser.add_argument(
        "--cache", type=Path, help="folder for the models; default: Cargo's target/peers"
    )
    parser.add_argument("--json", type=Path, help="write the times of every round and system here")
    parser.add_argument(
        "--skip-missing", action="store_true", help="skip peers whose packages are missing"
    )
    options = parser.parse_args()
    options.chosen = {
        name: [s for s in SECTIONS[name].systems if s in options.systems] for name in options.sections
    }
    if not any(options.chosen.values()):
        parser.error("none of the chosen systems belongs to a chosen section")
    return options


def main() -> int:
    options = arguments()
    chosen = options.chosen
    missing_of = {
        system: [p for p in SYSTEMS[system].packages if not version(p)]
        for system in dict.fromkeys(s for systems in chosen.values() for s in systems)
    }
    missing = {package for packages in missing_of.values() for package in packages}
    missing_always = {package for package in ALWAYS if not version(package)}
    if missing | missing_always:
        lines = " ".join(pinned()[package] for package in sorted(missing | missing_always))
        progress(f"missing packages: pip install {lines}")
        if missing_always or not options.skip_missing:
            return 2
    campaign = Campaign(options, build())
    written = Results(this_cpu())
    results: dict[str, Any] = {"machine": machine(options.threads), "rounds": options.rounds}
    results |= {"layers": options.layers, "sections": {}, "failures": campaign.failures}
    for name, systems in chosen.items():
        systems = [system for system in systems if not missing_of[system]]
        if not systems:
            continue
        progress(name)
        if found := campaign.measure(name, systems):
            results["sections"][name] = found
            written.write(tables.section(name, found))
        if options.json:
            save(results, options.json)
    written.write(tables.about(results))
    return 1 if campaign.failures else 0


if __name__ == "__main__":
    sys.exit(main())

"""The results as Markdown tables."""

from typing import Any

import numpy as np

from results import measured_with, table
from sections import SECTIONS, Section
from systems import SYSTEMS

Found = dict[str, Any]


def label(system: str) -> str:
    return f"{SYSTEMS[system].name}, {SYSTEMS[system].dtype}"


def baseline(system: str, measured: Found) -> str | None:
    """The system to compare a time with: ours in the same precision (bf16 for f16), or else ours
    in f32."""
    dtype = SYSTEMS[system].dtype
    ours = [f"ours-{'bf16' if dtype == 'f16' else dtype}", "ours-f32"]
    return next((name for name in ours if name in measured), None)


def ratio(system: str, case: str, measured: Found) -> str:
    base = baseline(system, measured)
    if base in (None, system) or case not in measured[base]:
        return ""
    rounds = np.array(measured[system][case]) / np.array(measured[base][case])
    return f" ({np.median(rounds):.2f}×)"


def time(system: str, case: str, measured: Found) -> str:
    if case not in measured[system]:
        return "failed"
    return f"{np.median(measured[system][case]):.1f} ms{ratio(system, case, measured)}"


def share(system: str, case: str, found: Found) -> str:
    """The share of the peak rate that the matrix products have over the whole time, if they are
    counted and the peak rate of the precision was measured."""
    ours = baseline(system, found["ms"])
    operations = found.get("operations", {}).get(case)
    rates = found.get("peak_rates", {}).get(ours, {}).get(case)
    is_timed = case in found["ms"][system]
    if not (operations and rates and is_timed and SYSTEMS[system].dtype == SYSTEMS[ours].dtype):
        return ""
    seconds = np.array(found["ms"][system][case]) / 1e3
    return f", {np.median(operations / seconds / np.array(rates)):.0%}"


def error(system: str, agreement: Found) -> str:
    """The difference from the reference, the worst of all cases."""
    cases = agreement[system].values()
    if SYSTEMS[system].dtype == "f32":
        return f"{max(case['difference'] for case in cases):.1e}"
    mean = min(case["cosine"] for case in cases)
    return f"cos {mean:.6f}, lowest {min(case['lowest_cosine'] for case in cases):.6f}"


def compared(section: Section, found: Found, peaks: bool = False) -> str:
    """Times and differences, and with `peaks` the peak memory of each process."""
    measured = found["ms"]
    rows = [
        [label(s)]
        + [time(s, c, measured) + share(s, c, found) for c in section.cases]
        + [error(s, found["agreement"])]
        + [f"{found['peak_rss'][s]:,.0f} MB"] * peaks
        for s in measured
    ]
    header = ["system", *section.cases, f"difference from {label(section.reference)}"]
    return table(header + ["peak RSS"] * peaks, rows)


def sentences(found: Found) -> str:
    rows = []
    for system, cases in found["ms"].items():
        [(case, ms)] = cases.items()
        per_second = int(case.split()[0]) / (np.median(ms) / 1e3)
        times = ratio(system, case, found["ms"]).strip(" ()")
        rows.append([label(system), f"{per_second:.0f}", times, error(system, found["agreement"])])
    reference = label(SECTIONS["sentences"].reference)
    [(case, texts)] = found["texts"].items()
    origin = (
        "The sentences are from the documentation strings of Python's standard library, "
        f"{texts['tokens'] / int(case.split()[0]):.1f} tokens each on average "
        f"(sha256 {texts['fingerprint']}…)."
    )
    return (
        table(["system", "sentences/s", "time / ours", f"difference from {reference}"], rows)
        + f"\n\n{origin}"
    )


def with_peaks(name: str, found: Found) -> str:
    """Times, and how much the peak memory during a call exceeds the memory before it."""
    section, measured = SECTIONS[name], found["ms"]

    def cell(system: str, case: str) -> str:
        peak = found["peak"][system].get(case)
        text = time(system, case, measured) + share(system, case, found)
        if peak is None:
            return text
        return f"{text}, {peak['most_mb'] - peak['before_mb']:.0f} MB"

    rows = [
        [label(s), *(cell(s, c) for c in section.cases), error(s, found["agreement"])]
        for s in measured
    ]
    header = [f"T = S = {case}" if name == "attention" else case for case in section.cases]
    return table(["system", *header, f"difference from {label(section.reference)}"], rows)


def cold_start(found: Found) -> str:
    rows = [
        [label(s), time(s, next(iter(measured), ""), found["ms"]), f"{np.median(found['peak'][s]):.0f} MB"]
        for s, measured in found["ms"].items()
    ]
    return table(["program", "wall time", "peak RSS"], rows)


def scaling(found: Found) -> str:
    [(system, measured)] = found["ms"].items()
    texts = found["texts"]
    threads = [[n, f"{np.median(ms):.1f} ms"] for n, ms in measured.items() if n not in texts]
    embedded = []
    for name, tokens in ((name, text["tokens"]) for name, text in texts.items()):
        micro = np.median(measured[name]) * 1e3 / tokens
        peak = found["peak"][system][name]["most_mb"]
        embedded.append([name, str(tokens), f"{micro:.1f} µs", f"{peak:.0f} MB"])
    return "\n\n".join(
        [
            table(["BERT-base, 8×128, ours", "time"], threads),
            table(["all-MiniLM-L6-v2, ours", "tokens", "time per token", "peak RSS"], embedded),
        ]
    )


SPECIAL = {
    "sentences": sentences,
    "cold-start": cold_start,
    "scaling": scaling,
}


def section(name: str, found: Found) -> str:
    if name in SPECIAL:
        text = SPECIAL[name](found)
    elif "peak" in found:
        text = with_peaks(name, found)
    else:
        text = compared(SECTIONS[name], found)
    if "idle" in found:
        text += f"\n\nThe idle systems together used {found['idle']:.1%} of a core."
    return f"### {SECTIONS[name].title}\n\n{text}"


def about(results: Found) -> str:
    """The method, the machine and the versions."""
    facts = measured_with(results["machine"])
    how = (
        f"Medians of {results['rounds']} rounds. In each round the systems run in turn, after a "
        "warm-up call. In brackets: the median over the rounds of the time relative to ours, in "
        "the same precision if that was measured. In tables that compare outputs, the last column is, "
        "for f32, the maximum difference of an element; for bf16 and int8, the mean and the lowest "
        "cosine. MB beside a time: the peak memory during a call of the case minus the memory "
        "before that call, in a new process that has made one call of a short case. Peak RSS: the "
        "peak memory of the whole process. A percentage: the operations of the matrix products, "
        "without padding, per second of the whole time, divided by the peak rate of the processor in "
        "that precision, measured by this project before its timed calls. "
        "The cold start has no warm-up call."
    )
    count = results["layers"]
    layers = f"\n\nThe encoders with random weights had {count} layers." if count else ""
    failed = "".join(f"\n- {text}" for text in results["failures"])
    return f"{how}{layers}\n\n{facts}" + (f"\n\nFailures:\n{failed}" if failed else "")

"""Tests of results.py: `pytest benches/peers`."""

import sys

import pytest
import results

AMD = "vendor_id\t: AuthenticAMD\ncpu family\t: {}\nmodel\t\t: {}\nmodel name\t: AMD EPYC\nflags\t\t: avx2 avx512f\n"
INTEL = "vendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143\nmodel name\t: Intel(R) Xeon(R)\nflags\t\t: {}\n"


@pytest.mark.parametrize(
    "cpuinfo, name",
    [
        (AMD.format(23, 49), "epyc-zen2-3c"),
        (AMD.format(25, 1), "epyc-zen3-3c"),
        (AMD.format(25, 17), "epyc-zen4-3c"),
        (AMD.format(25, 33), "epyc-zen3-3c"),
        (AMD.format(25, 160), "epyc-zen4-3c"),
        (AMD.format(26, 2), "epyc-zen5-3c"),
        (INTEL.format("avx2 avx512f amx_tile"), "xeon-amx-3c"),
        (INTEL.format("avx2 avx512f"), "xeon-avx512-3c"),
    ],
)
def test_a_machine_is_named_by_its_processor(cpuinfo, name):
    assert results.cpu_name(cpuinfo, 3) == name


def test_runs_of_a_month_are_appended_to_one_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benches/peers/run.py", "--rounds", "3"])
    first = results.Results("xeon-amx-2c", tmp_path)
    first.write(results.table(["system", "ms"], [["ours", "7.1"]]))
    first.write("after the table")
    second = results.Results("xeon-amx-2c", tmp_path)
    second.write("of another run")
    assert first.path == second.path
    heading = f"## `run.py --rounds 3`, {first.today}"
    table = "| system | ms |\n| --- | ---: |\n| ours | 7.1 |"
    parts = [heading, table, "after the table", heading, "of another run"]
    text = first.path.read_text()
    assert text.startswith(f"# xeon-amx-2c, {first.today:%B %Y}\n")
    assert text.endswith("\n\n".join(["", *parts]) + "\n")
    assert capsys.readouterr().out == "".join(f"{part}\n\n" for part in [table, "after the table", "of another run"])

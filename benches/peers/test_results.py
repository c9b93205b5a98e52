"""Tests of results.py, tables.py and decoder_files.py: `pytest benches/peers`."""

import sys

import pytest
import results
import tables
from decoder_files import gguf_name
from sections import Section

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


def test_the_share_of_the_peak_rate_is_that_of_the_same_precision():
    found = {
        "ms": {
            "ours-f32": {"8×128": [1000.0, 500.0, 2000.0]},
            "torch-f32": {"8×128": [2000.0, 1000.0, 4000.0]},
            "torch-int8": {"8×128": [250.0, 250.0, 250.0]},
        },
        "operations": {"8×128": 80_000_000},
        "peak_rates": {"ours-f32": {"8×128": [1e8, 2e8, 1e8]}},
    }
    share = {system: tables.share(system, "8×128", found) for system in found["ms"]}
    assert share == {"ours-f32": ", 80%", "torch-f32": ", 40%", "torch-int8": ""}
    assert tables.share("ours-f32", "8×128", found | {"operations": {}}) == ""


def test_a_time_in_f16_is_compared_with_ours_in_bf16():
    same = {"1×512": {"difference": 1e-6, "cosine": 1.0, "lowest_cosine": 0.999}}
    ms = {"ours-f32": [40.0, 42.0], "ours-bf16": [10.0, 20.0], "llama-f16": [30.0, 30.0]}
    found = {
        "ms": {system: {"1×512": times} for system, times in ms.items()},
        "agreement": dict.fromkeys(ms, same),
        "peak_rss": {"ours-f32": 2400.2, "ours-bf16": 1200.0, "llama-f16": 1300.0},
    }
    section = Section("", "qwen3-0.6b", ("1×512",), tuple(ms), "torch-f32")
    header, _, ours, _, llama = tables.compared(section, found, peaks=True).splitlines()
    assert header == "| system | 1×512 | difference from PyTorch, f32 | peak RSS |"
    assert ours == "| ours, f32 | 41.0 ms | 1.0e-06 | 2,400 MB |"
    accuracy = "cos 1.000000, lowest 0.999000"
    assert llama == f"| llama.cpp, f16 | 30.0 ms (2.25×) | {accuracy} | 1,300 MB |"


@pytest.mark.parametrize(
    "name, expected",
    [
        ("embed_tokens.weight", "token_embd.weight"),
        ("layers.13.self_attn.q_proj.weight", "blk.13.attn_q.weight"),
        ("layers.0.self_attn.k_norm.weight", "blk.0.attn_k_norm.weight"),
        ("layers.0.post_attention_layernorm.weight", "blk.0.ffn_norm.weight"),
        ("norm.weight", "output_norm.weight"),
    ],
)
def test_a_tensor_has_the_name_of_llama_cpp(name, expected):
    assert gguf_name(name) == expected

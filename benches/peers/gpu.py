"""Compares benches/gpu.rs with PyTorch on one GPU: times on the same shapes, and ratios.

    cargo bench -p encodle-benches --features cuda --bench gpu --no-run     # prints the path of the program
    python benches/peers/gpu.py PROGRAM [DTYPE]...                 # f32, f16 and bf16 by default

Requires torch and transformers. PyTorch computes padded batches with sdpa and with torch.compile;
mixed lengths are sorted and split into batches of 64. One sequence is computed with CUDA graphs
(mode reduce-overhead) only. In f32, PyTorch multiplies without TF32, as this project does. In f16,
attention alone is also compared, for 64x128 and 32x512. The tables are printed and appended to the
file of this GPU and month in benches/results/.
"""

import json
import subprocess
import sys

import torch
from results import Results, measured_with, table
from transformers import BertConfig, BertModel

WARM_UPS, ROUNDS = 10, 30


def batches(lengths):
    """Padded ids and masks; long sequences first."""
    lengths = sorted(lengths, reverse=True)
    for start in range(0, len(lengths), 64):
        part = torch.tensor(lengths[start : start + 64])
        ids = torch.randint(0, 30522, (len(part), int(part.max())))
        mask = (torch.arange(ids.shape[1]) < part[:, None]).long()
        yield ids, None if bool(mask.all()) else mask


def median(call):
    for _ in range(WARM_UPS):
        call()
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[ROUNDS // 2]


@torch.inference_mode()
def torch_seconds(model, lengths):
    prepared = list(batches(lengths))

    def call():
        for ids, mask in prepared:
            mask = mask if mask is None else mask.cuda(non_blocking=True)
            model(ids.cuda(non_blocking=True), attention_mask=mask)

    return median(call)


@torch.inference_mode()
def attention_seconds(lengths):
    """PyTorch's attention with the heads of BERT-base, on sequences of one length."""
    q, k, v = (torch.randn(len(lengths), 12, lengths[0], 64, device="cuda").half() for _ in range(3))
    return median(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v))


def main():
    dtypes = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
    names = sys.argv[2:] or dtypes
    if len(sys.argv) < 2 or not set(names) <= set(dtypes):
        sys.exit(__doc__)
    ours, cases, attention = {}, {}, {}
    lines = subprocess.run([sys.argv[1], "--bench"], stdout=subprocess.PIPE, text=True, check=True)
    for line in map(json.loads, lines.stdout.splitlines()):
        if "lengths" in line:
            cases = line["lengths"]
            continue
        print(json.dumps(line), file=sys.stderr)
        if "case" in line:
            ours[line["dtype"], line["case"]] = line["ms"] / 1e3
        if line.get("system") == "ours":
            attention[line["attention"]] = line["ms"] / 1e3
    if not cases:
        sys.exit(
            f'{sys.argv[1]} printed no cases: expected a line with "lengths"; is there a working '
            "GPU?"
        )
    rows = []
    for name in names:
        ms = [f"{ours[name, case] * 1e3:.2f}" if (name, case) in ours else "" for case in cases]
        rows.append([f"ours, {name}", *ms])
        torch.manual_seed(0)
        config = BertConfig(attn_implementation="sdpa")
        model = BertModel(config, add_pooling_layer=False).to("cuda", dtypes[name]).eval()
        systems = {"sdpa": model, "compiled": torch.compile(model, dynamic=True)}
        systems["graphs"] = torch.compile(model, mode="reduce-overhead")
        for system, run in systems.items():
            rows.append([f"PyTorch {system}, {name}"])
            for case, lengths in cases.items():
                if (system == "graphs") != (case == "1x32"):
                    rows[-1].append("")
                    continue
                seconds = torch_seconds(run, lengths)
                ratio = seconds / ours[name, case] if (name, case) in ours else float("nan")
                rows[-1].append(f"{seconds * 1e3:.2f} ({ratio:.2f}×)")
            print(rows[-1], file=sys.stderr, flush=True)
    parts = ["Times in ms.", table(["system", *cases], rows)]
    for case, seconds in attention.items():
        if len(set(cases[case])) == 1:
            peer = attention_seconds(cases[case])
            parts.append(
                f"Attention {case}, f16: ours {seconds * 1e3:.3f} ms, sdpa {peer * 1e3:.3f} ms "
                f"({peer / seconds:.2f}×)"
            )
    gpu = torch.cuda.get_device_name().removeprefix("NVIDIA ").split()[0].lower()
    parts.append(measured_with({"GPU": torch.cuda.get_device_name(), "torch": torch.__version__}))
    Results(gpu).write("\n\n".join(parts))


if __name__ == "__main__":
    main()

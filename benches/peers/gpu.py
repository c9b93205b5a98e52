"""Compares benches/gpu.rs with PyTorch on one GPU: times on the same shapes, and ratios.

    cargo bench -p encodle-benches --features cuda --bench gpu --no-run     # prints the path of the program
    python benches/peers/gpu.py PROGRAM [DTYPE]...                 # f32, f16 and bf16 by default

Requires torch and transformers. PyTorch computes padded batches with sdpa and with torch.compile;
mixed lengths are sorted and split into batches of 64. One sequence is computed with CUDA graphs
(mode reduce-overhead) only. In f32, PyTorch multiplies without TF32, as this project does. In f16,
attention alone is also compared, for 64x128 and 32x512.
"""

import json
import subprocess
import sys

import torch
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
        print(json.dumps(line))
        if "case" in line:
            ours[line["dtype"], line["case"]] = line["ms"] / 1e3
        if line.get("system") == "ours":
            attention[line["attention"]] = line["ms"] / 1e3
    if not cases:
        sys.exit(
            f'{sys.argv[1]} printed no cases: expected a line with "lengths"; is there a working '
            "GPU?"
        )
    print(f"{'':16}" + "".join(f"{case:>24}" for case in cases))
    for name in names:
        torch.manual_seed(0)
        config = BertConfig(attn_implementation="sdpa")
        model = BertModel(config, add_pooling_layer=False).to("cuda", dtypes[name]).eval()
        systems = {"sdpa": model, "compiled": torch.compile(model, dynamic=True)}
        systems["graphs"] = torch.compile(model, mode="reduce-overhead")
        for system, run in systems.items():
            row = f"{system + ' ' + name:16}"
            for case, lengths in cases.items():
                if (system == "graphs") != (case == "1x32"):
                    row += f"{'':>24}"
                    continue
                seconds = torch_seconds(run, lengths)
                ratio = seconds / ours[name, case] if (name, case) in ours else float("nan")
                row += f"{seconds * 1e3:>14.3f} ms {ratio:5.2f}×"
            print(row, flush=True)
    for case, seconds in attention.items():
        if len(set(cases[case])) == 1:
            peer = attention_seconds(cases[case])
            print(f"attention {case}: sdpa {peer * 1e3:.3f} ms, {peer / seconds:.2f}×")


if __name__ == "__main__":
    main()

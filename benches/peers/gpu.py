"""Compares benches/gpu.rs with PyTorch on one GPU: times on the same shapes, and ratios.

    cargo bench -p encodle-benches --features cuda --bench gpu --no-run     # prints the path of the program
    python benches/peers/gpu.py PROGRAM [--eager] [SELECTION]...

Requires torch and transformers. PROGRAM can also be a file with the program's output. A selection is a
part of MODEL/DTYPE/CASE, as for the program; without one, all cases that PROGRAM printed are compared.
PyTorch computes padded batches with sdpa (DeBERTa has eager attention only) and, for BERT and unless
--eager is given, with torch.compile; mixed lengths are sorted and split into batches of 64. One sequence
is computed with CUDA graphs (mode reduce-overhead) only. In f32, PyTorch multiplies without TF32, as this
project does. In f16, BERT's attention alone is also compared, for 64x128 and 32x512. transformers has no
Jina v2 and no GTE. The tables are printed and appended to the file of this GPU and month in
benches/results/.
"""

import json
import os
import subprocess
import sys
import time

import torch
import transformers
from results import Results, measured_with, table

WARM_UPS, ROUNDS = 10, 30
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
# The class of a model's config and model, and the settings that differ from the defaults.
MODELS = {
    "bert-base": ("Bert", {}),
    "minilm": ("Bert", {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536}),
    "xlm-r-base": (
        "XLMRoberta",
        {"vocab_size": 250_002, "max_position_embeddings": 514, "type_vocab_size": 1},
    ),
    "modernbert-base": ("ModernBert", {}),
    "mpnet-base": ("MPNet", {"max_position_embeddings": 514}),
    "deberta-v3-base": (
        "DebertaV2",
        {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
        | {"intermediate_size": 3072, "relative_attention": True, "position_buckets": 256}
        | {"norm_rel_ebd": "layer_norm", "share_att_key": True, "pos_att_type": "p2c|c2p"}
        | {"position_biased_input": False},
    ),
}


def batches(lengths):
    """Padded ids and masks; long sequences first."""
    lengths = sorted(lengths, reverse=True)
    for start in range(0, len(lengths), 64):
        part = torch.tensor(lengths[start : start + 64])
        ids = torch.randint(0, 30522, (len(part), int(part.max())))
        mask = (torch.arange(ids.shape[1]) < part[:, None]).long()
        yield ids, None if bool(mask.all()) else mask


def median(call):
    begin = time.monotonic()
    for _ in range(WARM_UPS):
        call()
        torch.cuda.synchronize()
        if time.monotonic() - begin > 3:
            break
    times = []
    for _ in range(ROUNDS):
        if sum(times) > 3 and len(times) >= 3:
            break
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]


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


def model(name, dtype):
    """A model with random weights; with sdpa, unless the class does not support it."""
    kind, settings = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**settings)
    cls = getattr(transformers, f"{kind}Model")
    for attention in ("sdpa", "eager"):
        try:
            built = cls._from_config(config, attn_implementation=attention)
        except ValueError as error:
            print(f"{name}: {attention}: {error}", file=sys.stderr)
            continue
        return attention, built.to("cuda", DTYPES[dtype]).eval()
    raise ValueError(name)


def lines_of(program, arguments):
    if not os.access(program, os.X_OK):
        with open(program) as file:
            return file.read().splitlines()
    run = subprocess.run([program, "--bench", *arguments], stdout=subprocess.PIPE, text=True)
    if run.returncode != 0:
        print(f"{program} ended with {run.returncode}", file=sys.stderr)
    return run.stdout.splitlines()


def main():
    arguments = sys.argv[1:]
    eager = "--eager" in arguments
    if eager:
        arguments.remove("--eager")
    if not arguments:
        sys.exit(__doc__)
    ours, lengths, attention = {}, {}, {}
    for line in map(json.loads, lines_of(arguments[0], arguments[1:])):
        if "lengths" in line:
            lengths = line["lengths"]
            continue
        print(json.dumps(line), file=sys.stderr)
        if "case" in line:
            ours[line["model"], line["dtype"], line["case"]] = line["ms"] / 1e3
        if line.get("system") == "ours":
            attention[line["attention"]] = line["ms"] / 1e3
    if not ours:
        sys.exit(f"{arguments[0]} printed no times: is there a working GPU?")
    rows = []
    for name, dtype in dict.fromkeys((name, dtype) for name, dtype, _ in ours):
        cases = [case for case in lengths if (name, dtype, case) in ours]
        times = {case: f"{ours[name, dtype, case] * 1e3:.2f}" for case in cases}
        rows.append([f"{name} {dtype}", *(times.get(case, "") for case in lengths)])
        print(rows[-1], file=sys.stderr, flush=True)
        if name not in MODELS:
            continue
        try:
            torch.manual_seed(0)
            implementation, built = model(name, dtype)
            systems = {implementation: built}
            if name == "bert-base" and not eager:
                systems["compiled"] = torch.compile(built, dynamic=True)
                systems["graphs"] = torch.compile(built, mode="reduce-overhead")
            for system, run in systems.items():
                rows.append([f"PyTorch {system}"])
                for case in lengths:
                    is_other = (system == "graphs") != (case == "1x32" and len(systems) > 1)
                    if case not in cases or is_other:
                        rows[-1].append("")
                        continue
                    seconds = torch_seconds(run, lengths[case])
                    ratio = seconds / ours[name, dtype, case]
                    rows[-1].append(f"{seconds * 1e3:.2f} ({ratio:.2f}×)")
                print(rows[-1], file=sys.stderr, flush=True)
        except Exception as error:  # the other models are compared nevertheless
            print(f"{name} {dtype}: {error!r}", file=sys.stderr, flush=True)
    width = len(lengths) + 1
    rows = [row + [""] * (width - len(row)) for row in rows]  # rows that an error has ended
    parts = ["Times in ms.", table(["system", *lengths], rows)]
    for case, seconds in attention.items():
        peer = attention_seconds(lengths[case])
        parts.append(
            f"Attention {case}, f16: ours {seconds * 1e3:.3f} ms, sdpa {peer * 1e3:.3f} ms "
            f"({peer / seconds:.2f}×)"
        )
    gpu = torch.cuda.get_device_name().removeprefix("NVIDIA ").split()[0].lower()
    parts.append(measured_with({"GPU": torch.cuda.get_device_name(), "torch": torch.__version__}))
    Results(gpu).write("\n\n".join(parts))


if __name__ == "__main__":
    main()

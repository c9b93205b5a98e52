"""Compares benches/gpu.rs with PyTorch on one GPU: times on the same shapes, and ratios.

    cargo bench -p encodle-benches --features cuda --bench gpu --no-run     # prints the path of the program
    python benches/peers/gpu.py PROGRAM [--eager] [--encodle ENCODLE] [SELECTION]...

Requires torch and transformers 5.23. PROGRAM can also be a file with the program's output. A selection is a
part of MODEL/DTYPE/CASE, as for the program; without one, all cases that PROGRAM printed are compared.
PyTorch computes padded batches with sdpa (DeBERTa has eager attention only) and, for BERT and unless
--eager is given, with torch.compile; mixed lengths are sorted and split into batches of 64. One sequence
is computed with CUDA graphs (mode reduce-overhead) only. In f32, PyTorch multiplies without TF32, as this
project does. In f16, BERT's attention alone is also compared with the backends of PyTorch, for 64x128 and
32x512. transformers has no Jina v2: it is timed without a peer. With --encodle, the program ENCODLE embeds
one text in a new process, and 200,000 texts from file to file; sentence-transformers, which this requires,
embeds the same texts with the same model (weights/all-MiniLM-L6-v2). The tables are printed and appended
to the file of this GPU and month in benches/results/, with the ratios that are below their bars.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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
    "gte-base": ("Gte", {"max_position_embeddings": 8192, "type_vocab_size": 0}),
    "nomic-bert-base": ("NomicBert", {"max_position_embeddings": 8192}),
}
MODEL = Path(__file__).parents[2] / "weights/all-MiniLM-L6-v2"
# The lowest ratio of PyTorch's time to ours: by model; by model, dtype and case; of mixed lengths.
BARS = {"modernbert-base": 1.5, "deberta-v3-base": 2.0}
BARS |= dict.fromkeys(["mpnet-base", "nomic-bert-base", "gte-base"], 1.3)
BARS |= {("bert-base", "f16", "32x512"): 1.2, ("bert-base", "bf16", "32x512"): 1.1}
BARRED_CASES, MIXED_BAR, ATTENTION_BAR = {"64x128", "32x512", "4x8192"}, 4.0, 1 / 1.1
FIRST_PROCESS_SECONDS, CORPUS_BAR = 2.0, 6.0


def bar(name, dtype, case):
    if case == "mixed":
        return MIXED_BAR
    return BARS.get((name, dtype, case), BARS.get(name) if case in BARRED_CASES else None)


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
    """PyTorch's attention with the heads of BERT-base, on sequences of one length, by backend."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (torch.randn(len(lengths), 12, lengths[0], 64, device="cuda").half() for _ in range(3))
    seconds = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            with sdpa_kernel(backend):
                attend = torch.nn.functional.scaled_dot_product_attention
                seconds[backend.name] = median(lambda: attend(q, k, v))
        except RuntimeError as error:
            print(f"{backend.name}: {error}", file=sys.stderr)
    return seconds


def process_seconds(encodle, *arguments):
    begin = time.monotonic()
    subprocess.run([encodle, "embed", "--device", "cuda", *arguments], check=True)
    return time.monotonic() - begin


def corpus(encodle):
    """Lines on the first process, and on 200,000 texts of 3 to 30 words."""
    rng = random.Random(20260)
    vocabulary = json.loads((MODEL / "tokenizer.json").read_text())["model"]["vocab"]
    words = [word for word in vocabulary if word.isascii() and word.isalpha()]
    texts = [" ".join(rng.choices(words, k=rng.randint(3, 30))) for _ in range(200_000)]
    with tempfile.TemporaryDirectory() as folder:
        one, all_texts = Path(folder, "one.txt"), Path(folder, "all.txt")
        one.write_text(texts[0])
        all_texts.write_text("\n".join(texts))
        arguments = ["--model", str(MODEL), "--output", str(Path(folder, "out.parquet")), "--input"]
        first = process_seconds(encodle, *arguments, str(one))
        Path(folder, "out.parquet").unlink()
        ours = process_seconds(encodle, *arguments, str(all_texts))
        begin = time.monotonic()
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(str(MODEL), device="cuda", model_kwargs={"dtype": torch.float16})
        vectors = model.encode(all_texts.read_text().split("\n"), batch_size=256)
        vectors.tofile(Path(folder, "theirs.npy"))
        theirs = time.monotonic() - begin
    missed = []
    if first > FIRST_PROCESS_SECONDS:
        missed.append(f"first process: {first:.2f} s, bar {FIRST_PROCESS_SECONDS} s")
    if theirs / ours < CORPUS_BAR:
        missed.append(f"200,000 texts: {theirs / ours:.2f}×, bar {CORPUS_BAR}×")
    lines = [
        f"A new process embeds one text in {first:.2f} s.",
        f"200,000 texts, file to file: ours {ours:.2f} s, sentence-transformers {theirs:.2f} s "
        f"({theirs / ours:.2f}×)",
    ]
    return lines, missed


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
    encodle = None
    if "--encodle" in arguments:
        at = arguments.index("--encodle")
        encodle = arguments[at + 1] if at + 1 < len(arguments) else sys.exit(__doc__)
        del arguments[at : at + 2]
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
    rows, missed = [], []
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
                    lowest = bar(name, dtype, case)
                    if system == implementation and lowest and ratio < lowest:
                        missed.append(f"{name} {dtype} {case}: {ratio:.2f}×, bar {lowest}×")
                print(rows[-1], file=sys.stderr, flush=True)
        except Exception as error:  # the other models are compared nevertheless
            print(f"{name} {dtype}: {error!r}", file=sys.stderr, flush=True)
    width = len(lengths) + 1
    rows = [row + [""] * (width - len(row)) for row in rows]  # rows that an error has ended
    parts = ["Times in ms.", table(["system", *lengths], rows)]
    for case, seconds in attention.items():
        for backend, peer in attention_seconds(lengths[case]).items():
            parts.append(
                f"Attention {case}, f16: ours {seconds * 1e3:.3f} ms, {backend} {peer * 1e3:.3f} ms "
                f"({peer / seconds:.2f}×)"
            )
            if backend == "CUDNN_ATTENTION" and case == "32x512" and peer / seconds < ATTENTION_BAR:
                missed.append(f"attention {case}: {peer / seconds:.2f}×, bar {ATTENTION_BAR:.2f}×")
    if encodle:
        lines, below = corpus(encodle)
        parts += lines
        missed += below
    parts.append("Below their bars: " + ("; ".join(missed) or "none") + ".")
    gpu = torch.cuda.get_device_name().removeprefix("NVIDIA ").split()[0].lower()
    parts.append(measured_with({"GPU": torch.cuda.get_device_name(), "torch": torch.__version__}))
    Results(gpu).write("\n\n".join(parts))


if __name__ == "__main__":
    main()

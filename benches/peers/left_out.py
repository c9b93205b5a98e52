"""Compares models of which one token of a text is read, corpora with repeated and with long texts,
and beam search, with an earlier version of this project, sentence-transformers, ONNX Runtime,
OpenVINO and transformers.

    pip install -r benches/peers/requirements.txt
    python benches/peers/left_out.py --baseline FOLDER [--part PART...] [--rounds N] [--only-print]

FOLDER has the programs `peers` and `encodle` of the earlier version.

- `cross-encoder`: 100 pairs of 60 to 200 tokens; 6 and 12 layers of MiniLM's size.
- `cls`: an embedder of BERT-base's size that reads the first token, 64 texts of 7 to 84 tokens.
- `repeated`: `encodle embed` of 100,000 lines by all-MiniLM-L6-v2, of which a third are repeated, in
  random order.
- `long`: `encodle embed` of 2,000 texts of 5,000 words by all-MiniLM-L6-v2, which reads 256 tokens.
- `generation`: an encoder-decoder of two BERT-bases generates 64 tokens for each of 8 sequences of 64
  tokens, by beam search with 4 beams.

The weights of all models but all-MiniLM-L6-v2 are random. If the results of the versions differ in a
precision, a line on standard error names this precision. The tables are printed and appended to the
file of this machine and month in benches/results/.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from cases import SEED
from processes import Worker, alone
from results import ROOT, Results, facts, measured_with, table, this_cpu
from run import build, positive
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    GenerationConfig,
)

THREADS = 2
MINILM = ROOT / "weights/all-MiniLM-L6-v2"
PEER_BATCH = 32


def words() -> list[str]:
    """Words of all-MiniLM-L6-v2's vocabulary that are one token each."""
    vocabulary = json.loads((MINILM / "tokenizer.json").read_text())["model"]["vocab"]
    return [word for word in vocabulary if word.isascii() and word.isalpha() and len(word) > 2]


def texts(counts: np.ndarray, random: np.random.Generator) -> list[str]:
    """A text of random words for each number of words."""
    known = words()
    return [" ".join(random.choice(known, count)) for count in counts]


def save(folder: Path, model: torch.nn.Module) -> None:
    model.eval().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MINILM / name, folder / name)


def in_turns(calls: dict, rounds: int) -> dict[str, list[float]]:
    """The seconds of each call in each round, after a round that warms up."""
    found = {name: [] for name in calls}
    for round in range(rounds + 1):
        for name, call in list(calls.items())[:: -1 if round % 2 else 1]:
            start = time.perf_counter()
            call()
            if round > 0:
                found[name].append(time.perf_counter() - start)
    return found


def rows(found: dict[str, list[float]], of: dict[str, str], peaks: dict[str, float] = {}) -> list:
    """A row per system: its time, and its time divided by that of `of[system]`."""
    ratio = lambda name: statistics.median(a / b for a, b in zip(found[name], found[of[name]]))
    return [
        [name, f"{1e3 * statistics.median(times):,.0f} ms", f"{ratio(name):.2f}×",
         *([f"{peaks[name]:,.0f} MB"] if peaks else [])]
        for name, times in found.items()
    ]  # fmt: skip


def versions(programs: dict[str, Path], logs: Path, dtypes: tuple[str, ...]) -> dict[str, Worker]:
    return {
        f"{name}, {dtype}": Worker(f"ours-{dtype}", THREADS, folder / "peers", logs)
        for dtype in dtypes
        for name, folder in programs.items()
    }


def report_differences(workers: dict[str, Worker], case: str) -> None:
    for dtype in {name.rsplit(", ", 1)[1] for name in workers}:
        outputs = [worker.output(case) for name, worker in workers.items() if name.endswith(dtype)]
        if not all(np.array_equal(outputs[0], other) for other in outputs):
            print(f"{dtype}: the results of the versions differ", file=sys.stderr)


def padded_batches(tokenizer, pairs: list) -> list[dict[str, np.ndarray]]:
    order = sorted(range(len(pairs)), key=lambda i: len(pairs[i][1]), reverse=True)
    parts = [order[i : i + PEER_BATCH] for i in range(0, len(order), PEER_BATCH)]
    encode = lambda part: tokenizer([pairs[i] for i in part], padding=True, return_tensors="np")
    return [dict(encode(part)) for part in parts]


def exported(folder: Path) -> dict:
    """The scores of pairs by ONNX Runtime and OpenVINO, tokenization and padding included."""
    import onnxruntime
    import openvino
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = BertForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
    example = tokenizer([("a", "b"), ("a b", "c")], padding=True, return_tensors="pt")
    names = ["input_ids", "attention_mask", "token_type_ids"]
    path = folder / "model.onnx"
    torch.onnx.export(
        model, tuple(example[name] for name in names), str(path), input_names=names,
        output_names=["logits"], dynamo=False, opset_version=17,
        dynamic_axes={name: {0: "batch", 1: "tokens"} for name in names},
    )  # fmt: skip
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    settings = {"INFERENCE_NUM_THREADS": THREADS, "PERFORMANCE_HINT": "LATENCY"}
    compiled = openvino.compile_model(str(path), "CPU", settings | {"INFERENCE_PRECISION_HINT": "f32"})

    def by(run):
        def call(pairs):
            return [run({name: batch[name] for name in names}) for batch in padded_batches(tokenizer, pairs)]

        return call

    return {
        "ONNX Runtime, f32": by(lambda inputs: session.run(None, inputs)[0]),
        "OpenVINO, f32": by(lambda inputs: compiled(inputs)[0]),
    }


def cross_encoder(programs: dict[str, Path], folder: Path, rounds: int, layers: int) -> str:
    from sentence_transformers import CrossEncoder

    torch.manual_seed(SEED)
    reranker = folder / "reranker"
    size = dict(hidden_size=384, intermediate_size=1536, num_hidden_layers=layers)
    config = BertConfig(**size, num_labels=1, initializer_range=0.1)
    save(reranker, BertForSequenceClassification(config))
    random = np.random.default_rng(SEED)
    query = texts(np.array([10]), random)[0]
    documents = texts(random.integers(60, 201, 100) - 13, random)
    (reranker / "rerank.json").write_text(json.dumps({"query": query, "documents": documents}))
    pairs = [(query, document) for document in documents]
    peer = CrossEncoder(str(reranker), device="cpu")
    expected = peer.predict(pairs, activation_fn=torch.nn.Identity(), show_progress_bar=False)
    workers = versions(programs, folder / "logs", ("f32", "int8"))
    case = "one request"
    for worker in workers.values():
        worker.load("rerank", folder, [case])
    report_differences(workers, case)
    run = lambda worker: lambda: worker.run(case, 0, 0)
    calls = {name: run(worker) for name, worker in workers.items()}
    calls["sentence-transformers, PyTorch, f32"] = lambda: peer.predict(pairs, show_progress_bar=False)
    calls |= {name: (lambda call=call: call(pairs)) for name, call in exported(reranker).items()}
    scores = workers["ours, f32"].output(case)[:, 0]
    by_rank = lambda values: np.argsort(-values, kind="stable")
    sigmoid = lambda x: 1 / (1 + np.exp(-x))
    difference = min(np.abs(scores - expected).max(), np.abs(scores - sigmoid(expected)).max())
    assert difference < 1e-4 and by_rank(scores)[0] == by_rank(expected)[0], difference
    found = in_turns(calls, rounds)
    for worker in workers.values():
        worker.close()
    of = {name: "ours, int8" if name.endswith("int8") else "ours, f32" for name in found}
    title = (
        f"Cross-encoder of {layers} layers of width 384, 100 pairs of 60 to 200 tokens; largest "
        f"difference from sentence-transformers, f32: {difference:.1e}"
    )
    return f"{title}\n\n{table(['system', 'time', '/ ours'], rows(found, of))}"


def cls(programs: dict[str, Path], folder: Path, rounds: int) -> str:
    torch.manual_seed(SEED)
    hf = folder / "hf"
    save(hf, BertModel(BertConfig()))
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]
    (hf / "modules.json").write_text(json.dumps(modules))
    (hf / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 768, "pooling_mode_cls_token": True}
    pooling["pooling_mode_mean_tokens"] = False
    (hf / "1_Pooling/config.json").write_text(json.dumps(pooling))
    random = np.random.default_rng(SEED)
    counts = np.clip(random.lognormal(np.log(24), 0.55, 64), 7, 84).astype(int) - 2
    (hf / "cases.json").write_text(json.dumps({"mixed": texts(counts, random)}))
    workers = versions(programs, folder / "logs", ("f32", "bf16", "int8"))
    for worker in workers.values():
        worker.load("minilm", folder, ["mixed"])
    report_differences(workers, "mixed")
    run = lambda worker: lambda: worker.run("mixed", 0, 0)
    found = in_turns({name: run(worker) for name, worker in workers.items()}, rounds)
    peaks = {name: worker.peak_rss_mb() for name, worker in workers.items()}
    for worker in workers.values():
        worker.close()
    of = {name: "ours, " + name.rsplit(", ", 1)[1] for name in found}
    title = "Embedder of BERT-base's size that reads the first token, 64 texts of 7 to 84 tokens"
    return f"{title}\n\n{table(['system', 'time', '/ ours', 'peak RSS'], rows(found, of, peaks))}"


def corpus(programs: dict[str, Path], folder: Path, rounds: int, lines: list[str], options: list[str]) -> list:
    path = folder / "lines.txt"
    path.write_text("\n".join(lines) + "\n")
    found, peaks, outputs = {name: [] for name in programs}, {}, {}
    for round in range(rounds):
        for name, program in list(programs.items())[:: -1 if round % 2 else 1]:
            output = folder / f"{name.replace(' ', '-')}.npy"
            command = [program / "encodle", "embed", "--quiet", "--input", path, "--output", output]
            cost = alone([*map(str, command), *options], THREADS, folder / "stdout")
            found[name].append(cost["ms"] / 1e3)
            peaks[name] = max(peaks.get(name, 0), cost["peak_mb"])
            outputs[name] = output
    first, *others = (np.load(output) for output in outputs.values())
    assert all(np.array_equal(first, other) for other in others)
    return rows(found, dict.fromkeys(found, "ours"), peaks)


def repeated(programs: dict[str, Path], folder: Path, rounds: int) -> str:
    random = np.random.default_rng(SEED)
    count = 100_000
    distinct = texts(np.clip(random.lognormal(np.log(12), 0.5, 2 * count // 3), 3, 60).astype(int), random)
    lines = distinct + [distinct[i] for i in random.integers(0, len(distinct), count - len(distinct))]
    lines = [lines[i] for i in random.permutation(count)]
    found = corpus(programs, folder, rounds, lines, ["--dtype", "int8"])
    title = "`encodle embed` of 100,000 lines by all-MiniLM-L6-v2 in int8, a third of them repeated"
    return f"{title}\n\n{table(['system', 'time', '/ ours', 'peak RSS'], found)}"


def long(programs: dict[str, Path], folder: Path, rounds: int) -> str:
    lines = texts(np.full(2000, 5000), np.random.default_rng(SEED))
    found = []
    for dtype in ("f32", "int8"):
        for row in corpus(programs, folder, rounds, lines, ["--dtype", dtype]):
            found.append([f"{row[0]}, {dtype}", *row[1:]])
    title = "`encodle embed` of 2,000 texts of 5,000 words by all-MiniLM-L6-v2, which reads 256 tokens"
    return f"{title}\n\n{table(['system', 'time', '/ ours', 'peak RSS'], found)}"


def generation(programs: dict[str, Path], folder: Path, rounds: int) -> str:
    torch.manual_seed(SEED)
    hf, length, beams = folder / "hf", 64, 4
    # With tied weights, a random decoder repeats its last token.
    config = lambda: BertConfig(initializer_range=0.1, tie_word_embeddings=False)
    both = EncoderDecoderConfig.from_encoder_decoder_configs(config(), config())
    both.tie_word_embeddings = False
    both.decoder_start_token_id, both.pad_token_id = 101, 0
    model = EncoderDecoderModel(both).eval()
    model.save_pretrained(hf)
    (hf / "generation_config.json").unlink(missing_ok=True)
    sequences = np.random.default_rng(SEED).integers(1000, 30_000, (8, 64))
    (hf / "cases.json").write_text(json.dumps({"sequences": sequences.tolist(), "length": length}))
    workers = versions(programs, folder / "logs", ("f32", "bf16", "int8"))
    case = str(beams)
    for worker in workers.values():
        worker.load("bert2bert", folder, [case])
    report_differences(workers, case)
    settings = GenerationConfig(
        num_beams=beams, max_new_tokens=length, decoder_start_token_id=101, pad_token_id=0
    )
    ids = torch.tensor(sequences)
    peer = lambda: model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    expected = peer().numpy()
    same = (workers["ours, f32"].output(case) == expected).all(1).sum()
    assert same == len(expected), f"{same} of {len(expected)} sequences are those of transformers"
    run = lambda worker: lambda: worker.run(case, 0, 0)
    found = in_turns({name: run(worker) for name, worker in workers.items()} | {"transformers, f32": peer}, rounds)
    operations = beam_search_operations(both, sequences.shape, beams, length)
    at_peak = ", ".join(
        f"{operations / statistics.median(workers[f'ours, {dtype}'].peak_rates[case]):,.1f} s in {dtype}"
        for dtype in ("f32", "bf16", "int8")
    )
    for worker in workers.values():
        worker.close()
    of = {name: "ours, " + name.rsplit(", ", 1)[1] for name in found}
    title = (
        f"Beam search with {beams} beams in an encoder-decoder of two BERT-bases, 8 sequences of 64 tokens, "
        f"{length} tokens each"
    )
    bound = (
        f"The products with weights are {operations / 1e9:,.0f} billion operations. At the peak rates "
        f"measured before the calls (medians), they take {at_peak}."
    )
    return f"{title}\n\n{table(['system', 'time', '/ ours'], rows(found, of))}\n\n{bound}"


def beam_search_operations(
    config: EncoderDecoderConfig, shape: tuple[int, int], beams: int, length: int
) -> int:
    """The multiplications and additions of the products with weights: all tokens in the encoder, the
    keys and values of its output, and a token of each beam in each step but the first, which has one
    beam per sequence."""
    (sequences, tokens), decoder = shape, config.decoder
    width, layers = decoder.hidden_size, decoder.num_hidden_layers
    feed_forward = 2 * width * decoder.intermediate_size
    encoder = layers * (4 * width**2 + feed_forward)
    step = layers * (6 * width**2 + feed_forward) + width**2 + width * decoder.vocab_size
    in_encoder = sequences * tokens * (encoder + layers * 2 * width**2)
    return 2 * (in_encoder + sequences * (1 + (length - 1) * beams) * step)


PARTS = {
    "cross-encoder": lambda *args: "\n\n".join(cross_encoder(*args, layers) for layers in (6, 12)),
    "cls": cls,
    "repeated": repeated,
    "long": long,
    "generation": generation,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--baseline", type=Path, required=True, help="folder of the earlier programs")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--rounds", type=positive, default=5, help="default: 5")
    parser.add_argument("--only-print", action="store_true", help="write no file")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    programs = {"ours": build() / "release", "ours, before": options.baseline}
    sections = []
    for part in options.part:
        # The folder must exist until the workers end, because their logs are in the folder.
        with tempfile.TemporaryDirectory() as name:
            sections.append(PARTS[part](programs, Path(name), options.rounds))
            print(sections[-1], flush=True)
    text = "\n\n".join([f"Medians of {options.rounds} rounds.", *sections, measured_with(facts(THREADS))])
    if not options.only_print:
        Results(this_cpu()).write(text)


main()

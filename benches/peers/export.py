"""Creates the models that the systems load, in a folder of the cache.

    python benches/peers/export.py MODEL FOLDER [--layers L] [--artefact ARTEFACT]

An artefact is a folder in FOLDER. It is created once, under a temporary name, and renamed when it
is complete. This script runs in its own process, so that the export does not affect the measuring
process.
"""

import argparse
import inspect
import json
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

import cases
import decoder_files

MINILM = Path(__file__).parents[2] / "weights/all-MiniLM-L6-v2"
INPUTS = ["input_ids", "attention_mask", "token_type_ids"]
CALIBRATION = 128  # sequences
# The random encoders: the `model_type`, and the settings that differ from transformers' defaults.
ENCODERS: dict[str, tuple[str, dict]] = {
    "bert-base": ("bert", {}),
    "mpnet-base": ("mpnet", {"layer_norm_eps": 1e-5, "max_position_embeddings": 514}),
    "modernbert-base": ("modernbert", {}),
    "xlm-r-base": (
        "xlm-roberta",
        {"vocab_size": 250_002, "max_position_embeddings": 514, "type_vocab_size": 1}
        | {"layer_norm_eps": 1e-5},
    ),
    "deberta-v3-base": (
        "deberta-v2",
        {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
        | {"intermediate_size": 3072, "relative_attention": True, "position_buckets": 256}
        | {"norm_rel_ebd": "layer_norm", "share_att_key": True, "pos_att_type": "p2c|c2p"}
        | {"position_biased_input": False},
    ),
}


def hugging_face(model: str, layers: int | None, target: Path) -> None:
    """Writes the folder `hf`: the f32 weights, from which all other artefacts are created, and the
    inputs; for `attention` the inputs only."""
    if model == "attention":
        target.mkdir()
        for s in [cases.ATTENTION_WARM_UP, *cases.ATTENTION_LENGTHS]:
            save_file(cases.attention(s), target / f"{s}.safetensors")
        return
    if model in decoder_files.DECODERS:
        decoder_files.write_embedder(model, target, layers)
        return
    if model == "minilm":
        shutil.copytree(MINILM, target)
        # modules.json names this folder, and git does not store empty folders.
        (target / "2_Normalize").mkdir(exist_ok=True)
        tensors = {k: v.astype(np.float32) for k, v in weights(MINILM).items()}
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        inputs: dict[str, list] = dict(cases.embeddings())
    else:
        random_encoder(model, target, layers)
        inputs = dict(cases.hidden_states())
    (target / "cases.json").write_text(json.dumps(inputs))


def weights(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


def random_encoder(model: str, target: Path, layers: int | None) -> None:
    """An encoder with random weights, without the pooler, which the peers do not compute. Biases and
    parameters of LayerNorm are random too, so that a system that omits one of them gives another
    output."""
    import torch
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(cases.SEED)
    model_type, settings = ENCODERS[model]
    config = AutoConfig.for_model(model_type, **settings)
    config.num_hidden_layers = layers or config.num_hidden_layers
    if model == "bert-base":
        config.position_embedding_type = "absolute"  # required by CTranslate2's converter
    encoder = AutoModel.from_config(config)
    if hasattr(encoder, "pooler"):
        encoder.pooler = None
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            if name.endswith("bias") or "norm" in name.lower():
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
    encoder.save_pretrained(target)
    if model == "bert-base":  # CTranslate2's converter reads the vocabulary
        for file in MINILM.glob("*token*"):
            shutil.copy(file, target)


def torch_model(folder: Path, attention: str, dtype: str = "float32"):
    """The model without its pooler. Uses eager attention if `attention` is sdpa and the class of the
    model does not support it."""
    from transformers import AutoConfig, AutoModel
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    hf = folder / "hf"
    model_class = MODEL_MAPPING[type(AutoConfig.from_pretrained(hf))]
    if attention == "sdpa" and not model_class._supports_sdpa:
        attention = "eager"
    model = AutoModel.from_pretrained(hf, attn_implementation=attention, dtype=dtype).eval()
    if hasattr(model, "pooler"):
        model.pooler = None
    return model


def traceable(folder: Path, attention: str):
    """The model as a module from tensors to one tensor, and an example input of two sequences."""
    import torch

    class LastHiddenState(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch_model(folder, attention)

        def forward(self, input_ids, attention_mask, token_type_ids=None):
            types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
            return self.model(input_ids, attention_mask, **types).last_hidden_state

    model = LastHiddenState().eval()
    accepts_types = "token_type_ids" in inspect.signature(model.model.forward).parameters
    ones = torch.ones(2, 8, dtype=torch.long)
    return model, (ones, ones, torch.zeros_like(ones))[: 2 + accepts_types]


def onnx(folder: Path, target: Path) -> None:
    """The traced graph with eager attention, whose operators the optimiser can fuse."""
    import torch

    model, example = traceable(folder, "eager")
    names = INPUTS[: len(example)]
    target.mkdir()
    torch.onnx.export(
        model,
        example,
        str(target / "model.onnx"),  # a string: only then may the weights exceed 2 GB
        input_names=names,
        output_names=["last_hidden_state"],
        dynamic_axes={name: {0: "B", 1: "T"} for name in [*names, "last_hidden_state"]},
        dynamo=False,
    )


def onnx_optimized(folder: Path, target: Path) -> None:
    """The graph with fused operators for attention, GELU, layer normalisation and embeddings."""
    from onnxruntime.transformers import optimizer

    config = json.loads((folder / "hf/config.json").read_text())
    model = optimizer.optimize_model(
        str(folder / "onnx/model.onnx"),
        model_type="bert",
        num_heads=config["num_attention_heads"],
        hidden_size=config["hidden_size"],
        opt_level=2,
    )
    fused = model.get_fused_operator_statistics()
    assert fused["Attention"] == config["num_hidden_layers"], fused
    target.mkdir()
    model.save_model_to_file(str(target / "model.onnx"))


def onnx_int8(folder: Path, target: Path) -> None:
    """Dynamic quantisation: weights per channel in advance, activations at run time.

    Starts from the graph without fusion, in which more operators can be quantised.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    target.mkdir()
    quantize_dynamic(
        folder / "onnx/model.onnx",
        target / "model.onnx",
        weight_type=QuantType.QInt8,
        per_channel=True,
        # A file of ONNX has at most 2 GB.
        use_external_data_format=len(list((folder / "onnx").iterdir())) > 1,
    )


def openvino(folder: Path, target: Path) -> None:
    import openvino as ov

    model, example = traceable(folder, "sdpa")
    converted = ov.convert_model(model, example_input=dict(zip(INPUTS, example)))
    ov.save_model(converted, target / "model.xml", compress_to_fp16=False)


def openvino_int8(folder: Path, target: Path) -> None:
    """Post-training quantisation, calibrated on other sequences than the timed ones."""
    import nncf
    import openvino as ov

    def inputs(sequence: list[int]) -> dict[str, np.ndarray]:
        ids, mask = cases.padded([sequence])
        return dict(zip(INPUTS, [ids, mask, np.zeros_like(ids)]))

    quantized = nncf.quantize(
        ov.Core().read_model(folder / "openvino/model.xml"),
        nncf.Dataset(calibration(folder), inputs),
        model_type=nncf.ModelType.TRANSFORMER,
        subset_size=CALIBRATION,
    )
    ov.save_model(quantized, target / "model.xml", compress_to_fp16=False)


def openvino_weights_int8(folder: Path, target: Path) -> None:
    """Weights in int8 per output channel, as optimum-intel compresses language models. OpenVINO
    quantises the activations at run time if the processor multiplies int8."""
    import nncf
    import openvino as ov

    model = ov.Core().read_model(folder / "openvino/model.xml")
    compressed = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM)
    ov.save_model(compressed, target / "model.xml", compress_to_fp16=False)


def calibration(folder: Path) -> list[list[int]]:
    """Token ids of sentences that the case of 1,000 sentences does not contain, or random ids for random
    weights."""
    from tokenizers import Tokenizer

    inputs = json.loads((folder / "hf/cases.json").read_text())
    largest = f"{max(cases.SENTENCE_COUNTS)} sentences"
    if largest not in inputs:
        return cases.of_lengths(list(range(8, 8 + CALIBRATION)))
    tokenizer = Tokenizer.from_file(str(folder / "hf/tokenizer.json"))
    tokenizer.no_padding()
    return [e.ids for e in tokenizer.encode_batch(inputs[largest][-CALIBRATION:])]


def ctranslate2(folder: Path, target: Path) -> None:
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(str(folder / "hf")).convert(str(target))


# Ordered so that each artefact follows those that it is created from.
ARTEFACTS: dict[str, Callable[[Path, Path], None]] = {
    "onnx": onnx,
    "onnx-optimized": onnx_optimized,
    "onnx-int8": onnx_int8,
    "openvino": openvino,
    "openvino-int8": openvino_int8,
    "openvino-weights-int8": openvino_weights_int8,
    "ctranslate2": ctranslate2,
    "gguf-f16": partial(decoder_files.gguf, "F16"),
    "gguf-q8_0": partial(decoder_files.gguf, "Q8_0"),
    "reranker": decoder_files.reranker,
}
NEEDS = {
    "onnx-optimized": ["onnx"],
    "onnx-int8": ["onnx"],
    "openvino-int8": ["openvino"],
    "openvino-weights-int8": ["openvino"],
}


def once(target: Path, make: Callable[[Path], None]) -> None:
    if target.exists():
        return
    print(f"creating {target}", flush=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as unfinished:
        made = Path(unfinished) / target.name
        make(made)
        made.rename(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=[*ENCODERS, *decoder_files.DECODERS, "minilm", "attention"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--artefact", choices=ARTEFACTS)
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    once(folder / "hf", partial(hugging_face, arguments.model, arguments.layers))
    wanted = [arguments.artefact, *NEEDS.get(arguments.artefact, [])]
    for name in ARTEFACTS:
        if name in wanted:
            once(folder / name, partial(ARTEFACTS[name], folder))


if __name__ == "__main__":
    main()

"""The systems. Each class loads a model and computes hidden states, sentence embeddings or one
attention, with the settings that the documentation of the system recommends.

These settings are: number of threads, precision, no gradients, fused attention.
`prepare` converts inputs before the timed call and `numpy` converts outputs after it. For
embeddings of sentences the conversions are timed too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import export


class Torch:
    """transformers' model with PyTorch's fused attention, or eager attention if the model has none."""

    def __init__(self, folder: Path, threads: int, variant: str = "") -> None:
        import torch

        torch.set_num_threads(threads)
        self.torch = torch
        dtype = "bfloat16" if variant == "bf16" else "float32"
        self.model = export.torch_model(folder, "sdpa", dtype)
        if variant == "int8":
            linears, dtype = {torch.nn.Linear}, torch.qint8
            self.model = torch.ao.quantization.quantize_dynamic(self.model, linears, dtype)
        if variant == "compile":
            # One graph per shape, with packed weights: the fastest setting.
            torch._inductor.config.freezing = True
            self.model = torch.compile(self.model, dynamic=False)

    def prepare(self, ids: np.ndarray, mask: np.ndarray) -> dict[str, Any]:
        tensors = {"input_ids": self.torch.from_numpy(ids)}
        if not mask.all():  # without a mask PyTorch computes less
            tensors["attention_mask"] = self.torch.from_numpy(mask)
        return tensors

    def forward(self, inputs: dict[str, Any]) -> Any:
        with self.torch.inference_mode():
            return self.model(**inputs).last_hidden_state

    def numpy(self, output: Any) -> np.ndarray:
        return output.float().numpy()


class OnnxRuntime:
    """ONNX Runtime's session with all its own optimisations."""

    def __init__(self, folder: Path, threads: int, artefact: str) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        path = folder / artefact / "model.onnx"
        self.session = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])
        self.names = {node.name for node in self.session.get_inputs()}

    def prepare(self, ids: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
        inputs = dict(zip(export.INPUTS, [ids, mask, np.zeros_like(ids)]))
        return {name: x for name, x in inputs.items() if name in self.names}

    def forward(self, inputs: dict[str, np.ndarray]) -> np.ndarray:
        return self.session.run(None, inputs)[0]

    def numpy(self, output: np.ndarray) -> np.ndarray:
        return output


class OpenVino:
    """OpenVINO's CPU plugin with the latency hint; operators that are not int8 use `precision`."""

    def __init__(self, folder: Path, threads: int, artefact: str, precision: str) -> None:
        import openvino

        properties = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": precision,
        }
        core = openvino.Core()
        path = folder / artefact / "model.xml"
        model = core.compile_model(path, "CPU", properties)
        self.names = {node.get_any_name() for node in model.inputs}
        self.request = model.create_infer_request()

    def prepare(self, ids: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
        inputs = dict(zip(export.INPUTS, [ids, mask, np.zeros_like(ids)]))
        return {name: x for name, x in inputs.items() if name in self.names}

    def forward(self, inputs: dict[str, np.ndarray]) -> np.ndarray:
        return self.request.infer(inputs, share_inputs=True)[0]

    def numpy(self, output: np.ndarray) -> np.ndarray:
        return output


class CTranslate2:
    """CTranslate2's Encoder, which skips padding, since it gets the lengths."""

    def __init__(self, folder: Path, threads: int, compute_type: str) -> None:
        import ctranslate2

        self.array = ctranslate2.StorageView.from_array
        self.encoder = ctranslate2.Encoder(
            str(folder / "ctranslate2"), compute_type=compute_type, intra_threads=threads
        )

    def prepare(self, ids: np.ndarray, mask: np.ndarray) -> tuple[Any, Any]:
        return self.array(ids.astype(np.int32)), self.array(mask.sum(1, dtype=np.int32))

    def forward(self, inputs: tuple[Any, Any]) -> Any:
        ids, lengths = inputs
        return self.encoder.forward_batch(ids, lengths).last_hidden_state

    def numpy(self, output: Any) -> np.ndarray:
        return np.array(output)


class SentenceTransformers:
    """sentence-transformers, the reference for embeddings of these models."""

    def __init__(self, folder: Path, threads: int) -> None:
        import torch
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(threads)
        self.model = SentenceTransformer(str(folder / "hf"), device="cpu")

    def embed(self, texts: list[str]) -> np.ndarray:
        return self.model.encode(texts, batch_size=32)


class LlamaCpp:
    """llama.cpp by llama-cpp-python, with the pooling that the file of the model names."""

    def __init__(self, folder: Path, threads: int, artefact: str) -> None:
        from llama_cpp import Llama

        path = str(folder / artefact / "model.gguf")
        # One batch holds all texts of a case.
        settings = {"n_ctx": 2048, "n_batch": 2048, "n_ubatch": 512, "embedding": True}
        threads = {"n_threads": threads, "n_threads_batch": threads}
        self.model = Llama(path, **settings, **threads, verbose=False)

    def embed(self, texts: list[str]) -> np.ndarray:
        return np.array(self.model.embed(texts), np.float32)


class TorchAttention:
    """`torch.nn.functional.scaled_dot_product_attention` alone."""

    def __init__(self, folder: Path, threads: int, dtype: str = "float32") -> None:
        import torch

        torch.set_num_threads(threads)
        self.torch, self.dtype = torch, getattr(torch, dtype)

    def prepare(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> list[Any]:
        return [self.torch.from_numpy(x).to(self.dtype) for x in (q, k, v)]

    def forward(self, qkv: list[Any]) -> Any:
        with self.torch.inference_mode():
            return self.torch.nn.functional.scaled_dot_product_attention(*qkv)

    def numpy(self, output: Any) -> np.ndarray:
        return output.float().numpy()


@dataclass(frozen=True)
class System:
    """The name of a system in the tables, and its requirements."""

    name: str
    dtype: str
    packages: tuple[str, ...] = ()
    artefact: str | None = None
    load: Callable[..., Any] | None = None  # None for systems that ours.rs runs
    options: tuple[str, ...] = ()


# Packages that are needed for weights, inputs and reference outputs, whatever systems are chosen.
ALWAYS = (
    "numpy",
    "safetensors",
    "sentence-transformers",
    "tokenizers",
    "torch",
    "transformers",
)
ONNX = ("onnx", "onnxruntime")
LLAMA = ("gguf", "llama-cpp-python")
SYSTEMS = {
    "ours-f32": System("ours", "f32"),
    "ours-bf16": System("ours", "bf16"),
    "ours-int8": System("ours", "int8"),
    "ours-packed-f32": System("ours, packed weights on disk", "f32"),
    "ours-packed-bf16": System("ours, packed weights on disk", "bf16"),
    "ours-packed-int8": System("ours, packed weights on disk", "int8"),
    "candle-f32": System("candle-transformers", "f32"),
    "torch-f32": System("PyTorch", "f32", (), None, Torch),
    "torch-compile-f32": System("PyTorch, compiled", "f32", (), None, Torch, ("compile",)),
    "torch-bf16": System("PyTorch", "bf16", (), None, Torch, ("bf16",)),
    "torch-int8": System("PyTorch, dynamic", "int8", (), None, Torch, ("int8",)),
    "torch-attention-f32": System("PyTorch", "f32", (), None, TorchAttention),
    "torch-attention-bf16": System("PyTorch", "bf16", (), None, TorchAttention, ("bfloat16",)),
    "sentence-transformers-f32": System(
        "sentence-transformers", "f32", (), None, SentenceTransformers
    ),
    "ort-f32": System("ONNX Runtime", "f32", ONNX, "onnx", OnnxRuntime, ("onnx",)),
    "ort-optimized-f32": System(
        "ONNX Runtime, optimised", "f32", ONNX, "onnx-optimized", OnnxRuntime, ("onnx-optimized",)
    ),
    "ort-int8": System(
        "ONNX Runtime, dynamic", "int8", ONNX, "onnx-int8", OnnxRuntime, ("onnx-int8",)
    ),
    "openvino-f32": System(
        "OpenVINO", "f32", ("openvino",), "openvino", OpenVino, ("openvino", "f32")
    ),
    "openvino-bf16": System(
        "OpenVINO", "bf16", ("openvino",), "openvino", OpenVino, ("openvino", "bf16")
    ),
    "openvino-int8": System(
        "OpenVINO, calibrated",
        "int8",
        ("openvino", "nncf"),
        "openvino-int8",
        OpenVino,
        ("openvino-int8", "bf16"),
    ),
    "openvino-weights-int8": System(
        "OpenVINO, compressed weights",
        "int8",
        ("openvino", "nncf"),
        "openvino-weights-int8",
        OpenVino,
        ("openvino-weights-int8", "bf16"),
    ),
    "llama-f16": System("llama.cpp", "f16", LLAMA, "gguf-f16", LlamaCpp, ("gguf-f16",)),
    "llama-q8_0": System("llama.cpp, Q8_0", "int8", LLAMA, "gguf-q8_0", LlamaCpp, ("gguf-q8_0",)),
    "ctranslate2-f32": System(
        "CTranslate2", "f32", ("ctranslate2",), "ctranslate2", CTranslate2, ("float32",)
    ),
    "ctranslate2-int8": System(
        "CTranslate2", "int8", ("ctranslate2",), "ctranslate2", CTranslate2, ("int8",)
    ),
}

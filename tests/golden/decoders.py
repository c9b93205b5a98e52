"""Creates the golden files in decoders/: small random checkpoints of decoder architectures (and of
EuroBERT, which shares their layers), with the results of Hugging Face transformers. Run from the
repository's root:

    pip install -r tests/golden/requirements.txt
    python tests/golden/decoders.py [NAME ...]

decoders.json has the models. decoder_texts.py creates their tokenizers, and folders of
sentence-transformers.
"""

import contextlib
import copy
import importlib
import json
import shutil
import sys

import torch
from architectures import alone
from generate import HERE, SEED, save, widen
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.utils import logging

FOLDER = HERE / "decoders"

# Standard deviation of the weights of all types except STDS: so small that the results in f32 are
# accurate to 1e-6 with most seeds.
STD = 0.3
STDS = {"gemma3_text": 0.25, "modernbert-decoder": 0.2}
# The settings that all models share, unless DECODERS overrides them. The base of the rotary
# embedding is so small that every frequency turns the vectors visibly within a sequence.
SIZES = dict(
    vocab_size=41, hidden_size=12, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=2, intermediate_size=20, max_position_embeddings=40, pad_token_id=3,
    bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
    rope_parameters={"rope_type": "default", "rope_theta": 500.0},
)  # fmt: skip
LAYER_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 900.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 60.0},
}
# The settings in which all models of a type differ from SIZES.
OF_TYPE = {
    "qwen3": {"head_dim": 10},
    "mistral": {"rms_norm_eps": 1e-5},
    "llama": {"rms_norm_eps": 1e-5},
    "gemma3_text": {
        "head_dim": 10, "query_pre_attn_scalar": 17, "tie_word_embeddings": True,
        "rope_parameters": LAYER_ROPE,
    },
    "modernbert-decoder": {
        "num_attention_heads": 3, "tie_word_embeddings": True, "cls_token_id": 1,
        "sep_token_id": 2, "rope_parameters": LAYER_ROPE,
    },
}  # fmt: skip
# The models: the architecture's name, transformers' model_type, the heads, whether config.json has
# the keys of transformers 4, and the settings in which the model differs from SIZES and OF_TYPE.
DECODERS = json.loads((HERE / "decoders.json").read_text())
HEADS = {
    "causal_lm": (AutoModelForCausalLM, {}),
    "masked_lm": (AutoModelForMaskedLM, {}),
    "sequence": (AutoModelForSequenceClassification, {"num_labels": 4}),
    "sequence_mean": (
        AutoModelForSequenceClassification, {"num_labels": 4, "classifier_pooling": "mean"}
    ),
    "sequence_bos": (
        AutoModelForSequenceClassification, {"num_labels": 4, "classifier_pooling": "bos"}
    ),
    "token": (AutoModelForTokenClassification, {"num_labels": 5}),
}  # fmt: skip
LENGTHS = [23, 9, 4, 1]


def inputs(config):
    """Sequences with padding on the right. Some visible tokens have the padding id: token 5 of
    sequence 0, and the last token of sequence 1, which classifiers of sequences therefore skip."""
    b, t = len(LENGTHS), max(LENGTHS)
    ids = torch.randint(4, config.vocab_size, (b, t))
    mask = (torch.arange(t) < torch.tensor(LENGTHS)[:, None]).long()
    ids[mask == 0] = config.pad_token_id
    ids[0, 5], ids[1, LENGTHS[1] - 1] = config.pad_token_id, config.pad_token_id
    return {"input_ids": ids, "attention_mask": mask}


def settings_of(name):
    """The settings of a model, without those that its class does not have."""
    decoder = DECODERS[name]
    settings = SIZES | OF_TYPE.get(decoder["model_type"], {}) | decoder["config"]
    if decoder["model_type"] == "modernbert-decoder":
        del settings["num_key_value_heads"]
    return copy.deepcopy(settings)


def create(name, model_class, **more):
    """A model with random weights."""
    settings = settings_of(name) | more
    if "layer_types" in settings:  # a model with a head has fewer layers
        settings["layer_types"] = settings["layer_types"][: settings["num_hidden_layers"]]
    return random_model(model_class, DECODERS[name]["model_type"], settings)


def random_model(model_class, model_type, settings):
    model = model_class.from_config(AutoConfig.for_model(model_type, **settings))
    widen(model, STDS.get(model_type, STD))
    for key, parameter in model.named_parameters():
        if model_type == "gemma3_text" and key.endswith("norm.weight"):
            parameter -= 1  # the normalisations multiply by 1 + weight
    return model.to(getattr(torch, settings.get("dtype", "float32")))


def older(config, name):
    """The keys of transformers 4."""
    rope, settings = config.pop("rope_parameters"), settings_of(name)
    config.pop("layer_types", None)
    for key in ("head_dim", "num_key_value_heads"):
        if settings.get(key) is None:
            config.pop(key, None)
    if config["model_type"] == "modernbert-decoder":
        return config | {
            "global_attn_every_n_layers": 3,
            "global_rope_theta": rope["full_attention"]["rope_theta"],
            "local_rope_theta": rope["sliding_attention"]["rope_theta"],
        }
    if config["model_type"] == "gemma3_text":
        config["sliding_window_pattern"] = settings["sliding_window_pattern"]
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    config["rope_theta"] = rope.pop("rope_theta")
    if name == "qwen3_yarn_mscale":
        del rope["original_max_position_embeddings"]
    if name == "qwen2_window":
        rope["type"] = rope.pop("rope_type")
    return config | {"rope_scaling": None if rope == {"rope_type": "default"} else rope}


def write(name, kind, model):
    """Saves a checkpoint."""
    folder = FOLDER / name / kind
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if DECODERS[name]["is_older"]:
        config = older(config, name)
    path.write_text(json.dumps(config, indent=2) + "\n")
    return folder


def visible(tensors, mask):
    """The tensors with zeros at padding, except those of whole sequences."""
    return {key: x * mask[..., None] if x.ndim == 3 else x for key, x in tensors.items()}


def results(model, tensors):
    """The logits of a model with a head, or all hidden states of a model without one. Dynamic
    frequencies follow from the longest sequence of a batch, padding included: such models get each
    sequence alone."""
    has_head = "For" in type(model).__name__
    options = {"output_hidden_states": not has_head}
    is_dynamic = "dynamic" in str(model.config.rope_parameters)
    out = alone(model, tensors, **options) if is_dynamic else model(**tensors, **options)
    if has_head:
        found = {"logits": out.logits}
    else:
        found = {f"hidden_states.{i}": x for i, x in enumerate(out.hidden_states)}
    return visible(found, tensors["attention_mask"])


class DoubleTorch:
    """The module torch with f64 in place of f32."""

    float32 = float = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@contextlib.contextmanager
def double_precision(model):
    """Computes in f64 where the model's code says f32."""
    module, single = importlib.import_module(type(model).__module__), torch.Tensor.float
    module.torch, torch.Tensor.float = DoubleTorch(), torch.Tensor.double
    model.double()
    try:
        yield
    finally:
        module.torch, torch.Tensor.float = torch, single


def difference(found, expected):
    """The largest difference of the tensors, relative to the largest value of each."""
    return max(
        ((found[key].double() - x.double()).abs().max() / x.abs().max()).item()
        for key, x in expected.items()
    )


def expected(folder, model_class):
    """The results of the checkpoint in a folder, in f32, and their errors: the differences from
    PyTorch's attention, with and without padding (then it gets no mask), and from f64."""

    def load(attention):
        model = model_class.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=attention
        )
        model.config.use_cache = False
        return model.eval()

    model, fused = load("eager"), load("sdpa")
    tensors = inputs(model.config)
    found = results(model, tensors)
    first = [{key: x[:1] for key, x in group.items()} for group in (tensors, found)]
    errors = [difference(results(fused, tensors), found)]
    errors += [difference(results(fused, first[0]), first[1])]
    with double_precision(model):
        errors += [difference(found, results(model, tensors))]
    return tensors | found, errors


def checkpoint(name, kind, model_class, **more):
    """Writes a checkpoint and its results, with the first seed with which all errors are below
    1e-6. The tests can then allow 1e-5."""
    for seed in range(SEED + 60, SEED + 80):
        torch.manual_seed(seed)
        folder = write(name, kind, create(name, model_class, **more))
        tensors, errors = expected(folder, model_class)
        if max(errors) < 1e-6:
            save(folder / "expected.safetensors", tensors)
            return
    sys.exit(f"{folder}: no seed gives accurate results: expected errors below 1e-6, got {errors}")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    logging.disable_progress_bar()
    names = sys.argv[1:] or list(DECODERS)
    if unknown := set(names) - set(DECODERS):
        sys.exit(f"unknown names {sorted(unknown)}: expected some of {list(DECODERS)}")
    for name in names:
        checkpoint(name, "encoder", AutoModel)
        for head in DECODERS[name]["heads"]:
            model_class, more = HEADS[head]
            checkpoint(name, head, model_class, num_hidden_layers=1, **more)

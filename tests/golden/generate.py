"""Makes the golden fixtures: what PyTorch, Hugging Face transformers and sentence-transformers
compute, for the tests to compare with. Run from the repository's root:

    pip install -r tests/golden/requirements.txt
    python tests/golden/generate.py

Each fixture carries the library versions and the seed in its metadata. All arithmetic is f32.
"""

import json
from pathlib import Path

import sentence_transformers
import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, BertModel
from transformers.activations import ACT2FN

HERE = Path(__file__).parent
MINILM = HERE.parent.parent / "weights/all-MiniLM-L6-v2"
SEED = 20260


def save(path, tensors, **metadata):
    path.parent.mkdir(exist_ok=True)
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    versions = {m.__name__: m.__version__ for m in (torch, transformers, sentence_transformers)}
    save_file(tensors, path, metadata={"seed": str(SEED), **versions, **metadata})
    print(path.relative_to(HERE), path.stat().st_size)


def attention():
    """torch.nn.MultiheadAttention with key padding, and the bare function without a mask."""
    b, t, s, e, h = 7, 13, 15, 32, 4
    torch.manual_seed(SEED)
    module = nn.MultiheadAttention(e, h, batch_first=True).eval()
    for bias in (module.in_proj_bias, module.out_proj.bias):
        nn.init.normal_(bias, std=0.1)
    query, key, value = torch.randn(b, t, e), torch.randn(b, s, e), torch.randn(b, s, e)
    valid_lens = torch.tensor([15, 1, 7, 14, 3, 8, 15])
    padding = (torch.arange(s) < valid_lens[:, None]).to(torch.uint8)  # 1 = may attend
    hidden = padding == 0  # PyTorch's module says the opposite
    output, weights = module(
        query, key, value, key_padding_mask=hidden, average_attn_weights=False
    )
    q, k, v = torch.randn(b, h, t, 8), torch.randn(b, h, s, 8), torch.randn(b, h, s, 8)
    names = ("query", "key", "value")
    tensors = {f"{n}.weight": w for n, w in zip(names, module.in_proj_weight.chunk(3))}
    tensors |= {f"{n}.bias": w for n, w in zip(names, module.in_proj_bias.chunk(3))}
    tensors |= {"output.weight": module.out_proj.weight, "output.bias": module.out_proj.bias}
    tensors |= {"in.query": query, "in.key": key, "in.value": value, "in.padding": padding}
    tensors |= {"in.valid_lens": valid_lens, "out.output": output, "out.weights": weights}
    tensors |= {"sdpa.q": q, "sdpa.k": k, "sdpa.v": v}
    tensors |= {"sdpa.out": F.scaled_dot_product_attention(q, k, v)}
    save(HERE / "attention.safetensors", tensors)


def activations():
    x = torch.cat([torch.linspace(-20, 20, 401), torch.linspace(-1, 1, 201)])
    names = ["gelu", "gelu_python", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "silu"]
    names += ["swish", "tanh", "quick_gelu", "mish"]
    save(HERE / "activations.safetensors", {"x": x} | {name: ACT2FN[name](x) for name in names})


def tiny_bert(activation, prefix="", gamma_beta=False):
    """A BertModel with padding on both sides: every hidden state, every attention, the pooler."""
    config = BertConfig(
        vocab_size=101, hidden_size=24, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=40, max_position_embeddings=19, type_vocab_size=2,
        hidden_act=activation, layer_norm_eps=1e-6, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(SEED)
    model = BertModel(config).eval()
    for name, parameter in model.named_parameters():
        # wider than at birth, so that attention is far from uniform
        nn.init.normal_(parameter, mean=float("LayerNorm.weight" in name), std=0.3)
    b, t = 5, 17
    input_ids = torch.randint(0, 101, (b, t))
    token_type_ids = torch.randint(0, 2, (b, t))
    mask = torch.ones(b, t, dtype=torch.int64)
    for row, (first, last) in enumerate([(0, 17), (0, 1), (0, 9), (4, 17), (3, 12)]):
        mask[row, :first], mask[row, last:] = 0, 0
    out = model(
        input_ids, attention_mask=mask, token_type_ids=token_type_ids,
        output_hidden_states=True, output_attentions=True,
    )  # fmt: skip
    tensors = {"input_ids": input_ids, "token_type_ids": token_type_ids, "mask": mask}
    tensors |= {f"hidden_states.{i}": x for i, x in enumerate(out.hidden_states)}
    tensors |= {f"attentions.{i}": x for i, x in enumerate(out.attentions)}
    tensors |= {"pooler_output": out.pooler_output}
    folder = HERE / f"bert_{activation}"
    save(folder / "expected.safetensors", tensors)

    state = {f"{prefix}{name}": x for name, x in model.state_dict().items()}
    if gamma_beta:
        era = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        for new, old in era.items():
            state = {name.replace(new, old): x for name, x in state.items()}
    save(folder / "model.safetensors", state)
    (folder / "config.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n")


def sentences():
    """The embedded model on text: stage by stage for three sentences, and the end for all."""
    texts = (HERE / "sentences.txt").read_text().splitlines()
    edge_cases = json.loads((HERE / "edge_cases.json").read_text())
    pipeline = sentence_transformers.SentenceTransformer(
        str(MINILM), device="cpu", model_kwargs={"torch_dtype": "float32"}
    )
    ids = [pipeline.tokenizer(text, truncation=True)["input_ids"] for text in texts]
    tensors = {f"input_ids.{i}": torch.tensor(x) for i, x in enumerate(ids)}
    model = BertModel.from_pretrained(
        MINILM, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for i in range(3):
        out = model(torch.tensor([ids[i]]), output_hidden_states=True, output_attentions=True)
        tensors |= {f"embeddings.{i}": out.hidden_states[0]}
        tensors |= {f"layer_0_attention.{i}": out.attentions[0]}
        tensors |= {f"layer_0_output.{i}": out.hidden_states[1]}
        tensors |= {f"last_layer.{i}": out.hidden_states[-1]}
    tensors |= {"pooled": pipeline.encode(texts, convert_to_tensor=True)}
    tensors |= {"edge_cases": pipeline.encode(edge_cases, convert_to_tensor=True)}
    save(HERE / "sentences.safetensors", tensors, model=MINILM.name)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    attention()
    activations()
    tiny_bert("gelu")
    tiny_bert("relu", prefix="bert.", gamma_beta=True)
    sentences()

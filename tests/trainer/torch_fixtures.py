#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes tests/trainer/fixtures/*.grad: loss and gradients of tiny models as PyTorch and transformers
have them, on weights and tokens that both sides make from a formula. test_torch.c compares.

    torch_fixtures.py DIRECTORY

Needs torch and transformers (each file's first line says which made it). Exit: 0, or 77 if they are
missing.
"""
import sys

try:
    import torch
    import transformers
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
except ImportError as why:
    print(f"skip: {why}")
    sys.exit(77)

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
BATCH, SEQ_LEN = 2, 9


def number(tensor, element):
    """In [-0.5, 0.5), the same in test_torch.c: element of tensor number `tensor` of the table."""
    h = (element * 0x9E3779B1 + (tensor + 1) * 0x85EBCA77) & 0xFFFFFFFF
    h ^= h >> 15
    h = h * 0x2C1B3C6D & 0xFFFFFFFF
    h ^= h >> 13
    return (h >> 8) / 2**24 - 0.5


def made(tensor, shape):
    count = 1
    for size in shape:
        count *= size
    return torch.tensor([number(tensor, i) for i in range(count)]).reshape(shape)


def tokens(vocab):
    all_of = torch.tensor([int((number(1000, i) + 0.5) * vocab) for i in range(BATCH * (SEQ_LEN + 1))])
    rows = all_of.reshape(BATCH, SEQ_LEN + 1)
    targets = rows[:, 1:].clone()
    targets[0, 3] = -100  # does not count
    return rows[:, :-1], targets


def llama_table(model):
    """Our names and order; each with the parameter, and the part of it that is ours."""
    yield "model.embed_tokens.weight", model.model.embed_tokens.weight, None
    for i, layer in enumerate(model.model.layers):
        name = f"model.layers.{i}."
        yield name + "input_layernorm.weight", layer.input_layernorm.weight, None
        for which in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"{name}self_attn.{which}.weight", getattr(layer.self_attn, which).weight, None
        yield name + "post_attention_layernorm.weight", layer.post_attention_layernorm.weight, None
        for which in ("gate_proj", "up_proj", "down_proj"):
            yield f"{name}mlp.{which}.weight", getattr(layer.mlp, which).weight, None
    yield "model.norm.weight", model.model.norm.weight, None
    yield "lm_head.weight", model.lm_head.weight, None


def gpt2_table(model):
    """Its products are stored [in, out], with q, k and v in one: ours are [out, in] and apart."""
    t = model.transformer
    yield "transformer.wte.weight", t.wte.weight, None
    yield "transformer.wpe.weight", t.wpe.weight, None
    for i, layer in enumerate(t.h):
        name = f"transformer.h.{i}."
        dim = layer.ln_1.weight.shape[0]
        yield name + "ln_1.weight", layer.ln_1.weight, None
        yield name + "ln_1.bias", layer.ln_1.bias, None
        parts = [slice(k * dim, (k + 1) * dim) for k in range(3)]
        for which, part in zip("qkv", parts):
            yield f"{name}attn.{which}_proj.weight", layer.attn.c_attn.weight, part
        for which, part in zip("qkv", parts):
            yield f"{name}attn.{which}_proj.bias", layer.attn.c_attn.bias, part
        yield name + "attn.o_proj.weight", layer.attn.c_proj.weight, slice(None)
        yield name + "attn.o_proj.bias", layer.attn.c_proj.bias, None
        yield name + "ln_2.weight", layer.ln_2.weight, None
        yield name + "ln_2.bias", layer.ln_2.bias, None
        yield name + "mlp.up_proj.weight", layer.mlp.c_fc.weight, slice(None)
        yield name + "mlp.up_proj.bias", layer.mlp.c_fc.bias, None
        yield name + "mlp.down_proj.weight", layer.mlp.c_proj.weight, slice(None)
        yield name + "mlp.down_proj.bias", layer.mlp.c_proj.bias, None
    yield "transformer.ln_f.weight", t.ln_f.weight, None
    yield "transformer.ln_f.bias", t.ln_f.bias, None


def ours(tensor, part):
    """The view of a parameter or gradient that has our shape."""
    if part is None:
        return tensor
    return tensor[part] if tensor.dim() == 1 else tensor[:, part].T


def write(path, model, table, vocab):
    with torch.no_grad():
        for i, (name, parameter, part) in enumerate(table(model)):
            view = ours(parameter, part)
            # norms' weights are around 1
            is_norm = "norm" in name or name.split(".")[-2].startswith("ln_")
            view.copy_(made(i, view.shape) + (1.0 if is_norm and name.endswith("weight") else 0.0))
    inputs, targets = tokens(vocab)
    logits = model(input_ids=inputs).logits
    loss = torch.nn.functional.cross_entropy(
        logits.reshape(-1, vocab), targets.reshape(-1), ignore_index=-100, reduction="sum"
    )
    loss.backward()
    with open(path, "w", encoding="ascii") as out:
        out.write(f"# torch {torch.__version__} transformers {transformers.__version__} fp64\n")
        out.write(f"loss {loss.item():.10g}\n")
        for name, parameter, part in table(model):
            gradient = ours(parameter.grad, part).reshape(-1).tolist()
            out.write(f"{name} {len(gradient)}\n")
            for at in range(0, len(gradient), 8):
                out.write(" ".join(f"{g:.6g}" for g in gradient[at : at + 8]) + "\n")


def main():
    stretched = {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 12,
    }
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=13, hidden_size=16, intermediate_size=10, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
            rms_norm_eps=1e-5, rope_theta=100.0, rope_scaling=stretched, tie_word_embeddings=False,
            attn_implementation="eager", use_cache=False,
        )
    )
    write(sys.argv[1] + "/llama.grad", llama.double(), llama_table, 13)
    gpt2 = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=13, n_positions=11, n_embd=12, n_layer=2, n_head=3, n_inner=20,
            activation_function="gelu_new", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            layer_norm_epsilon=1e-5, attn_implementation="eager", use_cache=False,
        )
    )
    write(sys.argv[1] + "/gpt2.grad", gpt2.double(), gpt2_table, 13)


main()

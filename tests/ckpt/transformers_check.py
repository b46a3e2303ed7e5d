#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What transformers itself says of import, export and sample: models that it saved come back from us
with the same logits, bit for bit in fp32, and our greedy text is its greedy text. Small random models:
Llama (tied and untied, grouped heads, several files), GPT-2 (with and without its head's prefix, tied
and untied).

    transformers_check.py CKPT_TOOL BELAY_TRAIN

Exit: 0 passed, 1 a model differs, 77 torch or transformers is missing.
"""
import os
import subprocess
import sys
import tempfile

try:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model, LlamaConfig, LlamaForCausalLM
except ImportError as why:
    print(f"skip: {why}")
    sys.exit(77)

torch.manual_seed(7)
torch.set_num_threads(1)
TOKENS = torch.randint(0, 256, (2, 12))
STEPS = 24


def tool(*args):
    subprocess.run([sys.argv[1], *args], check=True, stdout=subprocess.DEVNULL)


def shake(model):
    """Biases and norms away from their zeros and ones."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def greedy(model):
    """What the model writes behind a line break, byte by byte."""
    tokens = [10]
    with torch.no_grad():
        while len(tokens) < STEPS:
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return bytes(tokens) + b"\n"


def sampled(path):
    return subprocess.run([sys.argv[2], "sample", "--model", path, "--temperature", "0", "--steps",
                           str(STEPS)], check=True, stdout=subprocess.PIPE).stdout


def check(name, model, head, dir, **save):
    """Saves `model`, imports and exports it, and compares with `head`, the model with its head."""
    path = os.path.join(dir, name)
    model.save_pretrained(path + ".hf", **save)
    tool("import", "--from", "hf", path + ".hf", "--out", path + ".root")
    tool("export", path + ".root", "--to", "hf", "--out", path + ".back", "--max-shard", "40k")
    back = type(head).from_pretrained(path + ".back").eval()
    same = torch.equal(logits(head), logits(back))
    text = greedy(head)
    for place in (path + ".hf", path + ".root", path + ".back"):
        same &= sampled(place) == text
    print(f"{name}: {'the same logits and text' if same else 'DIFFERENT'}, "
          f"{sum(f.endswith('.safetensors') for f in os.listdir(path + '.back'))} files")
    return same


def llama(**more):
    return shake(LlamaForCausalLM(LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=72, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, **more)))


def gpt2(**more):
    return shake(GPT2LMHeadModel(GPT2Config(
        vocab_size=256, n_embd=24, n_layer=2, n_head=3, n_positions=32, **more)))


def main():
    good = True
    with tempfile.TemporaryDirectory() as dir:
        model = llama(tie_word_embeddings=False)
        good &= check("llama", model, model, dir, max_shard_size="30KB")
        model = llama(tie_word_embeddings=True, rope_theta=500000.0)
        good &= check("llama-tied", model, model, dir)
        model = llama(rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                    "high_freq_factor": 4.0,
                                    "original_max_position_embeddings": 32})
        good &= check("llama3-rope", model, model, dir)
        model = gpt2()
        good &= check("gpt2", model, model, dir)
        bare = GPT2Model(model.config)
        bare.load_state_dict(model.transformer.state_dict())
        good &= check("gpt2-bare", bare.eval(), model, dir)
        model = gpt2(tie_word_embeddings=False, n_inner=40)
        good &= check("gpt2-untied", model, model, dir)
    return 0 if good else 1


sys.exit(main())

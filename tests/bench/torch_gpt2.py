# SPDX-License-Identifier: Apache-2.0
"""Times PyTorch's training steps of a GPT-2 on the CPU.

usage: torch_gpt2.py LAYERS DIM HEADS VOCAB THREADS STEPS [--compile]

Batches of 4 sequences of 64 random tokens, AdamW with gradients clipped at norm 1, as ./bench
trains it. Prints one JSON object: the version and the milliseconds of each step.
"""
import json
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

BATCH, SEQ_LEN, CONTEXT = 4, 64, 1024


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x):
        b, t, c = x.shape
        parts = self.qkv(self.norm1(x)).split(c, dim=2)
        q, k, v = (p.view(b, t, self.heads, c // self.heads).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Model(nn.Module):
    def __init__(self, layers, dim, heads, vocab):
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        self.positions = nn.Embedding(CONTEXT, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        for matrix in (self.tokens.weight, self.positions.weight):
            nn.init.normal_(matrix, std=0.02)

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main():
    numbers = [int(a) for a in sys.argv[1:] if a.isdigit()]
    layers, dim, heads, vocab, threads, steps = numbers
    torch.manual_seed(1)
    torch.set_num_threads(threads)
    model = Model(layers, dim, heads, vocab)
    # Of AdamW's ways the fastest here.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    run = torch.compile(model) if "--compile" in sys.argv else model
    times = []
    for _ in range(steps):
        tokens = torch.randint(vocab, (BATCH, SEQ_LEN))
        targets = torch.randint(vocab, (BATCH, SEQ_LEN))
        begun = time.monotonic()
        loss = run(tokens, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()
        times.append((time.monotonic() - begun) * 1000)
    print(json.dumps({"torch": torch.__version__, "ms": times}))


main()

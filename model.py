"""The GPT of all scripts. No DeepSpeed here, so that grad_accu_pt.py stays plain PyTorch."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from data import derive_seed

VOCABULARY = 256  # bytes


def dropout(x, p, key, part=(0, 1)):
    """Dropout of x [B, T, C] by a mask that is a function of key, a tuple, alone: the same on every layout of ranks.

    part (i, n): x is the i-th of n equal parts of longer sequences and gets its part of their mask. No key, no dropout.
    """
    if not p or key is None:
        return x
    (B, T, C), (i, n) = x.shape, part
    generator = torch.Generator(x.device).manual_seed(derive_seed(*key))
    noise = torch.rand(B, n * T, C, device=x.device, generator=generator)
    return x * (noise[:, i * T : (i + 1) * T] >= p) / (1 - p)


def causal_attention(q, k, v):
    """[B, T, heads, head_dim] each -> [B, T, heads, head_dim]."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.qkv, self.proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.head_dim, self.attend = n_embd // n_head, causal_attention

    def forward(self, x):
        B, T, _ = x.shape
        # As many heads as this rank's part of the weights makes: tensor parallelism gives it some of them.
        q, k, v = (t.view(B, T, -1, self.head_dim) for t in self.qkv(x).chunk(3, dim=-1))
        return self.proj(self.attend(q, k, v).reshape(B, T, -1))


class Block(nn.Module):
    def __init__(self, n_embd, n_head, dropout):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(n_embd), Attention(n_embd, n_head)
        self.ln_2, self.dropout = nn.LayerNorm(n_embd), dropout
        self.up, self.down = nn.Linear(n_embd, 4 * n_embd), nn.Linear(4 * n_embd, n_embd)

    def forward(self, x, key=None, part=(0, 1)):
        x = x + dropout(self.attn(self.ln_1(x)), self.dropout, key and (*key, "attention"), part)
        return x + dropout(self.down(F.gelu(self.up(self.ln_2(x)))), self.dropout, key and (*key, "mlp"), part)


class GPT(nn.Module):
    """A GPT over bytes with the embedding tied to the output layer.

    forward(inputs [B, T], targets [B, T]) returns the mean cross-entropy in nats over the targets that are not -100.
    With a key, a tuple, it drops out, and the masks are a function of it. part (i, n): of every sequence this rank
    computes the i-th of n equal parts; the attention then has to reach across them, as Ulysses does (parallel.py).
    """

    part = (0, 1)

    def __init__(self, n_layer=2, n_head=4, n_embd=64, seq_len=32, dropout=0.1):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, n_embd), nn.Embedding(seq_len, n_embd)
        self.blocks = nn.ModuleList(Block(n_embd, n_head, dropout) for _ in range(n_layer))
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, VOCABULARY, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:  # the layers that write to the residual stream start smaller, as in GPT-2
                residual = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * n_layer) if residual else 0.02)
        self.lm_head.weight = self.wte.weight

    def forward(self, inputs, targets, key=None):
        T = inputs.size(1) // self.part[1]
        mine = torch.arange(self.part[0] * T, (self.part[0] + 1) * T, device=inputs.device)
        x = self.wte(inputs[:, mine]) + self.wpe(mine)
        for i, block in enumerate(self.blocks):
            x = block(x, key and (*key, i), self.part)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets[:, mine].flatten())


def parameter_groups(model, weight_decay):
    """Two groups: matrices decay, biases and norms do not. Frozen parameters are in neither."""
    trained = [p for p in model.parameters() if p.requires_grad]
    decay, no_decay = [p for p in trained if p.dim() >= 2], [p for p in trained if p.dim() < 2]
    return [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}]

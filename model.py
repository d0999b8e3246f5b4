"""What the training scripts share and what is not the lesson: a small GPT, the data, the log, the refusals.

Nothing here knows of DeepSpeed or of checkpoints, so grad_accu_pt.py stays plain PyTorch.
"""

import argparse
import csv
import hashlib
import math
import os
import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCABULARY = 256  # bytes

# -----------------------------------------------------------------------------
# model


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
    With a key, a tuple, it drops out, and the masks are a function of it. part: see dropout().
    """

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

    def forward(self, inputs, targets, key=None, part=(0, 1)):
        T = inputs.size(1)
        x = self.wte(inputs) + self.wpe(torch.arange(part[0] * T, (part[0] + 1) * T, device=inputs.device))
        for i, block in enumerate(self.blocks):
            x = block(x, key and (*key, i), part)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def parameter_groups(model, weight_decay):
    """Two groups: matrices decay, biases and norms do not. Frozen parameters are in neither."""
    trained = [p for p in model.parameters() if p.requires_grad]
    decay, no_decay = [p for p in trained if p.dim() >= 2], [p for p in trained if p.dim() < 2]
    return [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}]


# -----------------------------------------------------------------------------
# data


def load_data(path=None, seq_len=32):
    """Bytes of `path`, or of the source of Python's standard library.

    Returns (train [N] uint8, validation [N/9] uint8, fingerprint str); the last tenth is held out.
    Raises OSError when the file cannot be read, ValueError when it is too short for one sequence in each part.
    """
    files = [Path(path)] if path else sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    held_out = len(text) // 10
    if held_out < seq_len + 2:
        raise ValueError(f"{path or 'the standard library'} has {len(text)} bytes, {10 * (seq_len + 2)} are needed")
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return data[:-held_out], data[-held_out:], f"{hashlib.sha256(text).hexdigest()[:16]} ({len(text)} bytes)"


def derive_seed(*key):
    """A 63-bit seed from any key, (seed, step, micro-batch) say: near keys give unrelated streams."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "little") >> 1


def global_batch(data, seed, step, size, seq_len):
    """The `size` sequences of one optimizer step as (inputs, targets), each [size, seq_len] int64.

    A function of (seed, step) alone: every rank, and every number of ranks, draws the same ones.
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, step))
    starts = torch.randint(len(data) - seq_len, (size, 1), generator=generator)
    sequences = data[starts + torch.arange(seq_len + 1)].long()
    return sequences[:, :-1], sequences[:, 1:]


def ragged(targets, seed, step):
    """The same targets with sequences of unequal length: beyond its length each is -100, which no loss counts."""
    generator = torch.Generator().manual_seed(derive_seed(seed, step, "ragged"))
    lengths = torch.randint(1, targets.size(1) + 1, (targets.size(0), 1), generator=generator)
    return targets.masked_fill(torch.arange(targets.size(1)) >= lengths, -100)


# -----------------------------------------------------------------------------
# log

COLUMNS = ["step", "loss", "val_loss", "lr", "grad_norm", "loss_scale", "tokens_per_second", "seconds", "layout"]


class Log:
    """logs/<run_name>.csv with every digit of every number, and a line on the screen for each of its rows.

    A run that goes on under the same name keeps the rows up to the step it resumes from.
    """

    def __init__(self, run_name, layout, done=0):
        path = Path("logs", f"{run_name}.csv")
        path.parent.mkdir(exist_ok=True)
        kept, unfinished = [], path.with_suffix(".unfinished")
        if done and path.exists():
            with path.open(newline="") as file:  # a run that was killed may have left half a row: it has no layout
                kept = [row for row in csv.DictReader(file) if row["layout"] and int(row["step"]) <= done]
        self.layout, self.file = layout, unfinished.open("w", newline="", buffering=1)
        self.writer = csv.DictWriter(self.file, COLUMNS)
        self.writer.writeheader()
        self.writer.writerows(kept)
        unfinished.rename(path)

    def write(self, *, loss_scale=1.0, **row):
        self.writer.writerow(row | {"loss_scale": loss_scale, "layout": self.layout})
        validation = f" | val {row['val_loss']:.4f}" if "val_loss" in row else ""
        print(
            f"step {row['step']:4d} | loss {row['loss']:.4f}{validation} | lr {row['lr']:.2e} | "
            f"norm {row['grad_norm']:.3f} | {row['tokens_per_second']:,.0f} tokens/s",
            flush=True,
        )


# -----------------------------------------------------------------------------
# refusals


def fail(message):
    """A user's mistake: one line from one rank, exit code 2."""
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        time.sleep(15)  # the first rank to exit makes the launcher end the others, and rank 0 must speak before that
        message = f"rank {rank}: {message}"  # still here: rank 0 has nothing to complain of
    print(f"{os.path.basename(sys.argv[0])}: error: {message}", file=sys.stderr, flush=True)
    os._exit(2) if rank != "0" else sys.exit(2)


def positive(text):
    """The argparse type of a number that counts something."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return int(text)


def accumulation_steps(batch, micro, ranks):
    """batch / (micro x ranks), or a refusal that says which numbers would divide."""
    unit = micro * ranks
    if batch % unit:
        offers = [f"--train_batch_size {[n for n in (batch // unit * unit, batch // unit * unit + unit) if n]}"]
        if micros := [m for m in range(1, batch + 1) if batch % (m * ranks) == 0]:
            offers.append(f"--train_micro_batch_size_per_gpu {micros}")
        if others := [n for n in range(1, batch + 1) if batch % (micro * n) == 0]:
            offers.append(f"{others} ranks")
        fail(
            f"a batch of {batch} does not divide into micro-batches of {micro} on {ranks} ranks; these would: "
            f"{', or '.join(offers)}"
        )
    return batch // unit

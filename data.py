"""The text and the batches cut from it, and what a run says: its log and its refusals. No DeepSpeed here, so that
grad_accu_pt.py stays plain PyTorch."""

import argparse
import csv
import hashlib
import os
import sys
import sysconfig
import time
from pathlib import Path

import torch

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


# -----------------------------------------------------------------------------
# log

COLUMNS = ["step", "loss", "val_loss", "lr", "grad_norm", "loss_scale", "tokens_per_second", "seconds", "layout"]


class Log:
    """logs/<run_name>.csv with every digit of every number, and a line on the screen for each of its rows.

    A run that goes on under the same name keeps the rows up to the step it resumes from.
    """

    def __init__(self, run_name, layout, done=0, last=None):
        path = Path("logs", f"{run_name}.csv")
        path.parent.mkdir(exist_ok=True)
        kept, unfinished = [], path.with_suffix(".unfinished")
        if done and path.exists():
            with path.open(newline="") as file:  # a run that was killed may have left half a row: it has no layout
                kept = [row for row in csv.DictReader(file) if row["layout"] and int(row["step"]) <= done]
        if last and not any(int(row["step"]) == done for row in kept):  # killed between the mirror and the log
            kept.append(last)
        self.layout, self.file = layout, unfinished.open("w", newline="", buffering=1)
        self.writer = csv.DictWriter(self.file, COLUMNS)
        self.writer.writeheader()
        self.writer.writerows(kept)
        unfinished.rename(path)
        print(f"the log is {path}", flush=True)

    def write(self, *, loss_scale=1.0, **row):
        self.writer.writerow({"layout": self.layout, "loss_scale": loss_scale} | row)
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


def around(wanted, numbers):
    """The nearest of the numbers below and above, in words."""
    below = max((n for n in numbers if n < wanted), default=None)
    above = min((n for n in numbers if n > wanted), default=None)
    return " or ".join(str(n) for n in (below, above) if n)


def accumulation_steps(batch, micro, ranks):
    """batch / (micro x ranks), or a refusal that names the nearest numbers that divide."""
    unit = micro * ranks
    if batch % unit:
        fewer = around(ranks, [n for n in range(1, batch + 1) if batch % (micro * n) == 0])
        smaller = around(micro, [m for m in range(1, batch + 1) if batch % (m * ranks) == 0])
        nearest = [f"--train_batch_size {around(batch, [batch // unit * unit, batch // unit * unit + unit])}"]
        nearest += [f"--train_micro_batch_size_per_gpu {smaller}"] if smaller else []
        nearest += [f"{fewer} ranks"] if fewer else []
        fail(
            f"a batch of {batch} does not divide into micro-batches of {micro} on {ranks} ranks; the nearest that do: "
            f"{'; '.join(nearest)}"
        )
    return batch // unit

"""The traps of gradient accumulation, each as the edit of grad_accu_pt.py or grad_accu_ds.py that
makes it, and what it does to the loss.

    python -m measure.traps

Each runs 4 micro-batches of 8, and is compared with the right program in PyTorch on one batch of
32, under the same optimizer; in bf16, with that on DeepSpeed. "ragged" has sequences of unequal
length, of which neither script knows: there the scripts as they are take the mean of the
micro-batches' means, and the edit weights each micro-batch by its share of the tokens."""

import functools
import textwrap
from pathlib import Path
from typing import NamedTuple

import torch

from measure.logs import read_log
from tests.support.ranks import run

ROOT = Path(__file__).resolve().parent.parent
PT = "grad_accu_pt.py"
DS = "grad_accu_ds.py"

# Lines of the scripts.
BACKWARD = "(loss / accumulation).backward()"
ADAMW = "torch.optim.AdamW(model.parameters(), lr=1e-3)"
CLIP = "clip_grad_norm_(model.parameters(), 1.0)"
UPDATE = f"    norm = nn.utils.{CLIP}.item()\n    optimizer.step()\n    optimizer.zero_grad()\n"
DRAWN = "    inputs, targets = global_batch(step)\n"
ADDED = "mean += loss.detach() / "
MEAN = f"        {ADDED}accumulation\n"

# Edits: (what stands there, what takes its place).
NO_CLIPPING = [(CLIP, "clip_grad_norm_(model.parameters(), torch.inf)")]
SGD = [*NO_CLIPPING, (ADAMW, "torch.optim.SGD(model.parameters(), lr=0.1)")]
FORGOTTEN = [(BACKWARD, "loss.backward()")]
EVERY = [(MEAN + UPDATE, MEAN + textwrap.indent(UPDATE, "    "))]

# The loss is the mean over a micro-batch's tokens, and micro-batches now have more or fewer of
# them. The log tells the mean over all tokens.
RAGGED = [
    ("import torch\n", "import torch\nfrom measure.traps import ragged, share_of_tokens\n"),
    (DRAWN, f"{DRAWN}    targets = ragged(targets, step)\n"),
    (ADDED, "mean += loss.detach() * share_of_tokens(targets, rows)  # in place of / "),
]
WEIGHTED = [(BACKWARD, "(loss * share_of_tokens(targets, rows)).backward()")]
# DeepSpeed divides by the accumulation steps, and takes the mean over the ranks: the factor undoes
# both.
RIGHT_DS = "engine.backward(loss * (share_of_tokens(targets, rows) * accumulation * ranks))"
WEIGHTED_DS = [("engine.backward(loss)", RIGHT_DS)]
# DeepSpeed adds gradients in bf16, if nothing is said.
ZERO = '    "zero_optimization": {"stage": 1},\n'
BF16 = [
    (ZERO, ZERO + '    "bf16": {"enabled": True},\n'),
    ("self.mask, is", "self.mask.to(x.dtype), is"),
]
FP32_SUMS = [(ZERO, ZERO + '    "data_types": {"grad_accum_dtype": "fp32"},\n')]
WITHOUT_WEIGHTS = [("weight * engine(", "engine(")]


class Trap(NamedTuple):
    script: str
    ranks: int
    common: list  # edits of the trap's program and of the right one
    edits: list  # edits of the trap's program alone
    right: str = PT  # the script of the right one


TRAPS = {
    "no trap": Trap(PT, 1, [], []),
    "not divided, AdamW": Trap(PT, 1, NO_CLIPPING, FORGOTTEN),
    "not divided, AdamW, clipping": Trap(PT, 1, [], FORGOTTEN),
    "not divided, SGD": Trap(PT, 1, SGD, FORGOTTEN),
    "a step at every micro-batch": Trap(PT, 1, [], EVERY),
    "no trap, ragged": Trap(PT, 1, RAGGED, WEIGHTED),
    "mean of means, ragged": Trap(PT, 1, RAGGED, []),
    "no trap, ragged, DeepSpeed, 2 ranks": Trap(DS, 2, RAGGED, WEIGHTED_DS),
    "mean of means, ragged, DeepSpeed, 2 ranks": Trap(DS, 2, RAGGED, []),
    "no trap, DeepSpeed, 3 ranks": Trap(DS, 3, [], []),
    "no weights, DeepSpeed, 3 ranks": Trap(DS, 3, [], WITHOUT_WEIGHTS),
    "bf16, added in bf16, DeepSpeed": Trap(DS, 1, BF16, [], DS),
    "bf16, added in fp32, DeepSpeed": Trap(DS, 1, BF16, FP32_SUMS, DS),
}


def ragged(targets, step):
    """The same targets with sequences of unequal length: beyond its length each is -100, which no
    loss counts."""
    generator = torch.Generator().manual_seed(10**6 + step)
    lengths = torch.randint(1, targets.size(1) + 1, (targets.size(0), 1), generator=generator)
    beyond = torch.arange(targets.size(1)) >= lengths
    return targets.masked_fill(beyond.to(targets.device), -100)


def share_of_tokens(targets, rows):
    return (targets[rows] >= 0).sum().item() / (targets >= 0).sum().item()


def edited(script, edits):
    """The path, below logs/, of the script with its (old, new) edits."""
    source = (ROOT / script).read_text()
    for old, new in edits:
        assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {script}"
        source = source.replace(old, new)
    path = Path("logs", "trap.py").resolve()
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
    return path


@functools.cache
def train(script, ranks, micro, *edits):
    """The losses of all steps, and the gradient norm of the first."""
    flags = f"--run_name trap --steps 100 --train_micro_batch_size_per_gpu {micro}".split()
    run(Path.cwd(), ranks, edited(script, edits), *flags)
    log = read_log(Path.cwd(), "trap", "loss", "grad_norm")
    return list(log["loss"].values()), log["grad_norm"][1]


def main():
    heading = "4 micro-batches of 8 against 1 of 32"
    print(f"{heading:<43}{'max |loss difference|':>22}{'gradient norm, step 1':>24}")
    for name, trap in TRAPS.items():
        # One batch of all sequences is one mean over all tokens: it has no trap to fall into.
        losses, norm = train(trap.right, 1, 32, *trap.common)
        # An edit may move a line that another one replaces: the trap's own go first.
        trap_losses, trap_norm = train(trap.script, trap.ranks, 8, *trap.edits, *trap.common)
        gap = max(abs(a - b) for a, b in zip(losses, trap_losses, strict=True))
        print(f"{name:<43}{gap:>22.1e}{f'x {trap_norm / norm:.4f}':>24}", flush=True)


if __name__ == "__main__":
    main()

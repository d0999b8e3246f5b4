"""The traps of gradient accumulation, each as the edit of grad_accu_pt.py or grad_accu_ds.py that
makes it, and what it does to the loss.

    python -m measure.traps

Each runs 4 micro-batches of 8, and is compared with the right program in PyTorch on one batch of
32, under the same optimizer. "ragged" has sequences of unequal length, of which neither script
knows: there the scripts as they are take the mean of the micro-batches' means, and the edit weights
each micro-batch by its share of the tokens."""

import functools
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
from data import derive_seed
from measure.ranks import read_log, run

BACKWARD = "(loss / accumulation).backward()"
CLIP = "clip_grad_norm_(model.parameters(), 1.0)"
ADAMW = "torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), lr=1e-3, betas=(0.9, 0.95))"
STEP = "    optimizer.step()\n    optimizer.zero_grad()\n"
INDENTED = "        optimizer.step()\n        optimizer.zero_grad()\n"
MEAN = "        mean += loss.detach() / (accumulation * ranks)"
LOOP = "    for m in range(rank"

NO_CLIPPING = [(CLIP, 'clip_grad_norm_(model.parameters(), float("inf"))')]
SGD = [*NO_CLIPPING, (ADAMW, "torch.optim.SGD(parameter_groups(model, weight_decay=0.1), lr=0.1)")]
FORGOTTEN = [(BACKWARD, "loss.backward()")]
EVERY = [(STEP, ""), (MEAN, f"        norm = torch.nn.utils.{CLIP}\n{INDENTED}{MEAN}")]
EVERY += [(f"    norm = torch.nn.utils.{CLIP}\n    row", "    row")]

# The loss of a model is the mean over the tokens it is given, and micro-batches now have more or
# fewer of them.
RAGGED = [
    ("import torch\n", "import torch\nfrom measure.traps import ragged, share_of_tokens\n"),
    (LOOP, f"    targets = ragged(targets, 1337, step)\n{LOOP}"),
    (
        MEAN,
        MEAN.replace("/ (accumulation * ranks)", "* share_of_tokens(targets, rows)"),
    ),  # the log tells the truth
]
WEIGHTED = [(BACKWARD, "(loss * share_of_tokens(targets, rows)).backward()")]
# DeepSpeed divides by the accumulation steps, and takes the mean over the ranks: the factor takes
# that back.
RIGHT_DS = "engine.backward(loss * (share_of_tokens(targets, rows) * accumulation * ranks))"
WEIGHTED_DS = [("engine.backward(loss)", RIGHT_DS)]

PT, DS = "grad_accu_pt.py", "grad_accu_ds.py"
# what: (script, ranks, edits that the right program has, too, edits of this one alone)
TRAPS = {
    "no trap": (PT, 1, [], []),
    "not divided, AdamW": (PT, 1, NO_CLIPPING, FORGOTTEN),
    "not divided, AdamW, clipping": (PT, 1, [], FORGOTTEN),
    "not divided, SGD": (PT, 1, SGD, FORGOTTEN),
    "a step at every micro-batch": (PT, 1, [], EVERY),
    "no trap, ragged": (PT, 1, RAGGED, WEIGHTED),
    "mean of means, ragged": (PT, 1, RAGGED, []),
    "no trap, ragged, DeepSpeed, 2 ranks": (DS, 2, RAGGED, WEIGHTED_DS),
    "mean of means, ragged, DeepSpeed, 2 ranks": (DS, 2, RAGGED, []),
}


def ragged(targets, seed, step):
    """The same targets with sequences of unequal length: beyond its length each is -100, which no
    loss counts."""
    generator = torch.Generator().manual_seed(derive_seed(seed, step, "ragged"))
    lengths = torch.randint(1, targets.size(1) + 1, (targets.size(0), 1), generator=generator)
    return targets.masked_fill(torch.arange(targets.size(1)) >= lengths, -100)


def share_of_tokens(targets, rows):
    return (targets[rows] >= 0).sum().item() / (targets >= 0).sum().item()


@functools.cache
def train(script, ranks, micro, *edits):
    """[loss of every step], and the gradient norm of the first, of the script with its (old, new)
    edits."""
    source, path = (ROOT / script).read_text(), Path("logs", "trap.py").resolve()
    for old, new in edits:
        assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {script}"
        source = source.replace(old, new)
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
    words = ("--run_name", "trap", "--steps", 100, "--train_micro_batch_size_per_gpu", micro)
    run(Path.cwd(), ranks, path, *words)
    log = read_log(Path.cwd(), "trap", "loss", "grad_norm")
    return [*log["loss"].values()], log["grad_norm"][1]


if __name__ == "__main__":
    print(
        f"{'4 micro-batches of 8 against 1 of 32':<43}{'max |loss difference|':>22}{'gradient norm, step 1':>24}"
    )
    for trap, (script, ranks, common, edits) in TRAPS.items():
        # One batch of all sequences is one mean over all tokens: it has no trap to fall into.
        right, norm = train(PT, 1, 32, *common)
        # An edit may move a line that another one replaces: the trap's own go first.
        wrong, other = train(script, ranks, 8, *edits, *common)
        gap = max(abs(a - b) for a, b in zip(right, wrong, strict=True))
        print(f"{trap:<43}{gap:>22.1e}{f'x {other / norm:.4f}':>24}", flush=True)

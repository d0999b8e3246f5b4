"""The traps of gradient accumulation, each as the edit of grad_accu_pt.py that makes it, and what it does to the loss.

    python benchmarks/traps.py

Each runs 4 micro-batches of 8, and is compared with the right program on one batch of 32 under the same optimizer.
"""

import contextlib
import csv
import io
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

BACKWARD = "(loss * share).backward()"
CLIP = "clip_grad_norm_(model.parameters(), 1.0)"
ADAMW = "torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), lr=1e-3, betas=(0.9, 0.95))"
STEP = "    optimizer.step()\n    optimizer.zero_grad()\n"
INDENTED = "        optimizer.step()\n        optimizer.zero_grad()\n"

NO_CLIPPING = [(CLIP, 'clip_grad_norm_(model.parameters(), float("inf"))')]
SGD = [*NO_CLIPPING, (ADAMW, "torch.optim.SGD(parameter_groups(model, weight_decay=0.1), lr=0.1)")]
FORGOTTEN = [(BACKWARD, "loss.backward()")]
EVERY = [(STEP, ""), ("        mean += loss", f"        norm = torch.nn.utils.{CLIP}\n{INDENTED}        mean += loss")]
EVERY += [(f"    norm = torch.nn.utils.{CLIP}\n    row", "    row")]
MEAN_OF_MEANS = [(BACKWARD, "(loss / accumulation).backward()")]

# (what, edits that both sides have, edits that make the trap, flags)
TRAPS = {
    "no trap": ([], [], []),
    "not divided, AdamW": (NO_CLIPPING, FORGOTTEN, []),
    "not divided, AdamW, clipping": ([], FORGOTTEN, []),
    "not divided, SGD": (SGD, FORGOTTEN, []),
    "a step at every micro-batch": ([], EVERY, []),
    "no trap, ragged": ([], [], ["--ragged"]),
    "mean of means, ragged": ([], MEAN_OF_MEANS, ["--ragged"]),
}


def run(name, edits, micro, flags):
    """Run grad_accu_pt.py with (old, new) edits. Returns [(loss, gradient norm)] of its steps."""
    source = (ROOT / "grad_accu_pt.py").read_text()
    for old, new in edits:
        assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in grad_accu_pt.py"
        source = source.replace(old, new)
    sys.argv = ["grad_accu_pt.py", "--run_name", name, "--train_micro_batch_size_per_gpu", str(micro), *flags]
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(source, name, "exec"), {"__name__": "__main__", "__doc__": ""})
    with open(Path("logs", f"{name}.csv"), newline="") as file:
        return [(float(row["loss"]), float(row["grad_norm"])) for row in csv.DictReader(file)]


def measure(trap):
    """(max |loss difference| over the steps, ratio of the gradient norms at step 1) against the right program."""
    common, edits, flags = TRAPS[trap]
    # The clipping edit of one trap moves the line that another replaces: the trap's own edits go first.
    right = run("trap_right", common, 32, flags)
    wrong = run("trap_wrong", [*edits, *common], 8, flags)
    gap = max(abs(a - b) for (a, _), (b, _) in zip(right, wrong, strict=True))
    return gap, wrong[0][1] / right[0][1]


def main():
    os.makedirs("logs", exist_ok=True)
    print(f"{'4 micro-batches of 8 against 1 of 32':<40}{'max |loss difference|':>22}{'gradient norm, step 1':>24}")
    for trap in TRAPS:
        gap, ratio = measure(trap)
        print(f"{trap:<40}{gap:>22.1e}{f'x {ratio:.4f}':>24}")


if __name__ == "__main__":
    main()

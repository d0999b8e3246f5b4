"""LLaMA-Factory and ms-swift, which have commands instead of scripts, on other ranks: `make clients-cli`.

    python demos/clients_cli.py --output assets/clients_cli.txt

Installs both below .venv-clients-cli/, beside the torch and the DeepSpeed of this Python, makes a Llama of two layers,
its tokenizer and 288 rows, and starts their commands with `start` on PYTHONPATH: 20 steps on 4 ranks; then the
checkpoint of step 10 continues with the same command on other ranks. A number is the largest difference of the losses
of steps 11 to 20 from those of the run that went through. What stands in --work is not run again. Ends with an error
where a number is no rounding, or where what was left out on purpose is not seen.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from harness.commands import BATCH, COMMANDS, LF, NEW, SAVED, STEPS, SWIFT, lose_a_machine, prepare, run  # noqa: E402

ROUNDING, SEEN, OLD, RANKS = 1e-5, 1e-3, "0.18.4", (2, 3, 6)
KINDS = [(client, trains, stage, NEW) for client in COMMANDS for trains in ("full", "LoRA") for stage in (2, 3)]
KINDS += [(LF, "full", 3, OLD), (SWIFT, "full", 3, OLD)]


def gap(found, wanted):
    """The largest difference of all steps; NaN where one of the runs has stopped."""
    if isinstance(found, str) or isinstance(wanted, str):
        return float("nan")
    assert found.keys() == wanted.keys() == {*range(SAVED + 1, STEPS + 1)}, "a step is missing"
    return max(abs(found[step] - wanted[step]) for step in wanted)


def table(work, problems):
    """The lines of the table. problems: filled with what is no rounding."""
    yield f"{'command':<15}{'trains':<8}{'ZeRO':<6}{'DeepSpeed':<10}" + "".join(f"{f'4 to {n}':>10}" for n in RANKS)
    for kind in KINDS:
        name = "-".join(map(str, kind))
        wanted, _ = run(work, name, kind, 4)
        ranks = RANKS if kind[-1] == NEW else RANKS[:1]
        values = [gap(run(work, f"{name}-to-{n}", kind, n, name)[0], wanted) for n in ranks]
        if not all(value <= ROUNDING for value in values):
            problems.append(f"{name}: {values}")
        client, trains, stage, deepspeed = kind
        yield f"{client:<15}{trains:<8}{stage:<6}{deepspeed:<10}" + "".join(f"{value:>10.1e}" for value in values)


def left_out(work, problems):
    """Lines about both, full, ZeRO-3, 4 to 2: without `start`, with the accumulation left as it was; elastic."""
    for client in COMMANDS:
        kind = client, "full", 3, NEW
        name = "-".join(map(str, kind))
        wanted, _ = run(work, name, kind, 4)
        stop, _ = run(work, f"{name}-without", kind, 2, name, ours=False)
        left, warning = run(work, f"{name}-left", kind, 2, name, steps=3)
        kept, silence = run(work, f"{name}-number", kind, 2, name, steps=3, batch=BATCH)
        left, kept = gap(left, wanted), gap(kept, wanted)
        yield from ("", f"{client}, full, ZeRO-3, 4 to 2")
        yield f"  without the folder on PYTHONPATH: {str(stop).split('. Auto')[0]}"
        yield f"  accumulation left at 3: {left:.1e}, {warning}"
        yield f'  accumulation left at 3, "train_batch_size": 24 in the json: {kept:.1e}'
        right = ["DP world size of 4" in stop, left >= SEEN, warning, kept <= ROUNDING, not silence]
        if client == LF:
            stop, _ = lose_a_machine(work, f"{name}-elastic-without", kind, ours=False)
            lost = gap(lose_a_machine(work, f"{name}-elastic", kind)[0], wanted)
            yield f"  elastic mode, one of two machines dies: {lost:.1e}"
            yield f"  the same without the folder on PYTHONPATH: {str(stop).split('. Auto')[0]}"
            right += [lost <= ROUNDING, "24 != 2 * 3 * 2" in stop]  # nor would it load, if the batch were right
        if not all(right):
            problems.append(f"{name}: {right}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out/clients_cli.txt"))
    parser.add_argument("--work", type=Path, default=Path("runs/clients_cli"), help="models, checkpoints and logs")
    args = parser.parse_args()
    work, problems, lines = args.work.resolve(), [], []
    prepare(work)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    for part in (table, left_out):
        for line in part(work, problems):
            print(line, flush=True)
            lines.append(line)
            args.output.write_text("\n".join(lines) + "\n")  # what is measured is kept
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()

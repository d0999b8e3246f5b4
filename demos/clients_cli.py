"""LLaMA-Factory and ms-swift, which have commands instead of scripts, on other ranks: `make clients-cli`.

    python demos/clients_cli.py --output assets/clients_cli.txt

Installs both below .venv-clients-cli/, beside the torch and the DeepSpeed of this Python, makes a Llama of two layers,
its tokenizer and 288 rows, and starts their commands with `start` on PYTHONPATH: 20 steps on 4 ranks; then the
checkpoint of step 10 goes on with the same command on other ranks. A number is the largest difference of the losses
of steps 11 to 20 from those of the run that went through. What stands in --work is not run again. Ends with an error
where a number is no rounding, or where what was left out on purpose is not seen.
"""

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from demos import versions  # noqa: E402
from demos.machines import Node  # noqa: E402

HERE, BIN = ROOT / ".venv-clients-cli", Path(sys.executable).parent
STEPS, SAVED, BATCH, MICRO = 20, 10, 24, 2
ROUNDING, SEEN, LIMIT, NEW, OLD = 1e-5, 1e-3, 400, versions.NEW, "0.18.4"
LF, SWIFT = "LLaMA-Factory", "ms-swift"
COMMANDS = {LF: ["llamafactory-cli", "train", "{}/llamafactory.yaml"], SWIFT: ["swift", "sft", "{}/swift.yaml"]}
REQUIREMENTS = {LF: "requirements-llamafactory.txt", SWIFT: "requirements-ms-swift.txt"}
FLAG, TUNER = {LF: "{}={}", SWIFT: "--{}={}"}, {LF: "finetuning_type", SWIFT: "tuner_type"}
KINDS = [(client, tunes, stage) for client in COMMANDS for tunes in ("full", "LoRA") for stage in (2, 3)]
TABLE = [(*kind, NEW, (2, 3, 6)) for kind in KINDS] + [(LF, "full", 3, OLD, (2, 6)), (SWIFT, "full", 3, OLD, (2,))]


def install(client):
    """The folder to put on PYTHONPATH. Torch and DeepSpeed are those of this Python."""
    folder = HERE / client
    if not folder.exists():
        unfinished = HERE / f"{client}.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", unfinished]
        subprocess.run([*pip, "-r", ROOT / REQUIREMENTS[client]], check=True, timeout=900)
        (unfinished / "torchaudio.py").touch()  # LLaMA-Factory imports it, and the one to be had wants another torch
        unfinished.rename(folder)
    return folder


def prepare(work):
    if (work / "ready").exists():
        return
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    environment = os.environ | {"PYTHONPATH": str(install(LF)), "DS_ACCELERATOR": "cpu"}
    making = [sys.executable, ROOT / "harness" / "tiny_llama.py", work]
    subprocess.run(making, check=True, timeout=LIMIT, env=environment)
    auto = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto")
    for stage in (2, 3):
        for batch in ("auto", BATCH):
            config = auto | {"train_batch_size": batch, "zero_optimization": {"stage": stage}}
            config |= {"zero_allow_untested_optimizer": True}
            (work / f"zero{stage}_{batch}.json").write_text(json.dumps(config))
    (work / "ready").touch()


# -----------------------------------------------------------------------------
# a run


def free_port():
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(work, client, ranks, output, tunes="full", stage=3, deepspeed=NEW, ours=True, batch="auto", steps=None,
          **machine):  # fmt: skip
    """(node, lines) of the client's command. steps: accumulation steps, those that keep the batch if not given."""
    folder = work / output
    path = [ROOT / "start"] * ours + [ROOT / "harness" / "on_cpu"]
    path += [versions.install(deepspeed)] if deepspeed != NEW else []
    path += [install(client)]
    environment = {"PYTHONPATH": ":".join(map(str, path)), "PATH": f"{path[-1] / 'bin'}:{BIN}:{os.environ['PATH']}"}
    environment |= {"NPROC_PER_NODE": ranks, "MASTER_PORT": free_port(), "FORCE_TORCHRUN": 1, "DS_ACCELERATOR": "cpu"}
    environment |= {"HF_HUB_OFFLINE": 1, "HF_HOME": work / "home", "MODELSCOPE_CACHE": work / "home"} | machine
    flags = {"output_dir": folder, "deepspeed": work / f"zero{stage}_{batch}.json", TUNER[client]: tunes.lower()}
    flags["gradient_accumulation_steps"] = steps or BATCH // MICRO // ranks
    if client == SWIFT and folder.exists():  # LLaMA-Factory looks by itself
        flags["resume_from_checkpoint"] = folder / f"checkpoint-{SAVED}"
    words = [word.format(ROOT / "examples") for word in COMMANDS[client]]
    words += [FLAG[client].format(key, value) for key, value in flags.items()]
    lines = []
    return Node(
        ["env", "-C", str(work), *(f"{key}={value}" for key, value in environment.items()), *words], lines
    ), lines


def end(node, lines, log):
    """Wait for it; whatever it has started ends with it."""
    try:
        node.agent.wait(timeout=LIMIT)
    finally:
        node.kill()
        node.reader.join(timeout=10)
        log.write_text("".join(line for _, line in lines))


def run(work, client, ranks, output, source=None, **options):
    """({step: loss} of steps 11 to 20 or the error that it stopped with, what universal.py warned of). source: the run
    whose checkpoint it goes on from."""
    log = work / f"{output}.log"
    if not log.exists():
        shutil.rmtree(work / output, ignore_errors=True)
        if source:
            shutil.copytree(work / source / f"checkpoint-{SAVED}", work / output / f"checkpoint-{SAVED}")
        end(*start(work, client, ranks, output, **options), log)
    return read(work, output)


def read(work, output):
    text, state = (work / f"{output}.log").read_text(), work / output / f"checkpoint-{STEPS}" / "trainer_state.json"
    warning = re.search(r"universal\.py: WARNING: .*", text)
    if state.exists():
        history = json.loads(state.read_text())["log_history"]
        found = {row["step"]: row["loss"] for row in history if "loss" in row and row["step"] > SAVED}
    else:
        errors = re.findall(r"^(?:\[rank\d+\]:? ?)?(?:\w+\.)*(\w*(?:Error|Exception): .*)", text, re.M)
        found = errors[0] if errors else "no error, and no end"
    return found, warning and warning[0]


def lose_a_machine(work, output, **options):
    """LLaMA-Factory's elastic mode: two machines of 2 ranks, of which one dies after step 13. Else as run()."""
    log, progress = work / f"{output}.log", work / output / "trainer_log.jsonl"
    if log.exists():
        return read(work, output)
    shutil.rmtree(work / output, ignore_errors=True)
    job = {"RDZV_ID": "job", "NNODES": 2, "MIN_NNODES": 1, "MAX_NNODES": 2, "MAX_RESTARTS": 3}
    job |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "PET_LOCAL_ADDR": "127.0.0.1"}
    job |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1}
    conf = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=3,is_host="
    (one, lines), (other, _) = (
        start(work, LF, 2, output, steps=3, batch=BATCH, **job, PET_RDZV_CONF=f"{conf}{host}", **options)
        for host in (1, 0)
    )
    try:
        deadline = time.time() + LIMIT
        while not (progress.exists() and progress.read_text().count("\n") >= SAVED + 3):
            if time.time() > deadline or one.agent.poll() is not None:
                break
            time.sleep(0.1)
    finally:
        other.kill()
        end(one, lines, log)
    return read(work, output)


# -----------------------------------------------------------------------------
# the table


def difference(found, wanted):
    """The largest of all steps, or the error."""
    if isinstance(found, str):
        return found
    assert isinstance(wanted, dict), wanted
    assert found.keys() == wanted.keys() == {*range(SAVED + 1, STEPS + 1)}, "a step is missing"
    return max(abs(found[step] - wanted[step]) for step in wanted)


def rows(work, problems):
    """The lines of the table. problems: filled with what is no rounding."""
    yield f"{'command':<15}{'trains':<8}{'ZeRO':<6}{'DeepSpeed':<10}" + "".join(f"{f'4 to {n}':>10}" for n in (2, 3, 6))
    for client, tunes, stage, version, ranks in TABLE:
        name, options = f"{client}-{tunes}-{stage}-{version}", dict(tunes=tunes, stage=stage, deepspeed=version)
        wanted, _ = run(work, client, 4, name, **options)
        cells = ""
        for n in (2, 3, 6):
            value = n in ranks and difference(run(work, client, n, f"{name}-to-{n}", name, **options)[0], wanted)
            if value is not False and not (isinstance(value, float) and value <= ROUNDING):
                problems.append(f"{name}, 4 to {n}: {value}")
            cells += f"{f'{value:.1e}' if isinstance(value, float) else 'stops' if value else '':>10}"
        yield f"{client:<15}{tunes:<8}{stage:<6}{version:<10}{cells}"


def lines_below(work, problems):
    """Of both, full, ZeRO-3, 4 to 2: without `start`, with the accumulation left as it was; the elastic mode."""
    for client in COMMANDS:
        name = f"{client}-full-3-{NEW}"
        wanted, _ = run(work, client, 4, name)
        stop, _ = run(work, client, 2, f"{name}-without", name, ours=False)
        left, warning = run(work, client, 2, f"{name}-left", name, steps=3)
        kept, silence = run(work, client, 2, f"{name}-number", name, steps=3, batch=BATCH)
        left, kept = difference(left, wanted), difference(kept, wanted)
        if not (isinstance(stop, str) and "DP world size of 4" in stop):
            problems.append(f"{name}, without `start`: {stop}")
        if not (left >= SEEN and warning and kept <= ROUNDING and not silence):
            problems.append(f"{name}, accumulation left: {left}, {warning}; with a number {kept}, {silence}")
        yield f"\n{client}, full, ZeRO-3, 4 to 2"
        yield f"  without `start`: {stop[:100]}"
        yield f"  accumulation left at 3: {left:.1e}, {warning}"
        yield f'  accumulation left at 3, "train_batch_size": 24 in the json: {kept:.1e}'
        if client == LF:
            value = difference(lose_a_machine(work, f"{name}-elastic")[0], wanted)
            if not (isinstance(value, float) and value <= ROUNDING):
                problems.append(f"{name}, elastic: {value}")
            yield f"  its elastic mode, one of two machines dies: {value:.1e}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out/clients_cli.txt"))
    parser.add_argument("--work", type=Path, default=Path("runs/clients_cli"), help="models, checkpoints and logs")
    args = parser.parse_args()
    work, problems, lines = args.work.resolve(), [], []
    prepare(work)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    for part in (rows, lines_below):
        for line in part(work, problems):
            print(line, flush=True)
            lines.append(line.rstrip())
            args.output.write_text("\n".join(lines) + "\n")  # what is measured is kept
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()

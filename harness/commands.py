"""Starts LLaMA-Factory's and ms-swift's own commands on ranks of this machine, with the folder `start` on PYTHONPATH,
as demos/clients_cli.py tells it to."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from demos import versions
from harness.machines import Node
from harness.processes import free_port

ROOT = Path(__file__).resolve().parent.parent
HERE, BIN = ROOT / ".venv-clients-cli", Path(sys.executable).parent
STEPS, SAVED, BATCH, MICRO, LIMIT = 20, 10, 24, 2, 400
LF, SWIFT, NEW = "LLaMA-Factory", "ms-swift", versions.NEW
COMMANDS = {LF: ["llamafactory-cli", "train", "llamafactory.yaml"], SWIFT: ["swift", "sft", "swift.yaml"]}
TUNER, FLAG = {LF: "finetuning_type", SWIFT: "tuner_type"}, {LF: "{}={}", SWIFT: "--{}={}"}


def requirements(client):
    return ROOT / f"requirements-{client.lower()}.txt"


def install(client):
    """(folder of its commands, folder to put on PYTHONPATH). Torch and DeepSpeed are those of this Python."""
    folder, unfinished = HERE / client, HERE / f"{client}.unfinished"
    if not folder.exists():
        shutil.rmtree(unfinished, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--ignore-installed", "--prefix", unfinished]
        subprocess.run([*pip, "-r", requirements(client)], check=True, timeout=900)
        unfinished.rename(folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "torchaudio.py").touch()  # LLaMA-Factory imports it, and the one to be had wants another torch
    return folder / "bin", packages


def prepare(work):
    if (work / "ready").exists():
        return
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    environment = os.environ | {"PYTHONPATH": str(install(LF)[1]), "DS_ACCELERATOR": "cpu"}
    making = [sys.executable, ROOT / "harness" / "tiny_llama.py", work]
    subprocess.run(making, check=True, timeout=LIMIT, env=environment)
    auto = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto")
    for stage in (2, 3):
        for batch in ("auto", BATCH):
            config = auto | {"train_batch_size": batch, "zero_optimization": {"stage": stage}}
            config["zero_allow_untested_optimizer"] = True
            (work / f"zero{stage}_{batch}.json").write_text(json.dumps(config))
    (work / "ready").touch()


def start(work, name, kind, ranks, ours=True, batch="auto", steps=None, **machine):
    """(node, lines) of the client's command. steps: accumulation steps, those that keep the batch if not given."""
    client, trains, stage, deepspeed = kind
    commands, packages = install(client)
    path = [ROOT / "universal" / "start"] if ours else []
    path.append(ROOT / "harness" / "on_cpu")
    if deepspeed != NEW:
        path.append(versions.install(deepspeed))
    environment = {
        "PYTHONPATH": ":".join(map(str, [*path, packages])), "PATH": f"{commands}:{BIN}:{os.environ['PATH']}",
        "NPROC_PER_NODE": ranks, "MASTER_PORT": free_port(), "FORCE_TORCHRUN": 1, "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": 1, "HF_HOME": work / "home", "MODELSCOPE_CACHE": work / "home",
    }  # fmt: skip
    environment |= machine
    flags = {
        "output_dir": work / name, "deepspeed": work / f"zero{stage}_{batch}.json", TUNER[client]: trains.lower(),
        "gradient_accumulation_steps": steps or BATCH // MICRO // ranks,
    }  # fmt: skip
    if client == SWIFT and (work / name).exists():  # LLaMA-Factory looks by itself
        flags["resume_from_checkpoint"] = work / name / f"checkpoint-{SAVED}"
    command = ["env", "-C", str(work), *(f"{key}={value}" for key, value in environment.items())]
    *words, settings = COMMANDS[client]
    command += [*words, str(ROOT / "examples" / settings)]
    command += [FLAG[client].format(key, value) for key, value in flags.items()]
    lines = []
    return Node(command, lines), lines


def end(node, lines, log):
    """Wait for it; whatever it has started ends with it."""
    try:
        node.agent.wait(timeout=LIMIT)
    finally:
        node.kill()
        node.reader.join(timeout=10)
        log.write_text("".join(line for _, line in lines))


def run(work, name, kind, ranks, source=None, **options):
    """({step: loss} of steps 11 to 20 or the error that it stopped with, what universal.py warned of). source: the run
    whose checkpoint it goes on from."""
    log = work / f"{name}.log"
    if not log.exists():
        shutil.rmtree(work / name, ignore_errors=True)
        if source:
            saved = work / source / f"checkpoint-{SAVED}"
            assert saved.is_dir(), f"{source} has saved nothing: {saved.parent}.log"
            shutil.copytree(saved, work / name / saved.name)
        end(*start(work, name, kind, ranks, **options), log)
    return read(work, name)


def lose_a_machine(work, name, kind, **options):
    """LLaMA-Factory's elastic mode: two machines of 2 ranks, of which one dies after step 13. Else as run()."""
    log, progress, port = work / f"{name}.log", work / name / "trainer_log.jsonl", free_port()
    if log.exists():
        return read(work, name)
    shutil.rmtree(work / name, ignore_errors=True)
    conf = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=3,is_host="
    machines = []
    for host in (1, 0):
        machine = {"RDZV_ID": "job", "MIN_NNODES": 1, "MAX_NNODES": 2, "MAX_RESTARTS": 3, "MASTER_PORT": port}
        machine |= {"PET_LOCAL_ADDR": "127.0.0.1", "PET_RDZV_CONF": f"{conf}{host}"}
        machines.append(start(work, name, kind, 2, steps=3, batch=BATCH, **machine, **options))
    (first, lines), (second, _) = machines
    deadline = time.time() + LIMIT
    while time.time() < deadline and first.agent.poll() is None:
        if progress.exists() and progress.read_text().count("\n") >= SAVED + 3:
            break
        time.sleep(0.1)
    second.kill()
    end(first, lines, log)
    return read(work, name)


def read(work, name):
    text, state = (work / f"{name}.log").read_text(), work / name / f"checkpoint-{STEPS}" / "trainer_state.json"
    warning = re.search(r"universal\.py: (WARNING: .*)", text)
    if state.exists():
        history = json.loads(state.read_text())["log_history"]
        found = {row["step"]: row["loss"] for row in history if "loss" in row and row["step"] > SAVED}
    else:
        errors = re.findall(r"^\[rank\d+\]: (?:\w+\.)*(\w*(?:Error|Exception): .*)", text, re.M)
        found = errors[-1] if errors else "no error, and no end"
    return found, warning and warning[1]

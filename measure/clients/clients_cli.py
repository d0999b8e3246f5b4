"""LLaMA-Factory and ms-swift, which have commands instead of scripts, on other ranks: `make
clients-cli`.

    python -m measure.clients.clients_cli

Installs both below .venv-clients-cli/, beside the torch and the DeepSpeed of this Python, makes a
Llama of two layers and 288 rows, and starts their commands with universal/start on PYTHONPATH: 20
steps on 4 ranks; then the checkpoint of step 10 continues with the same command on other ranks. A
number is the largest difference of the losses of steps 11 to 20 from those of the run that went
through; `said` is what the resume itself has printed. UNIVERSAL_BATCH keeps the batch on 5 ranks,
which do not divide its 12 micro-batches, and DPO's on 3, which do not divide 8; an epoch's last
step is short there. What cannot be kept must be refused: KTO, whose loss depends on what all ranks
have at the same moment, and ms-swift, whose DataLoader is its own. Ends with an error where a
number is no rounding, or where what was left out on purpose is not seen."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM, set_seed

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
WORK = ROOT / "runs" / "clients_cli"  # the model, checkpoints and logs
STEPS = 20
SAVED = 10
BATCH = 24
ANY_BATCH = {"sft": BATCH, "dpo": 16, "kto": BATCH}  # UNIVERSAL_BATCH: 3 ranks do not divide 8
ROUNDING = 1e-5
SEEN = 1e-3
AUTO = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")


class Client(NamedTuple):
    """A framework's command line. command: what starts it. dashes: in front of a flag. tuner: the
    flag for what is trained."""

    name: str
    command: tuple
    dashes: str
    tuner: str


class Case(NamedTuple):
    """A run to be resumed. trains: "full" or "lora". stage: of ZeRO. batch: train_batch_size in the
    JSON. task: LLaMA-Factory's `stage`."""

    trains: str
    stage: int
    batch: int | str
    task: str = "sft"


FACTORY_YAML = FOLDER / "llamafactory.yaml"
LLAMA_FACTORY = Client(
    "LLaMA-Factory", ("llamafactory-cli", "train", FACTORY_YAML), "", "finetuning_type"
)
SWIFT = Client("ms-swift", ("swift", "sft", FOLDER / "swift.yaml"), "--", "tuner_type")
FULL = Case("full", 3, BATCH)
LORA = Case("lora", 2, "auto")
DPO = Case("full", 3, BATCH, "dpo")
LORA_DPO = Case("lora", 2, "auto", "dpo")
KTO = Case("full", 3, BATCH, "kto")
# LLaMA-Factory's data sets, all of the same rows.
PROMPT = {"prompt": "instruction"}
DATA = {
    "sft": {},
    "dpo": {"ranking": True, "columns": PROMPT | {"chosen": "output", "rejected": "worse"}},
    "kto": {"columns": PROMPT | {"response": "output", "kto_tag": "good"}},
}


def install(client):
    """Returns the folder of its commands and that of its packages. Torch and DeepSpeed are those of
    this Python."""
    folder = ROOT / ".venv-clients-cli" / client.name
    if not folder.exists():
        requirements = FOLDER / f"requirements-{client.name.lower()}.txt"
        pip = f"-m pip install -q --no-deps --ignore-installed --prefix {folder} -r {requirements}"
        subprocess.run([sys.executable, *pip.split()], check=True, timeout=900)
    (packages,) = folder.glob("lib/python*/site-packages")
    # LLaMA-Factory imports it, and the one to be had wants another torch.
    (packages / "torchaudio.py").touch()
    return folder / "bin", packages


def prepare():
    """Write what the commands read: a model, its tokenizer of bytes, rows, DeepSpeed's
    configurations."""
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    set_seed(1)
    ByT5Tokenizer().save_pretrained(WORK / "model")
    config = LlamaConfig(
        vocab_size=384,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    LlamaForCausalLM(config).save_pretrained(WORK / "model")
    rows = [
        {
            "instruction": f"{n} times 37?",
            "input": "",
            "output": str(37 * n),
            "worse": str(36 * n + 1),
            "good": n % 3 > 0,
        }
        for n in range(288)
    ]
    (WORK / "rows.json").write_text(json.dumps(rows))
    data = {task: {"file_name": "rows.json"} | columns for task, columns in DATA.items()}
    (WORK / "dataset_info.json").write_text(json.dumps(data))
    for case in (FULL, LORA):
        config = dict.fromkeys(AUTO, "auto")
        config |= {"train_batch_size": case.batch, "zero_optimization": {"stage": case.stage}}
        (WORK / f"zero{case.stage}.json").write_text(json.dumps(config))


def environment(client, case, ranks, how):
    """Variables for the client's command."""
    commands, packages = install(client)
    path = [] if how == "without" else [ROOT / "universal" / "start"]
    variables = {
        "PYTHONPATH": ":".join(map(str, [*path, FOLDER / "on_cpu", packages])),
        "PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "NPROC_PER_NODE": str(ranks),
        "MASTER_PORT": "29533",
        "FORCE_TORCHRUN": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(WORK / "home"),
        "MODELSCOPE_CACHE": str(WORK / "home"),
    }
    if how == "any" or case.task == "dpo":
        variables["UNIVERSAL_BATCH"] = str(ANY_BATCH[case.task])
    return variables


def run(client, case, ranks, how="", **named):
    """Run the client's command, on other ranks than 4 from the checkpoint of those.

    how: "without" universal/start; "left", with the accumulation steps of 4 ranks, which a number
    in the JSON mends; "any", with UNIVERSAL_BATCH. named: more flags. Returns the folder that it
    writes."""
    name = f"{client.name}-{case.task}-{case.trains}"
    output = WORK / f"{name}-{ranks}{how}"
    keeps_steps = how == "left" or case.batch == BATCH
    flags = {
        client.tuner: case.trains,
        "output_dir": output,
        "deepspeed": WORK / f"zero{case.stage}.json",
        "gradient_accumulation_steps": 3 if keeps_steps else 12 // ranks,
    }
    if case.task != "sft":
        flags |= {"stage": case.task, "dataset": case.task}
    if case.task == "dpo":
        flags["max_samples"] = 281  # an epoch's last micro-batch is short, and its last step
    if case.task == "kto":
        flags["per_device_train_batch_size"] = 8 // ranks  # all ranks have 8 samples at a time
    flags |= named
    if ranks != 4:
        checkpoint = output / f"checkpoint-{SAVED}"
        shutil.copytree(WORK / f"{name}-4" / checkpoint.name, checkpoint)
        if client is SWIFT:  # LLaMA-Factory looks by itself
            flags["resume_from_checkpoint"] = checkpoint
    words = [f"{client.dashes}{key}={value}" for key, value in flags.items()]
    with open(f"{output}.log", "w") as log:
        subprocess.run(
            ["timeout", "600", *client.command, *words],
            cwd=WORK,
            env=os.environ | environment(client, case, ranks, how),
            stdout=log,
            stderr=log,
        )
    return output


def losses(output):
    """Returns the losses of the steps after the checkpoint."""
    state = json.loads((output / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    every = [row["loss"] for row in state["log_history"] if "loss" in row]
    return torch.tensor(every[SAVED:], dtype=torch.float64)


def gap(output, baseline):
    return (losses(output) - losses(baseline)).abs().max().item()  # of tensors: NaN is the largest


def said(output, pattern):
    """The first line, or part of one, of a run that fits the pattern; None if there is none."""
    line = re.search(pattern, Path(f"{output}.log").read_text())
    return line and line[0]


def resume(client, case, ranks, baseline, how=""):
    """Print a row. Returns whether all of it is as it should be."""
    resumed = run(client, case, ranks, how)
    difference = gap(resumed, baseline)
    proof = said(resumed, rf"steps {SAVED + 1} to {STEPS}, trained before on 4 ranks, now on .*")
    proved = float((proof or "nan").split()[-1])
    batch = f'"train_batch_size": {json.dumps(case.batch)}'
    if how == "any" or case.task == "dpo":
        batch = f"UNIVERSAL_BATCH={ANY_BATCH[case.task]}"
    row = f"{case.task}, {case.trains}, ZeRO-{case.stage}, {batch}, 4 to {ranks} ranks"
    print(f"{client.name:<15}{row}: {difference:.1e}, said {proved:.1e}", flush=True)
    loaded = said(resumed, f"written by 4 ranks, loaded on {ranks}")
    return loaded and difference <= ROUNDING and proved <= ROUNDING


def leave_out(client, case, baseline):
    """Print what happens without universal/start, and with other accumulation steps. Returns
    whether both are seen."""
    without = run(client, case, 2, "without")
    refused = said(without, r"\w+: The checkpoint being loaded used a DP world size of 4.*?2")
    print(f"{client.name}, without universal/start: {refused}")
    left = run(client, case, 2, "left")
    difference = gap(left, baseline)
    batch = said(left, "WARNING: the global batch.*")
    proof = said(left, "WARNING: step.*")
    print(f"{client.name}, accumulation left at 3: {difference:.1e}, {batch}, {proof}", flush=True)
    return refused and batch and proof and difference >= SEEN


def refuse(client, case, ranks, how, reason, **named):
    """Print why a run ends before its first step. Returns whether it says so."""
    refused = said(run(client, case, ranks, how, **named), rf"\w+Error: .*{reason}.*")
    ((flag, value),) = named.items() or {"UNIVERSAL_BATCH": ANY_BATCH[case.task]}.items()
    print(f"{client.name}, {case.task}, {flag}={value}, {ranks} ranks: {refused}", flush=True)
    return refused


def preferences():
    """Print the rows of LLaMA-Factory's DPO and KTO. Returns whether each is as it should be."""
    for case, others in ((DPO, (3, 2)), (LORA_DPO, (3,)), (KTO, (2,))):
        baseline = run(LLAMA_FACTORY, case, 4)
        for ranks in others:
            yield resume(LLAMA_FACTORY, case, ranks, baseline)
    yield refuse(LLAMA_FACTORY, KTO, 4, "any", "KL of the micro-batches")
    yield refuse(LLAMA_FACTORY, DPO, 4, "bco", "loss of BCO", pref_bco_weight=0.5)


def main():
    os.environ["DS_ACCELERATOR"] = "cpu"
    prepare()
    right = [*preferences()]
    for client in (LLAMA_FACTORY, SWIFT):
        for case in (FULL, LORA):
            baseline = run(client, case, 4)
            right += [resume(client, case, ranks, baseline) for ranks in (2, 3)]
        right.append(leave_out(client, LORA, baseline))
        if client is LLAMA_FACTORY:
            right.append(resume(client, LORA, 5, baseline, "any"))
    right += [
        refuse(SWIFT, LORA, 5, "any", "get_train_dataloader.. does not call Trainer's"),
        refuse(SWIFT, LORA, 4, "elastic", "elasticity", callbacks="deepspeed_elastic"),
    ]
    if not all(right):
        sys.exit("measure/clients/clients_cli.py: not all is as it should be")


if __name__ == "__main__":
    main()

"""LLaMA-Factory and ms-swift, which have commands instead of scripts, on other ranks: `make
clients-cli`.

    python -m measure.clients.clients_cli

Installs both below .venv-clients-cli/, beside the torch and the DeepSpeed of this Python, makes a
Llama of two layers and 288 rows, and starts their commands with universal/start on PYTHONPATH: 20
steps on 4 ranks; then the checkpoint of step 10 continues with the same command on other ranks. A
number is the largest difference of the losses of steps 11 to 20 from those of the run that went
through. Ends with an error where a number is no rounding, or where what was left out on purpose is
not seen."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM, set_seed

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
WORK = ROOT / "runs" / "clients_cli"  # the model, checkpoints and logs
SWIFT, LLAMA_FACTORY = "ms-swift", "LLaMA-Factory"
COMMANDS = {
    LLAMA_FACTORY: ("llamafactory-cli", "train", FOLDER / "llamafactory.yaml"),
    SWIFT: ("swift", "sft", FOLDER / "swift.yaml"),
}
STEPS, SAVED, BATCH, ROUNDING, SEEN = 20, 10, 24, 1e-5, 1e-3
FULL, LORA = (
    ("full", 3, BATCH),
    ("lora", 2, "auto"),
)  # what is trained, the ZeRO stage, train_batch_size in the json


def install(client):
    """(folder of its commands, folder of its packages). Torch and DeepSpeed are those of this
    Python."""
    folder = ROOT / ".venv-clients-cli" / client
    if not folder.exists():
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--ignore-installed",
            "--prefix",
            folder,
        ]
        subprocess.run(
            [*pip, "-r", FOLDER / f"requirements-{client.lower()}.txt"], check=True, timeout=900
        )
    (packages,) = folder.glob("lib/python*/site-packages")
    (
        packages / "torchaudio.py"
    ).touch()  # LLaMA-Factory imports it, and the one to be had wants another torch
    return folder / "bin", packages


def prepare():
    """Write what the commands read: a model, its tokenizer of bytes, rows, DeepSpeed's
    configurations."""
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    set_seed(1)
    ByT5Tokenizer().save_pretrained(WORK / "model")
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    LlamaForCausalLM(LlamaConfig(vocab_size=384, **sizes)).save_pretrained(WORK / "model")
    rows = [
        {"instruction": f"{n} times 37?", "input": "", "output": str(37 * n)} for n in range(288)
    ]
    (WORK / "rows.json").write_text(json.dumps(rows))
    (WORK / "dataset_info.json").write_text('{"rows": {"file_name": "rows.json"}}')
    auto = dict.fromkeys(
        ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
        "auto",
    )
    for _, stage, batch in (FULL, LORA):
        config = auto | {"train_batch_size": batch, "zero_optimization": {"stage": stage}}
        (WORK / f"zero{stage}.json").write_text(json.dumps(config))


def run(client, case, ranks, how=""):
    """Run the client's command, on other ranks than 4 from the checkpoint of those. Returns the
    folder that it writes. how: "without" universal/start; "left", with the accumulation steps of 4
    ranks, which a number in the json mends."""
    trains, stage, batch = case
    output = WORK / f"{client}-{trains}-{ranks}{how}"
    tuner, dashes = ("tuner_type", "--") if client == SWIFT else ("finetuning_type", "")
    flags = {
        tuner: trains,
        "output_dir": output,
        "deepspeed": WORK / f"zero{stage}.json",
        "gradient_accumulation_steps": 3 if how == "left" or batch == BATCH else 12 // ranks,
    }
    if ranks != 4:
        checkpoint = output / f"checkpoint-{SAVED}"
        shutil.copytree(WORK / f"{client}-{trains}-4" / checkpoint.name, checkpoint)
        if client == SWIFT:  # LLaMA-Factory looks by itself
            flags["resume_from_checkpoint"] = checkpoint
    commands, packages = install(client)
    path = [] if how == "without" else [ROOT / "universal" / "start"]
    environment = os.environ | {
        "PYTHONPATH": ":".join(map(str, [*path, FOLDER / "on_cpu", packages])),
        "PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "NPROC_PER_NODE": str(ranks),
        "MASTER_PORT": "29533",
        "FORCE_TORCHRUN": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": WORK / "home",
        "MODELSCOPE_CACHE": WORK / "home",
    }
    command = [
        "timeout",
        "600",
        *COMMANDS[client],
        *(f"{dashes}{key}={value}" for key, value in flags.items()),
    ]
    with open(f"{output}.log", "w") as log:
        subprocess.run(command, cwd=WORK, env=environment, stdout=log, stderr=log)
    return output


def losses(output):
    history = json.loads((output / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())[
        "log_history"
    ]
    return torch.tensor(
        [row["loss"] for row in history if "loss" in row][SAVED:], dtype=torch.float64
    )


def gap(output, baseline):
    return (losses(output) - losses(baseline)).abs().max().item()  # of tensors: NaN is the largest


def said(output, pattern):
    found = re.search(pattern, Path(f"{output}.log").read_text())
    return found and found[0]


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    prepare()
    fine = []
    for client in COMMANDS:
        for case in (FULL, LORA):
            baseline = run(client, case, 4)
            for ranks in (2, 3):
                resumed = run(client, case, ranks)
                difference = gap(resumed, baseline)
                trains, stage, batch = case
                how = f'ZeRO-{stage}, "train_batch_size": {json.dumps(batch)}, 4 to {ranks} ranks'
                print(f"{client:<15}{trains}, {how}: {difference:.1e}", flush=True)
                fine += [
                    difference <= ROUNDING,
                    said(resumed, f"written by 4 ranks, loaded on {ranks}"),
                ]
        without, left = run(client, LORA, 2, "without"), run(client, LORA, 2, "left")
        refused = said(without, r"\w+: The checkpoint being loaded used a DP world size of 4.*?2")
        difference, warning = gap(left, baseline), said(left, "WARNING: the global batch.*")
        print(f"{client}, without universal/start: {refused}")
        print(f"{client}, accumulation left at 3: {difference:.1e}, {warning}", flush=True)
        fine += [refused, warning, difference >= SEEN]
    if not all(fine):
        sys.exit("measure/clients/clients_cli.py: not all is as it should be")

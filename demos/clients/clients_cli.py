"""LLaMA-Factory and ms-swift, which have commands instead of scripts, on other ranks: `make clients-cli`.

    python demos/clients/clients_cli.py --output assets/clients_cli.txt

Installs both below .venv-clients-cli/, beside the torch and the DeepSpeed of this Python, makes a Llama of two layers,
its tokenizer and 288 rows, and starts their commands with `start` on PYTHONPATH: 20 steps on 4 ranks; then the
checkpoint of step 10 continues with the same command on other ranks. A number is the largest difference of the losses
of steps 11 to 20 from those of the run that went through. Ends with an error where a number is no rounding, or where
what was left out on purpose is not seen.
"""

import argparse
import functools
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
sys.path.insert(0, str(ROOT))

from demos import versions  # noqa: E402
from harness.machines import RENDEZVOUS, Node  # noqa: E402
from harness.ranks import free_port  # noqa: E402

HERE, BIN = ROOT / ".venv-clients-cli", Path(sys.executable).parent
STEPS, SAVED, BATCH, MICRO, LIMIT, ROWS = 20, 10, 24, 2, 400, 288
LF, SWIFT, NEW, OLD = "LLaMA-Factory", "ms-swift", versions.NEW, "0.18.4"
COMMANDS = {LF: ["llamafactory-cli", "train", "llamafactory.yaml"], SWIFT: ["swift", "sft", "swift.yaml"]}
TUNER, FLAG = {LF: "finetuning_type", SWIFT: "tuner_type"}, {LF: "{}={}", SWIFT: "--{}={}"}
KINDS = [(client, trains, stage, NEW) for client in COMMANDS for trains in ("full", "LoRA") for stage in (2, 3)]
KINDS += [(LF, "full", 3, OLD), (SWIFT, "full", 3, OLD)]
ROUNDING, SEEN, RANKS = 1e-5, 1e-3, (2, 3, 6)


def install(client):
    """(folder of its commands, folder to put on PYTHONPATH). Torch and DeepSpeed are those of this Python."""
    folder, unfinished = HERE / client, HERE / f"{client}.unfinished"
    if not folder.exists():
        shutil.rmtree(unfinished, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--ignore-installed", "--prefix", unfinished]
        subprocess.run([*pip, "-r", FOLDER / f"requirements-{client.lower()}.txt"], check=True, timeout=900)
        unfinished.rename(folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "torchaudio.py").touch()  # LLaMA-Factory imports it, and the one to be had wants another torch
    return folder / "bin", packages


def make_model(folder):
    """A Llama of two layers, its tokenizer of bytes, and rows, by the transformers of whoever is going to read them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

    set_seed(1)
    letters = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder / "model")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=320, bos_token_id=0, eos_token_id=1, pad_token_id=1, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    rows = []
    for _ in range(ROWS):
        a, b = random.randrange(1000), random.randrange(1000)
        rows.append({"instruction": f"What is {a} and {b}?", "input": "", "output": f"{a} + {b} = {a + b}"})
    (folder / "rows.json").write_text(json.dumps(rows))
    (folder / "dataset_info.json").write_text('{"rows": {"file_name": "rows.json"}}')


def prepare(work):
    """A folder with what the commands read."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    environment = os.environ | {"PYTHONPATH": str(install(LF)[1]), "DS_ACCELERATOR": "cpu"}
    making = [sys.executable, __file__, "--make_model", "--work", work]
    subprocess.run(making, check=True, timeout=LIMIT, env=environment)
    auto = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto")
    for stage, batch in itertools.product((2, 3), ("auto", BATCH)):
        config = auto | {"train_batch_size": batch, "zero_optimization": {"stage": stage}}
        config["zero_allow_untested_optimizer"] = True
        (work / f"zero{stage}_{batch}.json").write_text(json.dumps(config))


def start(work, name, kind, ranks, lines, ours=True, batch="auto", steps=None, **machine):
    """The node of the client's command. steps: accumulation steps, those that keep the batch if not given."""
    client, trains, stage, deepspeed = kind
    commands, packages = install(client)
    path = [ROOT / "universal" / "start"] * ours + [FOLDER / "on_cpu"]
    path += [] if deepspeed == NEW else [versions.install(deepspeed)]
    environment = {
        "PYTHONPATH": ":".join(map(str, [*path, packages])), "PATH": f"{commands}:{BIN}:{os.environ['PATH']}",
        "NPROC_PER_NODE": ranks, "MASTER_PORT": free_port(), "FORCE_TORCHRUN": 1, "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": 1, "HF_HOME": work / "home", "MODELSCOPE_CACHE": work / "home",
    }  # fmt: skip
    flags = {
        "output_dir": work / name, "deepspeed": work / f"zero{stage}_{batch}.json", TUNER[client]: trains.lower(),
        "gradient_accumulation_steps": steps or BATCH // MICRO // ranks,
    }  # fmt: skip
    if client == SWIFT and (work / name).exists():  # LLaMA-Factory looks by itself
        flags["resume_from_checkpoint"] = work / name / f"checkpoint-{SAVED}"
    *words, settings = COMMANDS[client]
    command = ["env", "-C", str(work), *(f"{key}={value}" for key, value in (environment | machine).items())]
    command += [*words, str(ROOT / "examples" / settings)]
    return Node(command + [FLAG[client].format(key, value) for key, value in flags.items()], lines)


@functools.cache
def run(work, name, kind, ranks, source=None, lose=False, **options):
    """({step: loss} of steps 11 to 20 or the error that it stopped with, what the package warned of). source: the run
    whose checkpoint it goes on from. lose: LLaMA-Factory's elastic mode, two machines one of which dies after
    step 13."""
    lines, machines = [], [{}]
    if source:
        saved = work / source / f"checkpoint-{SAVED}"
        assert saved.is_dir(), f"{source} has saved nothing: {saved.parent}.log"
        shutil.copytree(saved, work / name / saved.name)
    if lose:
        machine = {"RDZV_ID": "job", "MIN_NNODES": 1, "MAX_NNODES": 2, "MAX_RESTARTS": 3, "MASTER_PORT": free_port()}
        machine["PET_LOCAL_ADDR"] = "127.0.0.1"
        machines = [machine | {"PET_RDZV_CONF": f"{RENDEZVOUS},is_host={host}"} for host in (1, 0)]
    nodes = [start(work, name, kind, ranks, lines, **machine, **options) for machine in machines]
    try:
        deadline, progress = time.time() + LIMIT, work / name / "trainer_log.jsonl"
        while lose and time.time() < deadline and nodes[0].agent.poll() is None:
            lose = not progress.exists() or progress.read_text().count("\n") < SAVED + 3
            time.sleep(0.1)
        for node in nodes[1:]:
            node.kill()
        nodes[0].agent.wait(timeout=LIMIT)
    finally:  # whatever they have started ends with them
        for node in nodes:
            node.kill()
            node.reader.join(timeout=10)
        text = "".join(line for _, line in lines)
        (work / f"{name}.log").write_text(text)
    warning = re.search(r"universal: (WARNING: .*)", text)
    state = work / name / f"checkpoint-{STEPS}" / "trainer_state.json"
    if state.exists():
        history = json.loads(state.read_text())["log_history"]
        found = {row["step"]: row["loss"] for row in history if "loss" in row and row["step"] > SAVED}
    else:
        errors = re.findall(r"^\[rank\d+\]: (?:\w+\.)*(\w*(?:Error|Exception): .*)", text, re.M)
        found = errors[-1] if errors else "no error, and no end"
    return found, warning and warning[1]


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
            elastic = {"steps": 3, "batch": BATCH, "lose": True}
            stop, _ = run(work, f"{name}-elastic-without", kind, 2, ours=False, **elastic)
            lost = gap(run(work, f"{name}-elastic", kind, 2, **elastic)[0], wanted)
            yield f"  elastic mode, one of two machines dies: {lost:.1e}"
            yield f"  the same without the folder on PYTHONPATH: {str(stop).split('. Auto')[0]}"
            right += [lost <= ROUNDING, "24 != 2 * 3 * 2" in stop]  # nor would it load, if the batch were right
        if not all(right):
            problems.append(f"{name}: {right}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out/clients_cli.txt"))
    parser.add_argument("--work", type=Path, default=Path("runs/clients_cli"), help="models, checkpoints and logs")
    parser.add_argument("--make_model", action="store_true", help="the model and the rows alone, into --work")
    args = parser.parse_args()
    if args.make_model:
        sys.exit(make_model(args.work))
    work, problems, lines = args.work.resolve(), [], []
    prepare(work)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    for line in itertools.chain(table(work, problems), left_out(work, problems)):
        print(line, flush=True)
        lines.append(line)
    args.output.write_text("\n".join(lines) + "\n")
    sys.exit("\n".join(problems) or 0)

"""What docs/lesson.ipynb needs besides its subject: it installs, runs commands, draws, and compares
files. Students need not read it. Only install() works without torch and matplotlib."""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import textwrap
import time
from collections import Counter
from importlib import metadata
from pathlib import Path

FOLDER = Path("ckpt_lesson")  # all checkpoints of the lesson
# Of a training: the launcher's lines, and 9 of 10 steps.
CHATTER = re.compile(r"\[20|Traceback|  |\s*$|step \d*[1-9] ")
CODE = re.compile(r"```python\n(.*?)```", re.S)


def version(package):
    try:
        return metadata.version(package).split("+")[0]  # without +cpu or +cu130
    except metadata.PackageNotFoundError:
        return "none"


def install():
    """Install the pinned torch and DeepSpeed, and matplotlib, where they are not there."""
    # Use this Python's `deepspeed` and `python`.
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    requirements = Path("requirements.txt").read_text()
    pins = dict(re.findall(r"^(torch|deepspeed)==(\S+)$", requirements, re.M))
    missing = [f"{name}=={pin}" for name, pin in pins.items() if version(name) != pin]
    if version("matplotlib") == "none":
        missing.append("matplotlib")
    if missing:
        command = [sys.executable, "-m", "pip", "install", "-q", *missing]
        if not shutil.which("nvidia-smi"):
            command += ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]
        subprocess.run(command, check=True)
    print("installed:", ", ".join(missing) or "nothing, all is there")


def free_port():
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


def run(command, may_fail=False):
    """Run a command as a terminal would. Show the lines that matter, each once, and its time."""
    print("$", command, flush=True)
    words = shlex.split(command)
    trains = words[0] == "deepspeed"
    if trains:  # others may train on this machine
        words[1:1] = ["--master_port", str(free_port())]
    began = time.time()
    seen = set()
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout:
            line = re.sub(r"^\[rank\d+\]: ", "", line)
            if line not in seen and not (trains and CHATTER.match(line)):
                print(line, end="", flush=True)
            seen.add(line)
    print(f"({time.time() - began:.0f} s)")
    if process.returncode and not may_fail:
        raise RuntimeError("this command failed; the reason is above")


def show(baseline, *others):
    """Draw the losses of these runs. Print, and return by step, how far each is from the first."""
    import plot

    runs = {name: plot.read_log(f"logs/{name}.csv") for name in (baseline, *others)}
    gaps = {name: plot.differences(runs[baseline], runs[name], "loss") for name in others}
    for name, gap in gaps.items():
        first = min(gap)
        largest = max(gap.values())
        print(f"{name} against {baseline}: {gap[first]:.1e} at step {first}, at most {largest:.1e}")
    labels = {f"{name}, {run.layout.ranks} ranks": run for name, run in runs.items()}
    figure = plot.draw(labels, list(gaps.values()))
    figure.set_figheight(figure.get_figheight() + 0.5 * len(gaps))
    display_and_close(figure)
    return gaps


def display_and_close(figure):
    import matplotlib.pyplot as plt
    from IPython.display import display

    display(figure)
    plt.close(figure)


def finishes(command):
    """Whether a command ends without an error. Shows nothing of it."""
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            run(command)
        except RuntimeError:
            return False
    return True


def solution(name):
    """The function that a folded answer defines, from the notebook's file."""
    import torch

    cells = json.loads(Path("docs/lesson.ipynb").read_text())["cells"]
    answers = [CODE.findall("".join(cell["source"])) for cell in cells]
    (code,) = [code for blocks in answers for code in blocks if f"def {name}(" in code]
    names = {"torch": torch}
    exec(code, names)
    return names[name]


# --------------------------------------------------------------------------------------------------
# parts 2 and 3: files


def draw_shards(shards):
    """Draws where each matrix of the first group lies at stage 1; those that are cut are blue."""
    slices = [shard["param_slice_mappings"][0].items() for shard in shards]
    draw_slices([[(name, piece.numel) for name, piece in pieces] for pieces in slices])


def draw_stage_3(shapes, ranks):
    """The same at stage 3, which cuts each matrix by itself."""
    share = [(name, -(-shape.numel() // ranks)) for name, shape in shapes.items()]
    draw_slices([share] * ranks)


def draw_slices(slices):
    """A bar for each rank, of [(name, elements)]."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(5, 3), layout="constrained")
    ranks_with = Counter(name for pieces in slices for name, _ in pieces)
    for rank, pieces in enumerate(slices):
        at = 0
        size = sum(numel for _, numel in pieces)
        for i, (name, numel) in enumerate(pieces):
            color = "#56B4E9" if ranks_with[name] > 1 else ("0.8", "0.9")[i % 2]
            bar = axis.barh(rank, numel, left=at, color=color, edgecolor="white")
            short = re.sub(r"blocks\.|attn\.|\.weight", "", name)
            rotation = 90 if numel < size / 10 else 0
            axis.bar_label(bar, [short], label_type="center", rotation=rotation, fontsize=9)
            at += numel
    axis.set(
        title="blue: cut",
        xlabel="elements of the first group",
        ylabel="rank",
        yticks=range(len(slices)),
    )
    axis.invert_yaxis()
    display_and_close(figure)


def save(content, path):
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)


def write_the_rest(model, shard, weights, moments, step, output):
    """What DeepSpeed's loader needs besides the parameters: learning rate, loss scale, schedule."""
    groups = shard[moments]["param_groups"]
    same = {
        key: value
        for key, value in groups[0].items()
        if all(group[key] == value for group in groups)
    }
    rest = {
        key: shard[key] for key in shard if key not in (weights, moments, "param_slice_mappings")
    }
    rest |= {"ds_version": model["ds_version"], "param_groups": groups}
    stage_3 = {"state": {0: {"step": step}}, "param_groups": [same]}
    rest["optimizer_state_dict"] = stage_3  # where stage 3 looks
    save(rest, output / "zero" / "optimizer_state.pt")
    for prefix in ("", "zero_pp_rank_0_"):  # the file's name at stages 1 and 2, and at stage 3
        save(
            model | {"module": {}, "frozen_param_fragments": None},
            output / f"{prefix}mp_rank_00_model_states.pt",
        )


def tensor_in(content):
    return content["param"] if isinstance(content, dict) else content  # step.pt is a tensor


def difference(path, right_path):
    """Says how the tensors in two files differ; None if they have the same bits."""
    import torch

    tensor, right = (tensor_in(torch.load(file, weights_only=False)) for file in (path, right_path))
    if tensor.shape != right.shape:
        return f"the shape is {tuple(tensor.shape)}, should be {tuple(right.shape)}"
    if tensor.dtype != right.dtype:
        return f"the type is {tensor.dtype}, should be {right.dtype}"
    if tensor.numpy().tobytes() != right.numpy().tobytes():
        return f"{(tensor != right).sum()} of {right.numel()} numbers differ"
    return None


def assert_same_bits(mine, real):
    """Each parameter's files are the same in both folders."""
    files = [sorted(folder.glob("zero/*/*.pt")) for folder in (mine, real)]
    names = [
        [str(path.relative_to(folder)) for path in paths]
        for folder, paths in zip((mine, real), files, strict=True)
    ]
    assert names[0] == names[1], "not the same parameters, or not the same states"
    wrong = [
        f"{name}: {words}" for name in names[0] if (words := difference(mine / name, real / name))
    ]
    assert not wrong, f"{len(wrong)} of {len(names[0])} files differ; {wrong[0]}"
    sizes = [sum(path.stat().st_size for path in paths) for paths in files]
    assert sizes[0] < 2 * sizes[1], (
        f"{sizes[0]:,} bytes in place of {sizes[1]:,}: is there a .clone()?"
    )
    print(f"{len(names[0])} files are the same, bit for bit")


# --------------------------------------------------------------------------------------------------
# part 4: a fault


def plant(name, files, value):
    """Copy the universal checkpoint `mine` to `name`, and fill the tensors in these files."""
    import torch

    shutil.rmtree(FOLDER / name, ignore_errors=True)
    shutil.copytree(FOLDER / "mine", FOLDER / name)
    paths = list((FOLDER / name / "zero").glob(files))
    assert paths, f"no file is called {files}"
    for path in paths:
        content = torch.load(path)
        tensor_in(content).fill_(value)
        save(content, path)


# --------------------------------------------------------------------------------------------------
# part 5: the traps


def cut_short(targets, step):
    """The same targets, in sequences of unequal length: the loss ignores targets of -100."""
    import torch

    from train import derive_seed

    generator = torch.Generator().manual_seed(derive_seed("length", step))
    lengths = torch.randint(1, targets.size(1) + 1, (len(targets), 1), generator=generator)
    return targets.masked_fill(torch.arange(targets.size(1)) >= lengths, -100)


def share_of_tokens(targets, rows):
    return (targets[rows] >= 0).sum().item() / (targets >= 0).sum().item()


def make_optimizer(model):
    """AdamW, and a schedule that warms up for 20 steps."""
    import torch

    from train import parameter_groups

    optimizer = torch.optim.AdamW(parameter_groups(model), lr=1e-3, betas=(0.9, 0.95))
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1, (done + 1) / 20))
    return optimizer, warm_up


def measure(right, trapped):
    """What a trap does, from two logs: its gaps, and what changes at the first and tenth step."""
    return {
        "gaps": [abs(x["loss"] - y["loss"]) for x, y in zip(right, trapped, strict=True)],
        "norm": trapped[0]["norm"] / right[0]["norm"],
        "sequences": trapped[0]["sequences"],
        "rate": trapped[9]["rate"] / right[9]["rate"],
    }


def print_traps(measured):
    print(f"{'':39}{'largest':>12}{'norm of the':>16}{'sequences':>12}{'learning':>12}")
    print(f"{'':39}{'difference':>12}{'1st gradient':>16}{'in a step':>12}{'rate, 10th':>12}")
    for name, trap in measured.items():
        print(f"{name:39}{max(trap['gaps']):>12.1e}{trap['norm']:>14.3f} x", end="")
        print(f"{trap['sequences']:>12}{trap['rate']:>10.2f} x")


def draw_traps(measured):
    """A difference of zero has no dot."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        5, 2, figsize=(5, 7), sharex=True, sharey=True, layout="constrained"
    )
    for axis, (name, trap) in zip(axes.T.flat, measured.items(), strict=True):
        axis.semilogy(range(1, len(trap["gaps"]) + 1), trap["gaps"], ".", nonpositive="mask")
        axis.set_title(textwrap.fill(name, 24, break_on_hyphens=False), fontsize=10)
        axis.set_yticks([1e-6, 1e-3, 1])
        axis.grid(color="0.92")
    figure.suptitle("What each trap does to the loss")
    figure.supxlabel("step")
    figure.supylabel("|difference of the loss|")
    display_and_close(figure)

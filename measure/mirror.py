"""How long a save, or a copy in another machine's memory, stops the training.

    python -m measure.mirror --output out/mirror.png
    python -m measure.mirror --device cuda --ranks 2

A GPT of 43 million parameters on 2 ranks, each on a "machine" of its own; both are on this machine,
and share its cores. Every round does each way in turn; medians over the rounds:

    blocked    ms that the training waits before the next step
    sleeps     ms by which the next step is longer, if it sleeps, as where a GPU computes
    computes   the same of a step that computes on the CPU
    safe       ms until two machines hold the step, or the disk does
    work       ms of CPU time of this rank, of all its threads, and for the kernel
    copied     MB of rank 0

The ways: plain copies of rank 0's tensors into memory that is kept, of those that a save writes and
of those that the mirror sends; Mirror, in the background and with wait=True; DeepSpeed's own
engine.save_checkpoint(), and in the background, each into a new folder. If lm-resiliency is
installed (0.2.0), its copy in a neighbor's memory, too: of other tensors, for the same ranks alone.

The picture: steps that sleep, with a copy or a save at each. Ends with an error where training goes
on otherwise from a copy, or where a save in the background has other numbers than a plain one.
"""

import contextlib
import functools
import itertools
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import matplotlib
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from matplotlib.figure import Figure

import universal
from measure import options, resume
from measure.cards import run_on
from universal import background
from universal.diff import diff
from universal.mirror import Mirror
from universal.save.snapshot import Image, files_of_save

BATCH, ROUNDS = 4, 5
LAYERS = 6  # of 12: each way keeps copies of its own, and all must fit
IDLE = 0.5  # seconds
STEPS = 12  # of each line of the picture
DRAWN = 1  # the ZeRO stage
NONE = ("nothing", "0.8", "no copy, no save")
PANELS = [  # title, and for each line a way, its color and its label
    (
        "a copy in another machine's memory",
        NONE,
        ("Mirror, wait", "#D55E00", "the training waits"),
        ("Mirror", "#0072B2", "in the background"),
    ),
    (
        "a save to the disk",
        NONE,
        ("save", "#D55E00", "the training waits"),
        ("save, background", "#0072B2", "in the background"),
    ),
]
matplotlib.rcParams["font.size"] = 12


def wait_for_nothing():
    pass


def storages_of(images):
    return [
        torch.tensor([], dtype=torch.uint8, device=storage.device).set_(storage)
        for image in images
        for storage in image.storages
    ]


def plain_copy(tensors):
    """Returns (save, finish, bytes)."""
    copies = [torch.empty_like(tensor, device="cpu") for tensor in tensors]

    def save():
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor)

    return save, wait_for_nothing, sum(tensor.numel() for tensor in tensors)


def peer(engine, folder):
    """Returns lm-resiliency's (save, finish, bytes)."""
    from lm_resiliency import InMemoryCkptConfig
    from lm_resiliency.integrations.deepspeed import enable_resiliency

    never = 10**9
    config = InMemoryCkptConfig(
        enable=True,
        interval=never,
        replication_jump=1,
        disk_flush_interval=0,
        disk_folder=folder,
        run_id="x",
        pin_memory=False,
        skip_replication_if_hsdp=False,
    )
    adapter = enable_resiliency(
        engine,
        interval=never,
        enable_detection=False,
        ckpt_config=config,
        device=engine.device,
    )
    manager = adapter._ckpt_manager
    tensors = adapter._checkpoint_tensor_list

    def save():
        manager.save_tensors(tensors(), engine.global_steps)

    def finish():
        manager.maybe_wait()
        assert manager.finalize_replication(60)

    return save, finish, sum(tensor.numel() * tensor.element_size() for tensor in tensors())


def sync_files(disk):
    for path in Path(disk).glob("*/*.pt"):
        with path.open("rb") as file:
            os.fsync(file.fileno())


def remove_old(disk):
    """Remove all saves but the last two."""
    if dist.get_rank() == 0:
        for folder in sorted(Path(disk).glob("save*"), key=os.path.getmtime)[:-2]:
            shutil.rmtree(folder)


def ways_of(engine, mirror, disk):
    """Returns (save, finish, bytes) of each way, by its name. One mirror, which waits or not: two
    would take turns in finding no memory to use again."""
    save = lambda: engine.save_checkpoint(disk, "copied", {}, False)  # noqa: E731
    files = files_of_save(engine, save)
    ways = {"copy, of a save": plain_copy(storages_of(Image(*file) for file in files))}
    mirror.leave_out(files)
    ways["copy, of a mirror"] = plain_copy(storages_of(Image(*file) for file in files))
    of_save, of_mirror = (nbytes for _, _, nbytes in ways.values())
    with contextlib.suppress(ImportError):
        ways["lm-resiliency"] = peer(engine, f"{mirror.folder}_peer")

    def save_and_wait():
        mirror.save({})
        mirror.finish()

    ways["Mirror"] = (lambda: mirror.save({}), mirror.finish, of_mirror)
    ways["Mirror, wait"] = (save_and_wait, wait_for_nothing, of_mirror)
    universal.install(proof=False, background=True)
    own = type(engine).save_checkpoint.__wrapped__
    tags = (f"save{number}" for number in itertools.count())
    ways["save, background"] = (
        lambda: engine.save_checkpoint(disk, next(tags)),
        background.wait,
        of_save,
    )
    ways["save"] = (lambda: own(engine, disk, next(tags)), lambda: sync_files(disk), of_save)
    return ways


def idle():
    time.sleep(IDLE)


def train(engine, *seeds):
    """Returns the loss of the steps whose samples have these seeds."""
    losses = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randint(256, (BATCH // 2, resume.LENGTH + 1), generator=generator)
        rows = rows.to(engine.device)
        loss = engine(rows[:, :-1], rows[:, 1:])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def seconds_of(*actions):
    """Returns the seconds from one step to the next; all ranks begin together and end together."""
    dist.barrier()
    times = [time.perf_counter()]
    for action in actions:
        action()
        get_accelerator().synchronize()
        times.append(time.perf_counter())
    dist.barrier()
    return [end - times[0] for end in times[1:]]


def costs(save, finish, compute):
    """Returns the seconds of a round of one way."""
    row = []
    for step in (idle, compute):
        work = time.process_time()
        row += seconds_of(save, step, finish)
        row += [time.process_time() - work]
    # Until it is safe, without a step at the same time.
    return row + seconds_of(save, finish)


def step_times(save, finish, disk):
    """Returns the seconds of steps that sleep, and save."""
    seconds = []
    for _ in range(STEPS):
        remove_old(disk)
        dist.barrier()
        start = time.perf_counter()
        idle()
        save()
        seconds.append(time.perf_counter() - start)
    finish()
    return seconds


def check(engine, mirror, disk):
    """Train while a copy and a save are under way: both must be of the step that began them."""
    mirror.save({})
    after = train(engine, 1)
    mirror.finish()
    after += train(engine, 2, 3)
    folder = mirror.gather(f"{disk}/none")
    universal.load_checkpoint(engine, folder, missing_ok=True)
    gap = max(abs(a - b) for a, b in zip(after, train(engine, 1, 2, 3), strict=True))
    assert gap <= 1e-2, gap
    type(engine).save_checkpoint.__wrapped__(engine, disk, "plain")
    engine.save_checkpoint(disk, "background")
    train(engine, 1, 2, 3)  # a copy that is not made yet would have their numbers
    background.wait()
    dist.barrier()
    assert diff(f"{disk}/plain", f"{disk}/background")["same"]
    dist.barrier()


def measure_ways(stage, memory, disk):
    """Measure all ways, on every rank; rank 0 prints the costs."""
    resume.SHAPE["n_layer"] = LAYERS
    engine = resume.make_engine(BATCH, BATCH // int(os.environ["WORLD_SIZE"]), stage)
    compute = functools.partial(train, engine, 0)
    compute()  # makes the states
    mirror = Mirror(engine, Path(memory, f"machine{dist.get_rank()}"))
    ways = {"nothing": (wait_for_nothing, wait_for_nothing, 0), **ways_of(engine, mirror, disk)}
    rows = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, (save, finish, _) in ways.items():
            rows[name].append(costs(save, finish, compute))
            remove_old(disk)
    # The first round makes memory, and is slower.
    medians = {
        name: [1e3 * statistics.median(column[1:]) for column in zip(*row, strict=True)]
        for name, row in rows.items()
    }
    names = {name for _, *lines in PANELS for name, _, _ in lines} if stage == DRAWN else ()
    steps = {name: step_times(*ways[name][:2], disk) for name in sorted(names)}
    check(engine, mirror, disk)
    print("\n" + json.dumps([medians, {name: way[2] / 1e6 for name, way in ways.items()}, steps]))
    os._exit(0)  # the peer's threads do not end


def print_rows(stage, medians, sizes):
    _, slept, _, no_work, _, computed, *_ = medians.pop("nothing")
    for name, row in medians.items():
        blocked, with_sleep, _, work, _, with_step, _, _, _, safe = row
        cells = (blocked, with_sleep - slept, with_step - computed, safe, work - no_work)
        numbers = "".join(f"{cell:>10.0f}" for cell in (*cells, sizes[name]))
        print(f"{stage:>4}  {name:<17}{numbers}", flush=True)


def draw(steps, path):
    """Draws the seconds of each step. steps: {way: seconds of each step}."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, (title, *lines) in zip(axes, PANELS, strict=True):
        for name, color, label in lines:
            milliseconds = [1e3 * seconds for seconds in steps[name]]
            broad = 9 if name == "nothing" else 3.5
            axis.plot(range(1, STEPS + 1), milliseconds, color=color, linewidth=broad, label=label)
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.set_ylim(0, 1.05e3 * max(map(max, steps.values())))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("ms of a step")
    lines = axes[0].get_lines()
    figure.legend(handles=lines, loc="outside lower center", ncols=len(lines), frameon=False)
    figure.savefig(path, dpi=120)


def main():
    parser = options.parser(__doc__)
    parser.add_argument("--output", type=options.place, help="the picture")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks", type=int, default=2, help="of --device cuda")
    args = parser.parse_args()
    Path("out").mkdir(exist_ok=True)
    print("                                    longer a step that")
    print("ZeRO                     blocked    sleeps  computes      safe      work    copied")
    print("                              ms        ms        ms        ms    CPU ms        MB")
    for stage in (1, 3):
        with (
            tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
            tempfile.TemporaryDirectory(dir="out") as disk,
        ):
            work = (measure_ways, stage, memory, str(Path(disk).resolve()))
            out = run_on(args.device, Path.cwd(), args.ranks, *work, limit=900)
        medians, sizes, steps = json.loads(out.splitlines()[-1])
        print_rows(stage, medians, sizes)
        if steps and args.output:
            draw(steps, args.output)


if __name__ == "__main__":
    main()

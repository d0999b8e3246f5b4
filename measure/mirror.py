"""How long a save, or a copy in another machine's memory, stops the training.

    python -m measure.mirror

A GPT of 43 million parameters on 2 ranks, each on a "machine" of its own; both are on this machine,
and share its cores. Every round does each way in turn; medians over the rounds, in milliseconds:

    blocked    what the training waits for before the next step
    a step     by how much a step is longer that follows, if it sleeps, as the CPU does where a GPU
               computes, and if it computes on the CPU
    safe       until two machines hold the step, or the disk does
    work       CPU time of this rank, of all its threads, and for the kernel
    MB         what rank 0 copies

The ways: a plain copy of rank 0's tensors into memory that is kept; Mirror, in the background and
with wait=True; engine.save_checkpoint() in the background, and DeepSpeed's own. If lm-resiliency is
installed (0.2.0), its copy in a neighbor's memory, too: of fewer tensors, for the same ranks alone.
"""

import contextlib
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import universal
from measure import resume
from tests.support.ranks import run
from universal import background
from universal.load.hooks import overridden
from universal.load.snapshot import Collector, Image
from universal.mirror import Mirror

BATCH, ROUNDS = 4, 5
LAYERS = 6  # of 12: each way keeps copies of its own, and all must fit
IDLE = 0.5  # seconds


def wait_for_nothing():
    pass


def plain_copy(engine, disk):
    """Returns (save, finish, bytes)."""
    collector = Collector()
    with overridden(engine, checkpoint_engine=collector):
        engine.save_checkpoint(disk, tag="copied", save_latest=False)
    images = [Image(path, content) for path, content in collector.files]
    tensors = [
        torch.tensor([], dtype=torch.uint8).set_(storage)
        for image in images
        for storage in image.storages
    ]
    copies = [torch.empty_like(tensor) for tensor in tensors]

    def save():
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor)

    return save, wait_for_nothing, sum(tensor.numel() for tensor in tensors)


def peer(engine, folder):
    """lm-resiliency's. Returns (save, finish, bytes)."""
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
        device=torch.device("cpu"),
    )
    manager = adapter._ckpt_manager
    tensors = adapter._checkpoint_tensor_list

    def save():
        manager.save_tensors(tensors(), engine.global_steps)

    def finish():
        manager.maybe_wait()
        assert manager.finalize_replication(60)

    return save, finish, sum(tensor.numel() * tensor.element_size() for tensor in tensors())


def ways_of(engine, memory, disk):
    """{name: (save, finish, bytes)}"""
    machine = Path(memory, f"machine{dist.get_rank()}")
    copy, nothing, nbytes = plain_copy(engine, disk)
    ways = {"a plain copy": (copy, nothing, nbytes)}
    with contextlib.suppress(ImportError):
        ways["lm-resiliency"] = peer(engine, f"{machine}_peer")
    # One mirror, which waits or not: two would take turns in finding no memory to use again.
    mirror = Mirror(engine, machine)

    def save_and_wait():
        mirror.save({})
        mirror.finish()

    ways["Mirror"] = (lambda: mirror.save({}), mirror.finish, nbytes)
    ways["Mirror, wait"] = (save_and_wait, nothing, nbytes)
    universal.install(proof=False, background=True)
    plain = type(engine).save_checkpoint.__wrapped__

    def sync_files():
        for path in Path(disk, "plain").glob("*.pt"):
            with path.open("rb") as file:
                os.fsync(file.fileno())

    save = lambda: engine.save_checkpoint(disk, tag="background")  # noqa: E731
    ways["save, background"] = (save, background.wait, nbytes)
    ways["save"] = (lambda: plain(engine, disk, tag="plain"), sync_files, nbytes)
    return ways


def measure_ways(stage, memory, disk):
    """What each rank does; rank 0 prints the costs."""
    resume.SHAPE["n_layer"] = LAYERS
    engine = resume.make_engine(BATCH, BATCH // int(os.environ["WORLD_SIZE"]), stage)

    def idle():
        time.sleep(IDLE)

    def compute():
        rows = torch.randint(256, (BATCH // 2, resume.LENGTH + 1))
        engine.backward(engine(rows[:, :-1], rows[:, 1:]))
        engine.step()

    def seconds_of(*actions):
        """From one to the next; all ranks begin together and end together."""
        dist.barrier()
        times = [time.perf_counter()]
        for action in actions:
            action()
            times.append(time.perf_counter())
        dist.barrier()
        return [end - times[0] for end in times[1:]]

    compute()  # makes the states
    ways = {"nothing": (wait_for_nothing, wait_for_nothing, 0), **ways_of(engine, memory, disk)}
    rows = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, (save, finish, _) in ways.items():
            row = []
            for step in (idle, compute):
                work = time.process_time()
                row += seconds_of(save, step, finish)
                work = time.process_time() - work
                row += [work]
            # Until it is safe, without a step at the same time.
            row += seconds_of(save, finish)
            rows[name].append(row)
    # The first round makes memory, and is slower.
    medians = {
        name: [1e3 * statistics.median(column[1:]) for column in zip(*row, strict=True)]
        for name, row in rows.items()
    }
    print("\n" + json.dumps([medians, {name: way[2] / 1e6 for name, way in ways.items()}]))
    os._exit(0)  # the peer's threads do not end


def main():
    Path("out").mkdir(exist_ok=True)
    print("                                    longer a step that")
    print("ZeRO                    blocked     sleeps   computes     safe    work        MB")
    for stage in (1, 3):
        with (
            tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
            tempfile.TemporaryDirectory(dir="out") as disk,
        ):
            out = run(Path.cwd(), 2, measure_ways, stage, memory, disk, limit=900)
        medians, sizes = json.loads(out.splitlines()[-1])
        _, slept, _, no_work, _, computed, *_ = medians.pop("nothing")
        for name, row in medians.items():
            blocked, with_sleep, _, work, _, with_step, _, _, _, safe = row
            cells = (blocked, with_sleep - slept, with_step - computed, safe, work - no_work)
            numbers = "".join(
                f"{cell:>{width}.0f}" for cell, width in zip(cells, (8, 11, 11, 9, 8), strict=True)
            )
            print(f"{stage:>4}  {name:<17}{numbers}{sizes[name]:>10.2f}", flush=True)


if __name__ == "__main__":
    main()

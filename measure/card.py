"""What loads, saves, the mirror and the proof cost on a card: the ranks of measure/gpu.py.

    torchrun --standalone --nproc-per-node 1 -m measure.gpu measure/card.py loads 1 /dev/shm/loads

The last words are the ZeRO stage and a folder for its files. Rank 0 prints a line that begins with
RESULT; an exit code other than 0 says that something is wrong."""

import os
import re
import statistics
import sys
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import universal
import universal.background
from train import GPT
from universal.diff import diff
from universal.mirror import Mirror

DEVICE = get_accelerator()
IS_CARD = DEVICE.device_name() == "cuda"
# Layers, heads, width, bytes of a sequence: 473 million parameters, or 0.4.
SIZE = (24, 20, 1280, 256) if IS_CARD else (2, 4, 128, 64)
MICRO = 8
ROUNDS = 3
WATCHED = 10  # steps, by a proof


def text_of(numbers, digits=1):
    return ", ".join(f"{number:.{digits}f}" for number in numbers)


def seconds_of(work):
    DEVICE.synchronize()
    began = time.perf_counter()
    work()
    DEVICE.synchronize()
    return time.perf_counter() - began


def host_megabytes(which):
    return int(re.search(rf"{which}:\s*(\d+)", Path("/proc/self/status").read_text())[1]) / 1e3


class Training:
    """A GPT in bf16, which has made three steps: a fresh engine holds no moments yet."""

    def __init__(self, stage):
        self.model = GPT(*SIZE, dropout=0.0)
        adam = {"torch_adam": True, "lr": 1e-4, "fused": IS_CARD}
        config = {
            "train_micro_batch_size_per_gpu": MICRO,
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": adam},
        }
        self.engine, *_ = deepspeed.initialize(
            model=self.model, model_parameters=self.model.parameters(), config=config
        )
        generator = torch.Generator().manual_seed(dist.get_rank())
        size = (MICRO, SIZE[-1] + 1)
        self.data = torch.randint(0, 256, size, generator=generator).to(self.engine.device)
        self.steps(3)

    def step(self):
        loss = self.engine(self.data[:, :-1], self.data[:, 1:], key=(0,))
        self.engine.backward(loss)
        self.engine.step()
        return loss.item()

    def steps(self, count):
        return [self.step() for _ in range(count)]


def loads(training):
    """Loads beside DeepSpeed's own, in turns; memory is what they hold above the training."""
    engine = training.engine
    stock = deepspeed.DeepSpeedEngine.load_checkpoint
    saved = seconds_of(lambda: engine.save_checkpoint("loads", "tag"))
    universal.install(proof=False)
    ways = {
        "DeepSpeed": lambda: stock(engine, "loads", "tag"),
        "ours": lambda: engine.load_checkpoint("loads", "tag"),
    }
    seconds, card, host = ({way: [] for way in ways} for _ in range(3))
    for _ in range(ROUNDS):
        for way, load in ways.items():
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            held = host_megabytes("VmRSS")
            if IS_CARD:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                allocated = torch.cuda.memory_allocated()
            seconds[way].append(seconds_of(load))
            host[way].append(host_megabytes("VmHWM") - held)
            card[way].append(
                (torch.cuda.max_memory_allocated() - allocated) / 1e6 if IS_CARD else 0
            )
    costs = [
        f"{way} {text_of(seconds[way])} s, {max(card[way]):.0f} MB of the card, "
        f"{max(host[way]):.0f} of the host"
        for way in ways
    ]
    return f"{'; '.join(costs)}; DeepSpeed's save {saved:.1f} s"


def background(training):
    """Saves in the background, in turns with plain ones; three steps are trained meanwhile."""
    engine = training.engine
    plain = deepspeed.DeepSpeedEngine.save_checkpoint
    universal.install(background=True)
    plainly, blocked, done = [], [], []
    for _ in range(ROUNDS):
        plainly.append(seconds_of(lambda: plain(engine, "saves", "plain")))
        began = time.perf_counter()
        engine.save_checkpoint("saves", "background")
        blocked.append(1e3 * (time.perf_counter() - began))
        training.steps(3)  # a copy that is not made yet would have their numbers
        universal.background.wait()
        done.append(time.perf_counter() - began)
        dist.barrier()
        assert diff("saves/plain", "saves/background")["same"]
        dist.barrier()
    return (
        f"plain {text_of(plainly)} s; in the background {text_of(blocked, 0)} ms, on disk after "
        f"{text_of(done)} s; diff says EQUAL, {ROUNDS} of {ROUNDS}"
    )


def mirror(training):
    """Steps are mirrored, three more made, and the last mirrored one goes on."""
    engine = training.engine
    universal.install(proof=False)
    memory = Mirror(engine, f"mirror/{dist.get_rank()}")
    blocked, safe = [], []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        memory.save({"step": engine.global_steps})
        blocked.append(1e3 * (time.perf_counter() - began))
        after = training.steps(1)  # while it is sent
        memory.finish()
        safe.append(1e3 * (time.perf_counter() - began))
    after += training.steps(2)
    folder = memory.gather("mirror/none")
    universal.load_checkpoint(engine, folder, missing_ok=True)
    again = training.steps(3)
    gap = max(abs(a - b) for a, b in zip(after, again, strict=True))
    memory.close()
    assert gap <= 1e-2, gap
    return (
        f"a step waits {text_of(blocked, 0)} ms; safe, with the next step, after "
        f"{text_of(safe, 0)} ms; the loss goes on {gap:.1e} apart"
    )


def proof(training):
    """Steps with the proof and without, in turns."""

    def median():
        times = [1e3 * seconds_of(training.step) for _ in range(WATCHED)]
        return statistics.median(times)

    without, watched = [], []
    universal.install()
    for _ in range(ROUNDS):
        without.append(median())
        training.engine.save_checkpoint("proof", "tag")
        watched.append(median())
    return f"a step takes {text_of(without)} ms, with the proof {text_of(watched)} ms"


def main():
    what, stage, folder = sys.argv[1:]
    os.chdir(folder)
    if IS_CARD:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel("ERROR")
    deepspeed.init_distributed()
    work = {"loads": loads, "background": background, "mirror": mirror, "proof": proof}[what]
    result = work(Training(int(stage)))
    dist.barrier()
    if dist.get_rank() == 0:
        print("RESULT", result, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""What a proof costs: the steps of a GPT with it and without, in turns, on 2 ranks; and the digest
of a micro-batch of images.

    python -m measure.proof
    python -m measure.proof --device cuda --ranks 1

`own` is the time spent in the proof's functions by rank 0, in its thread alone, so that a busy
machine does not count; `step` the same of a whole step without a proof. On a card a step's seconds
are those of the clock.
"""

import functools
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import universal
from measure import options
from measure.cards import run_on
from tests.support import toy
from train import GPT
from universal import proof
from universal.proving.samples import hashes

# Layers, heads, width, tokens.
SIZES = {
    "cpu": {"small": (2, 4, 128, 64), "medium": (4, 8, 256, 128)},
    "cuda": {"large": (24, 20, 1280, 256)},
}
MICRO, ACCUMULATION, ROUNDS = 8, 2, 2
WATCHED = ("begin_forward", "see_output", "see_loss", "end_step", "begin_step")


def timed(function, times):
    def run_timed(*arguments):
        began = time.thread_time()
        result = function(*arguments)
        times.append(time.thread_time() - began)
        return result

    return run_timed


def seconds():
    get_accelerator().synchronize()
    return time.perf_counter() if get_accelerator().device_name() == "cuda" else time.thread_time()


def measure(name, sizes):
    """Measure steps with the proof and without, on every rank."""
    toy.begin()
    universal.install()
    layers, heads, width, tokens = sizes
    config = {"micro": MICRO, "gradient_accumulation_steps": ACCUMULATION}
    config["bf16"] = {"enabled": get_accelerator().device_name() == "cuda"}
    net = functools.partial(GPT, layers, heads, width, tokens, 0.0)
    engine = toy.make(1, net, toy.TORCH_ADAMW, batch=None, **config)
    own = []
    for function in WATCHED:
        setattr(proof.Proof, function, timed(getattr(proof.Proof, function), own))
    steps = {False: [], True: []}
    samples = torch.randint(0, 256, (MICRO, tokens + 1)).to(engine.device)
    for part in range(2 * ROUNDS):
        if part % 2:
            engine.save_checkpoint("checkpoints", tag="t")
        for _ in range(proof.STEPS):
            began = seconds()
            for _ in range(ACCUMULATION):
                engine.backward(engine(samples[:, :-1], samples[:, 1:], key=(0, 0, 0)))
                engine.step()
            steps[bool(part % 2)].append(seconds() - began)
    if dist.get_rank() == 0:
        step = statistics.median(steps[False][1:])
        with_proof = statistics.median(steps[True])
        milliseconds = 1000 * sum(own) / (ROUNDS * proof.STEPS)
        print(f"{name:<8}{1000 * step:>9.1f} ms{milliseconds:>9.2f} ms", end="")
        print(f"{1 + milliseconds / 1000 / step:>9.4f}{with_proof / step:>9.4f}")


def measure_images():
    """Measures the digest of images in one thread, as `own` is."""
    torch.set_num_threads(1)
    images = torch.randn(64, 3, 224, 224)
    times = []
    digest = timed(hashes, times)
    for _ in range(50):
        digest(images)
    return 1000 * statistics.median(times)


def main():
    parser = options.parser(__doc__)
    parser.add_argument("--device", choices=SIZES, default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    print(f"{'model':<8}{'step':>12}{'own':>12}{'1 + own':>9}{'on/off':>9}")
    for name, sizes in SIZES[args.device].items():
        with tempfile.TemporaryDirectory() as folder:
            print(run_on(args.device, folder, args.ranks, measure, name, sizes).splitlines()[-1])
    print(f"digest of 64 x 3 x 224 x 224 numbers: {measure_images():.2f} ms")


if __name__ == "__main__":
    main()

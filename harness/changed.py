"""train.py with changes that it has no flags for: python harness/changed.py scaling,forget --steps 20 ...

scaling    fp16 with a loss scale that overflows and grows again, on a CPU, too
FusedAdam  DeepSpeed's own optimizer on GPUs, which it compiles
one_card   all ranks share the first GPU, by gloo: NCCL refuses
forget     a load loses the first moments of the optimizer
With any, a load prints MEMORY, the bytes of the device that it has taken at most, and those that it still has."""

import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
CHANGES = ("scaling", "FusedAdam", "one_card", "forget")


def prepare(changes):
    """Make them, before train.py runs in this process."""
    from deepspeed.accelerator import get_accelerator

    import launch
    import universal

    device, base, load = get_accelerator(), launch.base_config, universal.load_checkpoint
    if "one_card" in changes:
        os.environ["LOCAL_RANK"] = "0"
        device._communication_backend_name = "gloo"
    if "scaling" in changes:
        device.is_fp16_supported = lambda: True  # slow on many a CPU, but there

    def config(args):
        found = base(args)
        if "scaling" in changes:
            found["fp16"] |= {"initial_scale_power": 24, "hysteresis": 1, "loss_scale_window": 8}
        if "FusedAdam" in changes:
            del found["optimizer"]["params"]["torch_adam"]
        return found

    def watched(engine, *arguments, **options):
        device.reset_peak_memory_stats()
        before = device.memory_allocated()
        result = load(engine, *arguments, **options)
        print("MEMORY", device.max_memory_allocated() - before, device.memory_allocated() - before, flush=True)
        if "forget" in changes:
            for state in engine.optimizer.optimizer.state.values():
                state["exp_avg"].zero_()
        return result

    launch.base_config, universal.load_checkpoint = config, watched


if __name__ == "__main__":
    prepare(sys.argv[1].split(","))
    sys.argv = ["train.py", *sys.argv[2:]]
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")

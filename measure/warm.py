"""torchrun whose workers start with torch and DeepSpeed imported, forked from a process that has
done it once:

    python -m measure.warm [torchrun's flags] -m examples.train_elastic --elastic

For CPUs: where an import starts CUDA, a forked process cannot use it.
"""

import os
import runpy
import sys
from multiprocessing import forkserver
from pathlib import Path

from torch.distributed import run
from torch.distributed.launcher.api import elastic_launch


def worker(_, *words):
    """What Python does with these words behind its first flag: a script, or -m and a module, and
    its arguments."""
    try:
        if words[0] == "-m":
            sys.argv = list(words[1:])
            sys.path.insert(0, os.getcwd())
            runpy.run_module(words[1], run_name="__main__")
        else:
            sys.argv = list(words)
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as stop:
        if stop.code:  # 0 is said by returning
            raise


def warm(config, entrypoint):
    config.start_method = "forkserver"
    return elastic_launch(config, worker)


if __name__ == "__main__":
    # A worker looks for worker() in the module of this name; __main__ is another one.
    from measure.warm import warm

    # torch.optim imports torch._dynamo, and DeepSpeed's Muon torch._inductor: half of what a start
    # takes.
    forkserver.set_forkserver_preload(["deepspeed", "torch._dynamo", "torch._inductor.compile_fx"])
    forkserver.ensure_running()  # while the agents meet
    run.elastic_launch = warm
    run.main()

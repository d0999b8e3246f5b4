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
    """What Python does with these words behind its own flags: a script or -m and a module, and
    their arguments."""
    module = words[0] == "-m"
    sys.argv = list(words[module:])
    sys.path.insert(0, os.getcwd() if module else str(Path(words[0]).parent))
    run = runpy.run_module if module else runpy.run_path
    try:
        run(sys.argv[0], run_name="__main__")
    except SystemExit as stop:
        if stop.code:  # 0 is said by returning
            raise


def warm(config, entrypoint):
    config.start_method = "forkserver"
    return elastic_launch(config, worker)


if __name__ == "__main__":
    from measure.warm import (
        warm,  # a worker looks for worker() in the module of this name; __main__ is another one
    )

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # torch.optim imports torch._dynamo, and DeepSpeed's Muon torch._inductor: half of what a start
    # takes.
    forkserver.set_forkserver_preload(["deepspeed", "torch._dynamo", "torch._inductor.compile_fx"])
    forkserver.ensure_running()  # while the agents meet
    run.elastic_launch = warm
    run.main()

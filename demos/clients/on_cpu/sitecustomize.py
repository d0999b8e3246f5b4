"""On PYTHONPATH of demos/clients/clients_cli.py: what a command needs on CPUs, and not on GPUs. At ZeRO-3 the model is
cut before DeepSpeed knows the ranks, its all-reduce would be compiled, and older ones gather into views that autograd
forbids gloo to write to."""

import os
import sys


def before():
    import torch
    import torch.distributed as dist

    dist.all_gather_into_tensor = torch.no_grad()(dist.all_gather_into_tensor)


def after(deepspeed):
    def init(self, *arguments, **named):
        deepspeed.init_distributed()
        of_deepspeed(self, *arguments, **named)

    of_deepspeed, deepspeed.zero.Init.__init__ = deepspeed.zero.Init.__init__, init
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class Hook:  # of the kind of start/sitecustomize.py, which runs this file
    def find_spec(name, path=None, target=None):
        later = sys.meta_path[sys.meta_path.index(Hook) + 1 :] if name == "deepspeed" else []
        if spec := next(filter(None, (finder.find_spec(name, path, target) for finder in later)), None):
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (before(), execute(module), after(module))
        return spec


if "RANK" in os.environ:
    sys.meta_path.insert(0, Hook)

"""Put this folder on PYTHONPATH where a command's ranks run on CPUs: at ZeRO-3 transformers cuts
the model before DeepSpeed knows the ranks, and DeepSpeed would compile an all-reduce for
minutes."""

import os

if "RANK" in os.environ:
    import deepspeed

    def init(self, *arguments, **named):
        deepspeed.init_distributed()
        cut(self, *arguments, **named)

    cut, deepspeed.zero.Init.__init__ = deepspeed.zero.Init.__init__, init
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

"""What makes the pages' pictures and tables. Its ranks are those of this machine's cores, where
nobody asks for other ones."""

import os
import sys

VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES")  # as it was given
# gpu.py alone looks for GPUs, of which there may be fewer than ranks.
if os.environ.setdefault("DS_ACCELERATOR", "cpu") == "cpu" and "measure.gpu" not in sys.orig_argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does; accelerate would take all cores

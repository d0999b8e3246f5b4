"""What makes the pages' pictures and tables. Its ranks are those of this machine's cores, where
nobody asks for other ones."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does; accelerate would take all cores

# SPDX-License-Identifier: MIT
"""Load a checkpoint into an engine, on all ranks or on none.

    loader.find_and_load(engine, ...)    a load, from its first step to its last
    engine.Engine(engine)                DeepSpeed's engine: its layout, flat tensors and states
    collective.process_group(timeout)    all ranks, which go on together or fail together

Of the core, engine.py, overrides.py and live_experts.py alone know DeepSpeed's private attributes.
Needs torch and DeepSpeed, and of this package checkpoint/ and files/.
"""

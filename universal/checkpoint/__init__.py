# SPDX-License-Identifier: MIT
"""What is in a folder of checkpoints: everything but the elements of tensors.

    tags.find_tag(folder)          which checkpoint is meant
    describe.describe(folder)      where each parameter, state and buffer is, of any kind
    facts.batch_of(model)          the global batch that it was trained with

types.py has what describe() returns. Needs Python alone, and of this package files/.
"""

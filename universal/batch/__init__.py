# SPDX-License-Identifier: MIT
"""What keeps the global batch, beside batches.py.

saved     the batch that a checkpoint tells, and what a load says of it
losses    whether a loss of Trainer's is a mean or a sum
"""

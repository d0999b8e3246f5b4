# SPDX-License-Identifier: MIT
"""What proof.py stands on.

comparison    steps that are trained again
samples       digests of the samples of a step, and of its random numbers
training      what an engine tells in each step
next_steps    the rows of next_steps.csv; Python alone
"""

# SPDX-License-Identifier: MIT
"""What proof.py stands on.

next_steps    the rows of next_steps.csv; Python alone
training      what an engine tells in each step
"""

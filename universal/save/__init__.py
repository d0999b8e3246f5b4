# SPDX-License-Identifier: MIT
"""What saves are asked, and the files of a save in memory.

plain       what each save_checkpoint() is asked and told
snapshot    for background.py and mirror.py
"""

# SPDX-License-Identifier: MIT
"""Files that the commands write, and lines that they print.

    converter.convert(folder, ...)     writes a universal checkpoint
    publish.publish(part, final)       gives a folder its name once all of it is on the disk
    console.in_one_line(name)          an error becomes one line and an exit code

Needs Python alone, and of this package checkpoint/ and files/.
"""

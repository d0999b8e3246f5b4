"""The options that these scripts have in common."""

import argparse
from pathlib import Path


def parser(text, output=None):
    """Returns an argument parser whose help is that text, as it stands. output: where the table or
    the picture goes, unless --output says another place."""
    options = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if output:
        options.add_argument(
            "--output", type=place, default=output, help=f"table or picture; {output}"
        )
    return options


def place(name):
    """Returns the path of a file to be written, whose folder is there."""
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path

"""Run docs/lesson.ipynb from top to bottom in a Jupyter kernel, as a reader does, and compare what
it prints with the outputs that are in it.

    python -m measure.lesson            # exit code 1 where a number is another one
    python -m measure.lesson --write    # and put the new outputs into the notebook

Words and whole numbers must be equal. Of a number like 2.4e-07, a difference of two losses: zero
stays zero, what is below 1e-05 is rounding and stays below it, anything else stays within a factor
of 3. Other numbers, losses say, may move by 1%. Another version of Python has another text to
learn, of which `helpers` tells first, and other numbers."""

import argparse
import itertools
import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "docs" / "lesson.ipynb"
NUMBER = re.compile(r"\d+\.\d+(?:e[+-]\d+)?")
TIMES = re.compile(
    r"^\(\d+ s\)\n| in [\d.]+ s, [\d.]+ GB/s", re.M
)  # of the machine, not of the lesson
ROUNDING = 1e-5


def printed(cell):
    return TIMES.sub(
        "", "".join(output["text"] for output in cell.outputs if output.output_type == "stream")
    )


def is_near(old, new):
    a, b = float(old), float(new)
    if "e" not in old:
        return abs(a - b) <= 0.01 * abs(a)
    if 0 in (a, b) or max(a, b) < ROUNDING:
        return a == b or min(a, b) > 0
    return max(a, b) <= 3 * min(a, b)


def compare(old, new):
    """What differs between two texts, line by line."""
    for before, now in itertools.zip_longest(old.splitlines(), new.splitlines(), fillvalue=""):
        # Columns move with the length of a number.
        words = [NUMBER.sub("#", line).split() for line in (before, now)]
        numbers = [NUMBER.findall(line) for line in (before, now)]
        if words[0] != words[1] or not all(map(is_near, *numbers)):
            yield f"in the notebook: {before}\n             now: {now}"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", action="store_true", help="put the new outputs into the notebook"
    )
    args = parser.parse_args()
    old, new = (nbformat.read(NOTEBOOK, 4) for _ in range(2))
    place = {"metadata": {"path": NOTEBOOK.parent}}
    NotebookClient(
        new,
        timeout=3600,
        startup_timeout=600,
        record_timing=False,
        coalesce_streams=True,
        resources=place,
    ).execute()
    if args.write:  # without what is of this machine: times, and the version of its Python
        new.metadata["language_info"] = {"name": "python"}
        for output in (output for cell in new.cells for output in cell.get("outputs", [])):
            if output.output_type == "stream":
                output["text"] = TIMES.sub("", output["text"])
        return nbformat.write(new, NOTEBOOK)
    code = 0
    for before, now in zip(old.cells, new.cells, strict=True):
        if before.cell_type == "code" and "not-compared" not in before.metadata.get("tags", []):
            for difference in compare(printed(before), printed(now)):
                print(f"{before.id}:\n{difference}")
                code = 1
    print("FAIL" if code else "PASS: every number is that of the notebook, within the tolerances")
    return code


if __name__ == "__main__":
    sys.exit(main())

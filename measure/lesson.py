"""Run docs/lesson.ipynb from top to bottom in a Jupyter kernel, as a reader does, and compare what
it prints with the outputs that are in it.

    python -m measure.lesson            # exit code 1 where a number is another one
    python -m measure.lesson --write    # and put the new outputs into the notebook
    python -m measure.lesson --without_answers  # run nothing: write docs/class.ipynb

Words and whole numbers must be equal. Of a number like 2.4e-07, a difference of two losses: zero
stays zero, what is below 1e-05 is rounding and stays below it, anything else stays within a factor
of 3. Other numbers, losses say, may move by 1%. Another version of Python has another text to
learn, of which `helpers` tells first, and other numbers. In the end it prints the seconds that the
cells of each part took."""

import itertools
import re
import sys
from datetime import datetime
from pathlib import Path

import nbclient
import nbformat

from measure import options

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "docs" / "lesson.ipynb"
CLASS = NOTEBOOK.with_name("class.ipynb")  # beside it, so that its links lead to the same pages
NUMBER = re.compile(r"\d+\.\d+(?:e[+-]\d+)?")
# Times are of the machine, not of the lesson.
TIMES = re.compile(r"^\(\d+ s\)\n| in [\d.]+ s, [\d.]+ GB/s", re.M)
ROUNDING = 1e-5
ANSWER = re.compile(r"<details>.*?</details>", re.S)


def printed(cell):
    streams = [output["text"] for output in cell.outputs if output.output_type == "stream"]
    return TIMES.sub("", "".join(streams))


def is_near(old, new):
    a = float(old)
    b = float(new)
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


def seconds_of(cell):
    """The seconds that a cell ran, by the kernel's messages."""
    times = cell.metadata.execution
    begin = datetime.fromisoformat(times["iopub.execute_input"].removesuffix("Z"))
    end = datetime.fromisoformat(times["iopub.status.idle"].removesuffix("Z"))
    return (end - begin).total_seconds()


def seconds_of_parts(notebook):
    """Returns the seconds of the cells below each heading."""
    seconds = {}
    part = ""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            seconds[part] = seconds.get(part, 0) + seconds_of(cell)
        for heading in re.findall(r"^## (.*)$", cell.source, re.M):
            part = heading
    return seconds


def run():
    """The notebook, with the outputs of now."""
    notebook = nbformat.read(NOTEBOOK, 4)
    return nbclient.execute(
        notebook, cwd=NOTEBOOK.parent, timeout=3600, startup_timeout=600, coalesce_streams=True
    )


def write(notebook):
    """Writes the notebook without what is of this machine: times, and the version of its Python."""
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            if output.output_type == "stream":
                output["text"] = TIMES.sub("", output["text"])
    nbformat.write(notebook, NOTEBOOK)


def without_answers(notebook):
    """The notebook, without its folded answers and its outputs."""
    for cell in notebook.cells:
        cell.source = ANSWER.sub("", cell.source).strip()
        if cell.cell_type == "code":
            cell.outputs = []
    notebook.cells = [cell for cell in notebook.cells if cell.source]
    return notebook


def differences(old, new):
    """Yields a text for each line that differs in the cells that are compared."""
    for before, now in zip(old.cells, new.cells, strict=True):
        if before.cell_type == "code" and "not-compared" not in before.metadata.get("tags", []):
            for difference in compare(printed(before), printed(now)):
                yield f"{before.id}:\n{difference}"


def main():
    parser = options.parser(__doc__)
    parser.add_argument(
        "--write", action="store_true", help="put the new outputs into the notebook"
    )
    parser.add_argument(
        "--without_answers", action="store_true", help=f"write {CLASS.name}, a copy for the class"
    )
    args = parser.parse_args()
    old = nbformat.read(NOTEBOOK, 4)
    if args.without_answers:
        nbformat.write(without_answers(old), CLASS)
        print(f"wrote {CLASS}")
        return 0
    new = run()
    for part, seconds in seconds_of_parts(new).items():
        print(f"{seconds:5.0f} s  {part}")
    if args.write:
        write(new)
        return 0
    wrong = list(differences(old, new))
    print(*wrong, sep="\n")
    print("FAIL" if wrong else "PASS: every number is that of the notebook, within the tolerances")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

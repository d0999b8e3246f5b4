"""Run docs/lesson.ipynb from top to bottom in a Jupyter kernel, as a reader does, and compare what it prints with the
outputs that are in it. Prints the time that each part takes.

    python demos/lesson.py            # exit code 1 where a number is another one
    python demos/lesson.py --write    # and put the new outputs into the notebook

Words and whole numbers must be equal. Of a number like 2.4e-07, a difference of two losses: zero stays zero, what is
below 1e-05 is rounding and stays below it, anything else stays within a factor of 3. Other numbers, losses say, may
move by 1%. Where Python's standard library is another text, which the model learns: a factor of 10, and 30%.
"""

import argparse
import re
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "docs" / "lesson.ipynb"
NUMBER = re.compile(r"\d+\.\d+(?:e[+-]\d+)?")
TIMES = re.compile(r"^\(\d+ s\)\n| in [\d.]+ s, [\d.]+ GB/s", re.M)  # of the machine, not of the lesson
ROUNDING = 1e-5


def printed(cell):
    return TIMES.sub("", "".join(output["text"] for output in cell.outputs if output.output_type == "stream"))


def learned_text(notebook):
    """What the cell with the helpers says of the text."""
    (found,) = [cell for cell in notebook.cells if cell.id == "helpers"]
    return re.search(r"text (.*)", printed(found))[1]


def is_near(old, new, other_text):
    a, b = float(old), float(new)
    if "e" not in old:
        return abs(a - b) <= (0.3 if other_text else 0.01) * abs(a)
    if 0 in (a, b) or max(a, b) < ROUNDING:
        return a == b or min(a, b) > 0
    return max(a, b) / min(a, b) <= (10 if other_text else 3)


def compare(old, new, other_text=False):
    """What differs between two texts, line by line."""
    lines = old.splitlines(), new.splitlines()
    if len(lines[0]) != len(lines[1]):
        return [f"{len(lines[0])} lines in the notebook, {len(lines[1])} now: {new}"]
    found = []
    for before, now in zip(*lines, strict=True):
        # Columns move with the length of a number.
        words = [NUMBER.sub("#", line).split() for line in (before, now)]
        numbers = [NUMBER.findall(line) for line in (before, now)]
        if words[0] != words[1] or not all(is_near(a, b, other_text) for a, b in zip(*numbers, strict=True)):
            found.append(f"in the notebook: {before}\n             now: {now}")
    return found


class Clock:
    """Sums up what the kernel and all that it has started take, part by part."""

    def __init__(self, client):
        self.client, self.part, self.taken = client, "", {}
        self.last = time.monotonic(), 0.0

    def processor_time(self):
        stat = Path(f"/proc/{self.client.km.provisioner.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return sum(map(int, stat[11:15])) / 100  # of it and of its children, in user and in system mode

    def __call__(self, cell, cell_index, **_):
        for before in self.client.nb.cells[:cell_index]:
            if before.cell_type == "markdown" and (heading := re.findall(r"^## (.*)", before.source, re.M)):
                self.part = heading[-1]
        now = time.monotonic(), self.processor_time()
        wall, processor = self.taken.get(self.part, (0, 0))
        self.taken[self.part] = wall + now[0] - self.last[0], processor + now[1] - self.last[1]
        self.last = now

    def report(self):
        print(f"{'part':45}{'seconds':>10}{'processor seconds':>20}")
        for part, (wall, processor) in [*self.taken.items(), ("all", map(sum, zip(*self.taken.values(), strict=True)))]:
            print(f"{part:45}{wall:>10.0f}{processor:>20.0f}")


def execute(notebook):
    place = {"metadata": {"path": NOTEBOOK.parent}}
    client = NotebookClient(notebook, timeout=3600, startup_timeout=600, record_timing=False, resources=place)
    client.on_cell_executed = clock = Clock(client)
    client.execute()
    clock.report()


def clean(notebook):
    """Leave out what is of this machine, times and the version of its Python; join what came out piece by piece."""
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in notebook.cells:
        kept = []
        for output in cell.get("outputs", []):
            if output.output_type == "stream" and kept and kept[-1].output_type == "stream":
                kept[-1]["text"] += output["text"]
            else:
                kept.append(output)
        for output in kept:
            if output.output_type == "stream":
                output["text"] = TIMES.sub("", output["text"])
        if "outputs" in cell:
            cell["outputs"] = kept


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the new outputs into the notebook")
    args = parser.parse_args()
    old, new = (nbformat.read(NOTEBOOK, 4) for _ in range(2))
    execute(new)
    if args.write:
        clean(new)
        nbformat.write(new, NOTEBOOK)
        return
    other_text = learned_text(old) != learned_text(new)
    if other_text:
        print("the text that the model learns is another one here: the wider tolerances hold")
    code = 0
    for before, now in zip(old.cells, new.cells, strict=True):
        if before.cell_type == "code" and "not-compared" not in before.metadata.get("tags", []):
            for difference in compare(printed(before), printed(now), other_text):
                print(f"{before.id}:\n{difference}")
                code = 1
    print("FAIL" if code else "PASS: every number is that of the notebook, within the tolerances")
    sys.exit(code)


if __name__ == "__main__":
    main()

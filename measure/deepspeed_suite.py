"""DeepSpeed's own checkpoint tests, once as they are and once through universal.install(): `make
deepspeed-suite`.

    git clone --depth 1 -b v0.19.8 https://github.com/deepspeedai/DeepSpeed
    python -m measure.deepspeed_suite DeepSpeed [what pytest takes: -k zero_optimizer, say]

The clone brings the tests alone, which are in no package: what they test is the DeepSpeed that is
installed, and must be of the same version. Prints every test that passes alone and not through
install(), and then ends with an error."""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "runs" / "deepspeed_suite"
PYTEST = WORK / "pytest"  # later ones do not know DeepSpeed's fixtures, which are classes
# Not run: it wants an error where a checkpoint of 4 ranks is loaded on 2, and install() loads it.
# Where that error is not raised, pytest ends the process, and DeepSpeed's pool of processes waits
# for it for ever.
DESELECT = (
    "--deselect=unit/checkpoint/test_zero_optimizer.py::TestZeROElasticCheckpoint::"
    "test_elastic_checkpoint_change_dp[True-"
)
# DeepSpeed's tests start the ranks of each test anew: this forks them from a process that has
# imported what they need.
MAIN = """import multiprocessing, sys, pytest
needed = ["torch._dynamo", "torch._inductor.compile_fx", "unit.checkpoint.common"]
multiprocessing.set_forkserver_preload(needed)
sys.exit(pytest.main(sys.argv[1:]))"""


def run(name, tests, *before):
    """Returns how each test ended, and why, without those that were skipped."""
    tests_and_flags = ["unit/checkpoint", "-rpfE", DESELECT, *sys.argv[2:]]
    command = [*before, sys.executable, "-c", MAIN, *tests_and_flags]
    settings = os.environ | {
        "DS_TEST_USE_INSTALLED_DEEPSPEED": "1",
        "COLUMNS": "300",  # pytest cuts the lines of its summary
        "LOCAL_SIZE": "4",  # DeepSpeed's count of devices on CPUs: what needs more is skipped
        "PYTHONPATH": f"{PYTEST}:{os.environ.get('PYTHONPATH', '')}",
    }
    path = WORK / f"{name}.txt"
    with path.open("w") as output:
        result = subprocess.run(
            command, stdout=output, stderr=output, cwd=tests, env=settings, timeout=6 * 3600
        )
    if result.returncode not in (0, 1):
        sys.exit(f"pytest has not come to its end: {path}")
    text = re.sub(r"\x1b\[[\d;]*m", "", path.read_text())  # in colors, whatever it is told
    _, summary = text.split(" short test summary info ")
    print(f"{name}: {summary.count('PASSED unit')} passed", flush=True)
    lines = re.findall(r"^(PASSED|FAILED|ERROR) (\S+)(.*)", summary, re.M)
    return {test: ended + why for ended, test, why in lines}


def main():
    clone = Path(*sys.argv[1:2])
    tests = clone / "tests"
    installed = version("deepspeed")
    has_tests = (tests / "unit" / "checkpoint").is_dir()
    if not has_tests or (clone / "version.txt").read_text().strip() != installed:
        url = "https://github.com/deepspeedai/DeepSpeed"
        sys.exit(
            f"deepspeed_suite.py: error: {tests} is not tests/ of DeepSpeed {installed}: "
            f"git clone --depth 1 -b v{installed} {url} {clone}"
        )
    if not PYTEST.exists():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--target", PYTEST, "pytest<8.4"]
        subprocess.run(pip, check=True, timeout=600)
    alone = run("alone", tests)
    through = run("through install()", tests, sys.executable, ROOT / "universal")
    worse = [test for test in alone if alone[test] == "PASSED" and through.get(test) != "PASSED"]
    for test in worse:
        print(f"{test}: {through.get(test, 'not run')}")
    if worse or not alone:
        sys.exit(f"of {len(alone)} tests {len(worse)} do not pass through install()")


if __name__ == "__main__":
    main()

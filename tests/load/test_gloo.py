"""The ranks of several machines connect by the right network card, or say at once which variable
names it. A rank that does not come is named."""

import os
import subprocess
import sys
import time

import pytest

from tests.support import ROOT, toy
from tests.support.commands import is_rank
from tests.support.ranks import run
from universal.errors import RankSilent
from universal.load.collective import process_group

UNSHARE = "unshare --map-root-user --net --mount --pid --fork --kill-child --mount-proc".split()


def unavailable():
    """Why this machine makes no namespaces with a network card in them; "" if it does."""
    shell = "ip link add card type veth peer name other"
    try:
        done = subprocess.run([*UNSHARE, "sh", "-c", shell], capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return done.stderr


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """{(rank, card): (seconds, what came of it)}"""
    if reason := unavailable():
        pytest.skip(f"no namespaces: {reason}")
    command = [*UNSHARE, sys.executable, str(ROOT / "tests/ranks/two_hosts.py")]
    done = subprocess.run(
        command,
        cwd=tmp_path_factory.mktemp("hosts"),
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    rows = [line.split("|") for line in done.stdout.splitlines()]
    assert len(rows) == 8, done.stdout + done.stderr
    return {(int(rank), name): (float(seconds), outcome) for rank, name, seconds, outcome in rows}


@pytest.mark.parametrize("name", ["chosen", "of NCCL"])
@pytest.mark.parametrize("rank", [0, 1])
def test_connected(outcomes, rank, name):
    """Though each machine's own name resolves to 127.0.1.1: by the card that reaches MASTER_ADDR,
    or the one that NCCL takes."""
    seconds, outcome = outcomes[rank, name]
    assert outcome == "[0, 1]" and seconds < 5


@pytest.mark.parametrize("rank", [0, 1])
def test_own_name(outcomes, rank):
    """Rank 0's machine may be named to it by its own name: then it is the default route's."""
    assert outcomes[rank, "rank 0's own name"][1] == "eth0"


def test_wrong_card(outcomes):
    """One error on both ranks, within the timeout of 5 seconds. It names the variable."""
    seconds, errors = zip(*(outcomes[rank, "wrong"] for rank in (0, 1)), strict=True)
    assert max(seconds) < 10, seconds
    assert errors[0] == errors[1]
    assert "through the network card lo: set GLOO_SOCKET_IFNAME to one that does" in errors[0]


def test_one_place():
    """No part of the package makes such a group by itself."""
    made = ("new_group(", "ProcessGroupGloo(")
    texts = {path.name: path.read_text() for path in ROOT.glob("universal/**/*.py")}
    sources = [name for name, text in texts.items() if any(call in text for call in made)]
    assert sources == ["collective.py"]


def rank_1_comes_late():
    toy.begin()
    if is_rank(1):
        time.sleep(4)
    began = time.monotonic()
    try:
        with process_group(2):
            pass
    except RankSilent as error:
        print(f"{time.monotonic() - began:.1f}: {error}")
    time.sleep(5)


def test_a_rank_does_not_come(tmp_path):
    """It is named, within the timeout."""
    seconds, error = run(tmp_path, 2, rank_1_comes_late).split(": ", 1)
    assert float(seconds) < 4
    assert error == "rank 0: a rank does not answer: rank 1 is not there after 0:00:02\n"

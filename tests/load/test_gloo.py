"""The ranks of several machines connect by the right network card, or say at once which variable
names it. A rank that does not come is named. `make hosts` has machines of their own."""

import os
import time
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest

from tests.support import toy
from tests.support.commands import is_rank
from tests.support.ranks import run
from universal.errors import RankSilent
from universal.load import collective
from universal.load.collective import process_group

ADDRESSES = {"lo": "127.0.0.1", "eth0": "10.77.0.1", "eth1": "10.88.0.1"}


@pytest.mark.parametrize(
    "master, of_nccl, source, card",
    [
        ("127.0.0.1", "", "127.0.0.1", None),
        ("127.0.0.1", "=eth1", "127.0.0.1", "eth1"),
        ("10.88.0.2", "^lo", "10.88.0.1", "eth1"),
        # Rank 0's machine may be named to it by its own name, as on Debian and Ubuntu.
        ("127.0.1.1", "", "127.0.0.1", "the default route's"),
    ],
)
def test_network_card(monkeypatch, master, of_nccl, source, card):
    """The one that NCCL takes, or by which this machine, with this address, reaches rank 0's."""
    cards = {name: [SimpleNamespace(address=address)] for name, address in ADDRESSES.items()}
    probe = mock.MagicMock()
    probe.return_value.__enter__.return_value.getsockname.return_value = (source, 0)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: cards)
    monkeypatch.setattr(collective.socket, "socket", probe)
    monkeypatch.setattr(collective, "card_of_default_route", lambda: "the default route's")
    monkeypatch.setenv("MASTER_ADDR", master)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", of_nccl)
    assert collective.network_card() == card


def test_wrong_card(tmp_path):
    """An error on each rank, soon. It names the variable."""

    def job():
        toy.begin()
        os.environ["GLOO_SOCKET_IFNAME"] = "eth9"
        words = "through the network card eth9: set GLOO_SOCKET_IFNAME to one that does"
        with pytest.raises(RankSilent, match=words), process_group(60):
            pass

    run(tmp_path, 2, job, limit=60)


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

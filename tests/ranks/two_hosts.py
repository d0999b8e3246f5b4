"""Two hosts, each with a network card of its own, and a name of its own that resolves to 127.0.1.1,
as on Debian and Ubuntu: for tests/load/test_gloo.py, in namespaces of its making.

NCCL connects nothing here: the default group is of torch's backend "fake", and so ours is the first
one that meets, as on GPUs."""

import datetime
import os
import subprocess
import sys
import time
from pathlib import Path

ADDRESS = "10.77.0.1"
LIMIT = 5  # seconds that a rank waits for another one
CARDS = {
    "chosen": {},
    "of NCCL": {"NCCL_SOCKET_IFNAME": "=eth0", "MASTER_ADDR": "127.0.0.1"},
    "wrong": {"GLOO_SOCKET_IFNAME": "lo"},
}


def be_a_rank(rank):
    """Print what becomes of a group, with each of these variables."""
    import torch.distributed as dist
    from torch.testing._internal.distributed import fake_pg  # noqa: F401

    from universal.errors import RankSilent
    from universal.load.collective import meet_at, network_card, process_group

    wait = datetime.timedelta(seconds=60)
    store = dist.TCPStore(ADDRESS, 29400, 2, is_master=rank == 0, timeout=wait)
    dist.init_process_group("fake", store=store, rank=rank, world_size=2)
    for name, variables in CARDS.items():
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        os.environ |= {"MASTER_ADDR": ADDRESS} | variables
        began = time.monotonic()
        try:
            with process_group(LIMIT) as group:
                outcome = group.all_gather(rank)
        except RankSilent as error:
            outcome = str(error)
        print(name, f"{time.monotonic() - began:.1f}", outcome, sep="|", flush=True)
    os.environ |= {"MASTER_ADDR": os.uname().nodename, "NCCL_SOCKET_IFNAME": ""}
    print("rank 0's own name", 0, network_card(), sep="|", flush=True)
    meet_at(store, "end", wait)  # the store is rank 0's
    os._exit(0)


def main():
    from measure.hosts import host, sh

    sh("ip link set lo up")
    sh("ip link add switch up type bridge")
    known = {"127.0.0.1": "localhost", "127.0.1.1": os.uname().nodename}
    known |= {"10.77.0.1": "first", "10.77.0.2": "second"}  # nobody else is there to be asked
    Path("hosts").write_text("".join(f"{address} {name}\n" for address, name in known.items()))
    ranks = []
    for rank in range(2):
        enter = f"nsenter --target={host(rank + 1)} --net --mount --wd={os.getcwd()}"
        route = f"ip route add default via 10.77.0.{2 - rank}"
        shell = (
            f"mount --bind hosts /etc/hosts && {route} && exec {sys.executable} {__file__} {rank}"
        )
        ranks.append(
            subprocess.Popen([*enter.split(), "sh", "-c", shell], stdout=subprocess.PIPE, text=True)
        )
    for rank, process in enumerate(ranks):
        for line in process.stdout:
            print(rank, line, sep="|", end="", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        be_a_rank(int(sys.argv[1]))
    else:
        main()

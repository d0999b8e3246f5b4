"""Hosts whose cable is pulled, whose disk is full, whose folder cannot be written: `make hosts`.

Three hosts on one machine train with one rank each, in two jobs, while the events below happen to
them. Then every step must be in the log once, with every bit of one rank that nothing happened to,
and done once, but where the host that holds the rendezvous is cut off or there is no mirror;
nothing may be written into a checkpoint that is finished, and all of them must be whole; no process
may be left. Needs Linux, iproute2 and the right to make namespaces: the kernel takes down what is
made in them when this script ends, however it ends."""

import contextlib
import os
import re
import subprocess
import threading
import time
from pathlib import Path

import psutil

from measure.machines import HEAD, WARM, Job, differences, train_alone
from universal.checkpoint import describe as checkpoint

DISK = Path("/mnt")  # that all hosts see
# Not of next_steps.csv, without which the training goes on.
FULL = "^(?!universal: the next steps are not compared).*(No space left|inline_container)"
TRAIN = (
    "--n_embd 32 --seq_len 16 --n_layer 1 --train_batch_size 24 --train_micro_batch_size_per_gpu 4 "
    "--exact --steps 10000 --eval_interval 50 --checkpoint_interval 20 --keep 3 --timeout 20"
).split()


def sh(command):
    subprocess.run(command.split(), check=True)


def host(number):
    """The process that holds a host: an address, a network card and a /dev/shm of its own."""
    card = f"ip link add eth0 type veth peer name port$$ netns {os.getpid()} && ip link set eth0 up"
    address = f"ip addr add 10.77.0.{number}/24 dev eth0 && ip link set lo up"
    shell = f"{card} && {address} && mount -t tmpfs memory /dev/shm && echo && exec sleep infinity"
    command = ["unshare", "--net", "--mount", "sh", "-c", shell]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert holder.stdout.readline(), "no namespaces for a host"
    sh(f"ip link set port{holder.pid} master switch up")
    return holder.pid


class HostsJob(Job):
    """Agents on the hosts."""

    patience = 600  # on a machine that others load, too
    # With fewer seconds of silence the agents of a busy machine take each other for dead, and each
    # trains alone.
    settings = "keep_alive_interval=3,keep_alive_max_attempt=5,last_call_timeout=5,read_timeout=120"

    def __init__(self, name, hosts, *train):
        self.hosts = hosts
        self.folder = DISK / name
        self.seen = {}  # {checkpoint: its files when it was finished}
        train = [*TRAIN, "--checkpoint_dir", str(self.folder), *train]
        super().__init__(WARM, train, name, endpoint="10.77.0.1:29400")
        for node, pid in hosts.items():
            enter = f"nsenter --target={pid} --net --mount --wd={os.getcwd()}"
            environment = f"GLOO_SOCKET_IFNAME=eth0 PET_LOCAL_ADDR=10.77.0.{node[-1]}"
            self.inside[node] = [*enter.split(), "env", *environment.split()]
        threading.Thread(target=self.watch, daemon=True).start()

    def pull(self, name, rank=None):
        """Pull the cable; a rank that was frozen until then goes on."""
        sh(f"ip link set port{self.hosts[name]} down")
        time.sleep(0.5)  # a step that was done can be on its way to the log
        if rank:
            rank.resume()

    def plug(self, name):
        sh(f"ip link set port{self.hosts[name]} up")

    def catch(self, name, folder, pattern, known=()):
        """Let the node's rank run for moments, until it is frozen while there are such files.
        Returns it, and them."""
        rank = self.nodes[name].workers()[0].process
        end = time.time() + self.patience
        while time.time() < end:
            rank.suspend()
            files = {*folder.glob(pattern)}.difference(known)
            if files:
                time.sleep(0.3)  # they may be about to go
            if any(path.exists() for path in files):
                return rank, files
            rank.resume()
            time.sleep(0.002)
        raise TimeoutError(f"{folder} never had {pattern}")

    def watch(self):
        """Start agents that have ended again, as a scheduler does; note every finished checkpoint
        as it is when it first has its name."""
        while True:
            nodes = list(self.nodes.items())
            self.start(*[name for name, node in nodes if node.agent.poll() is not None])
            for folder in self.folder.glob("global_step*"):
                if not folder.suffix and folder not in self.seen:
                    with contextlib.suppress(FileNotFoundError):  # it was removed
                        if files := contents(folder):  # none while it is being saved
                            self.seen[folder] = files
            time.sleep(0.05)

    def finish(self):
        """End as a scheduler ends it, by SIGTERM, and look at what is left."""
        self.reach(self.step() + 25)  # with a checkpoint on the way
        nodes = [self.nodes.pop(name) for name in self.hosts]  # watch() starts them no more
        for node in nodes:
            node.agent.terminate()
        for node in nodes:
            node.agent.wait(timeout=120)
            node.reader.join()
        time.sleep(10)  # until what they started has ended, too
        known = {os.getpid(), *self.hosts.values()}
        left = [
            process.info
            for process in psutil.process_iter(["pid", "cmdline", "status"])
            if process.pid not in known and process.info["status"] != psutil.STATUS_ZOMBIE
        ]
        assert not left, f"left running: {left}"
        rows = [re.match(r"step +(\d+) \|", line) for _, line in self.lines]
        done = [row[1] for row in rows if row]
        twice = len(done) - len(set(done))
        assert twice == sum(event.again for event in self.events), f"{twice} steps were done twice"
        checkpoints = [folder for folder in self.seen if folder.exists()]
        assert checkpoints, "no checkpoint was seen"
        for folder in checkpoints:
            assert contents(folder) == self.seen[folder], f"{folder} was finished, and written into"
            checkpoint.describe(folder)  # raises where it is not complete
        last = self.step()
        train_alone(TRAIN, "hosts_alone", last)
        worst = differences(self, "hosts_alone")
        assert not any(worst.values()), f"the {last} steps differ from one rank's: {worst}"
        print(f"{last} steps, each once in the log, and no bit differs from one rank's", flush=True)


def contents(folder):
    files = {path.name: path.stat() for path in folder.glob("*.pt")}
    return {name: (file.st_ino, file.st_size, file.st_mtime_ns) for name, file in files.items()}


def short(job):
    since = time.time()
    starts = job.said(" accumulation step")
    job.pull("node 2")
    reached = job.step()
    time.sleep(5)
    job.plug("node 2")
    stepped, _ = job.wait_for(rf"^step +{reached + 1} \|", since)
    assert job.said(" accumulation step") == starts, "not the same ranks"
    seconds = f"{stepped - since:.1f}"
    print(
        f"{reached:4}  cable 2 out for 5 seconds: the same ranks have the next step after {seconds}"
    )


def cut(job, what, name, *caught, ranks=2):
    """Pulls a host's cable. caught: files that the host must be writing."""
    job.reach(job.step() + 5)
    rank = job.catch(name, *caught)[0] if caught else None
    job.happen(what, HostsJob.pull, name, rank, ranks=ranks, lost=name == "node 1")
    job.happen("it is back", HostsJob.plug, name, ranks=3)


def full(job):
    """Fill the disk before a save, and empty it after the save has failed."""
    filler = DISK / "filler"
    since = time.time()
    subprocess.run(f"dd if=/dev/zero of={filler} bs=64k".split(), capture_output=True)
    job.wait_for(FULL, since)
    job.happen("disk full in a save", lambda job: filler.unlink(), ranks=3)


def read_only(job):
    since = time.time()
    while subprocess.run(f"mount -o remount,ro {DISK}".split(), capture_output=True).returncode:
        time.sleep(0.01)  # a file in it is being written
    failed, _ = job.wait_for("Read-only file system", since)
    job.resumed("folder is read-only", failed, ranks=3)
    sh(f"mount -o remount,rw {DISK}")
    job.wait_for("global_step.* is saved", time.time())


def late(job):
    """Plays a folder that hangs with the cable: the rank that was cut off in a save writes on while
    the others, who have no mirror and repeat the steps, save the same step."""
    rank, saves = job.catch("node 2", job.folder, ".*.saving")
    since = time.time()
    (reached,) = {int(re.search(r"global_step(\d+)", path.name)[1]) for path in saves}
    job.happen("cable 2 out in a save", HostsJob.pull, "node 2", ranks=2, lost=True)
    other, _ = job.catch("node 1", job.folder, ".*.saving", saves)
    rank.resume()
    time.sleep(5)
    other.resume()
    _, saved = job.wait_for(r"global_step(\d+) is saved", since)
    assert int(saved[1]) == reached, f"step {saved[1]} was saved, not {reached} again"
    job.happen("it is back", HostsJob.plug, "node 2", ranks=3)


def with_mirror(job):
    short(job)
    cut(job, "cable 2 out", "node 2")
    cut(job, "cable 2 out in a save", "node 2", job.folder, ".*.saving")
    memory = Path(f"/proc/{job.hosts['node 2']}/root/dev/shm")
    cut(job, "cable 2 out in a copy", "node 2", memory, "*/step*/*.part")
    full(job)
    read_only(job)
    # With the rendezvous, so the agents of the other two end.
    cut(job, "cable 1 out", "node 1", ranks=1)


# name, what happens, flags
JOBS = [("mirror", with_mirror, ["--mirror", "1"]), ("no_mirror", late, [])]


def main():
    assert os.getpid() == 1, "`make hosts` starts it in namespaces of its own"
    sh("ip link set lo up")
    sh("ip link add switch up type bridge")
    sh("mount -t tmpfs memory /dev/shm")
    sh(f"mount -t tmpfs -o size=16m shared {DISK}")
    hosts = {f"node {number}": host(number) for number in (1, 2, 3)}
    print(f"3 hosts of 1 rank, ZeRO-1, --timeout 20, {HostsJob.settings}")
    for name, events, flags in JOBS:
        print(f"{' '.join(flags) or 'no mirror'}\n{HEAD}", flush=True)
        with HostsJob(f"hosts_{name}", hosts, *flags) as job:
            job.happen("start", Job.start, *hosts, ranks=3)
            events(job)
            job.finish()


if __name__ == "__main__":
    main()

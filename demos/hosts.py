"""Hosts whose cable is pulled, whose disk is full, whose folder cannot be written: `make hosts`.

    python demos/hosts.py --only longer in_a_save

Three hosts on one machine train with one rank each, in four jobs, while the events below happen to them. Then every
step must be in the log once, with every bit of one rank that nothing happened to, and done once, but where two hosts of
three are cut off at once or there is no mirror; nothing may be written into a checkpoint that is finished, and all of
them must be whole; no process may be left. Needs Linux, iproute2 and the right to make namespaces.
"""

import argparse
import contextlib
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from harness.machines import WARM, Job, Node, compare, holder, read  # noqa: E402
from universal import checkpoint  # noqa: E402

FOLDER, TIMEOUT = Path("ckpt_hosts"), 20
TRAIN = "--n_embd 32 --seq_len 16 --n_layer 1 --train_batch_size 24 --train_micro_batch_size_per_gpu 4 --exact".split()
TRAIN += "--steps 10000 --eval_interval 50 --checkpoint_interval 20 --keep 3".split()
TRAIN += f"--timeout {TIMEOUT} --checkpoint_dir {FOLDER}".split()
# With fewer seconds of silence the agents of a busy machine take each other for dead, and each trains alone.
RENDEZVOUS = "keep_alive_interval=3,keep_alive_max_attempt=5,last_call_timeout=5,read_timeout=120"
ALONE = "setpriv --pdeathsig KILL unshare --map-root-user --net --mount --pid --fork --kill-child --mount-proc"


def enter():
    """Start this script again where it is alone: the kernel takes down the processes, networks and mounts made in
    there when it ends, however it ends."""
    trial = f"{ALONE} sh -c 'command -v nsenter && ip link add switch type bridge && mount -t tmpfs trial /dev/shm'"
    if subprocess.run(trial, shell=True, stdout=subprocess.DEVNULL).returncode:
        print("demos/hosts.py: namespaces are not allowed here, or a tool is missing; nothing was tried")
        return 0
    inside = f"mount -t tmpfs memory /dev/shm && exec {shlex.join([sys.executable, *sys.argv])}"
    return subprocess.run([*ALONE.split(), "sh", "-c", inside], env=os.environ | {"ALONE": "1"}).returncode


def ip(words, where=()):
    subprocess.run([*where, "ip", *words.split()], check=True)


class Host:
    """What has an address, a network card and a /dev/shm of its own; with disk="4m" a disk, too."""

    def __init__(self, number, disk=None):
        mounts = ["mount -t tmpfs memory /dev/shm"]
        mounts += [f"mount -t tmpfs -o size={disk} disk {FOLDER}"] * bool(disk)
        shell = " && ".join([*mounts, "echo", "exec sleep infinity"])
        self.holder = subprocess.Popen(["unshare", "--net", "--mount", "sh", "-c", shell], stdout=subprocess.PIPE)
        assert self.holder.stdout.readline(), "no namespaces for a host"
        pid = self.holder.pid
        self.address, self.port = f"10.77.0.{number}", f"port{pid}"
        self.inside = ["nsenter", f"--target={pid}", "--net", "--mount", f"--wd={os.getcwd()}"]
        root = Path(f"/proc/{pid}/root")
        self.memory, self.folder = root / "dev/shm", Path(f"{root}{FOLDER.resolve()}")
        ip(f"link add {self.port} type veth peer name eth0 netns {pid}")
        ip(f"link set {self.port} master switch up")
        for words in ("link set lo up", "link set eth0 up", f"addr add {self.address}/24 dev eth0"):
            ip(words, self.inside)


class HostsJob(Job):
    """Three hosts, 1 to 3, and agents on them."""

    patience = 600  # on a machine that others load, too

    def __init__(self, name, mirror=True, elsewhere=False, disk=None):
        """elsewhere: a fourth host holds the rendezvous, not the first. disk: the size of a disk that each host has."""
        subprocess.run(["mount", "-t", "tmpfs", "shared", FOLDER], check=True)
        self.hosts = {number: Host(number, disk) for number in range(1, 5 if elsewhere else 4)}
        self.holder = 4 if elsewhere else 1
        train = [*TRAIN, "--run_name", name, "--elastic", *["--mirror", "1"] * mirror]
        super().__init__(WARM, train, name, endpoint=f"{self.hosts[self.holder].address}:29400")
        if elsewhere:
            self.nodes[4] = Node([*self.hosts[4].inside, *holder(29400, "0.0.0.0")], [])
        self.mirror, self.disk, self.again, self.seen, self.over = mirror, disk, 0, {}, threading.Event()
        self.watcher = threading.Thread(target=self.watch)
        self.watcher.start()

    def start(self, *numbers):
        for number in numbers:
            host = self.hosts[number]
            conf = f"{RENDEZVOUS},is_host={int(number == self.holder)}"
            meet = ["--local-addr", host.address, "--rdzv-endpoint", self.endpoint, "--rdzv-conf", conf]
            command = [*host.inside, *self.launcher, *meet, str(ROOT / "train_elastic.py"), *self.train]
            self.nodes[number] = Node(command, self.lines)

    def cables(self, state, *numbers):
        """Pull them, "down", or put them back, "up". Returns when, and the last step before."""
        for number in numbers:
            ip(f"link set {self.hosts[number].port} {state}")
        since = time.time()
        time.sleep(0.5)  # a step that was done can be on its way to the log
        return since, self.step()

    def catch(self, number, sign):
        """Let the host's rank run for moments, until it is frozen while there is the sign, a function of the host."""
        _, rank = self.nodes[number].workers()[0]
        while True:
            rank.suspend()
            if sign(self.hosts[number]):
                time.sleep(0.3)  # not just about to go
                if sign(self.hosts[number]):
                    return rank
            rank.resume()
            time.sleep(0.002)

    def watch(self):
        """Start agents that have ended again, as a scheduler does; note every finished checkpoint as it is when it
        first has its name."""
        while not self.over.wait(0.05):
            self.start(*[number for number, node in [*self.nodes.items()] if node.agent.poll() is not None])
            for host in self.hosts.values():
                for folder in host.folder.glob("global_step*"):
                    if not folder.suffix and folder not in self.seen:
                        self.seen[folder] = contents(folder)

    def unwatched(self):
        self.over.set()
        self.watcher.join()

    def close(self):
        self.unwatched()
        super().close()
        for process in self.processes():
            process.kill()
        for host in self.hosts.values():
            host.holder.kill()
        subprocess.run(["umount", FOLDER], check=True)

    def processes(self):
        """Those that are neither this one nor the hosts' own."""
        own = {os.getpid(), *(host.holder.pid for host in self.hosts.values())}
        found = [process for process in psutil.process_iter(["cmdline", "status"]) if process.pid not in own]
        return [process for process in found if process.info["status"] != psutil.STATUS_ZOMBIE]

    def finish(self):
        """End as a scheduler ends it, by SIGTERM, and look at what is left."""
        self.reach(self.step() + 25)  # with a checkpoint on the way
        self.unwatched()
        for node in self.nodes.values():
            node.agent.terminate()
        for node in self.nodes.values():
            node.agent.wait(timeout=120)
            node.reader.join()
        done = [int(found[1]) for _, line in self.lines if (found := re.match(r"step +(\d+) \|", line))]
        assert len(done) - len(set(done)) == self.again, f"{len(done) - len(set(done))} steps were done twice"
        checkpoints = {folder: then for folder, then in self.seen.items() if folder.exists()}
        assert checkpoints, "no checkpoint was seen"
        for folder, then in checkpoints.items():
            now = contents(folder)
            changed = [name for name in now if now[name] != then.get(name) and (name in then or not self.disk)]
            assert not changed and then.keys() <= now.keys(), f"{folder} was finished, and {changed} written"
            if not self.disk:
                checkpoint.describe(folder)  # raises where it is not whole
        end = time.time() + 20
        while left := [process.info for process in self.processes()]:
            assert time.time() < end, f"left running: {left}"
            time.sleep(0.1)


def contents(folder):
    files = {path.name: path.stat() for path in folder.glob("*.pt")}
    return {name: (file.st_ino, file.st_size, file.st_mtime_ns) for name, file in files.items()}


def resumed(job, what, since, reached, ranks, cause="failed .exitcode", lost=False):
    """Wait for the first new step on so many ranks, and print what it took: until the old ones gave up, until the new
    ones were started, until they had done a step. cause: the line of the first, or None. lost: a shard and its copy."""
    gave_up = job.first(cause, since)[0] if cause else since
    began, _, stepped, first = job.went_on(since, ranks)
    created = job.created(since)
    again = max(0, reached + 1 - first)
    show(what, reached, ranks, again, [gave_up - since, created - gave_up, stepped - created])
    assert not again or lost or not job.mirror, "steps are done again"
    job.again += again


def show(what, step, ranks, again, seconds):
    parts = "".join(f"{part:>{width}.1f}" for part, width in zip(seconds, (10, 12, 7), strict=False))
    print(f"  {what:<42}{step:>6}{ranks:>7}{again:>7}{sum(seconds):9.1f}{parts * (len(seconds) > 1)}", flush=True)


def back(job, *numbers):
    resumed(job, "the cable is back", *job.cables("up", *numbers), 3, cause=None)


def cut(what, *numbers, ranks=2, lost=False, sign=None):
    """An event: the cables of these hosts are pulled, while there is the sign, and later put back."""

    def event(job):
        rank = sign and job.catch(numbers[0], sign)
        when = job.cables("down", *numbers)
        if rank:
            rank.resume()
        resumed(job, what, *when, ranks, lost=lost)
        back(job, *numbers)

    return event


def short(job, seconds=5):
    """The same ranks go on. Returns when the cable was pulled."""
    since, reached = job.cables("down", 2)
    time.sleep(seconds)
    job.cables("up", 2)
    stepped, _ = job.first(rf"^step +{reached + 1} \|", since)
    show(f"host 2's cable is out for {seconds} seconds", reached, 3, 0, [stepped - since])
    return since


def twice(job):
    since = short(job, 3)
    time.sleep(max(0, since + 8 - time.time()))
    resumed(job, "5 seconds later it is out again", *job.cables("down", 2), 2)
    back(job, 2)


def saves(host):
    found = set()
    with contextlib.suppress(FileNotFoundError):
        found |= {folder.stat().st_ino for folder in host.folder.glob("global_step*.unfinished")}
    return found


def receives(host):
    return [*host.memory.glob("*/step*/*.part")]


def late(job):
    """As where a folder hangs with the cable: the rank that was cut off in a save writes on while the others, who have
    no mirror and repeat the steps, save the same step."""
    rank, before = job.catch(2, saves), saves(job.hosts[1])
    since, reached = job.cables("down", 2)
    resumed(job, "host 2's cable is out in a save, no mirror", since, reached, 2)
    other = job.catch(1, lambda host: saves(host) - before)
    rank.resume()
    time.sleep(5)
    other.resume()
    _, saved = job.first(r"saved \S+global_step(\d+)", since)
    assert int(saved[1]) == reached, f"step {saved[1]} was saved, not {reached} again"
    back(job, 2)


def full(job):
    """Something else fills the disk of host 2 before a save, and is removed after it has failed."""
    filler = job.hosts[2].folder / "filler"
    subprocess.run(["dd", "if=/dev/zero", f"of={filler}", "bs=64k"], capture_output=True)
    since, _ = job.first("No space left|inline_container", time.time())
    filler.unlink()
    resumed(job, "host 2's disk is full in a save", since, job.step(), 3)


def read_only(job):
    since = time.time()
    remount("ro")
    failed, _ = job.first("Read-only file system", since)
    resumed(job, "a save into a folder that is read-only", failed, job.step(), 3)
    time.sleep(max(0, since + 30 - time.time()))
    remount("rw")
    since, wanted = time.time(), job.step() + 20
    _, saved = job.first(r"saved \S+global_step(\d+)", since)
    assert int(saved[1]) <= wanted, "the first save after it did not come about"


def remount(how):
    """It cannot be made read-only while a file in it is being written."""
    while subprocess.run(["mount", "-o", f"remount,{how}", FOLDER], capture_output=True).returncode:
        time.sleep(0.01)


LONGER = cut("host 2's cable is out", 2)
SHARED = {
    "short": short,
    "longer": LONGER,
    "twice": twice,
    "in_a_save": cut("host 2's cable is out in a save", 2, sign=saves),
    "in_a_copy": cut("host 2's cable is out while it gets a copy", 2, sign=receives),
    "neighbours": cut("the cables of hosts 2 and 3 are out", 2, 3, ranks=1, lost=True),
    "read_only": read_only,
    # Without the rendezvous the agents of the other two end, and are started again.
    "first": cut("host 1's cable is out, the rendezvous on it", 1, ranks=1, lost=True),
}
ELSEWHERE = {"first_elsewhere": cut("host 1's cable is out, not the rendezvous", 1)}
JOBS = {
    "--mirror 1, a shared folder": ({}, SHARED),
    "--mirror 1, the rendezvous on a fourth host": ({"elsewhere": True}, ELSEWHERE),
    "no mirror": ({"mirror": False}, {"late": late}),
    "--mirror 1, a disk each": ({"disk": "8m"}, {"longer": LONGER, "full": full}),
}
EVENTS = list(dict.fromkeys(name for _, events in JOBS.values() for name in events))


def one_rank(steps):
    """The log of what the jobs are compared with: the same training, to which nothing happens."""
    from harness.ranks import ends_after, run  # with torch, and more of it than the hosts need

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    words = [*TRAIN, "--run_name", "hosts_alone", "--checkpoint_dir", "/dev/shm/alone"]
    run(Path.cwd(), 1, "train_elastic.py", *words, patch=ends_after(steps), limit=600)
    return read(Path("logs/hosts_alone.csv"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=EVENTS, nargs="+", default=EVENTS, metavar="EVENT", help=", ".join(EVENTS))
    args = parser.parse_args()
    if "ALONE" not in os.environ:
        return enter()
    for words in ("link set lo up", "link add switch type bridge", "link set switch up"):
        ip(words)
    FOLDER.mkdir(exist_ok=True)
    os.environ |= {"GLOO_SOCKET_IFNAME": "eth0", "DS_ACCELERATOR": "cpu"}
    print(f"3 hosts of 1 rank, ZeRO-1, --timeout {TIMEOUT}, {RENDEZVOUS}")
    print(f"  {'event':<42}  step  ranks  again  seconds = timeout  rendezvous  start")
    logs, began = [], time.time()
    for title, (options, events) in JOBS.items():
        chosen = [event for name, event in events.items() if name in args.only]
        if not chosen:
            continue
        print(title, flush=True)
        with HostsJob(f"hosts_{len(logs) + 1}", **options) as job:
            job.start(1, 2, 3)
            job.went_on(0, 3)
            for event in chosen:
                job.reach(job.step() + 5)
                event(job)
            job.finish()
        logs.append(read(job.log))
    wanted = one_rank(max(map(len, logs)))
    for log in logs:
        _, worst = compare(log, wanted[: len(log)])
        assert not any(worst.values()), f"the {len(log)} steps of a job differ from one rank's: {worst}"
    print(f"{', '.join(str(len(log)) for log in logs)} steps, each once in the log, and no bit differs from one rank's")
    minutes = (time.time() - began) / 60
    print(f"{minutes:.0f} minutes; load of the {os.cpu_count()} cores in the last 15: {os.getloadavg()[2]:.1f}")
    FOLDER.rmdir()


if __name__ == "__main__":
    sys.exit(main())

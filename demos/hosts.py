"""Hosts whose cable is pulled, whose disk is full, whose folder cannot be written: `make hosts`.

    python demos/hosts.py --only longer in_a_save

Three hosts on one machine, each with an address, a network card and a /dev/shm of its own, train with one rank each,
in four jobs, while the events below happen to them. Then every step must be in the log once, with every bit of one
rank that nothing happened to, and done once, but where two hosts of three are cut off at once or there is no mirror;
nothing may be written into a checkpoint that is finished, and all of them must be whole; no process may be left. Needs
Linux, iproute2 and the right to make namespaces: root's, or what the kernel lets every user do.
"""

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from harness.machines import HOLDER, WARM, Job, Node, logged, read  # noqa: E402
from universal import checkpoint  # noqa: E402

FOLDER, TIMEOUT = Path("ckpt_hosts"), 20
TRAIN = "--n_embd 32 --seq_len 16 --n_layer 1 --train_batch_size 24 --train_micro_batch_size_per_gpu 4 --exact".split()
TRAIN += "--steps 10000 --eval_interval 50 --checkpoint_interval 20 --keep 3".split()
TRAIN += f"--timeout {TIMEOUT} --checkpoint_dir {FOLDER}".split()
# With fewer seconds of silence the agents of a busy machine take each other for dead, and each trains alone.
RENDEZVOUS = "keep_alive_interval=3,keep_alive_max_attempt=5,last_call_timeout=5,read_timeout=120"
ALONE = "setpriv --pdeathsig KILL unshare --map-root-user --net --mount --pid --fork --kill-child --mount-proc".split()

# -----------------------------------------------------------------------------
# hosts


def enter():
    """Start this script again where it is alone: the kernel takes down the processes, networks and mounts made in
    there when it ends, however it ends."""
    tools = [tool for tool in ("setpriv", "unshare", "nsenter", "ip") if not shutil.which(tool)]
    trial = "ip link add switch type bridge && mount -t tmpfs trial /dev/shm"
    if tools or subprocess.run([*ALONE, "sh", "-c", trial], capture_output=True).returncode:
        why = f"{', '.join(tools)} is missing" if tools else "namespaces are not allowed here"
        print(f"demos/hosts.py: {why}; nothing was tried")
        return 0
    return subprocess.run([*ALONE, sys.executable, *sys.argv], env=os.environ | {"ALONE": "1"}).returncode


def ip(words):
    subprocess.run(["ip", *words.split()], check=True)


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
        self.root = Path(f"/proc/{pid}/root")
        self.memory, self.folder = self.root / "dev/shm", Path(f"{self.root}{FOLDER.resolve()}")
        ip(f"link add {self.port} type veth peer name eth0 netns {pid}")
        ip(f"link set {self.port} master switch up")
        for words in ("link set lo up", "link set eth0 up", f"addr add {self.address}/24 dev eth0"):
            subprocess.run([*self.inside, "ip", *words.split()], check=True)

    def cable(self, state):
        ip(f"link set {self.port} {state}")

    def close(self):
        self.holder.kill()
        self.holder.wait()


class HostsJob(Job):
    """Three hosts, 1 to 3, and agents on them."""

    patience = 600  # on a machine that others load, too

    def __init__(self, name, mirror=True, elsewhere=False, disk=None):
        """elsewhere: a fourth host holds the rendezvous, not the first. disk: the size of a disk that each host has."""
        subprocess.run(["mount", "-t", "tmpfs", "shared", FOLDER], check=True)
        self.hosts = {number: Host(number, disk) for number in ((1, 2, 3, 4) if elsewhere else (1, 2, 3))}
        self.holder = 4 if elsewhere else 1
        train = [*TRAIN, "--run_name", name, "--elastic", *["--mirror", "1"] * mirror]
        super().__init__(WARM, train, name, endpoint=f"{self.hosts[self.holder].address}:29400")
        self.log.unlink(missing_ok=True)
        if elsewhere:
            script = HOLDER.format(29400).replace("127.0.0.1", "0.0.0.0") + "; time.sleep(1e9)"
            self.nodes[4] = Node([*self.hosts[4].inside, sys.executable, "-c", script], [])
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

    def pull(self, *numbers):
        """Returns when, and the last step before."""
        for number in numbers:
            self.hosts[number].cable("down")
        since = time.time()
        time.sleep(0.5)  # a step that was done can be on its way to the log
        return since, self.step()

    def plug(self, *numbers):
        for number in numbers:
            self.hosts[number].cable("up")
        return time.time(), self.step()

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
        for process in processes(self):
            process.kill()
        for host in self.hosts.values():
            host.close()
        subprocess.run(["umount", FOLDER], check=True)


def contents(folder):
    files = {path.name: path.stat() for path in folder.glob("*.pt")}
    return {name: (file.st_ino, file.st_size, file.st_mtime_ns) for name, file in files.items()}


def processes(job):
    """Those that are neither this one nor the hosts' own."""
    own = {os.getpid(), *(host.holder.pid for host in job.hosts.values())}
    found = [process for process in psutil.process_iter(["cmdline", "status"]) if process.pid not in own]
    return [process for process in found if process.info["status"] != psutil.STATUS_ZOMBIE]


# -----------------------------------------------------------------------------
# events


def resumed(job, what, since, reached, ranks, cause="failed .exitcode", lost=False):
    """Wait for the first new step on so many ranks, and print what it took: until the old ones gave up, until the new
    ones were started, until they had done a step. cause: the line of the first, or None. lost: a shard and its copy."""
    gave_up = job.first(cause, since)[0] if cause else since
    began, _ = job.first(rf"per rank x \d+ accumulation steps x {ranks} ranks", since)
    created = min(when for node in job.nodes.values() for when, _ in node.workers() if since < when < began)
    stepped, found = job.first(r"^step +(\d+) \|", began)
    again = max(0, reached + 1 - int(found[1]))
    show(what, reached, ranks, again, [gave_up - since, created - gave_up, stepped - created])
    assert not again or lost or not job.mirror, "steps are done again"
    job.again += again


def show(what, step, ranks, again, seconds):
    parts = "".join(f"{part:>{width}.1f}" for part, width in zip(seconds, (10, 12, 7), strict=False))
    print(f"  {what:<42}{step:>6}{ranks:>7}{again:>7}{sum(seconds):9.1f}{parts * (len(seconds) > 1)}", flush=True)


def rides_out(job, what, since, reached):
    """The same ranks go on."""
    stepped, _ = job.first(rf"^step +{reached + 1} \|", since)
    show(what, reached, 3, 0, [stepped - since])


def back(job, *numbers):
    resumed(job, "the cable is back", *job.plug(*numbers), 3, cause=None)


def short(job):
    since, reached = job.pull(2)
    time.sleep(5)
    job.plug(2)
    rides_out(job, "host 2's cable is out for 5 seconds", since, reached)


def longer(job):
    resumed(job, "host 2's cable is out", *job.pull(2), 2)
    back(job, 2)


def twice(job):
    since, reached = job.pull(2)
    time.sleep(3)
    job.plug(2)
    rides_out(job, "host 2's cable is out for 3 seconds", since, reached)
    time.sleep(max(0, since + 8 - time.time()))
    resumed(job, "5 seconds later it is out again", *job.pull(2), 2)
    back(job, 2)


def saves(host):
    return [*host.folder.glob("global_step*.unfinished")]


def receives(host):
    return [*host.memory.glob("*/step*/*.part")]


def in_a_save(job):
    rank = job.catch(2, saves)
    when = job.pull(2)
    rank.resume()
    resumed(job, "host 2's cable is out in a save", *when, 2)
    back(job, 2)


def in_a_copy(job):
    rank = job.catch(2, receives)
    when = job.pull(2)
    rank.resume()
    resumed(job, "host 2's cable is out while it gets a copy", *when, 2)
    back(job, 2)


def neighbours(job):
    resumed(job, "the cables of hosts 2 and 3 are out", *job.pull(2, 3), 1, lost=True)
    back(job, 2, 3)


def first(job):
    """Without the rendezvous the agents of the other two end, and are started again."""
    resumed(job, "host 1's cable is out, the rendezvous on it", *job.pull(1), 1, lost=True)
    back(job, 1)


def first_elsewhere(job):
    resumed(job, "host 1's cable is out, not the rendezvous", *job.pull(1), 2)
    back(job, 1)


def late(job):
    """As where a folder hangs with the cable: the rank that was cut off in a save writes on while the others, who have
    no mirror and repeat the steps, save the same step."""
    rank = job.catch(2, saves)
    before = {folder.stat().st_ino for folder in saves(job.hosts[1])}
    since, reached = job.pull(2)
    resumed(job, "host 2's cable is out in a save, no mirror", since, reached, 2)

    def saves_again(host):
        with contextlib.suppress(FileNotFoundError):
            return [folder for folder in saves(host) if folder.stat().st_ino not in before]

    other = job.catch(1, saves_again)
    rank.resume()
    time.sleep(5)
    other.resume()
    _, saved = job.first(r"saved \S+global_step(\d+)", since)
    assert int(saved[1]) == reached, f"step {saved[1]} was saved, not {reached} again"
    back(job, 2)


def full(job):
    """Something else fills the disk of host 2 before a save, and is removed after it has failed."""
    filler = job.hosts[2].folder / "filler"
    with filler.open("wb") as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
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


JOBS = {
    "--mirror 1, a shared folder": ({}, [short, longer, twice, in_a_save, in_a_copy, neighbours, read_only, first]),
    "--mirror 1, the rendezvous on a fourth host": ({"elsewhere": True}, [first_elsewhere]),
    "no mirror": ({"mirror": False}, [late]),
    "--mirror 1, a disk each": ({"disk": "8m"}, [longer, full]),
}
EVENTS = {event.__name__: event for _, events in JOBS.values() for event in events}

# -----------------------------------------------------------------------------
# what must hold


def stop(job):
    """As a scheduler does it: SIGTERM."""
    job.reach(job.step() + 5)
    job.unwatched()
    for node in job.nodes.values():
        node.terminate()
    for node in job.nodes.values():
        node.agent.wait(timeout=120)
        node.reader.join()


def check(job):
    """After its end."""
    done = [int(found[1]) for _, line in job.lines if (found := re.match(r"step +(\d+) \|", line))]
    assert len(done) - len(set(done)) == job.again, f"{len(done) - len(set(done))} steps were done twice"
    checkpoints = {folder: then for folder, then in job.seen.items() if folder.exists()}
    assert checkpoints, "no checkpoint was seen"
    for folder, then in checkpoints.items():
        now = contents(folder)
        changed = [name for name in now if now[name] != then.get(name) and (name in then or not job.disk)]
        assert not changed and then.keys() <= now.keys(), f"{folder} was finished, and {changed} written"
        if not job.disk:
            checkpoint.describe(folder)  # raises where it is not whole
    end = time.time() + 20
    while left := [process.info for process in processes(job)]:
        assert time.time() < end, f"left running: {left}"
        time.sleep(0.1)


def compare(names):
    """The logs of the jobs with one rank's."""
    logs = {name: read(logged(name)) for name in names}
    alone = Job(WARM, [*TRAIN, "--run_name", "hosts_alone", "--checkpoint_dir", "/dev/shm/alone"], "hosts_alone")
    alone.log.unlink(missing_ok=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        alone.start("node 1")
        alone.first(r"^step +1 \|", 0)
        alone.reach(max(len(log) for log in logs.values()))
    finally:
        alone.close()
    wanted = read(alone.log)
    for name, log in logs.items():
        steps = [int(row["step"]) for row in log]
        assert steps == list(range(1, len(log) + 1)), f"{name}: a step is missing, or twice in the log"
        for row, other in zip(log, wanted, strict=False):
            columns = [column for column in ("loss", "val_loss", "grad_norm") if row[column] != other[column]]
            assert not columns, f"{name}: {columns} differ at step {row['step']}"
    return ", ".join(str(len(log)) for log in logs.values())


def play(title, name, options, events):
    print(title, flush=True)
    job = HostsJob(name, **options)
    try:
        job.start(1, 2, 3)
        meet, _ = job.first("accumulation steps x 3 ranks", 0)
        job.first(r"^step +\d+ \|", meet)
        for event in events:
            job.reach(job.step() + 5)
            event(job)
        stop(job)
        check(job)
    except BaseException:
        print("".join(line for _, line in job.lines if not line.startswith(("step", "saved")))[-20000:])
        print({number: (node.agent.poll(), node.workers()) for number, node in job.nodes.items()})
        raise
    finally:
        job.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=EVENTS, nargs="+", default=EVENTS, metavar="EVENT", help=", ".join(EVENTS))
    args = parser.parse_args()
    if "ALONE" not in os.environ:
        sys.exit(enter())
    subprocess.run(["mount", "-t", "tmpfs", "memory", "/dev/shm"], check=True)
    for words in ("link set lo up", "link add switch type bridge", "link set switch up"):
        ip(words)
    FOLDER.mkdir(exist_ok=True)
    os.environ |= {"GLOO_SOCKET_IFNAME": "eth0", "DS_ACCELERATOR": "cpu"}
    print(f"3 hosts of 1 rank, ZeRO-1, --timeout {TIMEOUT}, {RENDEZVOUS}")
    print(f"  {'event':<42}  step  ranks  again  seconds = timeout  rendezvous  start")
    names, began = [], time.time()
    for title, (options, events) in JOBS.items():
        if chosen := [event for event in events if event.__name__ in args.only]:
            names.append(f"hosts_{len(names) + 1}")
            play(title, names[-1], options, chosen)
    print(f"{compare(names)} steps, each once in the log, and no bit differs from one rank's")
    minutes = (time.time() - began) / 60
    print(f"{minutes:.0f} minutes; load of the {os.cpu_count()} cores in the last 15: {os.getloadavg()[2]:.1f}")
    FOLDER.rmdir()


if __name__ == "__main__":
    main()

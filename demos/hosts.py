"""Hosts whose cable is pulled, whose disk is full, whose folder cannot be written: `make hosts`.

    python demos/hosts.py --only "cable out, longer"

Three hosts on one machine, each with an address, a network card and a /dev/shm of its own, train with one rank each.
The events below happen to them, each in a job of its own. Then every step must be in the log once, with every bit of
one rank that nothing happened to; done once, but where two hosts of three are lost at once; nothing may be written
into a checkpoint that is finished; no process, and nothing in memory, may be left. Needs Linux, iproute2 and the right
to make namespaces: root, or users whom the kernel lets.
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

from harness.machines import HOLDER, RENDEZVOUS, WARM, Job, Node, logged, read, train_alone  # noqa: E402

FOLDER, STEPS, TIMEOUT = Path("ckpt_hosts"), 1000, 20
TRAIN = "--n_embd 32 --seq_len 16 --n_layer 1 --train_batch_size 24 --train_micro_batch_size_per_gpu 4 --exact".split()
TRAIN += (
    f"--eval_interval 50 --checkpoint_interval 20 --steps {STEPS} --timeout {TIMEOUT} --checkpoint_dir {FOLDER}".split()
)
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
        within = [
            *self.inside,
            "sh",
            "-c",
            f"ip link set lo up; ip link set eth0 up; ip addr add {self.address}/24 dev eth0",
        ]
        subprocess.run(within, check=True)

    def cable(self, state):
        ip(f"link set {self.port} {state}")

    def close(self):
        self.holder.kill()
        self.holder.wait()


class HostsJob(Job):
    """Three hosts, 1 to 3, and agents on them."""

    def __init__(self, name, mirror=True, elsewhere=False, disk=None):
        """elsewhere: the rendezvous is held by a fourth host. disk: the size of a disk that each host has."""
        subprocess.run(["mount", "-t", "tmpfs", "shared", FOLDER], check=True)
        self.hosts = {number: Host(number, disk) for number in ((1, 2, 3, 4) if elsewhere else (1, 2, 3))}
        run_name = "hosts_" + re.sub(r"\W+", "_", name)
        train = [*TRAIN, "--elastic", *["--mirror", "1"] * mirror, "--run_name", run_name]
        self.holder = 4 if elsewhere else 1
        super().__init__(WARM, train, run_name, endpoint=f"{self.hosts[self.holder].address}:29400")
        self.log.unlink(missing_ok=True)
        if elsewhere:
            script = HOLDER.format(29400).replace("127.0.0.1", "0.0.0.0") + "; time.sleep(1e9)"
            self.nodes[4] = Node([*self.hosts[4].inside, sys.executable, "-c", script], [])
        self.disk, self.seen, self.over = disk, {}, threading.Event()
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
        """Freeze the host's rank while there is the sign, a function of the host."""
        while True:
            _, rank = self.nodes[number].workers()[0]
            while not sign(self.hosts[number]):
                assert rank.is_running(), "the job ended by itself"
            rank.suspend()
            time.sleep(0.3)
            if sign(self.hosts[number]):
                return rank
            rank.resume()
            time.sleep(0.1)

    def watch(self):
        """Note every finished checkpoint as it is when it first has its name."""
        while not self.over.wait(0.02):
            for host in self.hosts.values():
                for folder in host.folder.glob("global_step*"):
                    if not folder.suffix and folder not in self.seen:
                        self.seen[folder] = contents(folder)

    def close(self):
        self.over.set()
        self.watcher.join()
        super().close()
        for host in self.hosts.values():
            host.close()
        subprocess.run(["umount", FOLDER], check=True)


def contents(folder):
    files = {path.name: path.stat() for path in folder.iterdir()}
    return {name: (file.st_ino, file.st_size, file.st_mtime_ns) for name, file in files.items()}


# -----------------------------------------------------------------------------
# events


def resumed(job, what, since, reached, ranks, first="failed .exitcode"):
    """Wait for the first new step, and print what it took: until the ranks that were left gave up, until the new ones
    were started, until they had done a step. first: the line of those that give up, or None."""
    gave_up = job.first(first, since)[0] if first else since
    began, _ = job.first(rf"per rank x \d+ accumulation steps x {ranks} ranks", since)
    created = min(when for node in job.nodes.values() for when, _ in node.workers() if since < when < began)
    loaded, found = job.first(r"optimizer at step (\d+)", began)
    stepped, _ = job.first(r"^step +\d+ \|", loaded)
    show(what, reached, ranks, max(0, reached - int(found[1])), [gave_up - since, created - gave_up, stepped - created])


def show(what, step, ranks, again, seconds):
    total = f"{sum(seconds):9.1f}"
    parts = "".join(f"{part:>{width}.1f}" for part, width in zip(seconds, (10, 12, 7), strict=False))
    print(f"  {what:<44}{step:>4}{ranks:>7}{again:>7}{total}{parts if len(seconds) == 3 else ''}", flush=True)


def rides_out(job, what, since, reached):
    """The same ranks go on."""
    stepped, _ = job.first(rf"^step +{reached + 1} \|", since)
    show(what, reached, 3, 0, [stepped - since])


def back(job, *numbers):
    resumed(job, "the cable is back", *job.plug(*numbers), 3, first=None)


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
    return list(host.folder.glob("global_step*.unfinished"))


def receives(host):
    return list(host.memory.glob("*/step*/*.part"))


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
    resumed(job, "host 2's cable is out while a copy is sent", *when, 2)
    back(job, 2)


def neighbours(job):
    resumed(job, "the cables of hosts 2 and 3 are out", *job.pull(2, 3), 1)
    back(job, 2, 3)


def first(job):
    """Without the rendezvous the agents of the other two end; a scheduler starts them again."""
    since, reached = job.pull(1)
    resumed(job, "host 1's cable is out, the store on it", since, reached, 1)
    for number in (2, 3):
        assert job.nodes.pop(number).agent.wait(timeout=200), "an agent without its rendezvous ended with 0"
    show("the agents of hosts 2 and 3 end", reached, 1, 0, [time.time() - since])
    job.plug(1)
    since, reached = time.time(), job.step()
    job.start(2, 3)
    resumed(job, "the cable is back, they start again", since, reached, 3, first=None)


def first_elsewhere(job):
    resumed(job, "host 1's cable is out, the store on host 4", *job.pull(1), 2)
    back(job, 1)


def late(job):
    """As where a folder hangs with the cable: the rank that was cut off writes when the others have saved again."""
    rank = job.catch(2, saves)
    since, reached = job.pull(2)
    resumed(job, "host 2's cable is out in a save, no mirror", since, reached, 2)
    when, saved = job.first(r"saved \S+global_step(\d+)", since)
    assert int(saved[1]) == reached // 20 * 20, f"step {saved[1]} was saved, not {reached} again"
    rank.resume()
    resumed(job, "it writes on, the cable is back", *job.plug(2), 3, first=None)


def full(job):
    """Something else fills the disk of host 2 before a save, and is removed after it has failed."""
    filler = job.hosts[2].folder / "filler"
    with filler.open("wb") as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    since, _ = job.first(r"No space left|enforce fail at inline_container", time.time())
    filler.unlink()
    resumed(job, "host 2's disk is full in a save", since - 0.01, job.step(), 3)


def read_only(job):
    since = time.time()
    remount("ro")
    failed, _ = job.first("Read-only file system", since)
    resumed(job, "a save into a folder that is read-only", failed - 0.01, job.step(), 3)
    time.sleep(max(0, since + 30 - time.time()))
    remount("rw")
    wanted = (job.step() // 20 + 1) * 20
    job.first(rf"saved \S+global_step{wanted}", since)
    print(f"    after 30 seconds it can be written again: global_step{wanted} is saved", flush=True)


def remount(how):
    """EBUSY while a file in it is open for writing."""
    while subprocess.run(["mount", "-o", f"remount,{how}", FOLDER], capture_output=True).returncode:
        time.sleep(0.01)


EVENTS = {
    "cable out, shortly": (short, {}),
    "cable out, longer": (longer, {}),
    "twice in ten seconds": (twice, {}),
    "in a save": (in_a_save, {}),
    "in a copy": (in_a_copy, {}),
    "two of three": (neighbours, {}),
    "the first host": (first, {}),
    "the first host, store elsewhere": (first_elsewhere, {"elsewhere": True}),
    "late writer": (late, {"mirror": False}),
    "disk full": (full, {"disk": "4m"}),
    "read-only": (read_only, {}),
    "a disk each": (longer, {"disk": "64m"}),
}
AGAIN = ("two of three", "the first host", "late writer")  # a shard and its copy are cut off, or there is no copy

# -----------------------------------------------------------------------------
# what must hold


def check(job, name):
    """Stop the job, some steps after the event."""
    last = job.step() + 5
    while job.step() < last:
        time.sleep(0.1)
    for node in job.nodes.values():
        node.terminate()
    for node in job.nodes.values():
        node.agent.wait(timeout=60)
        node.reader.join()
    log, alone = read(job.log), read(logged("hosts_alone"))
    assert [int(row["step"]) for row in log] == list(range(1, len(log) + 1)), "a step is missing, or twice in the log"
    for row, wanted in zip(log, alone, strict=False):
        assert all(row[c] == wanted[c] for c in ("loss", "val_loss", "grad_norm")), f"{row} differs from {wanted}"
    print(f"    {len(log)} steps", flush=True)
    done = [int(found[1]) for _, line in job.lines if (found := re.match(r"step +(\d+) \|", line))]
    assert len(done) == len(set(done)) or name in AGAIN, f"{len(done) - len(set(done))} steps were done twice"
    for folder, then in job.seen.items():
        now = contents(folder)
        changed = [file for file in now if now[file] != then.get(file) and (file in then or not job.disk)]
        assert not changed and then.keys() <= now.keys(), f"{folder} was finished, and {changed} written"
    assert job.seen, "no checkpoint was seen"
    end = time.time() + 20
    while left := processes(job):
        assert time.time() < end, f"left running: {left}"
        time.sleep(0.1)


def processes(job):
    """Those that are neither this one nor the hosts' own."""
    own = {os.getpid(), *(host.holder.pid for host in job.hosts.values())}
    found = [process for process in psutil.process_iter(["cmdline", "status"]) if process.pid not in own]
    return [process.info for process in found if process.info["status"] != psutil.STATUS_ZOMBIE]


def play(name):
    event, options = EVENTS[name]
    print(f"{name}:", flush=True)
    job = HostsJob(name, **options)
    try:
        job.start(1, 2, 3)
        job.first(r"^step +25 \|", 0)
        event(job)
        check(job, name)
    except BaseException:
        print("".join(line for _, line in job.lines[-80:]))
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
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu"}
    if not logged("hosts_alone").exists():
        train_alone([*TRAIN, "--checkpoint_dir", "/dev/shm/alone"], "hosts_alone")
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    print(f"--timeout {TIMEOUT}; 3 hosts of 1 rank, --mirror 1, ZeRO-1")
    print(f"  {'event':<44}step  ranks  again  seconds = timeout  rendezvous  start")
    for name in args.only:
        play(name)
    print(
        f"every step once in the log, and no bit differs; load of the {os.cpu_count()} cores: {os.getloadavg()[2]:.0f}"
    )
    FOLDER.rmdir()


if __name__ == "__main__":
    main()

"""What reaches the ranks of two hosts behind `python -m universal`: the end of `make hosts`.

    python -m measure.launchers >> assets/hosts.txt

The hosts are two addresses of this machine, at which sshd listens, with a key of its own. Each
launcher starts examples/hf_trainer.py there, without what names universal in it, and with a batch
that the ranks do not divide; accelerate's with its own DeepSpeed config. A .deepspeed_env names
another batch, as accelerate leaves it behind, and another PYTHONPATH. 4 ranks save; 4 or 3 go on,
and must have the same losses. Wants pdsh and sshd (Debian: pdsh, openssh-server), and says so where
they are absent."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

from measure.logs import compare
from tests.support import ROOT

WORK = ROOT / "runs" / "launchers"
BATCH = 20
ROUNDING = 1e-6
HOSTS = ("127.0.0.2", "127.0.0.3")
PATH = f"{WORK}:{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"
ON_A_CPU = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "TORCH_EXTENSIONS_DIR": f"{ROOT}/.venv/torch_extensions",
}
TYPED = {**ON_A_CPU, "PATH": PATH, "PYTHONPATH": str(ROOT), "UNIVERSAL_BATCH": str(BATCH)}
FILE = {**ON_A_CPU, "PYTHONPATH": "/of/deepspeed_env", "UNIVERSAL_BATCH": "12"}
OPTIONS = f"-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -i {WORK}/key"
SSHD = f"""HostKey {WORK}/key
AuthorizedKeysFile {WORK}/key.pub
PidFile none
StrictModes no
"""
SCRIPT = {  # of the example: what gives way to what
    "import argparse\n": 'import argparse\nimport os\nos.environ["CUDA_VISIBLE_DEVICES"] = ""\n',
    "import universal\nfrom universal import batches\nfrom universal.trainer import AnyRanks\n": "",
    "universal.install()": "",
    "batches.config(BATCH, MICRO)": '{"gradient_accumulation_steps": 3}',
    "(AnyRanks, Trainer)": "(Trainer)",
    "deepspeed={": 'deepspeed=None if "ACCELERATE_USE_DEEPSPEED" in os.environ else {',
}
REPORT = """
import json
_, _, host, _ = os.environ.get("SSH_CONNECTION", "- - local -").split()
method = "yes" if hasattr(deepspeed.DeepSpeedEngine, "universal") else "no"
row = [host, method, trainer.get_total_train_batch_size(arguments), os.environ["PYTHONPATH"]]
Path(args.output_dir, f"{RANK}.json").write_text(json.dumps(row))
"""
SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
CONFIG = {name: "auto" for name in (*SIZES, "gradient_clipping")}
CONFIG["zero_optimization"] = {"stage": 3}
DEEPSPEED = (
    "deepspeed --hostfile hostfile --master_addr 127.0.0.2 --master_port {port} --no_local_rank"
)
ACCELERATE = (
    "accelerate launch --use_deepspeed --deepspeed_config_file config.json --mixed_precision no "
    "--dynamo_backend no --main_process_ip 127.0.0.2 --main_process_port {port} "
    "--machine_rank {host} "
)
TORCHRUN = (
    "torchrun --nnodes 2 --node_rank {host} --nproc_per_node {ranks} --master_addr 127.0.0.2 "
    "--master_port {port}"
)
PDSH = "--deepspeed_hostfile hostfile --deepspeed_inclusion_filter 127.0.0.2:0,1@127.0.0.3:0"
STANDARD = "--deepspeed_multinode_launcher standard --same_network"
# {name: (ranks of each host, what is typed, whether on each host)}
LAUNCHERS = {
    "deepspeed --hostfile": ((2, 1), DEEPSPEED, False),
    "the same, one host": ((3,), DEEPSPEED, False),
    "torchrun": ((2, 1), TORCHRUN, True),
    "accelerate": ((3,), f"{ACCELERATE} --num_machines 1 --num_processes 3", False),
    "accelerate, pdsh": ((2, 1), f"{ACCELERATE} --num_machines 2 --num_processes 3 {PDSH}", False),
    "accelerate, standard": (
        (2, 2),
        f"{ACCELERATE} --num_machines 2 --num_processes 4 {STANDARD}",
        True,
    ),
}
HEAD = f"{'':27}  rank  host       install()  batch  PYTHONPATH"


def free_port():
    with socket.create_server((HOSTS[0], 0)) as server:
        return server.getsockname()[1]


@contextlib.contextmanager
def listening():
    """Run sshd at both addresses, and in WORK an ssh that knows its port and key."""
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", WORK / "key"], check=True)
    (WORK / "sshd_config").write_text(SSHD)
    port = free_port()
    ssh = WORK / "ssh"
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -q -p {port} {OPTIONS} "$@"\n')
    ssh.chmod(0o755)
    if not os.geteuid():
        Path("/run/sshd").mkdir(exist_ok=True)  # which a service would make
    command = [shutil.which("sshd", path=PATH), "-D", "-e", "-f", WORK / "sshd_config"]
    for host in HOSTS:
        command += ["-o", f"ListenAddress={host}:{port}"]
    with open(WORK / "sshd.txt", "w") as log:
        daemon = psutil.Popen(command, stderr=log)
    try:
        time.sleep(1)
        yield
    finally:
        for process in [*daemon.children(recursive=True), daemon]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        daemon.wait()


def train(name, ranks, command, is_on_each):
    """Train with that launcher, as it is typed on one host or on each; print what ranks got."""
    hosts = dict(zip(HOSTS, ranks, strict=False))
    (WORK / "hostfile").write_text("".join(f"{host} slots={n}\n" for host, n in hosts.items()))
    (WORK / ".deepspeed_env").write_text("".join(f"{key}={FILE[key]}\n" for key in FILE))
    port = free_port()
    folder = name.replace(" ", "_").replace(",", "")
    typed = {}
    for number, host in enumerate(hosts):
        words = command.format(host=number, ranks=hosts[host], port=port)
        flags = f"--output_dir {folder} --run_name {folder}"
        typed[host] = f"{sys.executable} -m universal {words} script.py {flags}"
    if is_on_each:
        names = " ".join(f"{key}={value}" for key, value in TYPED.items())
        jobs = [["ssh", host, f"cd {WORK}; {names} {words}"] for host, words in typed.items()]
    else:
        jobs = [typed[HOSTS[0]].split()]
    (WORK / folder).mkdir(exist_ok=True)
    with open(WORK / f"{folder}.txt", "w") as log:
        options = {"cwd": WORK, "env": os.environ | TYPED, "stdout": log, "stderr": log}
        running = [subprocess.Popen(job, **options) for job in jobs]
        codes = [process.wait(timeout=900) for process in running]
    assert not any(codes), (WORK / f"{folder}.txt").read_text()[-3000:]
    for rank in range(sum(ranks)):
        host, method, batch, paths = json.loads((WORK / folder / f"{rank}.json").read_text())
        paths = paths.replace(str(WORK), ".").replace(str(ROOT), "...")
        print(f"{name:27}  {rank:4}  {host:9}  {method:9}  {batch:5}  {paths}", flush=True)
        assert method == "yes" and batch == BATCH
    return folder


def main():
    absent = [name for name in ("pdsh", "ssh", "sshd") if not shutil.which(name, path=PATH)]
    if absent:
        print(f"launchers of two hosts: skipped, there is no {' and no '.join(absent)}")
        return
    print(f"2 hosts by ssh, UNIVERSAL_BATCH={BATCH} python -m universal LAUNCHER\n{HEAD}")
    with listening():
        script = (ROOT / "examples" / "hf_trainer.py").read_text()
        for old, new in SCRIPT.items():
            assert script.count(old) == 1, old
            script = script.replace(old, new)
        (WORK / "script.py").write_text(script + REPORT)
        (WORK / "config.json").write_text(json.dumps(CONFIG))
        saved = train("deepspeed --hostfile, saves", (2, 2), DEEPSPEED, False)
        for name, job in LAUNCHERS.items():
            checkpoint = WORK / name.replace(" ", "_").replace(",", "") / "checkpoint-10"
            shutil.copytree(WORK / saved / checkpoint.name, checkpoint)
            resumed = train(name, *job)
            losses = compare(WORK, saved, resumed)
            worst = max(losses.values())
            assert min(losses) == 11 and worst <= ROUNDING, losses
            print(f"{name}, 4 to {sum(job[0])} ranks: the loss differs by at most {worst:.1e}")


if __name__ == "__main__":
    main()

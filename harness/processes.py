"""Runs a script on ranks that are processes of their own, as a launcher does: slower than harness/ranks.py, and right
where a forked process cannot be, on GPUs."""

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time


class Failed(Exception):
    """With the line that says why."""


def last_error(text):
    lines = [line for line in text.splitlines() if line.strip()] or ["not a word"]
    errors = [line for line in lines if re.match(r"(\[rank\d+\]: )?[\w.]*([Ee]rror|Exception): ", line)]
    return (errors or lines)[-1][:200]


def free_port():
    """Outside the range from which the system numbers connections: the ranks bind it only later."""
    while True:
        with contextlib.suppress(OSError), contextlib.closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", random.randrange(20000, 32000)))
            return probe.getsockname()[1]


def run(folder, ranks, environment, script, *arguments, limit=300):
    """What rank 0 prints. All ranks end when one fails, or after `limit` seconds: Failed."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= environment | {"WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks)}
    command = [sys.executable, str(script), *map(str, arguments)]
    logs = [folder / f".rank{rank}.txt" for rank in range(ranks)]
    running, deadline = [], time.time() + limit
    try:
        for rank, log in enumerate(logs):
            own = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            options = dict(cwd=folder, env=own, stderr=subprocess.STDOUT, start_new_session=True)
            with log.open("w") as out:
                running.append(subprocess.Popen(command, stdout=out, **options))
        codes = [None]
        while None in codes and not any(codes) and time.time() < deadline:
            time.sleep(0.02)
            codes = [process.poll() for process in running]
    finally:
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it has started
            process.wait()
    texts = [log.read_text(errors="replace") for log in logs]
    for log in logs:
        log.unlink()
    for code, text in zip(codes, texts, strict=True):
        if code:
            raise Failed(last_error(text))
    if None in codes:
        raise Failed(f"not done after {limit} seconds: {last_error(texts[0])}")
    return texts[0]

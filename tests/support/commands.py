"""Commands, in a process of their own, and what may befall a process. Nothing here needs
DeepSpeed."""

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.support import ROOT


def kill(number=signal.SIGKILL):
    """This process sends itself a signal."""
    os.kill(os.getpid(), number)


def no_permission():
    """From here on, in this process."""
    if not os.geteuid():  # root may read everything
        os.setgid(65534)
        os.setuid(65534)


def told_to_stop():
    kill(signal.SIGTERM)


def hang():
    kill(signal.SIGSTOP)


def is_rank(number):
    """Of a process that a launcher has started."""
    return os.environ["RANK"] == str(number)


def slow(*values, **options):
    """A case that `make test-all` tries, and `make test` does not."""
    return pytest.param(*values, marks=pytest.mark.slow, **options)


def only_if(quick, *values, **options):
    """A case that `make test` tries, too, if it is quick."""
    return pytest.param(*values, **options) if quick else slow(*values, **options)


def run_python(*words, folder=ROOT, timeout=200, **environment):
    """What `python WORDS` has done in a folder, in a process of its own."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | environment,
        cwd=folder,
    )


def forked(work, limit=120):
    """Call work() in a process forked from this one, which has imported what is needed. Returns
    end(), which waits for it: its exit code, or minus the signal that ended it, and what it
    printed, at most what a pipe holds."""
    pipes = [os.pipe(), os.pipe()]  # its standard output and standard error

    def main():
        signal.alarm(limit)
        # Replaces the pool of threads, dead after a fork; threads that do so at once find none.
        torch.set_num_threads(torch.get_num_threads())
        for fd, (_, write) in enumerate(pipes, 1):
            os.dup2(write, fd)
        sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1) for fd in (1, 2))
        work()

    child = multiprocessing.get_context("fork").Process(target=main)
    child.start()
    for _, write in pipes:
        os.close(write)

    def end():
        out, err = (os.fdopen(read).read() for read, _ in pipes)
        child.join()
        return SimpleNamespace(code=child.exitcode, out=out, err=err)

    return end


def command(main, *words, before=lambda: None, **environment):
    """What main() has done in a process of its own, which these words are given on its command
    line: the exit code, and what it printed. before() is called ahead of it."""

    def work():
        os.environ.update(environment)
        sys.argv = [f"{main.__module__}.py", *map(str, words)]
        before()
        main()

    return forked(work)()


def converter(source, output=None, *flags, **options):
    """command() with ds_to_universal.py."""
    import ds_to_universal  # not above: the core's tests run without it

    words = ["--input_folder", source, *flags]
    if output is not None:
        words += ["--output_folder", output]
    return command(ds_to_universal.main, *words, **options)


def at_event(number, which, act=kill):
    """From here on, in this process: act() ahead of the so many-th audit event of which
    which(event, arguments)."""
    count = itertools.count(1)

    def hook(*event):
        if which(*event) and next(count) == number:
            act()

    sys.addaudithook(hook)


def makes_a_file(event, arguments):
    """An audit event: a conversion begins another file."""
    return event == "open" and ".unfinished/" in str(arguments[0]) and arguments[2] & os.O_CREAT


def failed(done, code, *words):
    """The command has ended with this exit code, and one line that has these words."""
    assert done.code == code and done.err.count("\n") == 1, done.err
    assert all(word in done.err for word in words), done.err

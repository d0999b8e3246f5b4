"""The converter when things go wrong around it: kill -9, full disks, a second conversion, an older
result. The result is whole and right, or the older one is untouched; nothing else is left."""

import ctypes
import errno
import fcntl
import functools
import itertools
import os
import resource
import shutil
import signal
from types import SimpleNamespace

import pytest

from tests.support.commands import (
    at_event,
    converter,
    failed,
    makes_a_file,
    no_permission,
)
from tests.support.conversions import settled
from tests.support.files import SHAPES, content, each_state, edit, flip
from tests.support.lay_out import lay_out
from universal import CheckpointError, convert
from universal.write import publish


class Two:
    """Two checkpoints of the same parameters, early and late, and the files they convert into, old
    and new; and the first with a flipped bit in a weight."""

    def __init__(self, folder):
        self.early = folder / "early"
        self.late = folder / "late"
        self.damaged = folder / "damaged"
        for source in (self.early, self.late, self.damaged):
            lay_out(source, SHAPES, 2, 1)
        edit(self.late, "*_optim_*", each_state(lambda state: state["exp_avg"].neg_()))
        flip(min(self.damaged.glob("*_optim_*")))
        convert(self.early, folder / "old")
        convert(self.late, folder / "new")
        self.old = content(folder / "old")
        self.new = content(folder / "new")
        assert self.old.keys() == self.new.keys() and self.old != self.new


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return Two(tmp_path_factory.mktemp("two"))


def test_a_forked_process_keeps_no_lock(tmp_path):
    """A DataLoader's worker may live for longer than the save in which it was started."""
    descriptor = publish.lock(tmp_path)
    ends, begins = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.write(begins[1], b".")
        os.close(ends[1])
        os.read(ends[0], 1)
        os._exit(0)
    os.read(begins[0], 1)
    assert publish.is_locked(tmp_path) and publish.lock(tmp_path, alone=True) is None
    publish.unlock(descriptor)
    assert not publish.is_locked(tmp_path)
    os.close(ends[1])
    os.waitpid(child, 0)


CHANGES = {"os.link", "os.mkdir", "os.rename", "os.rmdir", "ctypes.dlsym", "shutil.rmtree"}


def changes_a_folder(event, arguments):
    return event in CHANGES or event == "open" and arguments[1] == "w"


def test_killed_at_every_step(tmp_path, two):
    """Killed right before every rename, link and removal. The old result may for a moment only
    stand beside its place, whole; the next conversion brings it back, also one that fails."""
    output = tmp_path / "o" / "u"
    beside = 0
    convert(two.early, output)
    for moment in itertools.count(1):
        done = converter(two.late, output, before=lambda at=moment: at_event(at, changes_a_folder))
        if done.code == 0:
            break
        assert done.code == -signal.SIGKILL, done.err
        if output.exists():
            files = content(output)
            files.pop(".latest", None)  # it has its name, and `latest_universal` is next
            assert files in (two.old, two.new)
        else:
            beside += 1
            (old,) = output.parent.glob(".u.*.replaced")
            assert content(old) == two.old
            with pytest.raises(CheckpointError, match="is damaged"):
                convert(two.damaged, output)
            settled(output, two.old)
        assert (output.parent / "latest_universal").read_text() == "u"
        convert(two.early, output)
        settled(output, two.old)
    settled(output, two.new)
    assert moment > 15 and beside == 1


def test_interrupted(tmp_path, two):
    """Ctrl-C while it writes: exit code 130, nothing left, no word."""

    def before():
        # A shell's background jobs ignore it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        at_event(1, makes_a_file, lambda: os.kill(os.getpid(), signal.SIGINT))

    done = converter(two.early, tmp_path / "u", before=before)
    assert done.code == 130 and "Traceback" not in done.err and done.err.count("\n") <= 1
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("locks", [True, False], ids=["", "without flock, as Lustre may be"])
def test_left_over_of_a_killed_run(tmp_path, monkeypatch, two, locks):
    """Files of an unfinished conversion, right or wrong, have no part in the next; what they link
    to stays."""

    def fails(*arguments):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    if not locks:
        monkeypatch.setattr(fcntl, "flock", fails)
    output = tmp_path / "out" / "u"
    precious = tmp_path / "precious" / "folder"
    stale = output.with_name(".u.1764000000000000000.unfinished")
    precious.mkdir(parents=True)
    (stale / "zero" / "no.such.parameter").mkdir(parents=True)
    (stale / "zero" / "no.such.parameter" / "fp32.pt").write_bytes(b"wrong")
    (stale / "link").symlink_to(precious.parent)
    convert(two.early, output)
    settled(output, two.old)
    assert precious.is_dir()


def test_disk_fails_late(tmp_path, monkeypatch, two):
    """What the disk says only when everything has to be on it: the older result stays."""

    def syncfs(folder):
        ctypes.set_errno(errno.EIO)
        return -1

    convert(two.early, tmp_path / "u")
    before = content(tmp_path)
    libc = SimpleNamespace(syncfs=syncfs)
    monkeypatch.setattr(ctypes, "CDLL", lambda *arguments, **options: libc)
    with pytest.raises(OSError, match=r"Input/output error: .*unfinished"):
        convert(two.late, tmp_path / "u")
    assert content(tmp_path) == before


def test_limited_file_size(tmp_path, two):
    """No file may grow beyond a limit, at whichever byte of the largest one it is met, as on a disk
    that is full."""
    output = tmp_path / "u"
    largest = max(map(len, two.new.values()))
    convert(two.early, output)
    for limit in (0, largest // 2, *range(largest - 700, largest, 233), largest - 1):
        limits = (limit, limit)
        before = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, limits)
        done = converter(two.late, output, before=before)
        failed(done, 2, "ds_to_universal: error: ", "File too large")
        settled(output, two.old)


@pytest.mark.parametrize("older", [False, True], ids=["first result", "replaces a result"])
def test_two_at_once(tmp_path, two, older):
    """A second conversion to the same folder, which begins and ends at any step of the first one:
    the result is one of the two, whole, and nothing is left."""
    output = tmp_path / "o" / "u"
    begun = tmp_path / "begun"

    def second():
        begun.touch()
        convert(two.late, output)

    def step(event, arguments):
        return event in ("os.mkdir", "os.rename", "shutil.rmtree")

    for moment in itertools.count(1):
        shutil.rmtree(output, ignore_errors=True)
        begun.unlink(missing_ok=True)
        if older:
            convert(two.late, output)
        done = converter(two.early, output, before=lambda at=moment: at_event(at, step, second))
        assert done.code == 0, done.err
        settled(output, two.old if content(output) == two.old else two.new)
        if not begun.exists():
            break
    assert moment > 7 + older


def test_old_result_that_cannot_be_removed(tmp_path, two):
    """Someone else's old result is replaced where the folder permits it, again and again."""
    source = tmp_path / "s"
    output = tmp_path / "o" / "u"
    shutil.copytree(two.late, source)
    convert(two.early, output)
    for path in (output, *output.rglob("*")):
        path.chmod(0o555)
    for path in (tmp_path, output.parent, output.with_name("latest_universal")):
        path.chmod(0o777)

    for _ in range(2):
        done = converter(source, output, before=no_permission)
        assert (done.code, done.err) == (0, "")
        assert content(output) == two.new

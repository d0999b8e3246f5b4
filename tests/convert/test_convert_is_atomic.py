"""The converter when things go wrong around it: kill -9, full disks, a second conversion, an older result. The result
is whole and right, or the older one is untouched; nothing else is left."""

import errno
import fcntl
import gc
import itertools
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading

import pytest
from helpers import SHAPES, archived, content, converter, edit, forked, source_like, states, with_bit_flipped

from harness.lay_out import gpt_groups, lay_out
from universal import CheckpointError, convert


class Two:
    """Two checkpoints of the same parameters, early and late, and the files they convert into, old and new."""

    def __init__(self, folder, groups, ranks):
        self.early, self.late = folder / "early", folder / "late"
        for source in (self.early, self.late):
            lay_out(source, groups, ranks, 1)
        edit(self.late, "*_optim_*", lambda shard: [state["exp_avg"].neg_() for state in states(shard)])
        convert(self.early, folder / "old")
        convert(self.late, folder / "new")
        self.old, self.new = content(folder / "old"), content(folder / "new")
        assert self.old.keys() == self.new.keys() and self.old != self.new


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return Two(tmp_path_factory.mktemp("two"), SHAPES, 2)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Files of many pages."""
    return Two(tmp_path_factory.mktemp("large"), gpt_groups(50, 32, 2), 4)


def settled(output, wanted):
    """The output is this, it is what latest_universal names, and nothing else lies beside it."""
    assert content(output) == wanted
    assert (output.parent / "latest_universal").read_text() == output.name
    assert sorted(path.name for path in output.parent.iterdir()) == sorted(["latest_universal", output.name])


# -----------------------------------------------------------------------------
# kill -9


@pytest.mark.parametrize("kills", [12, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_at_any_moment(tmp_path, large, kills):
    """So many times kill -9, spread over the calls that a conversion makes, not over its time: an older result is
    untouched or replaced whole, and the next conversion is right and sweeps up."""
    output, told, wanted = tmp_path / "o" / "u", tmp_path / "calls", [large.old, large.new]
    rng, seen, untouched = random.Random(2), [], content(large.late)

    def killed_after(calls):
        left = itertools.count(1)

        def count(frame, event, argument):
            if event in ("call", "c_call") and next(left) == calls:
                os.kill(os.getpid(), signal.SIGKILL)

        threading.setprofile(count)
        sys.setprofile(count)
        convert(large.late, output)
        sys.setprofile(None)
        told.write_text(str(next(left)))

    assert forked(lambda: killed_after(0))().code == 0
    total = int(told.read_text())
    settled(output, large.new)
    for moment in range(kills):
        convert(large.early, output)
        settled(output, large.old)
        at = int(total * (moment + rng.random()) / (kills - 1))
        code = forked(lambda at=at: killed_after(at))().code
        assert code == -signal.SIGKILL or moment >= kills - 2
        seen.append((any(output.parent.glob(".u.unfinished*")), wanted.index(content(output))))
        assert output.with_name("latest_universal").read_text() == "u"
        assert content(large.late) == untouched
    convert(large.late, output)
    settled(output, large.new)
    assert sum(unfinished for unfinished, _ in seen) > kills // 10 and {new for _, new in seen} == {0, 1}


CHANGES = {"os.link", "os.mkdir", "os.rename", "os.rmdir", "ctypes.dlsym", "shutil.rmtree"}


def killed_before(change, source, output):
    """Convert in a process that is killed before its so many-th change of a folder. Whether it came so far."""
    left = itertools.count(1)

    def hook(event, arguments):
        if (event in CHANGES or event == "open" and arguments[1] == "w") and next(left) == change:
            os.kill(os.getpid(), signal.SIGKILL)

    def work():
        sys.addaudithook(hook)
        convert(source, output)

    code = forked(work)().code
    assert code in (0, -signal.SIGKILL)
    return code != 0


def damaged(folder, checkpoint):
    """A copy of which one shard has a flipped bit in a weight."""
    shard = min(checkpoint.glob("*_optim_*"))
    begin = max((size, begin) for name, _, begin, size in archived(shard)[0] if name.startswith("data/"))[1]
    return source_like(folder, checkpoint, {shard.name: with_bit_flipped(shard.read_bytes(), begin)})


def test_killed_at_every_step(tmp_path, two):
    """Killed right before every rename, link and removal. The old result may for a moment only stand beside its place,
    whole; the next conversion brings it back, also one that fails."""
    output, moments, beside = tmp_path / "o" / "u", 0, 0
    source = damaged(tmp_path / "s", two.early)
    convert(two.early, output)
    while killed_before(moments + 1, two.late, output):
        moments += 1
        if output.exists():
            assert content(output) in (two.old, two.new)
        else:
            beside += 1
            (old,) = output.parent.glob(".u.replaced*")
            assert content(old) == two.old
            with pytest.raises(CheckpointError, match="is damaged"):
                convert(source, output)
            settled(output, two.old)
        assert (output.parent / "latest_universal").read_text() == "u"
        convert(two.early, output)
        settled(output, two.old)
    settled(output, two.new)
    assert moments >= 15 and beside == 1


def test_interrupted(tmp_path, two):
    """Ctrl-C while it writes: exit code 130, nothing left, no word."""
    told = []

    def hook(event, arguments):
        if event == "open" and ".u.unfinished/zero" in str(arguments[0]) and not told:
            told.append(os.kill(os.getpid(), signal.SIGINT))

    def before():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        sys.addaudithook(hook)

    done = converter(two.early, tmp_path / "u", before=before)
    assert done.code == 130 and "Traceback" not in done.err and done.err.count("\n") <= 1
    assert not os.listdir(tmp_path)


def test_left_over_of_a_killed_run(tmp_path, two):
    """Files of an unfinished conversion, right or wrong, have no part in the next; what they link to stays."""
    output, precious = tmp_path / "out" / "u", tmp_path / "precious" / "folder"
    stale = output.with_name(".u.unfinished")
    convert(two.late, output)
    output.rename(stale)
    (stale / "zero" / "no.such.parameter").mkdir()
    (stale / "zero" / "no.such.parameter" / "fp32.pt").write_bytes(b"wrong")
    output.with_name("latest_universal").unlink()
    convert(two.early, output)
    settled(output, two.old)
    precious.mkdir(parents=True)
    stale.mkdir()
    (stale / "link").symlink_to(precious.parent)
    convert(two.late, output)
    settled(output, two.new)
    assert precious.is_dir()


# -----------------------------------------------------------------------------
# disks


def fails(source, output, code, text, **options):
    """The command ends with this exit code and this error, in one line."""
    done = converter(source, output, **options)
    assert done.code == code and done.err.count("\n") == 1, done.err
    assert done.err.startswith("ds_to_universal: error: ") and text in done.err, done.err


def test_full_disk(tmp_path, large):
    """A file system that fills up at any file, also the last: one line, exit code 1, and the older result stays."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=9m", "tmpfs", disk]
    if os.geteuid() or subprocess.run(mount, timeout=9, capture_output=True).returncode:
        pytest.skip("file systems are root's to mount")
    try:
        convert(large.early, disk / "u")
        used = shutil.disk_usage(disk).used
        for size in [*range(used, 2 * used - 8192, used // 9 // 4096 * 4096), 2 * used - 8192, used - 4096]:
            if size < used:
                shutil.rmtree(disk / "u")
                (disk / "latest_universal").unlink()
            subprocess.run(["mount", "-o", f"remount,size={size}", disk], timeout=9, check=True)
            fails(large.late, disk / "u", 1, "No space left on device")
            settled(disk / "u", large.old) if size >= used else None
        assert not any(disk.iterdir())
    finally:
        subprocess.run(["umount", disk], timeout=9, check=True)


def test_disk_fails_late(tmp_path, two, disk_fails):
    """What the disk says only when everything has to be on it: the older result stays."""
    convert(two.early, tmp_path / "u")
    disk_fails()
    with pytest.raises(OSError, match=r"Input/output error: .*unfinished"):
        convert(two.late, tmp_path / "u")
    settled(tmp_path / "u", two.old)


def test_limited_file_size(tmp_path, large):
    """No file may grow beyond a limit, at whichever byte of the largest one it is met."""
    output, largest = tmp_path / "u", max(map(len, large.new.values()))
    convert(large.early, output)
    for limit in (0, 1, 5000, largest // 2, *range(largest - 700, largest, 99), largest - 1):
        limited = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))  # noqa: B023, E731
        fails(large.late, output, 1, "File too large", before=limited)
        settled(output, large.old)


def test_nothing_but_the_error(tmp_path, two):
    """A file in the place of a folder, a file system without new folders, damage in mid-course: one line."""
    source = damaged(tmp_path / "s", two.early)
    (tmp_path / "file").touch()
    fails(two.early, tmp_path / "file" / "u", 1, "Not a directory")
    fails(two.early, "/proc/safety/u", 1, "No such file")
    fails(source, tmp_path / "u", 2, "_optim_states.pt is damaged")
    assert sorted(os.listdir(tmp_path)) == ["file", "s"]


# -----------------------------------------------------------------------------
# another conversion


def test_two_at_once(tmp_path, two):
    """The second conversion to one folder is refused while the first one runs, and leaves its files alone."""
    output, folder = tmp_path / "u", tmp_path / ".u.unfinished"
    folder.mkdir()
    (folder / "of the first").touch()
    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(CheckpointError, match=f"another conversion to the same folder is running: .*{folder}"):
        convert(two.early, output)
    assert (folder / "of the first").exists() and not output.exists()
    os.close(lock)
    convert(two.early, output)
    settled(output, two.old)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP])
def test_no_locks(tmp_path, monkeypatch, two, number):
    """A file system without flock, as Lustre is by default: the folder itself keeps others out, and what a killed
    conversion has left is named with the command that removes it."""

    def fails(*arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fails)
    convert(two.late, tmp_path / "u")
    convert(two.early, tmp_path / "u")
    settled(tmp_path / "u", two.old)
    left = tmp_path / ".u.unfinished"
    left.mkdir()
    (left / "of the first").touch()
    with pytest.raises(CheckpointError, match=f"runs, or was killed; if so: rm -r '{left}'"):
        convert(two.late, tmp_path / "u")
    assert (left / "of the first").exists() and content(tmp_path / "u") == two.old
    shutil.rmtree(left)
    convert(two.late, tmp_path / "u")
    settled(tmp_path / "u", two.new)


@pytest.mark.parametrize("older", [False, True], ids=["first result", "replaces a result"])
def test_second_starts_while_first_ends(tmp_path, two, older):
    """Before each step that publishes, a second conversion to the same folder: it is kept out, or the result is one of
    the two, whole, and nothing is left."""
    output, ended = tmp_path / "o" / "u", tmp_path / "ended"
    for count in itertools.count(1):
        left = itertools.count(1)
        shutil.rmtree(output, ignore_errors=True)
        if older:
            convert(two.late, output)

        def second_starts(event, arguments, left=left, count=count):
            if event in ("os.rename", "shutil.rmtree") and next(left) == count:
                try:
                    convert(two.late, output)
                except CheckpointError as error:
                    assert "another conversion" in str(error)
                ended.touch()

        def work(hook=second_starts):
            sys.addaudithook(hook)
            convert(two.early, output)

        done = forked(work)()
        assert done.code == 0, done.err
        if not ended.exists():
            break
        ended.unlink()
        settled(output, two.old if content(output) == two.old else two.new)
    assert count > 2 + older


# -----------------------------------------------------------------------------
# users, processes


def test_a_library_leaves_the_process_alone(tmp_path, monkeypatch, two):
    """Called inside a training, convert() changes nothing that belongs to the whole process."""
    seen, original = set(), open

    def state():
        return resource.getrlimit(resource.RLIMIT_NOFILE), gc.isenabled(), sys.getrecursionlimit()

    def spied(*arguments, **options):
        seen.add(state())
        return original(*arguments, **options)

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, limits[0]), limits[1]))
    try:
        before = state()
        monkeypatch.setattr("builtins.open", spied)
        convert(two.early, tmp_path / "u")
        assert seen == {before} == {state()}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_old_result_that_cannot_be_removed(tmp_path, two):
    """Someone else's old result is replaced where the folder permits it, again and again."""
    tmp_path.chmod(0o777)
    source, output = tmp_path / "s", tmp_path / "o" / "u"
    shutil.copytree(two.late, source)
    convert(two.early, output)
    output.parent.chmod(0o777)
    (output.parent / "latest_universal").chmod(0o666)
    for path in (output, *output.rglob("*")):
        path.chmod(0o555)

    def work():
        if not os.geteuid():
            os.setgid(65534)
            os.setuid(65534)
        for _ in range(2):
            convert(source, output)

    try:
        done = forked(work)()
        assert done.code == 0, done.err
        assert content(output) == two.new
    finally:
        for path in tmp_path.rglob("*"):
            path.chmod(0o755)

"""What test modules share: patches, small checkpoints laid out by hand, comparisons."""

import contextlib
import io
import itertools
import multiprocessing
import os
import pkgutil
import signal
import struct
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("DS_ACCELERATOR", "cpu")
ROOT = Path(__file__).resolve().parent.parent

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint import ds_to_universal as deepspeed_converter
from toy import same

import ds_to_universal
import train
import universal
from measure.ranks import launch, run_script

# --------------------------------------------------------------------------------------------------
# 1. ranks: patches for them, what they have logged and seen, and several tasks of one launch


def kill(number=signal.SIGKILL):
    """This process sends itself a signal."""
    os.kill(os.getpid(), number)


def told_to_stop():
    kill(signal.SIGTERM)


def hang():
    kill(signal.SIGSTOP)


def fp16_is(supported):
    """A patch: the device has fp16, or has it not, whatever this CPU is."""
    return lambda: setattr(get_accelerator(), "is_fp16_supported", lambda: supported)


def frozen_and_buffer():
    """A patch: a GPT with a frozen layer that comes from elsewhere and a buffer that training
    moves."""
    import train  # each rank's own

    class Variant(train.GPT):
        def __init__(self, *shape):
            super().__init__(*shape)
            torch.nn.init.normal_(self.wpe.weight, generator=torch.Generator().manual_seed(1))
            self.wpe.weight.requires_grad_(False)
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, *args, **options):
            self.calls += self.training
            return super().forward(*args, **options) * (1 + 0.01 * self.calls)

    train.GPT = Variant


def at_step(step, rank, act=kill, call="train.micro_batch"):
    """A patch: in that step this rank calls act() before the call of a function; by default when it
    draws the data."""

    def patch():
        import train

        function = pkgutil.resolve_name(call)
        micro_batch = train.micro_batch
        current = 0

        def wrapped(*arguments, **options):
            # A thread may be at it, and a step behind.
            at_it = current == step if function is micro_batch else current >= step > 0
            if at_it and os.environ["RANK"] == str(rank):
                act()
            return function(*arguments, **options)

        def draw(args, text, number, m):
            nonlocal current
            current = number or current  # 0: validation
            return (wrapped if function is micro_batch else micro_batch)(args, text, number, m)

        pytest.MonkeyPatch().setattr(call, wrapped)
        train.micro_batch = draw

    return patch


def record_rows(name):
    """A patch: every sequence that passes through the model in training is written down, by
    rank."""

    def record(module, arguments):
        if type(module).__name__ == "GPT" and module.training:
            inputs, targets = arguments
            rows = torch.cat([inputs, targets[:, -1:]], dim=1).tolist()
            with open(f"{name}.rows.{os.environ['RANK']}", "a") as file:
                file.writelines(f"{row}\n" for row in rows)

    def patch():
        torch.nn.modules.module.register_module_forward_pre_hook(record)

    return patch


def each_row_once(folder, name, ranks, numbers, batch, seq_len):
    """Whether over ranks and micro-batches the model has seen the global batch of each step: each
    row once."""
    seen = [Path(folder, f"{name}.rows.{rank}").read_text().splitlines() for rank in range(ranks)]
    text, _, _ = train.load_text(None, seq_len)
    args = SimpleNamespace(
        seed=1337,
        seq_len=seq_len,
        train_batch_size=batch,
        train_micro_batch_size_per_gpu=batch,
    )
    share = batch // ranks
    for i, step in enumerate(numbers):
        inputs, targets = train.micro_batch(args, text, step, 0)
        drawn = [str(row) for row in torch.cat([inputs, targets[:, -1:]], dim=1).tolist()]
        # Hardly any two are the same, so counting them means something.
        assert len(set(drawn)) > 0.8 * batch
        trained = [row for rows in seen for row in rows[i * share : (i + 1) * share]]
        if sorted(trained) != sorted(drawn):
            return False
    return sum(map(len, seen)) == len(numbers) * batch


def refused(patched, script, ranks, arguments):
    """The line with which rank 0 of so many refuses the arguments before it meets the others; in
    this process. 0 ranks: no launcher has started it."""
    launched = {"RANK": "0", "WORLD_SIZE": str(ranks)} if ranks else {}
    patched.setattr(sys, "argv", [script, *map(str, arguments)])
    patched.setattr(os, "environ", os.environ | launched)
    printed = io.StringIO()
    with pytest.raises(SystemExit) as stop, contextlib.redirect_stderr(printed):
        run_script(script)
    line = printed.getvalue()
    assert stop.value.code == 2 and line.count("\n") == 1, line
    assert line.startswith(f"{script.removeprefix('examples.').removesuffix('.py')}.py: error: ")
    return line


def run_all(folder, ranks, script, *arguments, names):
    """{name: error} of what has failed. The script does what is named, one after the other, and
    adds each name to the file `ended`. What fails ends the launch: what comes after it gets another
    one."""
    failures = {}
    left = list(names)
    ended = Path(folder, "ended")
    while left:
        ended.write_text("")
        result = launch(folder, ranks, script, *arguments, *left, limit=600)
        left = left[len(ended.read_text().splitlines()) :]
        assert left or result.code == 0, f"{script} {result.codes}\n{result.errors}"
        if left:
            printed = f"{result.out}\n{result.errors}"
            failures[left.pop(0)] = f"{result.codes} on {ranks} ranks\n{printed}"
    return failures


def slow(*values, **options):
    """A case that `make test-all` tries, and `make test` does not."""
    return pytest.param(*values, marks=pytest.mark.slow, **options)


# --------------------------------------------------------------------------------------------------
# 2. commands, in a process of their own


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


def start_converter(source, output=None, *flags, before=lambda: None, **environment):
    """forked() with ds_to_universal.py's main(); before() is called ahead of it."""
    words = ["ds_to_universal.py", "--input_folder", source, *flags]
    if output is not None:
        words += ["--output_folder", output]

    def work():
        os.environ.update(environment)
        sys.argv = list(map(str, words))
        before()
        ds_to_universal.main()

    return forked(work)


def converter(*arguments, **options):
    return start_converter(*arguments, **options)()


def at_event(number, which, act=kill):
    """From here on, in this process: act() ahead of the so many-th audit event of which
    which(event, arguments)."""
    count = itertools.count(1)

    def hook(*event):
        if which(*event) and next(count) == number:
            act()

    sys.addaudithook(hook)


def makes_a_file(event, arguments):
    """An audit event: a conversion, or an export, begins another file."""
    return event == "open" and ".unfinished/" in str(arguments[0]) and arguments[2] & os.O_CREAT


def failed(done, code, *words):
    """The command has ended with this exit code, and one line that has these words."""
    assert done.code == code and done.err.count("\n") == 1, done.err
    assert all(word in done.err for word in words), done.err


# --------------------------------------------------------------------------------------------------
# 3. the files of a checkpoint

MODEL = "mp_rank_00_model_states.pt"
SHAPES = [OrderedDict(a=torch.Size((5, 3)), b=torch.Size((7,))), OrderedDict(c=torch.Size((4,)))]


def load(path):
    return torch.load(path, weights_only=False)


def edit(folder, pattern, change):
    """Load each file of a pattern, change(its content), and save it again."""
    for path in sorted(folder.glob(pattern)):
        saved = load(path)
        change(saved)
        torch.save(saved, path)


def states(shard):
    """The optimizer's states by parameter group, of a shard of any stage."""
    optimizer = shard["optimizer_state_dict"]
    inner = optimizer.get("base_optimizer_state") or optimizer["optimizer_state_dict"]
    return inner["state"].values()


def each_state(change):
    """A change of a shard: change(the optimizer's states) of each parameter group."""

    def change_all(shard):
        for state in states(shard):
            change(state)

    return change_all


def content(folder):
    """Every byte below a folder, by file."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in Path(folder).rglob("*")
        if path.is_file()
    }


def records(path, part="/data/"):
    """The records of a .pt file, the largest last."""
    with zipfile.ZipFile(path) as archive:
        chosen = [info for info in archive.infolist() if part in info.filename and info.file_size]
    return sorted(chosen, key=lambda info: info.file_size)


def data_of(data, record):
    """Where the bytes of a record begin in those of its file."""
    lengths = struct.unpack_from("<HH", data, record.header_offset + 26)
    return record.header_offset + 30 + sum(lengths)


def with_bit_flipped(data, position, bit=0):
    """The bytes with one bit the other way."""
    return data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :]


def flip(path, record=None, at=0.5):
    """Change one bit of a record of a .pt file; without one, in the middle of the largest
    tensor."""
    record = record or records(path)[-1]
    data = path.read_bytes()
    position = data_of(data, record) + int(record.file_size * at)
    path.write_bytes(with_bit_flipped(data, position, bit=4))


# --------------------------------------------------------------------------------------------------
# 4. conversions


def convert_with_deepspeed(folder, output):
    """DeepSpeed's own converter, in this process."""
    options = SimpleNamespace(
        input_folder=str(folder),
        output_folder=str(output),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    deepspeed_converter.main(options)


def not_converted(source, *words, **options):
    """The conversion ends in one line with these words, and nothing appears."""
    before = sorted(os.listdir(source.parent))
    with pytest.raises(universal.CheckpointError) as error:
        universal.convert(source, source.parent / "u", **options)
    line = str(error.value)
    assert "\n" not in line and all(word in line for word in words), line
    assert sorted(os.listdir(source.parent)) == before


def settled(output, wanted):
    """The output is this, it is what latest_universal names, and nothing else lies beside it."""
    assert content(output) == wanted
    assert (output.parent / "latest_universal").read_text() == output.name
    assert set(os.listdir(output.parent)) == {"latest_universal", output.name}


def parameters_in(zero):
    """The names of those that have a folder in the zero/ of a universal checkpoint."""
    return {str(path.parent.relative_to(zero)) for path in zero.rglob("fp32.pt")}


def assert_equal_to_deepspeed(source, folder):
    """Convert source into folder/ours, and with DeepSpeed's converter into folder/theirs. Every
    file of DeepSpeed's zero/ but the second copy of tied weights is the same: tensors, shapes, how
    to cut them, step counts. Ours has the files of every parameter, and no others."""
    ours = folder / "ours" / "zero"
    theirs = folder / "theirs" / "zero"
    convert_with_deepspeed(source, theirs.parent)
    universal.convert(source, ours.parent, check=True)
    models = [load(path) for path in ours.parent.glob("mp_rank_*_model_states.pt")]
    tied = {name for model in models for name in model["shared_params"]}
    module = {name: tensor for model in models for name, tensor in (model["module"] or {}).items()}
    names = {name for model in models for group in model["param_shapes"] for name in group}
    their_names = parameters_in(theirs)
    assert parameters_in(ours) == names == their_names - {*tied, *module}
    # The loader of zero/ never reads what DeepSpeed writes there.
    for name in their_names & module.keys() - tied:
        assert torch.equal(load(theirs / name / "fp32.pt")["param"], module[name].float()), name
    for name in names:
        for state in ("exp_avg", "exp_avg_sq"):
            assert (theirs / name / f"{state}.pt").exists()
        for path in (theirs / name).glob("*.pt"):
            assert_equal_file(load(ours / path.relative_to(theirs)), load(path), path)


def assert_equal_file(got, expected, path):
    if path.stem == "step":
        assert torch.equal(got, expected)
        return
    if torch.is_tensor(expected):  # of ZeRO-3, without a shape
        expected = {"param": expected.view(got["param"].shape), "cat_dim": 0}
    assert same(got.pop("param"), expected.pop("param")) and got == expected, path

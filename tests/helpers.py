"""What test modules share: patches, small checkpoints laid out by hand, comparisons."""

import contextlib
import csv
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

import ds_to_universal
import train
import universal
from measure.ranks import launch, run_script


def fp16_is(supported):
    """A patch: the device has fp16, or has it not, whatever this CPU is."""
    return lambda: setattr(get_accelerator(), "is_fp16_supported", lambda: supported)


def convert_with_deepspeed(folder, output):
    """DeepSpeed's own converter, in this process."""
    options = dict(num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True)
    options |= dict(inject_missing_state=True, input_folder=str(folder), output_folder=str(output))
    deepspeed_converter.main(SimpleNamespace(**options))


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


def kill(number=signal.SIGKILL):
    """This process sends itself a signal."""
    os.kill(os.getpid(), number)


def told_to_stop():
    kill(signal.SIGTERM)


def hang():
    kill(signal.SIGSTOP)


def at_step(step, rank, act=kill, call="train.micro_batch"):
    """A patch: in that step this rank calls act() before the call of a function; by default when it
    draws the data."""

    def patch():
        import train

        function, draw, now = pkgutil.resolve_name(call), train.micro_batch, [0]

        def wrapped(*arguments, **options):
            if now[0] == step and os.environ["RANK"] == str(rank):
                act()
            return function(*arguments, **options)

        def drawing(args, text, number, m):
            now[0] = number or now[0]  # 0: validation
            return (wrapped if function is draw else draw)(args, text, number, m)

        pytest.MonkeyPatch().setattr(call, wrapped)
        train.micro_batch = drawing

    return patch


def steps(folder, run_name):
    """Those in a log."""
    with open(folder / "logs" / f"{run_name}.csv", newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file)]


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
    sizes = {"train_batch_size": batch, "train_micro_batch_size_per_gpu": batch}
    args = SimpleNamespace(seed=1337, seq_len=seq_len, **sizes)
    share, alike = batch // ranks, True
    for i, step in enumerate(numbers):
        inputs, targets = train.micro_batch(args, text, step, 0)
        wanted = [str(row) for row in torch.cat([inputs, targets[:, -1:]], dim=1).tolist()]
        assert (
            len(set(wanted)) > 0.8 * batch
        )  # hardly any two are the same, so counting them means something
        got = [row for rows in seen for row in rows[i * share : (i + 1) * share]]
        alike = alike and sorted(got) == sorted(wanted)
    return alike and sum(map(len, seen)) == len(numbers) * batch


def refused(patched, script, ranks, arguments):
    """The line with which rank 0 of so many refuses the arguments before it meets the others; in
    this process. 0 ranks: no launcher has started it."""
    said = io.StringIO()
    patched.setattr(sys, "argv", [script, *map(str, arguments)])
    patched.setattr(
        os, "environ", os.environ | ({"RANK": "0", "WORLD_SIZE": str(ranks)} if ranks else {})
    )
    with pytest.raises(SystemExit) as stop, contextlib.redirect_stderr(said):
        run_script(script)
    line = said.getvalue()
    assert stop.value.code == 2 and line.count("\n") == 1, line
    assert line.startswith(f"{script.removeprefix('examples.').removesuffix('.py')}.py: error: ")
    return line


def load(path):
    return torch.load(path, weights_only=False)


def same_bits(a, b):
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    return torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    )


def content(folder):
    """Every byte below a folder, by file."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in Path(folder).rglob("*")
        if path.is_file()
    }


def with_bit_flipped(data, position, bit=0):
    """The bytes with one bit the other way."""
    return data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :]


def forked(work, limit=120):
    """Call work() in a process forked from this one, which has imported what is needed. Returns
    end(), which waits for it: its exit code, or minus the signal that ended it, and what it
    printed, at most what a pipe holds."""
    pipes = [os.pipe() for _ in range(2)]

    def main():
        signal.alarm(limit)
        for fd, (_, end) in enumerate(pipes, 1):
            os.dup2(end, fd)
        sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1) for fd in (1, 2))
        work()

    child = multiprocessing.get_context("fork").Process(target=main)
    child.start()
    for _, end in pipes:
        os.close(end)

    def end():
        out, err = (os.fdopen(read).read() for read, _ in pipes)
        child.join()
        return SimpleNamespace(code=child.exitcode, out=out, err=err)

    return end


def start_converter(source, output=None, *flags, before=lambda: None, **environment):
    """forked() with ds_to_universal.py's main(); before() is called ahead of it."""
    words = ["ds_to_universal.py", "--input_folder", source, *flags]
    words += [] if output is None else ["--output_folder", output]

    def work():
        os.environ.update(environment)
        sys.argv = list(map(str, words))
        before()
        ds_to_universal.main()

    return forked(work)


def converter(*arguments, **options):
    return start_converter(*arguments, **options)()


def at_event(number, which, act=lambda: os.kill(os.getpid(), signal.SIGKILL)):
    """From here on, in this process: act() ahead of the so many-th audit event of which
    which(event, arguments)."""
    left = itertools.count(1)
    sys.addaudithook(lambda *told: act() if which(*told) and next(left) == number else None)


def not_converted(source, *words, **options):
    """The conversion ends in one line with these words, and nothing appears."""
    before = sorted(os.listdir(source.parent))
    with pytest.raises(universal.CheckpointError) as error:
        universal.convert(source, source.parent / "u", **options)
    assert "\n" not in str(error.value) and all(word in str(error.value) for word in words), (
        error.value
    )
    assert sorted(os.listdir(source.parent)) == before


def makes_a_file(event, arguments):
    """An audit event: a conversion, or an export, begins another file."""
    return event == "open" and ".unfinished/" in str(arguments[0]) and arguments[2] & os.O_CREAT


def failed(done, code, *words):
    """The command has ended with this exit code, and one line that has these words."""
    assert (
        done.code == code and done.err.count("\n") == 1 and all(word in done.err for word in words)
    ), done.err


def assert_equal_to_deepspeed(source, folder):
    """Convert source into folder/ours, and with DeepSpeed's converter into folder/theirs. Every
    file of DeepSpeed's zero/ but the second copy of tied weights is the same: tensors, shapes, how
    to cut them, step counts. Ours has the files of every parameter, and no others."""
    ours, theirs = folder / "ours" / "zero", folder / "theirs" / "zero"
    convert_with_deepspeed(source, theirs.parent)
    universal.convert(source, ours.parent, check=True)
    models = [load(path) for path in ours.parent.glob("mp_rank_*_model_states.pt")]
    tied = {name for model in models for name in model["shared_params"]}
    kept = {name: tensor for model in models for name, tensor in (model["module"] or {}).items()}
    names = {name for model in models for group in model["param_shapes"] for name in group}
    found, others = (
        {str(path.parent.relative_to(zero)) for path in zero.rglob("fp32.pt")}
        for zero in (ours, theirs)
    )
    assert found == names == others - {*tied, *kept}
    for name in (
        others & kept.keys() - tied
    ):  # the loader of zero/ never reads what DeepSpeed writes there
        assert torch.equal(load(theirs / name / "fp32.pt")["param"], kept[name].float()), name
    for path in (path for name in names for path in (theirs / name).glob("*.pt")):
        wanted, got = load(path), load(ours / path.relative_to(theirs))
        if path.stem == "step":
            assert torch.equal(wanted, got)
            continue
        if torch.is_tensor(wanted):  # ZeRO-3, without a shape
            wanted = {"param": wanted.view(got["param"].shape), "cat_dim": 0}
        assert same_bits(got.pop("param"), wanted.pop("param")) and got == wanted, path
    assert all(
        (theirs / name / f"{state}.pt").exists()
        for name in names
        for state in ("exp_avg", "exp_avg_sq")
    )


SHAPES = [OrderedDict(a=torch.Size((5, 3)), b=torch.Size((7,))), OrderedDict(c=torch.Size((4,)))]


def records(path, part="/data/"):
    """The records of a .pt file, the largest last."""
    with zipfile.ZipFile(path) as archive:
        return sorted(
            (i for i in archive.infolist() if part in i.filename and i.file_size),
            key=lambda i: i.file_size,
        )


def data_of(data, record):
    """Where the bytes of a record begin in those of its file."""
    return (
        record.header_offset + 30 + sum(struct.unpack_from("<HH", data, record.header_offset + 26))
    )


def flip(path, record=None, at=0.5):
    """Change one bit of a record of a .pt file; without one, in the middle of the largest
    tensor."""
    record, data = record or records(path)[-1], path.read_bytes()
    path.write_bytes(
        with_bit_flipped(data, data_of(data, record) + int(record.file_size * at), bit=4)
    )


def edit(folder, pattern, change):
    """Load each file of a pattern, change(its content), and save it again."""
    for path in sorted(folder.glob(pattern)):
        whole = load(path)
        change(whole)
        torch.save(whole, path)


def states(shard):
    """The optimizer's states by parameter group, of a shard of any stage."""
    optimizer = shard["optimizer_state_dict"]
    return (optimizer.get("base_optimizer_state") or optimizer["optimizer_state_dict"])[
        "state"
    ].values()


def run_all(folder, ranks, script, *arguments, names):
    """{name: error} of what has failed. The script does what is named, one after the other, and
    adds each name to the file `ended`. What fails ends the launch: what comes after it gets another
    one."""
    failed, left, ended = {}, list(names), Path(folder, "ended")
    while left:
        ended.write_text("")
        result = launch(folder, ranks, script, *arguments, *left, limit=600)
        left = left[len(ended.read_text().splitlines()) :]
        assert left or result.code == 0, f"{script} {arguments} {result.codes}\n{result.errors}"
        if left:
            failed[left.pop(0)] = f"{result.codes} on {ranks} ranks\n{result.out}\n{result.errors}"
    return failed

"""Patches for ranks, what they have logged and seen, and several tasks of one launch."""

import contextlib
import io
import os
import pkgutil
import sys
from pathlib import Path

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from tests.support.commands import is_rank, kill
from tests.support.ranks import launch, run_script


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
            if at_it and is_rank(rank):
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
            assert torch.equal(inputs[:, 1:], targets[:, :-1])
            rows = torch.cat([inputs, targets[:, -1:]], dim=1).tolist()
            with open(f"{name}.rows.{os.environ['RANK']}", "a") as file:
                file.writelines(f"{row}\n" for row in rows)

    def patch():
        torch.nn.modules.module.register_module_forward_pre_hook(record)

    return patch


def rows_of_steps(folder, name, ranks, batch, micro, steps):
    """What the ranks were given in each step, sorted; without what they compute again."""
    share = -(-batch // (micro * ranks)) * micro
    rows = [[] for _ in range(steps)]
    for rank in range(ranks):
        weighted = min(batch - rank * share, share)
        for i, row in enumerate(Path(folder, f"{name}.rows.{rank}").read_text().splitlines()):
            if i % share < weighted:
                rows[min(i // share, steps - 1)].append(row)
    return [sorted(of_step) for of_step in rows]


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


def chosen(request, *parameters):
    """The values of these parameters in the tests of this module that are to run."""
    tests = [item for item in request.session.items if item.path == request.path]
    known = [item.callspec.params for item in tests if hasattr(item, "callspec")]
    return [
        [of_test[name] for name in parameters] for of_test in known if {*parameters} <= {*of_test}
    ]


def run_all(folder, ranks, script, *arguments, names, grace=0):
    """{name: error} of what has failed. The script does what is named, one after the other, and
    adds each name to the file `ended`. What fails ends the launch: what comes after it gets another
    one. grace: as of launch()."""
    failures = {}
    left = list(names)
    ended = Path(folder, "ended")
    while left:
        ended.write_text("")
        result = launch(folder, ranks, script, *arguments, *left, limit=600, grace=grace)
        left = left[len(ended.read_text().splitlines()) :]
        assert left or result.code == 0, f"{script} {result.codes}\n{result.errors}"
        if left:
            printed = f"{result.out}\n{result.errors}"
            failures[left.pop(0)] = f"{result.codes} on {ranks} ranks\n{printed}"
    return failures

# SPDX-License-Identifier: MIT
"""A resume that proves itself: the next steps of a checkpoint are written down, and compared when
they are trained again.

    universal: steps 101 to 103, trained before on 8 ranks, now on 6: the loss differs by at most
    2.4e-07

A job that dies after step 103 and resumes from step 100 trains 101 to 103 twice. So after each save
the next ten steps get a row each in `next_steps.csv`, beside the shards: the mean loss over all
micro-batches and ranks, the gradient norm, the learning rates, the loss scale, and digests of the
samples and of the random draws, which no number of ranks changes. After a load, rank 0 compares.
The first loss tests the weights, the samples and the dropout; the next ones test what the optimizer
has restored.

A proof never stops a training: what goes wrong costs the proof, and a line. All ranks meet in one
all-reduce at the end of each of the ten steps, whatever each has seen of it.
"""

import contextlib
import functools
import os
import zlib
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from universal import patches
from universal.checkpoint.types import NEXT_STEPS
from universal.load.collective import say
from universal.load.overrides import is_within_a_step
from universal.proving.comparison import Comparison, coarsest
from universal.proving.next_steps import NextSteps, Row, read_rows
from universal.proving.samples import ForwardPass, generator_states, hashes, scrambled, tensors_in
from universal.proving.training import TrainingEngine

STEPS = 10
BY_DEEPSPEED = "DeepSpeed's own loader restored the state"
MOST_TENSORS = 8  # of a micro-batch, that have a digest each; the rest are among the others
# What is added up in a step, each with its count. output: of a model, that may be a loss; numbers:
# digests of so many tensors.
SUMMED = ("loss", "output", "norm", "draws", "others", *range(MOST_TENSORS))


# --------------------------------------------------------------------------------------------------
# 1. ten steps of an engine


class Proof:
    """Writes down the next steps of an engine, and compares those that were trained before.

    last_step: the last to be written down, the same on all ranks. files, comparison: on rank 0
    alone. has_failed: whether an error was printed. dtypes: of matrix products in an autocast of
    the model's own, which no config tells; None until the first forward pass has been watched.
    """

    def __init__(self, engine):
        self.engine = TrainingEngine(engine)
        self.last_step = engine.global_steps + STEPS
        self.files = []
        self.comparison = None
        self.has_failed = False
        self.dtypes = None
        self.settings = {}
        self.begin_step()
        self.is_partial = is_within_a_step(engine)

    def begin_step(self):
        """Start a step with empty sums and counts: `sums` on the device, `known` for Python's
        numbers."""
        shape = len(SUMMED), 2
        with torch.inference_mode(False):  # a validation saves, and a training step adds
            self.sums = torch.zeros(shape, dtype=torch.float64, device=self.engine.device)
        self.known = [[0.0, 0.0] for _ in SUMMED]
        self.waiting = []  # forward passes
        self.has_loss = False
        self.is_partial = False  # whether the step had begun before

    def add(self, kind, total, count=1):
        row = SUMMED.index(kind)
        for column, number in enumerate((total, count)):
            sums = self.sums if torch.is_tensor(number) else self.known
            sums[row][column] += number

    def begin_forward(self, arguments):
        forward = ForwardPass(states=generator_states())
        self.waiting.append(forward)
        with contextlib.suppress(Exception):  # a sparse tensor has no hash, say
            self.see_inputs(forward, arguments)

    @contextlib.contextmanager
    def watching_products(self):
        """See in which dtypes modules compute in the first forward pass of this block."""
        hooks = []
        if self.dtypes is None:
            self.dtypes = set()
            for module in self.engine.module.modules():
                if getattr(module, "weight", None) is not None:
                    hooks.append(module.register_forward_hook(self.see_product))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def see_product(self, module, inputs, output):
        if torch.is_tensor(output) and output.dtype != module.weight.dtype:
            self.dtypes.add(str(output.dtype).removeprefix("torch."))

    def see_inputs(self, forward, arguments):
        if not self.engine.sees_samples():
            return
        tensors = [pair for pair in tensors_in(arguments) if pair[1].dim()]
        mask = next((tensor for name, tensor in tensors if name == "attention_mask"), None)
        lengths = [len(tensor) for _, tensor in tensors]
        samples = self.engine.micro_batch()
        if samples not in lengths and (max(lengths[:1], default=0) > 1 or {*lengths} == {1}):
            samples = lengths[0]  # the last of an epoch
        mixed = 0
        for _, tensor in tensors:
            if len(tensor) == samples and len(forward.digests) < MOST_TENSORS:
                mixed = scrambled(mixed + hashes(tensor, mask)) & 0xFFFFFFFF
                forward.digests.append(mixed)
            else:
                others = 0 if forward.others is None else forward.others
                forward.others = scrambled(others + hashes(tensor[None])) & 0xFFFFFFFF

    def see_draws(self):
        """Note whether random numbers were drawn in the last forward pass, or since it."""
        forward = self.waiting[-1] if self.waiting else None
        if forward and forward.states:
            pairs = zip(forward.states, generator_states(), strict=True)
            changed = [before for before, after in pairs if before != after]
            if changed:
                forward.draws = zlib.crc32(repr(changed).encode())
                forward.states = None

    def see_output(self, output):
        """Note a model's output, which may be a loss whose backward() the script calls itself."""
        tensors = [tensor for _, tensor in tensors_in(output)]
        self.see_draws()
        for tensor in tensors[:1]:
            if tensor.numel() == 1 and tensor.requires_grad:
                loss = tensor.detach().squeeze()
                tensor.register_hook(functools.partial(self.see_gradient, loss))

    def see_gradient(self, loss, gradient):
        """Note a loss by its gradient, which is its weight: 0 if the micro-batch is computed
        again."""
        with ending_the_proof(self.engine.engine):
            has_weight = gradient.detach().squeeze() != 0
            self.add("output", loss * has_weight, has_weight)
            self.add_forward_passes(has_weight)

    def see_loss(self, loss, is_share, is_exact):
        """Note a loss. is_share: the caller has divided it, so that a step's losses add up to their
        mean. is_exact: the mean is taken over the losses that are not 0.
        """
        has_weight = loss != 0
        count = has_weight if is_exact else 1
        self.add("loss", loss, 0 if is_share and self.has_loss else count)
        self.has_loss = True
        self.see_draws()
        self.add_forward_passes(has_weight)

    def add_forward_passes(self, has_weight=1):
        """Add the waiting forward passes to the step's digests. has_weight: 0 if their micro-batch
        is computed again, and so is no part of the batch."""
        for forward in self.waiting:
            for number, rows in enumerate(forward.digests):
                self.add(number, rows.sum() * has_weight, len(rows) * has_weight)
            if forward.others is not None:
                self.add("others", forward.others.sum() * has_weight, has_weight)
            if forward.draws is not None:
                self.add("draws", forward.draws * has_weight, has_weight)
        self.waiting.clear()

    def end_step(self, step):
        """Add up what all ranks have seen. Rank 0 writes the row, and compares it."""
        try:
            if self.engine.is_pipeline():  # its first stage, which sees samples, sees no loss
                from universal.batches import named_share

                del self.waiting[named_share(self.engine.engine).weighted :]
            self.add_forward_passes()
            norm = self.engine.grad_norm()
            if norm is not None:
                self.add("norm", norm)
        finally:
            self.sums += torch.tensor(self.known, dtype=torch.float64).to(self.sums)
            dist.all_reduce(self.sums, group=self.engine.stepping_group())
        if dist.get_rank() == 0:
            row = self.row(step)
            if self.comparison and step in self.comparison.rows and self.comparison.differs(row):
                self.comparison = None  # one warning, not ten
            for file in self.files:
                file.add(row)
            self.files = [file for file in self.files if file.end > step]

    def row(self, step):
        sums = zip(SUMMED, self.sums.tolist(), strict=True)
        means = {kind: total / count if count else None for kind, (total, count) in sums}
        digests = [means[number] for number in range(MOST_TENSORS)]
        row = Row(
            step=step,
            ranks=dist.get_world_size(),
            micro_batch=self.engine.micro_batch(),
            dtype=coarsest(self.engine.dtypes() | (self.dtypes or set())),
            loss=means["output"] if means["loss"] is None else means["loss"],
            grad_norm=means["norm"],
            draws=means["draws"] or 0,
            others=means["others"],
            digests=" ".join(str(digest) for digest in digests if digest is not None),
            **self.settings,
        )
        not_whole = dict.fromkeys(("loss", "draws", "others", "digests"))
        return row._replace(**not_whole) if self.is_partial else row


# --------------------------------------------------------------------------------------------------
# 2. DeepSpeed's methods


def install() -> None:
    """Start a proof at every save and load of every engine from now on, also at loads by
    DeepSpeed's own loader."""
    patches.patch(
        "proof",
        load_checkpoint=around_load,
        save_checkpoint=around_save,
        forward=around_forward,
        backward=around_backward,
        _take_model_step=around_step,
    )


@contextlib.contextmanager
def ending_the_proof(engine):
    """Let an error in this block end the proof, with a line, and not the training."""
    try:
        yield
    except Exception as error:
        proof = proof_of(engine)
        if proof:  # it goes on, as the other ranks wait for this one in end_step()
            proof.files = []
            proof.comparison = None
        if not getattr(proof, "has_failed", False):
            say(f"the next steps are not compared: {type(error).__name__}: {error}")
        if proof:
            proof.has_failed = True


def proof_of(engine):
    """The Proof of an engine that goes on; None if there is none."""
    return vars(engine).get("universal_proof")


def begin_after_save(engine: deepspeed.DeepSpeedEngine, folder: Path) -> None:
    """Write this engine's next steps beside the checkpoint in a folder. Call it on all ranks."""
    with ending_the_proof(engine):
        proof = engine.universal_proof = proof_of(engine) or Proof(engine)
        proof.last_step = engine.global_steps + STEPS
        if dist.get_rank() == 0:
            file = NextSteps(folder, proof.last_step)
            others = [f for f in proof.files if not os.path.sameopenfile(f.folder, file.folder)]
            proof.files = [*others, file][-STEPS:]  # each keeps its folder open


def after_load(engine: deepspeed.DeepSpeedEngine, loaded: Any, group: Any) -> None:
    """Compare this engine's next steps with the checkpoint's. loaded: loader.Loaded."""
    if patches.is_patched("save_checkpoint", "proof"):
        folder = loaded.folder if loaded.options.load_optimizer_states else None
        begin_after_load(engine, folder, BY_DEEPSPEED if loaded.by_deepspeed else "")


def begin_after_load(engine: deepspeed.DeepSpeedEngine, folder: Path | None, restored: str) -> None:
    """Compare this engine's next steps with the checkpoint's.

    folder: None if there is nothing to compare. restored: says who has restored the state.
    """
    engine.universal_proof = None
    if folder:
        with ending_the_proof(engine):
            proof = engine.universal_proof = Proof(engine)
            rows = {}
            if dist.get_rank() == 0:
                rows = read_rows(folder / NEXT_STEPS, engine.global_steps + 1)
            if rows:
                name = f"{folder.absolute().parent.name}/{folder.name}"
                proof.comparison = Comparison(rows, restored, name)


def around_save(method, engine, save_dir, tag=None, *args, **options):
    result = method(engine, save_dir, tag, *args, **options)
    name = f"global_step{engine.global_steps}" if tag is None else str(tag)
    begin_after_save(engine, Path(save_dir, name))
    return result


def around_load(method, engine, *args, **options):
    path, client_state = method(engine, *args, **options)
    if not patches.is_patched("load_checkpoint", "resume"):  # which calls after_load()
        begin_after_load(engine, path and Path(path).parent, BY_DEEPSPEED)  # the path is of a file
    return path, client_state


def around_forward(method, engine, *inputs, **named):
    proof = proof_of(engine)
    trains = engine.module.training and torch.is_grad_enabled()
    if not proof or not trains or torch.compiler.is_compiling():
        return method(engine, *inputs, **named)
    with ending_the_proof(engine):
        proof.begin_forward([*inputs, named])
    try:
        with proof.watching_products():
            output = method(engine, *inputs, **named)
    except BaseException:
        proof.waiting = proof.waiting[:-1]  # it may be tried again
        raise
    with ending_the_proof(engine):
        proof.see_output(output)
    return output


def around_backward(method, engine, loss, *args, **options):
    is_exact = hasattr(engine, "divides_gradients")
    scales = options.get("scale_wrt_gas", args[-1] if len(args) > 1 else True)
    is_share = scales is False and not is_exact
    if proof := proof_of(engine):
        with ending_the_proof(engine):
            proof.see_loss(loss.detach().squeeze(), is_share, is_exact)
    return method(engine, loss, *args, **options)


def around_step(method, engine, *args, **options):
    proof = proof_of(engine)
    if not proof:
        return method(engine, *args, **options)
    with ending_the_proof(engine):
        proof.settings |= proof.engine.settings_of_step()
    result = method(engine, *args, **options)
    with ending_the_proof(engine):
        proof.end_step(engine.global_steps)
    proof.begin_step()
    if engine.global_steps >= proof.last_step:
        engine.universal_proof = None
    return result

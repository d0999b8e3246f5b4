# SPDX-License-Identifier: MIT
"""A resume that proves itself: the next steps of a checkpoint are written down, and compared when
they are trained again.

    universal: steps 101 to 103, trained before on 8 ranks, now on 6: the loss differs by at most
    2.4e-07

A job that dies after step 103 and resumes from step 100 trains 101 to 103 twice. So after each save
the next ten steps get a row each in `next_steps.csv`, beside the shards: the mean loss over all
micro-batches and ranks, the gradient norm, the learning rates, the loss scale, and a digest of the
samples, which no number of ranks changes. After a load, rank 0 compares. The first loss tests the
weights, the samples and the dropout; the next ones test what the optimizer has restored.

A proof never stops a training: what goes wrong costs the proof, and a line. All ranks meet in one
all-reduce at the end of each of the ten steps, whatever each has seen of it.
"""

import contextlib
import functools
import math
import os
from collections.abc import Mapping
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

from universal.batches import share
from universal.checkpoint.next_steps import HEADER, NextSteps, Row, read_rows
from universal.checkpoint.types import NEXT_STEPS
from universal.load.collective import say
from universal.load.engine import Engine
from universal.load.hooks import deepspeed_load, wrap_methods

STEPS = 10
# By how much a loss may differ from rounding alone, by the dtype of matrix products: as a share of
# the loss, or of 1, if that is more.
ROUNDING = {"float64": 1e-5, "float32": 1e-5, "tfloat32": 2e-3, "float16": 2e-3, "bfloat16": 1e-2}
NORM_ROUNDING = 10  # times as much of the gradient norm
LOSS = "the loss"
GRAD_NORM = "the gradient norm"


# --------------------------------------------------------------------------------------------------
# 1. the samples of a step


def tensors_in(value, name=""):
    """The tensors in nested arguments, each with the last name on the way to it."""
    if torch.is_tensor(value):
        yield name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from tensors_in(part, key)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part, name)


def scrambled(numbers):
    """A hash of each int64; that of 0 is 0. Products wrap around."""
    numbers = (numbers ^ (numbers >> 29)) * 0x5851F42D4C957F2D
    numbers = (numbers ^ (numbers >> 32)) * 0x2545F4914F6CDD1D
    return numbers ^ (numbers >> 29)


def hashes(samples, mask=None):
    """[B]: a number below 2**32 for each row of a tensor [B, ...]; zeros at its end change nothing.

    mask: 0 for padding, which follows the micro-batch, if it has the shape of the samples [B, T].
    """
    rows = samples.detach().contiguous().reshape(len(samples), -1)
    dtypes = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    numbers = rows.view(dtypes.get(rows.element_size(), torch.int64)).long()
    places = torch.arange(1, numbers.size(1) + 1, device=rows.device)
    if mask is not None and mask.shape == numbers.shape:
        places = mask.long().cumsum(1) * mask.bool()
    return scrambled((numbers * scrambled(places)).sum(1)) & 0xFFFFFFFF


def generator_states():
    """Of the CPU and of this rank's device; whatever draws random numbers changes them."""
    device = deepspeed.accelerator.get_accelerator()
    return torch.cat([torch.get_rng_state(), device.get_rng_state()])


# --------------------------------------------------------------------------------------------------
# 2. steps that are trained again


class Comparison:
    """Rank 0's, of the steps in `rows`, which were trained before the load.

    resharded: this package has loaded them, and not DeepSpeed's own loader. draws: whether the
    model has drawn random numbers. gaps: by how much each number of a step differs at most.
    """

    def __init__(self, rows, resharded):
        self.rows = rows
        self.resharded = resharded
        self.draws = False
        self.gaps = {}

    def differs(self, now):
        """Say which number of a step differs by more than rounding, or at the last that none does.

        Returns: whether one does.
        """
        before = self.rows[now.step]
        trained = f"trained before on {ranks_in_words(before.ranks)}"
        for name, number_before, number, tolerance in pairs_of(before, now):
            self.gaps[name] = max(abs(number - number_before), self.gaps.get(name, 0))
            if not math.isclose(number_before, number, rel_tol=0, abs_tol=tolerance):
                kind, cause = self.explain(name, before, now)
                numbers = f"{name} was {number_before:.7g}, and is {number:.7g}"
                say(f"{kind}: step {now.step}, {trained}: {numbers}{cause}")
                return True
        name = LOSS if LOSS in self.gaps else GRAD_NORM
        if now.step == max(self.rows) and name in self.gaps:
            gap = f"{self.gaps[name]:.1e}".replace("0.0e+00", "0")
            steps = f"steps {min(self.rows)} to {now.step}"
            if len(self.rows) == 1:
                steps = f"step {now.step}"
            say(f"{steps}, {trained}, now on {now.ranks}: {name} differs by at most {gap}")
        return False

    def explain(self, name, before, now):
        """What a difference points to. Returns: "WARNING" or "NOTE"; the words."""
        if name not in (LOSS, GRAD_NORM):
            return "WARNING", ""
        known = None not in (before.samples, now.samples) and before.dtype == now.dtype
        if known and before.samples != now.samples:
            return "WARNING", ": other samples than before"
        restored = "the state was restored bit by bit"
        if not self.resharded:
            restored = "DeepSpeed's own loader restored the state"
        kind = "WARNING"
        if now.step > min(self.rows):
            cause = f"step {now.step - 1} has updated the weights in another way"
        elif name == GRAD_NORM and LOSS in self.gaps:
            cause = "another backward pass: the loss is the same"
        elif not self.draws:
            cause = "other weights, buffers or micro-batches: no random numbers were drawn"
        elif before.ranks == now.ranks:
            cause = "it is the dropout"
        else:
            kind = "NOTE"
            cause = "dropout follows the rank"
        samples = "the same samples, so" if known else "other samples, or"
        return kind, f": {samples} {cause} ({restored})"


def ranks_in_words(ranks):
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def pairs_of(before, now):
    """Each number of a step: its name, its values, and how far apart rounding may bring them."""
    for group, rates in enumerate(zip(before.rates, now.rates, strict=False)):
        yield f"the learning rate of group {group}", *rates, 1e-6 * rates[0]
    yield "the loss scale", before.loss_scale, now.loss_scale, 0
    rounding = max(ROUNDING.get(row.dtype, 1e-2) for row in (before, now))
    if None not in (before.loss, now.loss):
        yield LOSS, before.loss, now.loss, rounding * max(1, abs(before.loss))
    if None not in (before.grad_norm, now.grad_norm):
        tolerance = NORM_ROUNDING * rounding * before.grad_norm
        yield GRAD_NORM, before.grad_norm, now.grad_norm, tolerance


# --------------------------------------------------------------------------------------------------
# 3. ten steps of an engine


class Proof:
    """Writes down the next steps of an engine, and compares those that were trained before.

    last_step: of the proof, on all ranks alike. files, comparison: rank 0's alone.
    """

    def __init__(self, engine):
        self.engine = Engine(engine)
        self.last_step = engine.global_steps + STEPS
        self.files = []
        self.comparison = None
        self.settings = {"dtype": "float32"}
        self.begin_step()

    def begin_step(self):
        """Nothing has been seen of it: sums are 0, of 0 numbers. output: that may be a loss."""
        self.sums = torch.zeros(4, dtype=torch.float64, device=self.engine.device)
        self.counts = dict.fromkeys(("loss", "output", "norm", "samples"), 0)
        self.waiting = []  # hashes of samples whose loss has not been seen yet

    def add(self, kind, total, count=1):
        self.sums[list(self.counts).index(kind)] += total
        self.counts[kind] += count

    def follow_save(self, folder, step):
        file = NextSteps(folder, step + 1, self.last_step)
        file.write(HEADER, "w")
        others = [f for f in self.files if not os.path.sameopenfile(f.folder, file.folder)]
        self.files = [*others, file]

    def follow_load(self, folder, step, resharded):
        if (folder / NEXT_STEPS).exists():
            rows, has_room = read_rows(folder / NEXT_STEPS, step + 1)
            self.comparison = Comparison(rows, resharded) if rows else None
            if has_room:
                self.files = [NextSteps(folder, step + 1 + len(rows), self.last_step)]

    def see_inputs(self, arguments):
        self.settings["dtype"] = self.engine.matrix_dtype()
        tensors = [pair for pair in tensors_in(arguments) if pair[1].dim()]
        if tensors and self.engine.sees_samples():
            masks = [tensor for name, tensor in tensors if name == "attention_mask"]
            self.waiting.append(hashes(tensors[0][1], *masks[:1]))

    def see_output(self, output):
        """A model may return its loss, of which around_backward() is called directly."""
        for _, tensor in list(tensors_in(output))[:1]:
            if tensor.numel() == 1 and tensor.requires_grad:
                loss = tensor.detach().squeeze()
                tensor.register_hook(functools.partial(self.see_gradient, loss))

    def see_gradient(self, loss, gradient):
        """gradient: the weight of this loss; 0, if the micro-batch is computed again."""
        with harmless(self.engine.engine):
            has_weight = gradient.detach().squeeze() != 0
            self.add("output", loss * has_weight, has_weight)
            self.add_samples(has_weight)

    def see_loss(self, loss, is_share, is_exact):
        """is_share: the losses of a step add up to their mean, as their caller has divided them.

        is_exact: the mean is that of the losses which are not 0.
        """
        has_weight = loss != 0
        count = has_weight if is_exact else 1
        self.add("loss", loss, 0 if is_share and self.counts["loss"] else count)
        self.add_samples(has_weight)

    def add_samples(self, has_weight=1):
        """has_weight: 0, if their micro-batch is computed again, and so is not of the batch."""
        for rows in self.waiting:
            self.add("samples", rows.sum() * has_weight, len(rows) * has_weight)
        self.waiting.clear()

    def end_step(self, step):
        """Add up what all ranks have seen. Rank 0 has the row."""
        try:
            if self.engine.is_pipeline():  # its first stage, which sees samples, sees no loss
                del self.waiting[share(self.engine.engine).weighted :]
            self.add_samples()
            norm = self.engine.grad_norm()
            if norm is not None:
                self.add("norm", norm)
        finally:
            counts = torch.stack([torch.as_tensor(n).to(self.sums) for n in self.counts.values()])
            self.sums = torch.stack([self.sums, counts], dim=1)
            dist.all_reduce(self.sums, group=self.engine.stepping_group())
        if dist.get_rank() == 0:
            row = self.row(step)
            if self.comparison and step in self.comparison.rows and self.comparison.differs(row):
                self.comparison = None  # one warning, not ten
                self.files = [file for file in self.files if file.begin <= step]  # not the loaded
            for file in self.files:
                file.add(row)
            self.files = [file for file in self.files if file.end > step]

    def row(self, step):
        means = [total / count if count else None for total, count in self.sums.tolist()]
        loss, output, norm, samples = means
        return Row(
            step=step,
            ranks=dist.get_world_size(),
            samples=samples,
            loss=output if loss is None else loss,
            grad_norm=norm,
            **self.settings,
        )


# --------------------------------------------------------------------------------------------------
# 4. DeepSpeed's methods


def watch(wanted: bool = True) -> None:
    """From now on, prove every engine's saves and loads, or none."""
    deepspeed.DeepSpeedEngine.universal_proof = None  # of each engine
    deepspeed.DeepSpeedEngine.wants_universal_proof = wanted
    wrap_methods(
        save=around_save, forward=around_forward, backward=around_backward, step=around_step
    )


def install() -> None:
    """Prove what DeepSpeed's own loader loads, without load_checkpoint()'s."""
    watch()
    if deepspeed.DeepSpeedEngine.load_checkpoint is deepspeed_load:
        wrap_methods(load=around_load)


@contextlib.contextmanager
def harmless(engine):
    """What goes wrong in this block costs the proof, and a line, but not the training."""
    try:
        yield
    except Exception as error:
        if engine.universal_proof:  # it goes on, as the other ranks wait for this one in end_step()
            engine.universal_proof.files = []
            engine.universal_proof.comparison = None
        say(f"the next steps are not proved: {type(error).__name__}: {error}")


def after_save(engine: deepspeed.DeepSpeedEngine, folder: Path) -> None:
    """The next steps of this engine belong to the checkpoint in a folder. Call it on all ranks."""
    if getattr(engine, "wants_universal_proof", False):
        with harmless(engine):
            proof = engine.universal_proof = engine.universal_proof or Proof(engine)
            proof.last_step = engine.global_steps + STEPS
            if dist.get_rank() == 0:
                proof.follow_save(folder, engine.global_steps)


def after_load(engine: deepspeed.DeepSpeedEngine, folder: Path | None, resharded: bool) -> None:
    """The next steps of this engine may have been trained before. Call it on all ranks.

    folder: of the checkpoint; None, if not all of it was loaded. resharded: by this package.
    """
    engine.universal_proof = None
    if folder and getattr(engine, "wants_universal_proof", False):
        with harmless(engine):
            proof = engine.universal_proof = Proof(engine)
            if dist.get_rank() == 0:
                proof.follow_load(folder, engine.global_steps, resharded)


def around_save(method, engine, save_dir, tag=None, *args, **options):
    result = method(engine, save_dir, tag, *args, **options)
    tag = f"global_step{engine.global_steps}" if tag is None else tag
    after_save(engine, Path(save_dir, str(tag)))
    if not options.get("save_latest", args[1] if len(args) > 1 else True):
        say_beside_latest(str(tag))
    return result


@functools.cache
def say_beside_latest(tag):
    """Once, of a tag that is saved again and again."""
    say(
        f"{tag} is saved beside `latest`: a load without a tag takes whichever is of the later "
        "step; one with the tag takes what it names"
    )


def around_load(method, engine, *args, **options):
    path, client_state = method(engine, *args, **options)
    after_load(engine, path and Path(path).parent, resharded=False)  # the path is of a file
    return path, client_state


def around_forward(method, engine, *inputs, **named):
    proof = engine.universal_proof
    trains = engine.module.training and torch.is_grad_enabled()
    if not proof or not trains or torch.compiler.is_compiling():
        return method(engine, *inputs, **named)
    with contextlib.suppress(Exception):  # a sparse tensor has no hash, say
        proof.see_inputs([*inputs, named])
    generators = generator_states() if proof.comparison else None
    output = method(engine, *inputs, **named)
    with harmless(engine):
        proof.see_output(output)
        if generators is not None:
            proof.comparison.draws |= not torch.equal(generators, generator_states())
    return output


def around_backward(method, engine, loss, *args, **options):
    is_exact = hasattr(engine, "divides_gradients")
    is_share = options.get("scale_wrt_gas") is False and not is_exact
    if engine.universal_proof:
        with harmless(engine):
            engine.universal_proof.see_loss(loss.detach().squeeze(), is_share, is_exact)
    return method(engine, loss, *args, **options)


def around_step(method, engine, *args, **options):
    proof = engine.universal_proof
    if not proof:
        return method(engine, *args, **options)
    with harmless(engine):
        proof.settings |= proof.engine.settings_of_step()
    result = method(engine, *args, **options)
    with harmless(engine):
        proof.end_step(engine.global_steps)
    proof.begin_step()
    if engine.global_steps >= proof.last_step:
        engine.universal_proof = None
    return result

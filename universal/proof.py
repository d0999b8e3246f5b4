# SPDX-License-Identifier: MIT
"""A resume that proves itself: the next steps of a checkpoint are written down, and compared when
they are trained again.

    universal: steps 101 to 103, trained before on 8 ranks, now on 6: the loss differs by at most
    2.4e-07

A job that dies after step 103 and resumes from step 100 trains 101 to 103 twice. So after each save
the next ten steps get a row each in `next_steps.csv`, beside the shards: the mean loss over all
micro-batches and ranks, the gradient norm, the learning rates, the loss scale, and a digest of the
samples, which no number of ranks changes. After a load, rank 0 compares. The first loss tests the
weights, the samples and the dropout; the next ones what the optimizer has restored.

A proof never stops a training: what goes wrong costs the proof, and a line. All ranks meet in one
all-reduce at the end of each of the ten steps, whatever each has seen of it. Needs torch and
DeepSpeed.
"""

import contextlib
import math
import os
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist

from universal.collective import say
from universal.description import NEXT_STEPS
from universal.engine import Engine, LoadOptions, wrap_method

STEPS = 10
# By how much a loss may differ from rounding alone, by the dtype of matrix products: as a share of
# the loss, or of 1, if that is more.
ROUNDING = {"float64": 1e-5, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
NORM_ROUNDING = 100  # times as much of the gradient norm
LOSS = "the loss"
GRAD_NORM = "the gradient norm"
PROOFS = weakref.WeakKeyDictionary()  # {DeepSpeed's engine: its Proof}


# --------------------------------------------------------------------------------------------------
# 1. the file


class Row(NamedTuple):
    """What is written down of a step. samples, loss, grad_norm: None where they were not seen.

    accumulation: micro-batches of each rank. dtype: of matrix products. rates: of the parameter
    groups.
    """

    step: int
    ranks: int
    accumulation: int
    dtype: str
    rates: list[float]
    loss_scale: float
    samples: str | None
    loss: float | None
    grad_norm: float | None

    def text(self) -> str:
        cells = self._replace(rates=" ".join(map(str, self.rates)))
        return ",".join("" if cell is None else str(cell) for cell in cells) + "\n"


HEADER = ",".join(Row._fields) + "\n"


def parse_row(line: str) -> Row:
    """Raises ValueError, if it is half a row."""
    step, ranks, accumulation, dtype, rates, scale, samples, loss, norm = line.split(",")
    if not norm.endswith("\n"):
        raise ValueError("half a number")
    return Row(
        step=int(step),
        ranks=int(ranks),
        accumulation=int(accumulation),
        dtype=dtype,
        rates=[float(rate) for rate in rates.split()],
        loss_scale=float(scale),
        samples=samples or None,
        loss=float(loss) if loss else None,
        grad_norm=float(norm) if norm.strip() else None,
    )


def read_rows(path: Path, first_step: int) -> tuple[dict[int, Row], bool]:
    """The rows of the steps from first_step on, by step.

    Returns: the rows; whether others may follow them. Not so behind half a row of a job that was
        killed, nor in a file that is of another save.
    """
    header, *lines = path.read_text().splitlines(keepends=True) or [""]
    rows = {}
    with contextlib.suppress(ValueError):
        for step, line in enumerate(lines, first_step):
            row = parse_row(line)
            if row.step != step:
                break
            rows[step] = row
    return rows, header == HEADER and len(rows) == len(lines)


class NextSteps:
    """The file of a checkpoint, for its steps `begin` to `end`.

    It belongs to the folder, which may get another name, or be removed, before they are trained.
    """

    def __init__(self, folder: Path, begin: int, end: int):
        self.folder = os.open(folder, os.O_RDONLY)
        weakref.finalize(self, os.close, self.folder)
        self.begin = begin
        self.end = end

    def write(self, text: str, flags: int) -> None:
        """Raises OSError, also if there is room for a part of the text only."""
        file = os.open(NEXT_STEPS, os.O_WRONLY | flags, 0o666, dir_fd=self.folder)
        try:
            if os.write(file, text.encode()) < len(text):
                raise OSError(f"no room for {NEXT_STEPS}")
        finally:
            os.close(file)

    def add(self, row: Row) -> None:
        if self.begin <= row.step <= self.end:
            with contextlib.suppress(FileNotFoundError):  # the checkpoint was removed
                self.write(row.text(), os.O_APPEND)

    def is_same(self, other: "NextSteps") -> bool:
        return os.path.sameopenfile(self.folder, other.folder)


# --------------------------------------------------------------------------------------------------
# 2. what a rank sees of a step


def tensors_in(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in nested arguments, each with the last name on the way to it."""
    if torch.is_tensor(value):
        yield name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from tensors_in(part, str(key))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part, name)


def scrambled(numbers: torch.Tensor) -> torch.Tensor:
    """A hash of each int64; that of 0 is 0. Products wrap around."""
    numbers = (numbers ^ (numbers >> 29)) * 0x5851F42D4C957F2D
    numbers = (numbers ^ (numbers >> 32)) * 0x2545F4914F6CDD1D
    return numbers ^ (numbers >> 29)


def digest(samples: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The sum of a hash of every row of a tensor [B, ...]; an int64 on its device.

    No order of the rows, and no cut into micro-batches, changes it, nor do zeros at a row's end.
    mask: 0 for padding, which follows the micro-batch, if it has the shape of the samples [B, T].
    """
    rows = samples.detach().contiguous().reshape(len(samples), -1)
    dtypes = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    numbers = rows.view(dtypes.get(rows.element_size(), torch.int64)).long()
    places = torch.arange(1, numbers.size(1) + 1, device=rows.device)
    if mask is not None and mask.shape == numbers.shape:
        places = mask.long().cumsum(1) * mask.bool()
    return scrambled((numbers * scrambled(places)).sum(1)).sum()


class Seen:
    """What this rank has seen of a step so far. Sums are tensors on the engine's device."""

    def __init__(self):
        self.loss = 0.0
        self.losses = 0  # in the sum
        self.outputs = []  # of the model, that may be losses
        self.samples = 0  # the sum of their digests
        self.inputs = 0  # in the sum; nan where a digest failed
        self.dtype = "float32"

    def see_inputs(self, arguments: Any) -> None:
        tensors = [pair for pair in tensors_in(arguments) if pair[1].dim()]
        masks = [tensor for name, tensor in tensors if name == "attention_mask"]
        try:
            for _, tensor in tensors[:1]:
                self.samples = self.samples + digest(tensor, *masks[:1])
                self.inputs += 1
        except Exception:  # it is sparse, say
            self.inputs = math.nan

    def see_output(self, output: Any) -> None:
        """A model may return its loss, of which backward() is called directly."""
        for _, tensor in list(tensors_in(output))[:1]:
            if tensor.numel() == 1 and tensor.requires_grad:
                self.outputs.append(tensor.detach().double())

    def see_loss(self, loss: torch.Tensor, is_share: bool) -> None:
        """is_share: the losses of a step add up to their mean, as their caller has divided them."""
        self.loss = self.loss + loss.detach().double()
        self.losses = 1 if is_share else self.losses + 1

    def numbers(self, engine: Engine) -> torch.Tensor:
        """[8]: losses and their number, the norm, inputs, the digest's digits; to be added up."""
        if not self.losses:
            self.loss = sum(self.outputs)
            self.losses = len(self.outputs)
        is_first = engine.is_first_to_see_samples()
        norm = engine.grad_norm()
        numbers = [self.loss, self.losses, math.nan if norm is None else norm]
        numbers.append(self.inputs if is_first else 0)
        device = engine.device
        numbers = [torch.as_tensor(n, dtype=torch.float64, device=device) for n in numbers]
        samples = torch.as_tensor(self.samples if is_first else 0, device=device)
        digits = samples >> torch.arange(0, 64, 16, device=device) & 0xFFFF
        return torch.cat([torch.stack([n.reshape(()) for n in numbers]), digits.double()])


def generator_states() -> torch.Tensor:
    """Of the CPU and of this rank's device; whatever draws random numbers changes them."""
    device = deepspeed.accelerator.get_accelerator()
    return torch.cat([torch.get_rng_state(), device.get_rng_state().cpu()])


# --------------------------------------------------------------------------------------------------
# 3. what a difference points to


class Difference(NamedTuple):
    """A number of a step, as it was and as it is."""

    number: str
    before: float
    now: float

    def is_rounding(self, rounding: float, least: float = 0.0) -> bool:
        """rounding: as a share of the number, or of `least`, if that is more."""
        both_nan = math.isnan(self.before) and math.isnan(self.now)
        return both_nan or math.isclose(
            self.before, self.now, rel_tol=rounding, abs_tol=rounding * least
        )


class Load:
    """What rank 0 knows of a load.

    rows: of the steps that were trained before. resharded: by this package, not by DeepSpeed's own
    loader. draws: whether the model has drawn random numbers. gaps: how far losses differ, by step.
    """

    def __init__(self, first_step: int, resharded: bool):
        self.first_step = first_step
        self.resharded = resharded
        self.rows = {}
        self.draws = False
        self.gaps = {}


def compare(before: Row, now: Row) -> Difference | None:
    """The first number that differs by more than rounding."""
    for number, rates in enumerate(zip(before.rates, now.rates, strict=False)):
        group = f" of group {number}" if len(now.rates) > 1 else ""
        difference = Difference(f"the learning rate{group}", *rates)
        if not difference.is_rounding(1e-6):
            return difference
    difference = Difference("the loss scale", before.loss_scale, now.loss_scale)
    if not difference.is_rounding(0):
        return difference
    rounding = max(ROUNDING.get(row.dtype, max(ROUNDING.values())) for row in (before, now))
    if None not in (before.loss, now.loss):
        difference = Difference(LOSS, before.loss, now.loss)
        if not difference.is_rounding(rounding, least=1):
            return difference
    if None not in (before.grad_norm, now.grad_norm):
        difference = Difference(GRAD_NORM, before.grad_norm, now.grad_norm)
        if not difference.is_rounding(rounding * NORM_ROUNDING):
            return difference
    return None


def explain(difference: Difference, before: Row, now: Row, load: Load) -> tuple[str, str]:
    """What it points to. Returns: "WARNING" or "NOTE"; the words."""
    if difference.number not in (LOSS, GRAD_NORM):
        return "WARNING", ""
    known = None not in (before.samples, now.samples) and before.dtype == now.dtype
    if known and before.samples != now.samples:
        return "WARNING", ": other samples than before"
    if now.step > load.first_step:
        words = ": the same samples, so " if known else ": other samples, or "
        words += f"step {now.step - 1} has updated the weights in another way"
        restored = ", with what DeepSpeed's own loader has restored"
        return "WARNING", words if load.resharded else words + restored
    if difference.number == GRAD_NORM and None not in (before.loss, now.loss):
        return "WARNING", ": the loss is the same, so the backward pass is another"
    if not known:
        return "WARNING", ": other samples, other dropout, or other weights than before"
    if not load.draws:
        words = ": the same samples, and no random numbers: other weights or buffers than "
        return "WARNING", words + ("loaded" if load.resharded else "saved")
    if (before.ranks, before.accumulation) != (now.ranks, now.accumulation):
        words = ": the same samples, so dropout follows the rank"
        restored = " (the state was restored bit by bit)"
        return "NOTE", words + (restored if load.resharded else ", or DeepSpeed's own loader")
    words = ": the same samples, so it is the dropout"
    restored = ", since the state was restored bit by bit"
    return "WARNING", words + (restored if load.resharded else ", or DeepSpeed's own loader")


# --------------------------------------------------------------------------------------------------
# 4. ten steps of an engine


class Proof:
    """Writes down the next steps of an engine, and compares those that were trained before.

    last_step: of the proof, on all ranks alike. files, load: rank 0's alone.
    """

    wanted = False

    def __init__(self, engine: deepspeed.DeepSpeedEngine, resharded: bool = True):
        self.engine = Engine(engine)
        self.seen = Seen()
        self.rates = []
        self.loss_scale = 1.0
        self.files = []
        self.generators = None
        self.load = Load(engine.global_steps + 1, resharded)
        self.last_step = engine.global_steps + STEPS

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Rank 0 alone runs this block; what goes wrong ends its part, and no training."""
        try:
            yield
        except Exception as error:
            self.files = []
            self.load.rows = {}
            say(f"the next steps are not proved: {type(error).__name__}: {error}")

    def follow_save(self, folder: Path, step: int) -> None:
        file = NextSteps(folder, step + 1, step + STEPS)
        file.write(HEADER, os.O_CREAT | os.O_TRUNC)
        self.files = [other for other in self.files if not other.is_same(file)] + [file]

    def follow_load(self, folder: Path) -> None:
        if (folder / NEXT_STEPS).exists():
            first_step = self.load.first_step
            self.load.rows, has_room = read_rows(folder / NEXT_STEPS, first_step)
            if has_room:
                self.files = [NextSteps(folder, first_step + len(self.load.rows), self.last_step)]

    def see_inputs(self, arguments: Any) -> None:
        self.seen.see_inputs(arguments)
        self.seen.dtype = self.engine.matrix_dtype()
        if self.load.rows:
            self.generators = generator_states()

    def see_output(self, output: Any) -> None:
        self.seen.see_output(output)
        if self.load.rows and not torch.equal(self.generators, generator_states()):
            self.load.draws = True

    def begin_step(self) -> None:
        self.rates = self.engine.rates()
        self.loss_scale = self.engine.loss_scale()

    def end_step(self, step: int) -> None:
        """Add up what all ranks have seen. Rank 0 has the row."""
        numbers = torch.full((8,), math.nan, dtype=torch.float64, device=self.engine.device)
        with contextlib.suppress(Exception):
            numbers = self.seen.numbers(self.engine)
        dist.all_reduce(numbers, group=self.engine.stepping_group())
        if dist.get_rank() == 0:
            with self.alone():
                self.note(self.row(step, *numbers.tolist()))
        self.seen = Seen()

    def row(self, step, loss, losses, norm, inputs, *digits) -> Row:
        samples = None
        if inputs > 0 and self.engine.sees_whole_samples():
            total = sum(int(digit) << 16 * i for i, digit in enumerate(digits))
            samples = f"{total % 2**64:016x}"
        return Row(
            step=step,
            ranks=dist.get_world_size(),
            accumulation=self.engine.accumulation,
            dtype=self.seen.dtype,
            rates=self.rates,
            loss_scale=self.loss_scale,
            samples=samples,
            loss=loss / losses if losses > 0 else None,
            grad_norm=None if math.isnan(norm) else norm / self.engine.stepping_ranks,
        )

    def note(self, row: Row) -> None:
        if row.step in self.load.rows:
            self.compare(self.load.rows[row.step], row)
        for file in self.files:
            file.add(row)
        self.files = [file for file in self.files if file.end > row.step]

    def compare(self, before: Row, now: Row) -> None:
        load = self.load
        trained = f"trained before on {count_ranks(before.ranks)}"
        if difference := compare(before, now):
            kind, words = explain(difference, before, now, load)
            values = f"was {difference.before:.7g}, and is {difference.now:.7g}"
            say(f"{kind}: step {now.step}, {trained}: {difference.number} {values}{words}")
            load.rows = {}  # one warning, not ten
            self.files = [file for file in self.files if file.begin > now.step]
            return
        number = LOSS if None not in (before.loss, now.loss) else GRAD_NORM
        pair = (before.loss, now.loss) if number == LOSS else (before.grad_norm, now.grad_norm)
        if None not in pair:
            load.gaps[now.step] = abs(pair[0] - pair[1])
        if load.gaps and now.step == max(load.rows):
            steps = (
                f"steps {min(load.gaps)} to {now.step}"
                if len(load.gaps) > 1
                else f"step {now.step}"
            )
            gap = max(load.gaps.values())
            most = f"{gap:.1e}" if gap else "0"
            say(f"{steps}, {trained}, now on {now.ranks}: {number} differs by at most {most}")


def count_ranks(ranks: int) -> str:
    return f"{ranks} rank{'s' * (ranks > 1)}"


# --------------------------------------------------------------------------------------------------
# 5. DeepSpeed's methods


def watch(wanted: bool = True) -> None:
    """From now on, prove every engine's saves and loads, or none."""
    PROOFS.clear()
    Proof.wanted = wanted
    for name, wrapper in WRAPPERS.items():
        wrap_method(name, wrapper)


def install() -> None:
    """Prove what DeepSpeed's own loader loads."""
    watch()
    wrap_method("load_checkpoint", load_checkpoint)


def after_save(engine: deepspeed.DeepSpeedEngine, folder: Path) -> None:
    """The next steps of this engine belong to the checkpoint in a folder. Call it on all ranks."""
    if not Proof.wanted:
        return
    if engine not in PROOFS:
        PROOFS[engine] = Proof(engine)
    proof = PROOFS[engine]
    proof.last_step = engine.global_steps + STEPS
    if dist.get_rank() == 0:
        with proof.alone():
            proof.follow_save(folder, engine.global_steps)


def after_load(
    engine: deepspeed.DeepSpeedEngine, folder: Path, options: LoadOptions, resharded: bool
) -> None:
    """The next steps of this engine were trained before, maybe. Call it on all ranks."""
    PROOFS.pop(engine, None)
    is_whole = options.load_optimizer_states and options.load_lr_scheduler_states
    if not Proof.wanted or not is_whole or options.load_module_only:
        return
    proof = PROOFS[engine] = Proof(engine, resharded)
    if dist.get_rank() == 0:
        with proof.alone():
            proof.follow_load(folder)


def save_checkpoint(method, engine, save_dir, tag=None, *args, **options):
    result = method(engine, save_dir, tag, *args, **options)
    after_save(engine, Path(save_dir, str(tag or f"global_step{engine.global_steps}")))
    return result


def load_checkpoint(
    method,
    engine,
    load_dir,
    tag=None,
    load_module_strict=True,
    load_optimizer_states=True,
    load_lr_scheduler_states=True,
    load_module_only=False,
    custom_load_fn=None,
):
    options = LoadOptions(
        load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only
    )
    path, client_state = method(engine, load_dir, tag, *options, custom_load_fn)
    if path:
        file = Path(path)
        after_load(engine, file if file.is_dir() else file.parent, options, resharded=False)
    return path, client_state


def forward(method, engine, *inputs, **named):
    proof = PROOFS.get(engine)
    trains = engine.module.training and torch.is_grad_enabled()
    if proof is None or not trains or torch.compiler.is_compiling():
        return method(engine, *inputs, **named)
    with contextlib.suppress(Exception):
        proof.see_inputs([*inputs, named])
    output = method(engine, *inputs, **named)
    with contextlib.suppress(Exception):
        proof.see_output(output)
    return output


def backward(method, engine, loss, *args, **options):
    is_share = options.get("scale_wrt_gas") is False and not hasattr(engine, "divides_gradients")
    if proof := PROOFS.get(engine):
        with contextlib.suppress(Exception):
            proof.seen.see_loss(loss, is_share)
    return method(engine, loss, *args, **options)


def take_model_step(method, engine, *args, **options):
    proof = PROOFS.get(engine)
    if proof is None:
        return method(engine, *args, **options)
    with contextlib.suppress(Exception):
        proof.begin_step()
    result = method(engine, *args, **options)
    proof.end_step(engine.global_steps)
    if engine.global_steps >= proof.last_step:
        PROOFS.pop(engine, None)
    return result


WRAPPERS = {
    "save_checkpoint": save_checkpoint,
    "forward": forward,
    "backward": backward,
    "_take_model_step": take_model_step,
}

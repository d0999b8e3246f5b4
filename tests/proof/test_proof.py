"""universal/proof.py: the next steps of a checkpoint are written down, and compared when they are
trained again; a fault after the load is named at its first or second step. That nothing is named
where there is no fault, random_engines.py sees, too."""

import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from proof_engines import FAULTS, KINDS, SAVED, SOUND, play
from proof_files import STORIES, play_stories

from tests.support.ranks import run
from universal.proof import Proof
from universal.proving.comparison import Comparison
from universal.proving.next_steps import Row, read_rows
from universal.proving.samples import ForwardPass, hashes


@pytest.fixture(scope="module")
def first(work):
    """All kinds of engines, saved by 2 ranks, and trained for some steps more."""
    run(work, 2, play, "first", *KINDS)


@pytest.fixture(scope="module")
def lines_of(work, first):
    """{fault: the lines about steps that are trained again}. 10 micro-batches on 3 ranks: 2 of the
    12 places have no weight."""
    parts = run(work, 3, play, "again", *FAULTS).split("== ")[1:]
    return {part.split()[0]: re.findall("^.*trained before.*$", part, re.M) for part in parts}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault(lines_of, fault):
    (line,) = lines_of[fault]
    assert re.search(FAULTS[fault].says, line)
    assert line.startswith("universal: NOTE") == FAULTS[fault].says.startswith("NOTE")
    assert ("dropout follows the rank" in line) == line.startswith("universal: NOTE")


@pytest.mark.parametrize("kind", SOUND)
def test_rounding(lines_of, kind):
    (line,) = lines_of[kind]
    steps = min(KINDS[kind].steps, 10)
    assert f"steps {SAVED + 1} to {SAVED + steps}, trained before on 2 ranks, now on 3:" in line
    most = {"fp32 alone": 1e-6, "fp16": 1e-3}.get(KINDS[kind].dtype, 1e-2)
    assert float(line.split()[-1]) < most


def first_row(work, kind):
    rows = read_rows(Path(work, kind, "t", "next_steps.csv"), SAVED + 1)
    assert list(rows) == list(range(SAVED + 1, SAVED + 1 + min(KINDS[kind].steps, 10)))
    return rows[SAVED + 1]


def test_rows(work, first):
    plain = first_row(work, "plain")
    assert plain.draws == 0 and first_row(work, "dropout").draws > 0
    assert [first_row(work, kind).dtype for kind in ("plain", "bf16", "fp16")] == [
        "float32",
        "bfloat16",
        "float16",
    ]
    for kind in ("autocast", "own_autocast", "communication"):
        assert first_row(work, kind).dtype == "bfloat16"
    for kind in ("evaluated", "dictionary", "loss_backward", "named"):
        assert first_row(work, kind) == plain
    shared = first_row(work, "share_of_loss")
    assert shared.loss == pytest.approx(plain.loss, rel=1e-6)
    assert shared._replace(loss=plain.loss, grad_norm=plain.grad_norm) == plain
    assert first_row(work, "no_tensor").digests == ""


# What each story says, in its order; the others say nothing.
SAYS = {
    "resumed_twice": ["steps 3 to 5, trained before on 2 ranks, now on 2"] * 2,
    "half_a_row": ["steps 3 to 4, trained before"],
    "another_rate_on_purpose": ["WARNING: step 3, trained before on 2 ranks: the learning rate"],
    "saved_again_under_its_name": ["step 6, trained before"],
    "saved_within_a_step": ["steps 3 to 4, trained before on 2 ranks, now on 2: the loss differs"],
    "elastic_save": ["steps 3 to 4, trained before"],
    "mirrored": ["steps 3 to 4, trained before"],
    "full_disk": ["the next steps are not compared: OSError: [Errno 28] No space left on device"],
    "no_folder": ["the next steps are not compared: FileNotFoundError: [Errno 2]"],
    "converted": ["steps 3 to 5, trained before"],
    "deepspeeds_own_loader": [
        "steps 3 to 5, trained before",
        "; DeepSpeed's own loader restored the state: docs/",
    ],
    "tag_0": ["step 3, trained before"],
    "earlier_version": ["steps 3 to 5, trained before"],
    "no_rate": ["steps 3 to 5, trained before"],
    "not_a_number_before": [
        "WARNING: step 3, trained before on 2 ranks: the loss was nan, and is nan: there is nothing"
    ],
    "two_engines": [
        "universal: actor/t: steps 3 to 4, trained before on 2 ranks, now on 2: the loss differs",
        "universal: critic/t: steps 3 to 4, trained before on 2 ranks, now on 2: the loss differs",
    ],
    "forward_tried_again": ["steps 3 to 4, trained before"],
}


@pytest.fixture(scope="module")
def story_lines(work):
    """{story: what is said of its proofs}."""
    (work / "stories").mkdir()
    parts = run(work / "stories", 2, play_stories, *STORIES).split("== ")[1:]
    proofs = "^universal: .*(?:trained before|not compared).*$"
    return {part.split()[0]: re.findall(proofs, part, re.M) for part in parts}


@pytest.mark.parametrize("story", STORIES)
def test_story(story_lines, story):
    says = SAYS.get(story, [])
    assert len(story_lines[story]) == len(says), story_lines[story]
    for line, words in zip(story_lines[story], says, strict=True):
        assert words in line


ROW = Row(3, 2, 1, "float32", 1.0, 1.0, None, 0, None, "1.5", [0.1])


@pytest.fixture
def lines(monkeypatch):
    """What a proof says, in this process."""
    said = []
    monkeypatch.setattr("universal.proving.comparison.say", said.append)
    return said


@pytest.mark.parametrize(
    "before, now, says",
    [
        (1.0, 1.0 + 9e-6, "differs by at most 9.0e-06"),
        (1.0, 1.0 + 2e-5, "WARNING"),
        (math.nan, math.nan, "WARNING"),
        (-math.inf, -math.inf, "WARNING"),
        (math.inf, math.nan, "WARNING"),
        (math.inf, 1.0, "WARNING"),
        (1.0, math.nan, "WARNING"),
        (-1.0, -1.0, "differs by at most 0"),
    ],
)
@pytest.mark.parametrize("column", ["loss", "grad_norm"])
def test_two_numbers(lines, column, before, now, says):
    row = ROW._replace(loss=None)
    if column == "grad_norm" and before == 1.0 < now:  # rounding has more room there
        now = 1 + 10 * (now - 1)
        says = says.replace("9.0e-06", "9.0e-05")
    rows = {3: row._replace(**{column: before})}
    Comparison(rows).differs(row._replace(ranks=4, **{column: now}))
    assert len(lines) == 1 and says in lines[0], lines


@pytest.mark.parametrize("loss, digests, kind", [(1.005, "1.5", "NOTE"), (1.02, "1.5", "WARNING")])
def test_micro_batches_of_another_size(lines, loss, digests, kind):
    """They may round in another way, in an autocast that no config tells; not so the same ones."""
    for micro_batch, kind_now in ((2, kind), (1, "WARNING")):
        now = ROW._replace(loss=loss, micro_batch=micro_batch)
        assert Comparison({3: ROW}).differs(now)
        assert lines.pop().startswith(f"{kind_now}: step 3,")


def test_dropout_on_the_same_ranks(lines):
    assert Comparison({3: ROW._replace(draws=1)}).differs(ROW._replace(draws=2, loss=2.0))
    assert lines[0].startswith("WARNING: step 3,") and "other random numbers were drawn" in lines[0]


def test_rounding_that_has_grown(lines):
    """In another order it may double with each step; on the same ranks nothing was to grow."""
    steps = {step: ROW._replace(step=step) for step in range(3, 13)}
    for ranks, gap, differs in ((4, 5e-4, False), (4, 5e-3, True), (2, 5e-4, True)):
        comparison = Comparison(steps)
        for step in range(3, 12):
            assert not comparison.differs(steps[step]._replace(ranks=ranks))
        assert comparison.differs(steps[12]._replace(ranks=ranks, loss=1 + gap)) == differs


def test_the_last_samples_of_an_epoch():
    """Seven have one digest, in micro-batches of 4 and 3, or of 2, 2, 2 and 1."""
    samples = torch.arange(35).view(7, 5)
    sums = []
    for micro_batch in (4, 2):
        engine = SimpleNamespace(
            sees_samples=lambda: True, micro_batch=lambda micro=micro_batch: micro
        )
        forward = ForwardPass()
        for part in samples.split(micro_batch):
            Proof.see_inputs(SimpleNamespace(engine=engine), forward, [part, {"labels": part}])
        assert forward.others is None
        sums.append([sum(rows.sum() for rows in forward.digests[n::2]) for n in range(2)])
    assert sums[0] == sums[1]


def test_a_hash_sees_a_sample_and_not_its_place():
    samples = torch.randint(1, 100, (6, 5), generator=torch.Generator().manual_seed(0))
    whole = hashes(samples)
    assert len(set(whole.tolist())) == 6
    assert torch.equal(whole, torch.cat([hashes(part) for part in samples.split(2)]))
    assert torch.equal(whole, hashes(torch.nn.functional.pad(samples, (0, 3))))
    assert not (whole == hashes(samples.flip(1))).any()
    for padding in ((3, 0), (0, 3)):
        mask = torch.nn.functional.pad(torch.ones_like(samples), padding)
        padded = torch.nn.functional.pad(samples, padding, value=7)
        assert torch.equal(whole, hashes(padded, mask))
    assert torch.equal(whole, hashes(torch.nn.functional.pad(samples, (0, 3), value=-100)))


def test_a_hash_of_images():
    """It looks at some places of each, whatever is padded behind them."""
    images = torch.randn(6, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    whole = hashes(images)
    assert len(set(whole.tolist())) == 6
    assert torch.equal(whole, hashes(images.to(memory_format=torch.channels_last)))
    assert torch.equal(whole, hashes(torch.nn.functional.pad(images, (0, 50, 0, 300))))
    for other in (images.roll(1, 3), images.flip(1), images * (1 + 1e-6)):
        assert not (whole == hashes(other)).any()


@pytest.mark.parametrize("dtype", ["bool", "uint8", "float16", "bfloat16", "float64", "complex128"])
def test_a_hash_takes_any_dtype(dtype):
    samples = torch.eye(4).to(getattr(torch, dtype))
    assert len(set(hashes(samples[:, None].expand(4, 2, 4)).tolist())) == 4

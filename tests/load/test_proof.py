"""universal/proof.py: the next steps of a checkpoint are written down, and compared when they are
trained again; a fault after the load is named at its first or second step."""

import json
import re
from pathlib import Path

import lives
import pytest
import torch
import torch.distributed as dist
from proof_engines import FAULTS, KINDS, OF_REPEATS, SAVED, play
from proof_files import STORIES, play_stories
from proof_random import lines_of

from tests.support.ranks import run
from universal.proof import hashes


@pytest.fixture(scope="module")
def first(work):
    """All kinds of engines, saved by 4 ranks, and trained for some steps more."""
    run(work, 4, play, "first", *KINDS)


@pytest.fixture(scope="module")
def lines_on(work, first):
    """lines_on(ranks): {fault: the lines about steps that are trained again}."""

    def again(ranks):
        parts = run(work, ranks, play, "again", *FAULTS).split("== ")[1:]
        return {part.split()[0]: re.findall("^.*trained before.*$", part, re.M) for part in parts}

    return again


@pytest.fixture(scope="module")
def lines_on_5(lines_on):
    """12 micro-batches on 5 ranks: 3 of the 15 places have no weight."""
    return lines_on(5)


@pytest.fixture(scope="module")
def lines_on_4(lines_on):
    return lines_on(4)


@pytest.mark.parametrize("fault", FAULTS)
def test_fault(lines_on_5, fault):
    (line,) = lines_on_5[fault]
    assert FAULTS[fault].says in line
    assert line.startswith("universal: NOTE") == (fault == "dropout_by_rank")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "dropout"])
def test_rounding(lines_on_5, kind):
    (line,) = lines_on_5[kind]
    steps = min(KINDS[kind].steps, 10)
    assert f"steps {SAVED + 1} to {SAVED + steps}, trained before on 4 ranks, now on 5:" in line
    assert float(line.split()[-1]) < {"fp32": 1e-6, "bf16": 1e-2, "fp16": 1e-3}[KINDS[kind].dtype]


def rows_of(work, kind):
    lines = Path(work, kind, "t", "next_steps.csv").read_text().splitlines()
    return [json.loads(f"[{line}]") for line in lines[1:]]


def test_rows(work, first):
    assert [row[0] for row in rows_of(work, "plain")] == list(range(SAVED + 1, SAVED + 11))
    plain = rows_of(work, "plain")[0]
    assert rows_of(work, "evaluated")[0] == rows_of(work, "dictionary")[0] == plain
    assert rows_of(work, "loss_backward")[0] == rows_of(work, "named")[0] == plain
    assert rows_of(work, "share_of_loss")[0][3:] == pytest.approx(plain[3:], rel=1e-6)
    assert rows_of(work, "no_tensor")[0][3] is None


# What each story says, in its order; the others say nothing.
SAYS = {
    "resumed_twice": ["steps 3 to 5, trained before on 2 ranks, now on 2", "steps 3 to 12, "],
    "half_a_row": ["steps 3 to 4, trained before"],
    "another_rate_on_purpose": ["WARNING: step 3, trained before on 2 ranks: the learning rate"],
    "saved_again_under_its_name": ["step 6, trained before"],
    "elastic_save": ["steps 3 to 4, trained before"],
    "mirrored": ["steps 3 to 4, trained before"],
    "full_disk": ["the next steps are not proved: OSError: [Errno 28] No space left on device"],
    "no_folder": ["the next steps are not proved: FileNotFoundError: [Errno 2]"],
    "converted": ["steps 3 to 5, trained before"],
    "deepspeeds_own_loader": ["steps 3 to 5, trained before", "(DeepSpeed's own loader restored"],
    "diverged": ["WARNING: step 3, trained before on 2 ranks: the loss was 0.2185828, and is nan"],
}


@pytest.fixture(scope="module")
def story_lines(work):
    """{story: what is said of its proofs}."""
    (work / "stories").mkdir()
    parts = run(work / "stories", 2, play_stories, *STORIES).split("== ")[1:]
    proofs = "^universal: .*(?:trained before|not proved).*$"
    return {part.split()[0]: re.findall(proofs, part, re.M) for part in parts}


@pytest.mark.parametrize("story", STORIES)
def test_story(story_lines, story):
    says = SAYS.get(story, [])
    assert len(story_lines[story]) == len(says), story_lines[story]
    for line, words in zip(story_lines[story], says, strict=True):
        assert words in line


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


@pytest.mark.parametrize("dtype", ["bool", "uint8", "float16", "bfloat16", "float64", "complex128"])
def test_a_hash_takes_any_dtype(dtype):
    samples = torch.eye(4).to(getattr(torch, dtype))
    assert len(set(hashes(samples[:, None].expand(4, 2, 4)).tolist())) == 4


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 200, 20))
def test_no_false_warning_of_random_engines(tmp_path, start):
    for seed, line in lines_of(range(start, start + 20), tmp_path).items():
        assert "differs by at most" in line, (seed, line)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 110))
def test_no_false_warning_of_random_lives(tmp_path, monkeypatch, seed):
    """Each rank is forked from this process."""

    def write_down(line):
        if dist.get_rank() == 0:
            with open(tmp_path / "said", "a") as file:
                file.write(f"{line}\n")

    monkeypatch.setattr("universal.proof.say", write_down)
    (tmp_path / "life").mkdir()
    lives.play(seed, tmp_path / "life")
    lines = (tmp_path / "said").read_text().splitlines()
    assert lines and all("differs by at most" in line for line in lines), lines


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_on_4_ranks(lines_on_4, fault):
    if fault in OF_REPEATS:
        assert lines_on_4[fault] == []
        return
    (line,) = lines_on_4[fault]
    assert FAULTS[fault].says.replace("dropout follows the rank", "it is the dropout") in line
    assert "NOTE" not in line

"""Random histories of a job that dies in its saves, and three that are told. What must be loaded
after each, the docstring of lives.py says."""

import lives
import pytest

SEEDS = [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 45))]


@pytest.mark.filterwarnings("ignore:.*was saved again under its name")
@pytest.mark.parametrize("seed", SEEDS)
def test_lives(seed, tmp_path):
    lives.play(seed, tmp_path)


@pytest.fixture
def life(tmp_path):
    """life(steps, saves, ...): train so many steps; saves: how many came back before. Returns what
    it loaded, or why it refused."""

    def live(steps, saves, **more):
        plan = dict(
            ranks=2,
            stage=1,
            bf16=False,
            name="checkpoint-{}",
            every=2,
            fatal=None,
            full=False,
            tag=None,
        )
        plan |= dict(steps=steps, saves=saves, folder=str(tmp_path / "c")) | more
        lines, said = lives.play_life(tmp_path, plan)
        found = [
            line for line in lines if "loaded" in line or "refused" in line
        ]  # each rank says it
        return (found[0].get("step"), found[0].get("refused")) if found else None

    return live


def test_the_newer_of_two_sets_under_one_name(life, tmp_path):
    """The older one has more steps and another dtype: somebody went back, and saved under the name
    again."""
    life(2, 0, stage=1)
    life(4, 1, stage=3, bf16=True, name="last")  # step 6
    (tmp_path / "c" / "latest").write_text("checkpoint-2")
    life(2, 3, stage=1, name="last")  # step 4, an hour later
    assert life(0, 4, stage=1)[0] == 4


def test_a_step_that_was_given_up(life, tmp_path):
    """`latest` names a torn save; before it comes the last one that came back, and not one of the
    run given up."""
    life(2, 0)
    life(3, 1, every=5)  # step 5
    (tmp_path / "c" / "latest").write_text("checkpoint-2")
    life(
        4, 2, fatal=3, places={1: [0, 0.5]}
    )  # step 4 comes back; in 6 rank 1 dies, and rank 0 has written `latest`
    assert life(0, 4)[0] == 4


def test_model_states_without_their_shards(life):
    """At ZeRO-3 both ranks die when their model states are written and their shards are those of an
    earlier save."""
    life(2, 0, stage=3, name="last")
    life(2, 1, stage=3, name="last", fatal=1, places={0: [1, 0], 1: [1, 0]})
    assert "a save was killed before its shards" in life(0, 2, stage=3)[1]

"""Random histories of a job that dies in its saves, and two that are told. What must be loaded
after each, the docstring of lives.py says."""

import lives
import pytest
from lives import Place, Plan, play_life

from tests.support.commands import slow


@pytest.mark.filterwarnings("ignore:.*was saved again under its name")
@pytest.mark.parametrize("seed", [0, *map(slow, range(1, 45))])
def test_lives(seed, tmp_path):
    lives.play(seed, tmp_path)


@pytest.fixture
def live(tmp_path):
    """live(steps, saves, ...): train so many steps; saves: how many came back before. Returns what
    was said first of the load: each rank says why it refuses."""

    def live(steps, saves, **options):
        plan = Plan(steps=steps, saves=saves, **options)
        events, _ = play_life(tmp_path, tmp_path / "c", plan)
        return events[0]

    return live


def test_a_step_that_was_given_up(live, tmp_path):
    """`latest` names a torn save; before it comes the last one that came back, and not one of the
    run given up."""
    live(2, 0)
    live(3, 1, every=5)  # step 5
    (tmp_path / "c" / "latest").write_text("checkpoint-2")
    # Step 4 comes back; in 6 rank 1 dies, and rank 0 has written `latest`.
    live(4, 2, fatal=3, places={1: Place(0, 0.5)})
    assert live(0, 4)["step"] == 4


def test_model_states_without_their_shards(live):
    """At ZeRO-3 both ranks die when their model states are written and their shards are those of an
    earlier save."""
    live(2, 0, stage=3, name="last")
    live(2, 1, stage=3, name="last", fatal=1, places={0: Place(1, 0), 1: Place(1, 0)})
    assert "a save was killed before its shards" in live(0, 2, stage=3)["refused"]

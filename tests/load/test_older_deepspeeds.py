"""Older DeepSpeeds: `make versions` (demos/versions.py) measures all of them; here its table, and the oldest."""

from helpers import ROOT, content

from demos import versions

OURS = "universal.py, 4 to 3"
OLDEST = versions.OLD[0]


def test_the_page_has_the_table_as_it_was_measured():
    """`...` stands for some of its lines."""
    header, *rows = (ROOT / "assets" / "versions.txt").read_text().split("\n\n")[0].splitlines()
    shown = (ROOT / "docs" / "troubleshooting.md").read_text().split(header)[1].split("```")[0].split("\n")[1:-1]
    assert {rows[0], rows[-1]} <= {*shown} <= {*rows, "..."}


def test_the_oldest(tmp_path):
    """Under it 3 ranks load what 4 have saved, and save it again: the same bits, unless nothing was loaded. Losses are
    not compared here: this DeepSpeed loses gradients now and then (#8382)."""
    jobs = []
    for stage in versions.STAGES:
        jobs.append(versions.job("saved", stage, 4, tmp_path, save=f"zero{stage}"))
        jobs.append(versions.job(OURS, stage, 3, tmp_path, load=f"zero{stage}", how="ours", save=f"again{stage}"))
    jobs.append(versions.job(versions.NOTHING, 1, 4, tmp_path, save="nothing", seed=2))
    results = versions.run(OLDEST, jobs, tmp_path / "log")
    assert not [result for result in results.values() if "error" in result]

    def parameters(tag):
        versions.convert(tmp_path / tag, tmp_path / "universal" / tag, old=False)
        zero = tmp_path / "universal" / tag / "zero"
        return {folder.name: content(folder) for folder in zero.iterdir() if folder.is_dir()}

    for stage in versions.STAGES:
        assert parameters(f"zero{stage}") == parameters(f"again{stage}")
    assert parameters("zero1").keys() == parameters("nothing").keys()
    assert parameters("zero1") != parameters("nothing")

"""ds_to_universal.py with many ranks, on shards of few bytes: what it opens, what it keeps in memory, in what order."""

import gc
import itertools
import pickle
import random
import resource
import subprocess
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import command, content, edit, scramble

import ds_to_universal
from benchmarks.convert import lay_out
from ds_to_universal import Ranges, Strided, convert

RANKS, SHAPES = 48, [OrderedDict((f"layer{i}.weight", torch.Size((7, 11 + i))) for i in range(40))]


@pytest.fixture
def tmp_path(in_memory):
    return in_memory


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    folder = tmp_path_factory.mktemp("many") / "c"
    lay_out(folder, SHAPES, RANKS, 3)
    edit(folder, "*_optim_*", scramble)
    convert(folder, folder.with_name("wanted"))
    return folder


def test_small_pieces_are_right(many):
    """Every element against the shards, which torch reads and this test puts together by itself."""
    shards = [torch.load(many / f"bf16_zero_pp_rank_{r}_mp_rank_00_optim_states.pt", weights_only=False)
              ["optimizer_state_dict"] for r in range(RANKS)]  # fmt: skip
    for state in ("fp32", "exp_avg"):
        moments = [s["optimizer_state_dict"]["state"][0] for s in shards]
        flats = [s["fp32_flat_groups"][0] for s in shards] if state == "fp32" else [m[state] for m in moments]
        at = 0
        for name, shape in SHAPES[0].items():
            share = -(-shape.numel() // RANKS)
            wanted = torch.cat([flat[at : at + share] for flat in flats])[: shape.numel()].view(shape)
            got = torch.load(many.with_name("wanted") / "zero" / name / f"{state}.pt", weights_only=False)["param"]
            assert torch.equal(got, wanted)
            at += share


def test_few_open_files(many, tmp_path):
    """`ulimit -n 64` is enough, whatever the number of shards."""
    limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))  # noqa: E731
    subprocess.run(command(many, tmp_path / "u"), check=True, preexec_fn=limit, timeout=60)
    assert content(tmp_path / "u") == content(many.with_name("wanted"))


@pytest.mark.parametrize("room", [1 << 14, 8])
def test_opens(many, tmp_path, monkeypatch, room):
    """A shard is opened to be understood, and once to be read; where few may be open, once for each batch of files."""
    count, opens = itertools.count(), ds_to_universal.open_shard
    monkeypatch.setattr(ds_to_universal, "open_shard", lambda path: (next(count), opens(path))[1])
    monkeypatch.setattr(ds_to_universal, "most_files", lambda: room)
    convert(many, tmp_path / "u")
    assert next(count) <= RANKS * (3 if room > RANKS else 8) + 2
    assert content(tmp_path / "u") == content(many.with_name("wanted"))


def test_open_files_are_counted(many, tmp_path, monkeypatch):
    """Also while one thread closes them, and the others go on."""
    now = most = 0

    class Slow(ds_to_universal.Shard):
        def __init__(self, *how, **options):
            nonlocal now, most
            super().__init__(*how, **options)
            now, most = now + 1, max(most, now + 1)

        def __del__(self):
            nonlocal now
            time.sleep(0.001)
            super().__del__()
            now -= 1

    monkeypatch.setattr(ds_to_universal, "Shard", Slow)
    monkeypatch.setattr(ds_to_universal, "most_files", lambda: 8)
    convert(many, tmp_path / "u", num_extract_workers=2, num_merge_workers=2)
    assert now == 0 and 8 <= most <= 8 + 4


def test_description_is_small(many):
    """A piece takes less than 64 bytes on its way to another process, and arrives as it was."""
    shards = ds_to_universal.find_shards(many)[0]
    with ThreadPoolExecutor(2) as pool:
        model, optimizer, parameters = ds_to_universal.read_data_parallel(many, 0, shards, pool, False, True)
    again = pickle.loads(data := pickle.dumps(parameters))
    pieces = sum(len(p.records) for parameter in parameters.values() for _, p in parameter["states"].values())
    assert pieces == 40 * 3 * RANKS and len(data) < 64 * pieces
    for name, parameter in parameters.items():
        for state, (_, ranges) in parameter["states"].items():
            other = again[name]["states"][state][1]
            assert [(r.path, r.offset, s, n) for r, s, n in ranges] == [(r.path, r.offset, s, n) for r, s, n in other]
    assert pickle.loads(pickle.dumps((model, optimizer)))[0]["param_shapes"] == model["param_shapes"]


def test_rows_are_kept_as_steps():
    """50,000 rows on two ranks: two segments, not 100,000 pieces."""
    sections, end = ds_to_universal.stripes(ds_to_universal.blocks_along(1, (50_000, 8), [[3, 5]]))
    assert end == 400_000 and [(s["count"], len(s["segments"])) for s in sections] == [(50_000, 2)]


def test_stripes_against_rows():
    """Random tensors, cut along any dimension in several parts of any widths: the same bytes as by hand."""
    rng = random.Random(3)
    for _ in range(150):
        dims, parts, ranks = rng.randint(1, 4), rng.randint(1, 3), rng.randint(1, 4)
        size, dim = [rng.randint(1, 4) for _ in range(dims)], rng.randrange(dims)
        widths = [[rng.randint(0, 3) for _ in range(ranks)] for _ in range(parts)]
        size[dim] = sum(map(sum, widths))
        full = torch.arange(torch.Size(size).numel(), dtype=torch.int32).view(size)
        cuts = full.split([width for sub in widths for width in sub], dim)
        shards = [torch.cat(cuts[rank::ranks], dim).flatten().numpy().tobytes() for rank in range(ranks)]
        sections, end = ds_to_universal.stripes(ds_to_universal.blocks_along(dim, size, widths))
        assert end == full.numel()
        ranges = [Ranges([(shard, 0, len(shard))]) for shard in shards]
        whole = Strided([(s["count"], [(ranges[r], 4 * at, 4 * step, 4 * n) for r, at, step, n in s["segments"]])
                         for s in sections])  # fmt: skip
        wanted = full.flatten().numpy().tobytes()
        assert ds_to_universal.joined(whole) == wanted
        assert ds_to_universal.joined(ds_to_universal.rows_together(whole)) == wanted
        start = rng.randint(0, len(wanted))
        nbytes = rng.randint(0, len(wanted) - start)
        assert ds_to_universal.joined(whole.cut(start, nbytes)) == wanted[start : start + nbytes]


def test_garbage_collector_rests(many, tmp_path, monkeypatch):
    seen, write = [], ds_to_universal.write
    monkeypatch.setattr(ds_to_universal, "write", lambda *a: (seen.append(gc.isenabled()), write(*a))[1])
    convert(many, tmp_path / "u")
    assert seen and not any(seen) and gc.isenabled()

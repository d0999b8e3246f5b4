"""ds_to_universal.py with many ranks, on shards of few bytes: what it opens, what it keeps in memory, in what order."""

import os
import pickle
import random
import resource
import subprocess
import threading
import time
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from helpers import ROOT, command, content, edit, scramble

from benchmarks.convert import lay_out
from universal import CheckpointError, convert
from universal.checkpoint import describe
from universal.torch_file import Joined, Slices, cut_along, pickled

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


def test_opens(many, tmp_path):
    """A shard is opened to be understood, and once to be read, as long as so many may be open."""
    opened = tmp_path / "opened"
    script = f"""import sys; sys.path.insert(0, {str(ROOT)!r}); import ds_to_universal; count = [0]
def hook(event, arguments):
    count[0] += event == "open" and str(arguments[0]).endswith("_states.pt") and arguments[1] == "r"
sys.addaudithook(hook)
ds_to_universal.main()
open({str(opened)!r}, "w").write(str(count[0]))"""
    words = command(many, tmp_path / "u")
    subprocess.run([words[0], "-c", script, *words[2:]], check=True, timeout=60)
    assert 2 * RANKS <= int(opened.read_text()) <= 3 * RANKS + 2
    assert content(tmp_path / "u") == content(many.with_name("wanted"))


def test_open_files(many, tmp_path):
    """Whatever the number of shards, no more are open than half of what the system permits; the cache lets go of a
    file in one thread while another one reads it."""
    limits, seen, stop = resource.getrlimit(resource.RLIMIT_NOFILE), [], threading.Event()

    def look():
        while not stop.wait(0.0005):
            names = map(name_of, os.listdir("/proc/self/fd"))
            seen.append(sum(name.endswith("_optim_states.pt") for name in names))

    watch, limit = threading.Thread(target=look), 2 * len(os.listdir("/proc/self/fd")) + 32
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limits[1]))
        watch.start()
        convert(many, tmp_path / "u", num_extract_workers=2, num_merge_workers=4)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        stop.set()
        watch.join()
    assert limit < 2 * RANKS and 0 < max(seen) <= limit // 2 + 4
    assert content(tmp_path / "u") == content(many.with_name("wanted"))


def name_of(descriptor):
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:  # closed while it was looked at
        return ""


def test_description_is_small(many):
    """It takes no more room for its pieces than for its flat tensors, a record for each rank and state, arrives in
    another process as it was, and holds no data."""
    description = describe(many)
    small = description._replace(models=[], optimizer={})
    data = pickle.dumps(small, pickle.HIGHEST_PROTOCOL)
    again = pickle.loads(data)
    assert len(data) < 100 * 3 * RANKS + 200 * 3 * len(SHAPES[0])
    assert again == small
    for name, parameter in description.parameters.items():
        for state, slices in parameter.states.items():
            assert list(again.parameters[name].states[state].cut()) == list(slices.cut())
    whole = pickle.loads(pickle.dumps(description))  # objects that are but names, too
    assert whole.models[0]["param_shapes"] == description.models[0]["param_shapes"]
    assert pickled(whole.optimizer)[0] == pickled(description.optimizer)[0]


def test_formula():
    """Random parameters on random ranks, at ZeRO 1 and 3: the pieces are those that slicing gives."""
    rng = random.Random(7)
    for _ in range(2000):
        ranks, numels = rng.randint(1, 7), [rng.randint(0, 40) for _ in range(rng.randint(1, 6))]
        wholes = [[100 * i + k for k in range(n)] for i, n in enumerate(numels)]
        size = -(-sum(numels) // ranks) or 1
        end_to_end = [x for whole in wholes for x in whole]
        one, three = [end_to_end[rank * size : (rank + 1) * size] for rank in range(ranks)], [[] for _ in range(ranks)]
        origin = base = 0
        for i, n in enumerate(numels):
            share = -(-n // ranks)
            for rank in range(ranks):
                part = wholes[i][rank * share : (rank + 1) * share]
                three[rank] += part + [None] * (share - len(part))
            for flats, place in ((one, (origin, size, 0, n)), (three, (0, share, base, n))):
                formula = Slices("uint8", tuple(range(ranks)), (0,) * ranks, *place)
                start = rng.randint(0, n)
                for first, numel in ((0, n), (start, rng.randint(0, n - start))):
                    pieces = formula.cut(first, numel)
                    got = [x for rank, at, nbytes in pieces for x in flats[rank][at : at + nbytes]]
                    assert got == wholes[i][first : first + numel], place
            origin, base = origin + n, base + share


class Bytes(NamedTuple):
    """A part in memory, as Slices are one in files."""

    data: bytes
    dtype: str = "int32"

    def cut(self, start=0, numel=None):
        numel = len(self.data) // 4 - start if numel is None else numel
        return [(self.data, 4 * start, 4 * numel)] if numel else []


class FromMemory:
    def read_into(self, buffer, data, start):
        buffer[:] = data[start : start + len(buffer)]

    def read(self, data, start, nbytes):
        return data[start : start + nbytes]


def test_joined_against_rows():
    """Random tensors, cut along any dimension in several parts of any widths: the same bytes as by hand."""
    rng = random.Random(3)
    for _ in range(150):
        dims, parts, ranks = rng.randint(1, 4), rng.randint(1, 3), rng.randint(1, 4)
        size, dim = [rng.randint(1, 4) for _ in range(dims)], rng.randrange(dims)
        widths = [[rng.randint(0, 3) for _ in range(ranks)] for _ in range(parts)]
        size[dim] = sum(map(sum, widths))
        full = torch.arange(torch.Size(size).numel(), dtype=torch.int32).view(size)
        cuts = full.split([width for sub in widths for width in sub], dim)
        shards = tuple(Bytes(torch.cat(cuts[rank::ranks], dim).flatten().numpy().tobytes()) for rank in range(ranks))
        joined = Joined("x", shards, cut_along(dim, size, widths), full.numel())
        wanted = full.flatten().numpy().tobytes()
        assert b"".join(bytes(chunk) for chunk, _ in joined.chunks(FromMemory())) == wanted
        if torch.Size(joined.blocks[-1][1]).numel():
            with pytest.raises(CheckpointError, match="do not cover its elements exactly once"):
                wrong = joined._replace(blocks=joined.blocks[:-1])
                b"".join(bytes(chunk) for chunk, _ in wrong.chunks(FromMemory()))


def test_many_rows(tmp_path):
    """50,000 rows on two ranks are joined in seconds, and in the memory of some chunks."""
    rows = torch.arange(400_000, dtype=torch.int32).view(50_000, 8)
    shards = tuple(Bytes(part.flatten().contiguous().numpy().tobytes()) for part in rows.split([3, 5], 1))
    joined = Joined("x", shards, cut_along(1, (50_000, 8), [[3, 5]]), 400_000)
    began = time.process_time()
    assert b"".join(bytes(chunk) for chunk, _ in joined.chunks(FromMemory())) == rows.numpy().tobytes()
    assert time.process_time() - began < 5

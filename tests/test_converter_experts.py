"""ds_to_universal.py on mixtures of experts that DeepSpeed's AutoEP spread over the ranks, against DeepSpeed's own
converter. Run as a script, on every rank, this file trains them: test_converter_experts.py EXPERT_PARTS CONFIG."""

import json
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

STAGES = (1, 2, 3)
NO_WARNING = "error:.*names no row-parallel weights:UserWarning"  # experts are all that this info is about


class Block(nn.Module):
    """What AutoEP knows as a layer of Mixtral: a router called gate, and experts as three-dimensional weights."""

    def __init__(self, experts, width, inner):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), nn.Module()
        self.mlp.gate, self.mlp.experts = nn.Linear(width, experts, bias=False), nn.Module()
        self.mlp.experts.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * inner, width) / 9)
        self.mlp.experts.down_proj = nn.Parameter(torch.randn(experts, width, inner) / 9)

    def forward(self, x):
        out = self.mlp(self.norm(x))
        return x + (out[0] if isinstance(out, tuple) else out)


class Mixture(nn.Module):
    def __init__(self, experts=4, width=8, inner=3, layers=2):
        super().__init__()
        self.config = SimpleNamespace(model_type="mixtral", num_local_experts=experts, num_experts_per_tok=2)
        self.model, self.head = nn.Module(), nn.Linear(width, 3)
        self.model.layers = nn.ModuleList(Block(experts, width, inner) for _ in range(layers))

    def forward(self, x):
        for layer in self.model.layers:
            x = layer(x)
        return self.head(x).float().pow(2).mean()


def train(parts, extra):
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it compiles one for a minute
    deepspeed.init_distributed("gloo")
    for stage in STAGES:
        torch.manual_seed(stage)
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage},
            "expert_parallel": {
                "enabled": True, "autoep_size": parts, "preset_model": "mixtral", "use_grouped_mm": False
            },
        }  # fmt: skip
        model = Mixture()
        engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config | extra)
        for _ in range(2):
            engine.backward(engine(torch.randn(2, 9, 8, dtype=torch.bfloat16) * (1 + engine.global_rank)))
            engine.step()
        engine.save_checkpoint(".", tag=f"stage{stage}")


if __name__ == "__main__":
    train(int(sys.argv[1]), json.loads(sys.argv[2]))
    sys.exit()

from conftest import convert_with_deepspeed  # noqa: E402

from ds_to_universal import CheckpointError, convert  # noqa: E402
from harness.ranks import run  # noqa: E402

CASES = {"2-in-2": (2, 2, {}), "4-in-2": (4, 2, {}), "4-in-4": (4, 4, {}), "2-in-1": (2, 1, {})}
CASES["4-in-2-neighbours"] = (4, 2, {"use_data_before_expert_parallelism": True})


def load(path):
    return torch.load(path, weights_only=False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder with a checkpoint of every stage, of a case."""
    folders = {}

    def of(case):
        if case not in folders:
            folders[case] = tmp_path_factory.mktemp(case)
            ranks, parts, extra = CASES[case]
            run(folders[case], ranks, "tests/test_converter_experts.py", parts, json.dumps(extra))
        return folders[case]

    return of


# Each stage, and the two ways to spread the experts over the ranks; the other combinations are slow.
QUICK = [("4-in-2", 1), ("4-in-2", 2), ("4-in-2", 3), ("4-in-2-neighbours", 3)]
SLOW = [(case, stage) for case in CASES for stage in STAGES if (case, stage) not in QUICK]


@pytest.mark.filterwarnings(NO_WARNING)
@pytest.mark.parametrize("case, stage", [*QUICK, *(pytest.param(*more, marks=pytest.mark.slow) for more in SLOW)])
def test_bit_equal_to_deepspeed(trained, tmp_path, case, stage):
    source, theirs, ours = trained(case) / f"stage{stage}", tmp_path / "theirs", tmp_path / "ours"
    convert_with_deepspeed(source, theirs)
    convert(source, ours, check=True)
    model = load(ours / "mp_rank_00_model_states.pt")
    names = {name for group in model["param_shapes"] for name in group}
    assert {path.parent.name for path in (ours / "zero").rglob("fp32.pt")} == names and model["module"] == {}
    seen = 0
    for path in sorted((theirs / "zero").rglob("*.pt")):
        if path.name == "optimizer_state.pt" or ".mlp.gate." in str(path):  # the router, under its second name
            continue
        wanted, got = load(path), load(ours / path.relative_to(theirs))
        if path.name == "step.pt":
            assert torch.equal(got, wanted) and got.item() == 2
            continue
        if not isinstance(wanted, dict):  # ZeRO-3, without a shape
            wanted = {"param": wanted.view(got["param"].shape), "cat_dim": 0}
        a, b = got.pop("param"), wanted.pop("param")
        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))
        assert got == wanted and ("ep_num_experts" in got) == (".experts." in str(path))
        seen += 1
    assert seen == 3 * len(names)


@pytest.mark.filterwarnings(NO_WARNING)
def test_every_expert_is_in_its_place(trained, tmp_path):
    source = trained("4-in-2") / "stage1"
    convert(source, tmp_path / "ours")
    files = sorted(source.glob("layer_*_expert_*_model_states.pt"))
    assert len(files) == 8
    for path in files:
        for key, weight in load(path).items():  # ...experts.w1.3, in bf16
            name, _, expert = key.rpartition(".")
            whole = load(tmp_path / "ours" / "zero" / name / "fp32.pt")["param"]
            assert torch.equal(whole[int(expert)].bfloat16(), weight)


def edited(source, folder, pattern, change):
    shutil.copytree(source, folder)
    for path in folder.glob(pattern):
        content = load(path)
        change(content)
        torch.save(content, path)
    return folder


def layers(change):
    return lambda state: [change(layer) for layer in state["ds_autoep_layers"]]


REFUSED = {
    "experts that are not AutoEP's": (1, "mp_rank*", lambda state: state.update(ds_autoep_layers=None)),
    "not spread evenly": (1, "mp_rank*", layers(lambda layer: layer["expert_placement"]["ranks"][0].update(
        experts=[1, 0]))),
    "not spread evenly ": (1, "mp_rank*", layers(lambda layer: layer.update(num_local_experts=3))),
    "3 parts": (1, "mp_rank*", layers(lambda layer: layer.update(
        num_experts=6, ep_size=3, expert_placement=None))),
    "should not hold part": (3, "zero_pp_rank_1_*model*", layers(lambda layer: layer.update(ep_rank=0))),
    "cut for the ranks": (3, "*optim*", lambda state: state["optimizer_state_dict"]["ds_zero_partition_groups"][
        1].update(partition_ranks=[0, 3])),
    "is cut for 2 ranks and not for 4": (1, "*optim*", lambda state: state["optimizer_state_dict"].update(
        partition_count=[2, 4])),
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_refuses(trained, tmp_path, words):
    stage, pattern, change = REFUSED[words]
    source = edited(trained("4-in-2") / f"stage{stage}", tmp_path / "source", pattern, change)
    with pytest.raises(CheckpointError, match=words.strip()):
        convert(source, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()

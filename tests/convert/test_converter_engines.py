"""ds_to_universal.py on what odd engines save: tensors that are neither parameter nor buffer, a buffer under two names,
every kind of storage, shards without padding. Run as a script, on every rank, this file trains them."""

import sys

import pytest
import torch
from torch import nn


class Extra(nn.Module):
    """get_extra_state() as TransformerEngine has it."""

    def __init__(self):
        super().__init__()
        self.scale = torch.zeros(3)

    def get_extra_state(self):
        return self.scale

    def set_extra_state(self, state):
        self.scale = state


class Odd(nn.Module):
    def __init__(self, stage):
        super().__init__()
        self.first, self.second, self.norm, self.extra = nn.Linear(8, 7), nn.Linear(7, 3), nn.BatchNorm1d(7), Extra()
        self.again = self.norm  # its buffers have two names
        self.frozen = nn.Parameter(torch.rand(5), requires_grad=False)
        self.empty = nn.ParameterList(nn.Parameter(torch.zeros(0, 4)) for _ in range(2 * (stage < 3)))  # 3 has none
        for name, dtype in KINDS.items():
            self.register_buffer(name, torch.arange(6.0).to(dtype))
        self._register_state_dict_hook(lambda module, state, *_: state.update({"first.SCB": torch.arange(7.0) + 1}))

    def forward(self, x):
        self.extra.scale = self.extra.scale + 1
        return (
            self.second(self.norm(self.first(x))).pow(2).mean() + self.frozen.sum() + sum(p.sum() for p in self.empty)
        )


KINDS = {"complex": torch.complex64, "double_complex": torch.complex128, "float8": torch.float8_e4m3fn}
KINDS |= {"uint16": torch.uint16, "uint32": torch.uint32, "uint64": torch.uint64, "halves": torch.float16}
STAGES = {"1": {"stage": 1}, "2": {"stage": 2}, "3": {"stage": 3}}
STAGES |= {f"elastic {stage}": {"stage": stage, "elastic_checkpoint": True} for stage in (1, 2)}


def train():
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it compiles one for a minute
    deepspeed.init_distributed("gloo")
    for tag, zero in STAGES.items():
        torch.manual_seed(1)
        model = Odd(zero["stage"])
        groups = [{"params": [p for p in model.parameters() if p.requires_grad and (p.dim() > 1) == matrix]}
                  for matrix in (True, False)]  # fmt: skip
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero,
                  "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}}  # fmt: skip
        engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
        for step in range(2):
            engine.backward(engine(torch.randn(2, 8, generator=torch.Generator().manual_seed(step))))
            engine.step()
        client = {"masks": [torch.eye(3).to_sparse(), torch.tensor([1, 2], dtype=torch.uint32)]}
        engine.save_checkpoint(".", tag=tag, client_state=client)
        names = dict(model.named_parameters())
        weights = {name: safe_get_full_fp32_param(p) for name, p in names.items() if p.requires_grad and p.numel()}
        with deepspeed.zero.GatheredParameters(list(names.values()), enabled=zero["stage"] == 3):
            frozen = model.frozen.detach().clone()
        if engine.global_rank == 0:
            kept = {"frozen": frozen, "extra._extra_state": model.extra.scale, "first.SCB": torch.arange(7.0) + 1}
            kept |= dict(model.named_buffers(remove_duplicate=False))
            torch.save({"weights": weights, "kept": kept}, f"truth {tag}.pt")


if __name__ == "__main__":
    train()
    sys.exit()

from helpers import content, load, same_bits  # noqa: E402

from harness.ranks import run  # noqa: E402
from universal import convert  # noqa: E402
from universal.checkpoint import describe  # noqa: E402


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engines")
    run(folder, 3, "tests/convert/test_converter_engines.py")
    for tag in STAGES:
        convert(folder / tag, folder / f"u {tag}", check=True)
    return folder


def filled(module):
    """Without what has no elements: which of those belongs to a group, or is another's second name, is arbitrary."""
    return module.keys() - {"empty.0", "empty.1"}


@pytest.mark.parametrize("tag", STAGES)
def test_everything_is_there(trained, tag):
    """Every weight; and of the module all that is no weight, under each of its names, in its own dtype."""
    truth, output = load(trained / f"truth {tag}.pt"), trained / f"u {tag}"
    model = load(output / "mp_rank_00_model_states.pt")
    assert len(truth["weights"]) == 6 and len(truth["kept"]) == 3 + 6 + len(KINDS)
    for name, wanted in truth["weights"].items():
        assert same_bits(load(output / "zero" / name / "fp32.pt")["param"], wanted), name
        assert load(output / "zero" / name / "step.pt") == 2
    assert filled(model["module"]) == truth["kept"].keys()
    for name, wanted in truth["kept"].items():
        assert same_bits(model["module"][name], wanted), name
    assert torch.equal(model["masks"][0].to_dense(), torch.eye(3)) and model["masks"][1].dtype == torch.uint32


@pytest.mark.parametrize("stage", ["1", "2"])
def test_without_padding(trained, stage):
    """elastic_checkpoint: true leaves out padding and hyper-parameters, and nothing else."""
    rigid, elastic = (content(trained / f"u {tag}" / "zero") for tag in (stage, f"elastic {stage}"))
    groups = load(trained / f"u elastic {stage}" / "zero" / "optimizer_state.pt")["param_groups"]
    assert groups == [{"params": [0]}, {"params": [1]}]
    del rigid["optimizer_state.pt"], elastic["optimizer_state.pt"]
    assert rigid and rigid == elastic


@pytest.mark.parametrize("tag", STAGES)
@pytest.mark.parametrize("universal", [False, True])
def test_description(trained, tag, universal):
    """The same of a ZeRO checkpoint and of the universal one that it becomes."""
    truth, found = load(trained / f"truth {tag}.pt"), describe(trained / (f"u {tag}" if universal else tag))
    assert filled(found.kept) == truth["kept"].keys() and not found.extra and not found.uneven
    for name, tensor in found.kept.items():
        if name in truth["kept"]:
            assert getattr(torch, tensor.dtype) == truth["kept"][name].dtype
            assert tuple(tensor.size) == tuple(truth["kept"][name].shape)
    for name, weight in truth["weights"].items():
        parameter = found.parameters[name]
        assert parameter.shape == tuple(weight.shape) and parameter.group == (weight.dim() == 1)
        assert list(parameter.states) == ["fp32", "exp_avg", "exp_avg_sq"]
        assert [name in names for names in found.flats] == [weight.dim() > 1, weight.dim() == 1]
        assert parameter.scalars.keys() == {"step"} and parameter.scalars["step"].value == 2
    # At ZeRO-1 DeepSpeed does not say which parameters are frozen.
    assert [name for name in found.frozen if "empty" not in name] == ["frozen"] * (tag[-1] != "1")
    assert found.universal is universal and found.pipeline == found.tensor == 1
    assert (found.stage, found.ranks) == ((None, None) if universal else (int(tag[-1]), 3))
    assert len(found.param_groups) == 2 and not [problem for problem in found.problems if problem.fatal]

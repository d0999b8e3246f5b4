"""What DeepSpeed loses when it loads a universal checkpoint, and train.py mends. Each test runs train.py twice: as it
is, and with the line of the mend taken out, which must be seen."""

import os
import re
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, compare, run
from deepspeed.checkpoint import ds_to_universal as deepspeed_converter

import ds_to_universal
import model

COMMON = ("--n_embd", 32, "--seq_len", 16, "--train_batch_size", 24, "--train_micro_batch_size_per_gpu", 6)
COMMON = (*COMMON, "--steps", 40, "--warmup_steps", 10)
RESUME = ("--resume", "--universal_checkpoint", "--checkpoint_interval", 1000)


def convert_with_deepspeed(folder, output):
    """DeepSpeed's own converter, in this process."""
    options = dict(num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True)
    options |= dict(inject_missing_state=True, input_folder=str(folder), output_folder=str(output))
    deepspeed_converter.main(SimpleNamespace(**options))


def without(work, *patterns):
    """A copy of train.py in which the lines that match are `pass`."""
    source = (ROOT / "train.py").read_text()
    for pattern in patterns:
        source, count = re.subn(pattern, "pass", source)
        assert count == 1, f"{pattern} matches {count} times in train.py"
    name = work / f"train_without_{abs(hash(patterns))}.py"
    name.write_text(source)
    return name


HYPER_PARAMETERS = r"group\.update\(.*\)"
STEP_COUNT = r'state\["step"\] = state\["step"\]\.clone\(\)'
STEP_CHECK = r"assert counts == .*"
FROZEN = r"module\.load_state_dict\(.*\)"


@pytest.fixture(scope="session")
def stage3(work):
    """ZeRO-3, 40 steps on 4 ranks, step 20 converted by DeepSpeed's converter and by ours."""
    common = (*COMMON, "--zero_stage", 3, "--checkpoint_dir", "mends")
    run(work, 4, "train.py", *common, "--run_name", "mends", "--checkpoint_interval", 20)
    convert_with_deepspeed(work / "mends" / "global_step20", work / "mends" / "by_deepspeed")
    ds_to_universal.convert(work / "mends" / "global_step20", work / "mends" / "by_us")
    return common


def largest(work, common, script, name, tag, **options):
    run(work, 4, script, *common, *RESUME, "--checkpoint_tag", tag, "--run_name", name, **options)
    return max(compare(work, "mends", name).values())


def test_hyper_parameters_of_every_group(work, stage3):
    """X1: ZeRO-3 gives every group the weight decay of the first."""
    assert largest(work, stage3, "train.py", "x1", "by_deepspeed") == 0.0
    broken = without(work, HYPER_PARAMETERS)
    assert largest(work, stage3, broken, "x1_lost", "by_deepspeed") > 1e-5
    # Our converter's folder leaves the loader nothing to get wrong.
    assert largest(work, stage3, broken, "x1_ours", "by_us") == 0.0


def test_step_count_of_every_group(work, stage3):
    """X2: ZeRO-3 lets all groups count in one tensor. Within two steps the count is wrong, and the loss with it."""
    assert largest(work, stage3, "train.py", "x2", "by_us") == 0.0
    assert largest(work, stage3, without(work, STEP_COUNT), "x2_lost", "by_us") > 1e-5


def frozen_and_buffer(seed):
    """A GPT with a frozen layer that comes from elsewhere and a buffer that training moves."""

    def patch():
        class Variant(model.GPT):
            def __init__(self, **shape):
                super().__init__(**shape)
                torch.nn.init.normal_(self.wpe.weight, generator=torch.Generator().manual_seed(seed))
                self.wpe.weight.requires_grad_(False)
                self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

            def forward(self, *args, **options):
                self.calls += self.training
                return super().forward(*args, **options) * (1 + 0.01 * self.calls)

        model.GPT = Variant

    return patch


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_frozen_parameters_and_buffers(work, stage):
    """X3: at no stage does the loader restore them. The resumed run starts from other values."""
    name = f"x3_{stage}"
    common = (*COMMON, "--zero_stage", stage, "--checkpoint_dir", name)
    run(work, 4, "train.py", *common, "--run_name", name, "--checkpoint_interval", 20, patch=frozen_and_buffer(1))
    ds_to_universal.convert(work / name / "global_step20", work / name / "global_step20_universal")
    out = run(work, 4, "train.py", *common, *RESUME, "--run_name", f"{name}_uc", patch=frozen_and_buffer(2))
    assert "1 frozen parameters, 1 buffers" in out
    for column in ("loss", "val_loss"):
        assert set(compare(work, name, f"{name}_uc", column).values()) == {0.0}
    run(work, 4, without(work, FROZEN), *common, *RESUME, "--run_name", f"{name}_lost", patch=frozen_and_buffer(2))
    assert max(compare(work, name, f"{name}_lost").values()) > 1e-2


def test_lost_step_count_is_refused(work, stage3):
    """The step count of the optimizer is checked against the checkpoint's, so a loader that loses it is caught."""

    def patch():
        import deepspeed

        load = deepspeed.DeepSpeedEngine.load_checkpoint

        def forgetful(self, *args, **options):
            result = load(self, *args, **options)
            for state in self.optimizer.optimizer.state.values():
                state["step"] = torch.tensor(0.0)
            return result

        deepspeed.DeepSpeedEngine.load_checkpoint = forgetful

    with pytest.raises(AssertionError, match=r"optimizer at \{0\}, checkpoint at 20"):
        largest(work, stage3, "train.py", "forgetful", "by_us", patch=patch)
    assert not os.path.exists(work / "logs" / "forgetful.csv")

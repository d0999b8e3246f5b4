"""--exact: the same bits at any number of ranks and any ZeRO stage. 24 sequences a step, 8 or 12 micro-batches."""

import pytest
import torch
from conftest import compare, launch, run

import ds_to_universal
import train

SHAPE = ("--n_layer", 2, "--n_head", 2, "--n_embd", 36, "--seq_len", 16)
COMMON = (*SHAPE, "--train_batch_size", 24, "--train_micro_batch_size_per_gpu", 3, "--steps", 16, "--warmup_steps", 4)
COMMON += ("--eval_interval", 4, "--checkpoint_interval", 4)
COLUMNS = ("loss", "val_loss", "grad_norm")


def differences(work, baseline, run_name):
    return {gap for column in COLUMNS for gap in compare(work, baseline, run_name, column).values()}


@pytest.fixture(scope="module")
def one_rank(work):
    run(work, 1, "train.py", *COMMON, "--exact", "--run_name", "exact_1", "--checkpoint_dir", "exact_1")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_chain(work, one_rank, stage):
    """From 4 ranks to 2 to 8 to 1, every 4 steps, with clipping and dropout, in partitions of odd sizes."""
    name, folder = f"exact_chain{stage}", work / f"exact_chain{stage}"
    common = (*COMMON, "--exact", "--zero_stage", stage, "--run_name", name, "--checkpoint_dir", name)
    for done, ranks in ((0, 4), (4, 2), (8, 8), (12, 1)):
        resume = ("--resume", "--universal_checkpoint") if done else ()
        run(work, ranks, "train.py", *common, *resume)
        tag = f"global_step{done + 4}"
        ds_to_universal.convert(folder / tag, folder / f"{tag}_universal")
    assert len(compare(work, "exact_1", name)) == 16
    assert differences(work, "exact_1", name) == {0.0}


@pytest.mark.parametrize(("ranks", "stage"), [(2, 2), (8, 3)])
def test_from_scratch(work, one_rank, ranks, stage):
    name = f"exact_{ranks}_{stage}"
    run(
        work, ranks, "train.py", *COMMON, "--exact", "--zero_stage", stage, "--run_name", name, "--checkpoint_dir", name
    )
    assert differences(work, "exact_1", name) == {0.0}


def test_ranks_that_are_no_power_of_two(work):
    twelve = (*COMMON, "--exact", "--train_micro_batch_size_per_gpu", 2, "--checkpoint_interval", 99)
    for ranks in (1, 3):
        run(work, ranks, "train.py", *twelve, "--zero_stage", ranks, "--run_name", f"exact_12_{ranks}")
    assert differences(work, "exact_12_1", "exact_12_3") == {0.0}


def test_without_it_the_bits_differ(work):
    """The control: what --exact takes away is there."""
    for ranks in (1, 4):
        run(work, ranks, "train.py", *COMMON, "--checkpoint_interval", 99, "--run_name", f"inexact_{ranks}")
    gaps = compare(work, "inexact_1", "inexact_4")
    assert 0 < max(gaps.values()) < 1e-5


def test_gradients_that_outgrow_the_grid_stop_the_run(work):
    def patch():
        import model

        forward = model.GPT.forward

        def grown(self, inputs, targets, key=None, **options):
            return forward(self, inputs, targets, key, **options) * (500 if key and key[1] == 6 else 1)

        model.GPT.forward = grown

    result = launch(work, 2, "train.py", *COMMON, "--exact", "--run_name", "grown", patch=patch)
    assert result.code == 1 and "--exact: a gradient grew 64-fold" in result.errors
    assert (work / "logs" / "grown.csv").read_text().count("\n") == 1 + 5  # five steps were whole


def sums(micro_batches, ranks, shrink, orders=20):
    """The sum of a parameter's rounded gradients over micro_batches as ZeRO takes it, on `ranks` ranks, in many orders.
    The limits are too small by the factor shrink."""
    torch.manual_seed(0)
    gradients = torch.randn(micro_batches, 999) * torch.logspace(-6, 0, 999)
    limits = 2 ** torch.ceil(torch.log2(gradients.abs().max() / micro_batches)).reshape(1)
    gradients[:, :500] = (0.8 + 0.2 * torch.rand(micro_batches, 500)) * micro_batches * limits  # all but at the limit
    limits /= shrink
    parameter = torch.zeros(999, requires_grad=True)
    peaks = train.round_gradients([parameter], micro_batches, limits)
    rounded = []
    for gradient in gradients:
        parameter.grad = None
        parameter.backward(gradient)
        rounded.append(parameter.grad)
    assert (peaks <= limits) == (shrink == 1)
    for _ in range(orders):
        order = torch.randperm(micro_batches).tolist()
        share = micro_batches // ranks
        of_ranks = [sum(rounded[m] for m in order[r * share : (r + 1) * share]) for r in range(ranks)]
        yield sum(part.div_(ranks) for part in of_ranks)


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 6, 8, 10, 12, 20, 40, 60])
def test_any_order_of_additions(monkeypatch, micro_batches):
    results = []
    for ranks in (n for n in range(1, micro_batches + 1) if micro_batches % n == 0):
        monkeypatch.setattr(train, "WORLD_SIZE", ranks)
        results += sums(micro_batches, ranks, 1)
    assert all(torch.equal(result, results[0]) for result in results)


def test_limits_that_are_too_small_are_seen(monkeypatch):
    """The bound is needed: sums that pass 24 bits depend on their order, and the peaks tell."""
    monkeypatch.setattr(train, "WORLD_SIZE", 1)
    results = list(sums(60, 1, 64))
    assert not all(torch.equal(result, results[0]) for result in results)


def test_adamw_is_element_wise():
    """torch's AdamW gives an element the same bits whatever slice of the parameters it is in."""
    torch.manual_seed(0)
    weights, gradients = torch.randn(1000), torch.randn(5, 1000)

    def trained(slices):
        parts = [torch.nn.Parameter(weights[s].clone()) for s in slices]
        optimizer = torch.optim.AdamW(parts, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
        for gradient in gradients:
            for part, s in zip(parts, slices, strict=True):
                part.grad = gradient[s].clone()
            optimizer.step()
        return torch.cat([part.detach() for part in parts])

    cuts = [0, 1, 3, 6, 13, 20, 51, 100, 231, 500, 733, 1000]
    assert torch.equal(trained([slice(0, 1000)]), trained([slice(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]))

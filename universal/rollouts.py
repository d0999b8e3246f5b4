# SPDX-License-Identifier: MIT
"""TRL's Trainers that generate, and KTO, on any number of ranks, at the same global batch:

    class MyGRPO(AnyRanksRollouts, GRPOTrainer): ...  # and RLOOTrainer, DistillationTrainer
    class MyKTO(AnyRanksKTO, KTOTrainer): ...

A step trains the completions that are made in it. A micro-batch holds whole groups of them, so
their advantages need no other rank, and what is drawn for it comes from a seed of the step and of
its number. So the completions are other ones than TRL's, whose seeds follow the rank.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import data

from universal.trainer import AnyRanks

# {setting of TRL: what any number of ranks wants it to be}
WANTED = {
    # Completions would outlive the step, of which a resume has none.
    "num_iterations": (1,),
    # These look at the completions that all ranks have at the same time.
    "scale_rewards": ("group", "none"),
    "multi_objective_aggregation": ("sum_then_normalize",),
    "normalize_advantages": (False,),
    "top_entropy_quantile": (1.0,),
    "use_adaptive_entropy": (False,),
    # The reference, once it has moved, is in no checkpoint.
    "sync_ref_model": (False,),
    # Who draws there, or acts, follows no seed of ours.
    "use_vllm": (False,),
    "use_transformers_continuous_batching": (False,),
    "rollout_func": (None,),
    "tools": (None, []),
    "environment_factories": (None,),
    "_is_vlm": (False,),  # images: not tried
}
GENERATING = {"GRPOTrainer", "RLOOTrainer", "DistillationTrainer"}


def is_older() -> bool:
    """Whether TRL is one that this has not been tried with, whose losses are divided otherwise."""
    version = sys.modules["trl"].__version__
    return tuple(map(int, version.split(".")[:2])) < (1, 16)


class Groups(data.Sampler):
    """TRL's order of an epoch, each prompt `group` times, without what does not fill a step."""

    epoch = 0

    def __init__(self, prompts: int, group: int, per_step: int, seed: int | None):
        self.prompts, self.group, self.per_step, self.seed = prompts, group, per_step, seed

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self):
        return self.prompts // self.per_step * self.per_step * self.group

    def __iter__(self) -> Iterator[int]:
        order = torch.arange(self.prompts)
        if self.seed is not None:  # TRL draws from one generator, which a resume sets back
            generator = torch.Generator().manual_seed(self.seed)
            for _ in range(self.epoch + 1):
                order = torch.randperm(self.prompts, generator=generator)
        yield from order[: len(self) // self.group].repeat_interleave(self.group).tolist()


class MicroBatches:
    """Trainer's own DataLoader: TRL's gives all of a rank's step at once."""

    def get_train_dataloader(self) -> data.DataLoader:
        return self._get_dataloader(
            dataset=self.train_dataset,
            description="Training",
            batch_size=self._train_batch_size,
            sampler_fn=self._get_train_sampler,
            is_training=True,
        )


class SeededSteps(AnyRanks):
    """AnyRanks, and what is drawn for a micro-batch, dropout too, follows its number."""

    seeds = ()  # of the micro-batches that are still to be trained

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        if is_older():
            raise ValueError("universal.rollouts wants TRL 1.16 or newer")

    def prepare_step(self, samples: list) -> list:
        self.model.train()
        share, count = self.filled_steps.share, self.step_count
        self.numbers = [(share.rank + n * share.ranks) % count for n in range(len(samples))]
        self.seeds = [count + number for number in self.numbers]
        return samples

    def set_seed(self, number: int) -> None:
        """Seed all generators by the step, and by `number` within it."""
        seed = self.args.seed + self.state.global_step * 100_003 + number
        sys.modules["transformers"].set_seed(seed % 2**32)

    def _prepare_inputs(self, inputs: Any) -> Any:
        if not self.seeds:  # an evaluation, or before the step
            return super()._prepare_inputs(inputs)
        self.set_seed(self.seeds.pop(0))
        return inputs


class AnyRanksRollouts(SeededSteps, MicroBatches):
    """AnyRanks for TRL's GRPO, RLOO and Distillation. Raises ValueError for settings with which the
    ranks would change the completions or the loss."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        bases = [base for base in type(self).__mro__ if base.__module__.startswith("trl.")]
        is_experimental = any(".experimental." in base.__module__ for base in bases)
        micro_batch = self.args.per_device_train_batch_size
        checks = {
            f"one of {sorted(GENERATING)} behind AnyRanksRollouts": not is_experimental
            and GENERATING & {base.__name__ for base in bases},
            f"whole groups in a micro-batch: per_device_train_batch_size={micro_batch} is no "
            f"multiple of num_generations={self.group}": micro_batch % self.group == 0,
            "prompts in a list, not in a stream": not isinstance(
                self.train_dataset, data.IterableDataset
            ),
        }
        wanted = {**WANTED, "steps_per_generation": (self.args.gradient_accumulation_steps,)}
        for name, allowed in wanted.items():
            value = getattr(self, name, getattr(self.args, name, allowed[0]))
            checks[f"{name}={allowed[0]}, and it is {value}"] = value in allowed
        for text, holds in checks.items():
            if not holds:
                raise ValueError(
                    f"the same completions on any number of ranks want {text}. (TRL alone, without "
                    "AnyRanks and UNIVERSAL_BATCH, draws other ones on other ranks)"
                )

    @property
    def group(self) -> int:
        """Completions of a prompt."""
        return getattr(self, "num_generations", 1)

    def get_train_dataloader(self) -> data.DataLoader:
        return AnyRanks.get_train_dataloader(self)  # by the command it stands behind TRL's class

    def _get_train_sampler(self, dataset: Any = None) -> Groups:
        prompts = len(self.train_dataset if dataset is None else dataset)
        per_step = self.batch_share().batch // self.group
        if prompts < per_step:
            raise ValueError(f"a step takes {per_step} prompts, and there are {prompts}")
        seed = self.args.seed if self.shuffle_dataset else None
        return Groups(prompts, self.group, per_step, seed)

    def prepare_step(self, samples: list) -> list:
        """Generates the completions of a step's prompts, each micro-batch by itself."""
        super().prepare_step(samples)
        prepared = []
        for number, sample in zip(self.numbers, samples, strict=True):
            self.set_seed(number)
            prepared.append(self._generate_and_score_completions(sample))
        tokens = torch.stack([inputs["completion_mask"].sum() for inputs in prepared])
        weights = torch.tensor(self.step_weights, device=tokens.device)
        total = self.accelerator.gather((tokens * (weights > 0)).sum().reshape(1)).sum()
        # GRPO multiplies it by what a mean is divided by, and divides it by steps_per_generation.
        divisor = self.step_count / self.args.world_size
        scale = getattr(self.args, "steps_per_generation", divisor) / divisor
        for inputs in prepared:
            inputs["num_items_in_batch"] = total * scale
        return prepared


class AnyRanksKTO(SeededSteps):
    """AnyRanks for TRL's KTO: the KL is that of all micro-batches of the step.

    TRL takes it of those that all ranks have at the same time, which is the same where there is no
    accumulation."""

    step_kl = None

    def prepare_step(self, samples: list) -> list:
        """Computes the KL of a step, as TRL does it for the micro-batches of a moment."""
        prepared = super().prepare_step([self._prepare_inputs(sample) for sample in samples])
        if not self.calculate_KL:
            return prepared
        if self.precompute_ref_logps:
            raise ValueError("the KL of a whole step wants precompute_ref_log_probs=False")
        sums = torch.zeros(2, device=self.args.device)
        for number, batch, weight in zip(self.numbers, prepared, self.step_weights, strict=True):
            self.set_seed(number)
            difference = self.kl_logps(self.model_wrapped, batch) - self.reference_logps(batch)
            sums += bool(weight) * torch.stack([difference.mean(), sums.new_ones(())])
        total, count = self.accelerator.gather(sums.reshape(1, 2)).sum(dim=0)
        self.step_kl = total / count
        return prepared

    def kl_logps(self, model: Any, batch: dict) -> torch.Tensor:
        return super()._compute_kl_logps(model, batch)

    def reference_logps(self, batch: dict) -> torch.Tensor:
        """What the reference says: another model, or this one without its adapter."""
        if self.ref_model is not None:
            return self.kl_logps(self.ref_model, batch)
        model = self.accelerator.unwrap_model(self.model)
        adapter = "ref" if "ref" in model.peft_config else None
        with sys.modules["trl.trainer.utils"].use_adapter(model, adapter_name=adapter):
            return self.kl_logps(self.model, batch)

    def _compute_kl_logps(self, model: Any, batch: dict) -> Any:
        if not self.calculate_KL or not self.model.training:
            return super()._compute_kl_logps(model, batch)
        # TRL asks for the reference's without gradients, and takes the difference.
        return self.step_kl * torch.is_grad_enabled()


OURS = {**dict.fromkeys(GENERATING, AnyRanksRollouts), "KTOTrainer": AnyRanksKTO}


def put_before(module: Any) -> None:
    """Put one of these before the Trainer of a module of TRL, as `python -m universal` does."""
    if is_older():
        return
    for name in {*vars(module)} & {*OURS}:
        trainer = getattr(module, name)
        named = {"__module__": trainer.__module__}
        setattr(module, name, type(name, (OURS[name], trainer), named))
    for ours in OURS.values():  # for a script that puts them there itself
        globals()[ours.__name__] = type(ours.__name__, (), {})

# SPDX-License-Identifier: MIT
"""The keys of DeepSpeed's config that change a run's numbers, saved and new.

One rule for all ZeRO stages: the new config holds. What parameter groups keep, such as the weight
decay, stays as it was saved. A default that DeepSpeed has changed since the save changes nothing.
"""

from packaging.version import Version

from universal.checkpoint.module_states import config_of
from universal.load.engine import Engine

CLIPPING = "gradient_clipping"
CLIPS_SINCE = Version("0.19.3")  # to 1 by default
RATE = "optimizer.params.lr"
# {key: its default}
DEFAULTS = {
    CLIPPING: 1.0,
    "gradient_allreduce_op": "mean",
    "prescale_gradients": False,
    "gradient_predivide_factor": 1.0,
    "communication_data_type": None,
    "seq_parallel_communication_data_type": "fp32",
    "dataloader_drop_last": False,
    "fp16.enabled": False,
    "fp16.auto_cast": False,
    "fp16.loss_scale": 0,
    "fp16.loss_scale_window": 1000,
    "fp16.hysteresis": 2,
    "fp16.consecutive_hysteresis": False,
    "fp16.min_loss_scale": 1,
    "fp16.fp16_master_weights_and_grads": False,
    "bf16.enabled": False,
    "bf16.check_grad_overflow": True,
    "bf16.immediate_grad_update": False,
    "bf16.bf16_master_weights_and_grads": False,
    "bf16.bf16_optimizer_states": False,
    "torch_autocast.enabled": False,
    "torch_autocast.dtype": "bfloat16",
    "torch_autocast.lower_precision_safe_modules": None,
    "data_types.grad_accum_dtype": None,
    "zero_optimization.compute_grad_norm": True,
    "zero_optimization.zero_quantized_weights": False,
    "zero_optimization.zero_quantized_gradients": False,
    "optimizer.type": None,
    RATE: None,
}
# Of these every key counts.
BLOCKS = (
    "optimizer.params.",
    "scheduler.",
    "data_efficiency.",
    "zero_optimization.zenflow.",
)
# Of parameter groups, what steps and schedulers leave as the script has set it.
CONSTANTS = (
    "amsgrad",
    "bias_correction",
    "dampening",
    "decoupled_weight_decay",
    "eps",
    "maximize",
    "nesterov",
    "weight_decay",
)
CYCLED = ("betas", "momentum")  # constant without a scheduler
# Under its name there; AdamW is Adam with that.
IN_GROUPS = dict.fromkeys(["adam_w_mode", "optimizer.type"], "decoupled_weight_decay")


def clipping_of(config: dict, model: dict, settings: dict) -> float | None:
    """The saved run's clipping, if neither config names one; None otherwise.

    config: the engine's. model: model states. settings: those of OptimizerState.
    """
    saved = config_of(model)
    if CLIPPING in config or CLIPPING in saved:
        return None
    if settings.get("clip_grad") is not None or not saved:
        return settings.get("clip_grad")
    return default_clipping(model)


def default_clipping(model):
    """The clipping of the release that saved these model states, if its config names none; None if
    they name no release."""
    release = model.get("ds_version")
    return float(Version(release) >= CLIPS_SINCE) if release else None


def settings_changed(engine: Engine, model: dict, saved_groups: list[dict]) -> list[str]:
    """Says in words which settings are not the saved run's, and which hold from now on.

    model: model states. saved_groups: the checkpoint's parameter groups.
    """
    texts = texts_of_config(engine, model, saved_groups)
    names = CONSTANTS if engine.engine.lr_scheduler else CONSTANTS + CYCLED
    for group, saved in zip(engine.param_groups, saved_groups, strict=False):
        for name in names:
            if name in group and name in saved and not is_same_setting(group[name], saved[name]):
                texts.append(f"{name} stays {saved[name]} ({group[name]} here)")
    if model.get("lr_scheduler") and not engine.engine.lr_scheduler:
        rates = ", ".join(f"{group['lr']:g}" for group in saved_groups if "lr" in group)
        texts.append(f"without a scheduler the learning rate stays {rates}")
    return [*dict.fromkeys(texts)]


def texts_of_config(engine, model, saved_groups):
    """What settings_changed() says of the config."""
    saved, config = config_of(model), engine.config()
    if CLIPPING in saved or saved and CLIPPING in config:
        clipping = default_clipping(model)
        saved = saved if clipping is None else {CLIPPING: clipping} | saved
        config = config | {CLIPPING: engine.engine.gradient_clipping()}
    in_groups = saved_groups[0] if saved_groups else {}
    by_deepspeed = type(engine.engine.lr_scheduler).__module__.startswith("deepspeed.")
    texts = []
    for key, was, now in changed_keys(saved, config) if saved else ():
        name = key.removeprefix("optimizer.params.")
        if name in CONSTANTS + CYCLED or IN_GROUPS.get(name, key) in in_groups:
            continue  # of groups
        if key.startswith("scheduler.") and not engine.engine.lr_scheduler:
            continue
        if name in in_groups and not (key == RATE and by_deepspeed):
            texts.append(f"{key} stays {was} ({now} in the config)")
        else:
            texts.append(f"{key} is {now} from now on (was {was})")
    return texts


def changed_keys(saved, config):
    """Yields (key, saved value, new value) of the keys above that differ."""
    saved, config = flattened(saved), flattened(config)
    for key in sorted({*saved, *config}):
        if key not in DEFAULTS and not key.startswith(BLOCKS):
            continue
        switch = f"{key.partition('.')[0]}.enabled"
        is_used = key == switch or saved.get(switch) and config.get(switch)
        if switch in DEFAULTS and not is_used:
            continue
        default = DEFAULTS.get(key)
        was, now = saved.get(key, default), config.get(key, default)
        if "auto" not in (was, now) and not is_same_setting(was, now):
            yield key, was, now


def flattened(config, prefix=""):
    """Returns {path: value}, such as {"fp16.enabled": True}."""
    flat = {}
    for key, value in config.items():
        path = f"{prefix}{key}".replace("bfloat16.", "bf16.")
        flat |= flattened(value, f"{path}.") if isinstance(value, dict) else {path: value}
    return flat


def is_same_setting(a, b):
    """Whether two values of a config are the same; JSON has lists for tuples."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return [*a] == [*b]
    return str(a).lower() == str(b).lower() if isinstance(a, str) else a == b

"""The table of DeepSpeed's keys: somebody has classified each. The package's own, of keys that a
load compares, has DeepSpeed's defaults."""

import types

from deepspeed.runtime import precision_config
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from measure import keys
from tests.support import ROOT
from universal.load.keys import DEFAULTS

KNOWN = keys.deepspeed_keys()


def test_each_key_is_classified():
    table = keys.read_table()
    assert not keys.unclassified(KNOWN, table)
    assert {row["outcome"] for row in table.values()} <= {*keys.OUTCOMES}
    assert len(KNOWN) > 400 and {"gradient_clipping", "fp16.hysteresis", "pipeline.stages"} <= KNOWN


def test_a_key_that_nobody_has_classified_is_seen():
    """A new model's, a new constant, a new argument of initialize()."""
    module = types.ModuleType("new_config")
    module.MeanderConfig = type(
        "MeanderConfig", (DeepSpeedConfigModel,), {"__module__": "new_config"}
    )
    module.MeanderConfig.model_fields = {"width": types.SimpleNamespace(alias=None)}
    module.MEANDER = "meander"
    module.MEANDER_DEFAULT = "narrow"
    new = {*keys.keys_of(module)}
    assert new == {"MeanderConfig.width", "meander"}
    assert keys.unclassified(KNOWN | new, keys.read_table()) == ["MeanderConfig.width", "meander"]


def test_the_asset(capsys):
    keys.main()
    assert capsys.readouterr().out == (ROOT / "assets/keys.txt").read_text()


def test_defaults():
    """Those that a load compares with are DeepSpeed's."""
    models = {
        "fp16": precision_config.DeepSpeedFP16Config(),
        "bf16": precision_config.DeepSpeedBF16Config(),
        "zero_optimization": DeepSpeedZeroConfig(),
    }
    plain = DeepSpeedConfig({"train_batch_size": 1})
    for key, default in DEFAULTS.items():
        place, _, name = key.rpartition(".")
        assert key in KNOWN or name in KNOWN or place.startswith("optimizer"), key
        if place in models:
            assert getattr(models[place], name) == default, key
        elif hasattr(plain, key):
            assert str(getattr(plain, key)) in (str(default), "torch.float32"), key

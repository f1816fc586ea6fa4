"""A value of a config that is not of its field's type is told in one line."""

import json
import math
from dataclasses import dataclass

import pytest
import torch

import megazoo
from megazoo.errors import UserError
from megazoo.families.registry import FAMILIES, config_from_dict, presets
from megazoo.formats.configs import config_from_file
from megazoo.parallel import ParallelContext

BAD = ["two", [1], {"a": 1}, None, True, math.inf, math.nan, -1, 10**18, 10**30, 0.5, ""]


@pytest.mark.parametrize("family", ["gpt2", "llama", "mpt"])
def test_a_wrong_value_of_any_field_of_a_config_is_one_line(family, tmp_path):
    base, file = presets()[f"{family}-tiny"], tmp_path / "config.json"
    for name, good in vars(base).items():
        for bad in BAD:
            file.write_text(json.dumps({"model": family, **vars(base), name: bad}))
            try:
                config = config_from_file(file)
                FAMILIES[family].on_meta(config, ParallelContext())
            except UserError:
                continue
            value = getattr(config, name)
            optional = good is None or bad is None
            assert optional or isinstance(value, type(good)), (name, bad)
            assert not isinstance(value, float) or math.isfinite(value), (name, bad)


WRONG = [
    ({"model": ["gpt2"]}, "unknown model family"),
    ({"model_type": ["gpt2"]}, "model_type is a list: it must be a string"),
    ({"model_type": "mpt", "expansion_ratio": math.inf}, "expansion_ratio is inf"),
    ({"model_type": "llama", "rope_parameters": {"rope_theta": 0.0}}, "must be above 1, got 0.0"),
    (
        {"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": -2.0}},
        "factor of rotary positions must be a number above 0, got -2.0",
    ),
    ({"model_type": "gpt2", "pad_token_id": "x"}, "x"),
]


def test_config_files_with_wrong_values_are_refused(tmp_path):
    file = tmp_path / "config.json"
    for values, message in WRONG:
        kind = values.get("model_type")
        usual = presets()[f"{kind}-tiny"].to_hugging_face() if isinstance(kind, str) else {}
        head = {"architectures": ["GPT2ForSequenceClassification"]}
        file.write_text(json.dumps({**usual, **head, **values}))
        with pytest.raises(UserError, match=message) as refused:
            config_from_file(file)
        assert str(refused.value).startswith(str(file))


@dataclass(frozen=True)
class OwnConfig(megazoo.families.config.ModelConfig):
    sizes: tuple[int, ...] = (1,)
    kind: torch.dtype = None
    mixed: float = None
    bound: float = math.inf


def test_a_users_own_config_is_checked_where_its_types_are_those_of_json(monkeypatch):
    family = type("Family", (), {"Config": OwnConfig})
    monkeypatch.setitem(FAMILIES, "own", family)
    sizes = dict(vocab_size=9, max_positions=8, hidden_size=4, layers=1, heads=1)
    config = config_from_dict("own", {**sizes, "sizes": [1, 2], "kind": "x", "mixed": None})
    assert (config.sizes, config.kind, config.mixed) == ((1, 2), "x", None)
    assert config_from_dict("own", {**sizes, "bound": math.inf}).bound == math.inf
    with pytest.raises(UserError, match=r"sizes\[1\] is 'x': it must be an int"):
        config_from_dict("own", {**sizes, "sizes": [1, "x"]})
    with pytest.raises(UserError, match="hidden_size is missing"):
        config_from_dict("own", dict(vocab_size=9, max_positions=8))

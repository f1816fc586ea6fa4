"""The dtype of a model's weights, by all names that users know."""

import pytest
import torch
import transformers

import megazoo
from megazoo.errors import UserError
from tests.support.training import tiny_config

CONFIG = tiny_config(layers=1)
NAMES = {
    torch.float32: ("float32", "fp32", "torch.float32"),
    torch.bfloat16: ("bfloat16", "bf16", "torch.bfloat16"),
    torch.float16: ("float16", "fp16", "torch.float16"),
    torch.float64: ("float64", "torch.float64"),
}


def test_a_dtype_is_given_by_any_of_its_names(tmp_path):
    megazoo.from_config(CONFIG, dtype="fp16").save_parallelized(tmp_path)
    for dtype, names in NAMES.items():
        for name in (dtype, *names):
            assert megazoo.from_config(CONFIG, dtype=name).dtype == dtype
            assert megazoo.from_pretrained(tmp_path, dtype=name).dtype == dtype
    for automatic in ({}, {"dtype": "auto"}, {"dtype": None}):
        assert megazoo.from_pretrained(tmp_path, **automatic).dtype == torch.float16
        assert megazoo.from_parallelized(tmp_path, **automatic).dtype == torch.float16
        assert megazoo.from_config(CONFIG, **automatic).dtype == torch.float32


def test_auto_is_the_dtype_of_a_config_of_transformers():
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 1, "vocab_size": 11}
    config = transformers.GPT2Config(**sizes, dtype="bfloat16")
    assert megazoo.from_config(config, dtype="auto").dtype == torch.bfloat16
    assert megazoo.from_config(config).dtype == torch.float32


@pytest.mark.parametrize(
    "wrong", ["float8", "bfloat", torch.float8_e4m3fn, torch.int8, torch.complex64, int, 16]
)
def test_another_dtype_is_refused_with_those_there_are(tmp_path, wrong):
    for load in (megazoo.from_config, megazoo.from_pretrained, megazoo.from_parallelized):
        with pytest.raises(UserError, match=r"^dtype .* use auto, float32, bfloat16, float16, flo"):
            load(CONFIG if load is megazoo.from_config else tmp_path, dtype=wrong)

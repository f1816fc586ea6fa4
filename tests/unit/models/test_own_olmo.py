"""A user's model from a file of --import: the same in layouts, and never written as another one."""

from unittest import mock

import pytest

import megazoo
from megazoo.errors import UserError
from megazoo.families.registry import FAMILIES
from megazoo.models.llama import Llama
from tests.support.training import run_in_layout, train, worst_relative


@pytest.fixture(scope="module")
def config():
    """Known as "my-olmo" for these tests only."""
    with mock.patch.dict(FAMILIES):
        from tests.support.own_olmo import MyOlmo

        FAMILIES["my-olmo"] = MyOlmo
        yield MyOlmo.presets["my-olmo-tiny"]


def trained(layout):
    from tests.support.own_olmo import MyOlmo

    FAMILIES["my-olmo"] = MyOlmo
    return train(MyOlmo.presets["my-olmo-tiny"], layout, 3)


@pytest.mark.parametrize("layout", [dict(tp=2), dict(pp=2)], ids=str)
def test_it_trains_as_in_one_process(ranks, config, layout):
    for history in run_in_layout(ranks, trained, layout):
        assert worst_relative(history, trained({})) < 1e-5


def test_it_is_not_written_as_a_llama(config, tmp_path):
    """transformers would compute another model from the same tensors."""
    model = megazoo.from_config(config)
    with pytest.raises(UserError, match=r"my-olmo writes model_type 'llama', which .* LlamaFor"):
        model.save_parallelized(tmp_path / "made", merge_checkpoints=True)
    assert not list(tmp_path.iterdir())


def test_a_tensor_without_a_name_is_told(tmp_path):
    model = megazoo.from_config("llama-tiny")
    names = {k: v for k, v in Llama.HUGGING_FACE_NAMES.items() if k != "norm"}
    with (
        mock.patch.object(Llama, "HUGGING_FACE_NAMES", names),
        pytest.raises(UserError, match=r"Llama has no Hugging Face name for norm.weight: add it"),
    ):
        model.save_parallelized(tmp_path / "made", merge_checkpoints=True)

"""What a model is after half(), pickling and from_pretrained: converted, refused in one line, or in
evaluation mode."""

import pickle
import warnings

import pytest
import torch

import megazoo
from megazoo.errors import Advice, UserError
from tests.support.layouts import in_layout
from tests.support.sampling import marked_slow
from tests.support.training import context, make_batch, replica_rows, tiny_config

CONFIG = tiny_config(layers=2)


def converted(kind, layout):
    """The loss and dtypes of a converted model, and what its optimizer says once it is converted
    again."""
    ctx = context(**layout)
    model = getattr(megazoo.from_config(CONFIG, ctx, seed=3), kind)()
    ids = replica_rows(make_batch(0)[0], ctx)
    optimizer = megazoo.optim.AdamW(model)
    loss = model.train_batch(ids, labels=ids)
    optimizer.step()
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    model.float()
    model.train_batch(ids, labels=ids)
    with pytest.raises(UserError) as refused:
        optimizer.step()
    try:
        pickled = type(pickle.loads(pickle.dumps(model))).__name__
    except UserError as error:
        pickled = str(error)
    return loss.item(), str(refused.value), pickled


@pytest.mark.parametrize("kind", ["half", "bfloat16", "double"])
@pytest.mark.parametrize(
    "layout", marked_slow(["tp1", "dp2", "tp2", "pp2"], lambda number, _: number > 1)
)
def test_a_model_is_converted_before_its_optimizer_is_made(ranks, layout, kind):
    ids = make_batch(0)[0]
    whole = megazoo.from_config(CONFIG, seed=3).eval_batch(ids, labels=ids)
    dtype = {"half": "float16", "double": "float64"}.get(kind, kind)
    for loss, refused, pickled in in_layout(ranks, converted, layout, kind):
        assert abs(loss - whole) < (1e-6 if kind == "double" else 2e-3)
        assert (
            f"was {dtype} when AdamW was created, and is float32: convert the model before"
            in refused
        )
        expected = "GPT2" if layout == "tp1" else "a model and its context can't be pickled on"
        assert pickled.startswith(expected)


@pytest.fixture
def read(tmp_path):
    """A model with dropout that was read from files."""
    megazoo.from_config(tiny_config(layers=2, dropout=0.5)).save_parallelized(tmp_path)
    return megazoo.from_pretrained(tmp_path)


def modes(model):
    return {name: module.training for name, module in model.named_modules()}


def test_a_model_that_is_read_is_in_evaluation_mode_until_it_is_trained(read):
    ids = make_batch(0)[0]
    assert not any(modes(read).values())
    assert torch.equal(read(ids).logits, read(ids).logits)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses = {read.train_batch(ids, labels=ids).item() for _ in range(3)}
    assert all(modes(read).values())
    assert len(losses) == 3, "dropout draws in each"
    assert megazoo.from_config(tiny_config(layers=1)).training


def test_modules_in_evaluation_mode_stay_so_in_a_model_that_trains(read):
    ids = make_batch(0)[0]
    frozen = read.train().layers["0"].eval()
    before = modes(read)
    read.train_batch(ids, labels=ids)
    read.eval_batch(ids, labels=ids)
    assert modes(read) == before
    assert not any(module.training for module in frozen.modules())
    read.eval().eval_batch(ids, labels=ids)
    assert not any(modes(read).values())


def test_a_loop_over_micro_batches_has_the_mode_of_the_model(read):
    """It says once that the dropout is off."""
    ids = make_batch(0)[0]

    def loss():
        for out in read.microbatches(ids, labels=ids):
            out.loss.backward()
        return out.loss.item()

    with pytest.warns(Advice, match=r"without dropout: call model.train\(\) to turn it on"):
        first = loss()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loss() == first
    assert not any(modes(read).values())
    read.train()
    assert loss() != loss()


def test_a_peft_directory_is_not_a_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(megazoo.UserError, match=r"only a PEFT adapter.*megazoo\.lora\.load"):
        megazoo.from_pretrained(tmp_path, context())

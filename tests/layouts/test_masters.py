"""Master weights, fp32, of parameters of lower precision: they start from the files' values, and
follow whatever is loaded or copied into the parameters between steps."""

import copy
from dataclasses import replace

import pytest
import torch

import megazoo
from megazoo.checkpoint import Checkpoint, load, save
from megazoo.optim.loss_scale import LossScale
from tests.support.layouts import in_layout
from tests.support.sampling import marked_slow
from tests.support.training import (
    MODELS,
    context,
    make_batch,
    randomize,
    replica_rows,
    tiny_config,
)

LAYOUTS = marked_slow(["pp2", "tp2dp2+sp+zero", "tp2", "dp2+zero"], lambda number, _: number > 1)
LLAMA = replace(MODELS["llama"], layers=2)


def made(config, layout, optimizer="adamw", dtype=torch.bfloat16, *, seed=3, start=None):
    """A model and its optimizer, ZeRO-1 if there are replicas."""
    ctx = context(**layout)
    if start:
        model = megazoo.from_pretrained(start, ctx, dtype=dtype)
    else:
        model = randomize(megazoo.from_config(config, ctx, seed=seed, dtype=dtype), seed=seed)
    scale = LossScale(64.0) if dtype == torch.float16 else None
    common = {"lr": 1e-3, "clip_grad": 0.0, "zero": int(ctx.dp_size > 1), "loss_scale": scale}
    if optimizer == "muon":
        return model, megazoo.optim.Muon(model, **common)
    return model, megazoo.optim.AdamW(model, **common, offload=optimizer == "offloaded")


def step(model, optimizer, number=0):
    ids, targets = (replica_rows(tensor, model.ctx) for tensor in make_batch(number))
    model.train_batch(ids, targets=targets, num_microbatches=2)
    optimizer.step()


def written(config, optimizer, dtype, other, how, layout):
    """Train a step, write other weights into the model, and take a step at lr 0; returns what
    differs from the weights that were written, and from their masters."""
    model, opt = made(config, layout, optimizer, dtype)
    step(model, opt)
    if how == "from_parallelized":
        model.from_parallelized(other)
    else:
        theirs = megazoo.from_pretrained(other, model.ctx, dtype=dtype)
        if how == "load_state_dict":
            model.load_state_dict(theirs.state_dict())
        else:
            with torch.no_grad():
                for ours, their in zip(model.parameters(), theirs.parameters(), strict=True):
                    ours.copy_(their)
    wanted = {entry.name: entry.parameter.detach().clone() for entry in model.entries()}
    opt.lr = 0.0
    step(model, opt, 1)
    masters = [(name, *state) for name, state in masters_of(model, opt).items()]
    return [e.name for e in model.entries() if not torch.equal(e.parameter, wanted[e.name])] + [
        f"{name}.master"
        for name, master, weights in masters
        if not torch.equal(master.to(dtype), weights)
    ]


def masters_of(model, optimizer):
    """The masters that this replica has, and the parameters' elements that they stand for."""
    found = {}
    for entry in optimizer.entries:
        mine = entry.parameter.detach().reshape(-1)[slice(*optimizer.ranges[entry.name])]
        found[entry.name] = (optimizer.state[entry.name].get("master", mine.float()), mine)
    return found


@pytest.fixture(scope="module")
def in_fp32(tmp_path_factory):
    """A Hugging Face directory and a checkpoint of ours, both fp32, of the same weights."""
    found = {}
    for name, config in (("gpt2", tiny_config(layers=3)), ("llama", LLAMA)):
        model = randomize(megazoo.from_config(config, seed=11), seed=11)
        found[name] = tmp_path_factory.mktemp(name) / "theirs", config
        model.save_parallelized(found[name][0], merge_checkpoints=True)
    return found


@pytest.mark.parametrize(
    ("optimizer", "dtype", "how"),
    [
        ("adamw", torch.bfloat16, "load_state_dict"),
        ("adamw", torch.float16, "from_parallelized"),
        ("offloaded", torch.bfloat16, "copy"),
        ("offloaded", torch.float32, "from_parallelized"),
        ("muon", torch.bfloat16, "load_state_dict"),
    ],
)
def test_what_is_loaded_between_steps_stays(in_fp32, optimizer, dtype, how):
    directory, config = in_fp32["gpt2"]
    assert not written(config, optimizer, dtype, directory, how, {})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_loaded_between_steps_stays_in_every_layout(ranks, in_fp32, layout):
    directory, config = in_fp32["llama"]
    for optimizer, how in (("adamw", "from_parallelized"), ("muon", "load_state_dict")):
        args = (config, optimizer, torch.bfloat16, directory, how)
        assert not any(in_layout(ranks, written, layout, *args))


@pytest.mark.parametrize("optimizer", ["adamw", "offloaded", "muon"])
def test_one_changed_element_moves_its_master_alone(optimizer):
    model, opt = made(tiny_config(layers=2), {}, optimizer)
    for number in range(2):
        step(model, opt, number)
    before = {name: master.clone() for name, (master, _) in masters_of(model, opt).items()}
    with torch.no_grad():
        model.layers["1"].mlp.up.weight[3, 5] = 0.25
    for name, tensors in opt.state_dict()["state"].items():
        expected = before[name]
        if name == "layers.1.mlp.up.weight":
            expected = expected.view(model.layers["1"].mlp.up.weight.shape)
            assert expected[3, 5] != 0.25
            expected[3, 5] = 0.25
        assert torch.equal(tensors["master"], expected.view(-1)), name


def masters_from(config, directory, optimizer, later, layout):
    """The largest distance of masters from the values in fp32, and of the parameters."""
    model, opt = made(config, layout, optimizer, start=None if later else directory)
    if later:
        step(model, opt)
        model.from_parallelized(directory)  # the masters have the values, before any step
    exact = megazoo.from_pretrained(directory, model.ctx, dtype=torch.float32)
    values = {entry.name: entry.parameter.detach().view(-1) for entry in exact.entries()}
    masters = masters_of(model, opt)
    parts = {name: values[name][slice(*opt.ranges[name])] for name in masters}
    return [
        max(((each[which].float() - parts[name]).abs().max().item()
             for name, each in masters.items() if len(parts[name])), default=0.0)
        for which in (0, 1)
    ]  # fmt: skip


@pytest.mark.parametrize("later", [False, True], ids=["at the start", "loaded later"])
@pytest.mark.parametrize("optimizer", ["adamw", "offloaded", "muon"])
def test_masters_start_from_the_precision_of_the_files(in_fp32, optimizer, later, monkeypatch):
    monkeypatch.setattr(megazoo.optim.masters, "PIECE_ELEMENTS", 100)  # many pieces
    directory, config = in_fp32["gpt2"]
    off, rounded = masters_from(config, directory, optimizer, later, {})
    assert off == 0
    assert rounded > 1e-4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_masters_start_from_the_precision_of_the_files_in_every_layout(ranks, in_fp32, layout):
    directory, config = in_fp32["llama"]
    for later in (False, True):
        args = (config, directory, "adamw", later)
        found = in_layout(ranks, masters_from, layout, *args)
        assert all(off == 0 for off, _ in found)
        assert max(rounded for _, rounded in found) > 1e-4


def test_a_run_resumes_with_its_own_masters(in_fp32, tmp_path):
    """Not with the files' from which the model was first read."""
    directory, config = in_fp32["gpt2"]
    model, opt = made(config, {}, start=directory)
    step(model, opt)
    save(tmp_path, 1, model, opt)
    again, theirs = made(config, {}, start=directory)
    load(Checkpoint(tmp_path), again, theirs)
    third, of_third = made(config, {}, start=directory)
    third.load_state_dict(model.state_dict())
    of_third.load_state_dict(copy.deepcopy(opt.state_dict()))
    for each, optimizer in ((model, opt), (again, theirs), (third, of_third)):
        step(each, optimizer, 1)
    for name, (master, _) in masters_of(model, opt).items():
        assert torch.equal(masters_of(again, theirs)[name][0], master), name
        assert torch.equal(masters_of(third, of_third)[name][0], master), name


def test_masters_start_from_those_of_a_checkpoint(tmp_path):
    """A model in bfloat16 of a checkpoint that has masters: a new optimizer begins with these."""
    model, opt = made(tiny_config(layers=2), {})
    step(model, opt)
    save(tmp_path, 1, model, opt)
    again, theirs = made(None, {}, start=tmp_path)
    for name, (master, _) in masters_of(model, opt).items():
        assert torch.equal(masters_of(again, theirs)[name][0], master), name


def test_masters_start_from_those_of_a_checkpoint_without_the_optimizer(tmp_path):
    config = tiny_config(layers=2)
    model, opt = made(config, {})
    step(model, opt)
    save(tmp_path, 1, model, opt)
    again = megazoo.from_config(config, dtype=torch.bfloat16)
    load(Checkpoint(tmp_path), again)
    again.read_from[0].files.names(next(iter(again.read_from[0].file_sizes())))
    theirs = megazoo.optim.AdamW(copy.deepcopy(again))  # of open files, too
    for name, (master, _) in masters_of(model, opt).items():
        assert torch.equal(masters_of(theirs.model, theirs)[name][0], master), name


def test_files_that_are_gone_leave_the_rounded_values(in_fp32, tmp_path):
    _, config = in_fp32["gpt2"]
    model = randomize(megazoo.from_config(config, seed=11), seed=11)
    model.save_parallelized(tmp_path / "away", merge_checkpoints=True)
    model = megazoo.from_pretrained(tmp_path / "away", dtype=torch.bfloat16)
    for file in (tmp_path / "away").iterdir():
        file.unlink()
    with pytest.warns(
        megazoo.errors.Advice, match=r"start from the torch.bfloat16 weights: .*away"
    ):
        optimizer = megazoo.optim.AdamW(model)
    for master, weights in masters_of(model, optimizer).values():
        assert torch.equal(master, weights.float())
    assert copy.deepcopy(model) is not model  # nothing open is in it


def test_masters_of_adapters_start_from_the_precision_of_their_files(tmp_path):
    model = megazoo.lora.add(megazoo.from_config(tiny_config(layers=2), seed=3), rank=4)
    for entry in model.trained_entries():
        torch.nn.init.normal_(entry.parameter)
    exact = {e.name: e.parameter.detach().clone().view(-1) for e in model.trained_entries()}
    megazoo.lora.save(model, tmp_path / "adapter")
    model = megazoo.from_config(tiny_config(layers=2), seed=3, dtype=torch.bfloat16)
    opt = megazoo.optim.AdamW(megazoo.lora.load(model, tmp_path / "adapter"))
    assert exact.keys() == opt.state.keys()
    for name, state in opt.state.items():
        assert torch.equal(state["master"], exact[name]), name

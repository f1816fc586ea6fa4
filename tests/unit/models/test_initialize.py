"""OSLO's way in: a configuration, and a loop over micro-batches that calls backward itself."""

import json
import re
from itertools import product

import pytest
import torch
import transformers

import megazoo
from megazoo.errors import UserError
from megazoo.models.pretrained import save_parallelized
from megazoo.models.registry import find_config
from tests.support.sampling import marked_slow
from tests.support.training import (
    MODELS,
    context,
    layout_name,
    make_batch,
    randomize,
    replica_rows,
    run_in_layout,
    tiny_config,
)


def by_hand_and_at_once(config, layout, factor=1.0):
    """Losses and gradients of one batch: by a loop of one's own, and by train_batch."""
    ctx = context(**layout)
    model = randomize(megazoo.from_config(config, ctx, seed=3))
    ids, targets = (replica_rows(tensor, ctx) for tensor in make_batch(0))
    found = []
    for by_hand in (True, False):
        if by_hand:
            loss = 0.0
            for out in model.microbatches(ids, targets=targets, num_microbatches=4):
                loss += out.loss.item()
                (out.loss * factor).backward()
        else:
            loss = model.train_batch(ids, targets=targets, num_microbatches=4).item()
        found.append(
            (loss, {name: parameter.grad.clone() for name, parameter in model.named_parameters()})
        )
    return found


LAYOUTS = [
    *(dict(), dict(tp=2, pp=2), dict(pp=2, v=2), dict(pp=2, dp=2)),
    *(dict(tp=2, sp=True), dict(pp=2), dict(pp=4)),
]


@pytest.mark.parametrize("layout", marked_slow(LAYOUTS, lambda n, _: n > 3, name=layout_name))
def test_a_loop_of_ones_own_trains_as_train_batch_does(ranks, layout):
    for by_hand, at_once in run_in_layout(ranks, by_hand_and_at_once, layout, MODELS["gpt2"]):
        assert by_hand[0] == pytest.approx(at_once[0], rel=1e-6)
        assert by_hand[1].keys() == at_once[1].keys()
        assert all(torch.equal(gradient, at_once[1][name]) for name, gradient in by_hand[1].items())


def test_what_the_loss_is_multiplied_by_counts(ranks):
    for by_hand, at_once in ranks(by_hand_and_at_once, 2, MODELS["llama"], dict(pp=2), factor=0.25):
        for name, gradient in by_hand[1].items():
            torch.testing.assert_close(4 * gradient, at_once[1][name], atol=1e-8, rtol=1e-5)


def initialized(ways):
    contexts = [megazoo.initialize(model, config=config).ctx for model, config in ways]
    return [(ctx.tp_size, ctx.pp_size, ctx.dp_size, ctx.rank) for ctx in contexts]


def test_initialize_takes_a_configuration_or_a_json_file(ranks, tmp_path):
    sizes = {"enable": True, "tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    config = {"model_parallelism": sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.toml").write_text(
        'model = "llama"\nlayers = 2\nvocab_size = 61\nhidden_size = 32\nheads = 4\n'
    )
    saved = megazoo.initialize(tiny_config())
    saved.save_parallelized(tmp_path / "saved")
    ways = [(tmp_path / "saved", tmp_path / "config.json"), (str(tmp_path / "saved"), config)]
    ways += [(tmp_path / "model.toml", config), (MODELS["mpt"], config)]
    for rank, found in enumerate(ranks(initialized, 4, ways)):
        assert found == [(2, 2, 1, rank)] * 4
    off = {"model_parallelism": {**sizes, "enable": False}}
    assert same_weights(megazoo.initialize(tmp_path / "saved", config=off), saved)


def same_weights(model, other):
    both = zip(model.parameters(), other.parameters(), strict=True)
    return all(torch.equal(*pair) for pair in both)


def test_what_is_not_known_is_told():
    key = "model_parallelism"
    for config, message in (
        (
            {"model_paralelism": {}},
            f"the configuration has no 'model_paralelism'; did you mean {key}",
        ),
        ({key: {"tensor_size": 2}}, f"{key} has no 'tensor_size'"),
        ({key: 2}, f"{key} must be a dictionary, not 2"),
        ({key: {"enable": "no"}}, f"enable in {key} must be true or false, not 'no'"),
        ("nowhere.json", "nowhere.json: No such file or directory"),
    ):
        with pytest.raises(UserError) as refused:
            megazoo.initialize(tiny_config(), config=config)
        assert message in str(refused.value)


def test_a_size_that_is_no_whole_number_is_refused_by_name():
    given = ["tensor_parallel_size", "pipeline_parallel_size"]
    names = [*given, "data_parallel_size", "virtual_pipeline_size"]
    for name, size in product(names, ["2", 2.0, True, None, 0, -1]):
        if name == "data_parallel_size" and size is None:
            continue
        message = f"^{name} must be a whole number of at least 1, not {re.escape(repr(size))}$"
        with pytest.raises(UserError, match=message):
            megazoo.ParallelContext.from_torch(**{name: size})
        if name in given:
            with pytest.raises(UserError, match=message):
                megazoo.initialize(tiny_config(), config={"model_parallelism": {name: size}})


def test_comments_in_json_are_told(tmp_path):
    file = tmp_path / "oslo.json"
    told = "; JSON has no comments: remove them"
    for text, hint in (
        ('{\n  // two ranks\n  "model_parallelism": {}\n}', told),
        ('{"model_parallelism": {} /* none */}', told),
        ('{"model_parallelism": {"enable": true,//x\n}}', told),
        ('{"a": "http://b"', ""),
        ('{"a": "run # 3",}', ""),
    ):
        file.write_text(text)
        message = f"oslo.json can't be read: .*char \\d+\\){re.escape(hint)}$"
        with pytest.raises(UserError, match=message):
            megazoo.initialize(tiny_config(), config=file)


def test_a_presets_name_is_never_taken_for_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loads = megazoo.initialize, megazoo.from_pretrained, megazoo.from_parallelized
    for load, name in product(loads, ("gpt2", "gpt2-124m")):
        message = (
            f"{name} is not a directory: {tmp_path}/{name} does not exist; pass a checkpoint, or a "
            "directory that transformers' save_pretrained wrote; for random weights call "
            f"megazoo.from_config('{name}', ctx)"
        )
        with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
            load(name)
    for load in loads:
        with pytest.raises(UserError, match=r"^somebody/else is not a directory, and no model of"):
            load("somebody/else")


def test_a_model_object_is_told_to_save_itself(tmp_path):
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=11)
    ours, hf = megazoo.from_config(tiny_config()), transformers.GPT2LMHeadModel(config)
    told = r"save it with its save_pretrained\(DIRECTORY\), then pass that directory"
    loads = megazoo.initialize, megazoo.from_pretrained, megazoo.from_config
    for load in (*loads, ours.from_parallelized):
        with pytest.raises(UserError, match=told):
            load(hf)
    for wrong in (3, ["gpt2"], None):
        with pytest.raises(UserError, match=f"{type(wrong).__name__} is not a config"):
            megazoo.from_config(wrong)
    with pytest.raises(UserError, match="weights are read from a directory, not from GPT2Config"):
        megazoo.from_pretrained(tiny_config())


def test_a_config_of_transformers_builds_the_same_as_its_file(tmp_path):
    llama = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    llama |= dict(vocab_size=61, hidden_size=32, intermediate_size=48)
    gpt2 = dict(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=16)
    mpt = dict(vocab_size=61, d_model=32, n_layers=2, n_heads=4, max_seq_len=16)
    rope = {"rope_type": "default", "rope_theta": 5e5}
    configs = {
        "gpt2": transformers.GPT2Config(**gpt2),
        "llama": transformers.LlamaConfig(**llama, rope_parameters=rope),
        "mpt": transformers.MptConfig(**mpt),
    }
    for name, config in configs.items():
        config.save_pretrained(tmp_path / name)
        assert find_config(config) == find_config(tmp_path / name / "config.json")
        for model in (megazoo.from_config(config), megazoo.initialize(config)):
            assert (model.config.layers, model.config.hidden_size) == (2, 32)
    assert find_config(configs["llama"]).rope_theta == 5e5
    with pytest.raises(UserError, match="model_type 'bert' is not supported"):
        megazoo.from_config(transformers.BertConfig())


def test_the_directory_goes_by_oslos_names_too(tmp_path):
    model = megazoo.from_config(tiny_config(), seed=1)
    model.save_parallelized(save_directory=tmp_path / "a")
    save_parallelized(model, save_directory=tmp_path / "b")
    assert same_weights(megazoo.from_parallelized(load_directory=tmp_path / "a"), model)
    other = megazoo.from_config(tiny_config())
    assert same_weights(other.from_parallelized(load_directory=tmp_path / "b"), model)
    for call, function, name in (
        (model.save_parallelized, "save_parallelized", "save_directory"),
        (model.from_parallelized, "from_parallelized", "load_directory"),
        (megazoo.from_parallelized, "from_parallelized", "load_directory"),
    ):
        give = f"call .*{name}=DIRECTORY"
        with pytest.raises(UserError, match=f"^{function} needs a directory: {give}"):
            call()
        with pytest.raises(UserError, match=f"^{function} gets its directory twice: {give}"):
            call(tmp_path / "a", **{name: tmp_path / "b"})

"""What a checkpoint's files and a settings file say is checked at the door: forged values, with
checksums that are right, end in one line."""

import json
import math
import random
import shutil
import zlib

import pytest
import torch

import megazoo
from megazoo.checkpoint import Checkpoint, load, save
from megazoo.checkpoint.format import manifest_checksum
from megazoo.checkpoint.schema import TensorInfo, _elements_held
from megazoo.cli.parsing import CommandLine
from megazoo.errors import UserError
from megazoo.formats.source import SavedModel
from megazoo.parallel import ParallelContext
from megazoo.parallel.shard import ParameterSpec, Shard
from megazoo.trainer.state import read_state, resumed_state
from tests.support.training import make_batch, tiny_config

MODEL, NORM = "model_tp_0_pp_0.safetensors", "norm.weight"
SETTINGS = {"steps": 4, "lr": 1e-3, "data": ["stdlib"], "tokenizer": "byte", "split": "95,5"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The step of a training run, with optimizer state."""
    model = megazoo.from_config(tiny_config(layers=2), seed=3)
    optimizer = megazoo.optim.AdamW(model)
    ids, targets = make_batch(0)
    model.train_batch(ids, targets=targets)
    optimizer.step()
    trainer = {"consumed_samples": 8, "consumed_tokens": 64, "settings": SETTINGS}
    return save(tmp_path_factory.mktemp("run"), 1, model, optimizer, trainer)


@pytest.fixture
def forged(whole, tmp_path):
    """Return a function forged(change=, trainer=): a copy of the step, with its manifest or its
    trainer.json changed by somebody who knows how checksums are made."""
    path = tmp_path / "step"

    def make(change=lambda manifest: None, trainer=None):
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(whole, path)
        manifest = json.loads((path / "megazoo.json").read_text())
        del manifest["crc32"]
        if trainer:
            values = json.loads((path / "trainer.json").read_text())
            trainer(values)
            data = json.dumps(values).encode()
            (path / "trainer.json").write_bytes(data)
            manifest["files"]["trainer.json"] = {"size": len(data), "crc32": zlib.crc32(data)}
        change(manifest)
        text = json.dumps({**manifest, "crc32": manifest_checksum(manifest)})
        (path / "megazoo.json").write_text(text)
        return path

    return make


def opened(path):
    """Open a step, and read all of it."""
    model = megazoo.from_config(tiny_config(layers=2), seed=4)
    return load(SavedModel(path), model, megazoo.optim.AdamW(model))


def tensor(name, **values):
    return lambda m: m["tensors"][name].update(values)


def shard(name, **values):
    return lambda m: m["tensors"][name]["shard"].update(values)


def in_place_of(key, *place):
    """Return a change that puts a value in the place of a manifest's own."""

    def change(manifest):
        for step in place[:-1]:
            manifest = manifest[step]
        manifest[place[-1]] = key

    return change


def named(name):
    """Return a change that adds a file of this name."""
    return in_place_of({"size": 1, "crc32": 0}, "files", name)


EMBEDDING = "embedding.weight"  # [61, 32], cut along its rows
WHOLE = {"dim": 0, "parts": [61], "units": []}
FORGED = {
    "an axis that is not there": (
        shard(EMBEDDING, axis="toy"),
        f"{EMBEDDING} is sharded over toy, which the layout does not have",
    ),
    "an axis of no name": (shard(EMBEDDING, axis="{tp}"), "shard.axis"),
    "folded by 0": (in_place_of({"toy": 0}, "layout", "folded"), "must be an int of at least 1"),
    "one dimension cut twice": (
        tensor(EMBEDDING, shard=[WHOLE, WHOLE | {"axis": "toy"}]),
        f"{EMBEDDING} has 2 shards along dimension 0, but",
    ),
    "one axis cut twice": (
        tensor(EMBEDDING, shard=[WHOLE, {"dim": 1, "parts": [32], "units": []}]),
        f"{EMBEDDING} has 2 shards along the axis tp, but",
    ),
    "tp of 0": (in_place_of(0, "layout", "tp"), "layout.tp is 0: it must be an int of at least 1"),
    "tp of -1": (in_place_of(-1, "layout", "tp"), "layout.tp is -1: it must be an int"),
    "tp of True": (in_place_of(True, "layout", "tp"), "layout.tp is True: it must be an int"),
    "tp of 10**9": (in_place_of(10**9, "layout", "tp"), "layout.tp is 1000000000: it must be"),
    "tp of 2": (in_place_of(2, "layout", "tp"), "model_tp_1_pp_0.safetensors is not in"),
    "tp of 1e30": (in_place_of(10**30, "layout", "tp"), "it must be an int of at most"),
    "pp of nothing": (in_place_of(None, "layout", "pp"), "layout.pp is None: it must be an int"),
    "no dp": (lambda m: m["layout"].pop("dp"), "layout has no dp"),
    "layout": (in_place_of([1, 1, 1], "layout"), "layout is a list: it must be an object"),
    "format of True": (in_place_of(True, "format"), "format is True"),
    "no files": (lambda m: m.pop("files"), "files is None: it must be an object"),
    "config": (in_place_of(["layers"], "config"), "config is a list: it must be an object"),
    "family": (in_place_of({}, "family"), "family is an object: it must be a string"),
    "files": (in_place_of([], "files"), "files is a list: it must be an object"),
    "size": (in_place_of(-1, "files", MODEL, "size"), "size is -1: it must be an int of at"),
    "size's type": (in_place_of("9", "files", MODEL, "size"), "size is '9': it must be an int"),
    "crc32": (in_place_of(2**32, "files", MODEL, "crc32"), "crc32 is 4294967296: it must be"),
    "name ..": (named(".."), "outside its directory: .."),
    "name a/b": (named("a/b"), "outside its directory"),
    "name of NUL": (named("a\0"), r"'a\\x00' can't be the name of a file"),
    "long name": (named("é" * 128), "can't be the name of a file"),
    "half a character": (named("\ud800"), "is not a manifest: UnicodeEncodeError"),
    "tensor": (in_place_of(5, "tensors", NORM), "tensors.norm.weight is 5: it must be an obj"),
    "tensor's name": (in_place_of({}, "tensors", "\x1b[2J"), "can't be the name of a tensor"),
    "shape of -1": (tensor(NORM, shape=[-1]), r"norm.weight.shape\[0\] is -1: it must be"),
    "shape's type": (tensor(NORM, shape="32"), "norm.weight.shape is '32': it must be a list"),
    "shape of 1e30": (tensor(NORM, shape=[10**30]), r"shape\[0\] is 1000000000000000000000000"),
    "shape's product": (tensor(NORM, shape=[2**50, 2**50]), "norm.weight has shape .* too small"),
    "shape too large": (tensor(NORM, shape=[2**30]), "norm.weight has shape .* too small for it"),
    "dtype": (tensor(NORM, dtype="I64"), "norm.weight.dtype is 'I64': this value is not supported"),
    "file's type": (tensor(NORM, file=5), "norm.weight.file is 5: it must be a string"),
    "file elsewhere": (tensor(NORM, file="../x.safetensors"), "x.safetensors is not in the list"),
    "file of none": (tensor(NORM, file="x"), "norm.weight: x is not in the list of files"),
    "format string": (
        tensor(NORM, file="{tp.__class__}"),
        r"{tp.__class__} is not in the list of files",
    ),
    "moment": (tensor(NORM + ".exp_avg", shape=[31]), r"exp_avg has shape \[31\], but norm.wei"),
    "dim": (shard(EMBEDDING, dim=2), "don't add up to it"),
    "negative dim": (shard(EMBEDDING, dim=-1), "shard.dim is -1"),
    "parts": (shard(EMBEDDING, parts=[60]), r"the parts \[60\] of dimension 0 don't add up to it"),
    "part of 0": (shard(EMBEDDING, parts=[61, 0]), r"shard.parts\[1\] is 0: it must be an int"),
    "negative part": (shard(EMBEDDING, parts=[62, -1]), r"shard.parts\[1\] is -1"),
    "no parts": (shard(EMBEDDING, parts=[]), "shard.parts is a list"),
    "unit of 0": (shard(EMBEDDING, units=[0]), r"shard.units\[0\] is 0"),
    "units": (shard(EMBEDDING, units=[1, 1]), r"has parts \[61\], but units \[1, 1\]"),
    "unit above part": (
        shard(EMBEDDING, units=[62]),
        "61 in units of 62 can't be sharded over tp 1",
    ),
    "fewer layers": (
        in_place_of(1, "config", "layers"),
        r"lists the tensor layers\.1\.\S*, which the model of its config does not have",
    ),
    "dtype of no file": (tensor(NORM, dtype="BF16"), "norm.weight has dtype torch.float32, but"),
    "many layers": (in_place_of(10**9, "config", "layers"), "has 84 tensors for 1000000000 layers"),
    "wide": (in_place_of(2**20, "config", "hidden_size"), "has shape"),
    "no tensor": (lambda m: m["tensors"].pop(NORM), "has no tensor norm.weight"),
    "another size": (in_place_of(2, "files", MODEL, "size"), "bytes, but megazoo.json has 2"),
    "config's type": (in_place_of("two", "config", "layers"), "layers is 'two': it must be an int"),
    "config's list": (in_place_of([1], "config", "hidden_size"), "hidden_size is a list"),
    "config's bool": (in_place_of(True, "config", "heads"), "heads is True: it must be an int"),
    "config's rate": (in_place_of(math.nan, "config", "residual_dropout"), "must be finite"),
    "config's name": (in_place_of(1, "config", "leyers"), "unknown gpt2 setting 'leyers'"),
    "config without": (in_place_of(10**30, "config", "vocab_size"), "vocab_size 10000.* at most"),
}


def test_a_forged_manifest_is_refused_in_one_line_that_names_it(forged):
    for case, (change, message) in FORGED.items():
        path = forged(change)
        with pytest.raises(UserError, match=message) as refused:
            opened(path)
        assert str(path) in str(refused.value), case
        assert len(str(refused.value)) < 600, case


def test_what_is_not_forged_opens_and_keys_of_later_versions_are_left(forged):
    path = forged(lambda m: m.update(later={"x": 1}))
    assert opened(path)["step"] == 1
    assert Checkpoint(path).manifest["later"] == {"x": 1}


def test_text_that_is_no_manifest_is_refused(tmp_path):
    for text, message in (
        ("[" * 100_000, "is not a manifest: RecursionError"),
        ('{"format": ' + "9" * 5000 + "}", "is not a manifest: ValueError: Exceeds the limit"),
        ('{"format": 1, "format": 1}', "is not a manifest: ValueError: the key 'format' occu"),
        ('{"format": NaN}', "has format nan, and this megazoo reads formats 1"),
        ("[]", "is not a manifest: TypeError"),
        ("\xff", "is not a manifest"),
    ):
        (tmp_path / "megazoo.json").write_text(text, encoding="latin-1")
        with pytest.raises(UserError, match=message):
            Checkpoint(tmp_path)
    with open(tmp_path / "megazoo.json", "wb") as file:
        file.truncate(2**36)  # holes, which take no room on the disk
    with pytest.raises(UserError, match="is not a manifest: it has more than"):
        Checkpoint(tmp_path)


def test_a_box_that_no_writer_has_is_not_left_as_memory_was(whole):
    """Even of a manifest that was let in: what is read is all that was asked for."""
    checkpoint = Checkpoint(whole)
    checkpoint.layout["tp"] = 0
    destination, spec = torch.empty(61, 32), ParameterSpec((61, 32), Shard(0, (61,)))
    with pytest.raises(
        UserError, match=r"1952 of 1952 elements of embedding\.weight are not stored"
    ):
        checkpoint.read_into(EMBEDDING, destination, spec, ParallelContext())


def test_a_cut_is_let_in_exactly_if_its_pieces_cover_each_element_once():
    """Against the pieces themselves, painted onto the tensor."""
    chance, outcomes = random.Random(0), set()
    for _ in range(2000):
        parts = [chance.randrange(1, 9) for _ in range(chance.randrange(1, 4))]
        units = [chance.choice([1, 1, 2, 3, 4]) for _ in parts] if chance.random() < 0.8 else []
        tp, shape = chance.randrange(1, 7), [2, sum(parts)]
        cut = Shard(1, tuple(parts), tuple(units))
        info = TensorInfo(shape, "F32", cut, "x")
        spec, owners, held = ParameterSpec(tuple(shape), cut), torch.zeros(shape), 0
        try:
            for rank in range(tp):
                for piece in spec.pieces({"tp": (tp, rank)}):
                    (a, b), (c, d) = piece.box
                    assert 0 <= c < d <= shape[1]
                    held += (b - a) * (d - c)
                    owners[a:b, c:d] += piece.owned
            covered = bool((owners == 1).all())
        except (AssertionError, ZeroDivisionError):
            covered = False
        try:
            assert _elements_held("x", info, {"tp": tp}) == held
            let_in = True
        except UserError:
            let_in = False
        assert let_in == covered, (parts, units, tp)
        outcomes.add(let_in)
    assert outcomes == {True, False}


def resumed(path):
    """The options of a run that goes on from a step."""
    state = resumed_state(SavedModel(path))
    return CommandLine.read(["--steps", "9"]).options(
        state["settings"], origin=str(path / "trainer.json")
    )


def settings(**values):
    return lambda trainer: trainer["settings"].update(values)


TRAINER = {
    "metrics": (
        settings(metrics="/tmp/x"),
        "settings has metrics, which a checkpoint must not contain",
    ),
    "save": (
        settings(save="/tmp/x", keep_last=1),
        "settings has (save|keep_last), which a checkpoint must not contain",
    ),
    "import": (settings(**{"import": "x.py"}), "settings has import, which a checkpoint must not"),
    "config": (
        settings(config="x.toml"),
        "settings has config, which a checkpoint must not contain",
    ),
    "a flag": (settings(**{"--metrics=/tmp/x": 1}), "settings has '--metrics=/tmp/x', which"),
    "tokenizer": (settings(tokenizer="/etc"), "tokenizer is '/etc': a checkpoint may only name"),
    "type": (settings(steps="4"), "steps is '4': it must be an int"),
    "type of a number": (settings(lr=True), "lr is True: it must be a number"),
    "several": (settings(lr=[1, 2]), "lr is a list: it must be a number"),
    "choice": (settings(dtype="float8"), "dtype is 'float8': use one of float32, bfloat16"),
    "range": (settings(seq_length=0), "seq_length 0 must be at least 1"),
    "nan": (settings(lr=math.nan), "lr nan must be 0 or more"),
    "beta": (settings(beta1=1.0), "beta1 1.0 must be below 1"),
    "huge": (settings(warmup_steps=10**30), "warmup_steps is 1000.*: it must be below"),
    "NUL": (settings(data=["a\0"]), r"data is 'a\\x00': it must be text"),
    "half a character": (settings(data=["\udc80"]), "data is '.udc80': it must be text"),
    "empty": (settings(data=[""]), "data is empty"),
    "pattern": (
        settings(train_only="a" * 1001),
        "train_only has 1001 characters: use at most 1000",
    ),
    "settings": (lambda t: t.update(settings=[]), "settings is a list: it must be an object"),
    "no settings": (lambda t: t.pop("settings"), "trainer.json has no settings"),
    "tasks, which may run Python": (
        settings(eval_tasks="base/evil.yaml"),
        "settings has eval_tasks, which a checkpoint must not contain",
    ),
    "step": (lambda t: t.update(step=-1), "step is -1: it must be an int of at least 0"),
    "step's type": (lambda t: t.update(step="1"), "step is '1': it must be an int"),
    "samples": (lambda t: t.update(consumed_samples=10**30), "consumed_samples is 1000"),
    "tokens": (lambda t: t.update(consumed_tokens=math.nan), "consumed_tokens is nan: it must"),
    "wandb_run": (lambda t: t.update(wandb_run="../x"), "wandb_run is '../x': it must be a str"),
    "a metrics output": (
        lambda t: t.update(metric_runs={"../x": "a"}),
        "metric_runs has a wrong key: it must be a str",
    ),
    "dots": (lambda t: t.update(metric_runs={"mlflow": ".."}), "metric_runs.* wrong value"),
    "a metrics run": (
        lambda t: t.update(metric_runs={"mlflow": "../x"}),
        r"metric_runs\[...\] has a wrong value: it must be a str",
    ),
    "run": (lambda t: t.update(run="a b"), "run is 'a b': it must be a string"),
    "data": (lambda t: t.update(data=[{"source": 1}]), r"data\[0\]"),
}


def test_a_forged_trainer_json_is_refused_when_the_run_goes_on(forged):
    for case, (change, message) in TRAINER.items():
        path = forged(trainer=change)
        with pytest.raises(UserError, match=message) as refused:
            resumed(path)
        assert "trainer.json" in str(refused.value), case


def test_runs_of_metrics_outputs_are_read_from_earlier_checkpoints(tmp_path):
    state = {"step": 1, "consumed_samples": 1, "consumed_tokens": 8, "settings": {}}
    earlier = {**state, "wandb_run": "a1", "trackio_run": "quiet river"}
    runs = read_state(earlier, tmp_path)["callbacks"]["outputs"]
    assert runs == {"wandb": "a1", "trackio": "quiet river"}
    found = read_state({**earlier, "metric_runs": {"wandb": "b"}}, tmp_path)["callbacks"]
    assert found == {"outputs": {"wandb": "b", "trackio": "quiet river"}}
    now = {**state, "callbacks": {"outputs": {"wandb": "c"}, "mine": {"a": 1}}}
    assert read_state(now, tmp_path)["callbacks"] == now["callbacks"]


def test_settings_that_a_run_keeps_are_taken_and_text_is_never_a_flag_or_path(forged):
    path = forged(trainer=settings(data=["--metrics=/tmp/x", "--save"], separate_documents=True))
    options = resumed(path)
    assert options.data.data == ("--metrics=/tmp/x", "--save")
    assert options.data.separate_documents is True
    assert (options.training.steps, options.optimizer.lr) == (9, 1e-3)
    assert (options.logging.metrics, options.checkpoint.save) == (None, None)
    assert SavedModel(forged(trainer=settings(tokenizer="/etc"))).tokenizer is None


def test_a_forged_state_of_the_optimizer_is_refused(forged):
    scale = {"value": math.nan, "good_steps": 0, "patience": 1}
    for change, message in (
        (lambda t: t.pop("optimizer_steps"), "has no optimizer_steps"),
        (lambda t: t.update(optimizer_steps=-1), "optimizer_steps is -1"),
        (lambda t: t.update(optimizer_steps="1"), "optimizer_steps is '1': it must be an int"),
        (lambda t: t.update(loss_scale=2.0), "loss_scale is 2.0: it must be an object"),
        (
            lambda t: t.update(loss_scale=scale),
            "loss_scale.value is nan: it must be a number of at least 1",
        ),
        (lambda t: t.update(loss_scale={"value": 2.0}), "loss_scale has no good_steps"),
    ):
        path = forged(trainer=change)
        with pytest.raises(UserError, match=message) as refused:
            opened(path)
        assert str(path / "trainer.json") in str(refused.value)


def test_a_users_own_keys_may_be_anything(tmp_path):
    model = megazoo.from_config(tiny_config(layers=1))
    own = {"settings": ["mine"], "run": 5, "data": None, "wandb_run": {"a": [1e400]}}
    path = save(tmp_path, 1, model, megazoo.optim.AdamW(model), own)
    source = SavedModel(path)
    assert load(source, model, megazoo.optim.AdamW(model))["settings"] == ["mine"]
    assert source.tokenizer is None

"""What users type by habit, at the command line and in Python."""

import inspect
from dataclasses import fields

import pytest
import torch

import megazoo
from megazoo import pretrain
from megazoo.checkpoint import Checkpoint
from megazoo.cli.settings import resolve
from megazoo.errors import UserError
from megazoo.generate import GenerationSettings
from megazoo.models.pretrained import open_source
from megazoo.settings import _is_path, described, kinds_of
from megazoo.trainer.options import Options
from megazoo.trainer.outputs import OUTPUTS
from tests.support.harness_files import tokenizer_of
from tests.support.pretraining import SMALL, close, losses

IDS = torch.arange(12).reshape(1, 12)


def test_one_command_starts_a_run_and_resumes_it(tmp_path, capsys):
    save = tmp_path / "run"
    job = [*SMALL, "--load", str(save), "--save", str(save)]
    job += ["--metrics", str(save / "metrics.jsonl"), "--lr-decay-steps", "4"]
    pretrain.main([*job, "--steps", "2"])
    assert f"--load {save} has no checkpoint yet: this run is its first" in capsys.readouterr().err
    pretrain.main([*job, "--steps", "4"])
    assert "no checkpoint yet" not in capsys.readouterr().err
    assert Checkpoint(save).trainer["step"] == 4
    straight = tmp_path / "straight.jsonl"
    pretrain.main([*SMALL, "--metrics", str(straight), "--lr-decay-steps", "4", "--steps", "4"])
    assert close(losses(save / "metrics.jsonl"), losses(straight))


def test_only_a_directory_without_any_checkpoint_is_a_start(tmp_path):
    def error(load, save, *more) -> str:
        with pytest.raises(UserError) as refused:
            resolve([*SMALL, "--load", str(load), "--save", str(save), *more], "")
        return str(refused.value)

    absent = tmp_path / "absent"
    assert "absent is not a directory; remove --load" in error(absent, tmp_path / "other")
    assert "is not a directory" in error(absent, absent, "--load-weights-only")
    for name in ("step_00000004/model.safetensors", "latest", "config.json", "model.safetensors"):
        path = tmp_path / name.replace("/", "_")
        (path / name).parent.mkdir(parents=True)
        (path / name).write_text("{}")
        assert "no checkpoint yet" not in error(path, path), name
    (absent / "logs").mkdir(parents=True)
    (absent / "logs" / "x").write_text("")
    assert resolve([*SMALL, "--load", str(absent), "--save", str(absent)], "").weights.base is None
    file = tmp_path / "run.toml"
    file.write_text(f'load = "{absent}"\nsave = "{absent}"\n')
    assert not resolve([*SMALL, "--config", str(file)], "").options.checkpoint.load


def test_a_new_model_has_room_for_the_tokenizer(tmp_path, capsys):
    tokenizer = tokenizer_of("llama")
    tokenizer.save_pretrained(tmp_path)
    job = [*SMALL, "--tokenizer", str(tmp_path), "--dry-run"]
    assert pretrain.prepare(job).config.vocab_size == len(tokenizer) > 257
    told = f"vocab-size: {len(tokenizer):,}, as the tokenizer {tmp_path} needs, in place of 257"
    assert told in capsys.readouterr().err
    assert pretrain.prepare([*job, "--vocab-size", "5000"]).config.vocab_size == 5000
    assert pretrain.prepare([*SMALL, "--dry-run"]).config.vocab_size == 257
    assert "vocab-size" not in capsys.readouterr().err
    with pytest.raises(UserError, match="vocab-size 300 is smaller than the vocabulary"):
        pretrain.prepare([*job, "--vocab-size", "300"])


def test_a_record_can_name_no_output():
    """A setting that is a path is an input that a record may name, or left out of it."""
    settings = described(Options)
    paths = {name for name, kind in kinds_of(Options).items() if _is_path(kind)}
    assert {"save", "metrics", "record", "profile", "tensorboard", "config"} <= paths
    assert {name for name in paths if settings[name].result} == {"load", "lora_load", "reference"}
    outputs = {name for name, setting in settings.items() if setting.output}
    assert outputs == {"save", "record", "profile"} | OUTPUTS.keys()
    assert not any(settings[name].result for name in outputs)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "gpt2"
    megazoo.from_config("gpt2-tiny").save_pretrained(path)
    return path


def test_arguments_of_transformers_when_loading(saved):
    ignored = {"trust_remote_code": True, "low_cpu_mem_usage": True, "use_safetensors": True}
    ignored |= {"device_map": "auto", "attn_implementation": "sdpa", "use_cache": False}
    model = megazoo.from_pretrained(saved, torch_dtype=torch.bfloat16, **ignored)
    assert model.dtype == torch.bfloat16
    assert megazoo.from_pretrained(saved, revision="main", dtype="fp32", torch_dtype="float32")
    for place in ("cpu", {"": "cpu"}, torch.device("cpu")):
        assert megazoo.from_pretrained(saved, device_map=place).dtype == torch.float32
    refused = {
        "device_map": ("cuda:1", "device_map='cuda:1': the model is on the device of its context"),
        "attn_implementation": ("flash_attention_2", "remove it: megazoo chooses the kernel"),
        "load_in_8bit": (True, r"call megazoo\.layers\.round_to_int8\(model\)"),
        "cache_dir": ("/x", "set the variable HF_HOME"),
        "subfolder": ("a", "pass the path of the subfolder"),
    }
    for name, (value, told) in refused.items():
        with pytest.raises(UserError, match=told):
            megazoo.from_pretrained(saved, **{name: value})
    with pytest.raises(UserError, match="dtype float32 and torch_dtype float16 differ"):
        megazoo.from_pretrained(saved, dtype="float32", torch_dtype="float16")
    with pytest.raises(UserError, match="nothing can't be changed when gpt2 is loaded"):
        megazoo.from_pretrained(saved, nothing=1)
    with pytest.raises(UserError, match=r"^a/b is not a directory, and no model of that name"):
        megazoo.from_pretrained("a/b", revision="v1")


def test_a_missing_path_and_a_name_without_its_organisation(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for path in ("runs/nope", "models/nope"):
        with pytest.raises(UserError, match=f"^the directory {path} does not exist; as a name on"):
            megazoo.from_pretrained(path)
    with pytest.raises(UserError, match=r"on the Hugging Face hub it is openai-community/gpt2$"):
        open_source("gpt2")


def test_arguments_of_transformers_in_a_call(saved):
    model = megazoo.from_pretrained(saved)
    same = model(IDS, use_cache=False, return_dict=True, output_hidden_states=False).logits
    assert torch.equal(same, model(IDS).logits)
    refused = {
        "output_hidden_states": (True, r"forward hooks on the layers: model\.layers\[i\]"),
        "output_attentions": (True, "the probabilities are never stored"),
        "past_key_values": ("cache", r"call model\.generate"),
        "inputs_embeds": (IDS, "pass input_ids"),
        "logits_to_keep": (IDS, "take a slice of the logits"),
    }
    for name, (value, told) in refused.items():
        with pytest.raises(UserError, match=rf"model\(\.\.\.\) does not support {name}.*{told}"):
            model(IDS, **{name: value})
    with pytest.raises(TypeError, match="has no argument output_hiden_states"):
        model(IDS, output_hiden_states=True)


def test_layers_have_numbers(saved):
    model = megazoo.from_pretrained(saved)
    assert model.layers[3] is model.layers["3"]
    assert list(model.layers) == ["0", "1", "2", "3"]
    with pytest.raises(UserError, match="layer 4 is not on this rank, which has the layers: 0, 1"):
        model.layers[4]


def test_generate_declares_its_arguments():
    declared = inspect.signature(megazoo.models.Model.generate).parameters
    assert {f.name for f in fields(GenerationSettings)} <= declared.keys()

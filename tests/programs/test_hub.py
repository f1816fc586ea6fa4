"""Models by their names on the Hugging Face hub: a hub on loopback, huggingface_hub as it is."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from huggingface_hub.constants import HF_HUB_CACHE
from transformers import AutoModelForCausalLM, LlamaConfig

import megazoo
from megazoo.hub import local_directory, name_of, wanted
from tests.support.hub_server import SHA, TOKEN, Hub, files_of, serving
from tests.support.programs import python
from tests.support.tokenizer_files import TOKENS, train

ROOT = Path(__file__).parents[2]
NAME = "tiny-org/llama"
EXTRA = {"README.md": b"# a model", "pytorch_model.bin": b"not read", "onnx/model.onnx": b"x"}
READ = {"config.json", "generation_config.json", "model.safetensors"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A directory of transformers, with a tokenizer."""
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=TOKENS["gpt2"], hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    train("gpt2").save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
def hub(directory, tmp_path):
    """The hub; `address` and `environment` are those of its server and of its users."""
    hub = Hub({NAME: files_of(directory) | EXTRA})
    with serving(hub) as hub.address:
        hub.environment = {
            name: value for name, value in os.environ.items() if not name.startswith("HF_")
        }
        hub.environment |= {
            "HF_ENDPOINT": hub.address,
            "HF_HOME": str(tmp_path / "home"),
            "PYTHONPATH": str(ROOT),
        }
        yield hub


def run(hub, tmp_path, *arguments, **environment):
    return subprocess.run(
        [python(), *arguments], cwd=tmp_path, env=hub.environment | environment,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


SCRIPT = """
import json, sys
import megazoo
from megazoo import hub
from megazoo.tokenizer import open_tokenizer

results = []
for name in sys.argv[1:]:
    hub._fetched.cache_clear()
    try:
        if name.startswith("push:"):
            model = megazoo.from_pretrained("tiny-org/llama")
            results.append(model.push_to_hub(name[5:]))
        elif name.startswith("tokenizer:"):
            results.append(open_tokenizer(name[10:]).encode("a b"))
        else:
            results.append(megazoo.from_pretrained(name).weights_path)
    except megazoo.UserError as error:
        results.append([error.exit_code, str(error)])
print(json.dumps(results))
"""


def outcomes(hub, tmp_path, *names, **environment):
    done = run(hub, tmp_path, "-c", SCRIPT, *names, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_a_model_is_downloaded_once_and_then_found_offline(hub, tmp_path):
    hub.cut = {"model.safetensors"}  # breaks off once
    (first, second, third), told = outcomes(hub, tmp_path, NAME, NAME, f"{NAME}@v1")
    assert first == second == third == f"{NAME}@{SHA}"
    files = hub.downloads()
    assert set(files) > READ
    assert not {"README.md", "pytorch_model.bin", "model.onnx"} & set(files)
    assert sorted(files) == sorted([*set(files), "model.safetensors"])
    assert told.count("download tiny-org/llama: ") == 1
    before = len(hub.requests)
    (offline, absent), _ = outcomes(hub, tmp_path, NAME, "tiny-org/other", HF_HUB_OFFLINE="1")
    assert offline == first
    assert absent[0] == 2
    assert "tiny-org/other is not a directory, and no model of that name is in the" in absent[1]
    assert len(hub.requests) == before
    (unreachable, missing), told = outcomes(
        hub, tmp_path, NAME, "tiny-org/other", HF_ENDPOINT="http://127.0.0.1:9"
    )
    assert unreachable == first
    assert "the Hugging Face hub can't be reached; the cached files are used" in told
    assert missing[0] == 1
    assert missing[1].startswith("tiny-org/other is not a directory, and can't be downloaded from")


def test_refusals_are_one_line_and_a_token_opens(hub, tmp_path):
    hub.repositories |= {f"me/{name}": hub.repositories[NAME] for name in ("gated", "private")}
    hub.repositories["me/empty"] = {"README.md": b"", "q4.gguf": b"GGUF"}
    hub.gated, hub.private = {"me/gated"}, {"me/private"}
    names = ["me/gated", "me/private", "me/absent", f"{NAME}@v2", "me/empty"]
    (gated, private, absent, revision, empty), _ = outcomes(hub, tmp_path, *names)
    assert gated[1].startswith("me/gated is gated: request access")
    assert private[1].startswith("me/private is not a directory, and no model of that name is on")
    assert absent[1].startswith("me/absent is not a directory, and no model of that name is on")
    assert revision[1] == f"{NAME} has no revision v2 on the Hugging Face hub"
    assert empty[1] == (
        "me/empty on the Hugging Face hub has no model: it lacks config.json; download a GGUF "
        "file, and pass its path: hf download me/empty FILE.gguf"
    )
    names = ["me/gated", "me/private", "push:me/new", "me/new", f"tokenizer:{NAME}"]
    (gated, private, address, new, ids), _ = outcomes(hub, tmp_path, *names, HF_TOKEN=TOKEN)
    assert (gated, private) == (f"me/gated@{SHA}", f"me/private@{SHA}")
    assert address == f"{hub.address}/me/new"
    assert new == f"me/new@{SHA}"
    assert {*READ, "tokenizer.json"} <= hub.repositories["me/new"].keys()
    pushed = tmp_path / "pushed"
    pushed.mkdir()
    for name, data in hub.repositories["me/new"].items():
        (pushed / name).write_bytes(data)
    ids = torch.tensor([ids])
    ours = megazoo.from_pretrained(pushed)(ids).logits
    theirs = AutoModelForCausalLM.from_pretrained(pushed)(ids).logits
    torch.testing.assert_close(ours, theirs)


def test_the_ranks_of_a_machine_download_once(hub, tmp_path):
    command = ["-m", "megazoo", "generate", NAME, "--tp", "2", "--device", "cpu"]
    done = run(hub, tmp_path, *command, "--prompt", "a", "--max-new-tokens", "2")
    assert done.returncode == 0, done.stderr
    assert len(hub.downloads()) == len(set(hub.downloads()))
    asked = [path for _, path, _ in hub.requests if path.startswith("/api/models")]
    assert sum("/tree/" not in path for path in asked) <= 4  # of the starter, and of one rank
    assert set(hub.downloads()) > READ


def test_a_directory_of_that_name_wins(tmp_path, directory, monkeypatch):
    place = tmp_path / NAME
    place.parent.mkdir()
    place.symlink_to(directory)
    monkeypatch.chdir(tmp_path)
    assert megazoo.from_pretrained(NAME).weights_path == str(place)


def test_which_files_are_wanted():
    shards = ["model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    others = ["consolidated.safetensors", "pytorch_model.bin", "a/config.json", "x.gguf"]
    assert wanted([*shards, *others, "config.json"]) == [*shards, "config.json"]
    assert wanted(["pytorch_model.bin", "config.json"]) == ["pytorch_model.bin", "config.json"]
    adapter = ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"]
    assert wanted([*adapter, "adapter_model.bin"]) == adapter
    alone = wanted([*adapter, *shards, "config.json"], tokenizer_alone=True)
    assert alone == ["adapter_config.json", "tokenizer.json", "config.json"]
    template, *others = (f"additional_chat_templates/{name}" for name in ("a-1.jinja", "a b.jinja"))
    assert wanted([template, *others, f"x/{template}", "config.json"]) == ["config.json", template]


def test_names_of_the_cache():
    for place, name in (
        (Path(HF_HUB_CACHE, "models--a-b--c", "snapshots", SHA), f"a-b/c@{SHA}"),
        (Path(HF_HUB_CACHE, "models--gpt2", "snapshots", SHA), None),
        (Path(HF_HUB_CACHE, "models--a--b", "snapshots", SHA, "sub"), None),
        (Path("/elsewhere/models--a--b/snapshots", SHA), None),
        (Path("/home/me/runs/a"), None),
    ):
        assert name_of(place) == name


@pytest.mark.parametrize("name", ["a/b--c", "a/b-", "a/b..c", "a/b.git", "a/模型", "-a/b", "a/b/c"])
def test_names_that_the_hub_refuses_are_paths(name):
    assert local_directory(name) == Path(name)

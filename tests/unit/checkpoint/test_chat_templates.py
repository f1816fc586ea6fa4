"""Chat templates travel with a model: into checkpoints, Hugging Face directories and back; no name
in a file leads out of a directory."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import megazoo
from megazoo import pretrain
from megazoo.checkpoint import Checkpoint
from megazoo.checkpoint.ownership import foreign_entry, remove
from megazoo.checkpoint.schema import check_manifest
from megazoo.checkpoint.writing import write_atomically
from megazoo.errors import UserError
from megazoo.formats.hugging_face.export import write_hugging_face
from megazoo.models.pretrained import open_source
from megazoo.sidecars import CHAT_TEMPLATE, TEMPLATE_FOLDER
from megazoo.tokenizer import open_tokenizer, sidecar_files_in, tokenizer_files
from megazoo.tokenizer.templates import with_template
from tests.support.training import tiny_config

NAMED = {f"{TEMPLATE_FOLDER}/tool_use.jinja": b"of tools", f"{TEMPLATE_FOLDER}/rag-2.jinja": b"r"}
TEMPLATES = {"default": "of the file", "tool_use": "of tools", "rag-2": "r"}


@pytest.fixture
def source(tmp_path):
    """A directory of a tokenizer with several templates."""
    path = tmp_path / "source"
    (path / TEMPLATE_FOLDER).mkdir(parents=True)
    bpe = Tokenizer(models.BPE({"a": 0}, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.save(str(path / "tokenizer.json"))
    for name, data in {CHAT_TEMPLATE: b"of the file", **NAMED}.items():
        (path / name).write_bytes(data)
    for other in ("a b.jinja", ".jinja", "x.txt"):  # not read
        (path / TEMPLATE_FOLDER / other).write_text("other")
    return path


def test_all_templates_survive_a_round_trip(source, tmp_path):
    assert open_tokenizer(source).chat_templates == TEMPLATES
    files = tokenizer_files(source, templates=True)
    assert set(files) == {"tokenizer.json", CHAT_TEMPLATE, *NAMED}
    assert set(tokenizer_files(source)) == {"tokenizer.json"}  # templates change no tokens
    model = megazoo.from_config(tiny_config(layers=2))
    model.sidecar_files = files
    model.save_parallelized(tmp_path / "shards")
    for path in (tmp_path / "shards", tmp_path / "hf"):
        if path.name == "hf":
            path.mkdir()
            write_hugging_face(open_source(tmp_path / "shards"), path)
        assert foreign_entry(path) is None
        assert open_tokenizer(path).chat_templates == TEMPLATES
        assert {**files, **sidecar_files_in(path)} == sidecar_files_in(path)
        if path.name == "shards":
            Checkpoint(path).verify()
            assert Checkpoint(path).sidecar_files == files
    for path in (tmp_path / "shards", tmp_path / "hf"):
        other = path / TEMPLATE_FOLDER / "mine.txt"
        other.write_text("mine")
        assert foreign_entry(path) == f"{TEMPLATE_FOLDER}/mine.txt"
        assert remove(path)
        assert [file for file in path.rglob("*") if file.is_file()] == [other]
        other.unlink()
        assert not remove(path)
        assert not path.exists()


def test_a_linked_folder_is_not_megazoos(source, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / TEMPLATE_FOLDER).symlink_to(source / TEMPLATE_FOLDER)
    assert foreign_entry(tmp_path / "out") == TEMPLATE_FOLDER
    with pytest.raises(UserError, match="is a symbolic link, and writing to it would change"):
        write_atomically(tmp_path / "out" / TEMPLATE_FOLDER / "new.jinja", b"x")
    assert not (source / TEMPLATE_FOLDER / "new.jinja").exists()
    assert remove(tmp_path / "out")
    assert (source / next(iter(NAMED))).exists()


def test_a_new_default_hides_no_template(tmp_path):
    named = [{"name": name, "template": text} for name, text in TEMPLATES.items()]
    files = {"tokenizer_config.json": json.dumps({"chat_template": named}).encode()}
    changed = with_template(files, "mine")
    assert changed == {**files, **NAMED, CHAT_TEMPLATE: b"mine"}
    assert with_template(changed, "again") == {**changed, CHAT_TEMPLATE: b"again"}
    assert with_template(changed, "own", only=True) == {**files, CHAT_TEMPLATE: b"own"}
    hidden = {f"{TEMPLATE_FOLDER}/default.jinja": b"old", **NAMED}
    assert with_template(hidden, "mine") == {**NAMED, CHAT_TEMPLATE: b"mine"}
    for name in ("../x", "a/b", "", "x\n"):
        config = json.dumps({"chat_template": {name: "x"}}).encode()
        with pytest.raises(
            UserError, match=r"^tokenizer_config.json: the chat template .* can't be"
        ):
            with_template({"tokenizer_config.json": config}, "mine")


def test_a_manifest_names_no_file_outside(source, tmp_path):
    model = megazoo.from_config(tiny_config(layers=2))
    model.sidecar_files = dict(NAMED)
    model.save_parallelized(tmp_path / "shards")
    manifest = json.loads((tmp_path / "shards" / "megazoo.json").read_text())
    check_manifest(manifest, tmp_path)
    for name in (
        "../x.jinja",
        "a/x.jinja",
        f"{TEMPLATE_FOLDER}/../x.jinja",
        f"{TEMPLATE_FOLDER}/x",
    ):
        files = {**manifest["files"], name: {"size": 1, "crc32": 1}}
        with pytest.raises(UserError, match="outside its directory"):
            check_manifest({**manifest, "files": files}, tmp_path)


def test_a_given_template_is_the_only_one_of_a_trained_model(source, tmp_path):
    talk = {"messages": [{"role": r, "content": "a"} for r in ("user", "assistant")]}
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(talk)}\n" * 8)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE({byte: place for place, byte in enumerate(alphabet)}, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.save(str(source / "tokenizer.json"))
    config = {"eos_token": "a", "chat_template": {"rag": "x"}}
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    (source / CHAT_TEMPLATE).write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    words = "--steps 1 --layers 1 --seq-length 8 --global-batch-size 2 --split 100,0 --device cpu"
    common = [*words.split(), "--data", str(tmp_path / "a.jsonl"), "--tokenizer", str(source)]
    pretrain.main([*common, "--save", str(tmp_path / "run")])
    saved = open_tokenizer(Checkpoint(tmp_path / "run").path)
    assert saved.chat_templates == open_tokenizer(source).chat_templates
    given = "{% for m in messages %}a{{ m.content }}{% endfor %}"
    (tmp_path / "mine.jinja").write_text(given)
    common += ["--chat-template", str(tmp_path / "mine.jinja")]
    pretrain.main([*common, "--save", str(tmp_path / "other")])
    saved = open_tokenizer(Checkpoint(tmp_path / "other").path)
    assert saved.chat_templates == {"default": given}

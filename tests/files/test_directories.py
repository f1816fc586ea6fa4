"""What is written never harms what was there: links, files of others, and what killed programs
leave."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import megazoo
from megazoo import pretrain
from megazoo.checkpoint import Checkpoint, directories, load, save
from megazoo.checkpoint.places import step_name
from megazoo.errors import UserError
from megazoo.formats.hugging_face.export import write_hugging_face
from megazoo.formats.resharding import write_shards
from megazoo.models.pretrained import open_source
from tests.support.directories import PROGRAM, in_child, names, tiny_model

# What megazoo did not write


@pytest.fixture
def precious(tmp_path):
    """A checkpoint outside of the directories that are written."""
    save(tmp_path / "precious", 7, tiny_model(7.0))
    path = tmp_path / "precious" / step_name(7)
    yield path
    Checkpoint(path).verify()
    assert "thesis.tex" not in names(path)


def test_a_link_is_not_followed(tmp_path, precious):
    model = tiny_model()
    run = tmp_path / "run"
    run.mkdir()
    (run / step_name(2)).symlink_to(precious)
    (run / step_name(3)).symlink_to(tmp_path / "none")
    (run / "latest").symlink_to(precious / "trainer.json")
    (tmp_path / "out").symlink_to(precious)
    for step in (2, 3):
        refusal = f"{run / step_name(step)} is a symbolic link: pass the path that it points to"
        with pytest.raises(UserError, match=refusal):
            save(run, step, model)
    assert names(run) == ["latest", step_name(2), step_name(3)]
    refusal = f"{tmp_path}/out is a symbolic link: pass the path that it points to"
    with pytest.raises(UserError, match=refusal):
        model.save_parallelized(tmp_path / "out")
    source = open_source(precious)
    for write in (write_hugging_face, lambda *a, **k: write_shards(*a, 1, 1, **k)):
        with pytest.raises(UserError, match=refusal):
            write(source, tmp_path / "out", overwrite=True)
    save(run, 4, model, keep_last=1)
    assert names(run) == ["latest", step_name(2), step_name(3), step_name(4)]
    assert (run / "latest").read_text() == f"{step_name(4)}\n"
    # a directory that is named by a link is as good as any
    (tmp_path / "link").symlink_to(run)
    save(tmp_path / "link", 5, model)
    assert Checkpoint(run).path.name == step_name(5)


def test_small_files_are_not_written_through_a_link(tmp_path):
    (tmp_path / "mine").write_text("my text")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".latest.partial").symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match=r"\.latest\.partial is a symbolic link, and writing"):
        save(tmp_path / "run", 1, tiny_model())
    assert (tmp_path / "mine").read_text() == "my text"
    assert names(tmp_path / "run") == [".latest.partial"]


def test_keep_last_removes_only_steps_of_this_run(tmp_path, precious):
    model = tiny_model()
    save(tmp_path / "run", 1, model, trainer={"run": "other"})
    save(tmp_path / "run", 2, model, trainer={"run": "ours"})
    save(tmp_path / "run", 3, model)  # of an older version
    run = tmp_path / "run"
    mine = ["step_00000002-best", "step_final", "step_2", "step_000000002"]
    for name in mine:
        shutil.copytree(run / step_name(2), run / name)
    (run / step_name(9)).symlink_to(precious)
    (run / step_name(2) / "notes.txt").write_text("my notes")
    for step in (4, 5):
        save(run, step, model, trainer={"run": "ours"}, keep_last=1)
    kept = ["latest", step_name(1), step_name(2), step_name(3), step_name(5), step_name(9)]
    assert names(run) == sorted([*kept, *mine])
    for name in [*mine, step_name(1), step_name(3), step_name(5)]:
        Checkpoint(run / name).verify()
    assert names(run / step_name(2)) == ["notes.txt"]


def test_notes_in_a_step_stay_when_it_is_saved_again(tmp_path):
    model = tiny_model()
    step = save(tmp_path, 1, model)
    (step / "notes.txt").write_text("my notes")
    (step / "plots").mkdir()
    save(tmp_path, 1, model)
    assert (step / "notes.txt").read_text() == "my notes"
    assert "plots" in names(step)
    assert names(tmp_path) == ["latest", "step_00000001"]
    Checkpoint(step).verify()


def test_the_program_keeps_the_steps_of_its_run_apart(tmp_path):
    run = [*PROGRAM, "--save", str(tmp_path), "--save-interval", "1", "--keep-last", "1"]
    pretrain.main([*run, "--steps", "2"])
    first = json.loads((tmp_path / step_name(2) / "trainer.json").read_text())["run"]
    pretrain.main([*run, "--steps", "1"])  # another
    assert names(tmp_path) == ["latest", step_name(1), step_name(2)]
    pretrain.main([*run, "--steps", "3", "--load", str(tmp_path / step_name(2))])
    assert names(tmp_path) == ["latest", step_name(1), step_name(3)]
    again = json.loads((tmp_path / step_name(3) / "trainer.json").read_text())["run"]
    other = json.loads((tmp_path / step_name(1) / "trainer.json").read_text())["run"]
    assert first == again != other


def writers(source, directory):
    """What replaces a directory, each as a function without arguments."""
    return {
        "reshard": lambda: write_shards(source, directory, 1, 1, overwrite=True),
        "merge": lambda: write_hugging_face(source, directory, overwrite=True),
    }


@pytest.mark.parametrize("tool", ["reshard", "merge"])
def test_overwrite_replaces_only_what_megazoo_wrote(tmp_path, tool, precious):
    source, out = open_source(precious), tmp_path / "out"
    for before in ("reshard", "merge"):
        writers(source, out)[before]()
        writers(source, out)[tool]()
        open_source(out)
        assert names(tmp_path) == ["out", "precious"]
        for name in ("thesis.tex", ".hidden"):
            (out / name).write_text("my work")
            refusal = f"{out} holds {name}, which megazoo did not write: move it, or"
            with pytest.raises(UserError, match=refusal):
                writers(source, out)[tool]()
            assert (out / name).read_text() == "my work"
            (out / name).unlink()
        (out / "config.json.d").mkdir()
        with pytest.raises(UserError, match=r"holds config\.json\.d, which megazoo did not"):
            writers(source, out)[tool]()
        shutil.rmtree(out)
    out.mkdir()
    (out / "config.json").write_text("{}")  # no weights of ours: not our model
    with pytest.raises(UserError, match=r"holds config\.json, which megazoo did not write"):
        writers(source, out)[tool]()
    save_file({"a": torch.ones(2)}, out / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="did not write"):
        writers(source, out)[tool]()
    with pytest.raises(UserError, match="which megazoo did not write: choose another dire"):
        tiny_model().save_parallelized(out)
    assert names(out) == ["config.json", "model.safetensors"]


def test_overwrite_spares_runs_and_the_input(tmp_path, precious):
    source, run = open_source(precious), tmp_path / "run"
    save(run, 1, tiny_model())
    for output, refusal in (
        (run, f"{run} holds latest, so it is the directory of a run: choose another"),
        (precious, f"{precious} is also the input: choose another output"),
        (
            precious.parent,
            f"{precious.parent} contains the input, {precious}: choose another output",
        ),
        (
            precious / "out",
            f"{precious}/out is inside the input, {precious}: choose another output",
        ),
        (tmp_path / "x/../precious" / precious.name, "is also the input: choose another output"),
    ):
        for write in writers(source, output).values():
            with pytest.raises(UserError, match=refusal):
                write()
    with pytest.raises(UserError, match="which megazoo did not write: choose another"):
        tiny_model().save_parallelized(run)
    Checkpoint(run).verify()
    assert names(run) == ["latest", step_name(1)]
    assert names(tmp_path) == ["precious", "run"]


# What killed programs leave


def killed_at_call(owner, name, moment, work):
    """Do some work in a process that dies instead of its call number `moment` of a function."""

    def dying():
        calls, function = [], getattr(owner, name)

        def die(*arguments, **options):
            calls.append(arguments)
            if len(calls) == moment:
                os._exit(77)
            return function(*arguments, **options)

        setattr(owner, name, die)
        work()
        os._exit(0)

    assert in_child(dying) == 77


def hidden(directory) -> list[str]:
    return [name for name in names(directory) if name.startswith(".") and name[-5:] != ".lock"]


def test_what_a_killed_save_leaves_goes(tmp_path):
    model, newer = tiny_model(1.0), tiny_model(2.0)
    for moment in (1, 2):
        run = tmp_path / str(moment)
        for step in (1, 2):
            save(run, step, model)
        (run / ".step_00000009.partial").mkdir()  # of an older version, and not whole
        (run / ".step_00000009.partial" / "model_tp_0_pp_0.safetensors").touch()
        killed_at_call(os, "rename", moment, lambda run=run: save(run, 2, newer))
        assert len(hidden(run)) == moment
        Checkpoint(run).verify()
        save(run, 3, model)
        assert names(run) == ["latest", *map(step_name, (1, 2, 3))]
        fresh = tiny_model(0.0)
        load(Checkpoint(run / step_name(2)), fresh)
        assert fresh.embedding.weight.unique().tolist() == [1.0]  # it has its name again


def test_what_a_killed_removal_of_an_old_step_leaves_goes(tmp_path):
    """Whatever of an old step is gone, the next save removes the rest, and what is whole is whole
    until then."""
    model = tiny_model()
    for moment in range(1, 7):
        run = tmp_path / str(moment)
        for step in (1, 2):
            save(run, step, model)
        killed_at_call(Path, "unlink", moment, lambda run=run: save(run, 3, model, keep_last=1))
        assert Checkpoint(run).path.name == step_name(3)
        save(run, 4, model, keep_last=1)
        assert names(run) == ["latest", step_name(4)], moment


def test_a_file_that_is_still_open_on_nfs_fails_no_save(tmp_path, monkeypatch):
    """NFS keeps such a file under another name, in a directory that can't be removed then."""
    model, rmdir = tiny_model(), Path.rmdir
    save(tmp_path, 1, model)

    def busy(path):
        (path / ".nfs0001").touch()
        rmdir(path)

    monkeypatch.setattr(Path, "rmdir", busy)
    save(tmp_path, 2, model, keep_last=1)
    monkeypatch.undo()
    (left,) = hidden(tmp_path)
    (tmp_path / left / ".nfs0001").unlink()
    save(tmp_path, 3, model)
    assert names(tmp_path) == ["latest", step_name(2), step_name(3)]


def test_hidden_directories_of_others_stay(tmp_path):
    for name in (".step_notes.partial", ".git", ".step_00000001.mine.partial"):
        (tmp_path / name).mkdir()
    (tmp_path / ".step_00000005.partial").mkdir()
    (tmp_path / ".step_00000005.partial" / "thesis.tex").write_text("my work")
    (tmp_path / ".step_00000006.partial").symlink_to(tmp_path / ".git")
    before = names(tmp_path)
    save(tmp_path, 1, tiny_model())
    assert names(tmp_path) == sorted([*before, "latest", "step_00000001"])
    assert (tmp_path / ".step_00000005.partial" / "thesis.tex").read_text() == "my work"


@pytest.mark.parametrize("kind", ["merge", "merged by the model", "reshard", "shards"])
def test_an_output_that_was_being_replaced_is_found(tmp_path, precious, kind):
    source, new = open_source(precious), tiny_model(8.0)
    for moment in (1, 2):
        out = tmp_path / f"out{moment}" / "model"
        write = {
            **writers(source, out),
            "merged by the model": lambda out=out: new.save_parallelized(
                out, merge_checkpoints=True
            ),
            "shards": lambda out=out: new.save_parallelized(out),
        }[kind]
        write()
        killed_at_call(os, "rename", moment, write)
        assert out.exists() == (moment == 1)
        model = megazoo.from_pretrained(out)
        assert model.embedding.weight.unique().tolist() in ([7.0], [8.0])
        open_source(out)
        write()
        assert names(out.parent) == ["model"]
        assert open_source(out).path == out


def test_an_unfinished_output_goes_when_it_is_written_again(tmp_path, precious):
    source, out = open_source(precious), tmp_path / "out"
    killed_at_call(os, "rename", 1, lambda: write_hugging_face(source, out))
    assert len(hidden(tmp_path)) == 1
    with pytest.raises(UserError, match="is not a directory"):
        open_source(out)
    write_hugging_face(source, out)
    assert names(tmp_path) == ["out", "precious"]


def test_an_output_below_a_file_is_refused(tmp_path, precious):
    """Whoever writes it: a tool, or a model."""
    file = tmp_path / "file"
    file.touch()
    model = megazoo.from_config("gpt2-tiny")
    for write in (
        lambda: write_hugging_face(open_source(precious), file / "below"),
        lambda: model.save_parallelized(file / "below" / "model"),
    ):
        with pytest.raises(UserError, match=rf"^{file} is not a directory"):
            write()


def test_two_tools_do_not_write_one_output(tmp_path, precious):
    out = tmp_path / "out"
    with (
        directories.new_directory(out),
        pytest.raises(UserError, match=f"{out}: another program is writing it: process"),
    ):
        write_hugging_face(open_source(precious), out)
    assert names(tmp_path) == ["out", "precious"]

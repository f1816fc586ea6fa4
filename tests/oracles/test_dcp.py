"""Checkpoints of torch.distributed.checkpoint: those of FSDP2 go on as FSDP2 does, and all others
are refused in one line that names what is wrong."""

import io
import os
import pickle
import shutil
import sys
import tracemalloc
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers

import megazoo
from megazoo import pretrain
from megazoo.cli.program import run_program
from megazoo.errors import UserError
from megazoo.formats.dcp.source import DistributedCheckpoint
from megazoo.formats.hugging_face import directory as hf_directory
from megazoo.formats.resharding import write_shards
from megazoo.models.pretrained import open_source
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.layout import Layout
from megazoo.programs import convert, inspect_checkpoint
from tests.support.dcp import (
    InPieces,
    forge,
    go_on,
    small_llama,
    tensors_of,
    torchtitan_tensors,
    train_with_fsdp2,
    write,
)
from tests.support.sampling import marked_slow
from tests.support.training import (
    PeakMemory,
    give_back_freed_memory,
    in_fresh_processes,
    layout_name,
    randomized_,
    run_in_layout,
)

LAYOUTS = [{}, {"tp": 2}, {"pp": 2}, {"dp": 2, "zero": 3}]
IDS = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("world", "flat", "fields"),
    [
        (2, False, {}),
        pytest.param(4, True, {}, marks=pytest.mark.slow),
        pytest.param(2, True, {"tie_word_embeddings": True}, marks=pytest.mark.slow),
    ],
)
def test_a_run_of_fsdp2_goes_on_in_any_layout(world, flat, fields, ranks, tmp_path):
    expected = ranks(train_with_fsdp2, world, tmp_path, flat, **fields)[0]
    assert {file.suffix for file in (tmp_path / "before").glob("__*")} == {".distcp"}
    assert len(list((tmp_path / "before").glob("__*"))) == world
    after = tensors_of(open_source(tmp_path / "after"))
    for layout in LAYOUTS:
        output = tmp_path / layout_name(layout)
        losses = run_in_layout(ranks, go_on, layout, tmp_path / "before", output)[0]
        assert losses == pytest.approx(expected, abs=1e-6), layout
        found = tensors_of(open_source(output))
        assert found.keys() == after.keys()
        for name, value in after.items():
            worst = (found[name] - value).abs().max()
            assert worst < 1e-6, f"{name} in {layout}: {worst}"


def logits_of(path: Path) -> torch.Tensor:
    with torch.no_grad():
        return megazoo.from_pretrained(path, ParallelContext())(IDS).logits


def logits_of_transformers(hf) -> torch.Tensor:
    with torch.no_grad():
        return hf(IDS).logits


def states_of(hf) -> dict:
    """States of AdamW after five steps, as get_optimizer_state_dict returns them."""
    state = {}
    for name, value in hf.named_parameters():
        moments = {"exp_avg": value.detach() * 0, "exp_avg_sq": value.detach() ** 2}
        state[name] = {"step": torch.tensor(5.0), **moments}
    return {"state": state, "param_groups": [{"lr": 1e-3, "params": list(state)}]}


NAMES = {
    "flat": lambda hf: hf.state_dict(),
    "nested": lambda hf: {"model": hf.state_dict()},
    "wrapped": lambda hf: {"module." + name: value for name, value in hf.state_dict().items()},
    "an application": lambda hf: {
        "app": {"model": hf.state_dict(), "optim": states_of(hf), "step": 3}
    },
    "compiled": lambda hf: {
        f"_orig_mod.{name}".replace("layers.1", "layers.1._checkpoint_wrapped_module"): value
        for name, value in hf.state_dict().items()
    },
    "torchtitan": lambda hf: {
        **torchtitan_tensors(hf), "freqs_cis": torch.ones(4), "rope.cache": torch.ones(4),
        "train_state": {"step": torch.tensor(3), "losses": torch.ones(2)}, "lr_scheduler": {"a": 1},
    },
    "torchtitan, nested": lambda hf: {"model": torchtitan_tensors(hf)},
}  # fmt: skip


def test_names_and_shards_of_all_kinds(tmp_path, monkeypatch):
    monkeypatch.setattr(hf_directory, "AT_ONCE", 1000)  # rows of a head are in several parts
    hf = small_llama(num_hidden_layers=2)
    expected = logits_of_transformers(hf)
    for number, (kind, state_of) in enumerate(NAMES.items()):
        pieces = 1 if "app" in state_of(hf) or "train_state" in state_of(hf) else number % 3 + 1
        state = state_of(hf)
        if pieces > 1 and "model" in state:
            state = {f"model.{name}": value for name, value in state["model"].items()}
        path = write(tmp_path / kind, state, hf.config, pieces)
        torch.testing.assert_close(logits_of(path), expected, msg=kind)
        assert open_source(path).has_states == (kind == "an application")


def test_states_of_torchtitan_have_the_rows_of_the_weights(tmp_path):
    hf = small_llama()
    weights = torchtitan_tensors(hf)
    state = dict(weights)
    for name, value in weights.items():
        state[f"optimizer.state.{name}.exp_avg"] = value + 1
        state[f"optimizer.state.{name}.exp_avg_sq"] = value + 2
        state[f"optimizer.state.{name}.step"] = torch.tensor(7.0)
    source = open_source(write(tmp_path / "run" / "step-7", state, hf.config))
    assert source.trainer["optimizer_steps"] == 7
    tensors = tensors_of(source)
    for name in source.specs:
        torch.testing.assert_close(tensors[f"{name}.exp_avg"], tensors[name] + 1)
        torch.testing.assert_close(tensors[f"{name}.exp_avg_sq"], tensors[name] + 2)


def test_a_rank_reads_only_its_bytes(tmp_path):
    hf = small_llama()
    path, size_of = write(tmp_path, hf.state_dict(), hf.config, pieces=3), {}
    for layout in (Layout(), Layout(tp=2)):
        ctx, source = ParallelContext(layout), open_source(path)
        before = source.bytes_read
        for entry in source.on_meta(ctx).entries():
            shard = torch.empty(entry.spec.local_shape(ctx.place))
            source.read_into(entry.name, shard, entry.spec, ctx)
            size_of[entry.name] = shard.nbytes
        assert source.bytes_read - before == sum(size_of.values())


def test_a_source_can_be_copied(tmp_path):
    hf = small_llama()
    source = open_source(write(tmp_path, {"a": hf.state_dict(), "optim": states_of(hf)}, hf.config))
    before, after = tensors_of(source), tensors_of(pickle.loads(pickle.dumps(source)))
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.fixture
def saved(tmp_path):
    """A checkpoint with states, its config.json in the parent."""
    hf = small_llama()
    hf.config.save_pretrained(tmp_path)
    return write(tmp_path / "dcp", {"model": hf.state_dict(), "optimizer": states_of(hf)})


def test_the_tools_read_it_and_a_run_goes_on_from_shards(saved, tmp_path, capsys):
    inspect_checkpoint.main([str(saved), "--verify"])
    shown = capsys.readouterr().out
    assert "__0_0.distcp" in shown
    assert "optimizer   state included" in shown
    convert.main([str(saved), str(tmp_path / "shards"), "--tp", "2"])
    assert "weights and optimizer state of dcp" in capsys.readouterr().out
    before, after = (tensors_of(open_source(path)) for path in (saved, tmp_path / "shards"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    sizes = "--seq-length 16 --global-batch-size 2 --micro-batch-size 2 --eval-steps 0 --steps 6"
    words = [*sizes.split(), "--lr", "1e-4", "--mock-data", "--device", "cpu", "--dtype", "float32"]
    for start, first in (("shards", 5), ("dcp", 0)):
        run = tmp_path / f"run of {start}"
        pretrain.main([*words, "--load", str(tmp_path / start), "--save", str(run)])
        trainer = open_source(run).trainer
        assert trainer["step"] == 6
        assert trainer["optimizer_steps"] == 6
        assert trainer["consumed_samples"] == 2 * (6 - first)


class Calls:
    """Calls os.system when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def first_chunk(metadata):
    """Return the first chunk of the embedding, and its place."""
    name = "model.model.embed_tokens.weight"
    places = (info for index, info in metadata.storage_data.items() if index.fqn == name)
    return metadata.state_dict_metadata[name].chunks[0], next(places)


def placed(**values):
    def change(metadata):
        vars(first_chunk(metadata)[1]).update(values)

    return change


def shaped(**values):
    def change(metadata):
        vars(first_chunk(metadata)[0]).update(values)

    return change


def without_chunk(metadata):
    metadata.state_dict_metadata["model.model.norm.weight"].chunks.clear()


def twice(metadata):
    chunks = metadata.state_dict_metadata["model.model.norm.weight"].chunks
    chunks.append(chunks[0])


def renamed(metadata):
    names = metadata.state_dict_metadata
    old, new = "model.model.layers.1.mlp.up_proj.weight", "model.model.layers.1.mlp.up_prj.weight"
    names[new] = names.pop(old)
    for index in list(metadata.storage_data):
        if index.fqn == old:
            info = metadata.storage_data.pop(index)
            vars(index)["fqn"] = new
            metadata.storage_data[index] = info


def larger(metadata):
    metadata.state_dict_metadata["model.model.norm.weight"].size = torch.Size([64])


def smaller(metadata):
    metadata.state_dict_metadata["model.model.norm.weight"].size = torch.Size([31])


OUTSIDE = r"\.metadata names a file outside its directory"
FORGED = {
    "an absolute path": (placed(relative_path="/dev/zero"), OUTSIDE),
    "a path upwards": (placed(relative_path="../dcp/__0_0.distcp"), OUTSIDE),
    "a directory": (placed(relative_path=".."), OUTSIDE),
    "a file that is missing": (placed(relative_path="__9_0.distcp"), "__9_0.distcp is missing"),
    "a negative offset": (placed(offset=-1), "has a number out of range"),
    "an offset past the end": (placed(offset=1 << 40), r"has \d+ bytes, but should have \d+"),
    "a huge length": (placed(length=1 << 61), r"has \d+ bytes, but should have \d+"),
    "a short length": (placed(length=9), "9 bytes can't hold"),
    "a length of text": (placed(length="9"), "has a number out of range"),
    "a huge chunk": (shaped(sizes=torch.Size([1 << 40, 32])), "bytes can't hold"),
    "a chunk past the end": (smaller, "a chunk of model.model.norm.weight reaches beyond the ten"),
    "no pieces": (without_chunk, "has no chunks"),
    "a missing piece": (
        lambda metadata: metadata.storage_data.clear(),
        r"metadata does not say where the piece of .* at \[0, 0\] is: use another checkpoint",
    ),
    "a chunk twice": (twice, "32 of 32 elements of model.model.norm.weight are stored more than"),
    "a larger tensor": (larger, "32 of 64 elements of model.model.norm.weight are not stored"),
    "compression": (placed(transform_descriptors=["x"]), "is compressed or encrypted"),
    "a misspelt name": (
        renamed, "lacks model.model.layers.1.mlp.up_proj.weight and has the unexpected "
        r"model.model.layers.1.mlp.up_prj.weight: .* did you mean .*up_proj.weight\?",
    ),
}  # fmt: skip


def test_forged_metadata_is_refused(saved, tmp_path):
    original = (saved / ".metadata").read_bytes()
    for case, (change, message) in FORGED.items():
        (saved / ".metadata").write_bytes(original)
        forge(saved, change)
        with pytest.raises(UserError, match=message) as refusal:
            open_source(saved)
        assert "\n" not in str(refusal.value), case


def test_a_pickle_that_calls_anything_is_refused(saved, tmp_path):
    marker, whole = tmp_path / "was-here", (saved / ".metadata").read_bytes()
    (saved / ".metadata").write_bytes(pickle.dumps({"x": Calls(marker)}))
    with pytest.raises(UserError, match=r"metadata is not safe to load: it would call posix.sys"):
        open_source(saved)
    (saved / ".metadata").write_bytes(whole)
    torch.save([Calls(marker), torch.zeros(4096)], tmp_path / "evil")
    (chunks,) = saved.glob("*.distcp")
    start = (tmp_path / "evil").read_bytes()
    chunks.write_bytes(start + chunks.read_bytes())
    forge(saved, placed(offset=0, length=len(start)))
    with pytest.raises(UserError, match=r"distcp is not safe to load: it would call posix.sys"):
        megazoo.from_pretrained(saved)
    assert not marker.exists()


def test_chunks_that_overlap_are_refused(tmp_path):
    hf = small_llama()

    def move(metadata):
        chunks = metadata.state_dict_metadata["model.norm.weight"].chunks
        index = next(
            index
            for index in metadata.storage_data
            if index.fqn == "model.norm.weight" and index.offset == chunks[1].offsets
        )
        info = metadata.storage_data.pop(index)
        chunks[1].offsets = torch.Size([8])
        metadata.storage_data[type(index)(index.fqn, torch.Size([8]))] = info

    path = write(tmp_path, hf.state_dict(), hf.config, pieces=2)
    forge(path, move)
    with pytest.raises(UserError, match="chunks of a tensor overlap"):
        megazoo.from_pretrained(path)


def with_quantized(hf):
    state = hf.state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    return {**state, name: state[name].to(torch.float8_e4m3fn)}


def with_misspelt(hf):
    names = torchtitan_tensors(hf)
    names["layers.0.attention.wqq.weight"] = names.pop("layers.0.attention.wq.weight")
    return names


def without_embedding(hf):
    state = hf.state_dict()
    return {name.replace("embed_tokens", "embed_token"): value for name, value in state.items()}


REFUSED = [
    (with_quantized, r"up_proj.weight has the data type torch.float8_e4m3fn: use one of"),
    (with_misspelt, r"lacks .*attention.wq.weight and has .*did you mean layers.0.attention.wq.we"),
    (without_embedding, r"lacks model.embed_tokens.weight of Llama: .*mean model.embed_token.weig"),
    (lambda hf: {"a": hf.state_dict(), "b": hf.state_dict()}, r"it has several models, with a\.mo"),
    (lambda hf: {"x": torch.ones(2)}, "its tensors must have the names of Hugging Face, or of tor"),
    (
        lambda hf: {**hf.state_dict(), "module.lm_head.weight": torch.ones(2)},
        r"it has module.lm_head.weight and lm_head.weight: remove one|it has lm_head.weight and",
    ),
]


def test_tensors_of_another_model_are_refused(tmp_path):
    hf = small_llama()
    for number, (state_of, message) in enumerate(REFUSED):
        path = write(tmp_path / str(number), state_of(hf), hf.config)
        with pytest.raises(UserError, match=message) as refusal:
            megazoo.from_pretrained(path)
        assert "\n" not in str(refusal.value)
    path = write(tmp_path / "mistral", torchtitan_tensors(hf))
    (path / "config.json").write_text(
        (tmp_path / "0" / "config.json")
        .read_text()
        .replace('"model_type": "llama"', '"model_type": "mistral"')
    )
    with pytest.raises(UserError, match="names of torchtitan's Llama, but its config describes a"):
        megazoo.from_pretrained(path)


def test_states_that_do_not_fit_are_refused(saved):
    source = open_source(saved)
    model = megazoo.from_config(source.config, ParallelContext())
    forge(
        saved,
        lambda metadata: metadata.state_dict_metadata.pop("optimizer.state.lm_head.weight.step"),
    )
    optimizer = megazoo.optim.AdamW(model)
    with pytest.raises(UserError, match=r"optimizer state of head\.weight, which was frozen"):
        megazoo.checkpoint.load(open_source(saved), model, optimizer)


@pytest.mark.parametrize("what", ["uneven", "amsgrad"])
def test_weights_are_read_without_a_state_that_adamw_can_not_continue(tmp_path, what):
    hf = small_llama()
    states = states_of(hf)
    if what == "uneven":
        states["state"]["lm_head.weight"]["step"] = torch.tensor(7.0)
    else:
        for state in states["state"].values():
            state["max_exp_avg_sq"] = state["exp_avg_sq"]
    source = open_source(write(tmp_path, {"model": hf.state_dict(), "optim": states}, hf.config))
    model = megazoo.from_config(source.config, ParallelContext())
    text = {"uneven": "after 5 to 7 steps", "amsgrad": "max_exp_avg_sq of AdamW"}[what]
    with pytest.warns(UserWarning, match=f"the optimizer state is not read: .*{text}"):
        megazoo.checkpoint.load(source, model)
    with pytest.raises(UserError, match="has no optimizer state: load only its weights"):
        megazoo.checkpoint.load(source, model, megazoo.optim.AdamW(model))


def test_a_rank_without_rows_writes_an_empty_chunk(tmp_path):
    """As for a router of fewer experts than ranks."""

    class WithEmpty(InPieces):
        def chunks_of(self, name, shape):
            rows, *columns = shape
            empty = ((rows, rows), *((0, size) for size in columns))
            return [*super().chunks_of(name, shape), empty]

    hf = small_llama(hidden_size=1024, intermediate_size=32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(hf.state_dict(), checkpoint_id=tmp_path, planner=WithEmpty(1), no_dist=True)
    hf.config.save_pretrained(tmp_path)
    torch.testing.assert_close(logits_of(tmp_path), logits_of_transformers(hf), rtol=0, atol=1e-2)


def test_a_record_that_grows_is_refused(saved):
    """A deflated record of zeros, which would need a thousand times the memory of the file."""
    (chunks,) = saved.glob("*.distcp")
    grown = io.BytesIO()
    torch.save(torch.zeros(4096), grown)
    bomb = io.BytesIO()
    with zipfile.ZipFile(grown) as old, zipfile.ZipFile(bomb, "w") as new:
        for info in old.infolist():
            is_order = info.filename.endswith("byteorder")
            how = {"compress_type": zipfile.ZIP_DEFLATED} if is_order else {}
            new.writestr(info.filename, bytes(1 << 24) if is_order else old.read(info), **how)
    start = bomb.getvalue()
    chunks.write_bytes(start + chunks.read_bytes())
    forge(saved, placed(offset=0, length=len(start)))
    tracemalloc.start()
    with pytest.raises(UserError, match="its numbers are big-endian"):
        megazoo.from_pretrained(saved)
    assert tracemalloc.get_traced_memory()[1] < 1 << 23
    tracemalloc.stop()


def test_files_that_are_missing_are_told_in_one_line(saved, tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").rename(tmp_path / "kept.json")

    def told() -> str:
        monkeypatch.setattr(sys, "argv", ["convert.py", str(saved), str(tmp_path / "out")])
        with pytest.raises(SystemExit) as stop:
            run_program(convert.main)
        assert stop.value.code == 2
        text = capsys.readouterr().err
        assert text.count("\n") == 1
        return text

    assert "torch.distributed.checkpoint without a config.json: copy the model's" in told()
    (tmp_path / "kept.json").rename(saved / "config.json")
    (saved / ".metadata").unlink()
    assert "has no .metadata, which torch.distributed.checkpoint writes last: the save" in told()
    shutil.rmtree(saved)


def test_the_folder_of_a_run_names_its_checkpoints(tmp_path):
    hf = small_llama()
    write(tmp_path / "step-5", hf.state_dict())
    for _ in range(2):
        with pytest.raises(UserError, match=r"several checkpoints: pass one .*step-5$"):
            open_source(tmp_path)
        hf.config.save_pretrained(tmp_path)


def test_the_head_has_the_name_that_it_has_in_memory(tmp_path):
    config = transformers.GPTNeoXConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=48, max_position_embeddings=32, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    hf = randomized_(transformers.GPTNeoXForCausalLM(config))
    assert "lm_head.weight" in hf.state_dict()  # embed_out.weight in files
    path = write(tmp_path, {"model": hf.state_dict()}, config)
    torch.testing.assert_close(logits_of(path), logits_of_transformers(hf))


def read_large(directory: Path) -> int:
    """Return the peak of memory above the start, of converting to shards."""
    give_back_freed_memory()
    with PeakMemory() as memory:
        write_shards(DistributedCheckpoint(directory), directory.parent / "shards", 2, 2)
    return memory.above


LARGE = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 8192}


@pytest.mark.parametrize("layers", marked_slow([6, 24], lambda _, layers: layers > 6))
@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is Linux's")
def test_memory_does_not_grow_with_the_model(layers, tmp_path):
    hf = small_llama(**LARGE, num_hidden_layers=layers)
    path = write(tmp_path / "dcp", hf.state_dict(), hf.config, pieces=2)
    (peak,) = in_fresh_processes(read_large, path, timeout=600)
    print(f"{sum(p.nbytes for p in hf.parameters()) / 1e6:.0f} MB, peak {peak / 1e6:.0f} MB")
    assert peak < 96 << 20 < sum(parameter.nbytes for parameter in hf.parameters())

"""GGUF files: read and written as transformers reads them, and bit for bit both ways."""

import contextlib
import hashlib
import json

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megazoo import pretrain
from megazoo.checkpoint import writing
from megazoo.errors import UserError
from megazoo.formats.gguf.architecture import rows_in_pairs
from megazoo.formats.gguf.export import write_gguf
from megazoo.formats.gguf.source import GGUFModel
from megazoo.formats.hugging_face import directory
from megazoo.formats.hugging_face.export import write_hugging_face
from megazoo.models.pretrained import from_pretrained, open_source
from megazoo.parallel.context import ParallelContext
from megazoo.programs import convert
from megazoo.tokenizer import open_tokenizer
from tests.support.training import randomized_
from tests.support.transformers_models import config_of, llama, scaled

IDS = torch.arange(24)[None] * 7 % 61
MODELS = {
    "llama": dict(family="llama", tie_word_embeddings=True),
    "llama, untied, with biases": dict(family="llama", attention_bias=True, mlp_bias=True),
    "llama, of wide heads": dict(family="llama", head_dim=12),
    "qwen2": dict(family="qwen2", use_sliding_window=False),
    "qwen3": dict(family="qwen3", tie_word_embeddings=True, head_dim=128),
    "qwen3, of wide heads": dict(family="qwen3"),
    "mistral": dict(family="mistral", sliding_window=None, rms_norm_eps=1e-6),
}


def model_of(family, **fields):
    torch.manual_seed(0)
    return randomized_(AutoModelForCausalLM.from_config(config_of(family, **fields)))


def saved(model, directory):
    model.save_pretrained(directory)
    return directory


def logits_of(model, ids=IDS):
    with torch.no_grad():
        return model.eval()(ids).logits


@pytest.mark.parametrize("name", MODELS)
def test_transformers_reads_what_is_written_and_it_comes_back(name, tmp_path):
    theirs = model_of(**MODELS[name])
    source, file = open_source(saved(theirs, tmp_path / "hf")), tmp_path / "model.gguf"
    write_gguf(source, file)
    if "wide" not in name and "biases" not in name:  # of which transformers reads nothing there
        read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name)
        torch.testing.assert_close(logits_of(read), logits_of(theirs), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        logits_of(from_pretrained(file)), logits_of(theirs), rtol=1e-5, atol=1e-5
    )
    again = tmp_path / "again"
    write_hugging_face(open_source(file), again)
    before, after = (
        AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (tmp_path / "hf", again)
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_llama3s_scaling_stands_in_a_tensor(tmp_path):
    """transformers ignores rope_freqs.weight; the published formula gives its values."""
    scaling = scaled("llama3", 8.0, 8192)
    theirs = llama(rope_scaling=scaling, head_size=16, rope_theta=5e5, max_positions=16384)
    file = tmp_path / "model.gguf"
    write_gguf(open_source(saved(theirs, tmp_path / "hf")), file)
    ours = open_source(file)
    assert {**ours.config.rope_scaling} == {**scaling}
    (factors,) = (t for t in gguf.GGUFReader(file).tensors if t.name == "rope_freqs.weight")
    wavelengths = 2 * np.pi * 5e5 ** (np.arange(0, 16, 2) / 16)
    smooth = np.clip((8192 / wavelengths - 1) / 3, 0, 1)
    np.testing.assert_allclose(factors.data, 1 / (smooth + (1 - smooth) / 8), rtol=1e-5)
    assert torch.equal(
        logits_of(from_pretrained(file)), logits_of(from_pretrained(tmp_path / "hf"))
    )


def k_quants(kind, rows, columns, random):
    """Random blocks of a kind that the package quantises nothing to, with small scales."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = random.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    scales = slice(-2, None) if kind.name == "Q6_K" else slice(0, 4)
    count = 1 if kind.name == "Q6_K" else 2
    largest = 1e-5 if kind.name == "Q6_K" else 1e-3
    small = random.uniform(0, largest, (rows, columns // block, count)).astype(np.float16)
    data[..., scales] = small.view(np.uint8)
    return data.reshape(rows, -1)


def quantised_file(path, kind, family="llama"):
    """Write a model by the gguf package alone, its matrices in blocks."""
    random, hidden, ffn, vocab = np.random.default_rng(0), 256, 512, 64
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(32)
    writer.add_embedding_length(hidden)
    writer.add_block_count(2)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(8)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocab)

    def add(name, rows, columns):
        if kind.name[-2:] == "_K":
            writer.add_tensor(name, k_quants(kind, rows, columns, random), raw_dtype=kind)
            return
        values = random.normal(0, 0.05, (rows, columns)).astype(np.float32)
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", vocab, hidden)
    for layer in range(2):
        for name, rows, columns in (
            ("attn_q", hidden, hidden), ("attn_k", hidden // 2, hidden),
            ("attn_v", hidden // 2, hidden), ("attn_output", hidden, hidden),
            ("ffn_gate", ffn, hidden), ("ffn_up", ffn, hidden), ("ffn_down", hidden, ffn),
        ):  # fmt: skip
            add(f"blk.{layer}.{name}.weight", rows, columns)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(hidden, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", "F16 BF16 Q8_0 Q4_0 Q4_1 Q4_K Q5_K Q6_K".split())
def test_blocks_are_read_as_transformers_reads_them_and_in_parts(name, tmp_path):
    file = quantised_file(tmp_path / "model.gguf", gguf.GGMLQuantizationType[name])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name)
    ours = from_pretrained(file, dtype=torch.float32)
    torch.testing.assert_close(logits_of(ours), logits_of(theirs), rtol=1e-5, atol=1e-5)
    whole = dict(ours.named_parameters())
    source = open_source(file)
    for rank in range(2):  # a rank's rows and columns, and what was read for them
        ctx = ParallelContext.virtual(2, rank=rank)
        before = source.bytes_read
        for entry in source.on_meta(ctx).entries():
            part = torch.empty(entry.parameter.shape)
            source.read_into(entry.name, part, entry.spec, ctx)
            for piece in entry.spec.pieces(ctx.place):
                place = tuple(slice(*bounds) for bounds in piece.box)
                assert torch.equal(part[piece.index()], whole[entry.name][place]), entry.name
        assert source.bytes_read - before < 0.52 * sum(p.nbytes for p in whole.values())


def test_rows_in_pairs_are_those_of_llama_cpps_converter():
    for heads, size in ((1, 4), (3, 8)):
        rows = np.arange(heads * size)
        theirs = rows.reshape(heads, 2, size // 2).swapaxes(1, 2).reshape(-1)  # as published
        assert (theirs[rows_in_pairs(0, len(rows), size)] == rows).all()


def test_q8_0_is_the_packages_and_keeps_vectors(tmp_path, monkeypatch):
    """What is written in pieces is what the package makes of a whole tensor."""
    monkeypatch.setattr(writing, "PIECE_BYTES", 1000)
    source = open_source(saved(model_of("qwen3", hidden_size=64), tmp_path / "hf"))
    write_gguf(source, tmp_path / "q8.gguf", q8_0=True)
    tensors = {t.name: t for t in gguf.GGUFReader(tmp_path / "q8.gguf").tensors}
    embedding = source.model.empty(source.config, ParallelContext()).embedding.weight
    source.read_into(
        "embedding.weight", embedding, source.specs["embedding.weight"], ParallelContext()
    )
    expected = gguf.quantize(embedding.detach().numpy(), gguf.GGMLQuantizationType.Q8_0)
    assert (tensors["token_embd.weight"].data == expected).all()
    assert tensors["output_norm.weight"].tensor_type.name == "F32"
    # 48 features are no multiple of 32
    assert tensors["blk.0.ffn_down.weight"].tensor_type.name == "F16"


def test_rows_are_paired_also_in_pieces(tmp_path, monkeypatch):
    """Of weights and biases, of heads of any size: pieces begin and end within a head."""
    theirs = model_of("llama", attention_bias=True, head_dim=12)
    source = open_source(saved(theirs, tmp_path / "hf"))
    write_gguf(source, tmp_path / "whole.gguf")
    monkeypatch.setattr(writing, "PIECE_BYTES", 4 * 32 * 5)  # five rows
    write_gguf(source, tmp_path / "model.gguf")
    assert (tmp_path / "model.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    tensors = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    for layer, block in enumerate(theirs.model.layers):
        for name in "qk":
            projection = getattr(block.self_attn, f"{name}_proj")
            for kind, value in projection.named_parameters():
                rows = value.detach().numpy()
                expected = rows.reshape(-1, 2, 6, *rows.shape[1:]).swapaxes(1, 2)  # as published
                found = tensors[f"blk.{layer}.attn_{name}.{kind}"]
                assert (found == expected.reshape(rows.shape)).all()
    monkeypatch.setattr(directory, "AT_ONCE", 100)
    again = dict(from_pretrained(tmp_path / "model.gguf").named_parameters())
    for name, value in from_pretrained(tmp_path / "hf").named_parameters():
        assert torch.equal(value, again[name]), name


def test_values_too_large_for_their_type_are_named(tmp_path):
    theirs = model_of("qwen3", hidden_size=64)
    with torch.no_grad():
        theirs.model.layers[0].mlp.down_proj.weight[0, 0] = 1e5
    source = open_source(saved(theirs, tmp_path / "hf"))
    with pytest.raises(UserError, match=r"blk\.0\.ffn_down\.weight contains .* too large for F16"):
        write_gguf(source, tmp_path / "q8.gguf", q8_0=True)
    assert not (tmp_path / "q8.gguf").exists()


def test_ids_of_generation_travel(tmp_path):
    theirs = model_of("llama")
    theirs.generation_config.eos_token_id, theirs.generation_config.bos_token_id = [0, 5], 7
    theirs.generation_config.pad_token_id = 3
    source = open_source(saved(theirs, tmp_path / "hf"))
    write_gguf(source, tmp_path / "m.gguf")
    found = open_source(tmp_path / "m.gguf").generation
    assert found == {"bos_token_id": 7, "eos_token_id": [0, 5], "pad_token_id": 3}


def edited(path, tmp_path, change):
    """A copy of a GGUF file with other metadata or tensors."""
    reader, file = gguf.GGUFReader(path), tmp_path / "edited.gguf"
    values = {key: field.contents() for key, field in reader.fields.items() if "GGUF." not in key}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    change(values, tensors)
    writer = gguf.GGUFWriter(file, values.pop("general.architecture"))
    for key, value in values.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        (add.get(type(value)) or writer.add_string)(key, value)
    for name, tensor in tensors.items():
        data = tensor if isinstance(tensor, np.ndarray) else tensor.data
        kind = None if isinstance(tensor, np.ndarray) else tensor.tensor_type
        writer.add_tensor(name, np.array(data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return quantised_file(
        tmp_path_factory.mktemp("gguf") / "model.gguf", gguf.GGMLQuantizationType.Q8_0
    )


REFUSED = {
    "another architecture": (
        lambda v, t: v.update({"general.architecture": "gemma"}),
        "general.architecture 'gemma' is not supported: only llama, qwen2, qwen3",
    ),
    "experts": (
        lambda v, t: v.update({"llama.expert_count": 8}),
        "llama.expert_count 8 is not supported",
    ),
    "a billion layers": (
        lambda v, t: v.update({"llama.block_count": 10**9}),
        "it has 20 tensors for llama.block_count 1000000000",
    ),
    "text for a number": (
        lambda v, t: v.update({"llama.rope.freq_base": "much"}),
        "rope.freq_base is 'much': it must be a number",
    ),
    "a missing number": (lambda v, t: v.pop("llama.block_count"), "it has no llama.block_count"),
    "a missing tensor": (
        lambda v, t: t.pop("blk.1.ffn_up.weight"),
        "lacks model.layers.1.mlp.up_proj.weight",
    ),
    "a tensor too many": (
        lambda v, t: t.update({"blk.0.gate.weight": np.ones(3, np.float32)}),
        "has the unexpected blk.0.gate.weight",
    ),
    "factors of another scaling": (
        lambda v, t: t.update({"rope_freqs.weight": np.arange(1, 17, dtype=np.float32)}),
        "rope_freqs.weight is not supported",
    ),
    "another value size": (
        lambda v, t: v.update({"llama.attention.value_length": 64}),
        "attention.value_length 64 is not supported: heads have 32 features",
    ),
    "integers": (
        lambda v, t: t.update({"output_norm.weight": np.ones(256, np.int32)}),
        "I32",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_named(name, small, tmp_path):
    change, message = REFUSED[name]
    file = edited(small, tmp_path, change)
    with pytest.raises(UserError) as raised:
        open_source(file)
    assert str(file.parent) in str(raised.value)
    assert message in str(raised.value)


def test_numbers_of_the_other_byte_order_are_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "big.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("token_embd.weight", np.ones((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match=r"big\.gguf is not supported: it is big-endian"):
        open_source(tmp_path / "big.gguf")


def test_broken_files_are_named(small, tmp_path):
    data = small.read_bytes()
    for size in (4, 20, 300, len(data) // 2, len(data) - 1):
        file = tmp_path / f"{size}.gguf"
        file.write_bytes(data[:size])
        with pytest.raises(UserError, match=f"{size}.gguf is not a complete GGUF file"):
            open_source(file)


def test_a_model_in_several_files_is_opened_by_any_of_them(small, tmp_path):
    reader = gguf.GGUFReader(small)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=8)
    for key, field in reader.fields.items():
        if key.startswith("llama."):
            value = field.contents()
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    files = sorted(tmp_path.glob("*.gguf"))
    assert len(files) == 3
    whole = dict(from_pretrained(small).named_parameters())
    for file in files[::2]:
        parts = from_pretrained(file).named_parameters()
        assert all(torch.equal(value, whole[name]) for name, value in parts)
    files[1].unlink()
    with pytest.raises(UserError, match=r"00002-of-00003.gguf is missing"):
        open_source(files[0])


def test_what_gguf_has_no_place_for_is_refused(tmp_path):
    for name, theirs, message in (
        ("gpt2", model_of("gpt2"), "only llama, mistral, qwen2, qwen3 are supported"),
        ("window", model_of("mistral"), "mistral with sliding_window 5 can't be written"),
        ("yarn", llama(rope_scaling=scaled("yarn", 4.0, 16)), "rope_type 'yarn' can't be written"),
        (
            "gelu",
            model_of("llama", hidden_act="gelu"),
            "hidden_act 'gelu' can't be written as GGUF: it must be 'silu'",
        ),
        (
            "llama3",
            llama(rope_scaling=scaled("llama3", 4.0, 16)),
            "original_max_position_embeddings 16 can't be written as GGUF: it must be 8192",
        ),
    ):
        source = open_source(saved(theirs, tmp_path / name))
        with pytest.raises(UserError, match=message):
            write_gguf(source, tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


def test_an_output_loses_nothing(small, tmp_path):
    source, other = open_source(small), tmp_path / "notes.gguf"
    other.write_text("notes")
    for path, overwrite, message in (
        (tmp_path / "model", False, "use a name such as model.gguf for OUTPUT"),
        (other, False, "exists: choose another name, or use --overwrite"),
        (other, True, "is not a GGUF file"),
        (small, True, "is also the input"),
        (tmp_path / "m-00001-of-00003.gguf", False, "is named like one part of a model"),
    ):
        with pytest.raises(UserError, match=message):
            write_gguf(source, path, overwrite=overwrite)
    assert other.read_text() == "notes"

    def fails(size):
        raise OSError("no space left")

    with contextlib.suppress(UserError):
        write_gguf(source, tmp_path / "new.gguf", progress=fails)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.gguf"]


def test_files_of_models_without_a_known_tokenizer_are_read(small):
    assert GGUFModel(small).tokenizer is None
    assert GGUFModel(small).sidecar_files == {}
    with pytest.raises(UserError, match=r"model.gguf has no tokenizer"):
        open_tokenizer(small)


def test_flags_of_another_target_are_refused(small, tmp_path):
    for flags, message in (
        (["--to", "hf", "--quantize", "q8_0"], "--quantize belongs to --to gguf: omit it with"),
        (["--to", "gguf", "--tp", "2"], "--tp belongs to --to shards: omit it with --to gguf"),
        (["--to", "gguf", "--quantize", "q8_0", "--dtype", "float32"], "use only one"),
    ):
        with pytest.raises(UserError, match=message):
            convert.main([str(small), str(tmp_path / "out.gguf"), *flags])


def test_adapters_on_a_gguf_file_resume_and_merge_and_are_recorded(small, tmp_path):
    run, record = tmp_path / "run", tmp_path / "record"
    words = ["--tokenizer", "byte", "--mock-data", "--seq-length", "8", "--global-batch-size", "2"]
    words += ["--eval-steps", "0", "--save", str(run), "--record", str(record), "--device", "cpu"]
    pretrain.main(["--load", str(small), "--lora-rank", "2", "--steps", "2", *words])
    (entry,) = json.loads((record / "record.json").read_text())["files"]
    digest = hashlib.sha256(small.read_bytes()).hexdigest()
    assert (entry["kind"], entry["name"], entry["sha256"]) == ("weights", small.name, digest)
    pretrain.main(["--load", str(run), "--steps", "4", *words])
    for name, arguments in (("a", [run]), ("b", [small, "--adapter", run])):
        convert.main([*map(str, arguments), str(tmp_path / name), "--to", "hf"])
    merged = [(tmp_path / name / "model.safetensors").read_bytes() for name in "ab"]
    assert merged[0] == merged[1]

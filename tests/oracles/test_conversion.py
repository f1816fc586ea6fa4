"""Hugging Face to shards to other shards and back: bit for bit, as transformers takes it, and in
little memory."""

import functools
import logging
import random
import warnings
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megazoo.checkpoint.writing import LazyTensor, write_json, write_safetensors
from megazoo.families.names import hf_names
from megazoo.families.registry import FAMILIES, family_of
from megazoo.formats.hugging_face.directory import HuggingFaceDirectory
from megazoo.formats.hugging_face.export import write_hugging_face
from megazoo.formats.resharding import write_shards
from megazoo.formats.source import SavedModel
from megazoo.models.pretrained import load_weights, open_source
from megazoo.parallel import ParallelContext
from tests.support.sampling import marked_slow
from tests.support.training import PeakMemory, give_back_freed_memory, in_fresh_processes
from tests.support.transformers_models import deep_gpt2, deep_llama, deep_mpt

# Every configuration that has tensors of its own, or other shapes.
MODELS = {
    "gpt2": deep_gpt2,
    "gpt2, untied, n_inner": lambda: deep_gpt2(tie_word_embeddings=False, n_inner=48),
    "llama": lambda: deep_llama(kv_heads=8),
    "llama, tied, biases, two KV heads": lambda: deep_llama(
        kv_heads=2, tie_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "llama, one KV head, wide heads": lambda: deep_llama(kv_heads=1, head_size=12),
    "mpt": deep_mpt,
    "mpt, untied": lambda: deep_mpt(tie_word_embeddings=False),
}
LAYOUTS = list(product((1, 2, 4, 8), (1, 2, 4)))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Each of the names twice: with dtypes, tp and pp that are drawn.
DRAW = random.Random(4)
CASES = [
    (name, DRAW.choice(LAYOUTS), DRAW.choice(LAYOUTS), dtype)
    for number, name in enumerate(MODELS)
    for dtype in (DTYPES[number % 3], DTYPES[(number + 1) % 3])
]


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Hugging Face directories, and their tensors, by model and dtype."""

    @functools.cache
    def make(name: str, dtype: torch.dtype) -> tuple[Path, dict]:
        directory = tmp_path_factory.mktemp("hf")
        MODELS[name]().to(dtype).save_pretrained(directory, max_shard_size="30KB")
        return directory, tensors_of(directory)

    return make


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in directory.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def check_round_trip(original: Path, tensors: dict, first, second, directory: Path) -> None:
    write_shards(HuggingFaceDirectory(original), directory / "a", *first)
    write_shards(SavedModel(directory / "a"), directory / "b", *second)
    write_hugging_face(SavedModel(directory / "b"), directory / "hf")
    again = tensors_of(directory / "hf")
    assert again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert again[name].dtype == tensor.dtype
        assert torch.equal(again[name], tensor), name
    SavedModel(directory / "b").verify()


@pytest.mark.parametrize(
    ("name", "first", "second", "dtype"),
    marked_slow(CASES, lambda number, _: number % 4 not in (0, 3)),
    ids=lambda value: str(value),
)
def test_there_and_back_is_bit_for_bit(originals, tmp_path, name, first, second, dtype):
    check_round_trip(*originals(name, dtype), first, second, tmp_path)


UNEVEN = {
    "gpt2": lambda: deep_gpt2(n_inner=50),
    "llama": lambda: deep_llama(kv_heads=8, ffn_size=1283, mlp_bias=True),
}


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("gpt2", (3, 1), (4, 2)),
        ("llama", (4, 2), (3, 1)),
        ("llama", (8, 1), (1, 2)),
        pytest.param("gpt2", (8, 1), (1, 2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_there_and_back_with_inner_features_that_tp_does_not_divide(tmp_path, name, first, second):
    UNEVEN[name]().save_pretrained(tmp_path / "original")
    check_round_trip(
        tmp_path / "original", tensors_of(tmp_path / "original"), first, second, tmp_path
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_through_every_pair_of_layouts(originals, tmp_path, name, dtype):
    for number, pair in enumerate(product(LAYOUTS, LAYOUTS)):
        check_round_trip(*originals(name, dtype), *pair, tmp_path / str(number))


def generated(directory: Path) -> str:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    inputs = tokenizer("def tensors_of(", return_tensors="pt")
    ids = model.generate(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=12
    )
    return tokenizer.decode(ids[0]), model.config.to_dict(), model.generation_config.to_dict()


@pytest.mark.parametrize(
    ("family", "with_generation_config"),
    [
        ("gpt2", True),
        ("llama", True),
        ("mpt", False),
        pytest.param("gpt2", False, marks=pytest.mark.slow),
        pytest.param("llama", False, marks=pytest.mark.slow),
        pytest.param("mpt", True, marks=pytest.mark.slow),
    ],
)
def test_transformers_takes_a_merged_directory_as_the_original(
    family, tokenizer, tmp_path, caplog, with_generation_config
):
    vocabulary = {"vocab_size": len(tokenizer)}
    scaling = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
    scaling["original_max_position_embeddings"] = 16
    hf = {
        "gpt2": lambda: deep_gpt2(**vocabulary, n_inner=128),
        "llama": lambda: deep_llama(**vocabulary, kv_heads=2, rope_scaling=scaling),
        "mpt": lambda: deep_mpt(**vocabulary),
    }[family]()
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    for name, value in ids.items():
        setattr(hf.config, name, value)
        setattr(hf.generation_config, name, value)
    hf.save_pretrained(tmp_path / "hf")
    tokenizer.save_pretrained(tmp_path / "hf")
    if not with_generation_config:
        (tmp_path / "hf" / "generation_config.json").unlink()
    expected, config, generation = generated(tmp_path / "hf")
    write_shards(HuggingFaceDirectory(tmp_path / "hf"), tmp_path / "a", 2, 2)
    write_hugging_face(SavedModel(tmp_path / "a"), tmp_path / "merged", max_shard_size="40KB")
    caplog.clear()
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        with warnings.catch_warnings(record=True) as shown, caplog.at_level(logging.WARNING):
            warnings.simplefilter("always")
            text, merged_config, merged_generation = generated(tmp_path / "merged")
    finally:
        logger.removeHandler(caplog.handler)
    assert [str(warning.message) for warning in shown] == []
    assert caplog.messages == []
    assert text == expected
    assert {name: merged_config[name] for name in ids} == ids
    differing = {
        name
        for name in config.keys() | merged_config.keys()
        if config.get(name) != merged_config.get(name)
    }
    assert differing <= {"_name_or_path"}
    assert generation.keys() == merged_generation.keys()


# Memory. The sizes that users have are in the slow tests.


def config_of(family: str, hidden: int, layers: int, vocabulary: int):
    sizes = {"hidden_size": hidden, "layers": layers, "vocab_size": vocabulary}
    sizes |= {"max_positions": 64, "heads": 16, "kv_heads": 8, "ffn_size": 4 * hidden}
    if family == "mixtral":
        sizes |= {"experts": 8, "ffn_size": hidden // 2}
    return FAMILIES[family].Config(**sizes)


def hugging_face_directory(directory: Path, config) -> None:
    """Random weights, written without being held."""
    directory.mkdir(parents=True)
    write_json(directory / "config.json", config.to_hugging_face())
    tensors, model = {}, FAMILIES[family_of(config)]
    for entry in model.on_meta(config, ParallelContext()).entries():
        for name, runs in hf_names(model, entry.name).parts(entry.spec):
            shape = (sum(run.count for run in runs), *entry.spec.shape[1:][-1:])
            tensors[name] = LazyTensor(shape, torch.float32, lambda rows, _: rows.normal_())
    write_safetensors(directory / "model.safetensors", tensors)


def convert_all(directory: Path) -> list[int]:
    """Convert, reshard and merge what is in directory/hf: the peaks of memory above the start."""
    give_back_freed_memory()
    steps = [
        lambda: write_shards(HuggingFaceDirectory(directory / "hf"), directory / "a", 4, 2),
        lambda: write_shards(SavedModel(directory / "a"), directory / "b", 2, 1),
        lambda: write_hugging_face(SavedModel(directory / "b"), directory / "c"),
    ]
    peaks = []
    for step in steps:
        with PeakMemory() as memory:
            step()
        peaks.append(memory.above)
    return peaks


def load_both(directory: Path, dtype: torch.dtype) -> list[tuple[int, int, int]]:
    """Load a rank's part of what convert_all was given and has made: the peak, its own bytes and
    those read."""
    give_back_freed_memory()
    numbers = []
    for name in ("hf", "b"):
        with PeakMemory() as memory:
            source = open_source(directory / name)
            folded = {"ep": 2} if hasattr(source.config, "experts") else {}
            ctx = ParallelContext.virtual(4, 2, 2, rank=5, folded=folded)
            model = source.model.empty(source.config, ctx, dtype=dtype)
            load_weights(source, model)
        numbers.append(
            (
                memory.above,
                sum(parameter.nbytes for parameter in model.parameters()),
                source.bytes_read,
            )
        )
        del model, source
    return numbers


def peaks_of_converting(directory: Path, *sizes) -> list[int]:
    """Peaks of RssAnon above the start: of converting, resharding and merging."""
    hugging_face_directory(directory / "hf", config_of(*sizes))
    (peaks,) = in_fresh_processes(convert_all, directory, timeout=600)
    return peaks


def check_loading(directory: Path) -> None:
    for dtype, wide in ((torch.float32, 1), (torch.bfloat16, 2)):
        (numbers,) = in_fresh_processes(load_both, directory, dtype)
        for peak, own, read in numbers:
            assert peak < 1.1 * own + (64 << 20)
            assert read < 1.05 * own * wide


@pytest.mark.parametrize("family", ["llama", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_pieces_move_one_at_a_time(tmp_path, family):
    """One tensor of this model takes 96 MB, all of them 270."""
    # four threads with two buffers each
    assert max(peaks_of_converting(tmp_path, family, 768, 2, 32768)) < 80 << 20
    check_loading(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_memory_of_converting_does_not_grow_with_the_model(tmp_path, family):
    two = peaks_of_converting(tmp_path / "two", family, 2048, 6, 32768)
    check_loading(tmp_path / "two")
    four = peaks_of_converting(tmp_path / "four", family, 2048, 13, 32768)
    print(two, four)
    assert max(two) < 300 * 10**6
    assert max(four) < 1.1 * max(two)

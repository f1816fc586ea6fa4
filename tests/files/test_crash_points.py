"""A death before and after every call that changes the disk, of whatever writes what must not be
lost: a reader finds the old or the new, whole, and the next run leaves what a quiet one leaves."""

import json
import os
import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import megazoo
from megazoo.checkpoint import Saver, save
from megazoo.data import preprocess as preprocessing
from megazoo.data.cache import cached_tokens
from megazoo.data.conversations import CHATML
from megazoo.data.encoding import Recipe
from megazoo.data.indexed import IndexedTokens
from megazoo.errors import UserError
from megazoo.models.pretrained import open_source, save_parallelized
from megazoo.programs import convert
from tests.support.deaths import in_a_child, tree
from tests.support.sampling import marked_slow
from tests.support.scripts import merge_shards
from tests.support.training import make_batch, tiny_config
from tests.support.transformers_models import gpt2

# Of the last moments, when the new takes the place of the old, `make test` tries one, or of text,
# which is quick, several at even distances; and of all moments one.
LAST, OF_TEXT_TRIED = 16, 4
# What `make test` leaves out: the same again, onto what is there, has these moments, too.
ONLY_ALL = {"shards", "convert_hf", "reshard", "merge_shards"}


class Operation(NamedTuple):
    """Something that writes.

    prepare: makes what is there before, in an empty directory. act: does it there. read: what a
    reader finds there, or None. gap: while the old is replaced there may be neither, for a moment.
    """

    prepare: Callable[[Path], object]
    act: Callable[[Path], object]
    read: Callable[[Path], object]
    gap: bool = False


@cache
def trained(steps: int):
    """Return a model and its optimizer after so many steps."""
    model = megazoo.from_config(tiny_config(layers=1), seed=3)
    model.sidecar_files = {"tokenizer.json": b'{"version": "1.0"}'}
    optimizer = megazoo.optim.AdamW(model)
    for step in range(steps):
        ids, targets = make_batch(step)
        model.train_batch(ids, targets=targets)
        optimizer.step()
    return model, optimizer


def saved(directory: Path, step: int, steps: int, **settings) -> None:
    save(directory / "run", step, *trained(steps), {"consumed_samples": steps}, **settings)


def several_saved(directory: Path) -> None:
    for step in (1, 2):
        saved(directory, step, step, keep_last=2)


def saved_in_the_background(directory: Path) -> None:
    with Saver(directory / "run", *trained(2), background=True) as saver:
        saver.save(2, {"consumed_samples": 2})


def found(directory: Path):
    """Return all that a reader of a checkpoint or of a Hugging Face directory finds, every number
    included; None if there is nothing."""
    try:
        source = open_source(directory)
    except UserError:
        return None
    source.verify()
    numbers = {}
    for weight, spec in source.specs.items():
        for name in (weight, *(f"{weight}.{state}" for state in source.states_of(weight))):
            tensor = torch.empty(spec.shape, dtype=source.dtype_of(name))
            source.read_into(name, tensor, spec, megazoo.ParallelContext())
            numbers[name] = tensor.numpy().tobytes()
    return source.config, source.trainer, numbers


def hugging_face(directory: Path, seed: int) -> None:
    """Write one of two directories as transformers does."""
    model = gpt2()
    next(model.parameters()).data.add_(seed)
    model.save_pretrained(directory)


def sources(directory: Path) -> Path:
    """Return where two checkpoints and two Hugging Face directories are to convert, beside the
    directory that an operation works in; they are made once."""
    place = directory.parent / "sources"
    if not place.exists():
        for number in (1, 2):
            save(place / f"run{number}", 1, *trained(number))
            hugging_face(place / f"hf{number}", number)
    return place


def tool(main: Callable, source: str, *arguments: str) -> Callable[[Path], None]:
    def run(directory: Path) -> None:
        main([str(sources(directory) / source), str(directory / "out"), *arguments])

    return run


def written_text(directory: Path, number: int) -> Path:
    """Write a JSONL file, with the same time at each call: caches and resumes depend on it."""
    chance, path = random.Random(number), directory / f"{number}.jsonl"
    lines = [{"text": "".join(chance.choices("ab c\n", k=30))} for _ in range(20)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    os.utime(path, (10**9, 10**9))
    return path


def texts(directory: Path) -> None:
    written_text(directory, 1)
    written_text(directory, 2)


def preprocessed(number: int) -> Callable[[Path], None]:
    def run(directory: Path) -> None:
        if not (directory / "1.jsonl").exists():
            texts(directory)
        preprocessing.CHUNK, preprocessing.SAVED_EVERY = 200, 1  # in this child alone
        recipe = Recipe((str(directory / f"{number}.jsonl"),), "byte", append_eod=True)
        preprocessing.preprocess(recipe, directory / "out", 0)

    return run


class Interrupted(Exception):
    """What ends a run in the middle, so that the next one goes on from there."""


def interrupted(directory: Path) -> None:
    texts(directory)
    calls = []

    def progress(_) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise Interrupted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preprocessing, "CHUNK", 200)
        patch.setattr(preprocessing, "SAVED_EVERY", 1)
        recipe = Recipe((str(directory / "2.jsonl"),), "byte", append_eod=True)
        with pytest.raises(Interrupted):
            preprocessing.preprocess(recipe, directory / "out", 0, progress=progress)


def cached(directory: Path):
    return cached_tokens(directory / "1.jsonl", "byte", CHATML)


def tokens_of(prefix: Path):
    """Return the sequences of token files."""
    try:
        tokens = IndexedTokens(prefix)
    except UserError:
        return None
    return [tokens[number].tolist() for number in range(len(tokens))]


def tokens_found(directory: Path):
    return tokens_of(directory / "out_text_document")


def cache_found(directory: Path):
    index = next((directory / "1.jsonl.tokens").glob("*.idx"), None)
    return index and tokens_of(index.with_suffix(""))


def out(directory: Path):
    return found(directory / "out")


def run_found(directory: Path):
    return found(directory / "run")


def parallelized(number: int, **settings) -> Callable[[Path], None]:
    def run(directory: Path) -> None:
        save_parallelized(trained(number)[0], directory / "out", **settings)

    return run


MERGED = {"merge_checkpoints": True, "max_shard_size": "50KB"}
CUT = ("--tp", "2", "--pp", "1")
SMALL = ("--max-shard-size", "50KB")
AGAIN = "--overwrite"


def nothing(_: Path) -> None:
    """Prepare nothing."""


OPERATIONS = {
    "a first step": Operation(nothing, lambda d: saved(d, 1, 1), run_found),
    "a new step": Operation(lambda d: saved(d, 1, 1), lambda d: saved(d, 2, 2), run_found),
    "the same step again": Operation(lambda d: saved(d, 1, 1), lambda d: saved(d, 1, 2), run_found),
    "the last two steps": Operation(
        several_saved, lambda d: saved(d, 3, 3, keep_last=2), run_found
    ),
    "in the background": Operation(lambda d: saved(d, 1, 1), saved_in_the_background, run_found),
    "shards": Operation(nothing, parallelized(2), out),
    "shards again": Operation(parallelized(1), parallelized(2), out),
    "merged": Operation(nothing, parallelized(2, **MERGED), out),
    "merged again": Operation(parallelized(1, **MERGED), parallelized(2, **MERGED), out),
    "convert_hf": Operation(sources, tool(convert.main, "hf2", *CUT), out),
    "convert_hf again": Operation(
        tool(convert.main, "hf1", *CUT), tool(convert.main, "hf2", *CUT, AGAIN), out
    ),
    "reshard": Operation(sources, tool(convert.main, "run2", *CUT), out),
    "reshard again": Operation(
        tool(convert.main, "run1", *CUT), tool(convert.main, "run2", *CUT, AGAIN), out
    ),
    "merge_shards": Operation(sources, tool(merge_shards.main, "run2", *SMALL), out),
    "merge_shards again": Operation(
        tool(merge_shards.main, "run1"), tool(merge_shards.main, "run2", *SMALL, AGAIN), out
    ),
    "preprocess": Operation(texts, preprocessed(2), tokens_found),
    "preprocess again": Operation(preprocessed(1), preprocessed(2), tokens_found, gap=True),
    "preprocess, resumed": Operation(interrupted, preprocessed(2), tokens_found),
    "the tokens kept beside JSONL": Operation(texts, cached, cache_found),
}

OF_TEXT = [name for name in OPERATIONS if name.startswith(("preprocess", "the tokens"))]


def die_and_go_on(name: str, tmp_path: Path, chosen: Callable[[int], list[int]]) -> list[str]:
    """Try an operation with a death at each of the chosen moments; returns what was wrong."""
    operation, told = OPERATIONS[name], tmp_path / "told"
    place = tmp_path / "work"  # the same path each time: what is written may depend on it

    def prepared() -> None:
        shutil.rmtree(place)
        shutil.copytree(tmp_path / "before", place, symlinks=True)

    def act() -> None:
        operation.act(place)

    trained(3)  # before the forks
    place.mkdir()
    operation.prepare(place)
    shutil.copytree(place, tmp_path / "before", symlinks=True)
    old = operation.read(place)
    count = in_a_child(act, None, told)
    new, quiet = operation.read(place), tree(place)
    assert new is not None
    assert new != old
    wrong = []
    for moment in chosen(count):
        prepared()
        if in_a_child(act, moment, told) is not None:
            wrong.append(f"moment {moment}: the calls are not the same in every run")
            continue
        try:
            here = operation.read(place)
        except UserError as error:
            wrong.append(f"moment {moment}: a reader finds {error}")
            continue
        if here not in (old, new) and not (operation.gap and here is None):
            lost = "nothing" if here is None else "a mixture"
            wrong.append(f"moment {moment} of {count}: a reader finds {lost}")
        try:
            in_a_child(act, None, told)
        except AssertionError as error:
            if here != new or "is not empty" not in str(error):  # else there is nothing left to do
                wrong.append(f"moment {moment} of {count}: the next run fails: {error}")
                continue
        # a lock of what is done says nothing to anybody
        left = {path for path, _ in tree(place).items() ^ quiet.items() if path[-5:] != ".lock"}
        if left:
            wrong.append(f"moment {moment} of {count}: the next run leaves {sorted(left)[:5]}")
    return wrong


@pytest.mark.parametrize(
    ("name", "fraction"),
    marked_slow(
        [(name, fraction) for name in OPERATIONS for fraction in ("some", "all")],
        lambda _, case: case[1] == "all" or case[0] in ONLY_ALL,
        name=", ".join,
    ),
)
def test_a_death_at_some_or_all_moments(name, fraction, tmp_path):
    def chosen(count: int) -> list[int]:
        chance, moments = random.Random(name), range(1, count + 1)
        if fraction == "all":
            return [*moments]
        step = LAST // OF_TEXT_TRIED if name in OF_TEXT else LAST
        last = moments[-LAST:][chance.randrange(step) :: step]
        return sorted({*last, chance.choice(moments)})

    assert die_and_go_on(name, tmp_path, chosen) == []

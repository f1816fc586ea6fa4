"""docs/lora.md: the numbers of its tables are those of the planner, and the tests that it names are
there. Its blocks run as printed in test_docs.py."""

import re
from pathlib import Path

import pytest

from megazoo.families.registry import FAMILIES
from megazoo.lora import LoRASettings
from megazoo.lora.settings import all_targets
from megazoo.models.counts import whole_model
from megazoo.models.registry import find_config
from megazoo.parallel.layout import Layout
from megazoo.planning import PlannedRun, Planner

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "lora.md").read_text()


def table_under(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, without the line that only draws."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = re.search(r"(^\|.*\n)+", section, re.MULTILINE)[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in rows if not set("".join(row)) <= set("-|")]


ADAPTERS = {
    "all parameters": None,
    "rank 8 on q and v": LoRASettings(rank=8, targets=("q", "v")),
    "rank 8 on all-linear": LoRASettings(rank=8, targets=("all-linear",)),
}


def test_what_llama_7b_takes_is_what_the_planner_tells():
    (_, *titles), *rows = table_under("Memory and time")
    assert len(titles) == 4
    config = find_config("llama-7b")
    for column, title in enumerate(titles):
        lora, _, recompute = title.partition(", `--recompute ")
        run = PlannedRun(
            micro_batch_size=1,
            global_batch_size=8,
            seq_length=2048,
            dtype="bfloat16",
            recompute=recompute.removesuffix("`") or "none",
        )
        plan = Planner(config, quick=True, attached=ADAPTERS[lora]).plan(Layout(), run)
        (rank,) = plan.ranks
        told = {
            "trained parameters": plan.trainable_parameters,
            "model FLOPs per token": plan.model_flops_per_token,
        }
        sizes = ("weights", "gradients", "optimizer", "activations", "total")
        told |= {name: getattr(rank, name) for name in sizes}
        for name, *cells in rows:
            number = float(cells[column].replace(",", "").replace("GB", "e9"))
            assert number == pytest.approx(told.pop(name), rel=0.02), (title, name)
        assert not told


def letters(name: str, digits: str = "") -> str:
    return re.sub(rf"[^a-z{digits}]", "", name.partition(" with ")[0].lower())


@pytest.mark.parametrize("family", FAMILIES)
def test_what_can_be_adapted_is_what_there_is(family):
    rows = {
        key: row[1:]
        for row in table_under("What can be adapted")
        for name in row[0].split(",")
        for key in (letters(name, "0-9"), letters(name))
    }
    config = find_config(f"{family}-tiny")
    targets = [t for t in all_targets(whole_model(config)) if ".0." in f".{t.module}."]
    row = rows.get(letters(family, "0-9")) or rows.get(letters(family)) or rows["allothers"]
    ours, theirs = (re.findall(r"`([^`]+)`", cell) for cell in row)
    for names in (ours, theirs):
        assert [[t for t in targets if t.is_called(name)] for name in names] == [
            [target] for target in targets
        ]


def test_each_mistake_names_the_test_that_finds_it():
    named = {re.search(r"`(test_\w+)`", row[-1])[1] for row in table_under(LAST)[1:]}
    assert len(named) >= 3
    file = ROOT / re.search(r"`(tests/[\w/]+\.py)`", PAGE.partition(f"## {LAST}")[2])[1]
    assert {name for name in named if f"def {name}(" not in file.read_text()} == set()


LAST = "Known bugs in parallel LoRA"

"""Check, on the CPU of this machine, that a model trains in every layout as it does in one process.

$ megazoo check layout --model llama --layouts tp2,pp2,tp2pp2
$ megazoo check layout --preset llama2-70b --shrink --layouts all
$ megazoo check layout --load path/to/llama --layouts tp2+sp,pp2v2
$ megazoo check layout --import mine.py --model mine
$ megazoo check layout --model llama --lora-rank 8 --layouts tp2+sp,pp2
$ megazoo check self-test

The steps take turns: plain rows, packed documents, and rows with padding, of an odd length. Prints,
for each layout, the worst relative difference of the loss, the gradient norm, any
parameter's gradient and any weight after the steps; where a difference begins, and what usually
causes it. Exits 1 if a layout fails.

--self-test plants published mistakes in small models, one after the other, runs the check, and
prints a table in Markdown of what it says of each. Exits 1 if one is not found, or another cause is
named than what was planted.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from megazoo.cli.flags import File, Name, parse_flags
from megazoo.cli.options import ImportOption
from megazoo.cli.parsing import required
from megazoo.errors import UserError, check_number
from megazoo.models.counts import parameter_count
from megazoo.models.pretrained import open_source
from megazoo.models.registry import find_config, tiny_preset
from megazoo.testing import Layout, Verdict, all_layouts, check_parallel, gallery, shrink
from megazoo.testing.layouts import switches

MOST_STEPS, MOST_RANKS = 10_000, 256


@dataclass
class Options(ImportOption):
    """What is checked."""

    model: Name = None
    """Family, preset or config file: config.json of Hugging Face, or TOML and JSON with our names.
    """
    preset: Name = None
    """The same."""
    load: File = None
    """Checkpoint or Hugging Face directory, with whose weights it is checked (with --shrink: with
    whose config)."""
    shrink: bool = False
    """Build it small: heads, KV groups, ties and kinds of layers remain."""
    layouts: Annotated[
        str,
        tyro.conf.arg(
            help="Names with commas between: sizes, as in tp2cp2pp2dp2v2, then what is "
            f"on: {switches()}. Or all."
        ),
    ] = "tp2,pp2,dp2,tp2pp2,tp2+sp,pp2v2"
    lora_rank: int = 0
    """Train adapters of this rank, of all linear layers, instead of the weights."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: the matrices of linear layers by Muon, all else by AdamW."""
    ranks: int = 4
    """The most ranks of --layouts all, which are processes of this machine."""
    steps: int = 3
    """Of training. The first has plain rows, the second packed documents, the third padding, and so
    on."""
    tolerance: float = 1e-5
    """Relative difference above which a layout fails."""
    self_test: bool = False
    """Check the check: plant mistakes, and see that each is found. Takes no other flags."""


def main(arguments: list[str]) -> None:
    options = parse_flags(Options, arguments, __doc__)
    if options.self_test:
        plant_every_bug(options)
        return
    required(options)
    given = [options.model, options.preset, options.load]
    if sum(each is not None for each in given) != 1:
        raise UserError("give one of --model, --preset and --load")
    if options.steps < 1 or options.ranks < 2:
        raise UserError(
            f"steps {options.steps} must be at least 1, and ranks {options.ranks} at least 2"
        )
    if options.steps > MOST_STEPS or options.ranks > MOST_RANKS:
        raise UserError(
            f"steps {options.steps} must be at most {MOST_STEPS}, "
            f"and ranks {options.ranks} at most {MOST_RANKS}"
        )
    check_number("tolerance", options.tolerance, 0)
    if options.load:
        config = open_source(options.load).config
    else:
        config = find_config(tiny_preset(options.model) if options.model else options.preset)
    if options.shrink:
        config = shrink(config)
    if options.layouts == "all":
        layouts = all_layouts(config, options.ranks)
    else:
        layouts = [Layout.named(name) for name in options.layouts.split(",")]
    print(f"{parameter_count(config):,} parameters, {options.steps} steps, against one process")
    print(f"{'layout':24}{'loss':>9}{'norm':>9}{'gradient':>10}{'weights':>9}")
    verdicts = check_parallel(
        config,
        layouts,
        load=None if options.shrink else options.load,
        import_=options.import_,
        lora_rank=options.lora_rank,
        optimizer=options.optimizer,
        steps=options.steps,
        tolerance=options.tolerance,
    )
    failed = 0
    for verdict in verdicts:
        print(line_of(verdict), flush=True)
        failed += not verdict.passed
    if failed:
        raise UserError(f"{failed} of {len(layouts)} layouts failed", exit_code=1)


def plant_every_bug(options: Options) -> None:
    """Print what the check says of each mistake of the gallery."""
    if options != Options(self_test=True):
        raise UserError("--self-test has models and layouts of its own: give no other flag")
    print(gallery.header(), flush=True)
    missed = 0
    for outcome in gallery.self_test(gallery.BUGS):
        print(gallery.line_of(outcome), flush=True)
        missed += not outcome.found
    if missed:
        raise UserError(
            f"{missed} of {len(gallery.BUGS)} planted mistakes were not found", exit_code=1
        )


def line_of(verdict: Verdict) -> str:
    """Return a verdict as a line of the table; - is what was not compared."""
    numbers = f"{verdict.loss:9.1e}{verdict.norm:9.1e}{verdict.gradient:10.1e}{verdict.weight:9.1e}"
    outcome = "pass" if verdict.passed else f"FAIL  {verdict.cause}"
    if verdict.usual:
        outcome += f"\n{'':24}usually: {verdict.usual}"
    return f"{verdict.layout!s:24}{numbers.replace('nan', '  -')}  {outcome}"

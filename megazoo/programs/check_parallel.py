"""Check on the CPU that a model trains in each parallel layout as in one process.

$ megazoo check layout --model llama --layouts tp2,pp2,tp2pp2
$ megazoo check layout --preset llama2-70b --shrink --layouts all
$ megazoo check layout --load path/to/llama --layouts tp2+sp,pp2v2
$ megazoo check layout --import mine.py --model mine
$ megazoo check layout --model llama --lora-rank 8 --layouts tp2+sp,pp2
$ megazoo check layout --model llama --resume --layouts tp2,pp2,dp2+zero
$ megazoo check layout --types --preset llama-7b --layouts tp8pp16cp4dp64
$ megazoo check self-test

The steps alternate between plain rows, packed documents, and rows of odd length with padding. For
each layout it prints the largest relative difference of the loss, of the gradient norm, of the
gradient of any parameter, and of any weight after the steps. For a layout that fails, it prints
where the difference starts and the usual cause. Exits 1 if a layout fails.

--resume checks that a run resumes as if it had never stopped. Each layout trains two steps, and
saves a checkpoint. The same layout and the next one of --layouts load it; tp2:pp2 names one such
pair. The loaded weights, master weights and moments must equal the saved ones bit for bit. In two
more steps, samples, learning rates, losses, gradient norms, the loss scale and (in float32) all
states must be those of one process that trained four steps.

--types starts no processes and trains no steps, so layouts may be larger than this machine. It
computes whether each tensor is equal on the ranks of an axis, different, or a part of a sum, and
finds missing and doubled sums. It does not see values, order or scale.

--self-test injects published bugs into small models, one after the other, runs the check, and
prints a table in Markdown of the causes found. Exits 1 if a bug is not found, or the wrong cause is
named.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from megazoo.cli.flags import parse_flags
from megazoo.cli.options import ImportOption
from megazoo.cli.parsing import required
from megazoo.errors import UserError, check_number
from megazoo.families.registry import tiny_preset
from megazoo.lora.settings import LoRASettings, every_target
from megazoo.models.counts import parameter_count, whole_model
from megazoo.models.pretrained import open_source
from megazoo.models.registry import find_config
from megazoo.parallel.layout import switches
from megazoo.settings import File, Name
from megazoo.testing import (
    Layout,
    ResumeVerdict,
    Verdict,
    all_layouts,
    check_parallel,
    check_resume,
    check_types,
    gallery,
    pairs_of,
    shrink,
)

MOST_STEPS, MOST_RANKS = 10_000, 256


@dataclass
class Options(ImportOption):
    """Model, layouts and training steps to check."""

    model: Name = None
    """Family, preset or config file (a Hugging Face config.json, or TOML or JSON with megazoo's
    names)."""
    preset: Name = None
    """Preset or config file."""
    load: File = None
    """Checkpoint or Hugging Face directory whose weights are used. With --shrink, only its config
    is used."""
    shrink: bool = False
    """Reduce the sizes of the model. Heads, KV groups, tied weights and kinds of layers remain."""
    layouts: Annotated[
        str,
        tyro.conf.arg(
            help="Layouts, separated by commas: sizes such as tp2cp2pp2dp2v2, then any of the "
            f"switches {switches()}. Or all."
        ),
    ] = "tp2,pp2,dp2,tp2pp2,tp2+sp,pp2v2"
    lora_rank: int = 0
    """Train LoRA adapters of this rank instead of the weights: on all linear layers, experts and
    routers."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Optimizer. muon: Muon for the matrices of linear layers, AdamW for all other parameters."""
    loss: str = "lm"
    """Loss: lm, dpo, distill, or one that --import registers. Its reference is a model with other
    random weights; with --lora-rank, that of dpo is the model without adapters."""
    ranks: int = 4
    """Maximum number of ranks for --layouts all. They are processes on this machine."""
    steps: int = 3
    """Number of training steps. The first has plain rows, the second packed documents, the third
    padding, and so on."""
    tolerance: float = 1e-5
    """Relative difference above which a layout fails."""
    resume: bool = False
    """Check that a run resumes: save in one layout of --layouts, and load in the same and the next
    one. It always trains four steps."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the parameters, for --resume."""
    offload_optimizer: bool = False
    """Store the state of the optimizer on the CPU, for --resume."""
    types: bool = False
    """Check the types of all tensors instead of training: no processes are started. Cannot be
    combined with --load, --optimizer, --steps, --tolerance and --resume."""
    self_test: bool = False
    """Self-test: inject known bugs and verify that each one is detected. Cannot be combined with
    other flags."""


def main(arguments: list[str]) -> None:
    options = parse_flags(Options, arguments, __doc__)
    if options.self_test:
        plant_every_bug(options)
        return
    check_options(options)
    if options.load:
        config = open_source(options.load).config
    else:
        config = find_config(tiny_preset(options.model) if options.model else options.preset)
    if options.shrink:
        config = shrink(config)
    if options.resume:
        resume_every_pair(options, config)
        return
    if options.layouts == "all":
        layouts = all_layouts(config, options.ranks)
    else:
        layouts = [Layout.named(name) for name in options.layouts.split(",")]
    run = print_types if options.types else train_in_every_layout
    run(options, config, layouts)


def check_options(options: Options) -> None:
    """Raise UserError for a missing or invalid option, or options that exclude each other."""
    required(options)
    given = [options.model, options.preset, options.load]
    if sum(each is not None for each in given) != 1:
        raise UserError("use exactly one of --model, --preset and --load")
    if options.steps < 1 or options.ranks < 2:
        raise UserError(
            f"--steps {options.steps} must be at least 1, and --ranks {options.ranks} at least 2"
        )
    if options.steps > MOST_STEPS or options.ranks > MOST_RANKS:
        raise UserError(
            f"--steps {options.steps} must be at most {MOST_STEPS}, and --ranks "
            f"{options.ranks} at most {MOST_RANKS}"
        )
    check_number("tolerance", options.tolerance, 0)
    if ":" in options.layouts and not options.resume:
        raise UserError(f"--layouts {options.layouts} has a pair of layouts: it needs --resume")
    if options.resume and options.steps != Options.steps:
        raise UserError("--resume always trains four steps: remove --steps")
    other = [options.load, options.optimizer, options.steps, options.tolerance, options.resume]
    defaults = [None, Options.optimizer, Options.steps, Options.tolerance, False]
    if options.types and other != defaults:
        raise UserError(
            "--types trains no steps: remove --load, --optimizer, --steps, --tolerance and --resume"
        )
    if not options.resume and (options.dtype != "float32" or options.offload_optimizer):
        raise UserError("--dtype and --offload-optimizer need --resume")
    if options.loss != Options.loss and (options.types or options.resume):
        raise UserError("--loss cannot be combined with --types and --resume")
    if options.resume and options.layouts == "all":
        raise UserError("--resume needs a list of --layouts, not all: they are combined in pairs")


def train_in_every_layout(options: Options, config: Any, layouts: list[Layout]) -> None:
    """Train in each layout, and print the verdicts."""
    print(
        f"{parameter_count(config):,} parameters, {options.steps} steps, compared with one process"
    )
    print(f"{'layout':24}{'loss':>9}{'norm':>9}{'gradient':>10}{'weights':>9}")
    verdicts = check_parallel(
        config,
        layouts,
        load=None if options.shrink else options.load,
        import_=options.import_,
        lora_rank=options.lora_rank,
        optimizer=options.optimizer,
        loss=options.loss,
        steps=options.steps,
        tolerance=options.tolerance,
    )
    report(((line_of(verdict), verdict.passed) for verdict in verdicts), len(layouts), "layouts")


def resume_every_pair(options: Options, config: Any) -> None:
    """Check that a run resumes in each pair of layouts."""
    pairs = pairs_of(options.layouts.split(","))
    print(f"{parameter_count(config):,} parameters, saved after 2 of 4 steps")
    print(f"{'saved:resumed':40}{'loss':>9}{'weights':>9}")
    verdicts = check_resume(
        config,
        pairs,
        load=None if options.shrink else options.load,
        import_=options.import_,
        lora_rank=options.lora_rank,
        optimizer=options.optimizer,
        dtype=options.dtype,
        offload=options.offload_optimizer,
        tolerance=options.tolerance,
    )
    report(((line_of_pair(verdict), verdict.passed) for verdict in verdicts), len(pairs), "pairs")


def print_types(options: Options, config: Any, layouts: list[Layout]) -> None:
    """Check the types of all tensors in each layout, and print the results."""
    attached = None
    if options.lora_rank:
        targets = every_target(whole_model(config))
        attached = LoRASettings(options.lora_rank, alpha=options.lora_rank, targets=targets)
    print(f"{parameter_count(config):,} parameters, types of all tensors, without ranks")

    def lines() -> Iterator[tuple[str, bool]]:
        for layout in layouts:
            findings = check_types(config, layout, attached=attached)
            more = f" (and {len(findings) - 1} more)" if findings[1:] else ""
            outcome = f"FAIL  {findings[0]}{more}" if findings else "pass"
            yield f"{layout!s:23} {outcome}", not findings

    report(lines(), len(layouts), "layouts")


def report(lines: Iterable[tuple[str, bool]], count: int, what: str) -> None:
    """Print lines as they come, each with whether the check passed. Raise UserError if one failed.
    count, what: number and name of the checked layouts or pairs."""
    failed = 0
    for line, passed in lines:
        print(line, flush=True)
        failed += not passed
    if failed:
        raise UserError(f"{failed} of {count} {what} failed", exit_code=1)


def plant_every_bug(options: Options) -> None:
    """Inject each bug of the gallery, and print the result of the check."""
    if options != Options(self_test=True):
        raise UserError("--self-test uses fixed models and layouts: remove the other flags")
    print(gallery.header(), flush=True)
    missed = 0
    for outcome in gallery.self_test(gallery.BUGS):
        print(gallery.line_of(outcome), flush=True)
        missed += not outcome.found
    if missed:
        raise UserError(
            f"{missed} of {len(gallery.BUGS)} injected bugs were not found", exit_code=1
        )


def line_of(verdict: Verdict) -> str:
    """Return a verdict as a line of the table; - for values not compared."""
    numbers = f"{verdict.loss:9.1e}{verdict.norm:9.1e}{verdict.gradient:10.1e}{verdict.weight:9.1e}"
    outcome = "pass" if verdict.passed else f"FAIL  {verdict.cause}"
    if verdict.usual:
        outcome += f"\n{'':24}usually: {verdict.usual}"
    return f"{verdict.layout!s:24}{numbers.replace('nan', '  -')}  {outcome}"


def line_of_pair(verdict: ResumeVerdict) -> str:
    """Return the verdict of a pair of layouts as a line of the table; - for values not compared."""
    numbers = f"{verdict.loss:9.1e}{verdict.weight:9.1e}".replace("nan", "  -")
    outcome = "pass" if verdict.passed else f"FAIL  {verdict.cause}"
    if verdict.usual:
        outcome += f"\n{'':40}usually: {verdict.usual}"
    return f"{verdict!s:40}{numbers}  {outcome}"

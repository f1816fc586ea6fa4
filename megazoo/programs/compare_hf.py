"""Compare the logits, loss and gradients of a model with transformers, in any parallel layout, on
the CPU of this machine. If they differ, name the first module that differs, and by how much.

$ megazoo check hf path/to/llama
$ megazoo check hf path/to/llama --layouts tp2,tp2pp2+sp --prompt "def main("
$ megazoo check hf runs/a --theirs merged --dtype bfloat16

Both models run the same token ids: random ones, or those of a text. For each layout it prints the
largest difference of a logit (relative to the largest logit of transformers), of the loss, and of
the gradient of a parameter (relative to its norm). Exits 1 if a layout fails.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from megazoo.checkpoint.places import CONFIG
from megazoo.cli.flags import parse_flags
from megazoo.cli.options import ImportOption
from megazoo.cli.parsing import required
from megazoo.engine.batch import check_range
from megazoo.errors import UserError, check_number
from megazoo.files import regular_file, without_mark
from megazoo.formats.source import ModelSource
from megazoo.models.counts import parameter_count
from megazoo.models.pretrained import open_source
from megazoo.parallel.layout import switches
from megazoo.settings import File, Name, Source, Text, unset
from megazoo.testing import Agreement, Layout
from megazoo.testing.compare import compare_layouts
from megazoo.testing.layouts import check_model
from megazoo.testing.reference import run_reference
from megazoo.tokenizer import open_tokenizer
from megazoo.trainer.tokenizer import find_tokenizer

# Differences that rounding can cause, relative to the largest value.
TOLERANCES = {"float32": 1e-5, "bfloat16": 5e-2, "float16": 5e-3}


@dataclass
class Options(ImportOption):
    """Comparison."""

    source: Source = None
    """Hugging Face directory, or megazoo checkpoint."""
    theirs: File = None
    """Hugging Face directory that transformers loads. By default, it is SOURCE."""
    layouts: Annotated[
        str | None,
        tyro.conf.arg(
            metavar="NAMES",
            help="Layouts, separated by commas: sizes such as tp2cp2pp2dp2v2, then any of the "
            f"switches {switches()}.",
            help_behavior_hint="(default: tp1)",
        ),
    ] = None
    tp: Annotated[int | None, unset("INT", "1")] = None
    """Tensor-parallel size of a single layout to compare, instead of --layouts."""
    pp: Annotated[int | None, unset("INT", "1")] = None
    """Pipeline-parallel size of a single layout to compare, instead of --layouts."""
    cp: Annotated[int | None, unset("INT", "1")] = None
    """Context-parallel size of a single layout to compare, instead of --layouts."""
    prompt: Text = None
    """Text to run as one row, instead of random ids."""
    text: File = None
    """Text file whose first tokens are run, in rows of --seq-length tokens, instead of random ids.
    """
    tokenizer: Name = None
    """Tokenizer of the text: byte, or a directory or file; by default the tokenizer stored with the
    model."""
    seq_length: Annotated[int | None, unset("INT", "the model's max-positions, 1024 at most")] = (
        None
    )
    """Tokens per row."""
    batch_size: int = 2
    """Number of rows."""
    padding: int = 0
    """Number of padding tokens on the left of every row except the first."""
    seed: int = 0
    """Random seed for the ids."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type of weights and activations in both models."""
    gradients: bool = True
    """Also compare the gradients of the loss. The gradients need as much memory as the weights of
    both models."""
    tolerance: Annotated[
        float | None, unset("FLOAT", "1e-5; in bfloat16 0.05, in float16 0.005")
    ] = None
    """Largest difference that passes, relative to the largest value; for gradients, relative to
    their norm."""


def main(arguments: list[str]) -> None:
    options = parse_flags(Options, arguments, __doc__)
    (path,) = required(options, "source")
    source = open_source(path)
    if source.config.num_labels:
        raise UserError(f"{path} is a classifier: only language models are supported")
    tolerance = TOLERANCES[options.dtype] if options.tolerance is None else options.tolerance
    check_number("tolerance", tolerance, 0)
    layouts = [Layout.named(name) for name in layouts_of(options).split(",")]
    for layout in layouts:
        check_model(layout, source.config)
    ids = input_ids(source, options)
    mask = padded(ids, options.padding)
    theirs = load_theirs(options.theirs or path, getattr(torch, options.dtype))
    reference = run_reference(
        theirs, source.model, source.config, ids, mask, gradients=options.gradients
    )
    del theirs
    print(
        f"{parameter_count(source.config):,} parameters, {options.dtype}, "
        f"{' x '.join(map(str, ids.shape))} tokens, compared with {reference.name} of transformers"
    )
    print(f"{'layout':24}{'logits':>9}{'loss':>9}{'gradient':>10}", flush=True)
    agreements = compare_layouts(
        path,
        reference,
        layouts,
        import_=options.import_,
        dtype=getattr(torch, options.dtype),
        tolerance=tolerance,
    )
    failed = 0
    for layout, agreement in zip(layouts, agreements, strict=True):
        print(line_of(layout, agreement), flush=True)
        failed += not agreement.passed
    if failed:
        raise UserError(f"{failed} of {len(layouts)} layouts failed", exit_code=1)


def layouts_of(options: Options) -> str:
    """Return the names of the layouts: those of --layouts, or the one of --tp, --pp and --cp."""
    sizes = {"tp": options.tp, "cp": options.cp, "pp": options.pp}
    one = "".join(f"{name}{size}" for name, size in sizes.items() if size is not None)
    if one and options.layouts is not None:
        raise UserError("--layouts and --tp, --pp or --cp exclude each other: pass one of them")
    return one or options.layouts or "tp1"


def input_ids(source: ModelSource, options: Options) -> torch.Tensor:
    """Return the token ids that both models run, int64 [rows, tokens]; UserError if invalid."""
    longest = source.model.longest_sequence(source.config)
    length = min(longest, 1024) if options.seq_length is None else options.seq_length
    if not 2 <= length <= longest:
        raise UserError(f"--seq-length {length} must be from 2 to {longest}, the model's maximum")
    check_number("batch-size", options.batch_size, 1)
    if options.prompt is not None and options.text:
        raise UserError("--prompt and --text exclude each other")
    if options.prompt is None and not options.text:
        generator = torch.Generator().manual_seed(options.seed)
        shape = (options.batch_size, length)
        return torch.randint(0, source.config.vocab_size, shape, generator=generator)
    where = options.tokenizer or source.tokenizer
    if where is None:
        raise UserError(
            f"{source.path} has no tokenizer: use --tokenizer byte, or a directory or file"
        )
    text = read_text(options.text) if options.text else options.prompt or ""
    ids = torch.tensor(open_tokenizer(find_tokenizer(where)).encode(text))
    if len(ids) < 2:
        raise UserError("the text has fewer than two tokens: use a longer one")
    length = min(length, len(ids))
    vocabulary = source.config.vocab_size
    check_range("token", ids, vocabulary, f"the vocabulary of {vocabulary}")
    rows = min(options.batch_size, len(ids) // length)
    return ids[: rows * length].view(rows, length)


def read_text(file: Path) -> bytes:
    """Return the bytes of a text file; UserError if it can't be read."""
    try:
        return without_mark(regular_file(file).read_bytes())
    except OSError as error:
        raise UserError(f"{file} can't be read: {error.strerror}") from error


def padded(ids: torch.Tensor, padding: int) -> torch.Tensor | None:
    """Return the attention mask for `padding` tokens on the left of every row except the first;
    None without padding."""
    check_number("padding", padding, 0, ids.shape[1] - 1, whole=True)
    if not padding:
        return None
    mask = torch.ones_like(ids)
    mask[1:, :padding] = 0
    return mask


def load_theirs(path: Path, dtype: torch.dtype) -> torch.nn.Module:
    """Load a Hugging Face directory with transformers; UserError if that fails."""
    if not (path / CONFIG).is_file():
        raise UserError(
            f"{path} has no {CONFIG}: name a Hugging Face directory of the model with --theirs "
            "(`megazoo convert --to hf` writes one)"
        )
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        raise UserError(
            f"transformers can't be imported: {error} (pip install transformers)"
        ) from None
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except Exception as error:  # depends on the error in the files
        raise UserError(f"transformers can't load {path}: {error}") from error
    if missing := sorted(loaded["missing_keys"]):
        others = f" and {len(missing) - 1} other tensors" if missing[1:] else ""
        raise UserError(
            f"transformers does not find {missing[0]}{others} in {path}, and would use "
            "random values instead: export the model again"
        )
    return model.eval()


def line_of(layout: Layout, agreement: Agreement) -> str:
    """Return the result of a layout as a line of the table; - for values not compared."""
    numbers = f"{agreement.logits:9.1e}{agreement.loss:9.1e}{agreement.gradient:10.1e}"
    numbers = numbers.replace("nan", "  -")
    outcome = "pass" if agreement.passed else f"FAIL  {agreement.cause}"
    return f"{layout!s:24}{numbers}  {outcome}"

"""Show the contents of a checkpoint or a Hugging Face directory; with --verify, read and check all
files.

$ megazoo inspect runs/a --verify
"""

import math
from dataclasses import dataclass, fields

from megazoo.checkpoint import Checkpoint
from megazoo.cli.flags import parse_flags
from megazoo.cli.options import ImportOption
from megazoo.cli.parsing import required
from megazoo.families.registry import family_of
from megazoo.lora.source import SavedAdapters, open_model_or_adapters
from megazoo.models.counts import parameter_count
from megazoo.settings import Source
from megazoo.terminal import byte_bar
from megazoo.trainer.adapters import describe


@dataclass
class Options(ImportOption):
    """Checkpoint to inspect."""

    source: Source = None
    """Checkpoint, Hugging Face directory, or org/name on the Hugging Face hub."""
    verify: bool = False
    """Read every file and check its size and, for megazoo checkpoints, its checksum."""


def main(arguments: list[str]) -> None:
    options = parse_flags(Options, arguments, __doc__)
    (path,) = required(options, "source")
    source = open_model_or_adapters(path)
    count = sum(math.prod(spec.shape) for spec in source.specs.values())
    settings = [(field.name, getattr(source.config, field.name)) for field in fields(source.config)]
    dtypes = {str(source.dtype_of(name)).removeprefix("torch.") for name in source.specs}
    print(f"{source.path}")
    whole = parameter_count(source.config)
    if isinstance(source, SavedAdapters):
        base = source.base
        print(f"  adapters    of {describe(source.settings)}: {count:,} parameters")
        path = base.path or "not read from a directory"
        print(f"  base        {path}, checksum {base.checksum} in {base.dtype}")
    print(f"  model       {family_of(source.config)}, {whole:,} parameters")
    print(f"  config      {', '.join(f'{name} {value}' for name, value in settings)}")
    print(f"  dtypes      {', '.join(sorted(dtypes))}")
    if isinstance(source, Checkpoint):
        sizes = dict(source.layout)
        folded = sizes.pop("folded", {})
        layout = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        layout += "".join(f", {axis} {size} folded into dp" for axis, size in folded.items())
        print(f"  layout      {layout}; loads in any layout")
    if isinstance(source, Checkpoint) or source.has_states:
        print(f"  optimizer   {'state included' if source.has_states else 'none'}")
    if isinstance(source, Checkpoint):
        kept = [f"{key} {value}" for key, value in source.trainer.items() if key != "settings"]
        print(f"  trainer     {', '.join(kept) or 'nothing'}")
    sizes = source.file_sizes()
    for name, size in sizes.items():
        print(f"  {size:>15,}  {name}")
    if options.verify:
        with byte_bar(sum(sizes.values()), "verify") as bar:
            source.verify(bar.update)
        no_sums = "all files are readable; they have no checksums to verify"
        print("all files match their checksums" if isinstance(source, Checkpoint) else no_sums)

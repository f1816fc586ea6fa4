"""Reads adapter_config.json of PEFT (0.21), and finds which modules PEFT adapts."""

from dataclasses import dataclass, field
from pathlib import Path
from re import compile as compiled
from re import error as PatternError
from re import fullmatch, search
from typing import Any

from megazoo.errors import UserError
from megazoo.files import brief, convert, json_object, read_bytes
from megazoo.lora.settings import ALL

# Keys of adapter_config.json that don't change what a trained adapter computes.
WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
    "fan_in_fan_out", "inference_mode", "loftq_config", "lora_ga_config", "megatron_core",
    "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
}  # fmt: skip
LONGEST = 10_000  # characters of a regular expression
# Initial values that leave the base weights unchanged.
INITIAL_VALUES = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass
class AdapterConfig:
    """The keys of adapter_config.json that are read. Other keys raise an error, unless they have no
    effect."""

    peft_type: str
    r: int = 8
    lora_alpha: float = 8
    lora_dropout: float = 0.0
    use_rslora: bool = False
    bias: str = "none"
    target_modules: list[str] | str | None = None
    target_parameters: list[str] | None = None
    modules_to_save: list[str] | None = None
    rank_pattern: dict[str, int] | None = field(default_factory=dict)
    alpha_pattern: dict[str, float] | None = field(default_factory=dict)
    init_lora_weights: Any = True
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None

    def is_parameter(self, name: str) -> bool:
        """Return whether PEFT adapts a parameter, by target_parameters."""
        return _matches(name, self.target_parameters or [])

    def is_module(self, name: str) -> bool:
        """Return whether PEFT adapts a module, by target_modules, exclude_modules and
        layers_to_transform."""
        wanted = [] if self.target_modules is None else self.target_modules
        layers = self.layers_to_transform
        if self.exclude_modules and _matches(name, self.exclude_modules):
            return False
        if isinstance(wanted, str):
            return wanted.lower() == ALL or _matches(name, wanted)
        if name in wanted or layers in (None, []):
            return _matches(name, wanted)
        # without layers_pattern, the first number in the name is the layer's
        patterns = _listed(self.layers_pattern or r"[^.]*")
        found = (search(rf"\.{pattern}\.(\d+)\.", name) for pattern in patterns)
        number = next((int(match[1]) for match in found if match), None)
        return _matches(name, wanted) and number in _listed(layers)


def read_config(file: Path) -> AdapterConfig:
    """Read adapter_config.json; UserError for a key that is not supported."""
    values = json_object(file, read_bytes(file))
    if values.get("peft_type") != "LORA":
        raise UserError(
            f"{file}: peft_type is {brief(values.get('peft_type'))}: only LORA is supported"
        )
    known = AdapterConfig.__dataclass_fields__.keys()
    for key in sorted(values.keys() - known - WITHOUT_EFFECT):
        if values[key]:
            raise UserError(f"{file}: {key} {brief(values[key])} is not supported")
    try:
        config = convert({key: values[key] for key in known & values.keys()}, AdapterConfig, "")
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    _check_targets(config, file)
    if config.bias != "none":
        raise UserError(f"{file}: bias {brief(config.bias)} is not supported: it must be 'none'")
    if config.init_lora_weights not in INITIAL_VALUES:
        raise UserError(
            f"{file}: init_lora_weights {brief(config.init_lora_weights)} is not supported: it "
            "changes the base weights; save the adapter converted to LoRA with PEFT"
        )
    return config


def _check_targets(config: AdapterConfig, file: Path) -> None:
    """Raise UserError if the file does not determine which modules PEFT adapts."""
    if config.target_modules is None and not config.target_parameters:
        raise UserError(
            f"{file}: target_modules is missing: its default depends on the version of PEFT"
        )
    if config.layers_to_transform is not None and isinstance(config.target_modules, str):
        raise UserError(
            f"{file}: layers_to_transform needs a list of target_modules, not "
            f"{brief(config.target_modules)}"
        )
    for key in ("target_modules", "exclude_modules"):
        pattern = getattr(config, key)
        if isinstance(pattern, str):
            check_pattern(pattern, key, file)
    for pattern in _listed(config.layers_pattern or []):
        if not fullmatch(r"\w+", pattern):
            raise UserError(
                f"{file}: layers_pattern {brief(pattern)} is not supported: use a plain name"
            )


def check_pattern(pattern: str, key: str, file: Path) -> None:
    """Raise UserError for a text that is not a regular expression, or that could take years to
    match: a repeated group with a repetition inside."""
    try:
        compiled(pattern)
    except (PatternError, OverflowError, RecursionError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"{file}: {key} {brief(pattern)} is not a regular expression: {reason}"
        ) from None
    if len(pattern) > LONGEST or search(r"[*+}][^(]*\)[*+{]", pattern):
        raise UserError(
            f"{file}: {key} {brief(pattern)} is not supported: use at most {LONGEST} characters, "
            "and no repetition of a group with a repetition"
        )


def _matches(name: str, modules: list[str] | str) -> bool:
    """Return whether a module's name matches a regular expression (str), or ends in one of the
    names (list)."""
    if isinstance(modules, str):
        return fullmatch(modules, name) is not None
    return any(f".{name}".endswith(f".{each}") for each in modules)


def _listed(value: Any) -> list:
    """Return a list as it is, and another value as a list with one element."""
    return value if isinstance(value, list) else [value]

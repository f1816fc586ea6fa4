"""What PEFT's adapter_config.json (0.21) says, and which modules PEFT adapts by it."""

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
# Initial values of which the weights beside the adapter stay as they were.
INITIAL_VALUES = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass
class AdapterConfig:
    """The keys of adapter_config.json that are read. Others are refused, unless they are without
    effect."""

    peft_type: str
    r: int = 8
    lora_alpha: float = 8
    lora_dropout: float = 0.0
    use_rslora: bool = False
    bias: str = "none"
    target_modules: list[str] | str | None = None
    modules_to_save: list[str] | None = None
    rank_pattern: dict[str, int] | None = field(default_factory=dict)
    alpha_pattern: dict[str, float] | None = field(default_factory=dict)
    init_lora_weights: Any = True
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None

    def is_target(self, name: str) -> bool:
        """Say whether PEFT adapts a module, by target_modules and what narrows it."""
        wanted = [] if self.target_modules is None else self.target_modules
        layers = self.layers_to_transform
        if self.exclude_modules and _matches(name, self.exclude_modules):
            return False
        if isinstance(wanted, str):
            return wanted.lower() == ALL or _matches(name, wanted)
        if name in wanted or layers in (None, []):
            return _matches(name, wanted)
        # without a name of the layers' list the first number is the layer's
        patterns = _listed(self.layers_pattern or r"[^.]*")
        found = (search(rf"\.{pattern}\.(\d+)\.", name) for pattern in patterns)
        number = next((int(match[1]) for match in found if match), None)
        return _matches(name, wanted) and number in _listed(layers)


def read_config(file: Path) -> AdapterConfig:
    """Read adapter_config.json; UserError names a key that is not supported."""
    values = json_object(file, read_bytes(file))
    if values.get("peft_type") != "LORA":
        raise UserError(
            f"{file}: peft_type is {brief(values.get('peft_type'))}: LORA alone is supported"
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
            f"{file}: init_lora_weights {brief(config.init_lora_weights)} is not supported: it has "
            "changed the weights beside the adapter; save it converted, as PEFT can"
        )
    return config


def _check_targets(config: AdapterConfig, file: Path) -> None:
    """Refuse what does not say by itself which modules PEFT adapts."""
    if config.target_modules is None:
        raise UserError(
            f"{file}: it has no target_modules: which PEFT takes depends on its version"
        )
    if config.layers_to_transform is not None and isinstance(config.target_modules, str):
        raise UserError(
            f"{file}: layers_to_transform needs a list of target_modules, not "
            f"{brief(config.target_modules)}"
        )
    for key in ("target_modules", "exclude_modules"):
        pattern = getattr(config, key)
        try:
            compiled(pattern if isinstance(pattern, str) else "")
        except (PatternError, OverflowError) as error:
            reason = str(error).partition("\n")[0]
            raise UserError(
                f"{file}: {key} {brief(pattern)} is no regular expression: {reason}"
            ) from None
    for pattern in _listed(config.layers_pattern or []):
        if not fullmatch(r"\w+", pattern):
            raise UserError(
                f"{file}: layers_pattern {brief(pattern)} is not supported: give a name"
            )


def _matches(name: str, modules: list[str] | str) -> bool:
    """Say whether a module is one of PEFT's: by a regular expression, or by the ends of names."""
    if isinstance(modules, str):
        return fullmatch(modules, name) is not None
    return any(f".{name}".endswith(f".{each}") for each in modules)


def _listed(value: Any) -> list:
    """Return a list as it is, and what may stand in place of one as a list."""
    return value if isinstance(value, list) else [value]

"""Rotary position embeddings (Su et al. 2021), which rotate the two halves of a head, and their
scalings for longer contexts."""

import math

import torch

from megazoo.errors import UserError
from megazoo.layers import fused
from megazoo.layers.fused import replaced_by

SCALINGS = {  # with the options that each requires
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
OPTIONS = {  # that are allowed for each
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
}
LARGEST = 2.0**60  # of the numbers of a scaling, so that the computations do not overflow


def options_of(kind: str) -> set[str]:
    """Return the names of the options of a scaling. kind: its rope_type."""
    return {*OPTIONS, *SCALINGS.get(kind, ())}


def rotated_features(head_size: int, fraction: float) -> int:
    """Return the number of a head's features that are rotated, the first ones. fraction: their
    share. UserError if the number is odd or out of range."""
    rotated = int(head_size * fraction)
    if fraction == 1:
        return rotated
    if rotated % 2 or not 0 < rotated <= head_size:
        raise UserError(
            f"rotary_fraction {fraction} rotates {rotated} of a head's {head_size} features: it "
            f"must be an even number from 2 to {head_size}"
        )
    return rotated


class Rotary:
    """Compute the cos and sin that rotate queries and keys. Angles are fp32 for every model dtype.

    Args:
        head_size: number of features per head that are rotated, even: the first ones, or all.
        theta: base of the wavelengths, above 1.
        max_positions: tokens of the model's context. Scalings without
            original_max_position_embeddings start from it.
        scaling: None, or a dictionary with the keys of Hugging Face: rope_type (default, linear,
            dynamic, llama3, yarn) and factor, low_freq_factor, high_freq_factor,
            original_max_position_embeddings, beta_fast, beta_slow, attention_factor, mscale,
            mscale_all_dim, truncate.

    Raises:
        UserError: A scaling or an option is not supported, or has an invalid value; head_size is
            odd; or theta is not above 1.

    Example:
        rotary = Rotary(64, theta=10000.0, max_positions=2048)
        cos, sin = rotary(torch.arange(128), torch.float32)  # [128, 64] each
        q = rotate(q, cos, sin)  # [batch, heads, 128, 64]
    """

    def __init__(
        self, head_size: int, theta: float, max_positions: int, scaling: dict | None = None
    ):
        self.head_size, self.theta, self.max_positions = head_size, theta, max_positions
        self.scaling = scaling or {}
        self.kind = self.scaling.get("rope_type", "default")
        # frequencies and factor per device, unless they depend on the length
        self._kept: dict[torch.device, tuple[torch.Tensor, float]] = {}
        if head_size % 2 or not head_size:
            raise UserError(f"rotary positions need an even head size, got {head_size}")
        if not 1 < theta < math.inf:
            raise UserError(f"the base of rotary positions must be above 1, got {theta}")
        if not isinstance(self.kind, str) or self.kind not in SCALINGS:
            raise UserError(f"rope_type {self.kind!r} is not supported: use {', '.join(SCALINGS)}")
        if self.kind == "dynamic" and head_size < 4:
            raise UserError(
                f"rope_type 'dynamic' needs at least 4 rotated features per head, got {head_size}"
            )
        for key in SCALINGS[self.kind]:
            if not isinstance(self.scaling.get(key), float | int):
                raise UserError(f"rope_type {self.kind!r} requires a number for {key}")
        unknown = self.scaling.keys() - {"rope_type", *options_of(self.kind)}
        if unknown:
            name = min(unknown)
            raise UserError(
                f"{name} {self.scaling[name]!r} is not supported with rope_type {self.kind!r}"
            )
        for name in self.scaling.keys() - {"rope_type", "truncate"}:
            value = self.scaling[name]
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            unused = value is None or (name.startswith("mscale") and is_number and value == 0)
            if not unused and not (is_number and 0 < value < LARGEST):
                raise UserError(f"{name} of rotary positions must be a number above 0, got {value}")

    def __call__(
        self,
        positions: torch.Tensor,
        dtype: torch.dtype,
        length: int | torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin, each [..., sequence, head_size].

        Args:
            positions: int64 [..., sequence].
            dtype: dtype of the result.
            length: number of tokens that dynamic scaling scales for; default: the largest position
                + 1.
        """
        if self.kind == "dynamic":
            length = positions.max() + 1 if length is None else length
            frequencies, factor = self.frequencies(positions.device, int(length))
        else:
            if positions.device not in self._kept:
                self._kept[positions.device] = self.frequencies(positions.device)
            frequencies, factor = self._kept[positions.device]
        angles = positions[..., None] * frequencies
        angles = torch.cat([angles, angles], dim=-1)
        cos, sin = angles.cos(), angles.sin()
        if factor != 1.0:
            cos, sin = cos * factor, sin * factor
        return cos.to(dtype), sin.to(dtype)

    @property
    def longest(self) -> int:
        """The tokens of the longest sequence that the scaling is for. (transformers sets no limit.)

        linear and dynamic multiply max_positions by the factor (vicuna-16k: 4,096 x 4). yarn and
        llama3 multiply the original context by it (Qwen2.5: 32,768 x 4; LLaMA 3.2: 8,192 x 32). If
        max_positions is larger, it is the limit.
        """
        if self.kind == "default":
            return self.max_positions
        stretches_original = self.kind in ("yarn", "llama3")
        context = self._original_context() if stretches_original else self.max_positions
        return max(self.max_positions, int(context * self.scaling["factor"]))

    def frequencies(self, device: torch.device, length: int = 0) -> tuple[torch.Tensor, float]:
        """Return the frequency of each pair in radians per position, fp32 [head_size / 2], and the
        factor of cos and sin. length: tokens of the sequence."""
        s, h = self.scaling, self.head_size
        pairs = torch.arange(0, h, 2, dtype=torch.int64, device=device).float()
        theta = self.theta
        if self.kind == "dynamic":  # the base grows with sequences longer than the context
            length = max(length, self.max_positions)
            theta = theta * (s["factor"] * length / self.max_positions - (s["factor"] - 1)) ** (
                h / (h - 2)
            )
        base = 1.0 / theta ** (pairs / h)
        if self.kind == "linear":
            return base / s["factor"], 1.0
        if self.kind == "llama3":
            return self._llama3(base), 1.0
        if self.kind == "yarn":
            return self._yarn(base)
        return base, 1.0

    def _llama3(self, base: torch.Tensor) -> torch.Tensor:
        """Divide low frequencies by the factor and keep high ones, with a smooth transition (LLaMA
        3.1)."""
        s = self.scaling
        context, low, high = self._original_context(), s["low_freq_factor"], s["high_freq_factor"]
        wavelength = 2 * math.pi / base
        smooth = ((context / wavelength - low) / (high - low)).clamp(0, 1)
        return (1 - smooth) * base / s["factor"] + smooth * base

    def _yarn(self, base: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Divide low frequencies by the factor and keep high ones (Peng et al. 2023)."""
        s, h = self.scaling, self.head_size
        context, factor = self._original_context(), s["factor"]

        def pair_that_turns(times: float) -> float:
            return h * math.log(context / (times * 2 * math.pi)) / (2 * math.log(self.theta))

        low = pair_that_turns(s.get("beta_fast") or 32)
        high = pair_that_turns(s.get("beta_slow") or 1)
        if s.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, h - 1)
        high += 0.001 if low == high else 0
        ramp = ((torch.arange(h // 2, device=base.device).float() - low) / (high - low)).clamp(0, 1)
        return base / factor * ramp + base * (1 - ramp), self._yarn_attention_factor(factor)

    def _yarn_attention_factor(self, factor: float) -> float:
        """Return the factor of cos and sin: longer contexts need sharper scores."""
        s = self.scaling
        if s.get("attention_factor") is not None:
            return s["attention_factor"]

        def scale(weight: float) -> float:
            return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

        if s.get("mscale") and s.get("mscale_all_dim"):
            return scale(s["mscale"]) / scale(s["mscale_all_dim"])
        return scale(1.0)

    def _original_context(self) -> int:
        """Return the number of tokens of the context before scaling."""
        return self.scaling.get("original_max_position_embeddings") or self.max_positions


@replaced_by(fused.rotate)
def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x by cos and sin.

    (a, b) -> (a cos - b sin, b cos + a sin), where a is the first half of the rotated features and
    b the second half. Features after them are returned as they are.

    Args:
        x: [batch, heads, sequence, head_size].
        cos, sin: [sequence, rotated features] or [batch, sequence, rotated features], from Rotary.

    Returns:
        [batch, heads, sequence, head_size].
    """
    if cos.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    x, rest = x.tensor_split([cos.shape[-1]], dim=-1)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([x * cos + torch.cat([-b, a], dim=-1) * sin, rest], dim=-1)

"""Whether a model can be cut into tensor-parallel ranks and pipeline stages."""

from megazoo.errors import UserError
from megazoo.layers.classification import PROBLEMS
from megazoo.parallel.shard import nearly_even


def check_sizes(config, tp: int, pp: int, virtual: int = 1) -> None:
    """Raise UserError, naming what would do, if a model of this config can't be cut into tp x pp,
    with `virtual` stages a rank."""
    sizes = (
        "vocab_size",
        "max_positions",
        "hidden_size",
        "layers",
        "heads",
        "kv_heads",
        "ffn_size",
    )
    for name in sizes:
        if getattr(config, name, 1) < 1:
            raise UserError(f"{name} {getattr(config, name)} must be at least 1")
    if not getattr(config, "head_size", 0) and config.hidden_size % config.heads:
        fits = [n for n in range(1, config.hidden_size + 1) if config.hidden_size % n == 0]
        what = f"heads {config.heads} don't divide hidden-size {config.hidden_size}"
        raise UserError(f"{what}: use heads {_any_of(fits)}")
    if getattr(config, "problem_type", None) not in (None, *PROBLEMS):
        there = ", ".join(PROBLEMS)
        raise UserError(f"problem_type {config.problem_type!r} is not supported: there are {there}")
    kv_heads = getattr(config, "kv_heads", config.heads)
    if config.heads % kv_heads:
        raise UserError(f"kv-heads {kv_heads} don't divide heads {config.heads}")
    fits = [
        n
        for n in range(1, config.heads + 1)
        if _heads_fit(config.heads, kv_heads, n) and n <= config.ffn_size
    ]
    if tp not in fits:
        heads = f"heads {config.heads}" + (
            f" and kv-heads {kv_heads}" if kv_heads < config.heads else ""
        )
        what = (
            f"exceeds ffn-size {config.ffn_size}"
            if config.ffn_size < tp
            else f"doesn't divide {heads}"
        )
        raise UserError(f"tp {tp} {what}: use tp {_any_of(fits)}")
    if config.layers < pp:
        raise UserError(
            f"layers {config.layers} don't fill pp {pp} stages: use pp of at most {config.layers}"
        )
    if config.layers < pp * virtual:
        what = f"layers {config.layers} don't fill pp {pp} x virtual-pp {virtual} = {pp * virtual} stages"
        raise UserError(f"{what}: use virtual-pp of at most {config.layers // pp}")


def _heads_fit(heads: int, kv_heads: int, tp: int) -> bool:
    """Whether heads can be cut over tp: KV heads, with their queries, nearly evenly, or else
    replicated evenly."""
    return nearly_even(kv_heads, tp) if tp <= kv_heads else tp % kv_heads == 0 and heads % tp == 0


def _any_of(numbers: list[int]) -> str:
    return (
        ", ".join(map(str, numbers[:-1])) + (" or " if len(numbers) > 1 else "") + str(numbers[-1])
    )

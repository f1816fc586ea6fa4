"""Flags of Megatron-LM, the transformers Trainer and torchtitan, and their megazoo equivalents."""

import re
from collections.abc import Iterable

from megazoo.errors import nearest
from megazoo.settings import described, flag_of
from megazoo.trainer.options import Options
from megazoo.trainer.outputs import OUTPUTS

OTHER = {
    "batch-size": "--micro-batch-size (per forward pass) or --global-batch-size (per step)",
    "training.local-batch-size": "--micro-batch-size and --global-batch-size",
    "report-to": " or ".join(flag_of(name) for name, each in OUTPUTS.items() if each.package),
    "ranks": "--dp (replicas; the number of ranks is tp x pp x cp x dp), or --gpus to search",
    "fsdp": "--zero 3 (it shards parameters, gradients and the optimizer state)",
}


def _declared(library: str) -> dict[str, str]:
    """Return the flags of a library with what to write instead: a flag, and the words after it."""
    return {
        name: f"{flag_of(setting)} {words}".rstrip()
        for setting, about in described(Options).items()
        for text in filter(None, getattr(about, library).split("; "))
        for name, _, words in [text.partition(" ")]
    }


# Foreign flag -> megazoo flag; in brackets, if the value has another meaning. Flags of torchtitan
# have a section and a dot.
MEGATRON, TRAINER, TORCHTITAN = map(_declared, ("megatron", "trainer", "torchtitan"))
KNOWN = {**TORCHTITAN, **TRAINER, **MEGATRON, **OTHER}

# What needs no flag, and why.
KERNELS = "PyTorch selects the kernels, and --compile fuses more operations"
PARALLEL = "it is always on"
ARCHITECTURE = "--model or --preset sets it, for example --preset llama3-8b"
WHOLE = "a checkpoint always contains the full state; --load-weights-only loads only the weights"
NEEDLESS = {
    KERNELS: """use-flash-attn attention-backend transformer-impl no-masked-softmax-fusion
        no-bias-gelu-fusion no-bias-swiglu-fusion no-bias-dropout-fusion no-rope-fusion
        no-gradient-accumulation-fusion cross-entropy-loss-fusion attn-implementation
        use-mcore-models""",
    PARALLEL: """accumulate-allreduce-grads-in-fp32 attention-softmax-in-fp32 overlap-grad-reduce
        overlap-param-gather tp-comm-overlap async-tensor-model-parallel-allreduce
        exit-signal-handler log-throughput do-train do-eval no-create-attention-mask-in-dataloader
        use-dist-ckpt""",
    ARCHITECTURE: """swiglu normalization position-embedding-type use-rotary-position-embeddings
        rotary-base rotary-percent disable-bias-linear group-query-attention norm-epsilon
        layernorm-epsilon qk-layernorm add-qkv-bias squared-relu kv-channels init-method-std
        apply-layernorm-1p no-position-embedding""",
    WHOLE: "no-load-optim no-load-rng no-save-optim no-save-rng",
    "the vocabulary is never padded": "make-vocab-size-divisible-by",
    "there is one format, which loads in any layout": "ckpt-format auto-detect-ckpt-format",
    "the device determines it: NCCL on CUDA, gloo on CPUs": "distributed-backend",
    "documents begin at position 0 with --separate-documents": "reset-position-ids eod-mask-loss",
    "--recompute-interval sets how many layers are recomputed as one unit": "recompute-method",
    "the order of samples is computed from --seed": "data-cache-path dataloader-type",
    "--eval-interval and --save-interval set it": "eval-strategy evaluation-strategy save-strategy",
    "--micro-batch-size also applies to evaluation": "per-device-eval-batch-size",
    "--log-interval sets it": "timing-log-level tensorboard-log-interval log-timers-to-tensorboard",
}
PLACEHOLDER = "NAME"  # of a model
REASONS = {flag: reason for reason, flags in NEEDLESS.items() for flag in flags.split()}


def about_unknown(kind: str, names: Iterable[str], known: set[str]) -> str:
    """Return the message about unknown flags or keys: what to write in place of each.

    kind: what they are, such as flag. known: those that the program has.
    """
    listed = hints_for_unknown(names, known)
    if len(listed) == 1:
        return f"unknown {kind} {listed[0].replace(': ', '; ', 1)}"
    return f"unknown {kind}s: " + "; ".join(listed)


def hints_for_unknown(names: Iterable[str], known: set[str]) -> list[str]:
    """Return a line for each of the unknown flags or keys: its name, and what to write instead."""
    hints = {name: _hint(name, known) for name in names}
    return [f"{name}: {hint}" if hint else name for name, hint in hints.items()]


def translated(arguments: list[str], known: set[str]) -> list[str] | None:
    """Return a command line in which the flags of other libraries are replaced, or removed if they
    are not needed. None: an unknown flag has no equivalent, its value has another meaning, or the
    run would be another one without it.

    known: flags of the program.
    """
    removed = set()
    groups: list[list[str]] = [[]]  # a flag and its values
    for argument in arguments:
        if argument.startswith("--"):
            flag, equals, value = argument.partition("=")
            groups.append([flag, value] if equals else [flag])
        else:
            groups[-1].append(argument)
    words, *groups = groups
    for flag, *values in groups:
        dashed = "--" + _plain(flag)
        if {dashed, dashed.replace("--no-", "--", 1)} & known:
            words += [flag, *values]
        elif _plain(flag) in REASONS:
            removed.add(REASONS[_plain(flag)])
        else:
            equivalent = KNOWN.get(_plain(flag), "")
            # A flag, or a flag with its value. FILE is a placeholder.
            if not re.fullmatch(r"--[a-z-]+( [a-z0-9]+| False)?", equivalent):
                return None
            if any(value.startswith("-") for value in values):  # for example, -1 for unlimited
                return None
            if " " in equivalent and values not in ([], ["True"], ["true"]):
                return None
            words += [*equivalent.split(), *values] if " " not in equivalent else equivalent.split()
    if WHOLE in removed and "--load" in words and "--load-weights-only" not in words:
        return None
    if ARCHITECTURE in removed and not {"--model", "--preset", "--load", "--config"} & {*words}:
        return ["--model", PLACEHOLDER, *words]
    return words


def _hint(name: str, known: set[str]) -> str:
    """Return a hint for an unknown flag: the megazoo equivalent of a foreign flag, the reason why
    none is needed, or the nearest known name; "" without a hint."""
    foreign = _plain(name)
    equivalent = KNOWN.get(foreign, "")
    if equivalent and equivalent.split()[0].removeprefix("--") in map(_plain, known):
        return f"write {equivalent} instead"
    if foreign in REASONS:
        return f"omit it: {REASONS[foreign]}"
    return nearest(name, known).removeprefix("; ")


def _plain(name: str) -> str:
    """Return the name of a flag, or of a key in a file, as it is written in the tables."""
    return name.removeprefix("--").replace("_", "-")

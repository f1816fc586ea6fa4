"""Settings of the training program and of the tools. One set of dataclasses defines the flags,
their help and the TOML keys.

The docstring of a field is the help of its flag. This module does not import torch, which --help
does not need.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass, replace
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    get_args,
    get_origin,
    get_type_hints,
)

import tyro

from megazoo.environment import world_size
from megazoo.errors import UserError
from megazoo.losses.options import LOSS_OPTIONS
from megazoo.optim.learning_rate import LR_SCHEDULES, own_options
from megazoo.parallel.layout import Layout
from megazoo.parallel.schedule import SCHEDULES
from megazoo.settings import (
    TO_FILL,
    File,
    Filled,
    Name,
    OutputFile,
    about,
    metavar_of,
    settings_of,
    texts_of,
    unset,
)
from megazoo.trainer.outputs import OUTPUTS
from megazoo.trainer.outputs.base import Output

if TYPE_CHECKING:
    from megazoo.lora.settings import LoRASettings

YEAR = 31_536_000  # seconds
Size = Annotated[int | None, unset("INT", "the preset's")]
Rate = Annotated[float | None, unset("FLOAT", "the preset's")]
Switch = Annotated[bool | None, unset("{True,False}", "the preset's")]
ScheduleName = Annotated[str, tyro.conf.arg(metavar=f"{{{','.join(SCHEDULES)},...}}")]
DtypeName = Literal["float32", "bfloat16", "float16"]
DTYPES = "{float32,bfloat16,float16}"
AS_STORED = tyro.conf.arg(metavar=DTYPES, help_behavior_hint="(default: as stored)")
BY_DEVICE = tyro.conf.arg(
    metavar=DTYPES, help_behavior_hint="(default: bfloat16 on CUDA, float32 on CPUs)"
)


def default_dtype(device: str) -> DtypeName:
    """Return the default of --dtype for a new run. device: "cuda" or "cpu"."""
    return "bfloat16" if device == "cuda" else "float32"


class Part(NamedTuple):
    """A setting of a registered part. text: returns its help."""

    kind: Any
    text: Callable[[], str]


def parts_of(group: str) -> dict[str, Part]:
    """Return the settings of registered parts, by name. They are None by default.

    group: logging, for the flags of outputs; optimizer, for the options of learning-rate schedules;
    loss, for those of losses, with the name of the loss.
    """
    if group == "logging":
        return {name: _of_output(output) for name, output in OUTPUTS.items()}
    if group == "loss":
        return {
            f"{name}_{f.name}": _of_field(f"--loss {name}", options, f.name)
            for name, options in LOSS_OPTIONS.items()
            for f in fields(options)
        }
    return {
        option: _of_field(f"--lr-schedule {name}", schedule, option)
        for name, schedule in LR_SCHEDULES.items()
        for option in own_options(schedule)
    }


def _of_output(output: type[Output]) -> Part:
    """Return the setting of an output's flag."""
    declared = about(output=True, megatron=output.megatron)
    kind: Any = output.kind()
    kind = Annotated[kind | None, unset(output.metavar, "none"), declared]
    return Part(kind, lambda: inspect.getdoc(output) or "")


def _of_field(part: str, kind: type, option: str) -> Part:
    """Return the setting of an option of a registered part. part: the flag that selects it. kind: a
    dataclass with the option."""
    hint = get_type_hints(kind, include_extras=True)[option]
    default = kind.__dataclass_fields__[option].default
    bare, *declared = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    made = Annotated[bare | None, unset(metavar_of(bare), str(default))]
    for each in declared:
        made = Annotated[made, each]
    return Part(made, lambda: f"With {part}: {texts_of(kind).get(option, option)}")


def with_parts(group: str) -> Callable[[type], type]:
    """Return a class decorator that declares the settings of a group's registered parts."""

    def declared(options: type) -> type:
        parts = parts_of(group)
        options.__annotations__ |= {name: part.kind for name, part in parts.items()}
        for name in parts:
            setattr(options, name, None)
        options.TEXTS = {name: part.text for name, part in parts.items()}
        return options

    return declared


def with_registered(kind: type) -> type:
    """Return the settings with those of the parts that a file of --import has registered.

    kind: `Options` or a subclass. UserError if a part has the name of another setting.
    """
    groups = {}
    for name in (key for group in PARTS for key in parts_of(group) if key not in PARTS[group]):
        if name in settings_of(kind):
            raise UserError(f"--import: {name} is the name of another setting: use another name")
    for name in PARTS:
        group: Any = kind.__dataclass_fields__[name].default_factory
        new = {key: part for key, part in parts_of(name).items() if key not in settings_of(group)}
        if new:
            members = [(key, part.kind, None) for key, part in new.items()]
            texts = {"TEXTS": {key: part.text for key, part in new.items()}}
            groups[name] = make_dataclass(group.__name__, members, bases=(group,), namespace=texts)
    if not groups:
        return kind
    made = [
        (name, tyro.conf.OmitArgPrefixes[group], field(default_factory=group))
        for name, group in groups.items()
    ]
    return make_dataclass(kind.__name__, made, bases=(kind,))


@dataclass
class ModelOptions:
    """Model to train. Sizes default to those of the preset."""

    ABOUT: ClassVar = about(in_manifest=True)

    preset: Name = None
    """Preset: the sizes of a published model, such as llama3-8b, or of a tiny model for tests, such
    as gpt2-tiny. `megazoo models` lists all presets."""
    model: Name = None
    """Model family: {families}, or one that --import registers; default: gpt2. Without --preset and
    --load it selects the family's tiny preset."""
    import_: Annotated[
        File, tyro.conf.arg(name="import"), about(result=False, in_manifest=False)
    ] = None
    """Python file to run before training. It may register a model (megazoo.register), a data source
    (megazoo.data.register_source), an output of metrics (megazoo.trainer.register_output), a
    learning-rate schedule (megazoo.optim.register_lr_schedule), and callbacks after steps,
    evaluations and saves (megazoo.on_step, on_evaluation, on_save)."""
    hidden_size: Annotated[Size, about(least=1)] = None
    """Number of features per token."""
    layers: Annotated[Size, about(least=1, megatron="num-layers")] = None
    """Number of transformer blocks."""
    heads: Annotated[Size, about(least=1, megatron="num-attention-heads")] = None
    """Number of attention heads. --tp need not divide it, but no rank may get more than 1.25 times
    the average number of heads."""
    kv_heads: Annotated[Size, about(least=1, megatron="num-query-groups")] = None
    """Number of key/value heads (grouped-query attention). They are sharded over --tp like the
    heads. If --tp exceeds this number, --tp must be a multiple of it and must divide --heads; each
    key/value head is then replicated on several ranks."""
    ffn_size: Annotated[Size, about(least=1, megatron="ffn-hidden-size")] = None
    """Hidden size of the MLP. In GPT-2 it is 4 x --hidden-size. --tp need not divide it."""
    vocab_size: Annotated[Size, about(least=1, most=2**63 - 1)] = None
    """Number of tokens in the vocabulary. --tp need not divide it."""
    max_positions: Annotated[
        Size, about(least=1, most=2**63 - 1, megatron="max-position-embeddings")
    ] = None
    """Maximum sequence length of the model, in tokens. RoPE scaling may extend it."""
    dropout: Annotated[Rate, about(below=1, megatron="hidden-dropout; attention-dropout")] = None
    """Dropout probability of all dropout layers of the model."""
    tie_embeddings: Annotated[
        Switch, about(megatron="untie-embeddings-and-output-weights False")
    ] = None
    """Share one weight matrix between the embedding and the output head."""
    num_labels: Annotated[int | None, unset("INT", "the checkpoint's"), about(least=1)] = None
    """Train a sequence classifier with this many labels (1: regression) on JSONL lines with text
    and label. A language-model head loaded with --load is replaced by a new one."""
    experts: Annotated[Size, about(least=1, megatron="num-experts")] = None
    """Number of experts of a layer, in a model with experts. --ep must divide it."""
    experts_per_token: Annotated[Size, about(least=1, megatron="moe-router-topk")] = None
    """Number of experts that each token uses."""
    expert_size: Annotated[Size, about(least=1, megatron="moe-ffn-hidden-size")] = None
    """Hidden size of an expert."""
    router_balance: Annotated[
        Literal["sequence", "batch", "bias", "none"] | None,
        unset("{sequence,batch,bias,none}", "that of the model: sequence"),
        about(megatron="moe-router-load-balancing-type"),
    ] = None
    """How the load of the experts is balanced. sequence: by an auxiliary loss per row, the same in
    every layout. batch: by the auxiliary loss of transformers, over the whole batch; it needs
    --schedule gpipe or one micro-batch. bias: by a bias that only chooses experts, without a loss.
    none: not at all."""
    router_aux_loss_coef: Annotated[
        float | None, unset("FLOAT", "that of the model"), about(megatron="moe-aux-loss-coeff")
    ] = None
    """Factor of the auxiliary loss that balances the load of the experts."""
    router_z_loss_coef: Annotated[
        float | None, unset("FLOAT", "that of the model"), about(megatron="moe-z-loss-coeff")
    ] = None
    """Factor of an auxiliary loss that keeps the logits of the routers near 0: the mean over the
    tokens of log(sum(exp(logits)))^2."""
    router_bias_rate: Annotated[float | None, unset("FLOAT", "that of the model")] = None
    """Change of the bias per step, with --router-balance bias."""


@dataclass(frozen=True, kw_only=True)
class ParallelOptions(Layout):
    """Parallel layout: how the work is divided among ranks."""

    ABOUT: ClassVar = about(agreed=True)

    dp: Annotated[
        int | None,
        unset("INT", "number of ranks / (tp x pp x cp)"),
        about(least=1, most=2**20, result=False),
    ] = None
    """Data-parallel size: number of replicas of the model, each of tp x pp x cp ranks. Without a
    launcher, the program starts the ranks of all replicas on this machine (default: one replica).
    Under a launcher such as torchrun, the default is the only valid value."""
    sequence_parallel: Annotated[
        bool | None, unset("", "on for CUDA with tp above 1, otherwise off")
    ] = None
    """Split the activations between tensor-parallel layers along the sequence. Their memory, and
    the computation between the layers, fall to 1 / tp. --no-sequence-parallel turns it off."""
    schedule: Annotated[
        ScheduleName, about(torchtitan="parallelism.pipeline-parallel-schedule")
    ] = "1f1b"
    """Pipeline schedule: one of these, or one that --import registers. zb-h1 (zero bubble) delays
    weight gradients into idle time: one third of the 1F1B bubble, but more memory on later stages.
    zb-v, v-half, v-min and dualpipe-v have two stages per rank, the first rank the first and the
    last stage. zb-v: a sixth of the 1F1B bubble, and the memory of 1F1B's first rank on every rank.
    v-half: half of the bubble and of the memory. v-min: two thirds of the bubble and a third of the
    memory. dualpipe-v: a sixth of the bubble; it pairs a forward with a full backward."""
    stage_layers: Annotated[str, about(megatron="pipeline-model-parallel-layout")] = "balanced"
    """How layers are assigned to pipeline stages. balanced: by estimated cost. uniform: by number
    of layers. Or the number of layers of each stage, such as 5,6,6,5."""
    folded: ClassVar = ()
    offload_optimizer: Annotated[bool, about(megatron="optimizer-cpu-offload")] = False
    """Store the optimizer's state in CPU memory, and run the update on the CPU."""
    timeout: Annotated[
        float, about(most=YEAR, result=False, megatron="distributed-timeout-minutes (in seconds)")
    ] = 600.0
    """Seconds to wait for another rank before the job is aborted. The error names the missing rank.
    """
    device: Annotated[Literal["auto", "cpu", "cuda"], about(result=False)] = "auto"
    """Device to run on. auto: cuda if every local rank can have its own GPU, otherwise cpu."""

    def __post_init__(self):
        """Check nothing yet: `layout` does, when all settings are known."""

    @property
    def replica(self) -> int:
        """The number of ranks per replica."""
        return self.tp * self.pp * self.cp

    def layout(self, dp: int) -> Layout:
        """Return the layout. dp: the data-parallel size."""
        kind = next(base for base in type(self).__mro__ if not issubclass(base, ParallelOptions))
        values = {name: getattr(self, name) for name in layout_settings(kind)}
        return kind(**values, dp=dp)


def layout_settings(kind: type[Layout] = Layout) -> list[str]:
    """Return the names of the settings of a layout except dp, which follows from the ranks."""
    return [f.name for f in fields(kind) if f.name not in ("dp", "folded")]


def parallel_options(kind: type[Layout]) -> type[ParallelOptions]:
    """Return `ParallelOptions` with a flag for each further field of a subclass of Layout."""
    own = {"__doc__": ParallelOptions.__doc__, "__annotations__": {}}
    made = type("ParallelOptions", (ParallelOptions, kind), own)
    return dataclass(frozen=True, kw_only=True)(made)


@dataclass
class TrainingOptions:
    """Length of the run, batch sizes and precision."""

    ABOUT: ClassVar = about(kept=True, agreed=True)

    steps: Annotated[
        Filled[int],
        unset(
            "INT",
            "600 for a tiny preset from random weights and for mock data, otherwise one epoch",
        ),
        about(
            least=1,
            may_change=True,
            megatron="train-iters; train-samples (samples / global-batch-size)",
            trainer="max-steps",
            torchtitan="training.steps",
        ),
    ] = TO_FILL
    """Total number of optimizer steps, including those before a resume."""
    epochs: Annotated[
        int | None,
        unset("INT", "1, or up to 3 for fine-tuning, unless --steps is set or has a default"),
        about(least=1, may_change=True, instead_of="steps", trainer="num-train-epochs"),
    ] = None
    """Length of the run in passes over the training data, instead of --steps. The last batch may
    contain some samples of the next pass."""
    global_batch_size: Annotated[
        Filled[int],
        unset(
            "INT",
            "32 for a tiny preset from random weights, at most 32 for fine-tuning, otherwise that "
            "of the preset's pretraining, or of GPT-3's model of this size; a multiple of dp",
        ),
        about(
            least=1,
            most=2**30,
            trainer="gradient-accumulation-steps (micro-batch-size x dp x accumulation)",
            torchtitan="training.global-batch-size",
        ),
    ] = TO_FILL
    """Sequences per optimizer step, over all replicas and micro-batches."""
    rampup_batch_size: Annotated[tuple[int, ...], unset("START INCREMENT SAMPLES", "none")] = ()
    """Raise the global batch size linearly from START to --global-batch-size, by INCREMENT at a
    time, over the first SAMPLES samples."""
    micro_batch_size: Annotated[
        Filled[int],
        unset(
            "INT",
            "16 for a tiny preset from random weights, otherwise 1; at most a replica's share",
        ),
        about(least=1, most=2**20, trainer="per-device-train-batch-size"),
    ] = TO_FILL
    """Sequences per micro-batch: the unit of one forward and backward pass."""
    seq_length: Annotated[
        Filled[int],
        unset(
            "INT",
            "128 for a tiny preset from random weights, otherwise the model's maximum, at most "
            "4096",
        ),
        about(
            least=1, most=2**27, trainer="block-size; max-seq-length", torchtitan="training.seq-len"
        ),
    ] = TO_FILL
    """Tokens per sequence."""
    dtype: Annotated[
        Filled[DtypeName],
        BY_DEVICE,
        about(
            follows=True,
            megatron="bf16 bfloat16; fp16 float16",
            torchtitan="training.mixed-precision-param",
        ),
    ] = TO_FILL
    """Data type of weights and activations. bfloat16 and float16 use fp32 master weights, gradients
    and moments; float16 also uses a dynamic loss scale. A resumed run keeps its data type."""
    fp32_precision: Literal["tf32", "ieee"] = "tf32"
    """Precision of float32 matrix products on CUDA. tf32: tensor cores, 10-bit mantissa, several
    times faster. ieee: full float32, as on CPUs."""
    float8: Annotated[
        Literal["tensorwise", "rowwise"] | None,
        unset("{tensorwise,rowwise}", "off"),
        about(megatron="fp8-recipe", torchtitan="quantize.linear.float8.recipe-name"),
    ] = None
    """Multiply in float8 in the linear layers and experts; not in the head. tensorwise: one scale
    per tensor. rowwise: one scale per row. Without a GPU that has float8, the products are
    emulated, which is slower."""
    initial_loss_scale: Annotated[float, about(least=1)] = 65536.0
    """Initial loss scale of a float16 run."""
    loss_scale_window: Annotated[int, about(least=1)] = 1000
    """Number of consecutive steps without overflow after which the loss scale doubles."""
    hysteresis: Annotated[int, about(least=1)] = 2
    """Number of overflows before the loss scale is halved. The overflow that halves it counts."""
    recompute: Annotated[
        Literal["none", "selective", "full"],
        about(
            megatron="recompute-activations selective; recompute-granularity",
            trainer="gradient-checkpointing full",
            torchtitan="activation-checkpoint.mode",
        ),
    ] = "none"
    """Recompute activations in the backward pass instead of storing them. selective: attention and
    the activation function of the MLPs. full: whole layers."""
    recompute_interval: Annotated[int, about(least=1, megatron="recompute-num-layers")] = 1
    """Number of layers that --recompute full recomputes as one unit."""
    compile: Annotated[bool, about(trainer="torch-compile", torchtitan="compile.enable")] = False
    """Run the layers with torch.compile. The start takes a minute or so longer; steps are faster.
    """
    train_only: Annotated[
        str | None, unset("PATTERN", "everything, or the adapters"), about(longest=1000)
    ] = None
    """Regular expression: train only the parameters whose names match, and freeze all others.
    Examples: head, norm, layers[.]3[.], or several: "head|norm". Frozen parameters get no gradient,
    no optimizer state and no weight decay."""
    seed: Annotated[int, about(most=2**63 - 1, samples=True)] = 1234
    """Seed for the initial weights, the order of the samples, and dropout. Without dropout, the run
    is the same in any parallel layout, up to rounding."""


@dataclass
class LoRAOptions:
    """Low-rank adapters (LoRA). The weights of --load are frozen, and only adapters of some
    matrices are trained."""

    ABOUT: ClassVar = about(in_manifest=True, agreed=True)

    lora_rank: Annotated[
        int | None, unset("INT", "no adapters"), about(most=2**20, trainer="lora-r")
    ] = None
    """Rank of new LoRA adapters. 0: no adapters."""
    lora_alpha: Annotated[float | None, unset("FLOAT", "16")] = None
    """Scale of the adapters: their output is multiplied by --lora-alpha / --lora-rank."""
    lora_dropout: Annotated[float | None, unset("FLOAT", "0"), about(below=1)] = None
    """Dropout probability on the inputs of the adapters."""
    lora_targets: Annotated[
        str | None, unset("NAMES", "q,v"), about(trainer="lora-target-modules")
    ] = None
    """Layers to adapt, separated by commas: q, k, v, output, gate, up, down, or their Hugging Face
    names; or all-linear. Experts and routers are moe.gate_up, moe.down and router. If the Hugging
    Face model has one matrix for q, k and v, as in GPT-2, each of the names q, k and v selects that
    matrix."""
    lora_rslora: Annotated[bool | None, unset("", "off")] = None
    """Scale the output of the adapters by --lora-alpha / sqrt(--lora-rank) (rank-stabilized LoRA).
    --no-lora-rslora turns it off."""
    lora_load: File = None
    """Start from existing LoRA adapters: a PEFT directory, or a checkpoint of a LoRA run, which is
    resumed. The base model comes from --load; by default from the checkpoint."""

    @property
    def settings(self) -> "LoRASettings | None":
        """The adapter settings that the flags describe; None without adapters."""
        from megazoo.lora.settings import LoRASettings

        if not self.lora_rank:
            return None
        given = {name.removeprefix("lora_"): value for name, value in self.given.items()}
        return replace(LoRASettings(), **given)

    @property
    def given(self) -> dict:
        """The adapter settings that were given. Omitted flags are not included."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "lora_load"}
        given = {name: value for name, value in values.items() if value is not None}
        if "lora_targets" in given:
            names = given["lora_targets"].split(",")
            given["lora_targets"] = tuple(name.strip() for name in names)
        return given


@dataclass
@with_parts("optimizer")
class OptimizerOptions:
    """The optimizer, its learning rate and clipping."""

    ABOUT: ClassVar = about(kept=True, agreed=True)

    optimizer: Annotated[Literal["adamw", "muon"], about(trainer="optim")] = "adamw"
    """Optimizer. muon: Muon with --muon-lr for the matrices of linear layers, AdamW with --lr for
    all other parameters."""
    lr: Annotated[
        Filled[float],
        unset(
            "FLOAT",
            "fine-tuning: 2e-4 with LoRA, 1e-5 for all weights; otherwise that of the preset's "
            "pretraining, or of GPT-3's model of this size; 1e-3 for a tiny preset",
        ),
        about(most=1e100, trainer="learning-rate", torchtitan="optimizer.lr"),
    ] = TO_FILL
    """Peak learning rate. The run prints the default that it uses when it starts."""
    muon_lr: Annotated[
        Filled[float],
        unset("FLOAT", "2e-2; fine-tuning needs a value"),
        about(most=1e100, follows=True),
    ] = TO_FILL
    """Peak learning rate of Muon. It follows the schedule of --lr."""
    muon_momentum: Annotated[float, about(below=1, megatron="muon-momentum-beta")] = 0.95
    """Momentum of Muon (Nesterov)."""
    ns_steps: Annotated[int, about(least=1, most=100, megatron="muon-num-ns-steps")] = 5
    """Number of Newton-Schulz iterations in Muon."""
    ns_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of the Newton-Schulz iterations. auto: float32 on CPUs, bfloat16 on CUDA."""
    min_lr: Annotated[
        Filled[float], unset("FLOAT", "--lr / 10"), about(most=1e100, follows=True)
    ] = TO_FILL
    """Final learning rate after decay."""
    lr_schedule: Annotated[
        Filled[str],
        unset(
            f"{{{','.join(LR_SCHEDULES)},...}}",
            "linear for a tiny preset from random weights, otherwise cosine",
        ),
        about(
            choices=lambda: LR_SCHEDULES,
            follows=True,
            megatron="lr-decay-style",
            trainer="lr-scheduler-type",
        ),
    ] = TO_FILL
    """Decay of the learning rate after the warm-up: one of these, or one that --import registers.
    wsd (warmup-stable-decay): constant, then a decay over the last --lr-decay-share of the
    steps."""
    warmup_steps: Annotated[
        Filled[int],
        unset("INT", "3 % of the steps, 10 % for a tiny preset from random weights; at most 2000"),
        about(
            follows=True,
            megatron="lr-warmup-iters; lr-warmup-fraction (a number of steps, not a fraction)",
            trainer="warmup-ratio (a number of steps, not a fraction)",
            torchtitan="lr-scheduler.warmup-steps",
        ),
    ] = TO_FILL
    """Number of warm-up steps, in which the learning rate rises linearly from 0."""
    lr_decay_steps: Annotated[
        Filled[int],
        unset("INT", "--steps; in a resumed run, that of the checkpoint"),
        about(follows=True, megatron="lr-decay-iters"),
    ] = TO_FILL
    """Step at which the learning rate reaches --min-lr."""
    weight_decay: Annotated[float, about(torchtitan="optimizer.weight-decay")] = 0.1
    """Decoupled weight decay. Biases and norms have none."""
    clip_grad: Annotated[float, about(trainer="max-grad-norm", torchtitan="training.max-norm")] = (
        1.0
    )
    """Maximum global gradient norm. 0: no clipping."""
    beta1: Annotated[float, about(below=1, megatron="adam-beta1")] = 0.9
    """Decay rate of Adam's first moment."""
    beta2: Annotated[float, about(below=1, megatron="adam-beta2")] = 0.95
    """Decay rate of Adam's second moment."""

    ema: Annotated[float, about(below=1)] = 0.0
    """Decay of an exponential moving average of the weights, such as 0.999. Checkpoints contain it,
    and `megazoo convert --ema` exports it. 0: no average."""

    @property
    def of_schedule(self) -> dict[str, Any]:
        """The given options of the learning-rate schedule, by name."""
        known = own_options(LR_SCHEDULES[self.lr_schedule])
        values = {name: getattr(self, name) for name in known}
        return {name: value for name, value in values.items() if value is not None}


@dataclass
@with_parts("loss")
class LossOptions:
    """The loss to train with."""

    ABOUT: ClassVar = about(kept=True, agreed=True)

    loss: Annotated[
        str, unset("{lm,dpo,distill,...}", "lm"), about(choices=lambda: ["lm", *LOSS_OPTIONS])
    ] = "lm"
    """Loss: one of these, or one that --import registers. lm: the cross-entropy of the next token.
    dpo: direct preference optimization, on data with chosen and rejected answers; batch sizes count
    pairs, or rows with --packing. distill: the divergence from a teacher: --reference, or data with
    its most likely tokens."""
    reference: Annotated[File, about(kept=False, agreed=False)] = None
    """Model that preferences are compared with, or the teacher of distill: as --load, in the same
    layout. With adapters, preferences are compared with the model without them."""
    precompute_reference: Annotated[
        bool, about(may_change=True, trainer="precompute-ref-log-probs")
    ] = False
    """Compute the log-probabilities of the reference of preferences before the first step, and
    store them next to the data, for this and later runs. No second model is then in memory."""

    @property
    def given(self) -> dict[str, Any]:
        """The given options of the loss, by the names of its fields."""
        own = fields(LOSS_OPTIONS[self.loss]) if self.loss in LOSS_OPTIONS else ()
        values = {f.name: getattr(self, f"{self.loss}_{f.name}") for f in own}
        return {name: value for name, value in values.items() if value is not None}


@dataclass
class DataOptions:
    """Training data."""

    ABOUT: ClassVar = about(kept=True)

    data: Annotated[
        tuple[str, ...],
        about(samples=True, megatron="data-path", trainer="train-file; dataset-name (files)"),
    ] = ("stdlib",)
    """Training data: one source, or alternating weights and sources, such as 0.7 a 0.3 b. A source
    is a file of texts or conversations (.jsonl, .json, .txt, .parquet), the prefix of token files
    of `megazoo preprocess`, or stdlib, the source of this machine's Python (about 12 MB).

    Token files of Megatron-LM have the same format. The objects of a JSONL file, or of a .json file
    that is an array, have text, prompt and completion, messages, conversations (ShareGPT), or
    instruction and output (Alpaca). A .parquet file has such columns; with the column text, it is
    streamed by the package datasets and tokenized during training, as are stream:FILES and
    hf://datasets/... A .txt file has one document per paragraph. The tokens of other files are
    cached next to them. In prompts with completions, only the completions count in the loss, and in
    conversations only the assistant messages. A classifier needs JSONL with text, label and
    optionally text_pair."""
    split: Annotated[str, about(agreed=True, samples=True)] = "95,5"
    """Proportions of the documents for training, validation and, optionally, a test at the end of
    the run."""
    tokenizer: Annotated[
        str | None,
        unset("NAME", "that of the model of --load, otherwise byte"),
        about(
            may_change=True,
            megatron="tokenizer-type (byte, or a directory or file); tokenizer-model; "
            "vocab-file (the directory of vocab.json and merges.txt); "
            "merge-file (the directory of vocab.json and merges.txt)",
        ),
    ] = None
    """Tokenizer: byte (one token per byte, plus one that ends a document); a directory or file of a
    tokenizer; or org/name on the Hugging Face hub. See docs/data.md."""
    separate_documents: Annotated[
        bool, about(agreed=True, samples=True, megatron="reset-attention-mask")
    ] = False
    """Do not let documents in one packed sample attend to each other. Positions restart in each
    document."""
    chat_template: Annotated[
        str | None, unset("chatml|TEXT|FILE", "the tokenizer's"), about(agreed=True, samples=True)
    ] = None
    """Chat template of conversations: chatml, a .jinja file, or the text of one message with {role}
    and {content}. It is saved with the model. Conversations need one."""
    packing: Annotated[bool, about(agreed=True, samples=True)] = False
    """Pack several conversations, or pairs of answers with --loss dpo, into one sequence; they do
    not attend to each other. Otherwise each is a row, padded to the longest in its batch."""
    mock_data: Annotated[bool, about(instead_of="data")] = False
    """Train on random tokens, for benchmarks. No tokenizer is needed."""
    data_workers: Annotated[
        int,
        about(most=1000, result=False, megatron="num-workers", trainer="dataloader-num-workers"),
    ] = 1
    """Number of threads that prepare batches in advance. 0: prepare each batch when it is needed.
    """


@dataclass
class VerifyOption:
    """Option of every program that reads a model."""

    ABOUT: ClassVar = about(result=False)

    verify: bool = True
    """Check the files of a checkpoint against its checksums while reading them."""


@dataclass
class CheckpointOptions(VerifyOption):
    """Checkpoints. They load in any parallel layout."""

    save: Annotated[OutputFile, about(trainer="output-dir", torchtitan="checkpoint.folder")] = None
    """Directory for checkpoints. One is written at the end of the run, and when SIGTERM or SIGUSR1
    stops it.

    A run that torchrun restarts (--max-restarts) resumes from the latest checkpoint."""
    save_format: Literal["shards", "dcp"] = "shards"
    """Format of checkpoints. shards: safetensors files, with checksums. dcp: the format of
    torch.distributed.checkpoint, for FSDP2, without checksums. Both resume in any layout."""
    save_interval: Annotated[int, about(trainer="save-steps", torchtitan="checkpoint.interval")] = 0
    """Steps between checkpoints. 0: only at the end."""
    async_save: bool = False
    """Write checkpoints in the background, from a copy in memory, while training continues."""
    keep_last: Annotated[int, about(trainer="save-total-limit")] = 0
    """Number of most recent checkpoints to keep in the directory. 0: all."""
    on_save_error: Literal["stop", "continue"] = "stop"
    """What to do when a checkpoint cannot be written, for example because the disk is full. stop:
    end the run. continue: print a warning and continue training."""
    load: Annotated[
        File,
        about(
            result=True,
            in_manifest=True,
            megatron="use-checkpoint-args",
            trainer="model-name-or-path; resume-from-checkpoint",
        ),
    ] = None
    """Checkpoint or model to start from. A directory of --save, or one step in it, resumes the run.
    A Hugging Face directory, org/name[@revision] on the Hugging Face hub, a GGUF file, or a
    checkpoint of torch.distributed.checkpoint or Megatron-LM starts a new run from its weights.

    With --lora-rank or --lora-load, this is the base model of the adapters."""
    load_weights_only: Annotated[
        bool, about(result=True, in_manifest=True, megatron="finetune")
    ] = False
    """Load only the weights of --load, and start a new run with them."""


@dataclass
class EvaluationOptions:
    """Evaluation on validation and test data."""

    ABOUT: ClassVar = about(result=False, kept=True, agreed=True)

    eval_interval: int = 100
    """Steps between evaluations. 0: only at the end."""
    eval_steps: Annotated[int, about(megatron="eval-iters")] = 20
    """Largest number of batches per evaluation. 0: no evaluation. The evaluation ends earlier if
    the data has fewer batches, so that no row counts more than once. The sources of a blend are
    sampled by their weights."""
    eval_tasks: Annotated[Name, about(kept=False)] = None  # a task may run Python
    """Tasks of lm-evaluation-harness to evaluate the model on at each evaluation: as --tasks of
    `megazoo evaluate`. It needs the extra eval."""


@dataclass
@with_parts("logging")
class LoggingOptions:
    """Progress lines, metrics and profiles."""

    ABOUT: ClassVar = about(result=False)

    log_interval: Annotated[
        int, about(least=1, trainer="logging-steps", torchtitan="metrics.log-freq")
    ] = 10
    """Steps between progress lines on the terminal."""
    record: OutputFile = None
    """Directory for a reproducibility record: settings, checksums of the inputs, versions, and the
    loss of every step. `megazoo check run` repeats the run in any parallel layout."""
    peak_tflops: Annotated[float | None, unset("FLOAT", "the device's in bf16, where known")] = None
    """Peak TFLOP/s of one device, used to compute MFU (model FLOPs utilization)."""
    profile: Annotated[OutputFile, about(torchtitan="profiling.enable-profiling DIR")] = None
    """Directory for a trace of a few steps of each rank. Open it in Perfetto or chrome://tracing.
    """
    profile_steps: tuple[int, int] = (3, 5)
    """First and last step to profile with --profile, counted from the start of this run."""


@dataclass
class Options:
    """All settings, by group. Flags and TOML keys do not include the group."""

    ABOUT: ClassVar = about(result=False)

    # The flags of --help, in this order. --help-all has all flags. (): both are the same.
    FIRST: ClassVar[tuple[str, ...]] = (
        "preset",
        "load",
        "data",
        "tokenizer",
        "save",
        "steps",
        "lr",
        "global_batch_size",
        "seq_length",
        "tp",
        "pp",
        "lora_rank",
    )
    data: tyro.conf.OmitArgPrefixes[DataOptions] = field(default_factory=DataOptions)
    loss: tyro.conf.OmitArgPrefixes[LossOptions] = field(default_factory=LossOptions)
    training: tyro.conf.OmitArgPrefixes[TrainingOptions] = field(default_factory=TrainingOptions)
    checkpoint: tyro.conf.OmitArgPrefixes[CheckpointOptions] = field(
        default_factory=CheckpointOptions
    )
    model: tyro.conf.OmitArgPrefixes[ModelOptions] = field(default_factory=ModelOptions)
    optimizer: Annotated[tyro.conf.OmitArgPrefixes[OptimizerOptions], about(trainer="optim")] = (
        field(default_factory=OptimizerOptions)
    )
    parallel: tyro.conf.OmitArgPrefixes[ParallelOptions] = field(default_factory=ParallelOptions)
    lora: tyro.conf.OmitArgPrefixes[LoRAOptions] = field(default_factory=LoRAOptions)
    evaluation: tyro.conf.OmitArgPrefixes[EvaluationOptions] = field(
        default_factory=EvaluationOptions
    )
    logging: tyro.conf.OmitArgPrefixes[LoggingOptions] = field(default_factory=LoggingOptions)
    config: Annotated[File, about(in_files=False, torchtitan="job.config-file")] = None
    """TOML file of settings. Its keys are the flags with underscores. Flags override it."""
    dry_run: Annotated[bool, about(in_files=False)] = False
    """Print the plan of the run (memory, communication, bubble) and its settings, without training.
    """
    print_config: Annotated[bool, about(in_files=False)] = False
    """Print the settings of the run as a TOML file for --config, without training."""

    @property
    def replicas(self) -> int:
        """The data-parallel size: --dp, or derived from the number of ranks of the launcher."""
        return self.parallel.dp or max(1, world_size() // max(1, self.parallel.replica))

    @property
    def values(self) -> dict:
        """The settings of all groups, by the names of the flags with underscores."""
        groups = filter(is_dataclass, vars(self).values())
        return {f.name.rstrip("_"): getattr(each, f.name) for each in groups for f in fields(each)}


# The groups with settings of registered parts, and the names of those of megazoo.
PARTS = {name: parts_of(name).keys() for name in ("logging", "optimizer", "loss")}

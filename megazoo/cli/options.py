"""The settings of the training program and of the tools: one set of dataclasses makes the flags,
their help and the TOML keys.

The fields' docstrings are the flags' help. Nothing here loads torch, which --help does without.
"""

from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from tyro.conf import Positional

from megazoo.cli.flags import TO_FILL, File, Filled, Name, Source, mandatory, unset
from megazoo.environment import world_size
from megazoo.parallel.schedule import SCHEDULES

if TYPE_CHECKING:
    import torch

    from megazoo.lora.settings import LoRASettings

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
    """Return what --dtype is for a new run where it is left out. device: "cuda" or "cpu"."""
    return "bfloat16" if device == "cuda" else "float32"


@dataclass
class ModelOptions:
    """What is trained. Sizes that are left out are the preset's."""

    model: Name = None
    """Family: gpt2 (the default), llama, mpt, mistral, qwen2, qwen3, pythia, or one that --import
    registers. Without --preset or --load it means its tiny preset."""
    import_: Annotated[File, tyro.conf.arg(name="import")] = None
    """Python file of your own; it is run. It may register a model (megazoo.register), and functions
    that are called after a step, an evaluation or a save (megazoo.on_step, on_evaluation, on_save).
    """
    preset: Name = None
    """A published shape: gpt2-tiny, gpt2-124m, gpt2-355m, gpt2-774m, gpt2-1.5b (or gpt2-xl),
    gpt3-175b; llama-tiny, llama-7b, llama-13b, llama-30b, llama-65b, llama2-70b, llama3-8b,
    llama3-70b, llama3.2-1b; mpt-tiny, mpt-1b, mpt-7b, mpt-30b; mistral-tiny,
    mistral-7b-v0.1, mistral-7b-v0.3, mistral-nemo-12b, mistral-small-24b; qwen2-tiny, qwen2-0.5b,
    qwen2-1.5b, qwen2-7b, qwen2-72b, qwen2.5-3b, qwen2.5-32b; qwen3-tiny, qwen3-0.6b, qwen3-1.7b,
    qwen3-4b, qwen3-8b, qwen3-14b, qwen3-32b; pythia-tiny, pythia-70m, pythia-160m, pythia-410m,
    pythia-1b, pythia-1.4b, pythia-2.8b, pythia-6.9b, pythia-12b."""
    hidden_size: Size = None
    """Features of a token."""
    layers: Size = None
    """Transformer blocks."""
    heads: Size = None
    """Attention heads, cut whole over tp, which need not divide them if no rank has over a quarter
    above its share."""
    kv_heads: Size = None
    """Key and value heads, for models with grouped queries: cut as the heads are; where tp exceeds
    them, tp must be a multiple of them and divide the heads, and each is held by several ranks."""
    ffn_size: Size = None
    """Inner features of the MLP, 4 x hidden-size in GPT-2; tp need not divide them."""
    vocab_size: Size = None
    """Size of the vocabulary; tp need not divide it."""
    max_positions: Size = None
    """Longest sequence that the model has positions for; a rotary scaling may take it further."""
    dropout: Rate = None
    """Probability, in all the places where the model has dropout."""
    tie_embeddings: Switch = None
    """Whether the output head is the embedding."""
    num_labels: Annotated[int | None, unset("INT", "the checkpoint's")] = None
    """Train a classifier of so many labels, on JSONL with text and label in each line. The head of
    a language model that --load names gives way to a new one. 1: a regression."""


@dataclass
class ParallelOptions:
    """How ranks share the work."""

    tp: int = 1
    """Tensor-parallel size: ranks that share each layer."""
    dp: Annotated[int | None, unset("INT", "world / (tp x pp x cp)")] = None
    """Data-parallel size: replicas. In one process it is the number of replicas to start on this
    machine; under a launcher it must be what follows from the number of ranks."""
    pp: int = 1
    """Pipeline-parallel size: stages that the layers are cut into."""
    virtual_pp: int = 1
    """Stages of a pipeline rank; above 1, 1f1b is the interleaved schedule, with a smaller bubble
    and more traffic."""
    cp: int = 1
    """Context-parallel size: ranks that share each sequence."""
    cp_method: Literal["allgather", "ulysses"] = "allgather"
    """How attention looks beyond a rank's part: allgather brings it the keys and values of all,
    ulysses some heads of the whole sequence."""
    stage_layers: str = "balanced"
    """Where the pipeline is cut: balanced, by cost; uniform, by layers; or the layers of each
    stage: 5,6,6,5."""
    sequence_parallel: Annotated[
        bool | None, unset("", "on for CUDA with tp above 1, otherwise off")
    ] = None
    """Split the activations between tensor-parallel layers along the sequence: 1 / tp of their
    memory and of the work there. --no-sequence-parallel turns it off."""
    schedule: ScheduleName = "1f1b"
    """Order of the pipeline's forwards and backwards: one of these, or what --import adds. zb-h1
    leaves the weights' gradients for when a rank would wait: a third of 1f1b's bubble, for more
    memory on later stages."""
    zero: Literal[0, 1] = 0
    """1: the replicas share the optimizer's state and its update (ZeRO-1); each has
    1 / (dp x cp) of them."""
    offload_optimizer: bool = False
    """Keep the optimizer's state on the CPU, and make the update there."""
    timeout: float = 600.0
    """Seconds that a rank waits for another before the job ends, and says which one it waited for.
    """
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run. auto: cuda if each rank of the machine can have a device, else cpu."""

    @property
    def replica(self) -> int:
        """The ranks that hold one replica."""
        return self.tp * self.pp * self.cp


@dataclass
class TrainingOptions:
    """How long and on how much at once."""

    steps: Annotated[
        Filled[int],
        unset(
            "INT",
            "400 for a tiny preset from random weights and for mock data, otherwise one epoch",
        ),
    ] = TO_FILL
    """Number of optimizer steps, including those before a resume."""
    epochs: Annotated[int | None, unset("INT", "1 where --steps has no default")] = None
    """Number of passes over the training data, instead of --steps. The last step may go beyond the
    end of the data."""
    global_batch_size: Annotated[
        Filled[int],
        unset(
            "INT",
            "32 for a tiny preset from random weights and for fine-tuning, otherwise that of the "
            "preset's pretraining, or of GPT-3's model of this size; a multiple of dp",
        ),
    ] = TO_FILL
    """Sequences per optimizer step, over all replicas and micro-batches."""
    micro_batch_size: Annotated[
        Filled[int],
        unset(
            "INT",
            "16 for a tiny preset from random weights, otherwise 1; at most a replica's share",
        ),
    ] = TO_FILL
    """Sequences that a pipeline stage processes at once."""
    seq_length: Annotated[
        Filled[int],
        unset(
            "INT",
            "128 for a tiny preset from random weights, otherwise the model's maximum, at most "
            "4096",
        ),
    ] = TO_FILL
    """Tokens per sequence."""
    dtype: Annotated[Filled[DtypeName], BY_DEVICE] = TO_FILL
    """Type of weights and activations. The shorter ones have fp32 master weights, gradients and
    moments beside them, and float16 a dynamic loss scale. A resumed run keeps its own."""
    fp32_precision: Literal["tf32", "ieee"] = "tf32"
    """How CUDA multiplies matrices of float32. tf32: on tensor cores, several times as fast, of
    numbers rounded to 10 bits of mantissa; ieee: as they are, like CPUs."""
    initial_loss_scale: float = 65536.0
    """Loss scale that a run in float16 begins with."""
    loss_scale_window: int = 1000
    """Steps in a row without overflow, after which the loss scale doubles."""
    hysteresis: int = 2
    """Overflows tolerated before the loss scale is halved, the one that halves it included."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Run parts again in backward instead of keeping their activations: attention and the MLPs'
    activations, or all."""
    recompute_interval: int = 1
    """Layers that are recomputed as one unit under full."""
    compile: bool = False
    """Run the layers under torch.compile: slow to start (a minute or so), faster afterwards."""
    train_only: Annotated[str | None, unset("PATTERN", "everything, or the adapters")] = None
    """Regular expression: parameters in whose name it is not found stay frozen: head, norm,
    layers[.]3[.], or several: "head|norm". They get no gradient, no optimizer state and no weight
    decay."""
    seed: int = 1234
    """Seed of the initial weights, the order of samples and the dropout; the run is the same in any
    layout."""


@dataclass
class LoRAOptions:
    """Low-rank adapters: with them the weights stay as --load gives them, and a small change of
    some matrices is trained."""

    lora_rank: Annotated[int | None, unset("INT", "no adapters")] = None
    """Rank of the change of each matrix; 0: no adapters."""
    lora_alpha: Annotated[float | None, unset("FLOAT", "16")] = None
    """The change is multiplied by lora-alpha / lora-rank."""
    lora_dropout: Annotated[float | None, unset("FLOAT", "0")] = None
    """Probability of dropout on the adapters' inputs."""
    lora_targets: Annotated[str | None, unset("NAMES", "q,v")] = None
    """What is adapted, by our names or Hugging Face's: q, k, v, output, gate, up, down; or
    all-linear. Where q, k and v are one matrix there (GPT-2, MPT), each means that one."""
    lora_rslora: Annotated[bool | None, unset("", "off")] = None
    """Multiply by lora-alpha / sqrt(lora-rank) instead. --no-lora-rslora turns it off."""
    lora_load: File = None
    """Begin with the adapters of a directory, PEFT's or a checkpoint's of a run with adapters; from
    a checkpoint the run goes on, on the base of --load, or that which the checkpoint names."""

    @property
    def settings(self) -> "LoRASettings | None":
        """What the adapters are that the flags ask for; None without."""
        from megazoo.lora.settings import LoRASettings

        if not self.lora_rank:
            return None
        given = {name.removeprefix("lora_"): value for name, value in self.given.items()}
        return replace(LoRASettings(), **given)

    @property
    def given(self) -> dict:
        """What the flags say of the adapters themselves: what is left out is not there."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "lora_load"}
        given = {name: value for name, value in values.items() if value is not None}
        if "lora_targets" in given:
            names = given["lora_targets"].split(",")
            given["lora_targets"] = tuple(name.strip() for name in names)
        return given


@dataclass
class OptimizerOptions:
    """The optimizer, its learning rate and clipping."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: the matrices of linear layers by Muon, with --muon-lr; all else by AdamW, with --lr."""
    lr: Annotated[
        Filled[float],
        unset(
            "FLOAT",
            "fine-tuning: 2e-4 with LoRA, 1e-5 for all weights; otherwise that of the preset's "
            "pretraining, or of GPT-3's model of this size; 5e-3 for a tiny preset",
        ),
    ] = TO_FILL
    """Peak learning rate. The first lines of a run print the default that it uses."""
    muon_lr: Annotated[Filled[float], unset("FLOAT", "2e-2; fine-tuning needs a value")] = TO_FILL
    """Peak learning rate of Muon, with the schedule of --lr."""
    muon_momentum: float = 0.95
    """Momentum of Muon (Nesterov)."""
    ns_steps: int = 5
    """Iterations of Newton-Schulz with which Muon orthogonalises."""
    ns_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """In which Newton-Schulz is computed; auto: float32 on CPUs, bfloat16 on CUDA."""
    min_lr: Annotated[Filled[float], unset("FLOAT", "lr / 10")] = TO_FILL
    """Learning rate at the end of its fall."""
    lr_schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """After the warm-up. wsd: stable, then a linear fall over the last fifth."""
    warmup_steps: Annotated[
        Filled[int],
        unset(
            "INT", "3 % of the steps, a quarter for a tiny preset from random weights; at most 2000"
        ),
    ] = TO_FILL
    """Number of steps in which the learning rate rises linearly from 0."""
    lr_decay_steps: Annotated[Filled[int], unset("INT", "steps; after --load, as before")] = TO_FILL
    """Step at which the learning rate has fallen to min-lr."""
    weight_decay: float = 0.1
    """Decoupled; biases and norms have none."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""


@dataclass
class DataOptions:
    """What it is trained on."""

    data: tuple[str, ...] = ("stdlib",)
    """One source, or weights and sources in turn: 0.7 a 0.3 b. A source is stdlib, the text of this
    machine's Python standard library, about 12 MB; or the prefix of token files, PREFIX.bin and
    PREFIX.idx, written by `megazoo preprocess` or Megatron-LM; or a JSONL file, with text,
    prompt and completion, or messages in each line; or a .txt file, of which each paragraph is a
    document. The tokens of files are kept beside them. The loss is only on
    completions and the assistant's messages. A classifier takes JSONL with text, label, and maybe
    text_pair. A .parquet file, and stream:FILES, are streamed by the package datasets: their
    column text is tokenized while the run trains."""
    split: str = "95,5"
    """Shares of the documents for training, validation and, if there is a third, the test at the
    end."""
    tokenizer: Annotated[
        str | None, unset("NAME", "what is beside the model of --load, or byte")
    ] = None
    """byte: a token is a byte, and one more ends a document. Or a directory or file of a tokenizer,
    or org/name on the Hugging Face hub: see docs/data.md."""
    separate_documents: bool = False
    """Documents packed into one sample don't see each other, and positions begin anew in each."""
    chat_template: Annotated[Filled[str], unset("TEXT|FILE", "the tokenizer's, or ChatML")] = (
        TO_FILL
    )
    """What a conversation looks like: a template of Jinja in a .jinja file, or a message as text
    with {role} and {content}. It is saved with the model."""
    packing: bool = False
    """Conversations, as many as fit, share a sample without seeing each other; else each is a row,
    padded to the longest of its batch."""
    mock_data: bool = False
    """Train on random tokens instead: for benchmarks. They need no tokenizer."""
    data_workers: int = 1
    """Threads that make batches ahead; 0: each is made when it is needed."""


@dataclass
class VerifyOption:
    """What every program takes that reads a model."""

    verify: bool = True
    """Compare the files of a checkpoint with its checksums while they are read."""


@dataclass
class CheckpointOptions(VerifyOption):
    """What is kept. Checkpoints load in any layout."""

    save: File = None
    """Directory for checkpoints; one is written at the end, and when SIGTERM or SIGUSR1 stops the
    run. A run that torchrun starts again (--max-restarts) goes on from the last one."""
    save_interval: int = 0
    """Steps between checkpoints; 0: only at the end."""
    async_save: bool = False
    """Write checkpoints in the background, from a copy in memory, while training goes on."""
    keep_last: int = 0
    """Checkpoints that remain in the directory, the last written; 0: all."""
    on_save_error: Literal["stop", "continue"] = "stop"
    """What to do when a checkpoint can't be written (a full disk, say): end, or warn and train on.
    """
    load: File = None
    """Go on from a checkpoint: a directory of --save, or one step in it. From a Hugging Face
    directory, org/name[@revision] on the Hugging Face hub, or beside --lora-rank or --lora-load,
    only the weights are loaded."""
    load_weights_only: bool = False
    """Take only the weights of --load, and start a new run with them."""


@dataclass
class EvaluationOptions:
    """When the loss of other data is measured."""

    eval_interval: int = 100
    """Steps between evaluations; 0: only at the end."""
    eval_steps: int = 20
    """Batches of an evaluation, which begin the data anew at its end: rows of a classifier may
    count more than once; 0: never evaluate."""


@dataclass
class LoggingOptions:
    """What is printed and recorded."""

    log_interval: int = 10
    """Steps between lines on the terminal."""
    metrics: File = None
    """File to which one JSON object a step is appended."""
    record: File = None
    """Directory that gets what another needs to repeat this run: settings, checksums of all that is
    read, versions, and every step's loss. `megazoo check run` repeats it in any layout."""
    tensorboard: File = None
    """Directory for the same numbers in TensorBoard."""
    wandb: Name = None
    """Project of Weights & Biases for the same numbers. WANDB_MODE=offline keeps them here."""
    trackio: Name = None
    """Project of trackio for the same numbers; `trackio show` draws them. They stay on this
    machine, unless TRACKIO_SPACE_ID names a Space on the Hugging Face hub."""
    peak_tflops: Annotated[float | None, unset("FLOAT", "the device's in bf16, where known")] = None
    """TFLOP/s of one rank's device: what mfu, the model FLOPs utilization, is a share of."""
    profile: File = None
    """Directory that gets a trace of a few steps from each rank, to look at in Perfetto or
    chrome://tracing."""
    profile_steps: tuple[int, int] = (3, 5)
    """The first and the last step of --profile, counted from where this run starts."""


@dataclass
class ImportOption:
    """What every tool takes."""

    import_: Annotated[File, tyro.conf.arg(name="import")] = None
    """Python file that registers a model of your own (megazoo.register); it is run."""


@dataclass
class ConversionOptions(ImportOption, VerifyOption):
    """What the tools that write a model take."""

    source: Source = None
    """Checkpoint of any layout (a step's directory, or the one above for the latest), or a Hugging
    Face directory."""
    output: Positional[Annotated[Path | None, mandatory("OUTPUT")]] = None
    """Directory to write."""
    dtype: Annotated[DtypeName | None, AS_STORED] = None
    """Type of the weights that are written."""
    overwrite: bool = False
    """Replace the output if it is there, and megazoo wrote all that it holds."""

    @property
    def torch_dtype(self) -> "torch.dtype | None":
        import torch

        return self.dtype and getattr(torch, self.dtype)


@dataclass
class Options:
    """Settings by group; flags and TOML keys leave the group out."""

    model: tyro.conf.OmitArgPrefixes[ModelOptions] = field(default_factory=ModelOptions)
    parallel: tyro.conf.OmitArgPrefixes[ParallelOptions] = field(default_factory=ParallelOptions)
    training: tyro.conf.OmitArgPrefixes[TrainingOptions] = field(default_factory=TrainingOptions)
    lora: tyro.conf.OmitArgPrefixes[LoRAOptions] = field(default_factory=LoRAOptions)
    optimizer: tyro.conf.OmitArgPrefixes[OptimizerOptions] = field(default_factory=OptimizerOptions)
    data: tyro.conf.OmitArgPrefixes[DataOptions] = field(default_factory=DataOptions)
    checkpoint: tyro.conf.OmitArgPrefixes[CheckpointOptions] = field(
        default_factory=CheckpointOptions
    )
    evaluation: tyro.conf.OmitArgPrefixes[EvaluationOptions] = field(
        default_factory=EvaluationOptions
    )
    logging: tyro.conf.OmitArgPrefixes[LoggingOptions] = field(default_factory=LoggingOptions)
    config: File = None
    """TOML file of settings: keys are the flags' names with underscores. The command line wins."""
    dry_run: bool = False
    """Print the settings of the run and its plan (memory, traffic, bubble), without training."""
    print_config: bool = False
    """Print the settings of the run as a TOML file for --config, without training."""

    @property
    def replicas(self) -> int:
        """The data-parallel size: as given, or as follows from a launcher's ranks."""
        return self.parallel.dp or max(1, world_size() // max(1, self.parallel.replica))

    @property
    def values(self) -> dict:
        """The settings of all groups, by the names of their flags with underscores."""
        groups = filter(is_dataclass, vars(self).values())
        return {f.name.rstrip("_"): getattr(each, f.name) for each in groups for f in fields(each)}

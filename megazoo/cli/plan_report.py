"""Plan a run from its settings, and format the plan as text."""

from megazoo.cli.text import ranges, size, table, without
from megazoo.lora.settings import LoRASettings
from megazoo.lora.source import open_adapter
from megazoo.models.counts import whole_model
from megazoo.parallel.sizes import product_of
from megazoo.planning import Plan, PlannedRun, Planner
from megazoo.trainer.options import Options, default_dtype
from megazoo.trainer.rules import check_expert_parallel
from megazoo.trainer.run import Settings

PLAN_COLUMNS = [
    "pp",
    "tp",
    "layers",
    "parameters",
    "trainable",
    "weights",
    "gradients",
    "optimizer",
    "on host",
    "activations",
    "total",
    "in flight",
    "FLOPs",
    "sent tp",
    "sent pp",
    "sent cp",
    "sent dp",
]


def adapters_of(settings: Settings) -> LoRASettings | None:
    """Return the LoRA settings of a run, also from a PEFT directory. None: no adapters."""
    directory, known = settings.options.lora.lora_load, settings.weights.settings
    if known or not directory:
        return known
    return open_adapter(directory, whole_model(settings.config)).settings


def planned_run(options: Options, device: str) -> PlannedRun:
    """Return the properties of a run that a plan needs.

    Args:
        options: settings, with all defaults.
        device: "cuda" or "cpu".
    """
    training = options.training
    return PlannedRun(
        micro_batch_size=training.micro_batch_size,
        global_batch_size=training.global_batch_size,
        seq_length=training.seq_length,
        dtype=training.dtype or default_dtype(device),
        offload_optimizer=options.parallel.offload_optimizer,
        recompute=training.recompute,
        recompute_interval=training.recompute_interval,
        optimizer=options.optimizer.optimizer,
        train_only=training.train_only,
        ema=options.optimizer.ema,
    )


def plan_of(planner: Planner, options: Options, dp: int, device: str) -> Plan:
    """Return the plan of a run. Raises UserError if its layout is invalid.

    Args:
        planner: Planner of the model.
        options: Settings of the run.
        dp: Data-parallel size.
        device: "cpu" or "cuda".
    """
    parallel, run = options.parallel, planned_run(options, device)
    check_expert_parallel(planner.config, parallel.ep, dp, parallel.cp)
    layout = parallel.layout(dp).settled(device)
    planner.check(layout, run)
    return planner.plan(layout, run)


def parameters_of(parameters: int, of_adapters: int) -> str:
    """Return the number of parameters of a model; `parameters` includes those of the adapters."""
    model = f"{parameters - of_adapters:,} parameters"
    return f"{model} + {of_adapters:,} of adapters" if of_adapters else model


def plan_lines(plan: Plan) -> list[str]:
    """Return a plan as lines: a table with one row per group of equal ranks, and notes."""
    layout, batch = plan.layout, plan.batch
    sizes = product_of(layout["tp"], layout["pp"], layout["dp"], layout["cp"])
    sizes += "".join(f", {axis} {size}" for axis, size in layout.get("folded", {}).items())
    rows = [PLAN_COLUMNS]
    for rank in plan.ranks:
        row = [
            rank.pp,
            ranges(rank.tp),
            rank.layers,
            f"{rank.parameters:,}",
            f"{rank.trainable_parameters:,}",
            size(rank.weights),
            size(rank.gradients),
            size(rank.optimizer),
            size(rank.optimizer_host),
            size(rank.activations),
            size(rank.total),
            rank.in_flight,
            f"{rank.flops:.4g}",
            size(rank.sent_tp),
            size(rank.sent_pp),
            size(rank.sent_cp),
            size(rank.sent_dp),
        ]
        rows.append([str(cell) for cell in row])
    if layout["cp"] == 1 and "folded" not in layout:
        rows = without(rows, "sent cp")
    count, trained = parameters_of(plan.parameters, plan.adapter_parameters), ""
    if plan.trainable_parameters < plan.parameters:
        trained = f", {plan.trainable_parameters:,} of them trained"
    else:
        rows = without(rows, "trainable")
    return [
        f"{plan.model}, {count}{trained}, on {sizes}",
        f"  {plan.microbatches} micro-batch{'es' * (plan.microbatches > 1)} of "
        f"{batch['micro_batch_size']} x {batch['seq_length']} tokens per replica, "
        f"{batch['dtype']}, recompute {batch['recompute']}",
        f"  bubble {plan.bubble:.2%} if all stages take equal time, "
        f"{plan.bubble_of_stages:.2%} with the FLOPs of each stage",
        f"  {plan.model_flops_per_token:.4g} model FLOPs per token, without recomputation",
        *table(rows),
        "memory and traffic in bytes; FLOPs and traffic per step; "
        "each line applies to its tp ranks in every replica"
        + (", and to all cp ranks" if layout["cp"] > 1 else ""),
    ]

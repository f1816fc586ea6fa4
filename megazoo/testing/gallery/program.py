"""Bugs in the numbers that the training program prints."""

from megazoo.data.loading import Batches
from megazoo.engine.calls import BatchCalls
from megazoo.layers.router import Router
from megazoo.testing.gallery.planting import BUGS, Bug, then
from megazoo.trainer import data, loop
from megazoo.trainer.recorder import Recorder
from megazoo.trainer.run import Run


def loss_times_tp(log_step, self, step, loss, norm, tokens, watch):
    """The loss that is logged is summed over ranks that have the same loss."""
    log_step(self, step, loss * self.model.ctx.tp_size, norm, tokens, watch)


def mean_of_batch_means(_, run, model, batches, *__):
    """The means of the validation batches have equal weights."""
    rows = run.options.training.global_batch_size
    starts = range(0, run.options.evaluation.eval_steps * rows, rows)
    count = batches.rows_after(0) // run.options.training.micro_batch_size
    means = [
        model.eval_batch(**batch, num_microbatches=count, return_count=True)[0].item()
        for batch in batches.ahead(starts, 0)
    ]
    return sum(means) / len(means), {}


def divide_flops(recorder):
    """The FLOPs per token are those of one pipeline stage."""
    recorder.token_flops /= recorder.model.ctx.pp_size


def move_biases(model):
    """The routers count the tokens of evaluations too, and balance their bias."""
    for module in model.modules():
        if isinstance(module, Router) and module.load is not None:
            module.batch_counted(module.load)


def starts_by_the_step(_, self):
    """A resumed run starts at the number of steps times the new batch size."""
    rows, steps = self.options.training.global_batch_size, self.options.training.steps
    return range(self.first_step * rows, steps * rows, rows)


BUGS += [
    Bug("N21", "Printed loss multiplied by the ranks of tp",
        r"program: the logged loss is .*, but the loss of the step is ",
        Recorder, "log_step", loss_times_tp, layout="tp2",
        source="transformers #45994",
        link="https://github.com/huggingface/transformers/issues/45994"),
    Bug("N22", "Validation loss as the mean of the batches' means",
        r"program: the logged eval_loss is .*, but the mean over the tokens of the evaluation is ",
        loop, "evaluate", mean_of_batch_means, layout="dp2",
        source="torchtitan #4167", link="https://github.com/pytorch/torchtitan/issues/4167"),
    # The tokens of a step are counted per context-parallel rank.
    Bug("N26a", "Throughput divided by cp",
        r"program: consumed_tokens of step 1 is ",
        Batches, "tokens", lambda tokens, self, step: tokens(self, step) // self.ctx.cp_size,
        layout="cp2",
        source="prime-rl #2424",
        link="https://github.com/PrimeIntellect-ai/prime-rl/issues/2424"),
    Bug("N26b", "MFU from the FLOPs of one stage",
        r"program: tflops per token of step 1 is ",
        Recorder, "__init__", then(divide_flops), layout="pp2",
        source="OLMo-core #680", link="https://github.com/allenai/OLMo-core/issues/680"),
    # Rows are padded to the longest of the replica, without a mark.
    Bug("", "Padding of short rows counted by the routers of the program",
        r"program: auxiliary_router_balance of step 1 is ",
        data, "counts_tokens", lambda _, model: False,
        layout="dp2", model="mixtral", settings={"layers": 2}),
    Bug("", "Evaluation moves the bias of routers",
        r"program: evaluation changes layers\.\d\.moe\.router\.bias",
        BatchCalls, "eval_batch", then(move_biases),
        layout="tp2", model="mixtral", settings={"layers": 2, "router_balance": "bias"}),
    Bug("", "Samples skipped if the batch size changes",
        r"program: a run that resumes with another batch size reads other samples",
        Run, "batch_starts", starts_by_the_step, layout="dp2:dp2"),
]  # fmt: skip

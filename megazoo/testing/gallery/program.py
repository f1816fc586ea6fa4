"""Bugs in the numbers that the training program prints."""

from megazoo.data.loading import Batches
from megazoo.engine.calls import BatchCalls
from megazoo.layers.router import Router
from megazoo.testing.gallery.planting import bug, replaced
from megazoo.trainer import data, loop
from megazoo.trainer.recorder import Recorder
from megazoo.trainer.run import Run


@bug(
    "N21",
    "Printed loss multiplied by the ranks of tp",
    r"program: the logged loss is .*, but the loss of the step is ",
    layout="tp2",
    source="transformers #45994",
    link="https://github.com/huggingface/transformers/issues/45994",
)
def printed_loss_times_tp():
    """The loss that is logged is summed over ranks that have the same loss."""

    def make(log_step):
        def logged(self, step, loss, norm, tokens, watch):
            log_step(self, step, loss * self.model.ctx.tp_size, norm, tokens, watch)

        return logged

    return replaced(Recorder, "log_step", make)


@bug(
    "N22",
    "Validation loss as the mean of the batches' means",
    r"program: the logged eval_loss is .*, but the mean over the tokens of the evaluation is ",
    layout="dp2",
    source="torchtitan #4167",
    link="https://github.com/pytorch/torchtitan/issues/4167",
)
def mean_of_batch_means():
    """The means of the validation batches have equal weights."""

    def make(_):
        def evaluated(run, model, batches, *_):
            rows = run.options.training.global_batch_size
            starts = range(0, run.options.evaluation.eval_steps * rows, rows)
            count = batches.rows_after(0) // run.options.training.micro_batch_size
            means = [
                model.eval_batch(**batch, num_microbatches=count, return_count=True)[0].item()
                for batch in batches.ahead(starts, 0)
            ]
            return sum(means) / len(means), {}

        return evaluated

    return replaced(loop, "evaluate", make)


@bug(
    "N26a",
    "Throughput divided by cp",
    r"program: consumed_tokens of step 1 is ",
    layout="cp2",
    source="prime-rl #2424",
    link="https://github.com/PrimeIntellect-ai/prime-rl/issues/2424",
)
def tokens_divided_by_cp():
    """The tokens of a step are counted per context-parallel rank."""

    def make(tokens):
        return lambda self, consumed: tokens(self, consumed) // self.ctx.cp_size

    return replaced(Batches, "tokens", make)


@bug(
    "N26b",
    "MFU from the FLOPs of one stage",
    r"program: tflops per token of step 1 is ",
    layout="pp2",
    source="OLMo-core #680",
    link="https://github.com/allenai/OLMo-core/issues/680",
)
def flops_of_one_stage():
    """The FLOPs per token are those of one pipeline stage."""

    def make(init):
        def initialised(self, run, model, optimizer):
            init(self, run, model, optimizer)
            self.token_flops /= model.ctx.pp_size

        return initialised

    return replaced(Recorder, "__init__", make)


@bug(
    "",
    "Padding of short rows counted by the routers of the program",
    r"program: auxiliary_router_balance of step 1 is ",
    layout="dp2",
    model="mixtral",
    settings={"layers": 2},
)
def padding_not_marked():
    """Rows are padded to the longest of the replica, without a mark."""
    return replaced(data, "counts_tokens", lambda _: lambda model: False)


@bug(
    "",
    "Evaluation moves the bias of routers",
    r"program: evaluation changes layers\.\d\.moe\.router\.bias",
    layout="tp2",
    model="mixtral",
    settings={"layers": 2, "router_balance": "bias"},
)
def bias_moved_by_evaluation():
    """The routers count the tokens of evaluations too, and balance their bias."""

    def make(evaluate):
        def evaluated(self, *arguments, **options):
            result = evaluate(self, *arguments, **options)
            for module in self.modules():
                if isinstance(module, Router) and module.load is not None:
                    module.batch_counted(module.load)
            return result

        return evaluated

    return replaced(BatchCalls, "eval_batch", make)


@bug(
    "",
    "Samples skipped if the batch size changes",
    r"program: a run that resumes with another batch size reads other samples",
    layout="dp2:dp2",
)
def samples_by_the_step():
    """A resumed run starts at the number of steps times the new batch size."""

    def starts(self):
        rows, steps = self.options.training.global_batch_size, self.options.training.steps
        return range(self.first_step * rows, steps * rows, rows)

    return replaced(Run, "batch_starts", lambda _: starts)

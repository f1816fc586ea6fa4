"""What several tests share: tiny models, batches with unevenly masked labels, and a training run in any layout."""

import torch

import megazoo
from megazoo.models.gpt2 import GPT2Config
from megazoo.testing import GROUP_TIMEOUT

# Five layers so that stages are uneven; 61 tokens so that neither 2 nor 4 divides the vocabulary.
TINY = dict(vocab_size=61, max_positions=16, hidden_size=32, layers=5, heads=4)
NO_DROPOUT = dict(embedding_dropout=0.0, attention_dropout=0.0, residual_dropout=0.0)
GLOBAL_BATCH = 8
CLIP = 0.2


def tiny_config(tied: bool = True, dropout: float = 0.0, **overrides) -> GPT2Config:
    rates = dict.fromkeys(NO_DROPOUT, dropout)
    return GPT2Config(**{**TINY, **rates, "tie_embeddings": tied, **overrides})


def make_batch(step: int, batch: int = GLOBAL_BATCH, sequence: int = 16, vocab: int = 61):
    """Token ids and targets; row r keeps roughly r + 1 of every 8 labels, so that micro-batches differ widely."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, vocab, (batch, sequence + 1), generator=generator)
    keep = torch.rand(batch, sequence, generator=generator) < torch.arange(1, batch + 1)[:, None] / batch
    return tokens[:, :-1], tokens[:, 1:].masked_fill(~keep, -100)


def replica_rows(tensor, ctx):
    """The rows of a global batch that belong to this rank's replica."""
    return tensor.chunk(ctx.dp_size)[ctx.dp_rank]


def context(tp=1, pp=1, dp=1):
    ctx = megazoo.ParallelContext.from_torch(tp, pp, dp, device="cpu", timeout=GROUP_TIMEOUT)
    torch.set_num_threads(1)  # bits may depend on the number of threads
    return ctx


def randomize(model, seed=7):
    """Give biases and norms random values too, the same in every layout, so that zeros hide nothing."""
    from dataclasses import replace

    from megazoo.parallel.random import derive_seed
    from megazoo.parallel.shard import initialize

    for entry in model.entries():
        if entry.spec.std == 0:
            initialize(entry.parameter, replace(entry.spec, std=0.1), model.ctx, derive_seed(seed, entry.name))
    return model


def randomized_(hf):
    """Random values for every parameter of a transformers model: ones and zeros would hide a mix-up."""
    for parameter in hf.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3)
    return hf.eval()


def outputs_of_copied_weights(weights, config, ids, layout):
    """Loss and logits of a model in any layout whose global tensors are `weights`."""
    model = megazoo.from_config(config, context(**layout)).eval()
    with torch.no_grad():
        for entry in model.entries():
            for piece in entry.spec.pieces(model.ctx.tp_size, model.ctx.tp_rank):
                entry.parameter[piece.index()] = weights[entry.name][tuple(slice(*bounds) for bounds in piece.box)]
        output = model(ids, labels=ids, return_logits=True)
    return output.loss, output.logits


INFERENCE_LAYOUTS = [{}, {"tp": 2}, {"tp": 4}, {"pp": 2}, {"tp": 2, "pp": 2}]


def assert_outputs_equal(ranks, weights, config, ids, loss, logits, layouts=INFERENCE_LAYOUTS):
    """In each layout: the loss within 1e-5 on every rank, the logits within 5e-5 on those of the last stage."""
    for layout in layouts:
        size = layout.get("tp", 1) * layout.get("pp", 1)
        if size == 1:
            results = [outputs_of_copied_weights(weights, config, ids, layout)]
        else:
            results = ranks(outputs_of_copied_weights, size, weights, config, ids, layout)
        assert any(logits is not None for _, logits in results)
        for rank_loss, rank_logits in results:
            assert abs(rank_loss - loss) < 1e-5, layout
            if rank_logits is not None:
                torch.testing.assert_close(rank_logits, logits, atol=5e-5, rtol=0)


def train(
    config,
    layout: dict,
    steps: int = 20,
    micro_batch: int = 0,
    schedule: str = "1f1b",
    recompute=("none",),
    **optimizer,
):
    """Train on the same global batches in any layout; returns [(loss, gradient norm)] of every step."""
    ctx = context(**layout)
    model = randomize(megazoo.from_config(config, ctx, seed=3)).recompute(*recompute)
    opt = megazoo.optim.AdamW(model, **{"lr": 1e-3, "clip_grad": CLIP, **optimizer})
    micro_batch = micro_batch or (2 if ctx.pp_size > 1 else 4 // ctx.dp_size)  # at least two micro-batches
    history = []
    for step in range(steps):
        ids, targets = (replica_rows(tensor, ctx) for tensor in make_batch(step))
        loss = model.train_batch(
            ids, targets=targets, num_microbatches=len(ids) // micro_batch, schedule=schedule, step=step
        )
        history.append((loss.item(), opt.step().item()))
    return history


def worst_relative(a, b) -> float:
    """The largest |x - y| / |y| over two nested lists of numbers."""
    a, b = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    return ((a - b).abs() / b.abs()).max().item()

"""The layers alone: a plain PyTorch transformer becomes tensor-parallel by swapping its linears."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megazoo.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from tests.support.layers import gradients_of
from tests.support.training import context

COLUMNS, ROWS = ("query", "key", "value", "up"), ("output", "down")


class Block(nn.Module):
    """Knows nothing of parallelism, but for one thing: how many heads there are follows from its
    queries."""

    def __init__(self, size=32, head=8):
        super().__init__()
        self.head = head
        self.norm, self.mlp_norm = nn.LayerNorm(size), nn.LayerNorm(size)
        self.query, self.key, self.value, self.output = (nn.Linear(size, size) for _ in range(4))
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, x):
        y = self.norm(x)
        q, k, v = (
            part(y).unflatten(-1, (-1, self.head)) for part in (self.query, self.key, self.value)
        )
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Transformer(nn.Module):
    def __init__(self, vocab=64, size=32, layers=2):
        super().__init__()
        self.embedding = nn.Embedding(vocab, size)
        self.norm, self.head = nn.LayerNorm(size), nn.Linear(size, vocab)
        self.blocks = nn.ModuleList(Block(size) for _ in range(layers))

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parallelized(model, ctx):
    """The model with its linears and its embedding swapped, their weights kept."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if not isinstance(child, nn.Embedding | nn.Linear):
                continue
            sizes = child.weight.shape
            if isinstance(child, nn.Embedding):
                new = VocabParallelEmbedding(*sizes, ctx=ctx)
            elif name in ROWS:
                new = RowParallelLinear(*reversed(sizes), ctx=ctx)
            else:
                gathers = name not in COLUMNS
                new = ColumnParallelLinear(*reversed(sizes), gather_output=gathers, ctx=ctx)
            for key, parameter in child.named_parameters():
                for piece in new.specs[key].pieces(ctx.place):
                    box = tuple(slice(*bounds) for bounds in piece.box)
                    getattr(new, key).data[piece.index()] = parameter.data[box]
            setattr(module, name, new)
    return model


def trained(layout=None):
    """Losses of three steps, and the gradients of the first as pieces of whole tensors: {name:
    [(box, piece)]}."""
    torch.manual_seed(0)
    model, gradients = Transformer(), {}
    ctx = context(**layout) if layout else None
    if ctx:
        model = parallelized(model, ctx)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for step in range(3):
        ids = torch.randint(0, 64, (4, 13), generator=torch.Generator().manual_seed(step))
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            for name, parameter in model.named_parameters():
                whole = tuple((0, size) for size in parameter.shape)
                gradients[name] = [(whole, parameter.grad.clone())]
            cut = gradients_of(model, ctx) if ctx else {}
            for name, (_, pieces) in cut.items():
                gradients[name] = [(piece.box, part.clone()) for piece, part in pieces]
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients


@pytest.mark.parametrize("tp", [2, 4])
def test_a_plain_transformer_becomes_tensor_parallel_by_swapping_its_linears(ranks, tp):
    losses, gradients = trained()
    for ours, parts in ranks(trained, tp, dict(tp=tp)):
        assert ours == pytest.approx(losses, rel=1e-5)
        assert parts.keys() == gradients.keys()
        for name, [(_, whole)] in gradients.items():
            for box, piece in parts[name]:
                expected = whole[tuple(slice(*bounds) for bounds in box)]
                assert (piece - expected).norm() <= 1e-5 * whole.norm() + 1e-8, name

"""GPT-2 with torch's own modules in every layer and at its end: a gate, a norm, a scale, tables."""

import random
from dataclasses import dataclass, replace

import torch
from torch import nn

import megazoo
from megazoo.layers import RMSNorm
from megazoo.models import gpt2
from megazoo.parallel.regions import enter_tensor_parallel, leave_tensor_parallel
from tests.support.training import NO_DROPOUT, TINY


@dataclass(frozen=True)
class PlainConfig(gpt2.GPT2Config):
    """mistake: what a model does that can't be right in every layout."""

    mistake: str = ""


class Block(gpt2.Block):
    def __init__(self, c, index):
        super().__init__(c, index)
        self.gate = nn.Linear(c.hidden_size, c.hidden_size)
        self.gate_norm = nn.LayerNorm(c.hidden_size)
        self.scale = nn.Parameter(torch.ones(c.hidden_size))
        self.register_buffer("table", torch.linspace(0.5, 1.5, c.hidden_size))
        self.register_buffer("undefined", torch.full((3,), torch.nan))
        self.shift = torch.linspace(-0.1, 0.1, c.hidden_size)
        self.outer = Outer(c.hidden_size)
        self.angle = torch.full((), random.random() if c.mistake == "random" else 0.5)
        if c.mistake == "dropout":
            self.drop = nn.Dropout(0.1)
        elif c.mistake == "batch norm":
            self.statistics = nn.BatchNorm1d(c.hidden_size)
        elif c.mistake == "drawn":
            self.drawn = nn.Parameter(torch.randn(c.hidden_size))
        elif c.mistake == "scalar":
            self.scalar = nn.Parameter(torch.tensor(1.0))
        elif c.mistake == "inside":
            self.inside = nn.LayerNorm(c.hidden_size // 2)
        elif c.mistake == "looks":
            self.bound = float(self.table.max())
        elif c.mistake == "around":
            self.around = nn.LayerNorm(c.hidden_size)
        elif c.mistake == "no spec":
            self.attention.qkv.extra = nn.Parameter(torch.zeros(c.hidden_size))

    def forward(self, x, *arguments):
        x = super().forward(x, *arguments)
        table = (self.table * self.scale + self.shift).to(x.dtype)
        x = x + self.gate_norm(torch.tanh(self.gate(x))) * table
        if hasattr(self, "inside"):  # each tp rank has a half of the features
            half = x.chunk(2, dim=-1)[self.attention.qkv.ctx.tp_rank]
            x = x + 0.1 * self.inside(half).sum(dim=-1, keepdim=True)
        if hasattr(self, "around"):
            ctx = self.attention.qkv.ctx
            x = x + leave_tensor_parallel(self.around(enter_tensor_parallel(x, ctx)), ctx)
        return self.outer(x)


class Outer(nn.Module):
    """A module that initialises its part after the part itself has."""

    def __init__(self, size):
        super().__init__()
        self.inner = nn.LayerNorm(size)
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.constant_(self.inner.weight, 2.0)

    def forward(self, x):
        return x + 0.01 * self.inner(x)


@megazoo.register("plain")
class Plain(gpt2.GPT2):
    Config, Block = PlainConfig, Block
    presets = {"plain-tiny": PlainConfig(**{**TINY, **NO_DROPOUT, "layers": 4})}

    def __init__(self, config, ctx, seed=0):
        super().__init__(config, ctx, seed)
        if self.has_last:
            self.final = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        if config.mistake == "on every stage":
            self.everywhere = RMSNorm(config.hidden_size)
        elif config.mistake == "hidden":
            self.engine = nn.Linear(config.hidden_size, config.hidden_size)
        elif config.mistake == "aliased" and self.embedding is not None:  # which is tied
            self.alias = self.embedding
        elif config.mistake == "shared" and self.layers:
            first, *others = self.layers.values()
            for layer in others:
                layer.mlp = first.mlp

    def forward_stage(self, x, batch, stage):
        x = super().forward_stage(x, batch, stage)
        return x + self.final(x) if stage.last else x


def plain_config(mistake: str = "") -> PlainConfig:
    return replace(Plain.presets["plain-tiny"], mistake=mistake)

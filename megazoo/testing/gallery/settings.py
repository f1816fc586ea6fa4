"""Bugs in settings, positions, labels and initial values, published in 2026."""

from dataclasses import replace

import torch
import torch.nn.functional as F

from megazoo.constants import IGNORE_INDEX
from megazoo.formats.hugging_face import llama as files
from megazoo.layers.rotary import Rotary
from megazoo.lora.layers import Adapters
from megazoo.models import base
from megazoo.models.llama import Llama
from megazoo.models.outputs import LanguageModeling
from megazoo.optim import muon
from megazoo.optim.whole_matrices import WholeMatrices
from megazoo.testing.gallery.planting import BUGS, Bug, then

END_OF_TEXT = 5  # a token of the batch in `_beside_transformers`


def copy_first_chunk(model):
    """The seed of a layer's initial weights is its number in the chunk."""
    first, *others = model.stages
    for stage in others:
        for index, same in zip(stage.layers, first.layers, strict=False):
            model.layers[str(index)].load_state_dict(model.layers[str(same)].state_dict())


def placed_by_hidden_size(added, self, y, inner):
    """The adapters of k and v are added where these are if q has as many features as the hidden
    size. Heads are larger."""
    if "k" not in self:
        return added(self, y, inner)
    k = self["k"]
    start = dict(q=0, k=k.A.shape[1] // k.ctx.tp_size)
    start["v"] = start["k"] + self.sizes["k"]
    for name, hidden in inner.items():
        after = y.shape[-1] - start[name] - self.sizes[name]
        y = y + F.pad(self[name].project_up(hidden), (start[name], after))
    return y


def without_end_of_text(targets, self, given, labels, shape, own_loss):
    """Padding is found by its token, which is also the end of a text. This token has no loss."""
    if labels is not None:
        labels = labels.masked_fill(labels == END_OF_TEXT, IGNORE_INDEX)
    return targets(self, given, labels, shape, own_loss)


def counted_positions(call, self, positions, *arguments):
    """Rotary embeddings ignore the given positions, and count the tokens of their input."""
    return call(self, torch.arange(positions.shape[-1], device=positions.device), *arguments)


def yarn_if_longer(yarn, self, base):
    """The frequencies are scaled only if the model's context is longer than the original one."""
    return yarn(self, base) if self.max_positions > self._original_context() else (base, 1.0)


def read_as(**values):
    """Return a wrapper: fields of config.json are ignored, and have these values."""
    return lambda read_config, *given: {**read_config(*given), **values}


def in_bfloat16(forward_stage, self, x, batch, stage):
    """Autocast to bfloat16 is on in the second pipeline stage."""
    with torch.autocast("cpu", torch.bfloat16, enabled=stage.index == 1):
        return forward_stage(self, x, batch, stage)


def padded_matrices(apply, self, function, give, take):
    """Matrices are padded to 128 rows before they are orthogonalised. The factor of the step counts
    the padding."""

    def step_of(matrix, which):
        rows = -(-which.rows // 128) * 128
        wide = F.pad(matrix, (0, 0, 0, rows - which.rows))
        return function(wide, replace(which, rows=rows))[: which.rows]

    apply(self, step_of, give, take)


BUGS += [
    Bug("N32", "The same initial weights in two chunks of a rank",
        r"parameter layers\.2\.attention\.qkv\.weight: another initial value on rank 0 ",
        base, "fill", then(copy_first_chunk), layout="pp2v2",
        source="OLMo-core #679", link="https://github.com/allenai/OLMo-core/issues/679"),
    Bug("N39", "LoRA's places of q, k and v by the hidden size",
        r"module layers\.0\.attention\.q_norm: its input differs on ranks 0",
        Adapters, "_added", placed_by_hidden_size,
        layout="tp2", model="qwen3", settings={"head_size": 16}, lora_rank=2,
        source="litgpt #2201", link="https://github.com/Lightning-AI/litgpt/issues/2201"),
    Bug("N41", "The end of a text taken for padding",
        r"loss: .* instead of .*, though no logit differs",
        LanguageModeling, "targets", without_end_of_text, layout="transformers", model="llama",
        source="TRL #6357", link="https://github.com/huggingface/trl/issues/6357"),
    Bug("N42", "Rotary positions by the length instead of the given positions",
        r"module layers\.0\.attention\.output: its input differs on ranks 0",
        Rotary, "__call__", counted_positions, layout="cp2", model="llama",
        source="NeMo Automodel #2377",
        link="https://github.com/NVIDIA-NeMo/Automodel/issues/2377"),
    Bug("N43", "YaRN off for sequences of the original length",
        r"layer 0, attention\.output \(model\.layers\.0\.self_attn\.o_proj\): its input differs",
        Rotary, "_yarn", yarn_if_longer, layout="transformers", model="llama",
        settings={
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
        source="torchtitan #4117", link="https://github.com/pytorch/torchtitan/issues/4117"),
    Bug("N44a", "Linear scaling of positions ignored in a config",
        r"layer 0, attention\.output \(model\.layers\.0\.self_attn\.o_proj\): its input differs",
        files, "read_config", read_as(rope_scaling=None), layout="transformers", model="llama",
        settings={"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        source="Megatron-Bridge #5097",
        link="https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/5097"),
    Bug("N44b", "The base of rotary positions ignored in a config",
        r"layer 0, attention\.output \(model\.layers\.0\.self_attn\.o_proj\): its input differs",
        files, "read_config", read_as(rope_theta=10000.0),
        layout="transformers", model="llama", settings={"rope_theta": 5e5},
        source="litgpt #2218", link="https://github.com/Lightning-AI/litgpt/issues/2218"),
    Bug("N44c", "The norms' epsilon ignored in a config",
        r"layer 0, attention_norm \(model\.layers\.0\.input_layernorm\): its output differs",
        files, "read_config", read_as(norm_epsilon=1e-6),
        layout="transformers", model="llama", settings={"norm_epsilon": 1e-3},
        source="Megatron-LM #5750", link="https://github.com/NVIDIA/Megatron-LM/issues/5750"),
    Bug("N46", "A stage in bfloat16 though fp32 is asked for",
        r"module layers\.2\.attention\.output: its input differs on rank 1 ",
        Llama, "forward_stage", in_bfloat16, layout="pp2", model="llama",
        source="verl #6150", link="https://github.com/verl-project/verl/issues/6150"),
    Bug("N47a", "Muon's step of the embedding",
        r"optimizer: the weights of embedding\.weight are not those of AdamW, in one process",
        muon, "linear_names", lambda names, model: names(model) | {"embedding.weight"},
        layout="dp2", model="llama", optimizer="muon",
        source="Megatron-LM #5034", link="https://github.com/NVIDIA/Megatron-LM/issues/5034"),
    Bug("N47b", "Rows of padding in Muon's step",
        r"optimizer: the weights of .* are not those of Muon, in one process",
        WholeMatrices, "apply", padded_matrices, layout="dp2", model="llama", optimizer="muon",
        source="Megatron-LM #6740", link="https://github.com/NVIDIA/Megatron-LM/pull/6740"),
]  # fmt: skip

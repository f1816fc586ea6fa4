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
from megazoo.testing.gallery.planting import bug, replaced

END_OF_TEXT = 5  # a token of the batch in `_beside_transformers`


@bug(
    "N32",
    "The same initial weights in two chunks of a rank",
    r"parameter layers\.2\.attention\.qkv\.weight: another initial value on rank 0 ",
    layout="pp2v2",
    source="OLMo-core #679",
    link="https://github.com/allenai/OLMo-core/issues/679",
)
def chunks_with_the_same_weights():
    """The seed of a layer's initial weights is its number in the chunk, so that the chunks of a
    rank have the same weights."""

    def make(fill):
        def by_chunk(model, seed):
            model = fill(model, seed)
            first, *others = model.stages
            for stage in others:
                for index, same in zip(stage.layers, first.layers, strict=False):
                    values = model.layers[str(same)].state_dict()
                    model.layers[str(index)].load_state_dict(values)
            return model

        return by_chunk

    return replaced(base, "fill", make)


@bug(
    "N39",
    "LoRA's places of q, k and v by the hidden size",
    r"module layers\.0\.attention\.q_norm: its input differs on ranks 0",
    layout="tp2",
    model="qwen3",
    settings={"head_size": 16},
    lora_rank=2,
    source="litgpt #2201",
    link="https://github.com/Lightning-AI/litgpt/issues/2201",
)
def adapters_placed_by_hidden_size():
    """The adapters of k and v are added where these are if q has as many features as the hidden
    size. Heads are larger."""

    def make(added):
        def placed(self, y, inner):
            if "k" not in self:
                return added(self, y, inner)
            k = self["k"]
            start = dict(q=0, k=k.A.shape[1] // k.ctx.tp_size)
            start["v"] = start["k"] + self.sizes["k"]
            for name, hidden in inner.items():
                after = y.shape[-1] - start[name] - self.sizes[name]
                y = y + F.pad(self[name].project_up(hidden), (start[name], after))
            return y

        return placed

    return replaced(Adapters, "_added", make)


@bug(
    "N41",
    "The end of a text taken for padding",
    r"loss: .* instead of .*, though no logit differs",
    layout="transformers",
    model="llama",
    source="TRL #6357",
    link="https://github.com/huggingface/trl/issues/6357",
)
def end_of_text_without_label():
    """Padding is found by its token, which is also the end of a text. This token has no loss."""

    def make(targets):
        def masked(self, given, labels, shape, own_loss):
            if labels is not None:
                labels = labels.masked_fill(labels == END_OF_TEXT, IGNORE_INDEX)
            return targets(self, given, labels, shape, own_loss)

        return masked

    return replaced(LanguageModeling, "targets", make)


@bug(
    "N42",
    "Rotary positions by the length instead of the given positions",
    r"module layers\.0\.attention\.output: its input differs on ranks 0",
    layout="cp2",
    model="llama",
    source="NeMo Automodel #2377",
    link="https://github.com/NVIDIA-NeMo/Automodel/issues/2377",
)
def positions_by_length():
    """Rotary embeddings ignore the given positions, and count the tokens of their input."""

    def make(call):
        def counted(self, positions, *arguments):
            counts = torch.arange(positions.shape[-1], device=positions.device)
            return call(self, counts, *arguments)

        return counted

    return replaced(Rotary, "__call__", make)


@bug(
    "N43",
    "YaRN off for sequences of the original length",
    r"layer 0, attention\.output \(model\.layers\.0\.self_attn\.o_proj\): its input differs",
    layout="transformers",
    model="llama",
    settings={
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    source="torchtitan #4117",
    link="https://github.com/pytorch/torchtitan/issues/4117",
)
def yarn_for_longer_sequences_only():
    """The frequencies are scaled only if the model's context is longer than the original one."""

    def make(yarn):
        def scaled(self, base):
            longer = self.max_positions > self._original_context()
            return yarn(self, base) if longer else (base, 1.0)

        return scaled

    return replaced(Rotary, "_yarn", make)


def _read_without(name: str, default):
    """Return a context manager in which a field of config.json is ignored."""
    return replaced(
        files, "read_config", lambda read: lambda *given: {**read(*given), name: default}
    )


@bug(
    "N44a",
    "Linear scaling of positions ignored in a config",
    r"layer 0, attention\.output \(model\.layers\.0\.self_attn\.o_proj\): its input differs",
    layout="transformers",
    model="llama",
    settings={"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    source="Megatron-Bridge #5097",
    link="https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/5097",
)
def scaling_not_read():
    """The scaling of rotary positions is not read from config.json."""
    return _read_without("rope_scaling", None)


@bug(
    "N44b",
    "The base of rotary positions ignored in a config",
    r"layer 0, attention\.output \(model\.layers\.0\.self_attn\.o_proj\): its input differs",
    layout="transformers",
    model="llama",
    settings={"rope_theta": 5e5},
    source="litgpt #2218",
    link="https://github.com/Lightning-AI/litgpt/issues/2218",
)
def base_not_read():
    """The base of rotary positions is not read from config.json."""
    return _read_without("rope_theta", 10000.0)


@bug(
    "N44c",
    "The norms' epsilon ignored in a config",
    r"layer 0, attention_norm \(model\.layers\.0\.input_layernorm\): its output differs",
    layout="transformers",
    model="llama",
    settings={"norm_epsilon": 1e-3},
    source="Megatron-LM #5750",
    link="https://github.com/NVIDIA/Megatron-LM/issues/5750",
)
def epsilon_not_read():
    """The epsilon of norms is not read from config.json."""
    return _read_without("norm_epsilon", 1e-6)


@bug(
    "N46",
    "A stage in bfloat16 though fp32 is asked for",
    r"module layers\.2\.attention\.output: its input differs on rank 1 ",
    layout="pp2",
    model="llama",
    source="verl #6150",
    link="https://github.com/verl-project/verl/issues/6150",
)
def stage_in_bfloat16():
    """Autocast to bfloat16 is on in the second pipeline stage."""

    def make(forward_stage):
        def cast(self, x, batch, stage):
            with torch.autocast("cpu", torch.bfloat16, enabled=stage.index == 1):
                return forward_stage(self, x, batch, stage)

        return cast

    return replaced(Llama, "forward_stage", make)


@bug(
    "N47a",
    "Muon's step of the embedding",
    r"optimizer: the weights of embedding\.weight are not those of AdamW, in one process",
    layout="dp2",
    model="llama",
    optimizer="muon",
    source="Megatron-LM #5034",
    link="https://github.com/NVIDIA/Megatron-LM/issues/5034",
)
def embedding_orthogonalised():
    """Muon trains the embedding, too."""
    return replaced(muon, "linear_names", lambda names: lambda m: names(m) | {"embedding.weight"})


@bug(
    "N47b",
    "Rows of padding in Muon's step",
    r"optimizer: the weights of .* are not those of Muon, in one process",
    layout="dp2",
    model="llama",
    optimizer="muon",
    source="Megatron-LM #6740",
    link="https://github.com/NVIDIA/Megatron-LM/pull/6740",
)
def padding_orthogonalised():
    """Matrices are padded to 128 rows before they are orthogonalised. The factor of the step counts
    the padding."""

    def make(apply):
        def padded(self, function, give, take):
            def step_of(matrix, which):
                rows = -(-which.rows // 128) * 128
                wide = F.pad(matrix, (0, 0, 0, rows - which.rows))
                return function(wide, replace(which, rows=rows))[: which.rows]

            apply(self, step_of, give, take)

        return padded

    return replaced(WholeMatrices, "apply", make)

"""Sources of the presets: their names on the Hugging Face hub, and the published learning rates and
batch sizes of their pretraining."""

import math
from dataclasses import dataclass
from typing import NamedTuple

MILLION = 1_000_000


@dataclass(frozen=True)
class Published:
    """The source of a preset.

    hub: its name on the Hugging Face hub, or None. lr: peak learning rate of AdamW in pretraining.
    batch_tokens: tokens per optimizer step in pretraining. Both are None if not published.
    """

    hub: str | None
    lr: float | None = None
    batch_tokens: int | None = None


# GPT-2: Radford et al. 2019, section 2.3 (512 sequences of 1024 tokens; no rate).
_GPT2_TOKENS = 512 * 1024
# LLaMA: Touvron et al. 2023, table 2. Llama 2: Touvron et al. 2023, table 1. Llama 3:
# Grattafiori et al. 2024, table 3 (no batch for 8B and 70B). Pythia: Biderman et al. 2023.
# GPT-NeoX: Black et al. 2022, table 2. OLMo 2: OLMo Team 2025, table 3. BLOOM: BigScience 2022,
# table 3. Falcon: the model cards. OLMoE: Muennighoff et al. 2024.
_PYTHIA_TOKENS = 1024 * 2048
PUBLISHED = {
    "gpt2": Published("openai-community/gpt2", None, _GPT2_TOKENS),
    "gpt2-124m": Published("openai-community/gpt2", None, _GPT2_TOKENS),
    "gpt2-355m": Published("openai-community/gpt2-medium", None, _GPT2_TOKENS),
    "gpt2-774m": Published("openai-community/gpt2-large", None, _GPT2_TOKENS),
    "gpt2-1.5b": Published("openai-community/gpt2-xl", None, _GPT2_TOKENS),
    "gpt2-xl": Published("openai-community/gpt2-xl", None, _GPT2_TOKENS),
    "gpt3-175b": Published(None, 0.6e-4, int(3.2 * MILLION)),
    "llama-7b": Published("huggyllama/llama-7b", 3e-4, 4 * MILLION),
    "llama-13b": Published("huggyllama/llama-13b", 3e-4, 4 * MILLION),
    "llama-30b": Published("huggyllama/llama-30b", 1.5e-4, 4 * MILLION),
    "llama-65b": Published("huggyllama/llama-65b", 1.5e-4, 4 * MILLION),
    "llama2-70b": Published("meta-llama/Llama-2-70b-hf", 1.5e-4, 4 * MILLION),
    "llama3-8b": Published("meta-llama/Meta-Llama-3-8B", 3e-4),
    "llama3-70b": Published("meta-llama/Meta-Llama-3-70B", 1.5e-4),
    "llama3.2-1b": Published("meta-llama/Llama-3.2-1B"),
    "mpt-1b": Published("mosaicml/mpt-1b-redpajama-200b"),
    "mpt-7b": Published("mosaicml/mpt-7b"),  # MPT was trained with Lion, whose rates differ
    "mpt-30b": Published("mosaicml/mpt-30b"),
    "mistral-7b-v0.1": Published("mistralai/Mistral-7B-v0.1"),
    "mistral-7b-v0.3": Published("mistralai/Mistral-7B-v0.3"),
    "mistral-nemo-12b": Published("mistralai/Mistral-Nemo-Base-2407"),
    "mistral-small-24b": Published("mistralai/Mistral-Small-24B-Base-2501"),
    "qwen2-0.5b": Published("Qwen/Qwen2-0.5B"),
    "qwen2-1.5b": Published("Qwen/Qwen2-1.5B"),
    "qwen2-7b": Published("Qwen/Qwen2-7B"),
    "qwen2-72b": Published("Qwen/Qwen2-72B"),
    "qwen2.5-3b": Published("Qwen/Qwen2.5-3B"),
    "qwen2.5-32b": Published("Qwen/Qwen2.5-32B"),
    "qwen3-0.6b": Published("Qwen/Qwen3-0.6B"),
    "qwen3-1.7b": Published("Qwen/Qwen3-1.7B"),
    "qwen3-4b": Published("Qwen/Qwen3-4B"),
    "qwen3-8b": Published("Qwen/Qwen3-8B"),
    "qwen3-14b": Published("Qwen/Qwen3-14B"),
    "qwen3-32b": Published("Qwen/Qwen3-32B"),
    "pythia-70m": Published("EleutherAI/pythia-70m", 1e-3, _PYTHIA_TOKENS),
    "pythia-160m": Published("EleutherAI/pythia-160m", 6e-4, _PYTHIA_TOKENS),
    "pythia-410m": Published("EleutherAI/pythia-410m", 3e-4, _PYTHIA_TOKENS),
    "pythia-1b": Published("EleutherAI/pythia-1b", 3e-4, _PYTHIA_TOKENS),
    "pythia-1.4b": Published("EleutherAI/pythia-1.4b", 2e-4, _PYTHIA_TOKENS),
    "pythia-2.8b": Published("EleutherAI/pythia-2.8b", 1.6e-4, _PYTHIA_TOKENS),
    "pythia-6.9b": Published("EleutherAI/pythia-6.9b", 1.2e-4, _PYTHIA_TOKENS),
    "pythia-12b": Published("EleutherAI/pythia-12b", 1.2e-4, _PYTHIA_TOKENS),
    "neox-20b": Published("EleutherAI/gpt-neox-20b", 0.97e-4, int(3.15 * MILLION)),
    "gemma2-2b": Published("google/gemma-2-2b"),
    "gemma2-9b": Published("google/gemma-2-9b"),
    "gemma2-27b": Published("google/gemma-2-27b"),
    "gemma3-270m": Published("google/gemma-3-270m"),
    "gemma3-1b": Published("google/gemma-3-1b-pt"),
    "olmo2-1b": Published("allenai/OLMo-2-0425-1B"),
    "olmo2-7b": Published("allenai/OLMo-2-1124-7B", 3e-4, 1024 * 4096),
    "olmo2-13b": Published("allenai/OLMo-2-1124-13B", 9e-4, 2048 * 4096),
    "olmo2-32b": Published("allenai/OLMo-2-0325-32B", 6e-4, 2048 * 4096),
    "olmo3-7b": Published("allenai/Olmo-3-1025-7B"),
    "olmo3-32b": Published("allenai/Olmo-3-1125-32B"),
    "phi3-mini": Published("microsoft/Phi-3-mini-4k-instruct"),
    "phi3-medium": Published("microsoft/Phi-3-medium-4k-instruct"),
    "phi4": Published("microsoft/phi-4"),
    "bloom-560m": Published("bigscience/bloom-560m", 3e-4, 256 * 2048),
    "bloom-1b1": Published("bigscience/bloom-1b1", 2.5e-4, 256 * 2048),
    "bloom-1b7": Published("bigscience/bloom-1b7", 2e-4, 512 * 2048),
    "bloom-3b": Published("bigscience/bloom-3b", 1.6e-4, 512 * 2048),
    "bloom-7b1": Published("bigscience/bloom-7b1", 1.2e-4, 512 * 2048),
    "bloom-176b": Published("bigscience/bloom", 6e-5, 2048 * 2048),
    "falcon-7b": Published("tiiuae/falcon-7b", 6e-4, 2304 * 2048),
    "falcon-40b": Published("tiiuae/falcon-40b", 1.85e-4, 1152 * 2048),
    "mixtral-8x7b": Published("mistralai/Mixtral-8x7B-v0.1"),
    "mixtral-8x22b": Published("mistralai/Mixtral-8x22B-v0.1"),
    "qwen1.5-moe-a2.7b": Published("Qwen/Qwen1.5-MoE-A2.7B"),
    "qwen2-57b-a14b": Published("Qwen/Qwen2-57B-A14B"),
    "qwen3-30b-a3b": Published("Qwen/Qwen3-30B-A3B"),
    "qwen3-235b-a22b": Published("Qwen/Qwen3-235B-A22B"),
    "olmoe-1b-7b": Published("allenai/OLMoE-1B-7B-0924", 4e-4, 1024 * 4096),
}
# Parameters in millions, learning rate, tokens per step in millions: Brown et al. 2020, table 2.1.
GPT3 = (
    (125, 6e-4, 0.5),
    (350, 3e-4, 0.5),
    (760, 2.5e-4, 0.5),
    (1_300, 2e-4, 1),
    (2_700, 1.6e-4, 1),
    (6_700, 1.2e-4, 2),
    (13_000, 1e-4, 2),
    (175_000, 0.6e-4, 3.2),
)


class Pretraining(NamedTuple):
    """Settings to pretrain a model. source: a short description of the source of the learning
    rate."""

    lr: float
    global_batch_size: int
    source: str


def pretraining_defaults(parameters: int, preset: str | None, seq_length: int) -> Pretraining:
    """Return the learning rate and batch size for training from random weights: the published
    values of the preset, otherwise those of the GPT-3 model of the nearest size.

    parameters: number of parameters of the model. preset: its name, if the model has the preset's
    sizes, otherwise None. seq_length: tokens per sequence. The batch, in sequences, is the power of
    two that is nearest to the published number of tokens.
    """
    size, lr, tokens = min(GPT3, key=lambda row: abs(math.log(parameters / (row[0] * MILLION))))
    known = PUBLISHED.get(preset or "", Published(None))
    named = f"{size / 1000:g}B" if size >= 1000 else f"{size}M"
    source = f"published for {preset}" if known.lr else f"of GPT-3 {named}, the nearest in size"
    sequences = (known.batch_tokens or tokens * MILLION) / seq_length
    return Pretraining(known.lr or lr, 2 ** max(0, round(math.log2(sequences))), source)

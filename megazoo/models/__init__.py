"""The model families of megazoo, and the functions that build and load models."""

from megazoo.models.base import Model
from megazoo.models.bloom import Bloom
from megazoo.models.config import ModelConfig
from megazoo.models.counts import flops_per_token, parameter_count
from megazoo.models.decoder import Decoder
from megazoo.models.falcon import Falcon
from megazoo.models.gemma2 import Gemma2
from megazoo.models.gemma3 import Gemma3
from megazoo.models.gpt2 import GPT2
from megazoo.models.hugging_face.names import HFNames
from megazoo.models.llama import Llama
from megazoo.models.mistral import Mistral
from megazoo.models.mixtral import Mixtral
from megazoo.models.mpt import MPT
from megazoo.models.olmo2 import Olmo2
from megazoo.models.olmo3 import Olmo3
from megazoo.models.olmoe import Olmoe
from megazoo.models.phi3 import Phi3
from megazoo.models.pretrained import from_parallelized, from_pretrained
from megazoo.models.pythia import Pythia
from megazoo.models.qwen2 import Qwen2
from megazoo.models.qwen2_moe import Qwen2Moe
from megazoo.models.qwen3 import Qwen3
from megazoo.models.qwen3_moe import Qwen3Moe
from megazoo.models.registry import (
    FAMILIES,
    config_from_dict,
    config_from_file,
    config_from_hugging_face,
    family_of,
    find_config,
    from_config,
    register,
)

__all__ = [
    "FAMILIES",
    "GPT2",
    "MPT",
    "Bloom",
    "Decoder",
    "Falcon",
    "Gemma2",
    "Gemma3",
    "HFNames",
    "Llama",
    "Mistral",
    "Mixtral",
    "Model",
    "ModelConfig",
    "Olmo2",
    "Olmo3",
    "Olmoe",
    "Phi3",
    "Pythia",
    "Qwen2",
    "Qwen2Moe",
    "Qwen3",
    "Qwen3Moe",
    "config_from_dict",
    "config_from_file",
    "config_from_hugging_face",
    "family_of",
    "find_config",
    "flops_per_token",
    "from_config",
    "from_parallelized",
    "from_pretrained",
    "parameter_count",
    "register",
]

"""The model families of megazoo, and the functions that build and load models.

Each name is imported when it is first used, so a family loads only what it is built from.
"""

from typing import TYPE_CHECKING

from megazoo.families.table import CLASSES
from megazoo.lazy import lazy_attributes

if TYPE_CHECKING:
    from megazoo.families.config import ModelConfig
    from megazoo.families.names import HFNames
    from megazoo.families.registry import FAMILIES, config_from_dict, family_of, register
    from megazoo.formats.configs import config_from_file, config_from_hugging_face
    from megazoo.models.base import Model
    from megazoo.models.counts import flops_per_token, parameter_count
    from megazoo.models.decoder import Decoder
    from megazoo.models.pretrained import from_parallelized, from_pretrained
    from megazoo.models.registry import find_config, from_config

PLACES = {
    "Decoder": "megazoo.models.decoder",
    "FAMILIES": "megazoo.families.registry",
    "HFNames": "megazoo.families.names",
    "Model": "megazoo.models.base",
    "ModelConfig": "megazoo.families.config",
    "config_from_dict": "megazoo.families.registry",
    "config_from_file": "megazoo.formats.configs",
    "config_from_hugging_face": "megazoo.formats.configs",
    "family_of": "megazoo.families.registry",
    "find_config": "megazoo.models.registry",
    "flops_per_token": "megazoo.models.counts",
    "from_config": "megazoo.models.registry",
    "from_parallelized": "megazoo.models.pretrained",
    "from_pretrained": "megazoo.models.pretrained",
    "parameter_count": "megazoo.models.counts",
    "register": "megazoo.families.registry",
}
OF_FAMILIES = {name: f"megazoo.models.{family}" for family, name in CLASSES.items()}

__getattr__, __dir__ = lazy_attributes(__name__, {**PLACES, **OF_FAMILIES})

__all__ = [
    "FAMILIES",
    "Decoder",
    "HFNames",
    "Model",
    "ModelConfig",
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
__all__ += list(OF_FAMILIES)

"""LoRA (Hu et al. 2021): train low-rank adapters in every parallel layout, in the files of PEFT.

    megazoo.lora.add(model, rank=8, alpha=16, targets=("q", "v"))
    opt = megazoo.optim.AdamW(model, lr=3e-4)      # has only the adapters
    ...
    megazoo.lora.save(model, "adapter")            # PeftModel.from_pretrained loads it
    megazoo.lora.load(another, "adapter")          # loads it, and adapters that PEFT wrote
    megazoo.lora.merge(model)                      # or add the adapters to the weights

megazoo/lora/layers.py describes the mathematics.
"""

from megazoo.lora.calls import add, add_by, has_adapters, load, load_from, merge, off, save
from megazoo.lora.settings import LoRASettings

__all__ = [
    "LoRASettings",
    "add",
    "add_by",
    "has_adapters",
    "load",
    "load_from",
    "merge",
    "off",
    "save",
]

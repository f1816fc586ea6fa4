"""LoRA: train a small change of a model beside its weights, in every layout, in PEFT's files.

    megazoo.lora.add(model, rank=8, alpha=16, targets=("q", "v"))
    opt = megazoo.optim.AdamW(model, lr=3e-4)      # has the adapters alone
    ...
    megazoo.lora.save(model, "adapter")            # PeftModel.from_pretrained loads it
    megazoo.lora.load(another, "adapter")          # so does this, PEFT's own files, too
    megazoo.lora.merge(model)                      # or: a model as others are

The mathematics stand in megazoo/lora/layers.py (Hu et al. 2021).
"""

from megazoo.lora.calls import add, add_by, has_adapters, load, load_from, merge, save
from megazoo.lora.settings import LoRASettings

__all__ = ["LoRASettings", "add", "add_by", "has_adapters", "load", "load_from", "merge", "save"]

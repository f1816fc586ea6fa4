"""LoRA: train a small change of a model beside its weights, in every layout, in PEFT's files.

    megazoo.lora.add(model, rank=8, alpha=16, targets=("q", "v"))
    opt = megazoo.optim.AdamW(model, lr=3e-4)      # has the adapters alone
    ...
    megazoo.lora.save(model, "adapter")            # PeftModel.from_pretrained loads it
    megazoo.lora.load(another, "adapter")          # so does this, PEFT's own files, too
    megazoo.lora.merge(model)                      # or: a model as others are

The mathematics stand in megazoo/lora/layers.py (Hu et al. 2021).
"""

from megazoo.lazy import lazy_attributes

__getattr__ = lazy_attributes(
    __name__,
    {
        "LoRASettings": "megazoo.lora.settings",
        "add": "megazoo.lora.calls",
        "add_by": "megazoo.lora.calls",
        "has_adapters": "megazoo.lora.calls",
        "load": "megazoo.lora.calls",
        "load_from": "megazoo.lora.calls",
        "merge": "megazoo.lora.calls",
        "save": "megazoo.lora.calls",
    },
)

__all__ = ["LoRASettings", "add", "load", "merge", "save"]

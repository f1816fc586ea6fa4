"""Generation for tests: tiny models, prompts, and what transformers generates."""

import torch
from transformers import LogitsProcessorList
from transformers.generation.utils import GenerationMixin

import megazoo
from megazoo.models.llama import LlamaConfig
from tests.support.training import context
from tests.support.transformers_models import gpt2, llama_of, mpt

NEW, END, PAD = 32, [2, 5, 8, 11, 20, 30], 3
SIZES = {"vocab_size": 61, "max_positions": 64, "hidden_size": 32, "layers": 5, "heads": 4}
FAMILIES = {
    "gpt2": lambda: gpt2(n_layer=5, n_positions=64),
    "llama": lambda: llama_of(LlamaConfig(**SIZES, kv_heads=2, ffn_size=48)),
    "mpt": lambda: mpt(n_layers=5, max_seq_len=64),
}


def prompts(seed: int = 1, batch: int = 4, length: int = 9):
    """Token ids, padded on the left to uneven lengths, and their mask."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(12, 61, (batch, length), generator=generator)
    padding = torch.arange(batch)[:, None] * 2 % (length - 1)
    mask = (torch.arange(length) >= padding).long()
    return ids.masked_fill(mask == 0, PAD), mask


class Margins:
    """Within this block: `least`, how far apart transformers' candidates were at the closest
    decision."""

    def __enter__(self):
        self.least, self.choose = float("inf"), GenerationMixin._get_top_k_continuations

        def recorded(generation, accumulated_log_probs, beams_to_keep, **arguments):
            best = accumulated_log_probs.topk(beams_to_keep + 1).values
            gaps = (best[:, :-1] - best[:, 1:])[best[:, 1:] > -1e8]
            self.least = min([self.least, *gaps.tolist()])
            return self.choose(
                generation,
                accumulated_log_probs=accumulated_log_probs,
                beams_to_keep=beams_to_keep,
                **arguments,
            )

        GenerationMixin._get_top_k_continuations = recorded
        return self

    def __exit__(self, *_):
        GenerationMixin._get_top_k_continuations = self.choose

    def __call__(self, input_ids, scores):
        """As a logits processor, for greedy choice."""
        best = scores.topk(2).values
        self.least = min(self.least, (best[:, 0] - best[:, 1]).min().item())
        return scores


def of_transformers(model, ids, mask, **settings):
    """What transformers generates, and how close its closest decision was."""
    with Margins() as margins:
        processors = LogitsProcessorList([margins] if settings.get("num_beams", 1) == 1 else [])
        out = model.generate(
            ids, attention_mask=mask, do_sample=False, logits_processor=processors, **settings
        )
    return out, margins.least


def decided(model, prompts_of, margin: float, what: str = "", **settings):
    """The first ids and mask, which may be None, of prompts_of(seed) for which transformers makes
    no close decision, and what it generates."""
    for seed in range(100):
        ids, mask = prompts_of(seed)
        given = torch.ones_like(ids) if mask is None else mask
        out, least = of_transformers(model, ids, given, **settings)
        if least > margin:
            return ids, mask, out
    raise AssertionError(f"no prompts for {what}")


def generate(cases, layout, **more):
    """Every case's ids, in any layout."""
    ctx, models, outputs = context(**layout), {}, []
    for path, settings, ids, mask, _ in cases:
        if path not in models:
            models[path] = megazoo.from_pretrained(path, ctx)
        outputs.append(models[path].generate(ids, mask, **settings, **more))
    return outputs

"""Presets have the sizes that are published, in transformers too, and however they are cut."""

import pytest
import torch
import transformers

from megazoo.families.registry import FAMILIES, family_of
from megazoo.formats.configs import config_from_hugging_face
from megazoo.models.counts import flops_per_token, parameter_count
from megazoo.models.registry import find_config
from megazoo.parallel import ParallelContext
from tests.support.families import TWINS
from tests.support.sampling import marked_slow

# From the papers' and model cards' shapes; of GPT-2: 12 L D^2 + 13 L D + (V + P + 2) D. MPT-7B as
# its checkpoint counts; MPT-30B by hand: 12 L D^2 for the layers, 2 L + 1 norms, the vocabulary.
PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-30b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mpt-7b": 6_649_286_656,
    "mpt-30b": 12 * 48 * 7168**2 + (2 * 48 + 1) * 7168 + 50432 * 7168,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-6.9b": 6_857_302_016,
    "qwen2-0.5b": 494_032_768,
    "qwen2-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "neox-20b": 20_554_567_680,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-270m": 268_098_176,
    "gemma3-1b": 999_885_952,
    "olmo2-7b": 7_298_617_344,
    "phi3-mini": 3_821_079_552,
    "phi4": 14_659_507_200,
    "bloom-560m": 559_214_592,
    "bloom-7b1": 7_069_016_064,
    "bloom-176b": 176_247_271_424,
    "falcon-7b": 6_921_720_704,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "olmoe-1b-7b": 6_919_161_856,
}
# Parameters that a token uses, in billions, as the model cards round them.
ACTIVE = {"mixtral-8x7b": 12.9, "qwen1.5-moe-a2.7b": 2.7, "qwen3-30b-a3b": 3.3, "olmoe-1b-7b": 1.3}
KINDS = {name.partition(",")[0]: twin.kind.removesuffix("Text") for name, twin in TWINS.items()}


def test_presets_have_the_published_parameters():
    assert {preset: parameter_count(find_config(preset)) for preset in PUBLISHED} == PUBLISHED
    assert 174e9 < parameter_count(find_config("gpt3-175b")) < 176e9


def test_flops_count_the_parameters_that_a_token_uses():
    for preset, billions in ACTIVE.items():
        config = find_config(preset)
        matrices = flops_per_token(config, 0) / 6  # without the embedding
        active = matrices + config.vocab_size * config.hidden_size
        assert active == pytest.approx(billions * 1e9, rel=0.03), preset


@pytest.mark.parametrize(
    ("preset", "tp", "pp"),
    marked_slow(
        [
            ("llama3-8b", 16, 2),
            ("mpt-30b", 4, 4),
            ("gpt3-175b", 8, 16),
            ("llama-65b", 8, 8),
            ("llama3-70b", 8, 4),
        ],
        lambda number, _: number > 1,
    ),
)
def test_every_rank_adds_up_to_the_whole_model(preset, tp, pp):
    config, total = find_config(preset), 0
    for rank in range(tp * pp):
        ctx = ParallelContext.virtual(tp, pp, rank=rank)
        for entry in FAMILIES[family_of(config)].on_meta(config, ctx).entries():
            assert entry.parameter.is_meta
            for piece in entry.counted_pieces(ctx):
                total += torch.Size(stop - start for start, stop in piece.box).numel()
    assert total == parameter_count(config)


@pytest.mark.parametrize(
    "preset",
    # fast: the first of each family, which has the fewest layers
    marked_slow(
        [preset for family in KINDS for preset in FAMILIES[family].presets],
        lambda _, preset: not any(preset == next(iter(FAMILIES[name].presets)) for name in KINDS),
    ),
)
def test_presets_are_transformers_models(preset):
    config = find_config(preset)
    values = config.to_hugging_face()
    kind = KINDS[family_of(config)]
    read = getattr(transformers, f"{'Gemma3Text' if kind == 'Gemma3' else kind}Config")
    with torch.device("meta"):
        hf = getattr(transformers, f"{kind}ForCausalLM")(read(**{"pad_token_id": None, **values}))
    assert sum(p.numel() for p in hf.parameters()) == parameter_count(config)
    assert config_from_hugging_face({**values}) == config

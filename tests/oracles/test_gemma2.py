"""Gemma 2, whose scores and logits have caps, equals transformers in every layout, also
with context parallelism and with its loss in pieces."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers import Gemma2ForCausalLM

import megazoo
from megazoo.models.gemma2 import Gemma2Config
from tests.support.layouts import short_pieces
from tests.support.sampling import marked_slow
from tests.support.training import (
    context,
    layout_name,
    randomized_,
    run_in_layout,
    train,
    world,
    worst_relative,
)

LAYOUTS = [dict(tp=2), dict(pp=2), dict(cp=2), dict(tp=2, pp=2), dict(tp=2, sp=True)]


CONFIG = Gemma2Config(
    vocab_size=61, max_positions=32, hidden_size=32, layers=4, heads=4, kv_heads=2, ffn_size=48,
    head_size=12, window=6, query_scalar=10, score_cap=2.0, logit_cap=1.5,
)  # fmt: skip


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> tuple[Path, Gemma2ForCausalLM]:
    """A directory of transformers' Gemma 2 with random weights, and the model."""
    ours = CONFIG
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=ours.vocab_size,
        hidden_size=ours.hidden_size,
        intermediate_size=ours.ffn_size,
        num_hidden_layers=ours.layers,
        num_attention_heads=ours.heads,
        num_key_value_heads=ours.kv_heads,
        head_dim=ours.head_size,
        max_position_embeddings=ours.max_positions,
        rms_norm_eps=ours.norm_epsilon,
        sliding_window=ours.window,
        query_pre_attn_scalar=ours.query_scalar,
        attn_logit_softcapping=ours.score_cap,
        final_logit_softcapping=ours.logit_cap,
        attn_implementation="eager",
    )
    model = randomized_(Gemma2ForCausalLM(config))
    directory = tmp_path_factory.mktemp("gemma2")
    model.save_pretrained(directory)
    return directory, model


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids, and a mask of one row with padding."""
    ids = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    return ids, mask


def asked(directory: Path, layout: dict):
    """Loss, logits, and what the model generates."""
    model, (ids, mask) = megazoo.from_pretrained(directory, context(**layout)), inputs()
    labels = ids.masked_fill(mask == 0, -100)
    found = model(ids, attention_mask=mask, labels=labels, return_logits=True)
    continued = model.generate(ids[:1], max_new_tokens=10, do_sample=False)
    return found.loss.detach(), found.logits, continued


@pytest.mark.parametrize("layout", [dict(), *LAYOUTS], ids=layout_name)
def test_loss_logits_and_what_it_generates_equal_transformers(ranks, theirs, layout):
    directory, hf = theirs
    ids, mask = inputs()
    expected = hf(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
    continued = hf.generate(ids[:1], max_new_tokens=10, do_sample=False, eos_token_id=None)
    for loss, logits, ours in run_in_layout(ranks, asked, layout, directory):
        assert abs(loss - expected.loss) < 1e-5
        if logits is not None:
            assert (logits - expected.logits)[mask.bool()].abs().max() < 5e-5
        assert torch.equal(ours, continued)


def trained(layout: dict, pieces: bool):
    with short_pieces() if pieces else nullcontext() as count:
        return train(CONFIG, layout, 3), count.call_count if pieces else None


@pytest.mark.parametrize(
    "layout", marked_slow(LAYOUTS, lambda number, _: number not in (2, 4), name=layout_name)
)
def test_it_trains_as_in_one_process_also_with_its_loss_in_pieces(ranks, layout):
    expected = train(CONFIG, {}, 3)
    for pieces in (False, True):
        results = ranks(trained, world(layout), layout, pieces)
        for history, _ in results:
            assert worst_relative(history, expected) < 1e-5
        if pieces:
            assert results[-1][1] > 0, "the capped loss is made in pieces"


def test_its_files_are_those_of_transformers(theirs, tmp_path):
    directory, hf = theirs
    model = megazoo.from_pretrained(directory)
    assert model.config == CONFIG
    model.save_parallelized(tmp_path, merge_checkpoints=True)
    back = Gemma2ForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert back.config.layer_types == hf.config.layer_types
    theirs, ours = hf.state_dict(), back.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    ids, _ = inputs()
    assert (back(ids).logits - hf(ids).logits).abs().max() < 5e-5


def test_without_a_cap_of_the_scores_it_has_fused_attention():
    (ids, _), config = inputs(), CONFIG
    kernel = F.scaled_dot_product_attention
    for cap, calls in ((None, config.layers), (config.score_cap, 0)):
        model = megazoo.from_config(replace(config, score_cap=cap))
        with mock.patch.object(F, "scaled_dot_product_attention", side_effect=kernel) as fused:
            model.train_batch(ids, labels=ids)
        assert fused.call_count == calls

"""Padding, positions and packed documents: they reach every stage, and hide what they should."""

import pytest
import torch
import torch.nn.functional as F

import megazoo
from megazoo.data import documents_of
from megazoo.errors import UserError
from megazoo.models.llama import LlamaConfig
from tests.support.attention import attentive
from tests.support.training import (
    MODELS,
    context,
    layout_name,
    make_batch,
    run_in_layout,
    tiny_config,
)

EOD = 60


def batch_with_everything():
    """Eight sequences with a masked end or start, positions that begin anew, and two documents."""
    ids, targets = make_batch(0)
    mask = torch.ones_like(ids)
    mask[::2, :3], mask[1::4, -5:] = 0, 0
    documents = (torch.arange(16) >= 9).long().expand(8, -1)
    positions = torch.cat([torch.arange(9), torch.arange(7)]).expand(8, -1)
    return {"input_ids": ids, "targets": targets.masked_fill(mask == 0, -100)}, {
        "attention_mask": mask,
        "document_ids": documents,
        "position_ids": positions,
    }


def loss_and_gradients(config, layout, only_first):
    """With only_first, other stages are given no more than they need: the last one its targets."""
    ctx = context(**layout)
    model = attentive(config, ctx)
    data, masks = batch_with_everything()
    if ctx.pp_rank and only_first:
        data, masks = {"targets": data["targets"]} if ctx.pp_rank == ctx.pp_size - 1 else {}, {}
    loss = model.train_batch(**data, **masks, num_microbatches=4)
    return (
        loss.item(),
        model.eval_batch(**data, **masks).item(),
        {e.name: e.parameter.grad for e in model.entries()},
    )


FAMILIES = ["gpt2", "llama", "mpt"]


@pytest.mark.parametrize("layout", [dict(pp=4), dict(tp=2, pp=2, sp=True)], ids=layout_name)
def test_masks_and_positions_travel_from_the_first_stage(ranks, layout):
    found = zip(*run_in_layout(ranks, in_layout, layout), strict=True)
    for model, results in zip(FAMILIES, found, strict=True):
        config = MODELS[model]
        loss, _, gradients = loss_and_gradients(config, {}, False)
        plain = attentive(config, context()).train_batch(**batch_with_everything()[0])
        assert abs(loss - plain.item()) > 1e-3, f"the masks change nothing of {model}"
        for ours, evaluated, theirs in results:
            assert abs(ours / loss - 1) < 1e-5, model
            assert abs(evaluated / loss - 1) < 1e-5, model
            if layout == dict(pp=4):
                for name, gradient in theirs.items():
                    torch.testing.assert_close(gradient, gradients[name], atol=1e-7, rtol=1e-4)


def in_layout(layout):
    return [loss_and_gradients(MODELS[model], layout, True) for model in FAMILIES]


@pytest.mark.parametrize("model", FAMILIES)
def test_packed_documents_give_the_losses_of_each_alone(model):
    model = attentive(MODELS[model], context()).eval()
    tokens = torch.randint(0, EOD, (1, 16), generator=torch.Generator().manual_seed(0))
    tokens[0, 4] = tokens[0, 10] = EOD
    documents, positions = documents_of(tokens, EOD)
    assert documents.tolist() == [[0] * 5 + [1] * 6 + [2] * 5]
    assert positions.tolist() == [[*range(5), *range(6), *range(5)]]
    packed = model(tokens, document_ids=documents, position_ids=positions).logits
    alone = torch.cat([model(part).logits for part in tokens.split([5, 6, 5], dim=1)], dim=1)
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=0)
    assert not torch.allclose(model(tokens).logits, alone, atol=1e-2)


def test_a_mask_of_ones_changes_nothing_to_the_bit():
    model, ids = megazoo.from_config(tiny_config(), seed=3), make_batch(0)[0]
    assert torch.equal(model(ids, attention_mask=torch.ones_like(ids)).logits, model(ids).logits)


def test_padding_carries_no_gradient():
    """Whatever stands in the padding, the gradients are the same."""
    gradients = []
    for filler in (0, 7):
        model = megazoo.from_config(LlamaConfig(**MODELS["llama"].__dict__), seed=3)
        data, masks = batch_with_everything()
        ids = data["input_ids"].masked_fill(masks["attention_mask"] == 0, filler)
        logits = model(ids, **masks).logits
        F.cross_entropy(logits.flatten(0, 1), data["targets"].flatten()).backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-8, rtol=1e-5)


def test_bad_masks_and_positions_are_refused():
    model, ids = megazoo.from_config(tiny_config()), make_batch(0)[0]
    with pytest.raises(
        UserError, match=r"attention_mask has the shape \[8, 15\], not the batch's \[8, 16\]"
    ):
        model(ids, attention_mask=torch.ones(8, 15))
    with pytest.raises(UserError, match="position 16 is outside the model's 16 positions"):
        model(ids, position_ids=torch.full_like(ids, 16))

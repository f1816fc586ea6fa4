"""What model(...) returns: indexed as transformers' outputs are, and what it refuses."""

import pytest
import torch
import torch.nn.functional as F
from transformers.modeling_outputs import CausalLMOutput

import megazoo
from megazoo.engine.microbatch import Output
from megazoo.errors import UserError
from tests.support.sampling import marked_slow
from tests.support.training import (
    MODELS,
    context,
    layout_name,
    make_batch,
    randomize,
    run_in_layout,
    tiny_config,
)
from tests.support.transformers_models import gpt2

LOSS, LOGITS = torch.tensor(2.0), torch.ones(1, 1, 1)
FIELDS = [{}, {"loss": LOSS}, {"logits": LOGITS}, {"loss": LOSS, "logits": LOGITS}]
LAYOUTS = [dict(), dict(tp=2), dict(pp=2), dict(dp=2), dict(tp=2, pp=2)]


def test_it_is_indexed_as_an_output_of_transformers():
    for fields in FIELDS:
        ours, theirs = Output(**fields), CausalLMOutput(**fields)
        assert ours.to_tuple() == theirs.to_tuple()
        assert list(ours.keys()) == list(theirs.keys())
        assert dict(**ours) == dict(**theirs)
        for key in (0, 1, -1, 2, slice(2), slice(1, None), "loss", "logits", "past_key_values"):
            assert outcome(ours, key) == outcome(theirs, key), (fields, key)
            assert not isinstance(key, str) or (key in ours) == (key in theirs), (fields, key)


def outcome(output, key):
    try:
        return output[key]
    except (IndexError, KeyError) as error:
        return type(error)


def test_a_loop_over_it_is_told_of_microbatches():
    model = megazoo.from_config(tiny_config())
    ids, _ = make_batch(0)
    with pytest.raises(UserError, match=r"model.microbatches\(...\); to unpack .* to_tuple\(\)"):
        [out.loss for out in model(ids, labels=ids)]
    with pytest.raises(UserError, match="to_tuple"):
        _loss, _logits = model(ids, labels=ids)
    loss, logits = model(ids, labels=ids).to_tuple()
    assert (loss.shape, logits.shape) == ((), (8, 16, 61))


def forward(layout):
    """Of a language model and of a classifier of 3 labels: the loss, the logits beside it, and
    whether there are some where they are asked for."""
    ctx, found = context(**layout), []
    for num_labels in (0, 3):
        config = tiny_config(num_labels=num_labels, pad_token_id=0)
        model, ids = randomize(megazoo.from_config(config, ctx, seed=3)), make_batch(0)[0]
        labels = ids[:, 0] % num_labels if num_labels else ids
        out = model(ids, labels=labels)
        kept = None if out.logits is None else out.logits.detach()
        asked = model(ids, labels=labels, return_logits=True).logits is not None
        found.append((out.loss.item(), kept, asked))
    return found


@pytest.mark.parametrize(
    "layout", marked_slow(LAYOUTS, lambda _, layout: layout == dict(dp=2)), ids=layout_name
)
def test_logits_are_beside_the_loss_where_they_are_whole_anyway(ranks, layout):
    expected = forward({})
    for rank, found in enumerate(run_in_layout(ranks, forward, layout)):
        last = rank >= layout.get("tp", 1) * (layout.get("pp", 1) - 1)
        whole = layout.get("tp", 1) == layout.get("pp", 1) == 1
        for (loss, logits, _), (ours, beside, asked), free in zip(
            expected, found, (whole, last), strict=True
        ):
            assert ours == pytest.approx(loss, abs=1e-5)
            assert (beside is not None, asked) == (free, last)
            if free:
                torch.testing.assert_close(beside, logits, atol=1e-5, rtol=0)


def test_logits_beside_the_loss_are_those_that_the_loss_keeps():
    model = megazoo.from_config(tiny_config(), seed=3)
    ids = make_batch(0)[0]
    kept = []

    def pack(tensor):
        kept.append(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(ids, labels=ids)
    assert out.logits.untyped_storage().data_ptr() in kept
    out.logits.argmax(-1)
    out.loss.backward()
    before = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    F.cross_entropy(
        model(ids, labels=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    ).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, before[name], atol=1e-7, rtol=1e-5)


def backward_through_a_pipeline(layout):
    model = megazoo.from_config(MODELS["llama"], context(**layout), seed=3)
    ids = make_batch(0)[0]
    out = model(ids, labels=ids)
    told = None
    try:
        (out.loss * 2).backward()
    except UserError as error:
        told = str(error)
    numbers = [out.loss.item(), out.loss.detach().tolist()]
    with torch.no_grad():
        free = model(ids, labels=ids)
    numbers.append(float(free.loss))
    graphless = not free.loss.requires_grad and model(ids).loss is None
    return told, numbers, graphless, [p.grad is None for p in model.parameters()]


@pytest.mark.parametrize(
    "layout", [dict(pp=2), pytest.param(dict(tp=2, pp=2), marks=pytest.mark.slow)], ids=layout_name
)
def test_backward_through_a_pipeline_is_refused_on_every_rank(ranks, layout):
    expected = backward_through_a_pipeline({})[1][0]
    for told, numbers, graphless, untouched in run_in_layout(
        ranks, backward_through_a_pipeline, layout
    ):
        assert "call model.train_batch(...), or model.microbatches(...) in a custom loop" in told
        assert numbers == pytest.approx([expected] * 3, abs=1e-5)
        assert all([graphless, *untouched])


def test_a_label_on_padding_counts_as_in_transformers(tmp_path):
    hf = gpt2()
    hf.save_pretrained(tmp_path)
    ids = make_batch(0)[0]
    mask = (torch.arange(16) < torch.arange(4, 12)[:, None]).long()
    model = megazoo.from_pretrained(tmp_path).eval()
    losses = []
    for labels in (ids, ids.masked_fill(mask == 0, -100)):
        for either in (model, hf):  # their padding looks at other tokens, so that its logits differ
            with torch.no_grad():
                out = either(ids, attention_mask=mask, labels=labels)
            counted = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            torch.testing.assert_close(out.loss, counted, atol=1e-5, rtol=0)
            losses.append(out.loss)
    torch.testing.assert_close(losses[2], losses[3], atol=1e-5, rtol=0)
    assert abs(losses[0] - losses[2]) > 1e-3

"""Classifiers and adapters of Mistral, Qwen2, Qwen3 and Pythia, against transformers and PEFT."""

from itertools import product

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

import megazoo
from megazoo.formats.hugging_face.export import write_hugging_face
from megazoo.models.pretrained import open_source
from tests.support.classification import LABELS, PAD, batches, labels_for
from tests.support.families import (
    ONE_OF_EACH,
    TWINS,
    config_of,
    has_experts,
    model_class,
    saved,
    twin,
    with_small_biases,
)
from tests.support.peft_oracle import in_peft, with_adapters
from tests.support.sampling import marked_slow
from tests.support.training import context, layout_name, randomized_, run_in_layout

LAYOUTS = [dict(), dict(tp=2), dict(tp=2, pp=2)]
PROMPT = torch.randint(0, 61, (2, 21), generator=torch.Generator().manual_seed(3))
STEPS, RATE, EPSILON = 4, 1e-3, 1e-4
PROBLEM = "single_label_classification"
FUSED = ["query_key_value"]
Q_AND_V = {"Mistral": ["q_proj", "v_proj"], "GPTNeoX": FUSED, "Bloom": FUSED, "Falcon": FUSED}
Q_AND_V["Phi3"] = ["qkv_proj"]
OF_EXPERTS = ["q_proj", "k_proj", "v_proj", "o_proj"]  # adapters of experts are not supported
WITH_CLASSIFIER = [  # transformers has no classifier of the others
    name
    for name in ONE_OF_EACH
    if hasattr(transformers, f"{TWINS[name].kind}ForSequenceClassification")
]
WHAT = {"q and v": ("q", "v"), "all linear": "all-linear"}
# Fast: each family once, as a classifier or with one kind of adapters.
NUMBER = {name: number for number, name in enumerate(ONE_OF_EACH)}
CLASSIFIERS = marked_slow(
    list(product(WITH_CLASSIFIER, LAYOUTS)),
    lambda _, case: NUMBER[case[0]] % 2 or case[1] != LAYOUTS[NUMBER[case[0]] // 2 % 2],
    name=lambda case: f"{case[0]}-{layout_name(case[1])}",
)
ADAPTERS = marked_slow(
    list(product(ONE_OF_EACH, WHAT, LAYOUTS)),
    lambda _, case: (
        NUMBER[case[0]] % 2 == 0
        or (list(WHAT).index(case[1]), case[2])
        != (NUMBER[case[0]] // 2 % 2, LAYOUTS[NUMBER[case[0]] // 4 % 2])
    ),
    name=lambda case: f"{case[0]}-{case[1]}-{layout_name(case[2])}",
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("heads")


def classifier(name):
    """The classifier of transformers with random weights."""
    torch.manual_seed(1)
    kind = model_class(name, "ForSequenceClassification")
    fields = {"num_labels": LABELS, "pad_token_id": PAD, "problem_type": PROBLEM}
    if has_experts(name):
        fields["router_aux_loss_coef"] = 0.0  # classifiers of transformers have no such loss
    config = config_of(name, **fields)
    return with_small_biases(randomized_(kind(config)))


@pytest.mark.parametrize(("name", "layout"), CLASSIFIERS)
def test_classifiers_are_those_of_transformers(ranks, tmp_path, name, layout):
    """Logits and losses of rows padded in every way, steps of training, and the files that are
    written."""
    hf = classifier(name)
    hf.save_pretrained(tmp_path / "given")
    expected = []
    for ids, mask in batches().values():
        with torch.no_grad():
            expected.append(hf(ids, attention_mask=mask, labels=labels_for(PROBLEM)))
    back = AutoModelForSequenceClassification.from_pretrained
    losses = trained_by_torch(back(tmp_path / "given", attn_implementation="eager"))
    results = run_in_layout(ranks, classified, layout, tmp_path)
    for outputs, ours in results:
        for kind, (loss, logits), theirs in zip(batches(), outputs, expected, strict=True):
            if kind == "inside" and name.startswith("bloom"):
                continue  # ALiBi of transformers does not count this padding
            assert abs(loss - theirs.loss) < 1e-5 * max(1, theirs.loss)
            if logits is not None:
                most = theirs.logits.abs().max()
                assert (logits - theirs.logits).abs().max() < 1e-5 * max(1, most)
        assert max(abs(a - b) for a, b in zip(ours, losses, strict=True)) < 1e-5
    assert results[-1][0][0][1] is not None
    given, made = (load_file(tmp_path / path / "model.safetensors") for path in ("given", "made"))
    assert given.keys() == made.keys()
    assert all(torch.equal(made[key], tensor) for key, tensor in given.items())
    _, told = back(tmp_path / "made", output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]


def trained_by_torch(hf):
    """The losses of a few steps on the batch that is padded on the right."""
    ids, mask = batches()["right"]
    settings = dict(lr=RATE, betas=(0.9, 0.95), eps=EPSILON, weight_decay=0.0)
    optimizer, losses = torch.optim.AdamW(hf.train().parameters(), **settings), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = hf(ids, attention_mask=mask, labels=labels_for(PROBLEM)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    return losses


def classified(path, layout):
    """Losses and logits of all batches, then the losses of a few steps."""
    model, outputs = megazoo.from_pretrained(path / "given", context(**layout)).eval(), []
    for ids, mask in batches().values():
        with torch.no_grad():
            labels = labels_for(PROBLEM)
            out = model(ids, attention_mask=mask, labels=labels, return_logits=True)
        outputs.append((out.loss, out.logits))
    model.save_parallelized(path / "made", merge_checkpoints=True)
    settings = dict(lr=RATE, betas=(0.9, 0.95), eps=EPSILON, weight_decay=0.0, clip_grad=0.0)
    optimizer, losses = megazoo.optim.AdamW(model.train(), **settings), []
    ids, mask = batches()["right"]
    for _ in range(STEPS):
        optimizer.zero_grad()
        given = dict(attention_mask=mask, labels=labels_for(PROBLEM), num_microbatches=2)
        losses.append(model.train_batch(ids, **given).item())
        optimizer.step()
    return outputs, losses


def modules_of(name, what):
    """What PEFT calls the targets."""
    if what == "all linear":
        return OF_EXPERTS if has_experts(name) else WHAT[what]
    return Q_AND_V.get(TWINS[name].kind, Q_AND_V["Mistral"])


@pytest.mark.parametrize(("name", "what", "layout"), ADAPTERS)
def test_adapters_are_pefts_both_ways(ranks, directory, tmp_path, name, what, layout):
    """Pythia's projection of queries, keys and values goes head by head. The tensors that are saved
    again are PEFT's to the bit."""
    base, given, made = saved(name, directory), tmp_path / "given", tmp_path / "made"
    theirs = with_adapters(twin(name), r=3, lora_alpha=6, target_modules=modules_of(name, what))
    theirs.save_pretrained(given)
    with torch.no_grad():
        expected = theirs(PROMPT).logits
    for logits in run_in_layout(ranks, adapted, layout, base, given, made):
        if logits is not None:
            assert (logits - expected).abs().max() < 1e-5 * max(1, expected.abs().max())
    tensors, again = (load_file(path / "adapter_model.safetensors") for path in (given, made))
    assert tensors.keys() == again.keys()
    assert all(torch.equal(again[key], tensor) for key, tensor in tensors.items())
    with torch.no_grad():
        logits = in_peft(twin(name), made)(PROMPT).logits
    assert (logits - expected).abs().max() < 1e-5 * max(1, expected.abs().max())


def adapted(base, given, made, layout):
    """The logits with PEFT's adapters, which are saved anew."""
    model = megazoo.from_pretrained(base, context(**layout)).eval()
    megazoo.lora.load(model, given)
    megazoo.lora.save(model, made)
    with torch.no_grad():
        return model(PROMPT, return_logits=True).logits


@pytest.mark.parametrize(("name", "what", "layout"), ADAPTERS)
def test_peft_goes_on_with_adapters_that_were_trained_here(
    ranks, directory, tmp_path, name, what, layout
):
    """Added here, by our names, and trained for a few steps."""
    base, made = saved(name, directory), tmp_path / "made"
    results = run_in_layout(ranks, added, layout, base, made, WHAT[what])
    with torch.no_grad():
        expected = in_peft(twin(name), made)(PROMPT).logits
        plain = twin(name)(PROMPT).logits
    assert (expected - plain).abs().max() > 1e-2
    assert results[-1] is not None
    for logits in results:
        assert logits is None or (logits - expected).abs().max() < 1e-5 * max(
            1, expected.abs().max()
        )


def added(base, made, targets, layout):
    """The logits of a model whose adapters learnt something."""
    model = megazoo.from_pretrained(base, context(**layout))
    megazoo.lora.add(model, rank=3, alpha=6, targets=targets)
    optimizer = megazoo.optim.AdamW(model, lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model.train_batch(PROMPT, labels=PROMPT, num_microbatches=2)
        optimizer.step()
    megazoo.lora.save(model, made)
    with torch.no_grad():
        return model.eval()(PROMPT, return_logits=True).logits


def test_a_classifier_through_shards_is_bit_for_bit(tmp_path):
    for name in WITH_CLASSIFIER:
        paths = [tmp_path / name / part for part in ("given", "shards", "back")]
        classifier(name).save_pretrained(paths[0])
        megazoo.from_pretrained(paths[0]).save_parallelized(paths[1])
        write_hugging_face(open_source(paths[1]), paths[2])
        given, back = (load_file(path / "model.safetensors") for path in (paths[0], paths[2]))
        assert given.keys() == back.keys(), name
        assert all(torch.equal(back[key], tensor) for key, tensor in given.items()), name

"""The comparison with transformers: every family passes in any layout, and what is planted in
transformers' twin is found and named."""

import json
import re
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2ForSequenceClassification

import megazoo
from megazoo.errors import UserError
from megazoo.models.pretrained import open_source
from megazoo.programs import compare_hf
from megazoo.testing import Layout, compare
from megazoo.testing.causes import listed
from megazoo.testing.layouts import context_of
from megazoo.testing.reference import Reference, run_reference
from tests.support.inference import run_main
from tests.support.sampling import marked_slow
from tests.support.training import randomized_
from tests.support.transformers_models import CONFIGS, config_of

FIELDS = {"llama": {"attention_bias": True, "mlp_bias": True}}  # what a family has besides
IDS = torch.randint(0, 61, (2, 15), generator=torch.Generator().manual_seed(2))
MASK = torch.ones_like(IDS)
MASK[1, :4] = 0
LAYOUTS = ["tp2", "pp2", "tp2pp2+sp"]
MORE = ["tp4+sp", "pp2v2", "cp2", "tp2cp2+sp", "cp2pp2+ulysses", "dp2", "tp2pp2dp2"]


def saved(name: str, directory: Path, change=None, **fields) -> Path:
    """The directory of a transformers model with random weights. change: what to do to it before it
    is written."""
    torch.manual_seed(0)
    config = config_of(name, layers=4, **{**FIELDS.get(name, {}), **fields})
    model = AutoModelForCausalLM.from_config(config)
    randomized_(model)
    with torch.no_grad():
        if change:
            change(model)
    model.save_pretrained(directory)
    return directory


def reference_of(directory: Path, mask=None):
    """What transformers makes of IDS."""
    source = open_source(directory)
    hf = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return run_reference(hf, source.model, source.config, IDS, mask, gradients=True)


def compared(directory: Path, reference, layout: str):
    model = megazoo.from_pretrained(directory, context_of(Layout.named(layout)))
    return compare(model, reference, IDS)


def compared_in(ranks, directory: Path, reference, layout: str):
    """The agreement in a layout, which is the same on all ranks."""
    agreements = ranks(compared, Layout.named(layout).ranks, directory, reference, layout)
    assert all(each == agreements[0] for each in agreements)
    return agreements[0]


def assert_agrees(ranks, directory: Path, reference, layout: str):
    """The logits agree, and every module that has a twin was compared on the way: token ids are no
    activation."""
    agreement = compared_in(ranks, directory, reference, layout)
    assert agreement.passed, agreement
    assert agreement.compared == reference.activations.keys()


@pytest.mark.parametrize("name", marked_slow(list(CONFIGS), lambda number, _: number % 2))
def test_families_agree_with_transformers(ranks, name, tmp_path):
    """In one process, with padding; and in one of the layouts, in turns."""
    directory = saved(name, tmp_path)
    assert compare(megazoo.from_pretrained(directory), reference_of(directory, MASK), IDS).passed
    layout = LAYOUTS[list(CONFIGS).index(name) % len(LAYOUTS)]
    assert_agrees(ranks, directory, reference_of(directory), layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS + MORE)
@pytest.mark.parametrize("name", CONFIGS)
def test_families_agree_in_all_layouts(ranks, name, layout, tmp_path):
    directory = saved(name, tmp_path)
    for mask in (None, MASK):
        assert_agrees(ranks, directory, reference_of(directory, mask), layout)


@pytest.mark.parametrize(
    ("layout", "heads", "kv_heads"),
    marked_slow([("tp4+sp", 4, 2), ("tp2cp2+sp", 10, 5)], lambda number, _: number > 0),
    ids=str,
)
def test_norms_of_heads_are_compared_however_heads_are_cut(
    ranks, layout, heads, kv_heads, tmp_path
):
    """Where several ranks hold a head of keys, and where the first rank has more heads."""
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    ours = saved("qwen3", tmp_path / "ours", **sizes)
    assert_agrees(ranks, ours, reference_of(ours), layout)
    for kind, count in (("q_norm", heads), ("k_norm", kv_heads)):
        module = f"model.layers.2.self_attn.{kind}"
        theirs = saved(
            "qwen3", tmp_path / kind, lambda hf, at=module: plus_half(hf, at, 3), **sizes
        )
        cause = compared_in(ranks, ours, reference_of(theirs), layout).cause
        wrong = [3 + 12 * head for head in range(count)]
        where = f"{count} of {12 * count} features" if count > 6 else f"features {listed(wrong)}"
        expected = (
            rf"layer 2, attention\.{kind} \({re.escape(module)}\): its output differs by .* in "
            rf"{where}; other weights: row 3 of {re.escape(module)}\.weight$"
        )
        assert re.match(expected, cause), cause


def plus_half(model, module: str, row: int):
    model.get_submodule(module).weight[row] += 0.5


def swapped(module: str, rows: tuple[int, int], dim: int = 0):
    """Two rows of a weight change places."""

    def change(model):
        weight = model.get_submodule(module).weight
        one, other = (weight.select(dim, row).clone() for row in rows)
        weight.select(dim, rows[0]).copy_(other)
        weight.select(dim, rows[1]).copy_(one)

    return change


def shifted_bias(model):
    model.get_submodule("transformer.h.1.mlp.c_proj").bias[9] += 0.5


# The family, what differs in transformers' twin (a change, or fields of its config), and the cause
# that is told. Of qkv in one tensor theirs are: GPT-2's columns, of which k's begin at 32; and
# GPT-NeoX' rows, of which the second head's k begin at 32.
EQUAL = "all weights are equal: the computation differs"
PLANTED = {
    "rows of k": (
        "llama",
        swapped("model.layers.3.self_attn.k_proj", (2, 9)),
        r"layer 3, attention\.qkv, k \(model\.layers\.3\.self_attn\.k_proj\): its output "
        r"differs by \S+ \(their largest value is \S+\) in features 2 and 9; other weights: rows 2 "
        r"and 9 of model\.layers\.3\.self_attn\.k_proj\.weight$",
    ),
    "columns of k": (
        "gpt2",
        swapped("transformer.h.2.attn.c_attn", (33, 60), dim=1),
        r"layer 2, attention\.qkv, k \(transformer\.h\.2\.attn\.c_attn\): .* in features 33 and "
        r"60; other weights: columns 33 and 60 of transformer\.h\.2\.attn\.c_attn\.weight$",
    ),
    "rows of a head's k": (
        "gpt_neox",
        swapped("gpt_neox.layers.3.attention.query_key_value", (33, 38)),
        r"layer 3, attention\.qkv, k \(\S+\): .* in features 33 and 38; other weights: rows 33 and "
        r"38 of gpt_neox\.layers\.3\.attention\.query_key_value\.weight$",
    ),
    "rows of up": (
        "qwen2",
        swapped("model.layers.0.mlp.up_proj", (0, 47)),
        r"layer 0, mlp\.gate_up, up \(model\.layers\.0\.mlp\.up_proj\): .* rows 0 and 47 of",
    ),
    "a bias": (
        "gpt2",
        shifted_bias,
        r"layer 1, mlp\.down \(transformer\.h\.1\.mlp\.c_proj\): its output differs by 0\.5 .* in "
        r"feature 9; other weights: row 9 of transformer\.h\.1\.mlp\.c_proj\.bias$",
    ),
    "positions": (
        "gpt2",
        swapped("transformer.wpe", (3, 11)),
        r"position_embedding \(transformer\.wpe\): .*, from token 3 on; other weights: rows 3 and "
        r"11 of transformer\.wpe\.weight$",
    ),
    "rows of the head": (
        "llama",
        swapped("lm_head", (7, 50)),
        r"head \(lm_head\): its output differs by .* in features 7 and 50; other weights: rows 7 "
        r"and 50 of lm_head\.weight$",
    ),
    "the norms' epsilon": (
        "llama",
        {"rms_norm_eps": 1e-2},
        rf"layer 0, attention_norm \(model\.layers\.0\.input_layernorm\): its output .*; {EQUAL}$",
    ),
    "rotary positions": (
        "qwen3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
        rf"layer 0, attention\.output \(\S+\.o_proj\): its input .*, from token 1 on; {EQUAL}$",
    ),
    "the window": (
        "mistral",
        {"sliding_window": 7},
        rf"layer 0, attention\.output \(\S+\.o_proj\): its input .*, from token 5 on; {EQUAL}$",
    ),
    "the activation": (
        "gpt_neox",
        {"hidden_act": "relu"},
        rf"layer 0, mlp\.down \(\S+\.dense_4h_to_h\): its input differs .*; {EQUAL}$",
    ),
}  # fmt: skip


# Those of which a rank holds a part, or of whose tokens: they are looked for in ranks, too.
CUT = ["rows of k", "positions", "rows of the head"]


@pytest.mark.parametrize(
    ("planted", "in_ranks"),
    [(planted, planted in CUT) for planted in PLANTED]
    + [pytest.param(each, True, marks=pytest.mark.slow) for each in PLANTED if each not in CUT],
)
def test_what_is_planted_is_named(ranks, planted, in_ranks, tmp_path):
    """In one process and in four; not a weight that two layouts would both read wrongly."""
    name, other, told = PLANTED[planted]
    ours = saved(name, tmp_path / "ours")
    if callable(other):
        theirs = saved(name, tmp_path / "theirs", other)
    else:
        theirs = saved(name, tmp_path / "theirs", **other)
    reference = reference_of(theirs)
    layouts = ["tp1", "tp2pp2"] + (["tp2cp2+sp"] if planted in ("rows of k", "positions") else [])
    for layout in layouts if in_ranks else layouts[:1]:
        agreement = compared_in(ranks, ours, reference, layout)
        assert re.match(told, agreement.cause or "it passed"), (layout, agreement)
        assert max(agreement.logits, agreement.loss) > 1e-5


def test_a_function_and_a_module_with_names_of_its_own(tmp_path):
    hf = AutoModelForCausalLM.from_pretrained(saved("llama", tmp_path)).eval()
    model = megazoo.from_pretrained(tmp_path)
    assert compare(model, lambda ids: hf(ids).logits, IDS).passed
    assert compare(model, hf, IDS).passed
    with torch.no_grad():
        hf.model.layers[2].self_attn.v_proj.weight[6] += 1
    told = r"logits: the output differs by \S+ \(their largest value is \S+\) in \d+ of 61 features"
    assert re.fullmatch(rf"{told}", compare(model, lambda ids: hf(ids).logits, IDS).cause)
    other = nn.Sequential(hf).eval()  # in which every module has another name
    names = {
        "layers.{}": "0.model.layers.{}",
        "layers.{}.attention.qkv": [f"0.model.layers.{{}}.self_attn.{x}_proj" for x in "qkv"],
    }
    cause = compare(model, other, IDS, names=names).cause
    assert cause.startswith("layer 2, attention.qkv, v (0.model.layers.2.self_attn.v_proj): ")
    assert cause.endswith("other weights: row 6 of 0.model.layers.2.self_attn.v_proj.weight")
    del names["layers.{}.attention.qkv"]
    cause = compare(model, other, IDS, names=names).cause
    told = r"layer 2 \(0\.model\.layers\.2\): its output differs by .* in 32 of 32 features"
    assert re.fullmatch(told, cause), cause


def test_a_loss_that_differs_alone(tmp_path):
    saved("gpt2", tmp_path)
    reference = reference_of(tmp_path)
    with mock.patch.object(Reference, "loss", 1.0):
        agreement = compare(megazoo.from_pretrained(tmp_path), reference, IDS)
    assert re.fullmatch(r"loss: \d.* instead of 1, though no logit differs", agreement.cause)


NO_REFERENCE = [
    (lambda hf: hf.train(), "the reference is in training mode: call its eval() first"),
    (
        lambda hf: lambda ids: hf(ids).logits[..., :60],
        "the reference returned [2, 15, 60] instead of logits [2, 15, 61]",
    ),
    (lambda hf: lambda ids: None, "the reference returned NoneType instead of logits"),
    (
        lambda hf: lambda ids: hf(ids).logits / 0,
        "the reference returned logits that are not finite",
    ),
    (
        lambda hf: with_wide_layer(hf),
        "model.layers.0.self_attn.o_proj.weight of the reference is [33, 32], and "
        "layers.0.attention.output.weight of the model [32, 32]",
    ),
]


def test_what_is_no_reference_is_refused(tmp_path):
    path = saved("llama", tmp_path)
    model = megazoo.from_pretrained(path)
    for reference, message in NO_REFERENCE:
        hf = AutoModelForCausalLM.from_pretrained(path).eval()
        with pytest.raises(UserError, match=re.escape(message)):
            compare(model, reference(hf), IDS)


def with_wide_layer(hf):
    hf.model.layers[0].self_attn.o_proj = nn.Linear(32, 33).eval()
    return hf


def half_detached(model):
    """A norm whose values are right, and of whose gradient half is lost."""
    if norm := getattr(model.layers, "_modules", {}).get("1"):
        forward = norm.mlp_norm.forward
        norm.mlp_norm.forward = lambda x: forward((x + x.detach()) / 2)
    return model


def compared_when_half_detached(directory: Path, reference, layout: str):
    model = megazoo.from_pretrained(directory, context_of(Layout.named(layout)))
    return compare(half_detached(model), reference, IDS)


@pytest.mark.parametrize(
    "layout", ["tp1", *(pytest.param(each, marks=pytest.mark.slow) for each in ("tp2+sp", "pp2"))]
)
def test_a_gradient_that_differs_is_named(ranks, tmp_path, layout):
    """The forward shows nothing of it."""
    path = saved("llama", tmp_path)
    world = Layout.named(layout).ranks
    for found in ranks(compared_when_half_detached, world, path, reference_of(path), layout):
        assert found.logits < 1e-5
        assert found.gradient > 0.01
        assert re.match(
            r"gradient of layers\.1\.\S+ \(model\.layers\.1\.\S+\): differs by "
            r"\S+ of its norm, and of \d+ more, though no logit does",
            found.cause,
        )


def test_the_tool_prints_a_table_and_exits_with_1_if_a_layout_fails(tmp_path, monkeypatch, capsys):
    ours = saved("gpt2", tmp_path / "ours")
    theirs = saved("gpt2", tmp_path / "theirs", swapped("transformer.ln_f", (0, 1)))
    capsys.readouterr()  # transformers' own bars
    words = [ours, "--theirs", theirs, "--layouts", "tp1,pp2"]
    code, told, error = run_main(compare_hf, monkeypatch, capsys, *words)
    assert (code, error) == (1, "compare_hf.py: error: 2 of 2 layouts failed\n")
    assert len(re.findall(r"FAIL  norm \(transformer.ln_f\): its output differs", told)) == 2
    megazoo.from_pretrained(ours).save_parallelized(tmp_path / "shards")
    (tmp_path / "text").write_text("+,-./0123456789:;<" * 4)
    for arguments, rows in {
        ("--layouts", "tp1,tp2", "--padding", 3, "--seq-length", 9): "float32, 2 x 9",
        ("--text", tmp_path / "text", "--tokenizer", "byte", "--batch-size", 5): "float32, 2 x 32",
        ("--prompt", "+,-", "--tokenizer", "byte", "--dtype", "bfloat16"): "bfloat16, 1 x 3",
    }.items():
        if "--layouts" not in arguments:
            arguments = (*arguments, "--layouts", "tp1")
        compare_hf.main([str(each) for each in (tmp_path / "shards", "--theirs", ours, *arguments)])
        first, _, *lines = capsys.readouterr().out.splitlines()
        told = f" parameters, {rows} tokens, compared with GPT2LMHeadModel of transformers"
        assert first.endswith(told), first
        for line in lines:
            assert re.fullmatch(r"tp\d +\d\.\de-\d\d( +\d\.\de.\d\d){2}  pass", line), line
    compare_hf.main([str(ours), "--no-gradients"])
    assert re.search(r"tp1 +\d\.\de-\d\d  \d\.\de.\d\d +-  pass", capsys.readouterr().out)


MISTAKES = [
    ("", "the argument SOURCE is required (see --help)"),
    ("absent", "absent is not a directory"),
    ("ours --layouts tp2,x", "unknown layout 'x'"),
    ("ours --layouts tp3", "tp3: "),
    ("ours --theirs absent", "absent has no config.json: name a Hugging Face directory"),
    ("shards", "shards has no config.json: name a Hugging Face directory of the model with"),
    ("ours --theirs unknown", "transformers can't load unknown: "),
    (
        "ours --theirs fewer",
        "transformers does not find transformer.h.4.attn.c_attn.bias",
    ),
    ("classifier", "classifier is a classifier: only language models are supported"),
    ("ours --seq-length 33", "--seq-length 33 must be from 2 to 32"),
    ("ours --padding 31 --seq-length 31", "padding 31 must be below 30"),
    ("ours --batch-size 0", "batch-size 0 must be 1 or more"),
    ("ours --tolerance -1", "tolerance -1.0 must be 0 or more"),
    ("ours --prompt a --text b", "--prompt and --text exclude each other"),
    ("ours --prompt ++", "ours has no tokenizer: use --tokenizer byte"),
    ("ours --prompt ++ --tokenizer absent", "unknown tokenizer 'absent': use byte"),
    ("ours --prompt + --tokenizer byte", "the text has fewer than two tokens"),
    ("ours --prompt abc --tokenizer byte", "token 99 is outside the vocabulary of 61"),
    ("ours --text absent --tokenizer byte", "absent can't be read: No such file or directory"),
]


def test_mistakes_are_told_in_one_line(directories, monkeypatch):
    monkeypatch.chdir(directories)
    for arguments, message in MISTAKES:
        with pytest.raises(UserError) as raised:
            compare_hf.main(arguments.split())
        assert str(raised.value).startswith(message), arguments
        assert raised.value.exit_code == 2, arguments


def test_without_transformers(directories, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"^transformers can't be imported: .*\(pip install"):
        compare_hf.main([str(directories / "ours")])


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Directories that are no pair of a model and transformers' twin, and one that is: ours."""
    path = tmp_path_factory.mktemp("directories")
    saved("gpt2", path / "ours")
    megazoo.from_pretrained(path / "ours").save_parallelized(path / "shards")
    for name, fields in {
        "unknown": {"model_type": "none"},
        "fewer": {"n_layer": 5},
    }.items():
        shutil.copytree(path / "ours", path / name)
        config = json.loads((path / "ours" / "config.json").read_text())
        (path / name / "config.json").write_text(json.dumps({**config, **fields}))
    classifier = GPT2ForSequenceClassification(config_of("gpt2", num_labels=2))
    classifier.save_pretrained(path / "classifier")
    return path

"""A search's ranking against layouts and speeds that others have published.

Megatron-LM on A100 (80 GB, DGX): Narayanan et al. 2021 (arXiv 2104.04473), the scripts of whose
table 1 and figures 12 to 15 lie in Megatron-LM's examples/academic_paper_scripts/sc21; and
Korthikanti et al. 2022 (arXiv 2205.05198), table 5. Megatron-LM on H100: the table of its README.
torchtitan: its docs/performance.md and benchmarks/llama3_h100_202412_torchtitan.md, whose FSDP
stands here for replicas with ZeRO-1. LLaMA with a vocabulary of 128k on A100: Hagemann et al. 2023
(arXiv 2311.05610), from the sheets of runs in their repository.
"""

from dataclasses import replace

import pytest

from megazoo.models.gpt2 import GPT2Config
from megazoo.models.registry import find_config
from megazoo.parallel.layout import Layout
from megazoo.planning import GPUS, PlannedRun, Planner, fastest_layouts, find_layouts
from megazoo.planning.search import fitting_layout


def gpt(hidden, layers, heads, vocabulary=51_200, positions=2048):
    sizes = dict(hidden_size=hidden, layers=layers, heads=heads, vocab_size=vocabulary)
    dropout = dict(embedding_dropout=0.0, attention_dropout=0.0, residual_dropout=0.0)
    return GPT2Config(max_positions=positions, **sizes, **dropout)


def llama(preset):
    return replace(find_config(preset), vocab_size=131_072)  # Hagemann et al.


GPT_22B, GPT_76B, GPT_145B = gpt(6144, 48, 64), gpt(10240, 60, 80), gpt(12288, 80, 96)
GPT_175B, GPT_530B = gpt(12288, 96, 96), gpt(20480, 105, 128)
# Megatron-LM's on H100; their micro-batches are not published
H100_7B, H100_16B = gpt(4096, 30, 32, 131_072, 4096), gpt(6144, 32, 48, 131_072, 4096)
SLOW = pytest.mark.slow
LLAMA_8B, LLAMA_65B = find_config("llama3-8b"), llama("llama-65b")
# model, GPU, how many, GB of each, tokens, sequences a step and a micro-batch; tp, pp, cp and dp
PUBLISHED = {
    "torchtitan-8b-64": (LLAMA_8B, "a100", 64, 80, 8192, 64, 1, (1, 1, 1, 64)),
    "torchtitan-8b-8": (LLAMA_8B, "h100", 8, 96, 8192, 16, 2, (1, 1, 1, 8)),
    "torchtitan-8b-128": (LLAMA_8B, "h100", 128, 96, 8192, 256, 2, (1, 1, 1, 128)),
    "korthikanti-22b": (GPT_22B, "a100", 8, 80, 2048, 4, 4, (8, 1, 1, 1)),
    "korthikanti-175b": (GPT_175B, "a100", 64, 80, 2048, 64, 1, (8, 8, 1, 1)),
    "korthikanti-530b": (GPT_530B, "a100", 280, 80, 2048, 280, 1, (8, 35, 1, 1)),
    "narayanan-76b": (GPT_76B, "a100", 1024, 80, 2048, 1792, 2, (8, 4, 1, 32)),
    "narayanan-145b": (GPT_145B, "a100", 1536, 80, 2048, 2304, 2, (8, 8, 1, 24)),
    "megatron-7b": (H100_7B, "h100", 96, 80, 4096, 192, 1, (2, 1, 1, 48)),
    "megatron-16b": (H100_16B, "h100", 192, 80, 4096, 192, 1, (4, 1, 1, 48)),
    "hagemann-65b": (LLAMA_65B, "a100", 128, 80, 2048, 2048, 1, (2, 4, 1, 16)),
}

NONE, FULL = "none", "full"  # of what is recomputed


def sizes_of(found) -> tuple[int, int, int, int]:
    return found.layout.tp, found.layout.pp, found.layout.cp, found.layout.dp


def times(config, gpu, length, batch, runs, micro_batch=1, recompute=FULL, sp=False):
    """The estimated time of each of the runs: (tp, pp, virtual-pp, dp), whatever memory they take.
    Without ZeRO: Megatron-LM's runs of these tables had none."""
    planner, told = Planner(config, quick=True), []
    for tp, pp, virtual_pp, dp in runs:
        layout = Layout(tp=tp, pp=pp, dp=dp, virtual_pp=virtual_pp, sequence_parallel=sp)
        run = PlannedRun(
            micro_batch_size=micro_batch, global_batch_size=batch, seq_length=length,
            dtype="bfloat16", recompute=recompute,
        )  # fmt: skip
        found = fitting_layout(planner, layout, run, float("inf"), GPUS[gpu])
        told.append(found.time)
    return told


@SLOW
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_layout_is_among_the_first_five(name):
    """Of distinct sizes of tp, pp, cp and dp."""
    config, gpu, gpus, memory, length, batch, micro_batch, published = PUBLISHED[name]
    run = PlannedRun(
        micro_batch_size=micro_batch, global_batch_size=batch, seq_length=length, dtype="bfloat16"
    )
    planner = Planner(config, quick=True)
    found = find_layouts(planner, gpus, memory * 10**9, run, GPUS[gpu])
    assert published in [sizes_of(each) for each in fastest_layouts(found)[:5]]


@SLOW
def test_replicas_of_llama_8b_are_faster_than_tp_on_two_nodes():
    runs = [(1, 1, 1, 16), (2, 1, 1, 8), (4, 1, 1, 4), (8, 1, 1, 2)]
    told = times(LLAMA_8B, "h100", 4096, 16, runs, recompute=NONE, sp=True)
    assert told == sorted(told)
    assert told[-1] > 1.5 * told[0]


@SLOW
@pytest.mark.parametrize("batch", [32, 128])
def test_tp_of_a_node_with_a_pipeline_beyond_is_best(batch):
    """Figure 13 of Narayanan et al.: 162 billion parameters on 64 GPUs, best at tp 8 and pp 8."""
    sizes = [(32, 2), (16, 4), (8, 8), (4, 16), (2, 32)]
    told = times(gpt(20480, 32, 128), "a100", 2048, batch, [(tp, pp, 1, 1) for tp, pp in sizes])
    best = min(range(5), key=told.__getitem__)
    assert sizes[best] == (8, 8)
    assert told[:3] == sorted(told[:3], reverse=True)
    assert told[2:] == sorted(told[2:])


@SLOW
@pytest.mark.parametrize("batch", [32, 512])
def test_replicas_are_faster_than_deeper_pipelines_and_than_wider_tp(batch):
    """Figures 14 and 15: 5.9 billion parameters on 64 GPUs, slower with each doubling of pp, or
    of tp."""
    config, doublings = gpt(3840, 32, 32), (2, 4, 8, 16, 32)
    for runs in ([(1, n, 1, 64 // n) for n in doublings], [(n, 1, 1, 64 // n) for n in doublings]):
        told = times(config, "a100", 2048, batch, runs)
        assert told == sorted(told)


@SLOW
def test_interleaved_stages_are_faster_above_all_in_small_batches():
    """Figure 12: 175 billion parameters on 96 GPUs at tp 8, with four stages a rank and one."""
    gains = []
    for batch in (12, 60):
        plain, interleaved = times(GPT_175B, "a100", 2048, batch, [(8, 12, 1, 1), (8, 12, 4, 1)])
        gains.append(plain / interleaved)
    assert gains[0] > gains[1] > 1


@pytest.mark.parametrize(
    ("config", "batch", "micro_batch", "layout", "full", "selective"),
    [
        pytest.param(GPT_22B, 4, 4, (8, 1, 1, 1), 1.42, 1.10, id="22b"),
        pytest.param(GPT_175B, 64, 1, (8, 8, 3, 1), 18.13, 13.75, id="175b", marks=SLOW),
        pytest.param(GPT_530B, 280, 1, (8, 35, 3, 1), 49.05, 37.83, id="530b", marks=SLOW),
    ],
)
def test_iterations_take_as_long_as_published(config, batch, micro_batch, layout, full, selective):
    """Table 5 of Korthikanti et al., seconds: full recomputation, and selective with sequence
    parallelism. Within a quarter, and what is saved within 3%."""
    how = config, "a100", 2048, batch, [layout], micro_batch
    (slow,), (fast,) = times(*how), times(*how, recompute="selective", sp=True)
    assert slow / fast == pytest.approx(full / selective, rel=0.03)
    assert (slow, fast) == (pytest.approx(full, rel=0.25), pytest.approx(selective, rel=0.25))


# Seconds of a step, by tp and pp; micro-batches of one sequence, nothing recomputed.
HAGEMANN = {
    ("llama-13b", 64, 2048, 2048, False): {
        (1, 1): 26.54, (1, 2): 31.06, (2, 1): 31.29, (2, 2): 34.84,
    },
    ("llama-30b", 64, 2048, 2048, True): {
        (1, 4): 72.00, (2, 4): 76.58, (2, 2): 76.84, (4, 2): 85.47, (4, 4): 87.68, (4, 1): 89.33,
    },
    ("llama-65b", 64, 2048, 2048, True): {
        (2, 4): 147.0, (2, 8): 150.0, (4, 4): 159.6, (4, 2): 162.3, (4, 8): 166.4, (8, 2): 192.5,
        (8, 4): 198.1, (8, 8): 201.4,
    },
}  # fmt: skip


@SLOW
@pytest.mark.parametrize("runs", HAGEMANN, ids=lambda runs: runs[0])
def test_the_faster_of_two_layouts_is_told_to_be(runs):
    """Of all that are more than a tenth apart."""
    preset, gpus, length, batch, sp = runs
    seconds = HAGEMANN[runs]
    layouts = [(tp, pp, 1, gpus // (tp * pp)) for tp, pp in seconds]
    told = dict(
        zip(
            seconds,
            times(llama(preset), "a100", length, batch, layouts, recompute=NONE, sp=sp),
            strict=True,
        )
    )
    apart = [(a, b) for a in seconds for b in seconds if 1.1 * seconds[a] < seconds[b]]
    assert len(apart) >= 5
    assert [(a, b) for a, b in apart if told[a] >= told[b]] == []

"""The device of a rank, the dtype of a run on it, and how CUDA multiplies fp32: on a machine whose
CUDA devices are made up."""

import json

import pytest
import torch

from megazoo import pretrain
from megazoo.checkpoint.places import TRAINER
from megazoo.cli.parsing import CommandLine
from megazoo.errors import Advice, UserError
from megazoo.parallel import device
from megazoo.parallel.device import choose_device, set_fp32_precision
from megazoo.trainer.adapters import NO_WEIGHTS
from megazoo.trainer.run import Run
from tests.support.pretraining import SMALL

OF_EIGHT = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}
TASKS = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8"}


@pytest.fixture
def machine(monkeypatch):
    """Make a machine of so many CUDA devices, and what the launcher says to this rank."""

    def make(devices: int, environment: dict[str, str]) -> None:
        monkeypatch.undo()  # the machine before
        monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        device._tell_fallback.cache_clear()

    return make


OF_TASKS = OF_EIGHT | TASKS
MACHINES = [
    (0, {}, "cpu"),
    (1, {}, "cuda:0"),
    (8, OF_EIGHT, "cuda:3"),
    (1, OF_EIGHT, "cpu"),
    (1, OF_TASKS, "cpu"),
    (1, OF_TASKS | {"SLURM_GPUS_PER_TASK": "1"}, "cuda:0"),
    (1, OF_TASKS | {"SLURM_GPUS_PER_TASK": "h100:1"}, "cuda:0"),
    (2, OF_TASKS | {"SLURM_GPUS_PER_TASK": "2"}, "cuda:0"),
    (1, OF_TASKS | {"SLURM_NTASKS_PER_GPU": "1"}, "cuda:0"),
    (1, OF_TASKS | {"SLURM_NTASKS_PER_GPU": "8"}, "cpu"),
    (1, OF_TASKS | {"SLURM_TRES_PER_TASK": "cpu:4,gres/gpu:1"}, "cuda:0"),
    (1, OF_TASKS | {"SLURM_TRES_PER_TASK": "cpu=4"}, "cpu"),
    (1, OF_TASKS | {"SLURM_GPU_BIND": "verbose,single:1"}, "cuda:0"),
    (1, OF_TASKS | {"SLURM_GPU_BIND": "single:8"}, "cpu"),
    (1, OF_TASKS | {"SLURM_GPU_BIND": "closest"}, "cpu"),
    (1, OF_TASKS | {"SLURM_TRES_BIND": "gres/gpu:per_task:1"}, "cuda:0"),
    # all of them visible, though asked for by task
    (8, OF_TASKS | {"SLURM_GPUS_PER_TASK": "1"}, "cuda:3"),
    # torchrun within one task, or beside the tasks: its ranks share what it sees
    (
        1,
        OF_EIGHT | dict(SLURM_PROCID="0", SLURM_STEP_NUM_TASKS="1", SLURM_GPUS_PER_TASK="1"),
        "cpu",
    ),
    (1, OF_TASKS | {"SLURM_GPUS_PER_TASK": "1", "TORCHELASTIC_RUN_ID": "a"}, "cpu"),
    (0, OF_TASKS | {"SLURM_GPUS_PER_TASK": "1"}, "cpu"),
]


def test_each_rank_has_a_device_or_all_have_the_cpu(machine):
    for case in MACHINES:
        devices, environment, chosen = case
        machine(devices, environment)
        assert choose_device("auto") == torch.device(chosen), case
        assert choose_device("cpu") == torch.device("cpu"), case
        if chosen != "cpu":
            assert choose_device("cuda") == torch.device(chosen), case
            continue
        with pytest.raises(UserError) as refused:
            choose_device("cuda")
        ranks = environment.get("LOCAL_WORLD_SIZE", 1)
        assert str(refused.value) == (
            f"cuda: {ranks} ranks here but {devices} CUDA devices: use fewer, or --device cpu"
        ), case


def test_ranks_that_are_still_to_be_started_share_what_their_launcher_sees(machine):
    machine(2, {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_GPUS_PER_TASK": "2"})
    assert choose_device("auto", 4) == torch.device("cpu")
    assert choose_device("auto", 2) == torch.device("cuda:0")


def test_rank_0_says_once_that_all_run_on_the_cpu(machine, recwarn):
    machine(2, OF_EIGHT | {"RANK": "0", "LOCAL_RANK": "0"})
    for _ in range(2):
        assert choose_device("auto") == torch.device("cpu")
    (told,) = (str(each.message) for each in recwarn if each.category is Advice)
    assert told == (
        "this machine has 8 ranks but 2 CUDA devices: all run on the CPU; start 2 here to use CUDA"
    )


def test_nothing_is_said_by_other_ranks_nor_where_cuda_is_not_wanted(machine, recwarn):
    for devices, environment, asked in (
        (2, OF_EIGHT, "auto"),
        (2, OF_EIGHT | {"RANK": "0"}, "cpu"),
        (0, {"RANK": "0"}, "auto"),
    ):
        machine(devices, environment)
        assert choose_device(asked) == torch.device("cpu")
        assert not [each for each in recwarn if each.category is Advice], (devices, asked)


def run_with(arguments: str, resuming: bool = False, settings: dict | None = None) -> Run:
    options = CommandLine.read(arguments.split()).options(settings)
    return Run([], options, NO_WEIGHTS, resuming, {}, None, set(), None, [], set(), None, None)


IN_BF16, IN_FP16 = ("bfloat16", ", in bfloat16"), ("float16", ", in float16")
ON_CPU, IN_FP32 = ("float32", ""), ("float32", ", in float32")
IN_TF32 = "float32", ", in float32, multiplied in TF32 (--fp32-precision ieee for fp32)"
PRECISIONS = [  # flags, the settings of a run that goes on; on CUDA, on the CPU
    ("", None, ("bfloat16", ", in bfloat16 (--dtype float32 for fp32)"), ON_CPU),
    ("--dtype float16", None, IN_FP16, IN_FP16),
    ("--dtype float32", None, IN_TF32, ON_CPU),
    ("--dtype float32 --fp32-precision ieee", None, IN_FP32, ON_CPU),
    # a run keeps its dtype where it goes on
    ("", {"dtype": "bfloat16"}, IN_BF16, IN_BF16),
    ("", {"dtype": "float32", "fp32_precision": "ieee"}, IN_FP32, ON_CPU),
    ("", {"dtype": None}, IN_TF32, ON_CPU),
]


def test_the_dtype_of_a_run_and_what_is_said_of_it():
    for case in PRECISIONS:
        flags, settings, *expected = case
        for kind, answer in zip(("cuda", "cpu"), expected, strict=True):
            run = run_with(flags, settings is not None, settings)
            run.settle_dtype(kind)
            assert (run.options.training.dtype, run.note_on_precision(kind)) == answer, case


def test_a_checkpoint_names_the_dtype_that_was_chosen(tmp_path, capsys):
    small = [*SMALL, "--warmup-steps", "0", "--eval-steps", "0", "--device", "cpu"]
    pretrain.main([*small, "--steps", "1", "--save", str(tmp_path / "a")])
    settings = json.loads((tmp_path / "a" / "step_00000001" / TRAINER).read_text())["settings"]
    assert (settings["dtype"], settings["fp32_precision"]) == ("float32", "tf32")
    pretrain.main([*small, "--steps", "1", "--dtype", "bfloat16", "--save", str(tmp_path / "b")])
    pretrain.main(["--device", "cpu", "--steps", "2", "--load", str(tmp_path / "b")])
    assert capsys.readouterr().out.count("dp 1, in bfloat16\n") == 2


def test_tf32_is_for_cuda_alone_and_leaves_the_settings_that_torch_compile_reads(recwarn):
    factors = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0))
    before, backends = factors[0] @ factors[1], torch.backends
    on_cpus = backends.mkldnn.matmul.fp32_precision
    try:
        for precision, legacy in (("tf32", "high"), ("ieee", "highest"), ("tf32", "high")):
            set_fp32_precision(precision)
            assert backends.cuda.matmul.fp32_precision == precision
            assert torch.get_float32_matmul_precision() == legacy
            assert backends.mkldnn.matmul.fp32_precision == on_cpus
            assert torch.equal(factors[0] @ factors[1], before)
        assert not list(recwarn)
    finally:
        set_fp32_precision("ieee")

"""Several machines, restarts, signals and faults: jobs on nodes that are network namespaces."""

import contextlib
import io
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

import megazoo
from megazoo import callbacks, pretrain
from megazoo.cli.parsing import CommandLine
from megazoo.environment import adopt_launcher
from tests.support.pretraining import SMALL, TORCHRUN, close, losses, records
from tests.support.processes import Program, free_port
from tests.support.programs import python
from tests.support.soak import soak

ROOT = Path(__file__).parents[2]
JOB = [*SMALL, "--eval-steps", "0"]
# A user's file: a rank that dies, raises or stalls once, after so many steps.
FAULT = """
import os, signal, sys, time
from pathlib import Path
import megazoo.models.base as base

kind, rank, at, once = sys.argv[sys.argv.index("--fault") + 1].split(",")
del sys.argv[sys.argv.index("--fault") : sys.argv.index("--fault") + 2]
train_batch = base.Model.train_batch

def faulty(self, *arguments, step=None, **named):
    if step == int(at) and os.environ["RANK"] == rank and not Path(once).exists():
        Path(once).touch()
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "raise":
            raise ValueError("a fault of this test")
        if kind == "stall":
            time.sleep(600)
    return train_batch(self, *arguments, step=step, **named)

base.Model.train_batch = faulty
from megazoo import pretrain
from megazoo.cli.program import run_program
run_program(pretrain.main)
"""


@pytest.fixture
def start():
    """Starts jobs, and ends those that are left."""
    jobs = []

    def begin(command, **environment):
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        jobs.append(Program(*command[1:], program=command[0], **environment))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.clear()


@pytest.fixture
def nodes():
    """The prefixes of commands that run on each of two nodes, and a function that cuts the network
    between them."""
    name = f"mz{os.getpid()}"
    commands = [f"ip netns add {name}{side}" for side in "ab"]
    commands += [f"ip link add {name}a netns {name}a type veth peer name {name}b netns {name}b"]
    for number, side in enumerate("ab", 1):
        commands += [f"ip -n {name}{side} addr add 10.77.0.{number}/24 dev {name}{side}"]
        commands += [
            f"ip -n {name}{side} link set {interface} up" for interface in (f"{name}{side}", "lo")
        ]
        # A broken connection is given up after 13 s instead of 15 min: torchrun itself has no such
        # limit.
        commands += [f"ip netns exec {name}{side} sysctl -w net.ipv4.tcp_retries2=5"]
    try:
        try:
            for command in commands:
                subprocess.run(command.split(), check=True, capture_output=True, timeout=20)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        enter = ["ip", "netns", "exec"]
        prefixes = [
            [*enter, f"{name}{side}", "env", f"GLOO_SOCKET_IFNAME={name}{side}"] for side in "ab"
        ]
        yield (
            prefixes,
            lambda: subprocess.run(f"ip -n {name}b link set {name}b down".split(), check=True),
        )
    finally:
        for side in "ab":
            subprocess.run(["ip", "netns", "del", f"{name}{side}"], capture_output=True)


def torchrun_on(nodes, program, *arguments, ranks=4, restarts=0):
    """The two commands that start a job of so many ranks on two nodes."""
    prefixes, _ = nodes
    words = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint 10.77.0.1:29400 --rdzv-id test "
    words += f"--nproc-per-node {ranks // 2} --max-restarts {restarts} "
    # Names don't resolve here; and the launchers notice a cut network sooner.
    words += "--rdzv-conf is_host={},read_timeout=10 --local-addr 10.77.0.{}"
    commands = []
    for number, prefix in enumerate(prefixes, 1):
        how = words.format(number == 1, number).split()
        commands.append([*prefix, python(), *TORCHRUN[:-1], *how, program, *arguments])
    return commands


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The losses of one process."""
    path = tmp_path_factory.mktemp("straight") / "metrics"
    pretrain.main([*JOB, "--steps", "8", "--metrics", str(path)])
    return losses(path)


@pytest.fixture
def fault(tmp_path):
    program = tmp_path / "faulty.py"
    program.write_text(FAULT)
    return program


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["--tp 2 --pp 2", "--tp 2", "--pp 4 --zero 1"])
def test_two_nodes_train_like_one_process(start, nodes, straight, tmp_path, layout):
    arguments = [*JOB, *layout.split(), "--steps", 8, "--metrics", tmp_path / "metrics"]
    jobs = [start(command) for command in torchrun_on(nodes, "pretrain_gpt.py", *arguments)]
    for job in jobs:
        assert job.end(120) == 0, job.text
    assert close(losses(tmp_path / "metrics"), straight)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "layout"), [(2, "--pp 2"), (4, "--tp 2 --pp 2")])
def test_a_rank_of_another_node_is_killed_and_the_job_goes_on_from_its_checkpoint(
    start, nodes, straight, fault, tmp_path, ranks, layout
):
    words = ["--fault", f"kill,{ranks - 1},6,{tmp_path}/once", *JOB, *layout.split(), "--steps", 8]
    words += ["--save", tmp_path / "run", "--save-interval", 2, "--metrics", tmp_path / "metrics"]
    jobs = [
        start(command) for command in torchrun_on(nodes, fault, *words, ranks=ranks, restarts=1)
    ]
    for job in jobs:
        assert job.end(200) == 0, "\n\n".join(job.text for job in jobs)
    assert (tmp_path / "once").exists()
    steps = [record["step"] for record in records(tmp_path / "metrics")]
    assert steps == [1, 2, 3, 4, 5, 5, 6, 7, 8], "on from step 4"
    assert close(losses(tmp_path / "metrics"), straight)


FAULTS = {
    "kill": "Signal 9 (SIGKILL)",
    "raise": "ValueError: a fault of this test",
    "stall": "no response from rank 2 (tp 0, pp 1, dp 0): it hung for longer than",
}
# What is said before that, while the others still wait.
LATE = f"rank 2 (tp 0, pp 1, dp 0) on {os.uname().nodename} has not called train_batch 3, in which"


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_of_a_rank_ends_the_job_and_is_told(start, fault, tmp_path, kind):
    words = ["--fault", f"{kind},2,3,{tmp_path}/once", *JOB, *"--tp 2 --pp 2 --timeout 10".split()]
    job = start([python(), *TORCHRUN, "--nproc-per-node", 4, fault, *words])
    assert job.end(170) != 0
    assert "step   2/" in job.text
    assert FAULTS[kind] in job.text
    assert (LATE in job.text) == (kind == "stall")


@pytest.mark.slow
def test_a_network_that_is_cut_ends_the_job_on_both_nodes(start, nodes, tmp_path):
    arguments = [*JOB, "--tp", 2, "--pp", 2, "--steps", 100_000, "--timeout", 10]
    jobs = [start(command) for command in torchrun_on(nodes, "pretrain_gpt.py", *arguments)]
    jobs[0].wait_for("step      3/")
    nodes[1]()
    for job in jobs:
        assert job.end(120) != 0
    assert "no response from rank" in jobs[0].text
    assert "can't reach the other ranks or the job's store" in jobs[1].text


def train_and_signal(arguments: list[str], name: str) -> str:
    """Train, with a signal to the last rank after step 4; what this rank prints."""

    @megazoo.on_step
    def tell(step, values, model):
        if step == 4 and model.ctx.rank == 3:
            os.kill(os.getpid(), getattr(signal, name))

    with contextlib.redirect_stdout(io.StringIO()) as told:
        try:
            pretrain.main(arguments)
        finally:
            callbacks._steps.clear()
    return told.getvalue()


@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGUSR1", marks=pytest.mark.slow)])
def test_a_signal_to_one_rank_saves_and_ends_all(ranks, straight, tmp_path, name):
    """The run then goes on as if it had not been stopped."""
    kept = ["--save", str(tmp_path / "run"), "--metrics", str(tmp_path / "metrics")]
    first, *_ = ranks(train_and_signal, 4, [*JOB, *"--tp 2 --pp 2 --steps 8".split(), *kept], name)
    assert re.search(f"stopped by {name}: trained steps 1 to [45]", first)
    pretrain.main([*kept[2:], "--load", kept[1], "--device", "cpu"])
    assert close(losses(tmp_path / "metrics"), straight)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_under_random_deaths_ends_as_a_quiet_one(tmp_path):
    figures = soak(tmp_path, minutes=1, seed=1)
    assert figures.steps > 5
    assert sum(figures.deaths.values()) >= 2


# Launchers.


def test_the_slurm_script_goes_on_after_a_rank_has_died(tmp_path):
    """With stand-ins for srun, which fails once, and for the nodes."""
    (tmp_path / "srun").write_text(
        '#!/bin/bash\necho "$@" >> calls\nmkdir -p runs/job\ntouch runs/job/latest\n'
        "[ $(wc -l < calls) -gt 1 ]\n"
    )
    (tmp_path / "srun").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NAME": "job"}
    environment |= {"DATA": "d", "TOKENIZER": "t"}
    script = ROOT / "configs" / "slurm" / "pretrain.sbatch"
    done = subprocess.run(
        ["bash", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "attempt 1 failed\n")
    first, second = (tmp_path / "calls").read_text().splitlines()
    assert second == f"{first} --load runs/job"
    flags = first.partition("pretrain_gpt.py ")[2].split()
    options = CommandLine.read([*flags, "--vocab-size", "300"]).options()
    assert (options.parallel.tp, options.parallel.pp, options.parallel.zero) == (8, 4, 1)


def test_srun_alone_starts_a_job(start, straight, tmp_path):
    """What srun sets for two tasks on one node."""
    slurm = {
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_JOB_ID": "7", "SLURM_NODEID": "0",
        "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    job = [*JOB, "--pp", 2, "--steps", 8, "--metrics", tmp_path / "metrics"]
    jobs = [
        start(
            [python(), "pretrain_gpt.py", *job],
            **slurm,
            SLURM_PROCID=str(rank),
            SLURM_LOCALID=str(rank),
        )
        for rank in range(2)
    ]
    for job in jobs:
        assert job.end(120) == 0, job.text
    assert close(losses(tmp_path / "metrics"), straight)


def test_what_launchers_say_is_understood():
    slurm = {
        "SLURM_STEP_NUM_TASKS": "11",
        "SLURM_PROCID": "9",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "2",
    }
    slurm |= {
        "SLURM_STEP_NODELIST": "gpu[007-009],login",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
        "SLURM_JOB_ID": "123456",
    }
    environment = dict(slurm)
    assert adopt_launcher(["--tp", "2"], environment) == ["--tp", "2"]
    ours = {name: environment[name] for name in environment.keys() - slurm.keys()}
    assert ours == {
        "RANK": "9",
        "WORLD_SIZE": "11",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "gpu007",
        "MASTER_PORT": "23456",
    }
    for arguments in (["--local-rank=3", "--tp", "2"], ["--tp", "2", "--local_rank", "3"]):
        environment = {}
        assert adopt_launcher(arguments, environment) == ["--tp", "2"]
        assert environment == {"LOCAL_RANK": "3"}
    environment = {"RANK": "0", **slurm}  # torchrun under srun
    adopt_launcher([], environment)
    assert environment == {"RANK": "0", **slurm}
    job = {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    for step in ({}, {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "a"}):
        environment = {**job, **step}  # a batch script without srun; a shell of salloc
        adopt_launcher([], environment)
        assert environment == {**job, **step}

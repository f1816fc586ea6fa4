"""Read the launcher's environment variables about the ranks. This module does not import torch."""

import os
import re
import reprlib
from collections.abc import Mapping, MutableMapping

from megazoo.errors import UserError

LAUNCHER_PREFIXES = ("TORCHELASTIC_", "ROLE_", "GROUP_")
LAUNCHER_NAMES = {
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "MEGAZOO_LAUNCHER",
}
MOST_RANKS = 1 << 20


def world_size() -> int:
    """Return the number of ranks that the launcher started; 1 without one."""
    return whole_number("WORLD_SIZE", 1, least=1)


def rank() -> int:
    """Return the number of this rank in the world; 0 without a launcher."""
    return whole_number("RANK", 0)


def is_rank_zero() -> bool:
    """Return whether this is rank 0, which prints for all ranks. True without a launcher."""
    return rank() == 0


def local_rank() -> int:
    """Return the number of this rank on this machine; 0 without a launcher."""
    return whole_number("LOCAL_RANK", 0)


def local_world_size() -> int:
    """Return the number of ranks on this machine; 1 without a launcher."""
    return whole_number("LOCAL_WORLD_SIZE", 1, least=1)


def has_devices_of_its_own() -> bool:
    """Return whether Slurm assigns this rank GPUs that no other rank can use, numbered from 0.

    Slurm assigns them with --gpus-per-task, --ntasks-per-gpu=1 or --tres-per-task, and with
    --gpu-bind=single:1 or per_task. Ranks that torchrun starts within a task share the GPUs of the
    task.
    """
    if world_size() == 1 or is_child_of_launcher():
        return False
    if (rank(), world_size()) != tuple(
        whole_number(name, -1) for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    ):
        return False
    options = {
        "SLURM_GPUS_PER_TASK": ".",
        "SLURM_NTASKS_PER_GPU": "1$",
        "SLURM_TRES_PER_TASK": ".*gres/gpu",
        "SLURM_GPU_BIND": ".*(single:1$|per_task)",
        "SLURM_TRES_BIND": ".*gpu:(single:1$|per_task)",
    }
    return any(re.match(wanted, os.environ.get(name, "")) for name, wanted in options.items())


def restarts() -> int:
    """Return how often torchrun has restarted the ranks."""
    return whole_number("TORCHELASTIC_RESTART_COUNT", 0)


def whole_number(
    name: str,
    default: int,
    least: int = 0,
    most: int = MOST_RANKS,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Return the integer in an environment variable.

    Args:
        name: name of the variable.
        default: result if the variable is not set.
        least, most: smallest and largest valid number.
        environment: the variables. By default os.environ.

    Raises:
        UserError: the value is invalid. The message names the variable.
    """
    environment = os.environ if environment is None else environment
    if name not in environment:
        return default
    text = environment[name].strip()
    number = int(text) if re.fullmatch("[0-9]{1,19}", text) else -1
    if not least <= number <= most:
        raise UserError(
            f"the variable {name} is {reprlib.repr(environment[name])}: it must be a whole number "
            f"from {least} to {most}"
        )
    return number


def check_meeting_point() -> None:
    """Raise UserError if a variable with which several ranks connect is not set."""
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        if world_size() > 1 and not os.environ.get(name):
            raise UserError(
                f"WORLD_SIZE is {world_size()}, but the variable {name} is not set: "
                "a launcher such as torchrun sets both"
            )


def of_local_rank(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the environment variables for a rank that this process launches.

    They are those of torchrun, and MEGAZOO_LAUNCHER.

    Args:
        rank: number of the rank.
        ranks: number of ranks.
        port: port of the store in this process.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MEGAZOO_LAUNCHER": str(os.getpid()),
    }


def megazoos_launcher() -> int | None:
    """Return the process id of megazoo's launcher, if it started this rank."""
    return whole_number("MEGAZOO_LAUNCHER", 0, most=1 << 31) or None


def is_child_of_launcher() -> bool:
    """Return whether torchrun or megazoo's launcher, which both stay alive, started this rank."""
    return "TORCHELASTIC_RUN_ID" in os.environ or megazoos_launcher() is not None


def adopt_launcher(arguments: list[str], environment: MutableMapping[str, str]) -> list[str]:
    """Set torchrun's variables for other launchers: srun and torch.distributed.launch.

    With only `srun`, the ranks follow from SLURM_*. They connect to the first node, on a port
    derived from the job id unless MASTER_PORT is set. torch.distributed.launch passes --local-rank.

    Args:
        arguments: command line.
        environment: variables to read and set.

    Returns:
        The arguments without those of the launcher.

    Raises:
        UserError: a variable has an invalid value. The message names it.
    """
    kept, rest = [], iter(arguments)
    for argument in rest:
        flag, _, value = argument.partition("=")
        if flag in ("--local-rank", "--local_rank"):
            environment.setdefault("LOCAL_RANK", value or next(rest, "0"))
        else:
            kept.append(argument)
    if "RANK" not in environment and "SLURM_PROCID" in environment:
        _adopt_slurm(environment)
    _check(environment)
    return kept


def _check(environment: Mapping[str, str]) -> None:
    """Raise UserError for a variable that is not a number or contradicts the other variables."""
    for rank, world in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        number = whole_number(rank, 0, environment=environment)
        ranks = whole_number(world, 1, least=1, environment=environment)
        # Some launchers set only LOCAL_RANK.
        if number >= ranks and (rank == "RANK" or world in environment):
            raise UserError(
                f"the variable {rank} is {number}, but {world} is "
                f"{ranks if world in environment else 'not set'}: ranks count from 0"
            )
    whole_number("TORCHELASTIC_RESTART_COUNT", 0, environment=environment)
    # Without WORLD_SIZE it may be a variable of Kubernetes, for a service with the name "master",
    # such as tcp://10.0.0.1:80.
    if "WORLD_SIZE" in environment:
        whole_number("MASTER_PORT", 0, most=65_535, environment=environment)


def _adopt_slurm(environment: MutableMapping[str, str]) -> None:
    """Set torchrun's variables from Slurm's, if there are several ranks."""

    def number(name: str, **limits: int) -> int:
        return whole_number(name, 0, environment=environment, **limits)

    # Only srun sets it: a shell of salloc and a batch script are one process each.
    if "SLURM_STEP_NUM_TASKS" not in environment or number("SLURM_STEP_NUM_TASKS", least=1) == 1:
        return
    nodes = environment.get("SLURM_STEP_NODELIST", "localhost")
    first = re.match(r"([^\[,]+)(?:\[(\d+))?", nodes)
    if not first:
        raise UserError(
            f"the variable SLURM_STEP_NODELIST is {reprlib.repr(nodes)}: it must be a list "
            "of node names"
        )
    tasks = "SLURM_STEP_TASKS_PER_NODE"
    per_node = _expanded(tasks if tasks in environment else "SLURM_STEP_NUM_TASKS", environment)
    node = number("SLURM_NODEID", most=len(per_node) - 1)
    environment["RANK"] = str(number("SLURM_PROCID"))
    environment["WORLD_SIZE"] = environment["SLURM_STEP_NUM_TASKS"]
    environment["LOCAL_RANK"] = str(number("SLURM_LOCALID"))
    environment["LOCAL_WORLD_SIZE"] = str(per_node[node])
    environment.setdefault("MASTER_ADDR", first[1] + (first[2] or ""))
    port = 20_000 + number("SLURM_JOB_ID", most=1 << 62) % 20_000
    environment.setdefault("MASTER_PORT", str(port))


def _expanded(name: str, environment: Mapping[str, str]) -> list[int]:
    """Expand a Slurm variable such as "4(x2),3" into [4, 4, 3]."""
    counts, one = environment[name].strip(), r"(\d{1,7})(?:\(x(\d{1,7})\))?"
    pairs = [(int(n), int(times or 1)) for n, times in re.findall(one, counts)]
    whole = re.fullmatch(f"{one}(,{one})*", counts)
    if not whole or not 0 < sum(times for _, times in pairs) <= MOST_RANKS:
        raise UserError(
            f"the variable {name} is {reprlib.repr(environment[name])}: it must be a list "
            "of tasks per node, such as 4(x2),3"
        )
    return [count for count, times in pairs for _ in range(times)]

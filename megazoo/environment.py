"""What the launcher says of the ranks, in the environment. It needs no torch."""

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
    """Return the number of this rank among all; 0 without a launcher."""
    return whole_number("RANK", 0)


def is_rank_zero() -> bool:
    """Say whether this is the rank that speaks for all; so it is without a launcher."""
    return rank() == 0


def local_rank() -> int:
    """Return the number of this rank among those of this machine; 0 without a launcher."""
    return whole_number("LOCAL_RANK", 0)


def local_world_size() -> int:
    """Return the number of ranks on this machine; 1 without a launcher."""
    return whole_number("LOCAL_WORLD_SIZE", 1, least=1)


def has_devices_of_its_own() -> bool:
    """Say whether Slurm shows this rank GPUs that no other rank sees, numbered from 0.

    So it does for tasks that were asked for with --gpus-per-task, --ntasks-per-gpu=1 or
    --tres-per-task, and with --gpu-bind=single:1 or per_task. The ranks that torchrun starts within
    a task are not tasks: they share what it sees.
    """
    if world_size() == 1 or is_child_of_launcher():
        return False
    if (rank(), world_size()) != tuple(
        whole_number(name, -1) for name in ("SLURM_PROCID", "SLURM_NTASKS")
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
    """Return how often torchrun has started the ranks again."""
    return whole_number("TORCHELASTIC_RESTART_COUNT", 0)


def whole_number(
    name: str,
    default: int,
    least: int = 0,
    most: int = MOST_RANKS,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Return the number that a variable of the environment holds, or the default if there is no
    such variable. UserError, naming it, for anything else."""
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
    """Raise UserError if a variable by which several ranks find each other is not set."""
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        if world_size() > 1 and not os.environ.get(name):
            raise UserError(
                f"WORLD_SIZE is {world_size()}, but the variable {name} is not set: "
                "a launcher such as torchrun sets both"
            )


def of_local_rank(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return what megazoo's own launcher, this process, tells a rank that it starts; torchrun tells
    it so, too. port: of the store that it holds."""
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
    """Return the process number of megazoo's own launcher, if it has started this rank."""
    return whole_number("MEGAZOO_LAUNCHER", 0, most=1 << 31) or None


def is_child_of_launcher() -> bool:
    """Say whether a launcher that stays has started this process: torchrun, or megazoo's own."""
    return "TORCHELASTIC_RUN_ID" in os.environ or megazoos_launcher() is not None


def adopt_launcher(arguments: list[str], environment: MutableMapping[str, str]) -> list[str]:
    """Understand launchers other than torchrun: put its variables into the environment.

    Returns the arguments without those that are the launcher's. `srun` alone says with SLURM_* who
    a rank is; the ranks meet on the first node, on a port that follows from the job's number unless
    MASTER_PORT names one. torch.distributed.launch gives --local-rank. UserError names a variable
    that has no value such as these have.
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
    """Raise UserError for a variable that is no number, or not one that the others allow."""
    for rank, world in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        number = whole_number(rank, 0, environment=environment)
        ranks = whole_number(world, 1, least=1, environment=environment)
        # Some launchers set LOCAL_RANK alone.
        if number >= ranks and (rank == "RANK" or world in environment):
            raise UserError(
                f"the variable {rank} is {number}, but {world} is "
                f"{ranks if world in environment else 'not set'}: ranks count from 0"
            )
    whole_number("TORCHELASTIC_RESTART_COUNT", 0, environment=environment)
    # Alone it is Kubernetes', perhaps: tcp://10.0.0.1:80, of a service that is called master.
    if "WORLD_SIZE" in environment:
        whole_number("MASTER_PORT", 0, most=65_535, environment=environment)


def _adopt_slurm(environment: MutableMapping[str, str]) -> None:
    """Put torchrun's variables beside Slurm's, if these tell of several ranks."""

    def number(name: str, **limits: int) -> int:
        return whole_number(name, 0, environment=environment, **limits)

    if "SLURM_NTASKS" not in environment or number("SLURM_NTASKS", least=1) == 1:
        return
    nodes = environment.get("SLURM_STEP_NODELIST", "localhost")
    first = re.match(r"([^\[,]+)(?:\[(\d+))?", nodes)
    if not first:
        raise UserError(
            f"the variable SLURM_STEP_NODELIST is {reprlib.repr(nodes)}: no node's name"
        )
    tasks = "SLURM_STEP_TASKS_PER_NODE"
    per_node = _expanded(tasks if tasks in environment else "SLURM_NTASKS", environment)
    node = number("SLURM_NODEID", most=len(per_node) - 1)
    environment["RANK"] = str(number("SLURM_PROCID"))
    environment["WORLD_SIZE"] = environment["SLURM_NTASKS"]
    environment["LOCAL_RANK"] = str(number("SLURM_LOCALID"))
    environment["LOCAL_WORLD_SIZE"] = str(per_node[node])
    environment.setdefault("MASTER_ADDR", first[1] + (first[2] or ""))
    port = 20_000 + number("SLURM_JOB_ID", most=1 << 62) % 20_000
    environment.setdefault("MASTER_PORT", str(port))


def _expanded(name: str, environment: Mapping[str, str]) -> list[int]:
    """Expand Slurm's "4(x2),3", which a variable holds, into [4, 4, 3]."""
    counts, one = environment[name].strip(), r"(\d{1,7})(?:\(x(\d{1,7})\))?"
    pairs = [(int(n), int(times or 1)) for n, times in re.findall(one, counts)]
    whole = re.fullmatch(f"{one}(,{one})*", counts)
    if not whole or not 0 < sum(times for _, times in pairs) <= MOST_RANKS:
        raise UserError(
            f"the variable {name} is {reprlib.repr(environment[name])}: it is no list of tasks "
            "per node such as 4(x2),3"
        )
    return [count for count, times in pairs for _ in range(times)]

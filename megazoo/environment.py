"""What the launcher says of the ranks, in the environment. It needs no torch."""

import os
import re

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


def world_size() -> int:
    """Return the number of ranks that the launcher started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", 1))


def is_rank_zero() -> bool:
    """Say whether this is the rank that speaks for all; so it is without a launcher."""
    return int(os.environ.get("RANK", 0)) == 0


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
    number = os.environ.get("MEGAZOO_LAUNCHER")
    return int(number) if number else None


def is_child_of_launcher() -> bool:
    """Say whether a launcher that stays has started this process: torchrun, or megazoo's own."""
    return "TORCHELASTIC_RUN_ID" in os.environ or megazoos_launcher() is not None


def adopt_launcher(arguments: list[str], environment: dict[str, str]) -> list[str]:
    """Understand launchers other than torchrun: put its variables into the environment.

    Returns the arguments without those that are the launcher's. `srun` alone says with SLURM_* who
    a rank is; the ranks meet on the first node, on a port that follows from the job's number unless
    MASTER_PORT names one. torch.distributed.launch gives --local-rank.
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
    return kept


def _adopt_slurm(environment: dict[str, str]) -> None:
    """Put torchrun's variables beside Slurm's, if these tell of several ranks."""
    if int(environment.get("SLURM_NTASKS", 1)) == 1:
        return
    first = re.match(r"([^\[,]+)(?:\[(\d+))?", environment.get("SLURM_STEP_NODELIST", "localhost"))
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", environment["SLURM_NTASKS"])
    per_node = _expanded(tasks)
    environment["RANK"] = environment["SLURM_PROCID"]
    environment["WORLD_SIZE"] = environment["SLURM_NTASKS"]
    environment["LOCAL_RANK"] = environment.get("SLURM_LOCALID", "0")
    environment["LOCAL_WORLD_SIZE"] = str(per_node[int(environment.get("SLURM_NODEID", 0))])
    environment.setdefault("MASTER_ADDR", first[1] + (first[2] or ""))
    port = 20_000 + int(environment.get("SLURM_JOB_ID", 0)) % 20_000
    environment.setdefault("MASTER_PORT", str(port))


def _expanded(counts: str) -> list[int]:
    """Expand Slurm's "4(x2),3" into [4, 4, 3]."""
    pairs = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(count) for count, times in pairs for _ in range(int(times or 1))]

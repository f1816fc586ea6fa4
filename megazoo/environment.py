"""What the launcher says in the environment: ranks, without torch."""

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
}


def world_size() -> int:
    """The number of ranks that the launcher started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", 1))


def is_rank_zero() -> bool:
    return int(os.environ.get("RANK", 0)) == 0


def adopt_launcher(arguments: list[str], environment: dict[str, str]) -> list[str]:
    """Understand launchers other than torchrun: put torchrun's variables into the environment, and
    return the arguments without those that are the launcher's.

    `srun` alone says with SLURM_* who a rank is; the ranks meet on the first node, on a port that
    follows from the job's number unless MASTER_PORT names one. torch.distributed.launch gives
    --local-rank.
    """
    kept, rest = [], iter(arguments)
    for argument in rest:
        flag, _, value = argument.partition("=")
        if flag in ("--local-rank", "--local_rank"):
            environment.setdefault("LOCAL_RANK", value or next(rest, "0"))
        else:
            kept.append(argument)
    if (
        "RANK" not in environment
        and int(environment.get("SLURM_NTASKS", 1)) > 1
        and "SLURM_PROCID" in environment
    ):
        first = re.match(
            r"([^\[,]+)(?:\[(\d+))?", environment.get("SLURM_STEP_NODELIST", "localhost")
        )
        per_node = _expanded(
            environment.get("SLURM_STEP_TASKS_PER_NODE", environment["SLURM_NTASKS"])
        )
        environment["RANK"], environment["WORLD_SIZE"] = (
            environment["SLURM_PROCID"],
            environment["SLURM_NTASKS"],
        )
        environment["LOCAL_RANK"] = environment.get("SLURM_LOCALID", "0")
        environment["LOCAL_WORLD_SIZE"] = str(per_node[int(environment.get("SLURM_NODEID", 0))])
        environment.setdefault("MASTER_ADDR", first[1] + (first[2] or ""))
        environment.setdefault(
            "MASTER_PORT", str(20_000 + int(environment.get("SLURM_JOB_ID", 0)) % 20_000)
        )
    return kept


def _expanded(counts: str) -> list[int]:
    """Slurm's "4(x2),3" as [4, 4, 3]."""
    pairs = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(count) for count, times in pairs for _ in range(int(times or 1))]

"""The command `megazoo plot schedule`, from a clone."""

from megazoo.cli.program import run_script

if __name__ == "__main__":
    run_script("plot schedule")

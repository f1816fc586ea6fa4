"""The command `megazoo check layout`, from a clone."""

from megazoo.cli.program import run_script

if __name__ == "__main__":
    run_script("check layout")

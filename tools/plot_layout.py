"""The command `megazoo plot layout`, from a clone."""

from megazoo.cli.program import run_script

if __name__ == "__main__":
    run_script("plot layout")

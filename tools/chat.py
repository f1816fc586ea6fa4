"""The command `megazoo chat`, from a clone."""

from megazoo.cli.program import run_script

if __name__ == "__main__":
    run_script("chat")

"""Define the entry point of `gradcam` and `python -m gradcam`."""

from gradcam.cli import main
from gradcam.cli._process import run_and_exit


def start() -> None:
    """Run the command `gradcam`, and end the process."""
    run_and_exit(main)


if __name__ == "__main__":
    start()

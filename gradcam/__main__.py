"""Start the command for `gradcam` and `python -m gradcam`. The process ends with the command."""

from gradcam.cli import main
from gradcam.cli._process import run_and_exit


def start() -> None:
    """Run the command, and end the process."""
    run_and_exit(main)


if __name__ == "__main__":
    start()

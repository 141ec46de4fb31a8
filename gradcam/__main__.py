"""The command in a process of its own, which ends with it: `gradcam`, and `python -m gradcam`."""

from gradcam.cli import main
from gradcam.cli._process import end_with


def start() -> None:
    """Run the command, and end the process."""
    end_with(main)


if __name__ == "__main__":
    start()

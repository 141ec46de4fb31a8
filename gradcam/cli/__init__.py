"""The command `gradcam`: a file for each command, or for two that belong together, thin over the Python functions."""

from __future__ import annotations

import os
import sys
import traceback
from typing import NoReturn

import click

from gradcam.cli._commands import SETTINGS, Group, show_usage_error, show_version, tell_all
from gradcam.cli._process import settle_process
from gradcam.cli._terminal import Terminated, heed_nothing, heeding_signals, make_streams_safe, settle_warnings
from gradcam.errors import GradcamError, describe_unexpected


@click.group(
    cls=Group,
    context_settings=SETTINGS,
    has_plugins=True,
    places={
        "run": ("gradcam.cli.run:run_command", "Explain pictures: write an overlay for each."),
        "page": ("gradcam.cli.page:page_command", "One picture, every class: a page that is alive without a server."),
        "ui": (
            "gradcam.cli.ui:ui_command",
            "A local page: drop pictures, choose, brush over them, and see the map follow.",
        ),
        "batch": ("gradcam.cli.batch:batch_command", "Explain a folder of any size, and go on where it was stopped."),
        "report": ("gradcam.cli.batch:report_command", "Make the gallery of a batch again."),
        "compare": ("gradcam.cli.run:compare_command", "Draw methods, layers and classes side by side."),
        "check": ("gradcam.cli.check:check_command", "A verdict on a map: five tests that it can fail."),
        "diff": ("gradcam.cli.diff:diff_command", "Compare two checkpoints: same class, another map?"),
        "audit": (
            "gradcam.cli.audit:audit_command",
            "Find shortcuts: evidence that part of one class has, and no other.",
        ),
        "evaluate": (
            "gradcam.cli.evaluate:evaluate_command",
            "Judge methods by metrics, on a folder of your own pictures.",
        ),
        "recommend": (
            "gradcam.cli.recommend:recommend_command",
            "Find the best method, score and layer for a model on one's pictures.",
        ),
        "layers": ("gradcam.cli.layers:layers_command", "List a model's layers, and where a map can be taken."),
        "inspect": (
            "gradcam.cli.inspect:inspect_group",
            "Look inside a network: its calls, features, activations, gradients.",
        ),
        "methods": ("gradcam.cli.methods:methods_command", "List the methods, their cost and their papers."),
        "models": ("gradcam.cli.models:models_command", "List the models that can be named."),
    },
)
@click.option("--version", is_flag=True, expose_value=False, callback=show_version, help="Show the version and exit.")
@click.option(
    "--verbose",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=tell_all,
    help="With --version: those of Python, torch and the rest, and the devices.",
)
def cli() -> None:
    """Show where a vision model looked.

    \b
      gradcam run photo.jpg                     explain the top class
      gradcam run photo.jpg --class "tiger cat" explain another one
      gradcam run *.jpg --output explained/     several pictures
      gradcam page photo.jpg -o photo.html      every class, in a page to send to somebody
      gradcam batch photos/ -o explained/       a folder of any size; --resume goes on
      gradcam report explained/                 a gallery of it
      gradcam compare photo.jpg                 methods side by side
      gradcam check photo.jpg                   can this map be trusted?
      gradcam diff OLD NEW photos/              did the new checkpoint look elsewhere?
      gradcam audit photos/                     does a class hang on a shortcut?
      gradcam evaluate photos/                  which method's maps to trust, measured
      gradcam recommend photos/                 the best method, score and layer for a model
      gradcam run photo.jpg --model resnet50    another model
      gradcam layers resnet50                   where in a model one can look
      gradcam inspect activations photo.jpg     inside it: trace, features, activations, gradients
      gradcam methods                           what there is to choose from
      gradcam models                            which models can be named

    Set GRADCAM_TRACEBACK=1 to see where in the program an error arose.
    """


def main() -> NoReturn:
    """Run the command and exit: 0 all done, 1 something could not be done, 2 wrong usage, 128 and the number of a signal."""
    color = _colour()
    try:
        with heeding_signals():
            make_streams_safe()
            settle_warnings()
            settle_process()
            status = cli.main(prog_name="gradcam", standalone_mode=False, color=color) or 0
    except click.UsageError as error:
        show_usage_error(error)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except GradcamError as error:
        _show(error, str(error))
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort):
        sys.exit(130)
    except Terminated as error:
        sys.exit(error.status)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        _discard_output()
        sys.exit(1)
    except OSError as error:  # pictures have errors of their own
        if error.filename is not None:
            _show(error, f"{error.filename}: cannot be used ({error.strerror}).")
        else:
            _discard_output()
            click.echo(f"Error: standard output cannot be written ({error.strerror}).", err=True)
        sys.exit(1)
    except SystemExit:
        raise
    except BaseException as error:  # too little memory, or whatever a model's code raises
        _show(error, describe_unexpected(error))
        sys.exit(1)
    finally:
        heed_nothing()
    sys.exit(status)


def _discard_output() -> None:
    """So that what is left in the buffer does not fail once more when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _colour() -> bool | None:
    """No colours where the environment says so (no-color.org); otherwise click sees whether there is a terminal."""
    return False if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" else None


def _show(error: BaseException, reason: str) -> None:
    if os.environ.get("GRADCAM_TRACEBACK"):
        traceback.print_exception(error)
    click.echo(f"Error: {reason}", err=True)

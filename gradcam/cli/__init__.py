"""Define the command `gradcam`. Its subcommands are in the modules of this package."""

from __future__ import annotations

import os
import sys
import traceback
from typing import NoReturn

import click

from gradcam.cli._commands import SETTINGS, Group, show_usage_error, show_version, store_verbose
from gradcam.cli._process import configure_process
from gradcam.cli._terminal import (
    TerminationSignal,
    configure_warnings,
    handle_signals,
    make_streams_safe,
    restore_default_signals,
)
from gradcam.errors import GradcamError, describe_unexpected


@click.group(
    cls=Group,
    context_settings=SETTINGS,
    has_plugins=True,
    places={
        "run": ("gradcam.cli.run:run_command", "Explain images: write an overlay for each."),
        "page": ("gradcam.cli.page:page_command", "Write an interactive HTML page with the heatmaps of every class."),
        "ui": ("gradcam.cli.ui:ui_command", "Explain images interactively in the browser."),
        "batch": ("gradcam.cli.batch:batch_command", "Explain a folder of any size, and resume an interrupted run."),
        "report": ("gradcam.cli.batch:report_command", "Write an HTML gallery of the results of a batch."),
        "compare": ("gradcam.cli.run:compare_command", "Compare methods, layers and classes side by side."),
        "check": ("gradcam.cli.check:check_command", "Test whether a heatmap can be trusted."),
        "diff": ("gradcam.cli.diff:diff_command", "Compare the heatmaps of two models or checkpoints."),
        "audit": ("gradcam.cli.audit:audit_command", "Find shortcuts, such as watermarks, that a model has learnt."),
        "evaluate": ("gradcam.cli.evaluate:evaluate_command", "Evaluate methods with metrics, on your own images."),
        "recommend": ("gradcam.cli.recommend:recommend_command", "Find the best method, score and layer for a model."),
        "layers": ("gradcam.cli.layers:layers_command", "List the layers of a model, and mark possible target layers."),
        "inspect": (
            "gradcam.cli.inspect:inspect_group",
            "Inspect a model: layer calls, features, activations, gradients.",
        ),
        "methods": ("gradcam.cli.methods:methods_command", "List the methods and their cost."),
        "models": ("gradcam.cli.models:models_command", "List the models."),
    },
)
@click.option("--version", is_flag=True, expose_value=False, callback=show_version, help="Show the version and exit.")
@click.option(
    "--verbose",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=store_verbose,
    help="With --version: show the versions of Python, PyTorch and other libraries, and the devices.",
)
def cli() -> None:
    """See where a vision model looks.

    `gradcam COMMAND -h` shows the most used options of a command, and `gradcam COMMAND --help` explains all of them. Set
    GRADCAM_TRACEBACK=1 to see the Python traceback of an error.
    """


def main() -> NoReturn:
    """Run the command and exit. Status 0: success; 1: failure; 2: wrong usage; 128 + N: ended by signal N."""
    try:
        with handle_signals():
            make_streams_safe()
            configure_warnings()
            configure_process()
            status = cli.main(prog_name="gradcam", standalone_mode=False, color=_colour()) or 0
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
    except TerminationSignal as error:
        sys.exit(error.status)
    except BrokenPipeError:  # The reader of a pipe, such as `head`, has ended.
        _discard_output()
        sys.exit(1)
    except OSError as error:  # Errors of single images are reported earlier.
        if error.filename is not None:
            _show(error, f"{error.filename}: cannot be used ({error.strerror}).")
        else:
            _discard_output()
            click.echo(f"Error: cannot write to standard output ({error.strerror}).", err=True)
        sys.exit(1)
    except SystemExit:
        raise
    except BaseException as error:  # MemoryError, or any error of a custom model
        _show(error, describe_unexpected(error))
        sys.exit(1)
    finally:
        restore_default_signals()
    sys.exit(status)


def _discard_output() -> None:
    """Redirect standard output to the null device, so that flushing the buffer at exit does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _colour() -> bool | None:
    """Return False if the environment forbids colours (no-color.org). Otherwise, return None, and click decides."""
    return False if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" else None


def _show(error: BaseException, reason: str) -> None:
    if os.environ.get("GRADCAM_TRACEBACK"):
        traceback.print_exception(error)
    click.echo(f"Error: {reason}", err=True)

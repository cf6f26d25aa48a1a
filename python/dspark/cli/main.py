"""Turns the command line into one command, and whatever happens into an exit code.

Nothing here imports torch: `dspark --help` answers at once.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

from dspark import __version__
from dspark.cli import (
    audit,
    bench,
    calibrate,
    chat,
    evaluate,
    export,
    generate,
    inspect,
    kernels,
    profile,
    train,
)
from dspark.cli.remarks import one_line_each
from dspark.cli.show import print_json, say
from dspark.cli.streams import discard, prepare_output, write
from dspark.errors import ConfigError, DSparkError

ERROR, INTERRUPTED, BROKEN_PIPE, TERMINATED = 2, 130, 141, 143
"""Exit codes; the last three are what a shell reports for a process ended by SIGINT, SIGPIPE or SIGTERM."""

_COMMANDS = {
    "generate": generate,
    "chat": chat,
    "inspect": inspect,
    "export": export,
    "audit": audit,
    "calibrate": calibrate,
    "evaluate": evaluate,
    "profile": profile,
    "bench": bench,
    "kernels": kernels,
    "train": train,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `dspark` with these arguments (default: the process's own) and returns its exit code.

    Errors give one line on standard error and code 2, with `--json` also an object on standard output.
    `--help` and `--version` raise `SystemExit`, as argparse does.
    """
    if argv is None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)
    arguments = sys.argv[1:] if argv is None else list(argv)
    before_rest = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return guarded(lambda: _run(arguments), as_json="--json" in before_rest)


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does, so that what took an hour to measure is shown. Commands
    that a shell starts in the background ignore Ctrl-C."""


def _terminate(number: int, frame: object) -> NoReturn:
    raise _Terminated


def _run(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    with one_line_each():
        code: int = options.run(options)
    return code


def guarded(action: Callable[[], int], *, as_json: bool = False) -> int:
    """The exit code of `action`, whatever it raises; see `main`."""
    try:
        return _outcome(action, as_json)
    except KeyboardInterrupt as ended:
        return TERMINATED if isinstance(ended, _Terminated) else INTERRUPTED
    except BrokenPipeError:
        discard(sys.stdout)
        return BROKEN_PIPE


def _outcome(action: Callable[[], int], as_json: bool) -> int:
    try:
        prepare_output()
        return _flushed(action)
    except BrokenPipeError:
        raise
    except DSparkError as error:
        return _fail(error.to_json(), as_json)
    except Exception as error:
        if os.environ.get("DSPARK_TRACEBACK"):
            raise
        hint = "unexpected; DSPARK_TRACEBACK=1 shows where"
        return _fail({"type": type(error).__name__, "message": f"{error} ({hint})"}, as_json)


def _flushed(action: Callable[[], int]) -> int:
    """Flushes what was printed here, where a full and a closed output can still be told apart."""
    try:
        code = action()
    except SystemExit:  # after --help
        write("")
        raise
    write("")
    return code


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing the usage and exiting, so that all errors are handled in one place."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def _print_message(self, message: str, file: object = None) -> None:
        """Prints help and version. argparse's own treats an output that cannot be written differently in each
        release."""
        write(message)


def _parser() -> argparse.ArgumentParser:
    # Abbreviated flags would change their meaning whenever a flag is added.
    parser = _Parser(
        prog="dspark", description="Lossless speculative decoding with DSpark drafts.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"dspark {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, module in _COMMANDS.items():
        command = commands.add_parser(
            name, help=module.HELP, description=module.__doc__, allow_abbrev=False, formatter_class=_Help
        )
        module.add_arguments(command)
        command.add_argument("--json", action="store_true", help="machine-readable output")
        command.set_defaults(run=module.run)
    return parser


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Descriptions as they are written, defaults where there are any."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default not in (None, False) else action.help


def _fail(error: dict[str, str], as_json: bool) -> int:
    say(f"{error['type']}: {' '.join(error['message'].split())}")
    with suppress(DSparkError):  # if standard output cannot be written, one line is enough
        if as_json:
            print_json({"error": error})
        else:
            write("")
    return ERROR

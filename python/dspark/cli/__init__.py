"""The command line: `dspark COMMAND`."""

from dspark.cli.main import main

__all__ = ["main"]

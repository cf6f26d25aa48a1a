"""The command line in this process, for the tests of it."""

import io
import json
from contextlib import redirect_stderr, redirect_stdout

from dspark.cli import main
from dspark.pretrained import resolve

PROMPT = "import os\n"
GREEDY = ("--temperature", "0", "--device", "cpu", "--dtype", "float32", "--policy", "fixed")
STEPS = ("dspark: starting torch", "dspark: loading")


def run(*arguments):
    """Runs `dspark` with these arguments: (exit code, standard output, standard error without progress)."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = main([str(argument) for argument in arguments])
    remarks = [line for line in err.getvalue().splitlines(keepends=True) if line.rstrip() not in STEPS]
    return code, out.getvalue(), "".join(remarks)


def generate(*arguments):
    """`dspark generate --json` at temperature 0 unless the arguments say otherwise: the object."""
    code, out, err = run("generate", *GREEDY, "--json", *arguments)
    assert code == 0 and err == "" and out.count("\n") == 1
    return json.loads(out)


def link_target(directory, without=()):
    """The embedded target in another directory, to change a file of it."""
    for file in resolve("tiny", "target").iterdir():
        if file.name not in without:
            (directory / file.name).symlink_to(file)


def talking_target(directory):
    """The embedded target with a chat template."""
    link_target(directory)
    template = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}# assistant:"
    (directory / "chat_template.jinja").write_text(template)
    return directory

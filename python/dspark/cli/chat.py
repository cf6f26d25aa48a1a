"""A conversation: one line of input is one message. /exit or Ctrl-D ends it, Ctrl-C cancels an answer.

Where standard input is no terminal, each of its lines is a message; --json prints one object per answer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dspark.cli.options import (
    add_pair_options,
    add_sampling_options,
    add_template_options,
    open_decoder,
    require_template,
    sampling_params,
    template_options,
)
from dspark.cli.show import print_json, print_stream, say, summary
from dspark.cli.streams import as_text, input_lines, remark, standard_input, write
from dspark.errors import DSparkError

if TYPE_CHECKING:
    from dspark.decoder import DSparkDecoder
    from dspark.sampling import SamplingParams

HELP = "talk with a model"

PROMPT = "> "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `dspark chat`."""
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    add_template_options(parser)
    add_pair_options(parser)
    add_sampling_options(parser)


def run(options: argparse.Namespace) -> int:
    """Runs `dspark chat`."""
    params = sampling_params(options)
    interactive = standard_input().isatty()
    # A file or a program that receives the answers expects nothing between them.
    aside = options.json or not sys.stdout.isatty()
    opening = [{"role": "system", "content": options.system}] if options.system else []
    with open_decoder(options) as decoder:
        require_template(decoder)
        talk = _Conversation(decoder, params, opening, template_options(options), options.json)
        for line in _typed_lines(aside) if interactive else input_lines():
            message = line.rstrip("\n")
            if message == "/exit":
                break
            if not message.strip():
                continue
            try:
                talk.answer(message)
            except DSparkError as error:
                if not interactive:
                    raise
                say(str(error))
            except KeyboardInterrupt:
                # The first Ctrl-C ends the answer; the next one, at the prompt, ends the command.
                if not interactive:
                    raise
                say("cancelled")
    return 0


class _Conversation:
    """The messages so far; an exchange is added once there is an answer, or a part of one that was shown."""

    def __init__(
        self,
        decoder: DSparkDecoder,
        params: SamplingParams,
        opening: list[dict[str, str]],
        template: dict[str, Any],
        as_json: bool,
    ) -> None:
        self._decoder, self._params, self._as_json, self._template = decoder, params, as_json, template
        self._messages = opening

    def answer(self, message: str) -> None:
        """Answers one message of the user on standard output."""
        asked = [*self._messages, {"role": "user", "content": message}]
        if self._as_json:
            result = self._decoder.chat(asked, self._params, **self._template)
            print_json(result.to_json())
            self._messages = [*asked, {"role": "assistant", "content": result.text}]
            return
        prompt = self._decoder.render_chat(asked, **self._template)
        shown: list[str] = []
        try:
            result = print_stream(self._decoder.stream(prompt, self._params), shown)
        finally:
            if shown:
                self._messages = [*asked, {"role": "assistant", "content": "".join(shown)}]
        say(summary(result))


def _typed_lines(aside: bool) -> Iterator[str]:
    """What the user types, until Ctrl-D. `aside`: nothing but answers goes to standard output."""
    with suppress(ImportError):  # not on every platform
        import readline  # noqa: F401 - its import alone gives `input` line editing and a history
    while True:
        if aside:
            remark(PROMPT)
        try:
            with as_text():
                line = input("" if aside else PROMPT)
        except EOFError:
            (remark if aside else write)("\n")
            return
        yield line

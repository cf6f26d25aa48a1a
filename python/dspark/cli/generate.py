"""Generates text from a prompt: streams it, or prints one JSON object with --json."""

from __future__ import annotations

import argparse
from typing import Any

from dspark.cli.options import (
    add_pair_options,
    add_sampling_options,
    add_template_options,
    open_decoder,
    require_template,
    sampling_params,
    template_options,
    token_ids,
)
from dspark.cli.show import print_json, print_stream, say, summary, write_text
from dspark.cli.streams import read_input
from dspark.errors import RequestError

HELP = "generate text from a prompt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `dspark generate`."""
    parser.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="the text to continue; - reads standard input"
    )
    parser.add_argument(
        "--token-ids", type=token_ids, metavar="1,2,3", help="a tokenised prompt instead of PROMPT"
    )
    parser.add_argument(
        "--chat", action="store_true", help="treat PROMPT as a user message: apply the chat template"
    )
    add_template_options(parser)
    parser.add_argument("--n", type=int, metavar="N", help="samples to draw; --json prints several as a list")
    add_pair_options(parser)
    add_sampling_options(parser)


def run(options: argparse.Namespace) -> int:
    """Runs `dspark generate`."""
    params, template = sampling_params(options), template_options(options)
    prompt = _prompt(options)
    with open_decoder(options) as decoder:
        if options.chat:
            require_template(decoder)
            prompt = decoder.render_chat([{"role": "user", "content": prompt}], **template)
        if params.n == 1 and not options.json:
            say(summary(print_stream(decoder.stream(prompt, params))))
            return 0
        outcome: Any = decoder.generate(prompt, params)
    if options.json:
        print_json([r.to_json() for r in outcome] if isinstance(outcome, list) else outcome.to_json())
        return 0
    for number, result in enumerate(outcome, 1):
        say(f"sample {number} of {len(outcome)}")
        write_text(result.text + "\n")
        say(summary(result))
    return 0


def _prompt(options: argparse.Namespace) -> str | list[int]:
    given: str | None = options.prompt
    ids: list[int] | None = options.token_ids
    if given is not None and ids is None:
        return read_input() if given == "-" else given
    if ids is not None and given is None:
        if options.chat:
            raise RequestError("--chat needs a PROMPT: the chat template does not apply to --token-ids")
        if not ids:
            raise RequestError("the prompt is empty: --token-ids needs at least one token id")
        return ids
    raise RequestError("give either PROMPT or --token-ids")

"""Flags that several commands share, and what they mean to the decoder."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from dspark.cli.show import Progress
from dspark.errors import ConfigError, RequestError
from dspark.paths import expanded, is_directory
from dspark.sampling import SamplingParams

if TYPE_CHECKING:
    from dspark.decoder import DSparkDecoder
    from dspark.serve.models import Models
    from dspark.serve.options import Options

_DRAFT_OF = {"tiny": "tiny-draft", "smollm2": "smollm2-draft"}
"""The default drafts of built-in targets."""

_DECODER_OPTIONS = (
    "policy",
    "confidence_threshold",
    "block_size",
    "markov_candidates",
    "acceptance",
    "max_model_len",
    "max_batch_size",
)


def add_pair_options(parser: argparse.ArgumentParser) -> None:
    """The flags that say which models, where, and how they work together."""
    rounds = add_model_options(parser)
    rounds.add_argument(
        "--policy",
        default="throughput",
        help="how many drafted tokens are verified: throughput, fixed, threshold",
    )
    rounds.add_argument(
        "--confidence-threshold",
        type=float,
        metavar="C",
        help="for policy threshold: stop drafting before the first confidence below C; 0 never stops",
    )


def add_model_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Adds the same flags except those of the policy; returns the group of flags about rounds."""
    pair = parser.add_argument_group("models")
    pair.add_argument(
        "--target",
        default="tiny",
        metavar="DIR",
        help="the model to decode with: a directory, a built-in name or a Hub id",
    )
    pair.add_argument(
        "--draft", metavar="DIR", help="its draft (default: the one that goes with a built-in target)"
    )
    pair.add_argument("--no-draft", action="store_true", help="use the target alone, on the same engine")
    pair.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    pair.add_argument(
        "--dtype", default="auto", help="auto (the checkpoint's), float32, float16, bfloat16 or float64"
    )
    rounds = parser.add_argument_group("rounds")
    rounds.add_argument("--block-size", type=int, metavar="N", help="tokens to draft per round at most")
    rounds.add_argument("--acceptance", default="rejection", help="rejection, block or coupled")
    rounds.add_argument(
        "--markov-candidates", type=int, metavar="M", help="draft among the M likeliest tokens only"
    )
    rounds.add_argument("--max-model-len", type=int, metavar="N", help="positions per request at most")
    return rounds


def draft_of(options: argparse.Namespace) -> str | None:
    """The draft that was asked for; `None` with `--no-draft`.

    If none is known, raises `CheckpointError` if there is no such target either, else `ConfigError`.
    """
    if options.no_draft:
        return None
    draft: str | None = options.draft or _DRAFT_OF.get(options.target)
    if draft is None:
        from dspark.pretrained import is_hub_id, resolve

        if not is_hub_id(options.target):  # nothing is downloaded just to raise an error
            resolve(options.target, "target")
        here = "" if is_directory(expanded(options.target, "target")) else ", which is not a directory here"
        raise ConfigError(
            f"no draft is known for the target {options.target!r}{here}: give --draft DIR, or --no-draft"
        )
    return draft


def load_models(options: argparse.Namespace, progress: Progress) -> Models:
    """Loads the pair that the flags name."""
    progress("starting torch", 0, 1)
    from dspark.serve.models import Models

    models = Models.load(
        options.target,
        draft_of(options),
        device=options.device,
        dtype=options.dtype,
        block_size=options.block_size,
        progress=progress.loading,
    )
    progress.clear()
    return models


def decoder_options(options: argparse.Namespace) -> Options:
    """The decoder's options that the flags ask for."""
    from dspark.serve.options import Options

    return Options(**{name: getattr(options, name) for name in _DECODER_OPTIONS if hasattr(options, name)})


def open_decoder(options: argparse.Namespace) -> DSparkDecoder:
    """The pair that the flags name, ready to generate."""
    from dspark.decoder import DSparkDecoder

    progress = Progress(silent=options.json)
    return DSparkDecoder(lambda: load_models(options, progress), decoder_options(options))


def add_template_options(parser: argparse._ActionsContainer) -> None:
    """The flag for keywords of the chat template."""
    parser.add_argument(
        "--template-option",
        type=_template_option,
        action="append",
        metavar="NAME=VALUE",
        help="pass a keyword to the target's chat template, such as enable_thinking=false; VALUE is read as "
        "JSON, else as a string; may be repeated; keywords that the template does not read have no effect",
    )


def template_options(options: argparse.Namespace) -> dict[str, Any]:
    """The keywords that the flags give; if one is given twice, the last counts. `RequestError` if the command
    has a flag `--chat` and it is missing."""
    given = dict(options.template_option or [])
    if given and not getattr(options, "chat", True):
        raise RequestError("--template-option is for a chat template: give --chat too")
    return given


def _template_option(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    if not sign or not name.isidentifier() or name in ("self", "messages", "tools"):
        raise argparse.ArgumentTypeError(f"expected a keyword like enable_thinking=false, found {text!r}")
    if value in ("True", "False", "None"):  # as texts they would all be true
        instead = {"True": "true", "False": "false", "None": "null"}[value]
        raise argparse.ArgumentTypeError(f"the value is read as JSON: write {name}={instead}, not {value}")
    try:
        return name, json.loads(value, parse_constant=_refuse)
    except ValueError:
        return name, value


def _refuse(constant: str) -> None:
    """Rejects `NaN` and `Infinity`, which Python's JSON would read."""
    raise ValueError(constant)


def require_template(decoder: DSparkDecoder) -> None:
    """Raises `RequestError` if the target has no chat template."""
    models = decoder.models
    if not models.require_tokenizer().has_chat_template:
        raise RequestError(
            f"{models.paths[0]} has no chat template: give a plain prompt to dspark generate, "
            "or take a target that has one, like --target smollm2"
        )


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """The flags that say how tokens are drawn and where a request ends."""
    group = parser.add_argument_group(
        "sampling", "Defaults come from the target's generation_config.json; what it lacks has no effect."
    )
    for flag, kind, meaning in (
        ("--max-tokens", int, "maximum number of tokens to generate (default: up to the context window)"),
        ("--min-tokens", int, "generate at least this many tokens"),
        ("--temperature", float, "0 is greedy"),
        ("--top-k", int, "keep the K most likely tokens"),
        ("--top-p", float, "keep the most likely tokens up to this total probability"),
        ("--min-p", float, "keep tokens with at least this share of the largest probability"),
        ("--repetition-penalty", float, "for tokens that are in the prompt or the output"),
        ("--presence-penalty", float, "for tokens that are in the output"),
        ("--frequency-penalty", float, "for each time that a token is in the output"),
        ("--seed", int, "a number from 0 to 2^64 - 1 (default: a new one each time)"),
        ("--logprobs", int, "report this many alternatives per token (in --json)"),
    ):
        group.add_argument(flag, type=kind, metavar=flag.split("-")[-1][0].upper(), help=meaning)
    group.add_argument("--stop", action="append", metavar="TEXT", help="end at this text; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", help="do not end at the model's end token")


_SAMPLING = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "logprobs",
    "stop",
    "n",
)


def sampling_params(options: argparse.Namespace) -> SamplingParams:
    """The parameters that the flags ask for; those not given keep their defaults."""
    given = {name: getattr(options, name, None) for name in _SAMPLING}
    known = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(ignore_eos=options.ignore_eos, **known)


def token_ids(text: str) -> list[int]:
    """`1,2,3` as token ids, for argparse."""
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected token ids like 1,2,3, found {text!r}") from None

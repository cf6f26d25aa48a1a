"""`DSparkDecoder`: what a service embeds."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from numbers import Integral
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Self, overload

from dspark import _core
from dspark.devices import parse_device
from dspark.errors import CapacityError, DSparkError, RequestError, shown
from dspark.result import GenerationResult
from dspark.sampling import SamplingParams
from dspark.serve.calibration import InForce, in_force
from dspark.serve.costs import CostSource, obtain
from dspark.serve.engine import EngineThread
from dspark.serve.models import Models
from dspark.serve.options import PAGE, Options
from dspark.serve.request import Submission
from dspark.serve.streams import AsyncPieceStream, PieceStream
from dspark.serve.together import run_together

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class DSparkDecoder:
    """Generates text from a target model, speculatively where there is a draft, with the target's own law.

    Make one with `from_pretrained`. It holds one engine on a thread of its own; every method may be
    called from any thread. Use it as a context manager or call `close`.
    """

    def __init__(self, load: Callable[[], Models], options: Options) -> None:
        """`load` gives the models; it is called on the engine's thread, and what it raises is raised here."""

        found: list[tuple[InForce, CostSource | None, Options]] = []

        def make() -> tuple[Models, _core.Engine]:
            models = load()
            calibration = in_force(options, models)
            costs = obtain(models, options)
            # Once: how much memory is free changes.
            settled = replace(options, max_kv_tokens=options.kv_tokens(models))
            found.append((calibration, costs, settled))
            table = None if costs is None else costs.table
            return models, settled.engine(models, table, calibration.calibrations)

        self._engine = EngineThread(make)
        self._calibration, self._costs, self._options = found[0]
        self._models = self._engine.models

    @classmethod
    def from_pretrained(
        cls,
        target: str | PathLike[str],
        draft: str | PathLike[str] | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        policy: str = "throughput",
        confidence_threshold: float | None = None,
        cost_table: _core.CostTable | None = None,
        budget_lag: int | None = None,
        calibration: _core.Calibration | str | PathLike[str] | None = None,
        block_size: int | None = None,
        markov_candidates: int | None = None,
        acceptance: str = "rejection",
        max_batch_size: int = 32,
        max_model_len: int | None = None,
        max_kv_tokens: int | None = None,
        prefill_chunk_size: int = 512,
        max_queue_size: int = 1024,
        progress: Callable[[int, int], None] | None = None,
    ) -> Self:
        """Loads a target and, unless `draft` is `None`, a draft for it.

        `target` and `draft` are directories in the Hugging Face layout, names that the package knows, or
        Hub ids (with the extra `dspark[hub]`). Without a draft the same engine decodes plainly.

        Args:
            device: "auto", "cpu" or "cuda".
            dtype: "auto" (the checkpoint's), "float32", "float16", "bfloat16" or "float64".
            policy: "throughput" drafts and verifies what raises the expected tokens per second, "fixed"
                verifies all that was drafted, "threshold" stops before the first confidence below
                `confidence_threshold`.
            cost_table: what "throughput" plans by. Without one, and with a draft, passes are timed at the
                start: about two dozen, a second where they are fast. The times are kept on disk.
            budget_lag: where text hangs on what is drawn (rules "rejection" and "block" above temperature 0)
                "throughput" may not look ahead: it walks through this round's drafts while they pay (the
                paper's Algorithm 1). With a lag it verifies as many tokens as would have been best for the
                confidences of so many rounds ago (its section 5.2).
            calibration: of the confidence head, one for every request or the path of a file that
                `dspark calibrate` wrote. Without one, "throughput" takes the draft's own `calibration.json`
                if there is one; the other policies take the head's own confidences.
            block_size: tokens to draft per round at most.
            markov_candidates: restricts each step of the Markov chain to that many candidates.
            acceptance: "rejection", "block" or "coupled".
            max_batch_size: requests that run at once.
            max_model_len: the context window, in tokens.
            max_kv_tokens: positions in the caches of running requests and kept prefixes. A request is refused
                only if it would not fit by itself; under pressure the youngest gives up its caches meanwhile.
                By default 131,072 or two windows, but not more than a quarter of the free memory holds (half
                of a GPU's), and at least one window; `info()` has the number and `kv_bytes_per_token`.
            prefill_chunk_size: prompt tokens that one pass runs before the others go on.
            max_queue_size: requests that may wait for a place; one more raises `QueueFullError` at once.
            progress: called with bytes read so far and in all, for each model.

        Raises `CheckpointError` for a model that cannot be loaded and `ConfigError` for options that
        contradict each other or the models.
        """
        options = Options(
            policy=policy,
            confidence_threshold=confidence_threshold,
            cost_table=cost_table,
            budget_lag=budget_lag,
            calibration=calibration,
            block_size=block_size,
            markov_candidates=markov_candidates,
            acceptance=acceptance,
            max_batch_size=max_batch_size,
            max_model_len=max_model_len,
            max_kv_tokens=max_kv_tokens,
            prefill_chunk_size=prefill_chunk_size,
            max_queue_size=max_queue_size,
        )
        load = partial(
            Models.load,
            target,
            draft,
            device=str(parse_device(device)),  # here: the engine's thread has a current GPU of its own
            dtype=dtype,
            block_size=options.block_size,
            progress=progress,
        )
        return cls(load, options)

    @property
    def models(self) -> Models:
        """What was loaded: target, draft, tokenizer. They belong to the engine while it runs."""
        return self._models

    @property
    def state(self) -> Literal["running", "closed", "failed", "forked"]:
        """ "running" while requests are served, "closed" once `close` was called; "failed" if the engine has
        ended by itself: that is a bug, the traceback is on standard error, and only a new decoder helps;
        "forked" in a process that was forked off after the decoder was made: threads do not come along."""
        return self._engine.state

    # A list of ints is one tokenised prompt; a list of anything else is a list of prompts.
    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str to the type system
        self, prompts: str, params: SamplingParams | None = None
    ) -> GenerationResult: ...
    @overload
    def generate(self, prompts: Sequence[int], params: SamplingParams | None = None) -> GenerationResult: ...
    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[GenerationResult]: ...
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Any:
        """Generates from one prompt (text or token ids) or from a list of them, as one ragged batch.

        One prompt gives one result, a list a list of results in its order; with `n` > 1 each prompt gives
        a list of n results (which the types above leave out: they depend on a value). `params` may be a list,
        one for each prompt.

        Alone, a bad prompt or a failure raises: `RequestError`, `CapacityError`, `NumericsError`, or another
        `DSparkError` where the models or a pass of them failed. In a list it becomes a result with
        finish_reason "error" and `.error`, and the others go on. Ctrl-C cancels the call's requests.

        Where the queue is full, `QueueFullError` is raised at once. Prompts of a list, and samples, that find
        it full while others of the call run or wait are submitted as those end: a list may be longer than the
        queue. A `timeout` counts from the call.
        """
        called = time.monotonic()
        prompts = _as_list(prompts)
        if _is_one_prompt(prompts):
            return self._generate_one(prompts, _one(params), called)
        each = _one_each(params, len(prompts))
        return self._generate_list(list(zip(prompts, each, strict=True)), called)

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_options: Any,
    ) -> GenerationResult:
        """Generates the answer to a conversation: `[{"role": "user", "content": "..."}, ...]`.

        The target's chat template renders it, with `tools` and the template's own options
        (`enable_thinking=False`). Raises `RequestError` without a template or if it refuses the messages, and
        what `generate` raises for a prompt alone. With `n` > 1 the answer is a list, as there.
        """
        called = time.monotonic()
        prompt = self.render_chat(messages, tools=tools, **template_options)
        result: GenerationResult = self._generate_one(prompt, _one(params), called)
        return result

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_options: Any,
    ) -> list[int]:
        """The token ids that `chat` generates from; for `stream` and `astream`."""
        return self._models.require_tokenizer().render_chat(messages, tools=tools, **template_options)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> PieceStream:
        """Yields one piece per round: `.text`, `.token_ids`; the last one has `.result`.

        The request starts with the call. Closing or dropping the iterator cancels it. Raises as
        `generate` does for a prompt alone; `n` must be 1.
        """
        return PieceStream(self._engine, self._submission(prompt, _one_sample(params), time.monotonic()))

    def astream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncPieceStream:
        """`stream` on the running asyncio event loop: `async for piece in decoder.astream(...)`.

        The request starts with the call, which raises at once what can be said at once. Closing (`aclose`)
        or dropping the iterator cancels the request, and so does cancelling the task that waits for a piece.
        """
        called = time.monotonic()
        return AsyncPieceStream(self._engine, self._submission(prompt, _one_sample(params), called))

    def info(self) -> dict[str, Any]:
        """What runs where and why: models, devices, attention, policy, and what is switched off.

        The options that are in force are there too, as they were given or came out (`max_batch_size`,
        `max_model_len`, `max_kv_tokens`, `prefill_chunk_size`, `max_queue_size`, ...).
        """
        costs = None if self._costs is None else self._costs.source
        return {
            **self._models.info(),
            **self._options.info(self._models),
            "calibration": self._calibration.info(),
            "cost_table": costs,
        }

    def stats(self) -> dict[str, Any]:
        """What the engine does now and what it has done since its start; cheap enough for every second.

        Requests now: `queued` (those wait, also the ones that gave up their caches for others), `running`
        (of these `prefilling`: the prompt is not through). Both 0: nothing is left to do.
        Requests so far: `finished` (however they ended), `refused` (no room in the queue, or too large for
        the cache; each attempt of a list that waits counts), `preemptions` (one gave up its caches).
        Pages of 16 positions: `pages` with `total`, `used`, and of these `kept` (prefixes of finished
        requests, given up when somebody needs the room).
        Tokens: `tokens` generated, `drafted`, `verified` by the target, `accepted`, `bad_draft_rows`
        (nothing could be drawn from them: a NaN, or no candidate left); `reused_tokens` of
        prompts, taken from caches; `close_decisions` of a GPU's kernels, which hung on rounding.
        Rounds: `rounds` (a batch of three counts three), `passes` of the target over a batch, prefills apart,
        `skipped_slower` and `skipped_failing` (rounds without a draft: it would have cost more than it gave,
        or the request's blocks kept failing), `skipped_broken` (rounds without a draft because the draft had
        failed; `draft_failures` counts these, `draft_failure` is the first one's text or `None`),
        `verify_budget` (drafted tokens verified per round, the mean),
        `acceptance_by_position` (how often each place of a block was kept if the one before it was).
        Seconds: `prefill_s`, `draft_s` (draft passes and context updates, of this `feed_s` in the latter),
        `chain_s` (Markov chains and confidences), `verify_s` (target passes), `accept_s`, `round_s` (whole
        rounds, all of these included).
        Latencies of the last minute or two, in seconds: `{"p50", "p90", "p99"}`, `None` where there was none:
        `time_to_first_token_s` from the call, `inter_token_s` (a round's gap divided by its tokens).
        """
        self._engine.check_process()
        return dict(self._engine.core.stats())

    def close(self) -> None:
        """Ends the engine; requests that run are aborted. Calling it twice is harmless."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # `called`: when the call began, by `time.monotonic`.
    def _generate_one(self, prompt: Any, params: SamplingParams | None, called: float) -> Any:
        results = run_together(self._engine, self._submissions(prompt, params, called), raises=True)
        for result in results:
            if result.error is not None:
                raise result.error
        return results if _samples(params) > 1 else results[0]

    def _generate_list(self, requests: list[tuple[Any, SamplingParams | None]], called: float) -> list[Any]:
        jobs = (job for prompt, params in requests for job in self._jobs(prompt, params, called))
        results = iter(run_together(self._engine, jobs))
        each = [[next(results) for _ in range(_samples(params))] for _, params in requests]
        return [
            samples if _samples(params) > 1 else samples[0]
            for samples, (_, params) in zip(each, requests, strict=True)
        ]

    def _jobs(
        self, prompt: Any, params: SamplingParams | None, called: float
    ) -> Sequence[Submission | GenerationResult]:
        try:
            return self._submissions(prompt, params, called)
        except DSparkError as error:
            bad = Submission((), _DEFAULT, 0, 0, 0, (), None, self._models.speculation, called)
            return [replace(bad, sample=i).failed(error) for i in range(_samples(params))]

    def _submissions(self, prompt: Any, params: SamplingParams | None, called: float) -> list[Submission]:
        first = self._submission(prompt, params, called)
        return [replace(first, sample=i) for i in range(first.params.n)]

    def _submission(self, prompt: Any, params: SamplingParams | None, called: float) -> Submission:
        self._engine.check_process()
        if (state := self._engine.state) != "running":
            failed = "the decoder has failed: its engine has ended"
            raise CapacityError("the decoder is closed" if state == "closed" else failed)
        models = self._models
        params = (params or _DEFAULT).with_defaults(models.generation_config)
        params.check_vocabulary(models.target.config.vocab_size)
        window = self._options.window(models)
        if not isinstance(prompt, str):
            _check_length(prompt, window)  # before its ids are looked at one by one
        tokens = models.tokens(prompt)
        _check_length(tokens, window)
        if params.stop_strings and models.tokenizer is None:
            raise RequestError(
                "stop strings need the target's tokenizer, and it has none: use stop_token_ids"
            )
        room = window - len(tokens)
        wanted = self._most(tokens, room) if params.max_tokens is None else min(params.max_tokens, room)
        return Submission(
            prompt=tokens,
            params=params,
            seed=secrets.randbits(64) if params.seed is None else int(params.seed),  # JSON has no numpy
            sample=0,
            max_tokens=wanted,
            end_ids=() if params.ignore_eos else models.end_token_ids,
            tokenizer=models.tokenizer,
            speculation=models.speculation if params.speculative else "off: speculative=False",
            called=called,
        )

    def _most(self, prompt: Sequence[int], room: int) -> int:
        """Tokens of a request that asks for as many as there is room for: in the window, and in caches that
        are smaller. One whose prompt alone fills these is left to be refused."""
        if room == 0:
            return 0
        return max(1, min(room, self._options.kv_tokens(self._models) // PAGE * PAGE - len(prompt)))


_DEFAULT = SamplingParams()


def _check_length(tokens: Any, window: int) -> None:
    if isinstance(tokens, Sequence) and len(tokens) > window:
        raise CapacityError(f"the prompt has {len(tokens)} tokens, the context window {window}")


def _as_list(prompts: Any) -> Any:
    """An array or tensor of token ids as a list."""
    return prompts.tolist() if hasattr(prompts, "tolist") else prompts


def _is_one_prompt(prompts: Any) -> bool:
    if isinstance(prompts, str):
        return True
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray | memoryview):
        raise RequestError(f"a prompt is a string or a list of token ids, not {type(prompts).__name__}")
    return len(prompts) > 0 and isinstance(prompts[0], Integral)


def _one(params: Any, what: str = "a SamplingParams for one prompt") -> SamplingParams | None:
    if params is None or isinstance(params, SamplingParams):
        return params
    raise RequestError(f"params must be {what}, not {shown(params)}")


def _one_each(params: Any, count: int) -> list[SamplingParams | None]:
    if not isinstance(params, Sequence):
        return [_one(params, "a SamplingParams, or a list with one for each prompt")] * count
    if len(params) != count:
        raise RequestError(f"params has {len(params)} entries for {count} prompts")
    return [_one(each) for each in params]


def _one_sample(params: Any) -> SamplingParams | None:
    if _samples(_one(params)) != 1:
        raise RequestError(f"a stream has one sample, n = {params.n} was asked for")
    return _one(params)


def _samples(params: SamplingParams | None) -> int:
    return (params or _DEFAULT).n

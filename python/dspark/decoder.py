"""`DSparkDecoder`: what a service embeds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Self, overload

from dspark import _core
from dspark.devices import parse_device
from dspark.errors import CapacityError, DSparkError
from dspark.result import GenerationResult
from dspark.sampling import SamplingParams
from dspark.serve import arguments
from dspark.serve.calibration import InForce, in_force
from dspark.serve.costs import CostSource, obtain
from dspark.serve.engine import EngineThread
from dspark.serve.models import Models
from dspark.serve.options import Options
from dspark.serve.request import Submission
from dspark.serve.streams import AsyncPieceStream, PieceStream
from dspark.serve.submission import submission
from dspark.serve.together import run_together

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class DSparkDecoder:
    """Generates text from a target model, speculatively if there is a draft, with the target's distribution.

    Create one with `from_pretrained`. It runs one engine on its own thread; every method may be called from
    any thread. Use it as a context manager, or call `close`.
    """

    def __init__(self, load: Callable[[], Models], options: Options) -> None:
        """`load` returns the models; it is called on the engine's thread, and its errors are raised here."""

        found: list[tuple[InForce, CostSource | None, Options]] = []

        def make() -> tuple[Models, _core.Engine]:
            models = load()
            calibration = in_force(options, models)
            costs = obtain(models, options)
            # Computed once, because the amount of free memory changes.
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
        Hub ids (with the extra `hub`). Without a draft the same engine decodes plainly.

        Args:
            device: "auto", "cpu", "cuda" or "cuda:1".
            dtype: "auto" (the checkpoint's), "float32", "float16", "bfloat16" or "float64".
            policy: "throughput" drafts and verifies only what raises the expected tokens per second, "fixed"
                verifies every drafted token, "threshold" stops before the first token with a confidence
                below `confidence_threshold`.
            cost_table: what passes cost, for "throughput". Without one, and with a draft, about two dozen
                passes are timed at the start (a second where they are fast). The times are kept on disk.
            budget_lag: where the drawn tokens affect the text (rules "rejection" and "block" above
                temperature 0), "throughput" may not look ahead: it walks through this round's drafts while
                they pay (the paper's Algorithm 1). With a lag of N, it verifies as many tokens as would have
                been best for the confidences of N rounds ago (the paper's section 5.2).
            calibration: of the confidence head: one for every request, or the path of a file that
                `dspark calibrate` wrote. Without one, "throughput" uses the `calibration.json` next to the
                draft, if there is one; the other policies use the head's own confidences.
            block_size: the most tokens to draft per round.
            markov_candidates: restricts each step of the Markov chain to that many candidates.
            acceptance: "rejection", "block" or "coupled".
            max_batch_size: the most requests that run at once; more wait in the queue.
            max_model_len: the context window, in tokens.
            max_kv_tokens: the most positions in the caches of running requests and kept prefixes. A request
                is refused only if it would not fit by itself; under pressure the youngest one gives up its
                caches for a while. The default is 131,072 or two windows, whichever is more, reduced to what
                fits in a quarter of the free memory (half on a GPU), but never below one window; `info()`
                has the number and `kv_bytes_per_token`.
            prefill_chunk_size: prompt tokens to process before the other requests go on.
            max_queue_size: requests that may wait; one more raises `QueueFullError` at once.
            progress: called for each model with the bytes read so far and in total.

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
        ended by itself, which is a bug: the traceback is on standard error, and only a new decoder helps;
        "forked" in a process forked after the decoder was made, because threads do not survive a fork."""
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

        One prompt gives one result, a list of prompts a list of results in the same order. With `n` > 1 each
        prompt gives a list of n results (the types above do not show this: it depends on a value). `params`
        may be a list, with one entry for each prompt.

        With a single prompt, a bad prompt or a failure raises `RequestError`, `CapacityError`,
        `NumericsError`, or another `DSparkError` if a pass of the models failed. In a list, it becomes a
        result with finish_reason "error" and `.error`, and the others go on. Ctrl-C cancels the call's
        requests.

        If the queue is full, `QueueFullError` is raised at once. But while other prompts or samples of the
        same call run or wait, the rest is submitted as those end, so a list may be longer than the queue. A
        `timeout` counts from the call.
        """
        called = time.monotonic()
        prompts = arguments.as_list(prompts)
        if arguments.is_one_prompt(prompts):
            return self._generate_one(prompts, arguments.one(params), called)
        each = arguments.one_each(params, len(prompts))
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

        The target's chat template renders the messages, with `tools` and the template's own keywords, such
        as `enable_thinking=False`. Raises `RequestError` if there is no template or it refuses the messages,
        and whatever `generate` raises for a single prompt. With `n` > 1, this is a list as well.
        """
        called = time.monotonic()
        prompt = self.render_chat(messages, tools=tools, **template_options)
        result: GenerationResult = self._generate_one(prompt, arguments.one(params), called)
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
        called = time.monotonic()
        return PieceStream(self._engine, self._submission(prompt, arguments.one_sample(params), called))

    def astream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncPieceStream:
        """`stream` on the running asyncio event loop: `async for piece in decoder.astream(...)`.

        The request starts with the call, which raises at once if the request is refused. Closing (`aclose`)
        or dropping the iterator cancels the request, and so does cancelling the task that waits for a piece.
        """
        called = time.monotonic()
        return AsyncPieceStream(self._engine, self._submission(prompt, arguments.one_sample(params), called))

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
        """What the engine is doing now and has done since its start; cheap enough to call every second.

        Requests now: `queued` (waiting, including those that gave up their caches for others), `running`
        (of these `prefilling`: the prompt is not done yet). Both 0: nothing is left to do.
        Requests so far: `finished` (however they ended), `refused` (no room in the queue, or too large for
        the cache; each attempt of a waiting list counts), `preemptions` (a request gave up its caches).
        Pages of 16 positions: `pages` with `total`, `used`, and of these `kept` (prefixes of finished
        requests, dropped when their room is needed).
        Tokens: `tokens` generated, `drafted`, `verified` by the target, `accepted`; `bad_draft_rows`
        (no token could be drawn from them: a NaN, or no candidate left); `reused_tokens` of prompts, copied
        from caches; `close_decisions` of a GPU's kernels that rounding could have changed.
        Rounds: `rounds` (a batch of three counts three), `passes` of the target over a batch, prefills apart,
        `skipped_slower` and `skipped_failing` (rounds without a draft: it would have cost more than it gave,
        or the request's blocks kept failing), `skipped_broken` (rounds without a draft because the draft had
        failed), `draft_failures` (errors of the draft, and of target passes that succeed without drafted
        tokens; `draft_failure` is the first one's text or `None`),
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
        """Ends the engine; running and waiting requests are aborted. Calling it twice is harmless."""
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
        return results if arguments.samples(params) > 1 else results[0]

    def _generate_list(self, requests: list[tuple[Any, SamplingParams | None]], called: float) -> list[Any]:
        jobs = (job for prompt, params in requests for job in self._jobs(prompt, params, called))
        results = iter(run_together(self._engine, jobs))
        each = [[next(results) for _ in range(arguments.samples(params))] for _, params in requests]
        return [
            samples if arguments.samples(params) > 1 else samples[0]
            for samples, (_, params) in zip(each, requests, strict=True)
        ]

    def _jobs(
        self, prompt: Any, params: SamplingParams | None, called: float
    ) -> Sequence[Submission | GenerationResult]:
        try:
            return self._submissions(prompt, params, called)
        except DSparkError as error:
            bad = Submission((), arguments.DEFAULT, 0, 0, 0, (), None, self._models.speculation, called)
            return [replace(bad, sample=i).failed(error) for i in range(arguments.samples(params))]

    def _submissions(self, prompt: Any, params: SamplingParams | None, called: float) -> list[Submission]:
        first = self._submission(prompt, params, called)
        return [replace(first, sample=i) for i in range(first.params.n)]

    def _submission(self, prompt: Any, params: SamplingParams | None, called: float) -> Submission:
        self._engine.check_process()
        if (state := self._engine.state) != "running":
            failed = "the decoder has failed: its engine has ended"
            raise CapacityError("the decoder is closed" if state == "closed" else failed)
        return submission(self._models, self._options, prompt, params, called)

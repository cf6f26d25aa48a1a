"""Runs a grid: in every turn of a cell the modes get the same prompts, one after the other, on one engine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from dspark.bench.cells import PLAIN, SETTLE, Cell, Grid, predicted_seconds
from dspark.bench.clients import Usage, keep_busy
from dspark.calibrate.rollout import require_drafts
from dspark.decoder import DSparkDecoder
from dspark.durations import duration
from dspark.errors import ConfigError
from dspark.progress import Progress
from dspark.result import GenerationResult
from dspark.sampling import SamplingParams
from dspark.text.looping import is_looping


@dataclass(slots=True)
class ModeRuns:
    """What one mode did in a cell; one entry per turn, or totals over them."""

    speeds: list[float] = field(default_factory=list)
    """Tokens per second of the whole engine in decoding: in whole rounds without prefills, by the engine's
    clock. With prefills the order of modes would matter: a prompt that an earlier mode has left in the cache
    makes the next one's prefill cheaper."""
    user_speeds: list[float] = field(default_factory=list)
    """Tokens per second of a request after its first token, others' prefills included."""
    rounds: int = 0
    committed: int = 0
    verified: int = 0
    answers: int = 0
    """Those that reached their full length."""
    looping: int = 0

    def add(self, results: Sequence[GenerationResult], speed: float) -> None:
        """Counts one turn."""
        self.speeds.append(speed)
        tokens, seconds = 0, 0.0
        for result in results:
            first = result.timing.time_to_first_token_s
            if first is not None:
                tokens += len(result.token_ids) - 1
                seconds += result.timing.total_s - first
            self.rounds += len(result.rounds)
            self.committed += sum(each.committed for each in result.rounds)
            self.verified += sum(each.verified for each in result.rounds)
            if result.finish_reason == "length":
                self.answers += 1
                self.looping += is_looping(result.token_ids)
        self.user_speeds.append(tokens / seconds)

    @property
    def looping_share(self) -> float | None:
        """Share of `answers` that loop; `None` without any."""
        return self.looping / self.answers if self.answers else None


def prompt_of(number: int, prompts: int) -> int:
    """The index of the prompt that a request asks. Each lap through the prompts is shifted by one: timed
    requests come in steps, and an even step over an even number of prompts would leave half of them out."""
    return (number + number // prompts) % prompts


def timed_prompts(cell: Cell, turns: int, prompts: int) -> int:
    """The least number of different prompts that the timed requests of a cell ask."""
    starts = range(0, 2 * turns * cell.batch, 2 * cell.batch)
    return len({prompt_of(start + i, prompts) for start in starts for i in range(cell.batch)})


class Bench:
    """A decoder that is measured, with the prompts of each set."""

    def __init__(
        self,
        decoder: DSparkDecoder,
        grid: Grid,
        prompts: Mapping[str, Sequence[Sequence[int]]],
    ) -> None:
        """Raises `ConfigError` for modes that the pair does not have. `decoder` must plan by costs."""
        source = decoder._costs
        if source is None:
            raise ConfigError("a benchmark compares decoding with and without a draft: give --draft DIR")
        if "threshold" in grid.policies and not decoder.models.has_confidence:
            raise ConfigError(
                'policy "threshold" needs a draft with a confidence head, but this one has none: '
                "give --policies fixed throughput"
            )
        self._decoder, self._grid, self._prompts = decoder, grid, prompts
        block_size = int(decoder.info()["block_size"])
        mean = {name: sum(map(len, each)) / len(each) for name, each in prompts.items()}
        self._predicted = {
            cell: predicted_seconds(grid, cell, source.table, block_size, mean[cell.prompts])
            for cell in grid.cells()
        }
        self._spent: dict[Cell, float] = {}
        self._mode = "throughput"
        self._table = source.table

    def seconds_left(self) -> float:
        """Seconds that the remaining cells will take: by the cost table, corrected by how long the others
        took compared with it."""
        done = sum(self._predicted[cell] for cell in self._spent)
        pace = sum(self._spent.values()) / done if done else 1.0
        return pace * sum(seconds for cell, seconds in self._predicted.items() if cell not in self._spent)

    def run(self, progress: Progress) -> Iterator[tuple[Cell, dict[str, ModeRuns]]]:
        """Measures cell by cell."""
        total = len(self._predicted)
        for number, cell in enumerate(self._predicted):
            progress(f"about {duration(self.seconds_left())} left", number, total)
            started = time.perf_counter()
            runs = self._cell(cell)
            self._spent[cell] = time.perf_counter() - started
            yield cell, runs

    def _cell(self, cell: Cell) -> dict[str, ModeRuns]:
        modes, runs = self._grid.modes, {mode: ModeRuns() for mode in self._grid.modes}
        # Requests are numbered. Those that warm up have other prompts, so that the timed ones' are new.
        elsewhere = len(self._prompts[cell.prompts]) // 2
        for mode in modes:  # one-time costs are paid here
            self._switch(mode)
            self._ask(cell, mode, elsewhere, self._grid.tokens)
        for turn in range(self._grid.turns):
            first = turn % len(modes)
            first_request = 2 * turn * cell.batch  # those of a turn are followed by at most as many
            for mode in modes[first:] + modes[:first]:
                self._switch(mode)
                self._ask(cell, mode, first_request + elsewhere, self._grid.warm_tokens)
                runs[mode].add(*self._timed(cell, mode, first_request))
        return runs

    def _timed(self, cell: Cell, mode: str, first: int) -> tuple[list[GenerationResult], float]:
        """One timed run: its results, and its tokens per second. Raises what `require_drafts` does, also for
        earlier runs: rounds for which the draft failed are plain decoding by another name."""
        time.sleep(SETTLE)
        before = Usage.of(self._decoder)
        results = self._ask(cell, mode, first, self._grid.tokens)
        time.sleep(SETTLE)
        after = Usage.of(self._decoder)
        require_drafts(self._decoder)
        return results, (after.tokens - before.tokens) / (after.seconds - before.seconds)

    def _ask(self, cell: Cell, mode: str, first: int, tokens: int) -> list[GenerationResult]:
        """Runs requests from number `first` on, as many at once as the cell says, until there are `tokens`
        tokens for each of these, with the same prompts and seeds for every mode."""
        prompts = self._prompts[cell.prompts]

        def requests() -> Iterator[tuple[Sequence[int], SamplingParams]]:
            for number in count(first):
                yield (
                    prompts[prompt_of(number, len(prompts))],
                    SamplingParams(
                        max_tokens=tokens,
                        temperature=cell.temperature,
                        seed=number,
                        ignore_eos=True,
                        speculative=mode != PLAIN,
                    ),
                )

        # The first token of each comes from its prompt's pass.
        return keep_busy(self._decoder, requests(), cell.batch, cell.batch * (tokens - 1))

    def _switch(self, mode: str) -> None:
        """Gives the engine the mode's policy; plain decoding is asked for by the requests.

        Rounds of every policy correct the engine's cost table, but a service under "throughput" has only its
        own rounds: so that policy's table is put aside while others run. What the engine knows of drafts is
        learnt from rounds of "throughput" alone, and stays with it.
        """
        core = self._decoder._engine.core
        if self._mode == "throughput":
            self._table = core.cost_table() or self._table
        self._mode = mode
        core.set_policy(
            "fixed" if mode == PLAIN else mode,
            confidence_threshold=self._grid.threshold if mode == "threshold" else None,
            cost_table=self._table if mode == "throughput" else None,
        )

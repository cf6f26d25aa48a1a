"""Runs a grid: in every turn of a cell each mode in its turn gets the same prompts, on one engine."""

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
    """Tokens per second of the whole engine in decoding: of whole rounds less prefills, by the engine's
    clock. A prompt that an earlier mode has left in the cache would make this mode's prefill cheaper, and the
    order count."""
    user_speeds: list[float] = field(default_factory=list)
    """Tokens per second of a request behind its first token, prefills of others included."""
    rounds: int = 0
    committed: int = 0
    verified: int = 0
    answers: int = 0
    """Whole ones."""
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
        """Share of the whole answers that loop; `None` if none was whole."""
        return self.looping / self.answers if self.answers else None


def prompt_of(number: int, prompts: int) -> int:
    """The prompt that a request asks. From lap to lap they move on by one: timed requests come in steps, and
    an even step over an even number of prompts would leave half of them out."""
    return (number + number // prompts) % prompts


def timed_prompts(cell: Cell, turns: int, prompts: int) -> int:
    """How many different prompts the timed requests of a cell ask at least."""
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
        """Raises `ConfigError` for modes that the pair does not have. `decoder` plans by costs."""
        source = decoder._costs
        if source is None:
            raise ConfigError("a benchmark compares decoding with and without a draft: it needs one")
        if "threshold" in grid.policies and not decoder.models.has_confidence:
            raise ConfigError(
                'policy "threshold" needs a draft with a confidence head, and this one has none: '
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
        """What the cells that are not done will take, in seconds: by the cost table, corrected by what the
        others took against it."""
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
        # Requests are numbered. Those to warm up with have other prompts: the timed ones shall be new.
        elsewhere = len(self._prompts[cell.prompts]) // 2
        for mode in modes:  # whatever happens once happens here
            self._switch(mode)
            self._ask(cell, mode, elsewhere, self._grid.tokens)
        for turn in range(self._grid.turns):
            first = turn % len(modes)
            first_request = 2 * turn * cell.batch  # those of a turn are followed by as many at most
            for mode in modes[first:] + modes[:first]:
                self._switch(mode)
                self._ask(cell, mode, first_request + elsewhere, self._grid.warm_tokens)
                runs[mode].add(*self._timed(cell, mode, first_request))
        return runs

    def _timed(self, cell: Cell, mode: str, first: int) -> tuple[list[GenerationResult], float]:
        """One timed run: its results, and its tokens per second. Raises what `require_drafts` does, for what
        ran before, too: rounds without a failed draft would be plain decoding by another name."""
        time.sleep(SETTLE)
        before = Usage.of(self._decoder)
        results = self._ask(cell, mode, first, self._grid.tokens)
        time.sleep(SETTLE)
        after = Usage.of(self._decoder)
        require_drafts(self._decoder)
        return results, (after.tokens - before.tokens) / (after.seconds - before.seconds)

    def _ask(self, cell: Cell, mode: str, first: int, tokens: int) -> list[GenerationResult]:
        """Requests from number `first` on, as many at once as the cell says, until there are `tokens` tokens
        for each of them: the same prompts and seeds for every mode."""
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

        # The first token of each comes of its prompt.
        return keep_busy(self._decoder, requests(), cell.batch, cell.batch * (tokens - 1))

    def _switch(self, mode: str) -> None:
        """Gives the engine the mode's policy; plain decoding is a matter of the requests.

        The rounds of every policy keep the engine's cost table true. A service under "throughput" has only
        its own: so the table is put aside while others run. What is known of drafts is learnt from rounds of
        "throughput" alone, and stays with the engine.
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

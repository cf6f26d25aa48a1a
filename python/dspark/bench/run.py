"""Runs a grid: in every turn of a cell each mode in its turn gets the same prompts, on one engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dspark.bench.cells import PLAIN, SETTLE, Cell, Grid, predicted_seconds
from dspark.decoder import DSparkDecoder
from dspark.durations import duration
from dspark.errors import ConfigError
from dspark.result import GenerationResult
from dspark.sampling import SamplingParams
from dspark.text.looping import is_looping

Progress = Callable[[str, int, int], None]


@dataclass(slots=True)
class ModeRuns:
    """What one mode did in a cell; one entry per turn, or totals over them."""

    seconds: list[float] = field(default_factory=list)
    """Decoding: whole rounds less prefills, by the engine's clock. A prompt that an earlier mode has left in
    the cache would make this mode's prefill cheaper, and the order count."""
    wall_seconds: list[float] = field(default_factory=list)
    """From the first request to the last token, prefills included."""
    user_speeds: list[float] = field(default_factory=list)
    """Tokens per second of a request behind its first token, mean over the batch."""
    rounds: int = 0
    committed: int = 0
    verified: int = 0
    answers: int = 0
    looping: int = 0

    def add(self, results: Sequence[GenerationResult], seconds: float, wall: float) -> None:
        """Counts one turn."""
        self.seconds.append(seconds)
        self.wall_seconds.append(wall)
        speeds = []
        for result in results:
            first = result.timing.time_to_first_token_s or 0.0
            speeds.append((len(result.token_ids) - 1) / max(result.timing.total_s - first, 1e-9))
            self.rounds += len(result.rounds)
            self.committed += sum(each.committed for each in result.rounds)
            self.verified += sum(each.verified for each in result.rounds)
            self.answers += 1
            self.looping += is_looping(result.token_ids)
        self.user_speeds.append(sum(speeds) / len(speeds))


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
            self._generate(cell, mode, elsewhere, self._grid.tokens)
        for turn in range(self._grid.turns):
            first = turn % len(modes)
            for mode in modes[first:] + modes[:first]:
                self._switch(mode)
                self._generate(cell, mode, turn * cell.batch + elsewhere, self._grid.warm_tokens)
                runs[mode].add(*self._timed(cell, mode, turn * cell.batch))
        return runs

    def _timed(self, cell: Cell, mode: str, first: int) -> tuple[list[GenerationResult], float, float]:
        """One timed run: results, seconds of decoding, seconds in all."""
        time.sleep(SETTLE)
        before, started = self._decoder.stats(), time.perf_counter()
        results = self._generate(cell, mode, first, self._grid.tokens)
        wall = time.perf_counter() - started
        time.sleep(SETTLE)
        after = self._decoder.stats()
        spent = {name: after[name] - before[name] for name in ("round_s", "prefill_s")}
        return results, spent["round_s"] - spent["prefill_s"], wall

    def _generate(self, cell: Cell, mode: str, first: int, tokens: int) -> list[GenerationResult]:
        """A batch from request number `first` on: the same prompts and seeds for every mode."""
        prompts = self._prompts[cell.prompts]
        numbers = range(first, first + cell.batch)
        params = [
            SamplingParams(
                max_tokens=tokens,
                temperature=cell.temperature,
                seed=number,
                ignore_eos=True,
                speculative=mode != PLAIN,
            )
            for number in numbers
        ]
        results = self._decoder.generate([prompts[n % len(prompts)] for n in numbers], params)
        for result in results:
            if result.error is not None:
                raise result.error
        return results

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

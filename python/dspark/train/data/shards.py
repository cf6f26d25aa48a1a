"""Generated conversations on disk: shards written whole or not at all, never generated twice."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from dspark.durations import duration
from dspark.errors import CheckpointError
from dspark.files import sync, write_whole
from dspark.train.data.conversations import Conversation
from dspark.train.identity import difference, read_record
from dspark.train.report import Say

SETTINGS = "generation.json"
PER_SHARD = 64

Task = TypeVar("Task")


def shards_at_once(batch_size: int) -> int:
    """How many shards to make at once to keep `batch_size` places busy: one more than fill them, because a
    shard ends with its longest answers."""
    return 1 + -(-batch_size // PER_SHARD)


class Shards:
    """A directory of `answers-00000.safetensors`, ...: shard k has what the k-th `PER_SHARD` tasks gave."""

    def __init__(self, directory: Path, settings: dict[str, Any]) -> None:
        """`settings` is everything that decides what is generated.

        Raises:
            CheckpointError: the directory holds answers made with other settings, or does not say with which.
        """
        self.directory, self._settings = directory, settings
        said = directory / SETTINGS
        # Different settings matter only if something was generated already.
        self._begun = any(directory.glob("answers-*.safetensors"))
        if self._begun and (odd := difference(read_record(said, "answers"), settings)):
            raise CheckpointError(f"{said}: the data there was generated with {odd}: name another directory")

    def file(self, number: int) -> Path:
        """Where shard `number` is, or will be."""
        return self.directory / f"answers-{number:05d}.safetensors"

    def missing(self, tasks: int, rank: int = 0, size: int = 1) -> list[int]:
        """The shards of so many tasks that do not exist yet, or cannot be read, and that process `rank` of
        `size` has to make.

        Their numbers alone decide, so that processes that look at different times divide them alike.
        """
        return [n for n in range(rank, -(-tasks // PER_SHARD), size) if not _is_whole(self.file(n))]

    def fill(
        self,
        tasks: Sequence[Task],
        generate: Callable[[Sequence[Task]], list[Conversation]],
        say: Say,
        batch_size: int = 1,
        rank: int = 0,
        size: int = 1,
    ) -> None:
        """Generates this process's shards that are missing, with an estimate of the time left.

        Args:
            generate: makes the conversations of one shard; called from several threads.
            batch_size: tasks that keep `generate` busy if given at once; see `shards_at_once`.
        """
        left = self.missing(len(tasks), rank, size)
        if left and not self._begun:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_whole(self.directory / SETTINGS, json.dumps(self._settings, indent=2))
        for file in filter(Path.exists, map(self.file, left)):
            say(f"{file}: cannot be read, and is generated again")
        started, tokens = time.monotonic(), 0
        pool = ThreadPoolExecutor(shards_at_once(batch_size), "shard")
        try:
            shards = {
                pool.submit(generate, tasks[number * PER_SHARD : (number + 1) * PER_SHARD]): number
                for number in left
            }
            for done, shard in enumerate(as_completed(shards), 1):
                found = shard.result()
                self._write(shards.pop(shard), found)
                tokens += sum(one.answer_tokens for one in found)
                seconds = time.monotonic() - started
                each = "" if size == 1 else f", by each of {size} processes"
                say(
                    f"generated {done} of {len(left)} shards, {tokens:,} tokens at {tokens / seconds:.0f}/s"
                    f"{each}, {duration(seconds / done * (len(left) - done))} left"
                )
        finally:
            # After a failure, do not wait for the shards under way: closing the decoder ends them.
            pool.shutdown(wait=False, cancel_futures=True)

    def _write(self, number: int, conversations: Sequence[Conversation]) -> None:
        tokens = [one.tokens for one in conversations]
        failed = [one.failed for one in conversations]
        tensors: dict[str, NDArray[Any]] = {
            "tokens": np.concatenate([*tokens, np.empty(0, np.int64)]).astype(np.uint32),
            "lengths": np.array([len(one) for one in tokens], np.int32),
            "answer_start": np.array([one.answers[-1][0] for one in conversations], np.int32),
            "dialogue": np.array([one.prompt_number() for one in conversations], np.uint64),
            "failed": np.concatenate([*failed, np.empty(0, np.int64)]).astype(np.int32),
            "failed_counts": np.array([len(one) for one in failed], np.int32),
        }
        fresh = self.file(number).with_suffix(".new")
        save_file(tensors, fresh)
        sync(fresh)
        fresh.replace(self.file(number))


def _is_whole(file: Path) -> bool:
    """Whether the file exists and is complete, as far as its header and its length tell."""
    try:
        with safe_open(file, "numpy"):
            return True
    except (OSError, SafetensorError):
        return False

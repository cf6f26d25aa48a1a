"""The teacher's states on disk, for several epochs: computed once, read back memory-mapped."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dspark.errors import CapacityError, CheckpointError
from dspark.files import sync, write_whole
from dspark.train.data.conversations import Conversation, fingerprint
from dspark.train.identity import differing, read_record
from dspark.train.report import Say
from dspark.train.teacher import AT_ONCE, States, Teacher

INDEX = "index.json"
SHARDS = "states-*.safetensors"
CONVERSATIONS_PER_SHARD = 64
STORED = torch.bfloat16
LAST = torch.float16
"""Of the last states, from which logits are computed: 11 significant bits, where bfloat16 has 8."""

Progress = Callable[[int, int], None]
"""Called with tokens done and tokens in all."""


def cache_bytes(conversations: Sequence[Conversation], taps: int, hidden_size: int) -> int:
    """Size of the cache: 2 bytes per element of taps and last state, 4 for the normaliser, per token."""
    tokens = sum(len(one.tokens) for one in conversations)
    return tokens * (2 * (taps + 1) * hidden_size + 4)


def check_size(need: int, limit: int, directory: Path) -> None:
    """Checks that there is room for the `need` bytes that are still to be written.

    Raises:
        CapacityError: with what is there, including other conversations, they would be more than `limit`
            bytes, or the disk has no room for them.
    """
    there = sum(file.stat().st_size for file in directory.glob(SHARDS))
    if need and there + need > limit:
        raise CapacityError(
            f"{directory}: the cache of hidden states has {there / 1e9:.1f} GB, and {need / 1e9:.1f} GB more "
            f"would be over the limit of {limit / 1e9:.1f} GB: raise it, empty the directory, train on less, "
            "or compute them on the fly"
        )
    free = shutil.disk_usage(directory).free
    if need > free:
        raise CapacityError(
            f"{directory}: the cache of hidden states would take {need / 1e9:.1f} GB more, but only "
            f"{free / 1e9:.1f} GB are free"
        )


def check_owner(directory: Path, whose: dict[str, Any]) -> None:
    """
    Raises:
        CheckpointError: the directory holds states of another teacher than `whose` (which may have only some
            of the keys of a cache's record), or does not say whose they are.
    """
    said = directory / INDEX
    if not said.exists() and not any(directory.glob(SHARDS)):
        return
    found = read_record(said, "hidden states")
    if differing({key: found[key] for key in found if key in whose}, whose):
        raise CheckpointError(
            f"{said}: the hidden states there are for {found}, but {whose} is needed: name another cache "
            "directory"
        )


class StateCache:
    """States by conversation, in shards of safetensors. A shard is written whole or not at all, so that an
    interrupted run can resume; stored states are never computed again. Shards are named by what they hold, so
    that many processes can fill one directory, each with its own share."""

    def __init__(self, directory: Path, whose: dict[str, Any], say: Say) -> None:
        """`whose` says whose states these are (target, taps, precision). Shards that cannot be read, as after
        a loss of power, are reported and removed: their conversations are missing again.

        Raises:
            CheckpointError: the directory holds another teacher's states, or does not say whose they are.
        """
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        check_owner(directory, whose)
        if not (said := directory / INDEX).exists():
            write_whole(said, json.dumps(whose))
        self._places: dict[str, tuple[Path, int, int]] = {}
        self._open: dict[Path, Any] = {}
        for file in sorted(directory.glob(SHARDS)):
            try:
                self._take(file)
            except (SafetensorError, OSError, ValueError, TypeError, KeyError) as error:
                say(f"{file}: cannot be read ({error}), and is computed again")
                file.unlink(missing_ok=True)

    def _take(self, file: Path) -> None:
        with safe_open(file, "pt") as stored:
            keys = json.loads(stored.metadata()["conversations"])
        start = 0
        for key, length in keys:
            self._places[key] = file, start, length
            start += length

    def missing(self, conversations: Sequence[Conversation]) -> list[Conversation]:
        """The conversations whose states are not stored yet."""
        return [one for one in conversations if one.key() not in self._places]

    def fill(self, missing: Sequence[Conversation], teacher: Teacher, progress: Progress) -> None:
        """Computes and stores the states of `missing`, which may be one process's share of it."""
        total, done = sum(len(one.tokens) for one in missing), 0
        for first in range(0, len(missing), CONVERSATIONS_PER_SHARD):
            shard = missing[first : first + CONVERSATIONS_PER_SHARD]
            states: list[States] = []
            for start in range(0, len(shard), AT_ONCE):
                part = shard[start : start + AT_ONCE]
                states += teacher.states(part)
                done += sum(len(one.tokens) for one in part)
                progress(done, total)
            self._store(shard, states)

    def _store(self, shard: Sequence[Conversation], states: Sequence[States]) -> None:
        last = torch.cat([one.hidden for one in states]).cpu()
        if float(last.abs().max()) > torch.finfo(LAST).max:
            raise CapacityError(
                "the target's last hidden states are too large for float16: train without --cache"
            )
        tensors = {
            "taps": torch.cat([one.taps for one in states]).to("cpu", STORED),
            "hidden": last.to(LAST),
            "normalisers": torch.cat([one.normalisers for one in states]).cpu(),
        }
        keys = [(one.key(), len(one.tokens)) for one in shard]
        file = self.directory / f"states-{fingerprint(key for key, _ in keys)}.safetensors"
        fresh = file.with_suffix(".new")
        save_file(tensors, fresh, metadata={"conversations": json.dumps(keys)})
        sync(fresh)
        fresh.replace(file)
        self._take(file)

    def states(self, conversations: Sequence[Conversation]) -> list[States]:
        """The states of conversations that are stored."""
        return [self._read(one) for one in conversations]

    def _read(self, one: Conversation) -> States:
        try:
            file, start, length = self._places[one.key()]
        except KeyError:
            raise CheckpointError(f"{self.directory}: has no states of conversation {one.key()}") from None
        if file not in self._open:
            self._open[file] = safe_open(file, "pt")
        stored, rows = self._open[file], slice(start, start + length)
        return States(*(stored.get_slice(name)[rows] for name in ("taps", "hidden", "normalisers")))

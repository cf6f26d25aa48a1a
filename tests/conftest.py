"""Models shared by the tests. One torch thread: the models are small and the machine may be busy."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from dspark import DSparkDecoder
from dspark.pretrained import cache_root

if TYPE_CHECKING:
    from runner_zoo import Pair

# A shell that starts the tests in the background lets them ignore Ctrl-C, and their children too.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Cost tables are measured in each run; fetched models are those of the user."""
    own = tmp_path_factory.mktemp("cache")
    for model in cache_root().glob("*"):
        if model.name != "costs":
            (own / model.name).symlink_to(model)
    os.environ["DSPARK_CACHE"] = str(own)


@pytest.fixture(scope="session")
def decoders() -> Iterator[Callable[..., DSparkDecoder]]:
    """Makes decoders of the embedded target, each kind once: `decoders(draft="tiny-draft", **options)`.

    The policy is "fixed" unless a test says otherwise: "throughput" drafts what pays on this machine.
    """
    made: dict[str, DSparkDecoder] = {}

    def make(draft: str | Path | None = "tiny-draft", **options: Any) -> DSparkDecoder:
        options = {"policy": "fixed", **options}
        key = repr((str(draft), sorted(options.items())))
        if key not in made:
            made[key] = DSparkDecoder.from_pretrained("tiny", draft, device="cpu", **options)
        return made[key]

    yield make
    for decoder in made.values():
        decoder.close()


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """Random float64 pairs for each kind of cache (`runner_zoo.KINDS`), each kind once."""
    from runner_zoo import load_pair  # brings transformers along

    made: dict[str, Pair] = {}

    def make(kind: str) -> Pair:
        if kind not in made:
            made[kind] = load_pair(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return make

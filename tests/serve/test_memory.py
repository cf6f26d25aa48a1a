"""What the caches may take where nothing is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dspark import DSparkDecoder, cgroups, cpus, memory
from dspark.serve import options
from dspark.serve.models import Models
from dspark.serve.options import Options
from places import DATA
from runner_zoo import KINDS, Pair

CPU = torch.device("cpu")
MEMINFO = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    400 kB\n"


def places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **files: str) -> None:
    for name, text in files.items():
        (tmp_path / name.replace("_", ".")).write_text(text)
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(cgroups, "_CGROUP", tmp_path)
    monkeypatch.setattr(cgroups, "_OWN_CGROUP", tmp_path / "cgroup")


def test_the_machine_s_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    places(monkeypatch, tmp_path, meminfo=MEMINFO, memory_max="max\n", memory_stat="anon 1\n")
    assert memory.available_bytes(CPU) == 400 * 1024


def test_a_container_s_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stat = "anon 100000\nfile 900000\nkernel 20000\n"
    places(monkeypatch, tmp_path, meminfo=MEMINFO, memory_max="300000\n", memory_stat=stat)
    assert memory.available_bytes(CPU) == 180_000


@pytest.mark.parametrize("tightest", ["", "system.slice", "system.slice/served.service"])
def test_a_service_s_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tightest: str) -> None:
    """Any of the groups around a process may be the one with the least left."""
    places(monkeypatch, tmp_path, meminfo=MEMINFO, cgroup="0::/system.slice/served.service\n")
    (tmp_path / "system.slice" / "served.service").mkdir(parents=True)
    for place in ("", "system.slice", "system.slice/served.service"):
        limit = "200000" if place == tightest else "max"
        (tmp_path / place / "memory.max").write_text(f"{limit}\n")
        (tmp_path / place / "memory.stat").write_text("anon 50000\nkernel 0\n")
    assert memory.available_bytes(CPU) == 150_000


@pytest.mark.parametrize(
    ("quota", "usable"),
    [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8), ("odd", 8)],
)
def test_a_container_s_cpus(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    quota: str,
    usable: int,
) -> None:
    """torch counts the machine's, whatever the container may use."""
    places(monkeypatch, tmp_path, cpu_max=quota)
    monkeypatch.setattr(cpus.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert cpus.usable_cpus() == usable
    cpus.warn_of_idle_threads(usable)
    assert not caplog.messages
    cpus.warn_of_idle_threads(64)
    assert caplog.messages == [
        f"torch runs 64 threads, and this process may use {usable} CPUs: set OMP_NUM_THREADS={usable}"
    ]


def test_a_system_that_is_not_linux(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    places(monkeypatch, tmp_path)
    monkeypatch.setattr(memory.os, "sysconf", {"SC_PHYS_PAGES": 10, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert memory.available_bytes(CPU) == 40_960
    monkeypatch.delattr(memory.os, "sysconf")
    assert memory.available_bytes(CPU) is None


def test_a_gpu_s_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch's allocator holds for nobody is the driver's no longer, and can be had all the same."""
    gpu = torch.device("cuda", 1)
    numbers = {"mem_get_info": (1000, 8000), "memory_reserved": 5000, "memory_allocated": 3800}
    for name, number in numbers.items():
        answers = {gpu: number}
        monkeypatch.setattr(torch.cuda, name, answers.__getitem__)
    assert memory.available_bytes(gpu) == 2200


@pytest.mark.parametrize("kind", KINDS)
def test_a_position_s_bytes_are_those_that_are_allocated(kind: str, pairs: Callable[[str], Pair]) -> None:
    runner = pairs(kind).runner()
    cache = runner.target.new_cache()
    if kind == "adapter":
        with torch.inference_mode():
            runner.target(torch.arange(9), [(cache, 9)])
        layers = [layer for layer in cache.states.layers if layer.keys.numel()]
        assert layers and cache.position_bytes > 0
        assert 9 * cache.position_bytes == sum(
            kept.nbytes for layer in layers for kept in (layer.keys, layer.values)
        )
        return
    stores = [cache.kv] if hasattr(cache, "kv") else list(getattr(cache, "stores", {"": cache}).values())
    sizes = []
    for positions in (400, 500):
        cache.reserve(positions)
        sizes.append(sum(store.data.untyped_storage().nbytes() for store in stores))
    assert (sizes[1] - sizes[0]) // 100 >= cache.position_bytes > 0
    if kind != "gemma4":  # whose sliding layers grow up to a point
        assert sizes[1] - sizes[0] == 100 * cache.position_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_s_bytes_are_those_that_are_allocated(kind: str, pairs: Callable[[str], Pair]) -> None:
    cache = pairs(kind).target.new_cache()
    states = [cache.conv, cache.state] if kind == "hybrid" else []
    assert cache.state_bytes == sum(state.untyped_storage().nbytes() for state in states)
    assert (cache.state_bytes > 0) == (kind == "hybrid")


def test_the_caches_take_a_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    models = Models.load("tiny", "tiny-draft", device="cpu")
    each, window = models.position_bytes, models.window
    assert each > 0
    for free, expected in ((None, 131_072), (2**50, 131_072), (4 * 40_000 * each, 40_000), (0, window + 16)):
        monkeypatch.setattr(options, "available_bytes", lambda _, free=free: free)
        assert Options().kv_tokens(models) == expected
        assert Options(max_kv_tokens=64).kv_tokens(models) == 64
    monkeypatch.setattr(options, "available_bytes", lambda _: 4 * 40_000 * each)
    with DSparkDecoder(lambda: models, Options(policy="fixed")) as decoder:
        monkeypatch.setattr(options, "available_bytes", lambda _: 0)
        assert decoder.info()["max_kv_tokens"] == 40_000
        assert decoder.info()["kv_bytes_per_token"] == each
        assert decoder.stats()["pages"]["total"] == 40_000 // 16


def test_recurrent_states_have_theirs_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of each request that may run, and two of as many kept prefixes."""
    models = Models.load(DATA / "hybrid" / "target", None, device="cpu")
    each, state = models.position_bytes, models.state_bytes
    assert state == models.target.new_cache().state_bytes > 0
    monkeypatch.setattr(options, "available_bytes", lambda _: 4 * 40_000 * each + 4 * 5 * state)
    assert Options(max_batch_size=5).kv_tokens(models) == 40_000
    assert Options(max_batch_size=1).kv_tokens(models) == 40_000 + 4 * state // each
    assert Options(max_batch_size=5).info(models)["state_bytes_per_request"] == 4 * state
    monkeypatch.setattr(options, "available_bytes", lambda _: 0)
    assert Options(max_batch_size=5).kv_tokens(models) == models.window + 16

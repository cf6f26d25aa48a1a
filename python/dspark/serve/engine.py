"""The engine's thread."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Literal

import torch

from dspark import _core
from dspark.errors import CapacityError, ConfigError
from dspark.serve.models import Models


class EngineThread:
    """Loads models and runs the Rust round loop over them until `close` or the interpreter's end.

    Loading happens on the engine's own thread so that torch's worker threads belong to it alone: in a process
    with more OpenMP threads than cores every product slows down, small ones up to tenfold.
    """

    def __init__(self, make: Callable[[], tuple[Models, _core.Engine]]) -> None:
        _check_process()
        self._closed = False
        loaded: Future[tuple[Models, _core.Engine]] = Future()
        # A thread keeps its arguments as long as it runs, and `make` leads to the caller, who may hold
        # `self`: so the thread takes it out of this list.
        job = [make]
        self._thread = threading.Thread(target=_serve, args=(job, loaded), name="dspark-engine", daemon=True)
        self._thread.start()
        try:
            self.models, self.core = loaded.result()
        except BaseException:
            # Ctrl-C while models load: once loaded, they must not be served, as nobody can use them.
            loaded.add_done_callback(_abandon)
            del loaded  # it holds the error, which holds this frame: the cycle would keep models
            raise
        # Registered anew for each decoder: hooks run last in, first out, so this one runs before those of its
        # models.
        atexit.unregister(_end_all)
        atexit.register(_end_all)
        # For decoders dropped without `close`. The garbage collector may run this on any thread, even
        # one that the engine waits for: so it does not wait for the engine.
        weakref.finalize(self, _end, self.core).atexit = False

    @property
    def state(self) -> Literal["running", "closed", "failed", "forked"]:
        """Whether requests are served; "failed" if the loop has ended although nobody closed it, "forked" in
        a process that was forked afterwards, where the loop does not run."""
        if not _is_here():
            return "forked"
        if self._closed:
            return "closed"
        return "running" if self._thread.is_alive() else "failed"

    def check_process(self) -> None:
        """Raises `CapacityError` in a process other than the loop's, where no result would ever arrive."""
        if self.state == "forked":
            raise CapacityError(f"the decoder was made before this process was forked: {SPAWN}")

    def close(self) -> None:
        """Ends the loop after its current round; requests that run or wait are aborted."""
        self._closed = True
        _end(self.core)
        if _is_here():
            # Also if another thread was first: when `close` returns, the engine has ended.
            _join(self._thread)


SPAWN = "threads do not survive a fork, nor do torch's, so fork before the first decoder is made, or spawn"

_running: dict[threading.Thread, _core.Engine] = {}
_process: int | None = None
"""The process that made the first decoder, and so every decoder: no other process can make one."""


def _check_process() -> None:
    if _process is not None and not _is_here():
        raise ConfigError(f"a decoder was made before this process was forked: {SPAWN}")


def _is_here() -> bool:
    """False in a fork, which has no loop to end, and whose locks are as they were when it was made."""
    return os.getpid() == _process


def _serve(
    job: list[Callable[[], tuple[Models, _core.Engine]]], loaded: Future[tuple[Models, _core.Engine]]
) -> None:
    global _process
    make = job.pop()
    try:
        models, core = make()
    except BaseException as error:  # whoever waits for the models gets it
        loaded.set_exception(error)
        del make, loaded  # the error holds this frame
        return
    _process = os.getpid()
    thread = threading.current_thread()
    _running[thread] = core
    loaded.set_result((models, core))
    del models, make, loaded
    try:
        with torch.inference_mode():
            core.run()
    finally:
        del _running[thread]


def _abandon(loaded: Future[tuple[Models, _core.Engine]]) -> None:
    if loaded.exception() is None:
        loaded.result()[1].close()


def _end(core: _core.Engine) -> None:
    if _is_here():
        core.close()


def _end_all() -> None:
    """Ends all engines before the interpreter is torn down, also one whose `close` was interrupted."""
    for thread, core in list(_running.items()) if _is_here() else ():
        core.close()
        _join(thread)


def _join(thread: threading.Thread) -> None:
    if thread is not threading.current_thread():
        thread.join()

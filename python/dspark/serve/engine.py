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
from dspark.errors import CapacityError
from dspark.serve.models import Models


class EngineThread:
    """Loads models and runs the Rust round loop over them until `close` or the interpreter's end.

    Loading happens on the engine's own thread so that torch's worker threads belong to it alone: OpenMP
    slows every product of a process that has more of them than cores, up to tenfold for small ones.
    """

    def __init__(self, make: Callable[[], tuple[Models, _core.Engine]]) -> None:
        self._process = os.getpid()
        loaded: Future[tuple[Models, _core.Engine]] = Future()
        self._thread = threading.Thread(target=_serve, args=(make, loaded), name="dspark-engine", daemon=True)
        self._thread.start()
        try:
            self.models, self.core = loaded.result()
        except BaseException:
            # Ctrl-C while models load: they must not be served to nobody once they are there.
            loaded.add_done_callback(_abandon)
            raise
        # The hook must not keep the models of a decoder alive that was dropped without `close`.
        finalizer = weakref.finalize(self, _stop, self.core, self._thread, self._process)
        finalizer.atexit = False
        self._finalizer = finalizer
        atexit.register(finalizer)

    @property
    def state(self) -> Literal["running", "closed", "failed", "forked"]:
        """Whether requests are served; "failed" if the loop has ended although nobody closed it, "forked" in
        a process that was forked off afterwards, where the loop is not."""
        if os.getpid() != self._process:
            return "forked"
        if not self._finalizer.alive:
            return "closed"
        return "running" if self._thread.is_alive() else "failed"

    def check_process(self) -> None:
        """Raises `CapacityError` in another process than the loop's, where nothing would ever arrive."""
        if self.state == "forked":
            raise CapacityError(
                "the decoder was made before this process was forked: make one in each process"
            )

    def close(self) -> None:
        """Ends the loop after its current round; requests that run or wait are aborted."""
        self._finalizer()
        atexit.unregister(self._finalizer)
        # Another thread may have been first: whoever closes finds the engine at its end.
        _join(self._thread)


def _serve(
    make: Callable[[], tuple[Models, _core.Engine]], loaded: Future[tuple[Models, _core.Engine]]
) -> None:
    try:
        models, core = make()
    except BaseException as error:  # whoever waits for the models gets it
        loaded.set_exception(error)
        return
    loaded.set_result((models, core))
    del models, make, loaded
    with torch.inference_mode():
        core.run()


def _abandon(loaded: Future[tuple[Models, _core.Engine]]) -> None:
    if loaded.exception() is None:
        loaded.result()[1].close()


def _stop(core: _core.Engine, thread: threading.Thread, process: int) -> None:
    if os.getpid() != process:  # a fork has no loop to stop, and locks as they were at the time
        return
    core.close()
    _join(thread)


def _join(thread: threading.Thread) -> None:
    if thread is not threading.current_thread():
        thread.join()

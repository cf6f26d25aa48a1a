"""A web service around one decoder, as a starting point: FastAPI, uvicorn, server-sent events.

    pip install '.[gguf]' 'fastapi>=0.135' 'uvicorn>=0.34'  # in the sources; gguf converts smollm2
    python examples/service.py --target smollm2 --draft models/smollm2-draft --port 8000
    curl -N localhost:8000/generate --json '{"prompt": "Once", "params": {"max_tokens": 64, "seed": 1}}'

POST /generate  {"prompt": text or token ids, "params": {the fields of SamplingParams}}
POST /chat      {"messages": [...], "tools": null, "params": {...}}, for targets with a chat template
GET  /stats     what `DSparkDecoder.state`, `.stats` and `.info` say
GET  /health    200, or 503 while it shuts down and when the engine has failed

Text is sent as events, one per piece, with `text` and `token_ids`; the last one adds `finish_reason`,
`stop_reason`, `usage`, `speculation`, and `logprobs` if requested. A request that fails midway ends with an
event named "error". If there was no event for `PING` seconds, as in the queue, a comment is sent, because
proxies close silent connections.
400: the request is invalid, `detail` says why. 413: its body is larger than `--max-body`. 503: the queue is
full or the service is shutting down; with "Retry-After" it is worth trying again.
A client that disconnects cancels its request. SIGTERM and Ctrl-C give running and waiting requests `--grace`
s to finish; connections still open `--linger` s after that, because their client neither sends nor reads,
are cut off.
"""

import argparse
import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.sse import EventSourceResponse, format_sse_event
from pydantic import BaseModel
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dspark import (
    DSparkDecoder,
    DSparkError,
    GenerationResult,
    QueueFullError,
    RequestError,
    SamplingParams,
    StreamPiece,
)

PING = 15.0  # seconds


class Body(BaseModel, extra="forbid"):
    prompt: Any = None
    messages: Any = None
    tools: list[dict[str, Any]] | None = None
    params: dict[str, Any] = {}


def sampling(given: dict[str, Any], timeout: float) -> SamplingParams:
    """What the client asked for, with a deadline if it named none."""
    if isinstance(bias := given.get("logit_bias"), dict):  # JSON's keys are strings
        given = {**given, "logit_bias": {token_id(k): v for k, v in bias.items()}}
    if given.get("timeout") is None:  # null would be none at all
        given = {**given, "timeout": timeout}
    try:
        return SamplingParams(**given)
    except TypeError as error:
        raise RequestError(f"params: {error}") from None


def token_id(key: str) -> int | str:
    """Leaves what is clearly not a token id for the library to refuse, as `int` has limits of its own."""
    return int(key) if key.isdecimal() and len(key) < 20 else key


def account(result: GenerationResult) -> dict[str, Any]:
    """What the last event has in addition to its text."""
    why = {"finish_reason": result.finish_reason, "stop_reason": result.stop_reason}
    usage = {"prompt_tokens": len(result.prompt_token_ids), "completion_tokens": len(result.token_ids)}
    speculation = {"state": result.speculation, "acceptance_length": result.acceptance_length}
    found = {**why, "usage": usage, "speculation": speculation}
    if result.logprobs is not None:
        # JSON has no infinity, which is the log probability of an impossible token.
        rows = [{str(t): p if math.isfinite(p) else None for t, p in row.items()} for row in result.logprobs]
        found["logprobs"] = rows
    return found


async def with_pauses(stream: AsyncIterator[StreamPiece]) -> AsyncIterator[StreamPiece | None]:
    """The pieces, and `None` whenever none has come for `PING` seconds."""
    while True:
        # A task of its own, which a pause does not cancel, because that would cancel the request.
        waiting = asyncio.ensure_future(anext(stream))
        try:
            while not (await asyncio.wait([waiting], timeout=PING))[0]:
                yield None
            piece = await waiting
        except StopAsyncIteration:
            return
        finally:
            waiting.cancel()  # the client has left
        yield piece


class BodyLimit:
    """Middleware: bodies of more than `most` bytes get a 413, and are never held in memory as a whole."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self.app, self.most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.most:
                while message.get("more_body", False):  # with an earlier answer, the client would see a reset
                    message = await receive()
                raise HTTPException(413, f"the body has more than {self.most} bytes")
            return message

        await self.app(scope, counted, send)


def make_app(decoder: DSparkDecoder, timeout: float = 300.0, max_body: int = 1 << 20) -> FastAPI:
    """The routes; `app.state.draining = True` makes them refuse new requests."""
    app = FastAPI(title="dspark")
    app.add_middleware(BodyLimit, most=max_body)
    app.state.draining = False

    def check_open() -> None:
        if app.state.draining:
            raise HTTPException(503, "the service shuts down", {"Retry-After": "1"})
        if decoder.state in ("failed", "forked"):
            raise HTTPException(503, f"the engine has {decoder.state}")

    async def answer(read: Callable[[], Sequence[int]], params: dict[str, Any]) -> EventSourceResponse:
        check_open()
        # In a thread, so that other streams go on while a long text is read.
        prompt = await asyncio.to_thread(read)
        # Submitted before the response begins, so that a refusal has its own status.
        stream = decoder.astream(prompt, sampling(params, timeout))

        async def events() -> AsyncIterator[bytes]:
            try:
                async for piece in with_pauses(stream):
                    if piece is None:
                        yield format_sse_event(comment="ping")
                        continue
                    end = {} if piece.result is None else account(piece.result)
                    event = {"text": piece.text, "token_ids": piece.token_ids, **end}
                    yield format_sse_event(data_str=json.dumps(event))
            except DSparkError as error:
                yield format_sse_event(event="error", data_str=json.dumps(error.to_json()))

        return EventSourceResponse(events())

    @app.post("/generate")
    async def generate(body: Body) -> EventSourceResponse:
        return await answer(lambda: decoder.models.tokens(body.prompt), body.params)

    @app.post("/chat")
    async def chat(body: Body) -> EventSourceResponse:
        return await answer(lambda: decoder.render_chat(body.messages, tools=body.tools), body.params)

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        return {"state": decoder.state, **decoder.stats(), "info": decoder.info()}

    @app.get("/health")
    async def health() -> dict[str, str]:
        check_open()
        return {"status": "ok"}

    @app.exception_handler(DSparkError)
    async def refused(request: Request, error: DSparkError) -> JSONResponse:
        headers = {"Retry-After": "1"} if isinstance(error, QueueFullError) else None
        status = 503 if headers or decoder.state != "running" else 400
        # It may quote what the client sent, even lone surrogates, which UTF-8 cannot encode.
        detail = str(error).encode("utf-8", "backslashreplace").decode()
        return JSONResponse({"detail": detail}, status, headers)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        return JSONResponse({"detail": f"{'.'.join(map(str, first['loc']))}: {first['msg']}"}, 400)

    return app


class Server(uvicorn.Server):
    """Drains before it closes: refuses new requests while those that run or wait may finish, for `grace`
    seconds. Then connections have `linger` seconds to end."""

    def __init__(
        self, app: FastAPI, decoder: DSparkDecoder, grace: float, linger: int = 5, **config: Any
    ) -> None:
        super().__init__(uvicorn.Config(app, access_log=False, timeout_graceful_shutdown=linger, **config))
        self.app, self.decoder, self.grace = app, decoder, grace

    async def shutdown(self, sockets: Any = None) -> None:
        self.app.state.draining = True
        for _ in range(int(self.grace / 0.05)):
            stats = self.decoder.stats()
            if stats["queued"] + stats["running"] == 0 or self.force_exit:  # a second Ctrl-C
                break
            await asyncio.sleep(0.05)
        await asyncio.to_thread(self.decoder.close)  # what is left ends with finish_reason "abort"
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def main() -> None:
    parser = argparse.ArgumentParser(description="Serves one decoder.")
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--draft", help="without one the target decodes alone")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0: reachable from other machines")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free")
    parser.add_argument("--max-batch-size", type=int, default=32, help="requests that run at once")
    parser.add_argument("--max-queue-size", type=int, default=256, help="requests that wait; more get a 503")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for requests that name none")
    parser.add_argument("--grace", type=float, default=30.0, help="seconds to finish what runs at shutdown")
    parser.add_argument("--linger", type=int, default=5, help="seconds for connections to end after that")
    parser.add_argument("--max-body", type=int, default=1 << 20, help="bytes of a request; more get a 413")
    options = vars(parser.parse_args())
    timeout, max_body = options.pop("timeout"), options.pop("max_body")
    address = {name: options.pop(name) for name in ("host", "port")}
    times = {name: options.pop(name) for name in ("grace", "linger")}
    with (
        contextlib.suppress(KeyboardInterrupt),  # uvicorn raises it again when all is over
        DSparkDecoder.from_pretrained(options.pop("target"), options.pop("draft"), **options) as decoder,
    ):
        Server(make_app(decoder, timeout, max_body), decoder, **times, **address).run()


if __name__ == "__main__":
    main()

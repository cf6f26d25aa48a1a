"""A web service around one decoder, as a starting point: FastAPI, uvicorn, server-sent events.

    pip install dspark 'fastapi>=0.135' 'uvicorn>=0.30'
    python examples/service.py --target smollm2 --draft smollm2-draft --port 8000
    curl -N localhost:8000/generate --json '{"prompt": "Once", "params": {"max_tokens": 64, "seed": 1}}'

POST /generate  {"prompt": text or token ids, "params": {the fields of SamplingParams}}
POST /chat      {"messages": [...], "tools": null, "params": {...}}, for targets with a chat template
GET  /stats     what `DSparkDecoder.stats` and `.info` say; GET /health: 200, or 503 while it shuts down

Texts come as events, one for each piece, with `text` and `token_ids`; the last one adds `finish_reason`,
`stop_reason`, `usage` and `speculation`. A request that fails on the way ends with an event named "error".
400: the request is wrong, `detail` says how. 503: the queue is full or the service shuts down; try again.
A client that leaves cancels its request. SIGTERM and Ctrl-C let what runs or waits finish for `--grace` s.
"""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.sse import EventSourceResponse, format_sse_event
from pydantic import BaseModel

from dspark import DSparkDecoder, DSparkError, GenerationResult, QueueFullError, RequestError, SamplingParams


class Body(BaseModel, extra="forbid"):
    prompt: Any = None
    messages: Any = None
    tools: list[dict[str, Any]] | None = None
    params: dict[str, Any] = {}


def sampling(given: dict[str, Any], timeout: float) -> SamplingParams:
    """What the client asked for, with a deadline if it named none."""
    if isinstance(bias := given.get("logit_bias"), dict):  # JSON's keys are strings
        given = {**given, "logit_bias": {int(k) if k.isdecimal() else k: v for k, v in bias.items()}}
    if given.get("timeout") is None:  # null would be none at all
        given = {**given, "timeout": timeout}
    try:
        return SamplingParams(**given)
    except TypeError as error:
        raise RequestError(f"params: {error}") from None


def account(result: GenerationResult) -> dict[str, Any]:
    """What the last event tells beside its text."""
    why = {"finish_reason": result.finish_reason, "stop_reason": result.stop_reason}
    usage = {"prompt_tokens": len(result.prompt_token_ids), "completion_tokens": len(result.token_ids)}
    speculation = {"state": result.speculation, "acceptance_length": result.acceptance_length}
    return {**why, "usage": usage, "speculation": speculation}


def make_app(decoder: DSparkDecoder, timeout: float = 300.0) -> FastAPI:
    """The routes; `app.state.draining = True` lets them refuse new requests."""
    app = FastAPI(title="dspark")
    app.state.draining = False

    def check_open() -> None:
        if app.state.draining:
            raise HTTPException(503, "the service shuts down", {"Retry-After": "1"})

    def answer(prompt: Any, params: dict[str, Any]) -> EventSourceResponse:
        check_open()
        # Submitted before the response begins, so that a refusal has its own status.
        stream = decoder.astream(prompt, sampling(params, timeout))

        async def events() -> AsyncIterator[bytes]:
            try:
                async for piece in stream:
                    end = {} if piece.result is None else account(piece.result)
                    event = {"text": piece.text, "token_ids": piece.token_ids, **end}
                    yield format_sse_event(data_str=json.dumps(event))
            except DSparkError as error:
                yield format_sse_event(event="error", data_str=json.dumps(error.to_json()))

        return EventSourceResponse(events())

    @app.post("/generate")
    async def generate(body: Body) -> EventSourceResponse:
        return answer(body.prompt, body.params)

    @app.post("/chat")
    async def chat(body: Body) -> EventSourceResponse:
        tokens = await asyncio.to_thread(decoder.render_chat, body.messages, tools=body.tools)
        return answer(tokens, body.params)

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        return {**decoder.stats(), "info": decoder.info()}

    @app.get("/health")
    async def health() -> dict[str, str]:
        check_open()
        return {"status": "ok"}

    @app.exception_handler(DSparkError)
    async def refused(request: Request, error: DSparkError) -> JSONResponse:
        status, headers = (503, {"Retry-After": "1"}) if isinstance(error, QueueFullError) else (400, None)
        return JSONResponse({"detail": str(error)}, status, headers)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        return JSONResponse({"detail": f"{'.'.join(map(str, first['loc']))}: {first['msg']}"}, 400)

    return app


class Server(uvicorn.Server):
    """Drains before it closes: refuses new requests while those that run or wait may finish."""

    def __init__(self, app: FastAPI, decoder: DSparkDecoder, grace: float, **config: Any) -> None:
        super().__init__(uvicorn.Config(app, access_log=False, **config))
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


def main() -> None:
    parser = argparse.ArgumentParser(description="Serves one decoder.")
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--draft", help="without one the target decodes alone")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free")
    parser.add_argument("--max-batch-size", type=int, default=32, help="requests that run at once")
    parser.add_argument("--max-queue-size", type=int, default=256, help="requests that wait; more get a 503")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for requests that name none")
    parser.add_argument("--grace", type=float, default=30.0, help="seconds to finish what runs at shutdown")
    options = vars(parser.parse_args())
    port, timeout, grace = (options.pop(name) for name in ("port", "timeout", "grace"))
    with DSparkDecoder.from_pretrained(options.pop("target"), options.pop("draft"), **options) as decoder:
        Server(make_app(decoder, timeout), decoder, grace, port=port).run()


if __name__ == "__main__":
    main()

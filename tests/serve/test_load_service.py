"""`examples/service.py` behind a real server and a real HTTP client."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn")
pytest.importorskip("fastapi.sse")

from dspark import CapacityError, DSparkDecoder, SamplingParams  # noqa: E402
from dspark.serve.runner import Runner  # noqa: E402
from dspark.text import Tokenizer  # noqa: E402
from places import ROOT  # noqa: E402

SERVICE = ROOT / "examples" / "service.py"
PROMPTS = ["def read(self, size):\n", "import os\n", "class A:\n    ", "x = [", "for i in ", "return "]
ENDLESS = {"temperature": 0.0, "ignore_eos": True}

JSON = {"content-type": "application/json"}


class Service:
    """The example as a process of its own, on a free port."""

    def __init__(self, *flags: str) -> None:
        command = [sys.executable, "-u", str(SERVICE), "--draft", "tiny-draft", "--dtype", "float64"]
        self.process = subprocess.Popen(
            [*command, "--port", "0", *flags], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self.log: list[str] = []
        for line in self.process.stderr or ():
            self.log.append(line)
            if found := re.search(r"running on (http://\S+)", line):
                self.url = found[1]
                break
        else:
            raise AssertionError("".join(self.log))
        # Else the pipe fills and the server stands still.
        threading.Thread(target=lambda: self.log.extend(self.process.stderr or ()), daemon=True).start()

    def client(self) -> Any:
        # A connection that is used again may be one that the server, after seconds without a request, is just
        # closing: on a busy machine that fails a test now and then, and it is no fault of the service.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        return httpx.AsyncClient(base_url=self.url, timeout=60, limits=limits)

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Service() as service:
        yield service


async def read(client: Any, prompt: Any, params: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    async with client.stream("POST", "/generate", json={"prompt": prompt, "params": params}) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            if line and not line.startswith(":"):
                yield json.loads(line.removeprefix("data: "))


async def rest(client: Any) -> dict[str, Any]:
    """Waits until nothing runs or waits; the stats then."""
    for _ in range(2000):
        stats: dict[str, Any] = (await client.get("/stats")).json()
        if stats["running"] == stats["queued"] == 0:
            return stats
        await asyncio.sleep(0.01)
    raise AssertionError(f"the service does not come to rest: {stats}")


def test_two_hundred_clients_at_once(service: Service, decoders: Callable[..., DSparkDecoder]) -> None:
    """A quarter leaves early, a quarter has a stop string; nobody's text depends on who else is there."""
    decoder = decoders(dtype="float64")
    wholes = [decoder.generate(p, SamplingParams(temperature=0.0, max_tokens=32)) for p in PROMPTS]
    stops = [whole.text[12:15] for whole in wholes]

    async def visit(client: Any, i: int) -> None:
        prompt, whole, stop = PROMPTS[i % 6], wholes[i % 6], stops[i % 6]
        text, last = "", {}
        if i % 4 == 0:
            async with contextlib.aclosing(read(client, prompt, ENDLESS)) as events:
                async for event in events:
                    text += event["text"]
                    if len(text) > 4:
                        break
            shared = min(len(text), len(whole.text))
            assert text[:shared] == whole.text[:shared]
            return
        params: dict[str, Any] = {"temperature": 0.0, "max_tokens": 32}
        async for event in read(client, prompt, {**params, "stop": [stop]} if i % 4 == 1 else params):
            assert not last, "nothing follows the last event"
            text += event["text"]
            last = event if "finish_reason" in event else {}
        assert last["usage"]["prompt_tokens"] == len(whole.prompt_token_ids)
        assert last["speculation"]["state"].startswith("on")
        if i % 4 == 1:
            assert text == whole.text[: whole.text.index(stop)]
            assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)
        else:
            assert text == whole.text and last["usage"]["completion_tokens"] == len(whole.token_ids)
            assert last["finish_reason"] == whole.finish_reason
            assert last["speculation"]["acceptance_length"] >= 1.0

    async def main() -> None:
        async with service.client() as client:
            before = await rest(client)
            await asyncio.gather(*(visit(client, i) for i in range(200)))
            after = await rest(client)
            assert after["finished"] - before["finished"] == 200

    asyncio.run(main())


def test_a_client_that_leaves_cancels_its_request(service: Service) -> None:
    async def main() -> None:
        async with service.client() as client:
            # Each would have gone on to the window of 2048. That takes half a second, which a busy machine
            # may need to leave: one of some that was cut off is enough.
            made = []
            for _ in range(8):
                before = await rest(client)
                async with contextlib.aclosing(read(client, PROMPTS[0], ENDLESS)) as events:
                    await anext(events)
                    assert (await client.get("/stats")).json()["running"] == 1
                after = await rest(client)
                made.append(after["tokens"] - before["tokens"])
                if made[-1] < 1500:
                    break
            assert made[-1] < 1500, made

    asyncio.run(main())


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"prompt": "x", "params": {"temperature": -1}}, "temperature must be a number from 0 to 1e6"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": [1, 9999]}, "prompt token 1 is 9999"),
        ({"prompt": [1] * 2049}, "the prompt has 2049 tokens, but the context window holds 2048"),
        ({"prompt": "x", "params": {"n": 2}}, "a stream has one sample"),
        ({"prompt": "x", "params": {"warmth": 1}}, "warmth"),
        ({"prompt": "x", "params": {"logit_bias": {"a": 1}}}, "logit_bias must map token ids to numbers"),
        (
            {"prompt": "x", "params": {"logit_bias": {"1": 10**400}}},
            "logit_bias must map token ids to numbers",
        ),
        (
            {"prompt": "x", "params": {"logit_bias": {"9" * 5000: 1}}},
            "logit_bias must map token ids to numbers",
        ),
        ({"prompt": "x", "params": {"timeout": 10**400}}, "timeout must be a number of seconds"),
        ({"prompt": [10**400]}, "prompt token 0 is 1000"),
        ({"prompt": "x", "params": {"\ud800": 1}}, "unexpected keyword argument"),
        ({"prompt": "x", "params": 3}, "body.params"),
        ({"prompt": "x", "more": 3}, "body.more"),
        ({"prompt": "x", "\ud800": 3}, "body: "),
        ({}, "a prompt is a string or a list of token ids, not NoneType"),
    ],
)
def test_a_wrong_request_gets_the_librarys_sentence(service: Service, body: Any, sentence: str) -> None:
    # In ASCII: a lone surrogate has no other way through.
    answer = httpx.post(f"{service.url}/generate", content=json.dumps(body), headers=JSON)
    assert answer.status_code == 400 and sentence in answer.json()["detail"]


def test_other_routes_and_parameters(service: Service) -> None:
    assert httpx.get(f"{service.url}/health").json() == {"status": "ok"}
    answer = httpx.post(f"{service.url}/chat", json={"messages": [{"role": "user", "content": "hello"}]})
    assert answer.status_code == 400 and "chat template" in answer.json()["detail"]
    assert httpx.post(f"{service.url}/generate", content=b"{").status_code == 400
    info = httpx.get(f"{service.url}/stats").json()["info"]
    assert info["dtype"] == "float64" and info["max_queue_size"] == 256
    params = {"logit_bias": {"0": 100.0}, "max_tokens": 9, "temperature": 0.0}
    answer = httpx.post(f"{service.url}/generate", json={"prompt": [7, 8], "params": params})
    [event] = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line]
    assert event["token_ids"] == [0] and event["finish_reason"] == "stop"
    params = {"logit_bias": {"0": float(1000)}, "max_tokens": 1, "logprobs": 3, "ignore_eos": True}
    answer = httpx.post(f"{service.url}/generate", json={"prompt": [7, 8], "params": params})
    [event] = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line]
    assert len(event["logprobs"]) == 1 and event["logprobs"][0]["0"] == 0.0
    params = {**ENDLESS, "timeout": 0.2}
    answer = httpx.post(f"{service.url}/generate", json={"prompt": "x", "params": params}, timeout=60)
    assert '"finish_reason": "abort"' in answer.text.strip().splitlines()[-1]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large_is_refused(service: Service, chunked: bool) -> None:
    body = json.dumps({"prompt": "x" * (1 << 20), "params": {"max_tokens": 1}}).encode()
    content = iter([body[:1000], body[1000:]]) if chunked else body
    answer = httpx.post(f"{service.url}/generate", content=content, timeout=60)
    assert answer.status_code == 413 and "more than 1048576 bytes" in answer.json()["detail"]


def in_process(decoder: DSparkDecoder, ping: float = 15.0) -> Any:
    """A client of the example's routes in this process; it sees a response when that has ended."""
    spec = importlib.util.spec_from_file_location("service", SERVICE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.PING = ping  # type: ignore[attr-defined]
    transport = httpx.ASGITransport(app=module.make_app(decoder))
    return httpx.AsyncClient(transport=transport, base_url="http://service")


def test_a_long_text_is_read_beside_the_event_loop(
    decoders: Callable[..., DSparkDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = decoders()
    threads: list[threading.Thread] = []
    encode = Tokenizer.encode

    def noted(*args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread())
        return encode(*args, **options)

    monkeypatch.setattr(Tokenizer, "encode", noted)

    async def main() -> None:
        async with in_process(decoder) as client:
            body = {"prompt": "import os", "params": {"max_tokens": 2}}
            assert (await client.post("/generate", json=body)).status_code == 200

    asyncio.run(main())
    assert threads and threading.main_thread() not in threads


def test_a_request_that_waits_is_not_silent() -> None:
    """Comments come until its turn does; then it is answered in full. Who leaves meanwhile is cancelled."""
    options = {"policy": "fixed", "max_batch_size": 1}
    body = {"prompt": PROMPTS[0], "params": {"temperature": 0.0, "max_tokens": 24}}

    async def main(decoder: DSparkDecoder) -> None:
        expected = decoder.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=24))
        first = decoder.astream(PROMPTS[1], SamplingParams(**ENDLESS))
        async with in_process(decoder, ping=0.02) as client:
            leaves, stays = (asyncio.create_task(client.post("/generate", json=body)) for _ in range(2))
            while decoder.stats()["queued"] < 2:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            assert decoder.stats()["running"] == 1 and decoder.stats()["queued"] == 2, "nobody was cut off"
            leaves.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await leaves
            while decoder.stats()["queued"] > 1:
                await asyncio.sleep(0.01)
            await first.aclose()  # type: ignore[attr-defined]
            blocks = (await stays).text.split("\n\n")
        waited = blocks.index(next(block for block in blocks if block.startswith("data: ")))
        assert waited > 2 and set(blocks[:waited]) == {": ping"}, blocks
        events = [json.loads(b.removeprefix("data: ")) for b in blocks if b.startswith("data: ")]
        assert "".join(event["text"] for event in events) == expected.text
        assert events[-1]["finish_reason"] == "length"

    with DSparkDecoder.from_pretrained("tiny", "tiny-draft", **options) as decoder:  # type: ignore[arg-type]
        asyncio.run(asyncio.wait_for(main(decoder), 60))


def test_an_engine_that_has_failed_is_no_healthy_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever runs ends with an error, and everything after it is a 503 that says so."""
    draft = Runner.draft

    def too_few_states(*args: Any) -> Any:
        base, hidden = draft(*args)
        return base, hidden[:1]  # a promise broken: the core panics

    monkeypatch.setattr(Runner, "draft", too_few_states)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    async def main(decoder: DSparkDecoder) -> None:
        async with in_process(decoder) as client:
            body = {"prompt": "import os", "params": {"max_tokens": 8, "temperature": 0.0}}
            assert (await client.get("/health")).status_code == 200
            assert "the engine has failed" in (await client.post("/generate", json=body)).text
            while decoder.state == "running":
                await asyncio.sleep(0.01)
            assert decoder.state == (await client.get("/stats")).json()["state"] == "failed"
            for answer in await client.get("/health"), await client.post("/generate", json=body):
                assert answer.status_code == 503 and "has failed" in answer.json()["detail"]
        with pytest.raises(CapacityError, match="the decoder has failed"):
            decoder.generate("import os")

    with DSparkDecoder.from_pretrained("tiny", "tiny-draft", policy="fixed") as decoder:
        asyncio.run(main(decoder))
    assert decoder.state == "closed"


def test_a_client_that_does_not_finish_its_request_does_not_hold_up_the_end() -> None:
    with Service("--grace", "1", "--linger", "1") as service:
        host, port = service.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as half:
            head = "POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            half.sendall(f"{head}Content-Length: 1000\r\n\r\n{{".encode())
            httpx.get(f"{service.url}/health")  # it has been seen
            service.process.send_signal(signal.SIGTERM)
            assert service.process.wait(20) in (0, -signal.SIGTERM), "".join(service.log)


def test_a_full_queue_and_the_end() -> None:
    """One place, two seats: who comes later is sent away at once.

    Then SIGTERM: what runs and waits may finish, new requests are sent away, and what takes longer than the
    grace time is aborted.
    """
    with Service("--max-batch-size", "1", "--max-queue-size", "2", "--grace", "1.5") as service:
        check_a_full_queue_and_the_end(service)


def check_a_full_queue_and_the_end(service: Service) -> None:
    ended: list[dict[str, Any]] = []

    async def stay(client: Any, params: dict[str, Any]) -> None:
        async for event in read(client, PROMPTS[0], params):
            if "finish_reason" in event:
                ended.append(event)

    async def state(client: Any, running: int, queued: int) -> None:
        while True:
            stats = (await client.get("/stats")).json()
            if (stats["running"], stats["queued"]) == (running, queued):
                return
            await asyncio.sleep(0.01)

    async def main() -> None:
        async with service.client() as client, service.client() as others:
            first = asyncio.create_task(stay(client, ENDLESS))
            await state(others, 1, 0)
            waiting = [asyncio.create_task(stay(client, {"temperature": 0.0, "max_tokens": 5}))]
            await state(others, 1, 1)
            waiting += [asyncio.create_task(stay(client, ENDLESS))]
            await state(others, 1, 2)
            body = {"prompt": PROMPTS[1], "params": ENDLESS}
            answers = await asyncio.gather(*(others.post("/generate", json=body) for _ in range(8)))
            assert {answer.status_code for answer in answers} == {503}
            assert all(answer.headers["retry-after"] == "1" for answer in answers)
            assert "max_queue_size = 2" in answers[0].json()["detail"]
            service.process.send_signal(signal.SIGTERM)
            while (await others.get("/health")).status_code != 503:
                await asyncio.sleep(0.01)
            answer = await others.post("/generate", json=body)
            assert answer.status_code == 503 and "shuts down" in answer.json()["detail"]
            first.cancel()
            await asyncio.gather(*waiting)

    asyncio.run(main())
    # uvicorn ends by the signal itself once it has shut down.
    assert service.process.wait(60) in (0, -signal.SIGTERM), "".join(service.log)
    assert [event["finish_reason"] for event in ended] == ["length", "abort"]
    assert not any("Traceback" in line for line in service.log), "".join(service.log)


def test_ctrl_c_is_an_orderly_end() -> None:
    with Service() as service:
        httpx.get(f"{service.url}/health")
        service.process.send_signal(signal.SIGINT)
        assert service.process.wait(20) == 0, "".join(service.log)
        assert "Traceback" not in "".join(service.log)

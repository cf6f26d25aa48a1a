"""transformers' own greedy generation, float32, in a process of its own.

Its OpenMP threads must not share a process with the engine's, or the two slow each other down.

Reads one line of JSON (`path`, `tokens`, `threads`), then answers every further line, a prompt's token ids.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


def start(path: Path, tokens: int, threads: int) -> Callable[[list[int]], None]:
    """Starts the process; each call of the returned function answers one prompt."""
    process = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    def ask(task: object) -> str:
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the process has no pipes")
        process.stdin.write(json.dumps(task) + "\n")
        process.stdin.flush()
        return process.stdout.readline()

    if ask({"path": str(path), "tokens": tokens, "threads": threads}) != "ready\n":
        raise RuntimeError("transformers could not be started; is it installed?")

    def answer(prompt: list[int]) -> None:
        if ask(prompt) != "done\n":
            raise RuntimeError("transformers ended before it had answered")

    return answer


def serve() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    task = json.loads(sys.stdin.readline())
    torch.set_num_threads(task["threads"])
    model = AutoModelForCausalLM.from_pretrained(task["path"], dtype=torch.float32).eval()
    print("ready", flush=True)
    for line in sys.stdin:
        ids = torch.tensor([json.loads(line)])
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=task["tokens"],
                min_new_tokens=task["tokens"],
                pad_token_id=0,
            )
        print("done", flush=True)


if __name__ == "__main__":
    serve()

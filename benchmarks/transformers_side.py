"""transformers' own greedy generation, float32, in a process of its own.

Its OpenMP threads must not share a process with the engine's, or the two slow each other down.

Reads one line of JSON (`path`, `prompt`, `tokens`, `threads`), then generates once for every further line.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


def start(path: Path, prompt: list[int], tokens: int, threads: int) -> Callable[[], object]:
    """Starts the process; each call of what is returned generates once."""
    process = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    def ask(line: str) -> str:
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the process has no pipes")
        process.stdin.write(line + "\n")
        process.stdin.flush()
        return process.stdout.readline()

    if (
        ask(json.dumps({"path": str(path), "prompt": prompt, "tokens": tokens, "threads": threads}))
        != "ready\n"
    ):
        raise RuntimeError("transformers could not be started; is it installed?")
    return lambda: ask("go")


def serve() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    task = json.loads(sys.stdin.readline())
    torch.set_num_threads(task["threads"])
    model = AutoModelForCausalLM.from_pretrained(task["path"], dtype=torch.float32).eval()
    ids = torch.tensor([task["prompt"]])
    print("ready", flush=True)
    for _ in sys.stdin:
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

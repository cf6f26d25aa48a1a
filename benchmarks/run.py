"""The short measurements of docs/benchmarks.md, one after the other; the long ones have commands there.

    python benchmarks/run.py    # about ten minutes on two cores; SmolLM2 only if it was fetched before

`make bench` runs this. The machine should do nothing else meanwhile.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from dspark.pretrained import cache_root

HERE = Path(__file__).resolve().parent


def run(script: str, *arguments: str) -> None:
    print(f"\n$ python benchmarks/{script} {' '.join(arguments)}", flush=True)
    subprocess.run([sys.executable, str(HERE / script), *arguments], check=True)


def main() -> None:
    run("core.py")
    run("loop.py", "--model", "tiny")
    run("whole.py", "--model", "tiny", "--turns", "5")
    if (cache_root() / "smollm2").is_dir():
        run("loop.py", "--model", "smollm2", "--turns", "3")
        run("whole.py", "--model", "smollm2", "--turns", "5")
    else:
        print("\nSmolLM2 is not here: `make demo MODEL=smollm2` fetches it.")


if __name__ == "__main__":
    main()

"""The licences of the crates that are linked into the extension, for the wheel: notices.py FILE.

Each crate's own licence files, as cargo has them; for a crate without any, the name of its licence.
"""

import json
import subprocess
import sys
from pathlib import Path

ARGUMENTS = ("--locked", "--features", "python")
NAMES = ("LICENSE*", "LICENCE*", "COPYING*", "NOTICE*", "UNLICENSE*")


def cargo(*arguments: str) -> str:
    return subprocess.run(
        ["cargo", *arguments, *ARGUMENTS], check=True, capture_output=True, text=True
    ).stdout


def main() -> None:
    tree = cargo("tree", "--edges", "normal,no-proc-macro", "--prefix", "none", "--format", "{p}")
    linked = {tuple(line.split()[:2]) for line in tree.splitlines()}
    parts = ["The extension of dspark is linked with these crates.\n"]
    for package in json.loads(cargo("metadata", "--format-version", "1"))["packages"]:
        if (package["name"], f"v{package['version']}") not in linked or package["source"] is None:
            continue
        place = Path(package["manifest_path"]).parent
        files = sorted({file for name in NAMES for file in place.glob(name) if file.is_file()})
        parts.append(f"{'=' * 80}\n{package['name']} {package['version']}: {package['license']}\n")
        parts += [file.read_text(encoding="utf-8", errors="replace") for file in files]
    Path(sys.argv[1]).write_text("\n".join(parts), encoding="utf-8")


if __name__ == "__main__":
    main()

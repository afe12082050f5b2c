"""What a request says is the same whether its blocks can be loaded or not: four runs, and a comparison.

    python examples/kv_load_failure_recovery.py --model ./my-model

The first run computes prompts and leaves their blocks in a folder. Three others answer them: with all blocks,
with a connector that loses some while they are loaded, and with one that loses some while they are brought
near (failing_connector.py). What is lost is computed. Exits with 1, and the difference, if answers differ.
"""

from __future__ import annotations

import argparse
import difflib
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
FAILING = ("--connector", "FailingConnector", "--connector-module", "failing_connector")
DECODES = {"normal": (), "sync": FAILING, "async": (*FAILING, "--async-load")}
"""Name of a run -> what it adds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="(default: the demo model)")
    parser.add_argument("--folder", default="kv_recovery", help="(default: kv_recovery)")
    parser.add_argument("--repeat", type=int, default=100, help="words of a prompt (default: 100)")
    args = parser.parse_args()
    folder = Path(args.folder)
    folder.mkdir(parents=True, exist_ok=True)
    words = ["--storage", str(folder / "storage"), "--prompts", str(folder / "output.txt")]
    words += ["--model", args.model] if args.model else []
    staged("prefill", *words, "--repeat", str(args.repeat))
    answers = {}
    for name, more in DECODES.items():
        file = folder / f"{name}.txt"
        staged("decode", *words, *more, "--answers", str(file))
        answers[name] = file.read_text(encoding="utf-8")
    for name in ("sync", "async"):
        compare(answers["normal"], answers[name], name)
    print("answers are the same with and without lost blocks")


def staged(*words: str) -> None:
    """Run a stage; exit with its status if it fails."""
    modules = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": modules}
    script = HERE / "disaggregated_prefill_files.py"
    status = subprocess.run([sys.executable, str(script), *words], env=environment).returncode
    if status:
        sys.exit(status)


def compare(expected: str, found: str, name: str) -> None:
    """Raises: SystemExit: they differ; the difference is printed."""
    if found != expected:
        lines = difflib.unified_diff(expected.splitlines(), found.splitlines(), "normal", name)
        print("\n".join(lines))
        sys.exit(1)


if __name__ == "__main__":
    main()

"""Hash what every model family computes, so that a change of its code can be shown to change no bit.

Each test class of parity in ``packages/models/tests`` makes its tiny random checkpoint; the model runs
here in float32 over a paged cache: a prefill of three prompts of different lengths, a chunk and a
prefill beside it, and four decode steps. Encoders run once. What comes out is hashed::

    python tools/model_bits.py before.json          # every family
    python tools/model_bits.py --compare before.json --only Llama  # cases whose name has "Llama"

The file is JSON: ``architecture -> test case -> SHA-256 of its float32 logits``. With ``--compare`` the
exit status is 1 if a hash differs or a family that is stored has no case any more.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1] / "packages" / "models" / "tests"
sys.path.insert(0, str(TESTS))
importlib.import_module("conftest")  # offline, and one thread

import torch  # noqa: E402
from model_families_conformance import FamilyConformance  # noqa: E402
from pooling_families_conformance import PoolingFamilyConformance  # noqa: E402

from headrace_testing.model.decoders import PagedDriver  # noqa: E402

LENGTHS = (5, 17, 30)
"""Of the prompts of a batch."""
DECODE_STEPS = 4
Bits = dict[str, dict[str, str]]


def cases(only: str) -> Iterator[tuple[str, Any]]:
    """``module.Class`` and an instance, of each test class of parity whose name has ``only``."""
    for path in sorted(TESTS.glob("test_*.py")):
        if "FamilyConformance" in path.read_text() or "RelaidConformance" in path.read_text():
            importlib.import_module(path.stem)
    waiting: list[type] = [FamilyConformance, PoolingFamilyConformance]
    seen: dict[str, type] = {}
    while waiting:
        found = waiting.pop()
        waiting += found.__subclasses__()
        if found.__name__.startswith("Test"):
            seen[f"{found.__module__}.{found.__name__}"] = found
    for name in sorted(seen):
        if only.lower() in name.lower():
            yield name, seen[name]()


def architecture(folder: Path) -> str:
    """The name in the checkpoint's ``config.json``."""
    name: str = json.loads((folder / "config.json").read_text())["architectures"][0]
    return name


def decoder_outputs(case: FamilyConformance, folder: Path) -> Iterator[torch.Tensor]:
    """Logits [T, V] of each step."""
    driver = PagedDriver(case.open(folder))
    prompts = {str(length): case.prompt(length, length) for length in LENGTHS}
    yield driver.step(prompts)
    late = case.prompt(13, 13)
    yield driver.step({"late": late[:6], "5": case.prompt(1, 1)})
    yield driver.step({"late": late[6:]})
    for step in range(DECODE_STEPS):
        yield driver.step({name: case.prompt(1, step) for name in [*prompts, "late"]})


def pooling_outputs(case: PoolingFamilyConformance, folder: Path) -> Iterator[torch.Tensor]:
    """Hidden states [n, H] of each prompt, then the pooled results."""
    model, prompts = case.open(folder), case.prompts()
    yield from case.hidden(model, prompts)
    yield from case.pooled(model, prompts, [case.params()] * len(prompts))


def whisper_outputs(folder: Path) -> Iterator[torch.Tensor]:
    """Logits [T, V] of two clips' first tokens and of a decode step."""
    from headrace_testing.model.encoder_decoders import EncoderDecoderDriver

    whisper = importlib.import_module("test_whisper")
    whisper.make(folder)
    driver = EncoderDecoderDriver(whisper.opened(folder))
    chunks = {"a": whisper.PROMPT, "b": [*whisper.PROMPT, 7, 9]}
    media = {name: whisper.clip(seed) for seed, name in enumerate(chunks)}
    yield driver.listen(chunks, media, whisper.STATES)
    yield driver.listen({"a": [5], "b": [6]})


def digest(outputs: Iterator[torch.Tensor]) -> str:
    """SHA-256 of the tensors' shapes and float32 values."""
    whole = hashlib.sha256()
    for output in outputs:
        values = output.detach().float().contiguous()
        whole.update(str(tuple(values.shape)).encode())
        whole.update(values.numpy().tobytes())
    return whole.hexdigest()


def one_case(case: Any, folder: Path) -> tuple[str, str]:
    """The architecture and the hash of one test class."""
    torch.manual_seed(0)
    case.make_checkpoint(folder)
    run = pooling_outputs if isinstance(case, PoolingFamilyConformance) else decoder_outputs
    return architecture(folder), digest(run(case, folder))


def measure(only: str) -> tuple[Bits, list[str]]:
    """All hashes, and the cases that failed, with the reason."""
    bits: Bits = {}
    failed: list[str] = []
    for name, case in cases(only):
        with tempfile.TemporaryDirectory() as folder:
            try:
                family, found = one_case(case, Path(folder))
            except Exception as error:  # so that one broken family hides no other
                failed.append(f"{name}: {type(error).__name__}: {error}".splitlines()[0])
                continue
        bits.setdefault(family, {})[name] = found
    if only.lower() in "test_whisper":
        with tempfile.TemporaryDirectory() as folder:
            hashed = digest(whisper_outputs(Path(folder)))
        bits.setdefault("WhisperForConditionalGeneration", {})["test_whisper"] = hashed
    return bits, failed


def differences(before: Bits, after: Bits, *, partly: bool) -> list[str]:
    """A line for each case that differs or is missing; ``partly``: ``after`` holds only some."""
    lines = []
    for family, stored in sorted(before.items()):
        for name, value in sorted(stored.items()):
            found = after.get(family, {}).get(name)
            if found is None and not partly:
                lines.append(f"{family} {name}: not run")
            elif found is not None and found != value:
                lines.append(f"{family} {name}: {value[:12]} became {found[:12]}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 1 if a case failed or differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", nargs="?", type=Path, help="where the hashes are written")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="hashes to compare with")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name has this")
    options = parser.parse_args(arguments)
    bits, problems = measure(options.only)
    if options.output:
        options.output.write_text(json.dumps(bits, indent=1, sort_keys=True) + "\n")
    if options.compare:
        before = json.loads(options.compare.read_text())
        problems += differences(before, bits, partly=bool(options.only))
    print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    print(
        f"{sum(map(len, bits.values()))} cases of {len(bits)} architectures; {len(problems)} wrong"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

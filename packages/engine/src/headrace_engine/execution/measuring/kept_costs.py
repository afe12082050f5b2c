"""The cost of the largest step, kept in a file for the next start of the same model with the same settings.

Measuring it takes as long as a prompt of some hundred tokens, at every start; what it measures differs only
where the model, the settings, the code or the machine do.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

MAX_FILES = 256
"""Files that a folder keeps: those that were used last."""
MAX_FILE_BYTES = 1024
MAX_BYTES, MAX_SECONDS = 2**48, 1e5
"""A file that says more is damaged."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Bytes that the largest step adds at its peak, and its seconds; of media beside them the same."""

    activations: int
    seconds: float
    media: int = 0
    media_seconds: float = 0.0


class KeptCosts:
    """The cost of one subject's largest step, in a folder of such files.

    A folder that cannot be read or written is as if it were empty: a start measures then. So is a file
    that holds anything but a cost.

    Args:
        folder: made when something is kept.
        subject: whatever the cost depends on, as JSON has it; values that JSON does not know are told
            apart by their text.
    """

    def __init__(self, folder: Path, subject: Mapping[str, Any]) -> None:
        text = json.dumps(subject, sort_keys=True, default=str)
        self._folder = folder
        self._file = folder / f"{hashlib.sha256(text.encode()).hexdigest()}.json"

    def find(self) -> StepCost | None:
        """What an earlier start kept, if it did."""
        try:
            with self._file.open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
            cost = _checked(content)
        except (OSError, ValueError, RecursionError) as error:
            if not isinstance(error, FileNotFoundError):
                logger.debug("%s is not used: %s", self._file, error)
            return None
        with suppress(OSError):
            os.utime(self._file)  # it has been used
        return cost

    def keep(self, cost: StepCost) -> None:
        """Write it for the next start, whole or not at all."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, name = tempfile.mkstemp(dir=self._folder, suffix=".part")
            try:
                with os.fdopen(handle, "w", encoding="ascii") as file:
                    json.dump(asdict(cost), file)
                os.replace(name, self._file)
            except BaseException:
                os.unlink(name)
                raise
            self._drop_old()
        except OSError as error:
            logger.debug("the start's measurements are not kept: %s", error)

    def _drop_old(self) -> None:
        """Remove what was used longest ago, beyond the number of files that are kept."""
        files = list(self._folder.glob("*.json"))
        if len(files) <= MAX_FILES:
            return
        for file in sorted(files, key=_used)[:-MAX_FILES]:
            file.unlink(missing_ok=True)


def _used(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except FileNotFoundError:  # another start has removed it
        return 0.0


def _checked(content: bytes) -> StepCost:
    """A file's content.

    Raises:
        ValueError: it is no cost.
    """
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"more than {MAX_FILE_BYTES} bytes")
    fields = json.loads(content)
    if not isinstance(fields, dict) or fields.keys() != StepCost.__dataclass_fields__.keys():
        raise ValueError("not the fields of a cost")
    for name, value in fields.items():
        most = MAX_SECONDS if name.endswith("seconds") else MAX_BYTES
        kinds = (int, float) if name.endswith("seconds") else (int,)
        if type(value) not in kinds or not 0 <= value <= most:
            raise ValueError(f"{name} = {value!r}")
    return StepCost(**fields)

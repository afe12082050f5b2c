"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): a request's name for one, and a model's slots.

An adapter adds ``scale * up @ down`` to weights of a model. A built model has a few *slots*, each of which
holds the factors of one adapter for all its layers, and every row of a step has a slot or none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Protocol

from headrace_core.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """The adapter that a request is computed with.

    Raises:
        RequestError: name or path is empty or no text, or the id no integer from 1.
    """

    lora_name: str
    """For people; several may share an id, which alone says what the adapter is."""
    lora_int_id: int
    """From 1; unique within an engine: another path under the id of a loaded adapter is refused."""
    lora_path: str
    """Folder of ``adapter_config.json`` and the weights; a path object becomes its text."""
    base_model_name: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.lora_path, PathLike):
            object.__setattr__(self, "lora_path", fspath(self.lora_path))
        for field in ("lora_name", "lora_path"):
            if not isinstance(value := getattr(self, field), str) or not value:
                raise RequestError(
                    f"{field} = {value!r:.200}: must be a text, and not empty", param=field
                )
        if type(number := self.lora_int_id) is not int or not 1 <= number < 2**63:
            raise RequestError(
                f"lora_int_id = {number!r:.100}: must be an integer of at least 1, below 2^63",
                param="lora_int_id",
            )


def media_adapters(paths: Mapping[str, str]) -> dict[str, LoRARequest]:
    """Adapters of prompts that bring media and name none: modality, or several joined by ``+`` in
    alphabetical order (in ``paths`` in any) -> the adapter. Ids are 1, 2, ... in the order of single
    modalities, then of several, which share that of a single one with the same path."""
    ordered = {"+".join(sorted(key.split("+"))): path for key, path in paths.items()}
    found: dict[str, LoRARequest] = {}
    for key in sorted(ordered, key=lambda key: (key.count("+"), key)):
        same = (one for one in found.values() if "+" in key and one.lora_path == ordered[key])
        number = len({one.lora_int_id for one in found.values()}) + 1
        found[key] = next(same, None) or LoRARequest(key, number, ordered[key])
    return found


class AdapterSlots(Protocol):
    """The slots of one built model, on its device."""

    @property
    def num_slots(self) -> int: ...
    @property
    def num_bytes(self) -> int:
        """Memory of the slots."""

    @property
    def runs_eagerly(self) -> bool:
        """True while what a slot holds is nothing that recorded steps with adapters compute."""

    def read(self, path: str) -> Any:
        """Read an adapter into the host's memory and check that all of it has a place. Any thread.

        Returns:
            Something with ``num_bytes``, ``digest``, a text that names its content, and ``changes_media``:
            True if it changes towers for media or their projectors.

        Raises:
            WeightsError, UnsupportedModel: a file, setting, rank or tensor that cannot be used; says why.
        """

    def place(self, slot: int, adapter: Any) -> None:
        """Make a slot hold what :meth:`read` returned, in place of what it held. No step may run."""

    def choose_media(self, slot: int | None) -> None:
        """Say which slot the media have that are embedded next; None: none, as at the beginning."""

    def choose(self, tokens: Tensor | None, logits: Tensor | None = None) -> None:
        """Say which slots the rows of the coming forward pass have: -1 none.

        Memory is copied, at fixed addresses, so that captured steps see it. A recording is made, and
        replayed, with both or with None.

        Args:
            tokens: [T] int32; of the batch's tokens. None: no row of the pass has an adapter.
            logits: [R] int32; of the hidden states that logits are computed of.
        """

"""Every architecture that headrace serves with a class of its own, one row each.

The entry points of ``headrace.models``, what ``headrace models`` prints, the page of supported models
and the check that each row has a test of parity are made of, or compared with, this one table. A module
here holds the rows of one kind of model, by name.
"""

from collections.abc import Mapping

from headrace_models.catalogue import (
    decoders,
    gpt,
    latent,
    mixtures,
    pooled,
    recurrent,
    remote,
    speech,
)
from headrace_models.catalogue.row import CACHES, Architecture

_KINDS = (decoders, gpt, latent, mixtures, pooled, recurrent, remote, speech)
ARCHITECTURES: Mapping[str, Architecture] = {
    row.name: row for row in sorted((r for kind in _KINDS for r in kind.ROWS), key=lambda r: r.name)
}
"""Row by architecture name."""

__all__ = ["ARCHITECTURES", "CACHES", "Architecture"]

"""Models of engines that only encode media: the towers whole, and of the language model one layer.

One layer is what a cache's plan and a model's class need; nothing runs it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headrace_core.model import WeightRule

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

LAYERS = "num_hidden_layers"
_WHY = "a layer of the language model, which this engine does not run"


def with_one_layer(context: BuildContext) -> BuildContext:
    """The context of a model with one layer; unchanged if its config counts no layers."""
    config = context.config
    count = config.get(LAYERS)
    if type(count) is not int or count < 2:
        return context
    return replace(context, config={**config, **_cut(config, count), LAYERS: 1})


def layers_passed_over(rules: Sequence[WeightRule]) -> dict[str, str]:
    """Patterns of names of tensors that have a number in them, which the model may not wait for -> why."""
    sources = [rule.source for rule in rules if "{}" in rule.source]
    return {rf"{re.escape(source).replace(PLACE, '[^.]+')}(\..*)?": _WHY for source in sources}


PLACE = re.escape("{}")


def _cut(config: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Lists with an entry for each layer, as the first one has it."""
    return {
        key: value[:1]
        for key, value in config.items()
        if "layer" in key and isinstance(value, list) and len(value) == count
    }

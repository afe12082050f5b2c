"""Layers that predict further tokens, which checkpoints carry behind the model's last one (DeepSeek V3,
arXiv:2412.19437, section 2.2). The model passes over them: see :mod:`headrace_models.speculators.mtp`."""

from __future__ import annotations

from collections.abc import Mapping

from headrace_models.config.settings import Settings

MAX_FURTHER = 64


def further_layers(settings: Settings, num_layers: int) -> Mapping[str, str]:
    """Layers that a model of ``num_layers`` passes over (:class:`headrace_core.model.IgnoresWeights`): as
    many as ``num_nextn_predict_layers`` says, by default one."""
    more = settings.integer("num_nextn_predict_layers", 1, minimum=0, maximum=MAX_FURTHER)
    numbers = "|".join(str(index) for index in range(num_layers, num_layers + more))
    return {rf"model\.layers\.({numbers})\..*": "predicts more than one token"} if more else {}

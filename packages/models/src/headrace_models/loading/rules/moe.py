"""Weight rules of mixtures of experts, in the layouts that checkpoints have them in."""

from __future__ import annotations

from headrace_core.model import WeightRule
from headrace_models.layers.moe.experts import GATED_NAMES
from headrace_models.loading.mapping import ALL_PARTS

EXPERT_NAMES = ("w1", "w3", "w2")
"""Gate, up and down, as Mixtral's checkpoints call them."""


def expert_rules(
    source: str = "model.layers.{}.mlp.experts",
    target: str = "layers.{}.mlp.experts",
    names: tuple[str, str, str] = GATED_NAMES,
) -> tuple[WeightRule, ...]:
    """One tensor for each matrix of each expert, as most checkpoints have it; or all experts' together,
    as transformers 5 writes if it is not asked to keep the published layout."""
    gate, up, down = (f"{source}.{{}}.{name}" for name in names)
    return (
        WeightRule(gate, f"{target}.{{}}.gate_up", part=0),
        WeightRule(up, f"{target}.{{}}.gate_up", part=1),
        WeightRule(down, f"{target}.{{}}.down"),
        *stacked_rules(f"{source}.gate_up_proj", f"{source}.down_proj", target),
    )


def stacked_rules(
    gate_up: str,
    down: str,
    target: str = "layers.{}.mlp.experts",
    *,
    transposed: bool = False,
    interleaved: bool = False,
) -> tuple[WeightRule, ...]:
    """All experts' gates and ups in one tensor [E, 2I, H], all downs in one [E, H, I].

    Args:
        gate_up, down: names of the tensors.
        transposed: they are [E, H, 2I] and [E, I, H].
        interleaved: gates and ups alternate.
    """
    return (
        WeightRule(
            gate_up,
            f"{target}.{{}}.gate_up.weight",
            split=ALL_PARTS,
            stacked=True,
            transposed=transposed,
            interleaved=interleaved,
        ),
        WeightRule(down, f"{target}.{{}}.down.weight", stacked=True, transposed=transposed),
    )


def shared_rules(
    source: str = "model.layers.{}.mlp.shared_experts",
    target: str = "layers.{}.mlp.shared",
) -> tuple[WeightRule, ...]:
    """A gated MLP that all tokens go to."""
    gate, up, down = (f"{source}.{name}" for name in GATED_NAMES)
    return (
        WeightRule(gate, f"{target}.gate_up", part=0),
        WeightRule(up, f"{target}.gate_up", part=1),
        WeightRule(down, f"{target}.down"),
    )


def router_rules(
    source: str = "model.layers.{}.mlp.gate",
    correction: str = "model.layers.{}.mlp.gate.e_score_correction_bias",
    target: str = "layers.{}.mlp.router",
) -> tuple[WeightRule, ...]:
    """A linear layer, and what corrects its scores."""
    return (WeightRule(source, target), WeightRule(correction, f"{target}.correction"))

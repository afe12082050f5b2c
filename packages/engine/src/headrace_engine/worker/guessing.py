"""Who guesses tokens that a worker's steps check besides: a model, a head, a proposer alone, or nobody."""

from __future__ import annotations

from headrace_core.kv import KVCacheConfig
from headrace_core.model import CausalLM, DividesVocabulary
from headrace_engine.execution.requests import RequestTable
from headrace_engine.execution.runner import ModelRunner
from headrace_engine.kv.spare_states import spare_states
from headrace_engine.kv.states import state_groups
from headrace_engine.sampling.sampler import Sampler
from headrace_engine.speculation.draft_context import DraftContext
from headrace_engine.speculation.draft_head import DraftHead
from headrace_engine.speculation.draft_model import DraftModelProposer
from headrace_engine.speculation.head import HeadProposer
from headrace_engine.speculation.state_turns import StateTurns
from headrace_engine.worker.settings import WorkerSettings

ModelProposer = DraftModelProposer | HeadProposer
"""What guesses by a model's passes."""


def let_guess(
    runner: ModelRunner,
    cache: KVCacheConfig,
    model: CausalLM,
    *,
    draft: CausalLM | None,
    head: DraftHead | None,
    settings: WorkerSettings,
    sampler: Sampler,
) -> ModelProposer | None:
    """Let a new runner have guesses, if there are to be any.

    Args:
        cache: of the runner's model.
        model: the runner's.
        draft: the model that guesses; None: none does.
        head: what guesses by the model's hidden states, if no model does; None: nothing does.
        sampler: chooses the guesses.

    Returns:
        What guesses by passes of its own; None: a proposer without a model, or nobody.
    """
    drafts = settings.drafts
    made: ModelProposer | None = None
    max_len = settings.limits.max_model_len if draft is None else drafts.max_len
    context = DraftContext(
        runner.requests, runner.with_metadata, sampler, runner.block_size, runner.device, max_len
    )
    if draft is not None:
        made = DraftModelProposer(draft, context)
    elif head is not None:
        made = HeadProposer(head, context, _led_methods(head, model, settings))
    if made is not None:
        runner.requests.follow(made)
    proposer = made or drafts.config.make_proposer()
    if proposer is not None:
        runner.guess_by(
            proposer,
            adapts=drafts.config.adaptive,
            takes_time=made is not None,
            turns=_state_turns(runner.requests, cache, settings),
        )
    return made


def _led_methods(head: DraftHead, model: CausalLM, settings: WorkerSettings) -> frozenset[str]:
    """Methods of a head that are the model's, and in which other ranks take part."""
    if settings.ranks.leader is None or not isinstance(model, DividesVocabulary):
        return frozenset()
    return frozenset(head.target_methods).intersection(model.vocabulary_passes)


def _state_turns(
    table: RequestTable, cache: KVCacheConfig, settings: WorkerSettings
) -> StateTurns | None:
    """Where states are while guesses are checked, if layers have any."""
    if not state_groups(cache):
        return None
    count = spare_states(settings.drafts.config.num_drafts, settings.limits.max_num_seqs)
    return StateTurns(table, cache, count)

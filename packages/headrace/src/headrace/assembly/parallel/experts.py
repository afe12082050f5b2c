"""Expert parallelism: what divides a model's mixtures over ranks, and what moves experts between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from headrace.assembly.parallel.agreed_moves import (
    AfterPasses,
    AfterSteps,
    AgreedMoves,
    MoveKind,
)
from headrace_core import plugins
from headrace_core.errors import ConfigError, ModelError, UnsupportedModel
from headrace_engine.lockstep.waves import Waves
from headrace_engine.multiproc.expert_settings import EPLBSettings, eplb_settings

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.assembly.parallel.ranks import Ranks
    from headrace_core.batch import ForwardBatch
    from headrace_core.model import CausalLM, ModelInfo
    from headrace_core.parallel import Communicator
    from headrace_distributed.eplb.background import BackgroundExchange
    from headrace_distributed.eplb.balancer import ExpertBalancer
    from headrace_distributed.eplb.moves import Places
    from headrace_engine.config import EngineConfig
    from headrace_engine.multiproc.config import ParallelConfig
    from headrace_models.layers.base import Layer
    from headrace_models.layers.moe.division import ExpertDivision
    from headrace_models.layers.moe.exchange import RowExchange
    from headrace_models.layers.moe.experts import Experts

PASSES_OF_ENGINES = ("forward", "forward_streams")
"""Methods of models whose mixtures exchange rows between engines."""
POLICIES = "headrace.eplb_policies"
_ON, _EPLB = "parallel.enable_expert_parallel", "parallel.enable_eplb"


def check_experts(config: EngineConfig, info: ModelInfo) -> None:
    """Refuse expert parallelism where experts cannot be divided whole; of a model's own code that shows when
    it is built.

    Raises:
        ConfigError: naming the setting.
        PluginNotFound: the policy is not installed.
    """
    if not config.parallel.enable_expert_parallel:
        return
    if info.source == "transformers":
        raise ConfigError(
            f"{_ON} = True: must be left out with the code of transformers (model_impl), whose experts are "
            "divided by their columns",
            field=_ON,
        )
    _check_shared(config, info)
    if config.parallel.enable_eplb:
        plugins.find(POLICIES, eplb_settings(config.parallel.eplb_config).policy)


def _check_shared(config: EngineConfig, info: ModelInfo) -> None:
    """Refuse what engines with experts in common have not been combined with."""
    if not config.parallel.shares_experts:
        return
    if info.runner != "generate":
        field = "model.runner"
        raise ConfigError(
            f"{field} = {info.runner!r}: must be 'generate' while {config.parallel.describe_ranks()}: passes "
            "that pool are an engine's own; without enable_expert_parallel engines are independent",
            field=field,
        )


def divided_experts(
    config: ParallelConfig, ranks: Ranks, max_tokens: int
) -> DividedMixtures | None:
    """Divides the experts of the model that is built next; None: they are divided by columns, or whole.

    Args:
        max_tokens: of a step.
    """
    if not config.enable_expert_parallel or not (ranks.are_several or ranks.num_engines > 1):
        return None
    from headrace_models.layers.moe.division import ExpertDivision

    settings, counts = eplb_settings(config.eplb_config), ranks.lane == ranks.engine == 0
    division = ExpertDivision(
        config.expert_placement_strategy,
        redundant=settings.num_redundant_experts,
        may_move=config.enable_eplb,
        counts=max_tokens * ranks.num_engines if config.enable_eplb and counts else 0,
        engine=ranks.engine,
        num_engines=ranks.num_engines,
    )
    return DividedMixtures(division, ranks, settings if config.enable_eplb else None)


def check_mixtures(division: ExpertDivision, architecture: str) -> None:
    """Raises: ConfigError: the model that was built with a division has no such mixtures."""
    if not division.mixtures:
        raise ConfigError(
            f"{_ON} = True: must be left out for {architecture}: it has no mixtures whose experts ranks "
            "can have whole",
            field=_ON,
        )


class _Move(NamedTuple):
    """Experts of one mixture on their way."""

    mixture: int
    places: list[list[int]]
    exchange: BackgroundExchange


class DividedMixtures:
    """A model's mixtures whose experts ranks have whole, on one rank.

    Args:
        division: has the mixtures once the model is built.
        settings: how experts move; None: they do not.
    """

    def __init__(
        self, division: ExpertDivision, ranks: Ranks, settings: EPLBSettings | None = None
    ) -> None:
        self.division, self._ranks, self._settings = division, ranks, settings
        self._moving: _Move | None = None
        self.waves = Waves()
        """Told of the passes of engines that share experts."""
        self._group: Communicator | None = None
        """All ranks of these engines."""
        self._agreed: AgreedMoves | None = None
        """Moves that the first rank of these engines, or of a stage, tells of; None: rank 0 leads them."""
        self._balancer: ExpertBalancer | None = None
        """Of this stage, on its first rank."""
        self._sizes: dict[str, list[list[int]]] = {}
        """Bytes of the weights of experts, by mixture and slot, which all ranks were seen to have alike."""
        self._is_serving = self._has_run = False

    def check_found(self, architecture: str) -> None:
        """See :func:`check_mixtures`."""
        check_mixtures(self.division, architecture)

    def forget(self) -> None:
        """The model has gone, and weights that are on their way with it; another one may be built. Every rank
        must call it."""
        self.close()
        self.division.forget()
        self._agreed = None
        self._is_serving = False

    def take_over(self, other: DividedMixtures) -> None:
        """The model whose mixtures are the other's serves now in the place of this one's, which has gone."""
        self.division = other.division

    @property
    def may_move(self) -> bool:
        """True if experts move while the model serves."""
        return self._settings is not None

    def settle(self, model: CausalLM) -> None:
        """See that loaded experts can move, if they are to. Every rank must call it for the first model; what
        is read in its place later is compared with that one, so that no rank waits for one that cannot read
        it.

        Raises:
            ConfigError: some are stored so that they cannot.
        """
        if self._settings is None:
            return
        if self._ranks.num_stages > 1:
            self.division.keep(cast("Layer", model))
            self._agreed = AgreedMoves(self, self._dividing())
        if self._settings.use_async:
            self._ranks.moving_group()  # in which all meet while they load
        for mixture in self.division.mixtures:
            if not self._may_move(mixture):
                raise ConfigError(
                    f"{_EPLB} = True: must be left out for this checkpoint: experts of {mixture.name} are "
                    "stored in different ways or sizes, so that one cannot take the place of another",
                    field=_EPLB,
                )

    def _may_move(self, mixture: Experts) -> bool:
        """True if the weights of all experts on all ranks have the same sizes."""
        from headrace_distributed.eplb.moves import are_alike
        from headrace_models.layers.moe.moving import slot_weights

        weights, name = slot_weights(mixture), mixture.name
        if weights is None:
            return False
        sizes = [[tensor.nbytes for tensor in tensors] for tensors in weights]
        if name in self._sizes:
            return sizes == self._sizes[name]
        if not are_alike(weights, self._dividing()):
            return False
        self._sizes[name] = sizes
        return True

    def meet_engines(self, model: CausalLM) -> None:
        """Let a model's passes be those of all engines that share its experts, if there are several. Every
        rank of every engine must call it, and then :meth:`begin_serving`."""
        exchange = self.division.exchange
        if exchange is None:
            return
        self._group = self._ranks.expert_group()
        for name in PASSES_OF_ENGINES:
            own = getattr(model, name, None)
            if own is not None:
                setattr(model, name, partial(self._run_pass, exchange, own))
        if self._settings is not None:
            self._agreed = AgreedMoves(self, self._group, exchange.call_all)
            exchange.between = self._agreed.follow

    def _dividing(self) -> Communicator:
        """The group of all ranks that divide the experts."""
        return self._ranks.communicator() if self._group is None else self._group

    def begin_serving(self) -> None:
        """From now on passes are those of all engines; so far they were this one's, to measure.

        Raises:
            UnsupportedModel: a mixture is not called once a pass with every token, so that engines could not
                know what the others do.
        """
        exchange = self.division.exchange
        if exchange is None:
            self._begin_stage()
            return
        called = [call.experts for call in exchange.calls]
        for mixture in self.division.mixtures:
            if called.count(mixture) != 1:
                raise UnsupportedModel(
                    f"{mixture.name}: called {called.count(mixture)} times in a pass: data_parallel_size "
                    f"must be 1, or {_ON} left out, for mixtures that not every token goes to once"
                )
        assert self._group is not None
        exchange.start(self._group)
        self._is_serving = True

    def _begin_stage(self) -> None:
        """Count from now on where tokens go, on the first rank of a stage that has mixtures."""
        if self._settings is None or self._ranks.num_stages == 1 or self._ranks.lane:
            return
        if self.division.mixtures:
            self._balancer = self._balancer or self._make_balancer(self._settings)
            self._balancer.begin()

    def balance_experts(self) -> None:
        """A step has run: move the experts of this stage, if it is time to. Every rank of all stages must
        call it between the same two passes."""
        if self._agreed is None or not self.division.mixtures:
            return
        if self._balancer is None:
            self._agreed.follow_all()
            return
        self._balancer.after_step()
        self._agreed.lead(MoveKind.NO_MORE)

    def _run_pass(
        self, exchange: RowExchange, own: Callable[..., Any], batch: ForwardBatch, *rest: Any
    ) -> Any:
        """A pass of this engine, in which it has rows."""
        if exchange.counts:  # within a pass that has begun
            return own(batch, *rest)
        if self._is_serving:
            self.waves.enter()
        with exchange.one_pass(batch.num_tokens):
            result = own(batch, *rest)
        self._has_run = True
        return result

    @property
    def meets_engines(self) -> bool:
        """True if passes are those of several engines."""
        return self.division.exchange is not None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """For the block, steps are recorded, in which exchanges with other engines are calls like others."""
        exchange = self.division.exchange
        assert exchange is not None
        assert self._group is not None
        with exchange.recording(self._group):
            yield

    def run_recorded(
        self, num_tokens: int, recorded: Callable[[int], Any], eager: Callable[[], Any]
    ) -> Any:
        """A pass of this engine for which it has a recording.

        Args:
            num_tokens: of its batch.
            recorded: runs the recording, given the tokens to which the batch is padded: all other engines
                with rows have one, too.
            eager: runs the pass without.
        """
        exchange = self.division.exchange
        assert exchange is not None
        self.waves.enter()
        with exchange.one_pass(num_tokens, has_recording=True) as counts:
            if exchange.is_even:
                result = recorded(counts[self.division.engine])
                exchange.replayed()
            else:
                result = eager()
        self._has_run = True
        return result

    def take_part(self) -> bool:
        """A pass in which this engine has no rows; False: no engine has any, and nothing was computed. All
        ranks of the engine must call it."""
        return self._run_empty(0)

    def take_leave(self) -> bool:
        """As :meth:`take_part`, of an engine that is to end; True: so are all others, or none runs passes, as
        all sleep or have no weights."""
        from headrace_models.layers.moe.exchange import LEAVING

        exchange = self.division.exchange
        if exchange is None or not self._is_serving:
            return True
        self._run_empty(LEAVING)
        return exchange.all_leave

    def _run_empty(self, number: int) -> bool:
        """A pass without rows, for which a number is told; True: an engine has some.

        Raises:
            ModelError: this engine has no model: others run passes though it sleeps.
        """
        exchange = self.division.exchange
        if exchange is None:
            raise ModelError("other engines run passes, and this one sleeps, or has no weights")
        self.waves.enter()
        with exchange.one_pass(number) as counts:
            if not any(counts):
                self.waves.rest()
                return False
            exchange.take_part()
        self._has_run = True
        return True

    def take_has_run(self) -> bool:
        """True once after each pass in which an engine had rows."""
        has_run, self._has_run = self._has_run, False
        return has_run

    def places(self) -> list[Places]:
        """By mixture, where experts are."""
        found: list[Places] = []
        for mixture in self.division.mixtures:
            assert mixture.placement is not None
            found.append(mixture.placement.places)
        return found

    def take_counts(self) -> Tensor:
        """[M, L] int64: tokens that went to each expert since the last call. Only on rank 0."""
        import torch

        placements = [mixture.placement for mixture in self.division.mixtures]
        return torch.stack([one.take_counts() for one in placements if one is not None])

    def arrange_experts(self, arranged: list[list[list[int]]]) -> None:
        """Move experts. Every rank must call it between the same two passes.

        Args:
            arranged: by mixture, rank and slot.
        """
        if self._agreed is not None:
            self._agreed.lead(MoveKind.ALL, arranged)
        self.arrange_here(arranged)

    def arrange_here(self, arranged: list[list[list[int]]]) -> None:
        """:meth:`arrange_experts`, which all other engines know of."""
        from headrace_distributed.eplb.moves import move_experts
        from headrace_models.layers.moe.moving import slot_weights

        for mixture, places in zip(self.division.mixtures, arranged, strict=True):
            placement, weights = mixture.placement, slot_weights(mixture)
            assert placement is not None
            assert weights is not None  # as settle() saw
            move_experts(placement.places, places, weights, self._dividing())
            placement.put(places)

    def begin_move(self, index: int, places: list[list[int]]) -> None:
        """Begin to receive the weights of one mixture's experts, beside the passes that follow. Every rank
        must call it between the same two passes.

        Args:
            index: of the mixture.
            places: where its experts will be, by rank and slot.
        """
        if self._agreed is not None:
            self._agreed.lead(MoveKind.BEGIN, [places], index)
        self.begin_here(index, places)

    def begin_here(self, index: int, places: list[list[int]]) -> None:
        """:meth:`begin_move`, which all other engines know of."""
        from headrace_distributed.eplb.background import BackgroundExchange
        from headrace_distributed.eplb.moves import receive_experts
        from headrace_models.layers.moe.moving import slot_weights

        mixture = self.division.mixtures[index]
        placement, weights = mixture.placement, slot_weights(mixture)
        assert placement is not None
        assert weights is not None  # as settle() saw
        group, old = self._ranks.moving_group(), placement.places
        self._moving = _Move(
            index, places,
            BackgroundExchange(lambda: receive_experts(old, places, weights, group), group),
        )  # fmt: skip

    @property
    def has_received(self) -> bool:
        """True if the weights have come to all ranks, or that failed."""
        return self._moving is not None and self._moving.exchange.has_ended

    def end_move(self) -> None:
        """Put received weights in place. Every rank must call it between the same two passes."""
        if self._agreed is not None:
            self._agreed.lead(MoveKind.END)
        self.end_here()

    def end_here(self) -> None:
        """:meth:`end_move`, which all other engines know of."""
        from headrace_distributed.eplb.moves import put_experts
        from headrace_models.layers.moe.moving import slot_weights

        assert self._moving is not None
        index, places, exchange = self._moving
        arrived, self._moving = exchange.result(), None
        mixture = self.division.mixtures[index]
        placement, weights = mixture.placement, slot_weights(mixture)
        assert placement is not None
        assert weights is not None
        put_experts(weights, arrived)
        placement.put(places)

    def close(self) -> None:
        """Wait for an exchange that is under way: before its group is left. Idempotent."""
        moving, self._moving = self._moving, None
        if moving is not None:
            moving.exchange.close()

    def balancer(self) -> ExpertBalancer | AfterPasses | AfterSteps | None:
        """Is told of steps, and has experts move, on rank 0 of engine 0; None: they do not, or another engine
        decides."""
        if self._settings is None or self.division.engine:
            return None
        if self._ranks.num_stages > 1:
            return AfterSteps(self)
        made = self._make_balancer(self._settings)
        return made if self.division.num_engines == 1 else AfterPasses(made, self.take_has_run)

    def _make_balancer(self, settings: EPLBSettings) -> ExpertBalancer:
        from headrace_distributed.eplb.balancer import ExpertBalancer

        stage, stages = self._ranks.stage, self._ranks.num_stages
        return ExpertBalancer(
            self,
            plugins.load(POLICIES, settings.policy),
            window_size=settings.window_size,
            step_interval=settings.step_interval,
            log_balancedness=settings.log_balancedness,
            use_async=settings.use_async,
            title="experts" if stages == 1 else f"experts of stage {stage}",
        )

"""GLM-5: DeepSeek V3.2's structure, where layers may attend to the tokens that a layer before has picked.

The sharing is that of Bai et al. 2026, arXiv:2603.12201.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from headrace_core.errors import UnsupportedModel
from headrace_models.families.deepseek_v32 import DeepseekV32ForCausalLM
from headrace_models.layers.token_indexer import Picks, TokenIndexer

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

KINDS = {"full": True, "F": True, "shared": False, "S": False}


class GlmMoeDsaForCausalLM(DeepseekV32ForCausalLM):
    """GLM-5."""

    default_eps: ClassVar[float] = 1e-5
    interleaves_indexer: ClassVar[bool] = True

    def prepare(self, context: BuildContext, prefix: str) -> None:
        super().prepare(context, prefix)
        self.have_indexers = self.indexer_layers()
        if not all(self.have_indexers):
            self.picks = Picks()

    def make_indexer(self, context: BuildContext, index: int, name: str) -> TokenIndexer | None:
        return super().make_indexer(context, index, name) if self.have_indexers[index] else None

    def indexer_layers(self) -> list[bool]:
        """Which layers have one: by a list, by a pattern of letters, or every so many-th."""
        config, count = self.settings.config, self.num_layers()
        name = next((n for n in ("indexer_types", "index_topk_pattern") if config.get(n)), None)
        if name is None:
            every = max(1, self.settings.integer("index_topk_freq", 1, minimum=0))
            begin = self.settings.integer("index_skip_topk_offset", 2, minimum=0) - 1
            return [max(index - begin, 0) % every == 0 for index in range(count)]
        kinds = config[name]
        known = isinstance(kinds, list | str) and all(
            isinstance(k, str) and k in KINDS for k in kinds
        )
        if not known or len(kinds) != count or not KINDS[kinds[0]]:
            raise UnsupportedModel(
                f"config.json: {name} = {kinds!r:.200}: must be {count} entries out of full and shared "
                "(F and S), the first of them full"
            )
        return [KINDS[kind] for kind in kinds]

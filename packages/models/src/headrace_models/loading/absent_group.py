"""A rank's place in a group that is not there."""

from __future__ import annotations

from headrace_core.parallel import SingleProcess


class AbsentGroup(SingleProcess):
    """Enough of a group to build a rank's model and to cut its weights: nothing is exchanged."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size

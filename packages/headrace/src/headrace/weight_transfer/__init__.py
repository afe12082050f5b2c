"""Ways for a trainer's weights to an engine in another process; see docs/training-loops.md.

| | the trainer has | the engine is told |
|---|---|---|
| shared memory, one machine | :class:`SharedWeights` | what ``write`` returns |
| gloo's broadcast | :class:`TrainerGroup` | ``init_weight_update_group``, then :func:`described` |
| TCP | :class:`WeightSender` | ``open_weight_stream``, then :data:`STREAMED` |

None of them needs the engine's classes in the trainer, and nothing is pickled.
"""

from headrace_engine.weights.broadcast import TrainerGroup, described
from headrace_engine.weights.shared_memory import SharedWeights
from headrace_engine.weights.weight_sender import WeightSender

STREAMED = {"source": "stream"}
"""The argument of ``update_weights`` that has it take what came over the stream."""

__all__ = ["STREAMED", "SharedWeights", "TrainerGroup", "WeightSender", "described"]

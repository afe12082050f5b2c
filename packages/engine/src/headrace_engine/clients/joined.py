"""One of several front ends of a core that another process started.

That process adds this one by name
(:meth:`~headrace_engine.clients.process.ProcessClient.add_front_end`). It is the first to know that the core
has ended, and reports it with :meth:`JoinedClient.core_ended`.
"""

from __future__ import annotations

from pathlib import Path

from headrace_engine.clients.base import OutputSink
from headrace_engine.clients.link import CoreLink
from headrace_engine.startup import StartupTimeline


class JoinedClient(CoreLink):
    """Talks to a core under a name of its own.

    Args:
        folder: private folder of the core's sockets.
        name: as the other process calls it; used once.
        timeline: to continue one that has begun before; default: a new one.
    """

    is_one_of_several = True

    def __init__(self, folder: Path, name: str, timeline: StartupTimeline | None = None) -> None:
        super().__init__()
        self.timeline = timeline or StartupTimeline()
        self._folder = folder
        self._name = name
        self._end: str | None = None

    def core_ended(self, how: str) -> None:
        """The core's process, or the one that watches it, has ended."""
        self._end = how

    def start(self, sink: OutputSink) -> None:
        try:
            with self.timeline.phase("wait for the engine"):
                reports = self._bind(self._folder, self._name)
                ready = self._wait_until_ready(reports)
                self._wait_until_heard()
        except BaseException:
            self._disconnect()
            raise
        self.timeline.finish()
        self._listen(ready, reports, sink)

    def shutdown(self) -> None:
        self._stopping = True
        self._end = self._end or "this front end left"
        self._disconnect()

    def _ended(self) -> str | None:
        return self._end

    def _give_up(self) -> None:
        """Nothing to end here: the core serves others, too."""

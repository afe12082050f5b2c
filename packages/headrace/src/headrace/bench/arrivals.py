"""When each request is sent."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from headrace_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RampUp:
    """A request rate that changes in the course of a run."""

    strategy: str
    """``linear`` or ``exponential``."""
    start_rps: float
    """Requests a second at the first request."""
    end_rps: float
    """Requests a second after the last."""

    def __post_init__(self) -> None:
        if self.strategy not in ("linear", "exponential"):
            raise ConfigError(
                f"ramp-up strategy {self.strategy!r}: must be 'linear' or 'exponential'",
                field="ramp_up_strategy",
            )
        if self.start_rps < 0 or self.end_rps <= self.start_rps:
            raise ConfigError(
                f"ramp-up from {self.start_rps!r} to {self.end_rps!r} requests/s: the start must not be "
                "negative, and the end must be above it",
                field="ramp_up_end_rps",
            )
        if self.strategy == "exponential" and self.start_rps == 0:
            raise ConfigError(
                "ramp-up from 0.0: an exponential ramp must start above 0",
                field="ramp_up_start_rps",
            )

    def rate(self, progress: float) -> float:
        """Requests a second when the share ``progress`` (0..1) of all requests was sent."""
        if self.strategy == "linear":
            return self.start_rps + (self.end_rps - self.start_rps) * progress
        return self.start_rps * math.exp(progress * math.log(self.end_rps / self.start_rps))


def send_times(
    num_requests: int,
    *,
    request_rate: float = math.inf,
    burstiness: float = 1.0,
    ramp_up: RampUp | None = None,
    seed: int = 0,
) -> list[float]:
    """Seconds after the start at which each request is sent, ascending.

    Gaps are drawn from a gamma distribution with shape ``burstiness`` and mean 1 / rate: 1 is a Poisson
    process, less comes in bursts, more is evener. They are then scaled so that the whole takes exactly the
    sum of the mean gaps: otherwise the rate of a short run would be a matter of luck.

    Args:
        request_rate: requests a second; infinite: all at once.
        ramp_up: takes the place of ``request_rate``.

    Raises:
        ConfigError: a rate or the burstiness is not above 0.
    """
    if not request_rate > 0:
        raise ConfigError(
            f"request rate {request_rate!r}: must be above 0, or inf", field="request_rate"
        )
    if not burstiness > 0:
        raise ConfigError(f"burstiness {burstiness!r}: must be above 0", field="burstiness")
    if ramp_up is None and math.isinf(request_rate):
        return [0.0] * num_requests
    means = _mean_gaps(num_requests, request_rate, ramp_up)
    draw = random.Random(seed)
    drawn = list(accumulate(draw.gammavariate(burstiness, mean / burstiness) for mean in means))
    planned = math.fsum(means)
    return [at * planned / drawn[-1] for at in drawn] if drawn and drawn[-1] > 0 else drawn


def _mean_gaps(num_requests: int, request_rate: float, ramp_up: RampUp | None) -> Sequence[float]:
    if ramp_up is None:
        return [1.0 / request_rate] * num_requests
    # The middle of each request's share: a ramp may start at zero, where the gap would be infinite.
    return [1.0 / ramp_up.rate((index + 0.5) / num_requests) for index in range(num_requests)]

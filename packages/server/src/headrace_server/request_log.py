"""Log lines of requests (``--enable-log-requests``)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from headrace_core.request import ChatPrompt, Prompt
from headrace_core.sampling import SamplingParams
from headrace_server.settings import ServerSettings

logger = logging.getLogger(__name__)


def log_request(
    settings: ServerSettings, request_id: str, params: SamplingParams, prompt: Prompt
) -> None:
    """Id and parameters at INFO, the prompt at DEBUG, cut to ``max_log_len``."""
    if not settings.enable_log_requests:
        return
    logger.info("request %s: %s", request_id, params)
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("request %s: prompt %r", request_id, _shown(prompt, settings.max_log_len))


def _shown(prompt: Prompt, limit: int | None) -> Any:
    if isinstance(prompt, ChatPrompt):
        return str(list(prompt.messages))[:limit]
    if isinstance(prompt, Mapping):
        given: Any = prompt.get("prompt") or prompt.get("prompt_token_ids")
        return given[:limit]
    return prompt[:limit]

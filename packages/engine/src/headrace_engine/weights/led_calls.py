"""Names of the calls by which weights change on several ranks. No torch.

Rank 0's worker leads: what the core asks of it, it has the other ranks do, too
(:class:`~headrace_engine.weights.other_ranks.OtherRanks`).
"""

from __future__ import annotations

LED = (
    "stage_weights", "expect_weights", "held_weights", "weights_woke", "update_changes_model",
    "seal_weights", "apply_weights", "refuse_weights", "drop_weights", "open_weight_stream",
    "close_weight_transfer", "probe_beside", "adopt_beside", "drop_beside",
)  # fmt: skip
"""Methods of rank 0's worker that lead the other ranks by themselves."""
LED_BESIDE = ("build_beside", "receive_weights", "init_weight_update_group")
"""Likewise, in threads of their own beside the steps."""
BUILD = "build_share"
"""Method of the other ranks' workers that builds another model, in a thread of its own."""
CHANGE = "change_weights"
"""Method of the other ranks' workers that does one of :data:`STEPS`."""
STEPS = (
    "stop_building", "open_probe", "follow_probe", "close_probe", "take_place", "return_place",
    "record_again", "keep_place", "drop_share",
    "expect_tensors", "stage_share", "unstage_share", "seal_share", "put_share", "take_share_out",
    "keep_share", "drop_shares",
)  # fmt: skip
"""Methods of the other ranks' workers, of which each is a step of a swap or of an update."""

"""``headrace quantize``: a checkpoint in fewer bits, and what that costs."""

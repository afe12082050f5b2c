"""Low-rank adapters on the engine's side: which are known, which are in slots, which rows have one."""

"""Reading config.json: every value checked, in one spelling. No torch."""

"""One turn of a conversation, whatever protocol asked for it: prompt, tools, answer."""

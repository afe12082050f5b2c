"""The OpenAI Responses protocol: items in, items out, stored, chained, streamed by numbered events."""

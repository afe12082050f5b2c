"""A router in front of several servers, which sends a request where its prefix is cached."""

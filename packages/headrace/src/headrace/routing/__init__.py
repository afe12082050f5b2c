"""What a router (:mod:`headrace_server.router`) knows by listening to engines."""

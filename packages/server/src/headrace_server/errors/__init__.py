"""Errors on the wire: statuses, bodies, and the places in a request that they name."""

"""Connectors that carry vectors of media between engines (:class:`headrace_core.ec_transfer.ECConnector`)."""

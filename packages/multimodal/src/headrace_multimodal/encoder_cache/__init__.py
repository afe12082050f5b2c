"""Connectors that carry vectors of media between engines (:class:`headrace_core.multimodal.ECConnector`)."""

"""Files of many requests: ``headrace run-batch`` and ``headrace generate``.

==================  =============================================================================
``journal``         answers so far, in a file beside the output: what makes a batch resumable
``lines``           lines of ``run-batch``: OpenAI's batch files
``runner``          answers those lines through the server's application (``inprocess``)
``prompts``         lines of ``generate``: prompts as text or JSON
``generating``      answers those prompts through the offline engine
``transfer``        files behind URLs
``metrics_server``  ``/metrics`` while a batch runs
==================  =============================================================================
"""

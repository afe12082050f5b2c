"""Parts of ``headrace bench``.

=============  =====================================================================
``datasets``   prompts with their lengths, drawn or read from files
``arrivals``   when each request is sent
``http``       a streaming HTTP client that costs little beside the server it measures
``backends``   what is sent to a server, and what its events mean
``load``       sends the requests in time and collects what came back
``metrics``    TTFT, TPOT, ITL, E2EL, throughput, goodput
``results``    tables for the terminal, JSON files
``plots``      pictures, with matplotlib (the extra ``headrace[bench]``)
=============  =====================================================================

``latency``, ``throughput``, ``serve``, ``startup`` and ``sweep`` are the sub-commands.
"""

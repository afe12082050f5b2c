"""Several HTTP processes in front of one engine (``headrace serve --api-server-count N``).

=============  ==================================================================================
``supervisor``  the process that was started: owns the sockets and the engine's process, starts the
                others again when they fall, serves nobody itself
``process``     one HTTP process: input_processor, application, its own connections of the shared socket
``hello``       what the one tells the other
=============  ==================================================================================
"""

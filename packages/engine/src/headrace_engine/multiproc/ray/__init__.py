"""Ranks as Ray actors (``--distributed-executor-backend ray``): Ray starts them, on whichever hosts."""

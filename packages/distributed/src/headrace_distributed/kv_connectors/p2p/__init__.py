"""Engines that give blocks to each other: memory, a control protocol over TCP, and ways for the bytes."""

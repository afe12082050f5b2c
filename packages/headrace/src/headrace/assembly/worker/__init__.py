"""The worker: a model with its ops, threads, quantization and attention.

The only part of the assembly that imports torch, and it does so when a worker is made.

============  ===================================================================================
``factory``   makes workers: of one rank, of all ranks, or a platform's own
``settings``  configuration -> everything that a rank's worker is told
``ops``       CPU threads, and the best installed kernel of every op
``context``   quantization and attention of the model that is built
``model``     the model: built, its weights read
============  ===================================================================================
"""

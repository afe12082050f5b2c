"""The parts behind `tools/train_demo_model.py`: data, text, network, training, evaluation.

They live outside the packages because nobody who serves a model needs them: what users get is the
checkpoint that they make, in `packages/demo`.
"""

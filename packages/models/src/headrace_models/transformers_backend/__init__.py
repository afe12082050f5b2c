"""Models that headrace has no class for, run by Hugging Face transformers' code.

The module tree is transformers'; what a server needs of it is headrace's. Weights come through the
loader, linear layers through the quantization methods, norms, gated MLPs and experts through the ops
where they are what those compute, and every attention hands its query, key and value to a layer over
the paged cache. Besides this, only the processor of these models' images imports transformers, and nothing
here does before a model asks for it (docs/adr/0045, docs/adr/0097).

``library`` finds classes and configs, ``checkpoint_code`` those that a checkpoint brings, ``skeleton``
makes a tree without weights, ``patch_modules`` puts modules of ``weight_modules`` in the place of its
own, with weights and kernels (``op_matching`` and ``routers`` tell which op computes the same),
``rotary`` reads angles out of a table, ``functions`` makes ops of activations that code calls, ``names``
leads from a checkpoint's names to the tree's, ``attention`` stands where transformers attends,
``attention_probe`` runs the loaded tree once to learn what its attention needs and that nothing else
mixes tokens, ``graph_capture`` forgets what a recorded step left behind, ``model`` is what the engine
sees, ``image_model`` the same with towers for images, ``towers`` finds the language model among those,
and ``refusals`` has facts that no interface tells.
"""

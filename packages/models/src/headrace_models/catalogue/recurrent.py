"""Models with recurrent layers, alone or in turns with attention."""

from headrace_models.catalogue.row import Architecture

_RECURRENT = ("recurrent",)
_HYBRID = ("full", "recurrent")

ROWS = (
    Architecture("BambaForCausalLM", "bamba:BambaForCausalLM", "Bamba", _HYBRID),
    Architecture(
        "FalconMambaForCausalLM", "mamba:FalconMambaForCausalLM", "Falcon-Mamba", _RECURRENT
    ),
    Architecture("Mamba2ForCausalLM", "mamba2:Mamba2ForCausalLM", "Codestral-Mamba", _RECURRENT),
    Architecture("MambaForCausalLM", "mamba:MambaForCausalLM", "Mamba", _RECURRENT),
)

"""Decoders of text with LayerNorm and ungated MLPs: the GPTs and their kin."""

from headrace_models.catalogue.row import Architecture

_MIXED = ("full", "sliding")

ROWS = (
    Architecture("BioGptForCausalLM", "biogpt:BioGptForCausalLM", "BioGPT"),
    Architecture("BloomForCausalLM", "bloom:BloomForCausalLM", "BLOOM, BLOOMZ"),
    Architecture("CTRLLMHeadModel", "ctrl:CTRLLMHeadModel", "CTRL"),
    Architecture("CodeGenForCausalLM", "codegen:CodeGenForCausalLM", "CodeGen 1"),
    Architecture("FalconForCausalLM", "falcon:FalconForCausalLM", "Falcon 1 and 2"),
    Architecture("GPT2LMHeadModel", "gpt2:GPT2LMHeadModel", "GPT-2, Cerebras-GPT"),
    Architecture(
        "GPTBigCodeForCausalLM", "gpt_bigcode:GPTBigCodeForCausalLM", "StarCoder 1, SantaCoder"
    ),
    Architecture("GPTJForCausalLM", "gptj:GPTJForCausalLM", "GPT-J"),
    Architecture("GPTNeoForCausalLM", "gpt_neo:GPTNeoForCausalLM", "GPT-Neo", _MIXED),
    Architecture(
        "GPTNeoXForCausalLM", "gpt_neox:GPTNeoXForCausalLM", "GPT-NeoX, Pythia, Dolly, RedPajama"
    ),
    Architecture(
        "GPTNeoXJapaneseForCausalLM",
        "gpt_neox_japanese:GPTNeoXJapaneseForCausalLM",
        "GPT-NeoX-Japanese",
    ),
    Architecture("JAISLMHeadModel", "jais:JAISLMHeadModel", "Jais 1"),
    Architecture("MPTForCausalLM", "mpt:MptForCausalLM", "MPT", alias_of="MptForCausalLM"),
    Architecture(
        "ModernBertDecoderForCausalLM",
        "modernbert_decoder:ModernBertDecoderForCausalLM",
        "Ettin decoders",
        _MIXED,
    ),
    Architecture("MptForCausalLM", "mpt:MptForCausalLM", "MPT"),
    Architecture("OPTForCausalLM", "opt:OPTForCausalLM", "OPT, Galactica"),
    Architecture("OpenAIGPTLMHeadModel", "openai_gpt:OpenAIGPTLMHeadModel", "GPT"),
    Architecture("PersimmonForCausalLM", "persimmon:PersimmonForCausalLM", "Persimmon"),
    Architecture("PhiForCausalLM", "phi:PhiForCausalLM", "Phi-1, Phi-1.5, Phi-2"),
    Architecture(
        "RWForCausalLM", "falcon:FalconForCausalLM", "Falcon 1", alias_of="FalconForCausalLM"
    ),
    Architecture("Starcoder2ForCausalLM", "starcoder2:Starcoder2ForCausalLM", "StarCoder2", _MIXED),
    Architecture("XGLMForCausalLM", "xglm:XGLMForCausalLM", "XGLM"),
)

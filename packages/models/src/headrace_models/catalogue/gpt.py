"""Decoders of text with LayerNorm and non-gated MLPs: the GPTs and their kin."""

from headrace_models.catalogue.row import Architecture

_MIXED = ("full", "sliding")

ROWS = (
    Architecture("BioGptForCausalLM", "decoder.biogpt:BioGptForCausalLM", "BioGPT"),
    Architecture("BloomForCausalLM", "decoder.bloom:BloomForCausalLM", "BLOOM, BLOOMZ"),
    Architecture("CTRLLMHeadModel", "decoder.ctrl:CTRLLMHeadModel", "CTRL"),
    Architecture("CodeGenForCausalLM", "decoder.codegen:CodeGenForCausalLM", "CodeGen 1"),
    Architecture("FalconForCausalLM", "decoder.falcon:FalconForCausalLM", "Falcon 1 and 2"),
    Architecture("GPT2LMHeadModel", "decoder.gpt2:GPT2LMHeadModel", "GPT-2, Cerebras-GPT"),
    Architecture(
        "GPTBigCodeForCausalLM",
        "decoder.gpt_bigcode:GPTBigCodeForCausalLM",
        "StarCoder 1, SantaCoder",
    ),
    Architecture("GPTJForCausalLM", "decoder.gptj:GPTJForCausalLM", "GPT-J"),
    Architecture("GPTNeoForCausalLM", "decoder.gpt_neo:GPTNeoForCausalLM", "GPT-Neo", _MIXED),
    Architecture(
        "GPTNeoXForCausalLM",
        "decoder.gpt_neox:GPTNeoXForCausalLM",
        "GPT-NeoX, Pythia, Dolly, RedPajama",
    ),
    Architecture(
        "GPTNeoXJapaneseForCausalLM",
        "decoder.gpt_neox_japanese:GPTNeoXJapaneseForCausalLM",
        "GPT-NeoX-Japanese",
    ),
    Architecture("JAISLMHeadModel", "decoder.jais:JAISLMHeadModel", "Jais 1"),
    Architecture("MPTForCausalLM", "decoder.mpt:MptForCausalLM", "MPT", alias_of="MptForCausalLM"),
    Architecture(
        "ModernBertDecoderForCausalLM",
        "decoder.modernbert_decoder:ModernBertDecoderForCausalLM",
        "Ettin decoders",
        _MIXED,
    ),
    Architecture("MptForCausalLM", "decoder.mpt:MptForCausalLM", "MPT"),
    Architecture("OPTForCausalLM", "decoder.opt:OPTForCausalLM", "OPT, Galactica"),
    Architecture("OpenAIGPTLMHeadModel", "decoder.openai_gpt:OpenAIGPTLMHeadModel", "GPT"),
    Architecture("PersimmonForCausalLM", "decoder.persimmon:PersimmonForCausalLM", "Persimmon"),
    Architecture("PhiForCausalLM", "decoder.phi:PhiForCausalLM", "Phi-1, Phi-1.5, Phi-2"),
    Architecture(
        "RWForCausalLM",
        "decoder.falcon:FalconForCausalLM",
        "Falcon 1",
        alias_of="FalconForCausalLM",
    ),
    Architecture(
        "Starcoder2ForCausalLM", "decoder.starcoder2:Starcoder2ForCausalLM", "StarCoder2", _MIXED
    ),
    Architecture("XGLMForCausalLM", "decoder.xglm:XGLMForCausalLM", "XGLM"),
)

"""Models with recurrent layers, alone or in turns with attention."""

from headrace_models.catalogue.row import Architecture

_RECURRENT = ("recurrent",)
_HYBRID = ("full", "recurrent")

ROWS = (
    Architecture(
        "BailingHybridForCausalLM",
        "bailing_hybrid:BailingHybridForCausalLM",
        "Ling 3",
        ("latent", "recurrent"),
    ),
    Architecture(
        "BailingMoeLinearV2ForCausalLM",
        "bailing_hybrid:BailingMoeLinearV2ForCausalLM",
        "Ring-linear 2",
        _HYBRID,
    ),
    Architecture(
        "BailingMoeV2_5ForCausalLM",
        "bailing_hybrid:BailingMoeV2_5ForCausalLM",
        "Ling 2.5 and 2.6, Ring 2.5",
        ("latent", "recurrent"),
    ),
    Architecture(
        "BailingMoeV3ForCausalLM",
        "bailing_hybrid:BailingHybridForCausalLM",
        "Ling 3",
        ("latent", "recurrent"),
        alias_of="BailingHybridForCausalLM",
    ),
    Architecture("BambaForCausalLM", "bamba:BambaForCausalLM", "Bamba", _HYBRID),
    Architecture(
        "FalconH1ForCausalLM",
        "falcon_h1:FalconH1ForCausalLM",
        "Falcon-H1",
        _HYBRID,
    ),
    Architecture(
        "FalconMambaForCausalLM",
        "mamba:FalconMambaForCausalLM",
        "Falcon-Mamba",
        _RECURRENT,
    ),
    Architecture(
        "GraniteMoeHybridForCausalLM",
        "granite_hybrid:GraniteMoeHybridForCausalLM",
        "Granite 4.0",
        _HYBRID,
    ),
    Architecture("JambaForCausalLM", "jamba:JambaForCausalLM", "Jamba 1.0 to 1.7", _HYBRID),
    Architecture(
        "KimiLinearForCausalLM",
        "kimi_linear:KimiLinearForCausalLM",
        "Kimi Linear 48B-A3B",
        ("latent", "recurrent"),
    ),
    Architecture("Lfm2ForCausalLM", "lfm2:Lfm2ForCausalLM", "LFM2", _HYBRID),
    Architecture("Lfm2MoeForCausalLM", "lfm2:Lfm2MoeForCausalLM", "LFM2 8B-A1B", _HYBRID),
    Architecture(
        "Lfm3ForCausalLM", "lfm3:Lfm3ForCausalLM", "LFM3", ("full", "sliding", "recurrent")
    ),
    Architecture(
        "Mamba2ForCausalLM",
        "mamba2:Mamba2ForCausalLM",
        "Codestral-Mamba",
        _RECURRENT,
    ),
    Architecture("MambaForCausalLM", "mamba:MambaForCausalLM", "Mamba", _RECURRENT),
    Architecture(
        "MiniMaxForCausalLM",
        "minimax:MiniMaxForCausalLM",
        "MiniMax-Text-01 (-hf)",
        _HYBRID,
    ),
    Architecture(
        "MiniMaxM1ForCausalLM",
        "minimax:MiniMaxForCausalLM",
        "MiniMax-M1",
        _HYBRID,
        alias_of="MiniMaxForCausalLM",
    ),
    Architecture(
        "MiniMaxText01ForCausalLM",
        "minimax:MiniMaxForCausalLM",
        "MiniMax-Text-01",
        _HYBRID,
        alias_of="MiniMaxForCausalLM",
    ),
    Architecture(
        "NemotronHForCausalLM",
        "nemotron_h:NemotronHForCausalLM",
        "Nemotron-H, Nemotron Nano 2 and 3",
        _HYBRID,
    ),
    Architecture(
        "OlmoHybridForCausalLM",
        "olmo_hybrid:OlmoHybridForCausalLM",
        "OLMo hybrid",
        _HYBRID,
    ),
    Architecture(
        "Plamo2ForCausalLM",
        "plamo2:Plamo2ForCausalLM",
        "PLaMo 2",
        ("full", "sliding", "recurrent"),
    ),
    Architecture(
        "Qwen3NextForCausalLM",
        "qwen3_next:Qwen3NextForCausalLM",
        "Qwen3-Next",
        _HYBRID,
    ),
    Architecture(
        "Qwen3_5ForCausalLM",
        "qwen3_next:Qwen3_5ForCausalLM",
        "Qwen3.5, text",
        _HYBRID,
    ),
    Architecture(
        "Qwen3_5MoeForCausalLM",
        "qwen3_next:Qwen3_5MoeForCausalLM",
        "Qwen3.5 MoE, text",
        _HYBRID,
    ),
    Architecture(
        "RecurrentGemmaForCausalLM",
        "recurrent_gemma:RecurrentGemmaForCausalLM",
        "RecurrentGemma",
        ("sliding", "recurrent"),
    ),
    Architecture("RwkvForCausalLM", "rwkv:RwkvForCausalLM", "RWKV 4", _RECURRENT),
    Architecture("Zamba2ForCausalLM", "zamba:Zamba2ForCausalLM", "Zamba2", _HYBRID),
    Architecture("ZambaForCausalLM", "zamba:ZambaForCausalLM", "Zamba 7B", _HYBRID),
    Architecture(
        "ZayaForCausalLM", "zaya:ZayaForCausalLM", "ZAYA1", ("full", "sliding", "recurrent")
    ),
    Architecture("xLSTMForCausalLM", "xlstm:XLSTMForCausalLM", "xLSTM", _RECURRENT),
)

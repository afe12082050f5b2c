"""Models with recurrent layers, alone or in turns with attention."""

from headrace_models.catalogue.row import Architecture

_RECURRENT = ("recurrent",)
_HYBRID = ("full", "recurrent")

ROWS = (
    Architecture(
        "BailingHybridForCausalLM",
        "recurrent.bailing_hybrid:BailingHybridForCausalLM",
        "Ling 3",
        ("latent", "recurrent"),
    ),
    Architecture(
        "BailingMoeLinearV2ForCausalLM",
        "recurrent.bailing_hybrid:BailingMoeLinearV2ForCausalLM",
        "Ring-linear 2",
        _HYBRID,
    ),
    Architecture(
        "BailingMoeV2_5ForCausalLM",
        "recurrent.bailing_hybrid:BailingMoeV2_5ForCausalLM",
        "Ling 2.5 and 2.6, Ring 2.5",
        ("latent", "recurrent"),
    ),
    Architecture(
        "BailingMoeV3ForCausalLM",
        "recurrent.bailing_hybrid:BailingHybridForCausalLM",
        "Ling 3",
        ("latent", "recurrent"),
        alias_of="BailingHybridForCausalLM",
    ),
    Architecture("BambaForCausalLM", "recurrent.bamba:BambaForCausalLM", "Bamba", _HYBRID),
    Architecture(
        "FalconH1ForCausalLM",
        "recurrent.falcon_h1:FalconH1ForCausalLM",
        "Falcon-H1",
        _HYBRID,
    ),
    Architecture(
        "FalconMambaForCausalLM",
        "recurrent.mamba:FalconMambaForCausalLM",
        "Falcon-Mamba",
        _RECURRENT,
    ),
    Architecture(
        "GraniteMoeHybridForCausalLM",
        "recurrent.granite_hybrid:GraniteMoeHybridForCausalLM",
        "Granite 4.0",
        _HYBRID,
    ),
    Architecture(
        "JambaForCausalLM", "recurrent.jamba:JambaForCausalLM", "Jamba 1.0 to 1.7", _HYBRID
    ),
    Architecture(
        "KimiLinearForCausalLM",
        "recurrent.kimi_linear:KimiLinearForCausalLM",
        "Kimi Linear 48B-A3B",
        ("latent", "recurrent"),
    ),
    Architecture("Lfm2ForCausalLM", "recurrent.lfm2:Lfm2ForCausalLM", "LFM2", _HYBRID),
    Architecture("Lfm2MoeForCausalLM", "recurrent.lfm2:Lfm2MoeForCausalLM", "LFM2 8B-A1B", _HYBRID),
    Architecture(
        "Lfm3ForCausalLM",
        "recurrent.lfm3:Lfm3ForCausalLM",
        "LFM3",
        ("full", "sliding", "recurrent"),
    ),
    Architecture(
        "Mamba2ForCausalLM",
        "recurrent.mamba2:Mamba2ForCausalLM",
        "Codestral-Mamba",
        _RECURRENT,
    ),
    Architecture("MambaForCausalLM", "recurrent.mamba:MambaForCausalLM", "Mamba", _RECURRENT),
    Architecture(
        "MiniMaxForCausalLM",
        "recurrent.minimax:MiniMaxForCausalLM",
        "MiniMax-Text-01 (-hf)",
        _HYBRID,
    ),
    Architecture(
        "MiniMaxM1ForCausalLM",
        "recurrent.minimax:MiniMaxForCausalLM",
        "MiniMax-M1",
        _HYBRID,
        alias_of="MiniMaxForCausalLM",
    ),
    Architecture(
        "MiniMaxText01ForCausalLM",
        "recurrent.minimax:MiniMaxForCausalLM",
        "MiniMax-Text-01",
        _HYBRID,
        alias_of="MiniMaxForCausalLM",
    ),
    Architecture(
        "NemotronHForCausalLM",
        "recurrent.nemotron_h:NemotronHForCausalLM",
        "Nemotron-H, Nemotron Nano 2 and 3",
        _HYBRID,
    ),
    Architecture(
        "OlmoHybridForCausalLM",
        "recurrent.olmo_hybrid:OlmoHybridForCausalLM",
        "OLMo hybrid",
        _HYBRID,
    ),
    Architecture(
        "Plamo2ForCausalLM",
        "recurrent.plamo2:Plamo2ForCausalLM",
        "PLaMo 2",
        ("full", "sliding", "recurrent"),
    ),
    Architecture(
        "Qwen3NextForCausalLM",
        "recurrent.qwen3_next:Qwen3NextForCausalLM",
        "Qwen3-Next",
        _HYBRID,
    ),
    Architecture(
        "Qwen3_5ForCausalLM",
        "recurrent.qwen3_next:Qwen3_5ForCausalLM",
        "Qwen3.5, text",
        _HYBRID,
    ),
    Architecture(
        "Qwen3_5MoeForCausalLM",
        "recurrent.qwen3_next:Qwen3_5MoeForCausalLM",
        "Qwen3.5 MoE, text",
        _HYBRID,
    ),
    Architecture(
        "RecurrentGemmaForCausalLM",
        "recurrent.recurrent_gemma:RecurrentGemmaForCausalLM",
        "RecurrentGemma",
        ("sliding", "recurrent"),
    ),
    Architecture("RwkvForCausalLM", "recurrent.rwkv:RwkvForCausalLM", "RWKV 4", _RECURRENT),
    Architecture("Zamba2ForCausalLM", "recurrent.zamba:Zamba2ForCausalLM", "Zamba2", _HYBRID),
    Architecture("ZambaForCausalLM", "recurrent.zamba:ZambaForCausalLM", "Zamba 7B", _HYBRID),
    Architecture(
        "ZayaForCausalLM",
        "recurrent.zaya:ZayaForCausalLM",
        "ZAYA1",
        ("full", "sliding", "recurrent"),
    ),
    Architecture("xLSTMForCausalLM", "recurrent.xlstm:XLSTMForCausalLM", "xLSTM", _RECURRENT),
)

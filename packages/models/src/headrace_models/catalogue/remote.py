"""Decoders of text whose code is, or was, in their publishers' repositories; none of that code is run."""

from headrace_models.catalogue.row import Architecture

_MIXED = ("full", "sliding")

ROWS = (
    Architecture(
        "AquilaForCausalLM", "llama:LlamaForCausalLM", "Aquila 1, 2", alias_of="LlamaForCausalLM"
    ),
    Architecture("AquilaModel", "llama:LlamaForCausalLM", "Aquila 1", alias_of="LlamaForCausalLM"),
    Architecture(
        "BaiChuanForCausalLM",
        "baichuan:BaichuanForCausalLM",
        "Baichuan 7B",
        alias_of="BaichuanForCausalLM",
    ),
    Architecture("BaichuanForCausalLM", "baichuan:BaichuanForCausalLM", "Baichuan 1 and 2"),
    Architecture(
        "ChatGLMForConditionalGeneration",
        "chatglm:ChatGLMModel",
        "GLM-4, CodeGeeX 4",
        alias_of="ChatGLMModel",
    ),
    Architecture("ChatGLMModel", "chatglm:ChatGLMModel", "ChatGLM 2 and 3, GLM-4"),
    Architecture("DeciLMForCausalLM", "deci:DeciLMForCausalLM", "DeciLM, Llama-Nemotron (NAS)"),
    Architecture("ExaoneForCausalLM", "exaone:ExaoneForCausalLM", "EXAONE 3 and 3.5"),
    Architecture(
        "Fairseq2LlamaForCausalLM",
        "fairseq2_llama:Fairseq2LlamaForCausalLM",
        "Llama in fairseq2's files",
    ),
    Architecture(
        "IQuestCoderForCausalLM",
        "iquestcoder:IQuestCoderForCausalLM",
        "IQuest-Coder V1",
        _MIXED,
    ),
    Architecture(
        "IQuestLoopCoderForCausalLM",
        "iquest_loopcoder:IQuestLoopCoderForCausalLM",
        "IQuest-Coder V1 Loop",
        _MIXED,
    ),
    Architecture("InternLM2ForCausalLM", "internlm2:InternLM2ForCausalLM", "InternLM 2 and 2.5"),
    Architecture("InternLM3ForCausalLM", "internlm3:InternLM3ForCausalLM", "InternLM 3"),
    Architecture("InternLMForCausalLM", "internlm:InternLMForCausalLM", "InternLM 1"),
    Architecture("MiMoForCausalLM", "mimo:MiMoForCausalLM", "MiMo", _MIXED),
    Architecture("MiniCPMForCausalLM", "minicpm:MiniCPMForCausalLM", "MiniCPM 1, 2, 4 and 4.1"),
    Architecture("OrionForCausalLM", "orion:OrionForCausalLM", "Orion"),
    Architecture("OuroForCausalLM", "ouro:OuroForCausalLM", "Ouro"),
    Architecture(
        "PanguEmbeddedForCausalLM",
        "internlm:InternLMForCausalLM",
        "openPangu Embedded",
        alias_of="InternLMForCausalLM",
    ),
    Architecture(
        "PanguProMoEV2ForCausalLM",
        "pangu_pro_moe_v2:PanguProMoEV2ForCausalLM",
        "openPangu Pro MoE V2",
        _MIXED,
    ),
    Architecture("Plamo3ForCausalLM", "plamo3:Plamo3ForCausalLM", "PLaMo 3", _MIXED),
    Architecture("QWenLMHeadModel", "qwen:QWenLMHeadModel", "Qwen 1"),
    Architecture("SolarForCausalLM", "solar:SolarForCausalLM", "Solar Pro"),
    Architecture("Step1ForCausalLM", "step1:Step1ForCausalLM", "Step 1, the text of Step-Audio"),
    Architecture("TeleChat2ForCausalLM", "telechat2:TeleChat2ForCausalLM", "TeleChat 2"),
    Architecture(
        "TeleChatForCausalLM",
        "telechat2:TeleChat2ForCausalLM",
        "TeleChat",
        alias_of="TeleChat2ForCausalLM",
    ),
    Architecture(
        "TelechatForCausalLM",
        "telechat2:TeleChat2ForCausalLM",
        "TeleChat",
        alias_of="TeleChat2ForCausalLM",
    ),
    Architecture("TeleFLMForCausalLM", "teleflm:TeleFLMForCausalLM", "Tele-FLM"),
    Architecture(
        "XverseForCausalLM", "llama:LlamaForCausalLM", "XVERSE", alias_of="LlamaForCausalLM"
    ),
)

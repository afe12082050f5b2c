"""Decoders of text whose code is, or was, in their publishers' repositories; none of that code is run."""

from headrace_models.catalogue.row import Architecture

_MIXED = ("full", "sliding")

ROWS = (
    Architecture(
        "AquilaForCausalLM",
        "decoder.llama:LlamaForCausalLM",
        "Aquila 1, 2",
        alias_of="LlamaForCausalLM",
    ),
    Architecture(
        "AquilaModel", "decoder.llama:LlamaForCausalLM", "Aquila 1", alias_of="LlamaForCausalLM"
    ),
    Architecture(
        "BaiChuanForCausalLM",
        "decoder.baichuan:BaichuanForCausalLM",
        "Baichuan 7B",
        alias_of="BaichuanForCausalLM",
    ),
    Architecture("BaichuanForCausalLM", "decoder.baichuan:BaichuanForCausalLM", "Baichuan 1 and 2"),
    Architecture("BagelTextForCausalLM", "decoder.bagel:BagelTextForCausalLM", "Bagel, text"),
    Architecture(
        "ChatGLMForConditionalGeneration",
        "decoder.chatglm:ChatGLMModel",
        "GLM-4, CodeGeeX 4",
        alias_of="ChatGLMModel",
    ),
    Architecture("ChatGLMModel", "decoder.chatglm:ChatGLMModel", "ChatGLM 2 and 3, GLM-4"),
    Architecture(
        "DeciLMForCausalLM", "decoder.deci:DeciLMForCausalLM", "DeciLM, Llama-Nemotron (NAS)"
    ),
    Architecture("ExaoneForCausalLM", "decoder.exaone:ExaoneForCausalLM", "EXAONE 3 and 3.5"),
    Architecture(
        "Fairseq2LlamaForCausalLM",
        "decoder.fairseq2_llama:Fairseq2LlamaForCausalLM",
        "Llama in fairseq2's files",
    ),
    Architecture(
        "IQuestCoderForCausalLM",
        "decoder.iquestcoder:IQuestCoderForCausalLM",
        "IQuest-Coder V1",
        _MIXED,
    ),
    Architecture(
        "IQuestLoopCoderForCausalLM",
        "decoder.iquest_loopcoder:IQuestLoopCoderForCausalLM",
        "IQuest-Coder V1 Loop",
        _MIXED,
    ),
    Architecture(
        "InternLM2ForCausalLM", "decoder.internlm2:InternLM2ForCausalLM", "InternLM 2 and 2.5"
    ),
    Architecture("InternLM3ForCausalLM", "decoder.internlm3:InternLM3ForCausalLM", "InternLM 3"),
    Architecture("InternLMForCausalLM", "decoder.internlm:InternLMForCausalLM", "InternLM 1"),
    Architecture("MiMoForCausalLM", "decoder.mimo:MiMoForCausalLM", "MiMo", _MIXED),
    Architecture(
        "MiniCPMForCausalLM", "decoder.minicpm:MiniCPMForCausalLM", "MiniCPM 1, 2, 4 and 4.1"
    ),
    Architecture(
        "ChameleonTextForCausalLM", "decoder.chameleon:ChameleonTextForCausalLM", "Chameleon, text"
    ),
    Architecture("MolmoTextForCausalLM", "decoder.molmo:MolmoTextForCausalLM", "Molmo, text"),
    Architecture("Molmo2TextForCausalLM", "decoder.molmo2:Molmo2TextForCausalLM", "Molmo 2, text"),
    Architecture("OrionForCausalLM", "decoder.orion:OrionForCausalLM", "Orion"),
    Architecture("OuroForCausalLM", "decoder.ouro:OuroForCausalLM", "Ouro"),
    Architecture(
        "PanguEmbeddedForCausalLM",
        "decoder.internlm:InternLMForCausalLM",
        "openPangu Embedded",
        alias_of="InternLMForCausalLM",
    ),
    Architecture(
        "PanguProMoEV2ForCausalLM",
        "moe.pangu_pro_moe_v2:PanguProMoEV2ForCausalLM",
        "openPangu Pro MoE V2",
        _MIXED,
    ),
    Architecture("Plamo3ForCausalLM", "decoder.plamo3:Plamo3ForCausalLM", "PLaMo 3", _MIXED),
    Architecture("QWenLMHeadModel", "decoder.qwen:QWenLMHeadModel", "Qwen 1"),
    Architecture("SolarForCausalLM", "decoder.solar:SolarForCausalLM", "Solar Pro"),
    Architecture(
        "Step1ForCausalLM", "decoder.step1:Step1ForCausalLM", "Step 1, the text of Step-Audio"
    ),
    Architecture("Step3TextForCausalLM", "moe.step3:Step3TextForCausalLM", "Step 3, text"),
    Architecture("TeleChat2ForCausalLM", "decoder.telechat2:TeleChat2ForCausalLM", "TeleChat 2"),
    Architecture(
        "TeleChatForCausalLM",
        "decoder.telechat2:TeleChat2ForCausalLM",
        "TeleChat",
        alias_of="TeleChat2ForCausalLM",
    ),
    Architecture(
        "TelechatForCausalLM",
        "decoder.telechat2:TeleChat2ForCausalLM",
        "TeleChat",
        alias_of="TeleChat2ForCausalLM",
    ),
    Architecture("TeleFLMForCausalLM", "decoder.teleflm:TeleFLMForCausalLM", "Tele-FLM"),
    Architecture(
        "XverseForCausalLM", "decoder.llama:LlamaForCausalLM", "XVERSE", alias_of="LlamaForCausalLM"
    ),
)

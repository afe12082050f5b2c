"""Encoders and other models that pool: embedders, classifiers, rerankers, reward models."""

from headrace_models.catalogue.row import Architecture

_NONE = ("none",)

ROWS = (
    Architecture("BertForMaskedLM", "encoder.splade:BertSpladeModel", "SPLADE", _NONE, "pool"),
    Architecture(
        "BertForSequenceClassification",
        "encoder.bert:BertForSequenceClassification",
        "BERT",
        _NONE,
        "pool",
    ),
    Architecture(
        "BertForTokenClassification",
        "encoder.bert:BertForTokenClassification",
        "BERT",
        _NONE,
        "pool",
    ),
    Architecture("BertModel", "encoder.bert:BertModel", "BERT", _NONE, "pool"),
    Architecture(
        "BertSpladeSparseEmbeddingModel", "encoder.splade:BertSpladeModel", "SPLADE", _NONE, "pool"
    ),
    Architecture(
        "BgeM3EmbeddingModel", "encoder.bge_m3:BgeM3EmbeddingModel", "BGE-M3", _NONE, "pool"
    ),
    Architecture(
        "CLIPTextModelWithProjection",
        "encoder.clip:CLIPTextModelWithProjection",
        "CLIP, text",
        task="pool",
    ),
    Architecture(
        "CamembertForSequenceClassification",
        "encoder.roberta:RobertaForSequenceClassification",
        "CamemBERT",
        _NONE,
        "pool",
    ),
    Architecture(
        "CamembertForTokenClassification",
        "encoder.roberta:RobertaForTokenClassification",
        "CamemBERT",
        _NONE,
        "pool",
    ),
    Architecture("CamembertModel", "encoder.roberta:RobertaModel", "CamemBERT", _NONE, "pool"),
    Architecture(
        "DistilBertForMaskedLM", "encoder.splade:DistilBertSpladeModel", "SPLADE", _NONE, "pool"
    ),
    Architecture(
        "DistilBertForSequenceClassification",
        "encoder.distilbert:DistilBertForSequenceClassification",
        "DistilBERT",
        _NONE,
        "pool",
    ),
    Architecture(
        "DistilBertForTokenClassification",
        "encoder.distilbert:DistilBertForTokenClassification",
        "DistilBERT",
        _NONE,
        "pool",
    ),
    Architecture(
        "DistilBertModel", "encoder.distilbert:DistilBertModel", "DistilBERT", _NONE, "pool"
    ),
    Architecture(
        "ElectraForSequenceClassification",
        "encoder.electra:ElectraForSequenceClassification",
        "ELECTRA",
        _NONE,
        "pool",
    ),
    Architecture(
        "ElectraForTokenClassification",
        "encoder.electra:ElectraForTokenClassification",
        "ELECTRA",
        _NONE,
        "pool",
    ),
    Architecture("ElectraModel", "encoder.electra:ElectraModel", "ELECTRA", _NONE, "pool"),
    Architecture(
        "GteForSequenceClassification",
        "encoder.gte:GteForSequenceClassification",
        "GTE (mGTE)",
        _NONE,
        "pool",
    ),
    Architecture(
        "GteForTokenClassification",
        "encoder.gte:GteForTokenClassification",
        "GTE (mGTE)",
        _NONE,
        "pool",
    ),
    Architecture("GteModel", "encoder.gte:GteModel", "GTE (mGTE)", _NONE, "pool"),
    Architecture(
        "GteNewForSequenceClassification",
        "encoder.gte:GteForSequenceClassification",
        "GTE (mGTE)",
        _NONE,
        "pool",
    ),
    Architecture(
        "GteNewForTokenClassification",
        "encoder.gte:GteForTokenClassification",
        "GTE (mGTE)",
        _NONE,
        "pool",
    ),
    Architecture("GteNewModel", "encoder.gte:GteModel", "GTE (mGTE)", _NONE, "pool"),
    Architecture("HF_ColBERT", "encoder.colbert:ColbertModel", "ColBERT", _NONE, "pool"),
    Architecture(
        "JinaEmbeddingsV3ForSequenceClassification",
        "encoder.jina_v3:JinaEmbeddingsV3ForSequenceClassification",
        "Jina embeddings v3",
        _NONE,
        "pool",
    ),
    Architecture(
        "JinaEmbeddingsV3ForTokenClassification",
        "encoder.jina_v3:JinaEmbeddingsV3ForTokenClassification",
        "Jina embeddings v3",
        _NONE,
        "pool",
    ),
    Architecture(
        "JinaEmbeddingsV3Model",
        "encoder.jina_v3:JinaEmbeddingsV3Model",
        "Jina embeddings v3",
        _NONE,
        "pool",
    ),
    Architecture(
        "MPNetForSequenceClassification",
        "encoder.mpnet:MPNetForSequenceClassification",
        "MPNet",
        _NONE,
        "pool",
    ),
    Architecture(
        "MPNetForTokenClassification",
        "encoder.mpnet:MPNetForTokenClassification",
        "MPNet",
        _NONE,
        "pool",
    ),
    Architecture("MPNetModel", "encoder.mpnet:MPNetModel", "MPNet", _NONE, "pool"),
    Architecture(
        "ModernBertForSequenceClassification",
        "encoder.modernbert:ModernBertForSequenceClassification",
        "ModernBERT",
        _NONE,
        "pool",
    ),
    Architecture(
        "ModernBertForTokenClassification",
        "encoder.modernbert:ModernBertForTokenClassification",
        "ModernBERT",
        _NONE,
        "pool",
    ),
    Architecture(
        "ModernBertModel", "encoder.modernbert:ModernBertModel", "ModernBERT", _NONE, "pool"
    ),
    Architecture(
        "NomicBertModel", "encoder.nomic_bert:NomicBertModel", "Nomic Embed 1 to 2", _NONE, "pool"
    ),
    Architecture(
        "Qwen2ForProcessRewardModel",
        "decoder.qwen2_reward:Qwen2ForRewardModel",
        "Qwen2.5-Math reward models",
        task="pool",
    ),
    Architecture(
        "Qwen2ForRewardModel",
        "decoder.qwen2_reward:Qwen2ForRewardModel",
        "Qwen2.5-Math reward models",
        task="pool",
    ),
    Architecture("RobertaForMaskedLM", "encoder.roberta:RobertaModel", "RoBERTa", _NONE, "pool"),
    Architecture(
        "RobertaForSequenceClassification",
        "encoder.roberta:RobertaForSequenceClassification",
        "RoBERTa",
        _NONE,
        "pool",
    ),
    Architecture(
        "RobertaForTokenClassification",
        "encoder.roberta:RobertaForTokenClassification",
        "RoBERTa",
        _NONE,
        "pool",
    ),
    Architecture("RobertaModel", "encoder.roberta:RobertaModel", "RoBERTa", _NONE, "pool"),
    Architecture(
        "RobertaSpladeSparseEmbeddingModel",
        "encoder.splade:RobertaSpladeModel",
        "SPLADE",
        _NONE,
        "pool",
    ),
    Architecture(
        "SiglipTextModel",
        "encoder.siglip:SiglipTextModel",
        "SigLIP, text",
        _NONE,
        "pool",
        lora=False,
    ),
    Architecture(
        "XLMRobertaForSequenceClassification",
        "encoder.roberta:RobertaForSequenceClassification",
        "XLM-RoBERTa, multilingual E5, BGE reranker v2",
        _NONE,
        "pool",
    ),
    Architecture(
        "XLMRobertaForTokenClassification",
        "encoder.roberta:RobertaForTokenClassification",
        "XLM-RoBERTa, multilingual E5, BGE reranker v2",
        _NONE,
        "pool",
    ),
    Architecture(
        "XLMRobertaModel",
        "encoder.roberta:RobertaModel",
        "XLM-RoBERTa, multilingual E5, BGE reranker v2",
        _NONE,
        "pool",
    ),
)

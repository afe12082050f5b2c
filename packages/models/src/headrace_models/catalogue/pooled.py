"""Encoders and other models that pool: embedders, classifiers, rerankers, reward models."""

from headrace_models.catalogue.row import Architecture

_NONE = ("none",)

ROWS = (
    Architecture("BertForMaskedLM", "splade:BertSpladeModel", "SPLADE", _NONE, "pool"),
    Architecture(
        "BertForSequenceClassification", "bert:BertForSequenceClassification", "BERT", _NONE, "pool"
    ),
    Architecture(
        "BertForTokenClassification", "bert:BertForTokenClassification", "BERT", _NONE, "pool"
    ),
    Architecture("BertModel", "bert:BertModel", "BERT", _NONE, "pool"),
    Architecture(
        "BertSpladeSparseEmbeddingModel", "splade:BertSpladeModel", "SPLADE", _NONE, "pool"
    ),
    Architecture("BgeM3EmbeddingModel", "bge_m3:BgeM3EmbeddingModel", "BGE-M3", _NONE, "pool"),
    Architecture(
        "CamembertForSequenceClassification",
        "roberta:RobertaForSequenceClassification",
        "CamemBERT",
        _NONE,
        "pool",
    ),
    Architecture(
        "CamembertForTokenClassification",
        "roberta:RobertaForTokenClassification",
        "CamemBERT",
        _NONE,
        "pool",
    ),
    Architecture("CamembertModel", "roberta:RobertaModel", "CamemBERT", _NONE, "pool"),
    Architecture("DistilBertForMaskedLM", "splade:DistilBertSpladeModel", "SPLADE", _NONE, "pool"),
    Architecture(
        "DistilBertForSequenceClassification",
        "distilbert:DistilBertForSequenceClassification",
        "DistilBERT",
        _NONE,
        "pool",
    ),
    Architecture(
        "DistilBertForTokenClassification",
        "distilbert:DistilBertForTokenClassification",
        "DistilBERT",
        _NONE,
        "pool",
    ),
    Architecture("DistilBertModel", "distilbert:DistilBertModel", "DistilBERT", _NONE, "pool"),
    Architecture(
        "ElectraForSequenceClassification",
        "electra:ElectraForSequenceClassification",
        "ELECTRA",
        _NONE,
        "pool",
    ),
    Architecture(
        "ElectraForTokenClassification",
        "electra:ElectraForTokenClassification",
        "ELECTRA",
        _NONE,
        "pool",
    ),
    Architecture("ElectraModel", "electra:ElectraModel", "ELECTRA", _NONE, "pool"),
    Architecture(
        "GteForSequenceClassification",
        "gte:GteForSequenceClassification",
        "GTE (mGTE)",
        _NONE,
        "pool",
    ),
    Architecture(
        "GteForTokenClassification", "gte:GteForTokenClassification", "GTE (mGTE)", _NONE, "pool"
    ),
    Architecture("GteModel", "gte:GteModel", "GTE (mGTE)", _NONE, "pool"),
    Architecture(
        "GteNewForSequenceClassification",
        "gte:GteForSequenceClassification",
        "GTE (mGTE)",
        _NONE,
        "pool",
    ),
    Architecture(
        "GteNewForTokenClassification", "gte:GteForTokenClassification", "GTE (mGTE)", _NONE, "pool"
    ),
    Architecture("GteNewModel", "gte:GteModel", "GTE (mGTE)", _NONE, "pool"),
    Architecture("HF_ColBERT", "colbert:ColbertModel", "ColBERT", _NONE, "pool"),
    Architecture(
        "JinaEmbeddingsV3ForSequenceClassification",
        "jina_v3:JinaEmbeddingsV3ForSequenceClassification",
        "Jina embeddings v3",
        _NONE,
        "pool",
    ),
    Architecture(
        "JinaEmbeddingsV3ForTokenClassification",
        "jina_v3:JinaEmbeddingsV3ForTokenClassification",
        "Jina embeddings v3",
        _NONE,
        "pool",
    ),
    Architecture(
        "JinaEmbeddingsV3Model",
        "jina_v3:JinaEmbeddingsV3Model",
        "Jina embeddings v3",
        _NONE,
        "pool",
    ),
    Architecture(
        "MPNetForSequenceClassification",
        "mpnet:MPNetForSequenceClassification",
        "MPNet",
        _NONE,
        "pool",
    ),
    Architecture(
        "MPNetForTokenClassification", "mpnet:MPNetForTokenClassification", "MPNet", _NONE, "pool"
    ),
    Architecture("MPNetModel", "mpnet:MPNetModel", "MPNet", _NONE, "pool"),
    Architecture(
        "ModernBertForSequenceClassification",
        "modernbert:ModernBertForSequenceClassification",
        "ModernBERT",
        _NONE,
        "pool",
    ),
    Architecture(
        "ModernBertForTokenClassification",
        "modernbert:ModernBertForTokenClassification",
        "ModernBERT",
        _NONE,
        "pool",
    ),
    Architecture("ModernBertModel", "modernbert:ModernBertModel", "ModernBERT", _NONE, "pool"),
    Architecture(
        "NomicBertModel", "nomic_bert:NomicBertModel", "Nomic Embed 1 to 2", _NONE, "pool"
    ),
    Architecture(
        "Qwen2ForProcessRewardModel",
        "qwen2_reward:Qwen2ForRewardModel",
        "Qwen2.5-Math reward models",
        task="pool",
    ),
    Architecture(
        "Qwen2ForRewardModel",
        "qwen2_reward:Qwen2ForRewardModel",
        "Qwen2.5-Math reward models",
        task="pool",
    ),
    Architecture("RobertaForMaskedLM", "roberta:RobertaModel", "RoBERTa", _NONE, "pool"),
    Architecture(
        "RobertaForSequenceClassification",
        "roberta:RobertaForSequenceClassification",
        "RoBERTa",
        _NONE,
        "pool",
    ),
    Architecture(
        "RobertaForTokenClassification",
        "roberta:RobertaForTokenClassification",
        "RoBERTa",
        _NONE,
        "pool",
    ),
    Architecture("RobertaModel", "roberta:RobertaModel", "RoBERTa", _NONE, "pool"),
    Architecture(
        "RobertaSpladeSparseEmbeddingModel", "splade:RobertaSpladeModel", "SPLADE", _NONE, "pool"
    ),
    Architecture(
        "XLMRobertaForSequenceClassification",
        "roberta:RobertaForSequenceClassification",
        "XLM-RoBERTa, multilingual E5, BGE reranker v2",
        _NONE,
        "pool",
    ),
    Architecture(
        "XLMRobertaForTokenClassification",
        "roberta:RobertaForTokenClassification",
        "XLM-RoBERTa, multilingual E5, BGE reranker v2",
        _NONE,
        "pool",
    ),
    Architecture(
        "XLMRobertaModel",
        "roberta:RobertaModel",
        "XLM-RoBERTa, multilingual E5, BGE reranker v2",
        _NONE,
        "pool",
    ),
)

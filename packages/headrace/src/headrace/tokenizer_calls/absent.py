"""Names of transformers' tokenizers that the tokenizer of a running model does not have, and why."""

from __future__ import annotations

from collections.abc import Mapping

_FIXED = "the running engine reads its texts with it"

ABSENT: Mapping[str, str] = {
    "from_pretrained": "it is the tokenizer of a model that runs already",
    "train_new_from_iterator": "it trains no vocabularies",
    "push_to_hub": "it uploads nothing; save_pretrained() writes the files",
    "register_for_auto_class": "it is not one of transformers' classes",
    "save_vocabulary": "the vocabulary is part of tokenizer.json, which save_pretrained() writes",
    "save_chat_templates": "save_pretrained() writes them",
    "prepare_for_model": "build_inputs_with_special_tokens() puts special tokens around ids",
    "create_token_type_ids_from_sequences": "a call with return_token_type_ids=True returns them",
    "truncate_sequences": "it cuts texts, not ids; give truncation and max_length to a call",
    "set_truncation_and_padding": "give truncation and padding to a call",
    "update_post_processor": _FIXED,
    "resize_token_embeddings": "a loaded model cannot get further tokens",
    "as_target_tokenizer": "give text_target to a call",
    "prepare_seq2seq_batch": "give text_target to a call",
    "parse_response": "LLM.chat() and the server parse answers",
    "response_schema": "the server's tool and reasoning parsers read answers",
    "slow_tokenizer_class": "it has one form, the fast one",
    "vocab_file": "it is read from tokenizer.json",
    "sp_model": "it is read from tokenizer.json",
    "vocab_files_names": "it is read from tokenizer.json",
}
"""Name -> why it is not there."""

FIXED: Mapping[str, str] = {
    "split_special_tokens": (
        "give sanitize_control_tokens=True to apply_chat_template(), which keeps text of special tokens "
        "apart"
    ),
    "add_bos_token": _FIXED,
    "add_eos_token": _FIXED,
    "add_prefix_space": _FIXED,
    "legacy": _FIXED,
    "do_lower_case": _FIXED,
    "chat_control_tokens": "every special token is one",
    "additional_special_tokens": "a loaded model cannot get further ones",
    "extra_special_tokens": "a loaded model cannot get further ones",
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": "it is not built",
}
"""Attributes that change how transformers' tokenizers work and cannot be set here -> why."""

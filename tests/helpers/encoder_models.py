# SPDX-License-Identifier: Apache-2.0
"""Small random encoders of transformers, and folders of them with a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 99
WORDS = ["the", "a", "cat", "dog", "sat", "on", "mat", "rain", "falls", "in", "spain", "bank", "river", "money"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 112,
    "max_position_embeddings": 300,
}
_TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

# Each with what makes it differ from the others: positions, kinds of tokens, windows that are shorter than the texts.
CASES: dict[str, dict[str, Any]] = {
    "bert": {"model_type": "bert", **_SIZES},
    "bert, relu": {"model_type": "bert", **_SIZES, "hidden_act": "relu", "type_vocab_size": 1},
    "roberta": {"model_type": "roberta", **_SIZES},
    "camembert": {"model_type": "camembert", **_SIZES},
    "xlm-roberta": {"model_type": "xlm-roberta", **_SIZES, "type_vocab_size": 1, "pad_token_id": 3},
    "data2vec-text": {"model_type": "data2vec-text", **_SIZES},
    "ernie": {"model_type": "ernie", **_SIZES},
    "electra": {"model_type": "electra", **_SIZES, "embedding_size": 64},
    "distilbert": {
        "model_type": "distilbert",
        "vocab_size": VOCABULARY,
        "dim": 64,
        "n_layers": 3,
        "n_heads": 4,
        "hidden_dim": 112,
        "max_position_embeddings": 300,
    },
    "mpnet": {"model_type": "mpnet", **_SIZES},
    # Texts are longer than the distances that have rows of their own, and than all that have any.
    "deberta-v3": {
        "model_type": "deberta-v2",
        **_SIZES,
        "relative_attention": True,
        "position_buckets": 16,
        "max_relative_positions": 90,
        "position_biased_input": False,
        "pos_att_type": "p2c|c2p",
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
    },
    "deberta-v2, absolute positions": {
        "model_type": "deberta-v2",
        **_SIZES,
        "relative_attention": True,
        "max_relative_positions": -1,
        "pos_att_type": ["c2p"],
        "share_att_key": True,
        "type_vocab_size": 2,
        "pooler_hidden_act": "tanh",
    },
    "deberta-v2, only positions of queries": {
        "model_type": "deberta-v2",
        **_SIZES,
        "num_attention_heads": 2,
        "relative_attention": True,
        "position_buckets": 150,
        "max_relative_positions": 512,
        "position_biased_input": False,
        "pos_att_type": "p2c",
        "norm_rel_ebd": "none",
        "share_att_key": True,
    },
    "deberta-v2, without distances": {"model_type": "deberta-v2", **_SIZES, "pos_att_type": None},
    "nomic_bert": {"model_type": "nomic_bert", **_SIZES},
    "modernbert": {
        "model_type": "modernbert",
        **_SIZES,
        **_TOKENS,
        "cls_token_id": 1,
        "sep_token_id": 2,
        "local_attention": 16,
    },
    "modernbert, mean": {
        "model_type": "modernbert",
        **_SIZES,
        **_TOKENS,
        "cls_token_id": 1,
        "sep_token_id": 2,
        "local_attention": 6,
        "classifier_pooling": "mean",
        "norm_bias": True,
        "mlp_bias": True,
        "attention_bias": True,
        "classifier_bias": True,
    },
    "embedding gemma": {
        "model_type": "gemma3_text",
        **_SIZES,
        **_TOKENS,
        "head_dim": 16,
        "num_key_value_heads": 2,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 16,
        "use_bidirectional_attention": True,
    },
    "eurobert": {"model_type": "eurobert", **_SIZES, **_TOKENS, "mask_token_id": 4, "num_key_value_heads": 2},
}


def build(case: str, kind: str = "AutoModel", labels: int = 3) -> Any:
    """A random model whose values are large enough that a mistake shows."""
    values = dict(CASES[case])
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    config.num_labels = labels
    torch.manual_seed(0)
    model = getattr(transformers, kind).from_config(config).eval()
    with torch.no_grad():
        for value in model.parameters():
            if value.dim() > 1:
                value.normal_(0, 0.15)
            else:
                value.add_(torch.randn_like(value) * 0.1)
    return model


def add_tokenizer(folder: Path, longest: int = 128, types: bool = False) -> Any:
    """Writes a tokenizer of whole words into a folder, as BERT's with [CLS] and [SEP]; returns transformers' one."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    more = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]} if types else {}
    special = dict(zip(names, SPECIAL[:5], strict=True))
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=longest, **special, **more)
    made.save_pretrained(folder)
    return made


def add_modules(folder: Path, pooling: str = "mean", normalize: bool = True, longest: int = 128) -> None:
    """Writes what makes a folder with a model one of sentence-transformers."""
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")] + ([("2_Normalize", "Normalize")] if normalize else [])
    listed = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": longest, "do_lower_case": False}))
    kinds = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "last": "lasttoken"}
    (folder / "1_Pooling").mkdir(exist_ok=True)
    values = {f"pooling_mode_{name}": kind == pooling for kind, name in kinds.items()}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **values}))
    (folder / "2_Normalize").mkdir(exist_ok=True)

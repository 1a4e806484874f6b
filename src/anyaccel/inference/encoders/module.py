# SPDX-License-Identifier: Apache-2.0
"""A native encoder as transformers' model of the same checkpoint: padded tensors in, its outputs out."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import nn

from anyaccel.errors import UsageError
from anyaccel.inference.encoders.model import Encoder


class NativeEncoderModel(nn.Module):
    """What stands in the place of an encoder's Hugging Face model.

    Tokens that the attention mask leaves out are not computed: their hidden states are zeros.

    Args:
        encoder: with a classification head where the model has one.
        config: transformers' configuration.
    """

    base_model_prefix = ""
    main_input_name = "input_ids"

    def __init__(self, encoder: Encoder, config: Any) -> None:
        super().__init__()
        self.encoder = encoder
        self.config = config
        self.eval()

    @property
    def device(self) -> torch.device:
        """Where inputs and results are."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Of the results."""
        return torch.float32

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> Any:
        """As transformers' own forward; of its further arguments only those that are None or False.

        Raises:
            UsageError: another argument is given, or a text has no tokens.
        """
        wanted = [name for name, value in others.items() if value is not None and value is not False]
        if input_ids is None or wanted:
            what = f"{wanted[0]}=" if wanted else "no input_ids"
            raise UsageError(f"{what}: the native encoder takes input_ids, attention_mask and token_type_ids only")
        if input_ids.dim() != 2:
            raise UsageError(f"input_ids of shape {tuple(input_ids.shape)}: must be [texts, tokens]")
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if mask.shape != input_ids.shape:
            raise UsageError(
                f"attention_mask of shape {tuple(mask.shape)}: input_ids are of shape {tuple(input_ids.shape)}"
            )
        seen = mask.bool().numpy()
        counts = seen.sum(1)
        tokens = _of_seen(input_ids, seen)
        types = None
        if token_type_ids is not None and self.encoder.native.spec.token_types > 1:
            types = _of_seen(token_type_ids.expand_as(input_ids), seen)
        packed = self.encoder.encode_packed(counts.tolist(), tokens, types)
        from transformers.modeling_outputs import BaseModelOutputWithPooling, SequenceClassifierOutput

        output: Any
        if self.encoder.classifier is not None:
            logits = self.encoder.classifier(packed, counts.tolist()) if len(counts) else numpy.zeros((0, 0))
            output = SequenceClassifierOutput(logits=torch.from_numpy(logits))
        else:
            hidden = numpy.zeros((*seen.shape, self.encoder.hidden), numpy.float32)
            hidden[seen] = packed
            pooled = self.encoder.pool(packed, counts.tolist())
            output = BaseModelOutputWithPooling(
                last_hidden_state=torch.from_numpy(hidden),
                pooler_output=None if pooled is None else torch.from_numpy(pooled),
            )
        return output if return_dict is not False else output.to_tuple()


def _of_seen(values: torch.Tensor, seen: numpy.ndarray[Any, Any]) -> numpy.ndarray[Any, Any]:
    return numpy.ascontiguousarray(values.to(torch.int64).numpy()[seen])

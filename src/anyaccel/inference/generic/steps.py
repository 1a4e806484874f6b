# SPDX-License-Identifier: Apache-2.0
"""One sequence through a model's own code, prepared and continued as transformers' `generate` does it."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from anyaccel.errors import UsageError


class TorchSequence:
    """A prompt and what follows it, computed step by step with the cache that the model wants.

    Which inputs a step needs (positions, masks, states under other names, a token that stands for the next one) is the
    model's own business: `prepare_inputs_for_generation` and `_update_model_kwargs_for_generation` know it. What its
    generation_config demands of the logits, such as a forced last token, holds too.

    Args:
        module: a Hugging Face causal LM.
        ids_BT: the prompt, [1, tokens].
        max_new_tokens: for caches of a fixed size.

    Raises:
        UsageError: the model has no `generate`.
    """

    def __init__(self, module: Any, ids_BT: torch.Tensor, max_new_tokens: int) -> None:
        from transformers.generation.utils import GenerationMixin

        if not isinstance(module, GenerationMixin):
            raise UsageError(f"{type(module).__name__} has no generate(), as transformers' causal language models have")
        self._module: Any = module
        self._ids_BT = ids_BT
        self._known = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
        self._keeps_logits = "logits_to_keep" in inspect.signature(module.forward).parameters
        self._first = True
        self._computed = 0
        # A function in the place of the loop receives all that `generate` prepares for one: the cache above all.
        module.generate(
            ids_BT,
            attention_mask=torch.ones_like(ids_BT),
            custom_generate=self._keep,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            num_return_sequences=1,
            repetition_penalty=1.0,  # the caller's own
        )

    def _keep(self, _module: Any, input_ids: torch.Tensor, logits_processor: Any, **prepared: Any) -> torch.Tensor:
        for name in ("stopping_criteria", "generation_config", "synced_gpus", "streamer"):
            prepared.pop(name, None)
        self._inputs = prepared
        self._ids_BT = input_ids  # behind an encoder for the prompt: what the decoder begins with
        self.rules = logits_processor
        return input_ids

    def __len__(self) -> int:
        return self._ids_BT.shape[1]

    def append(self, tokens_T: torch.Tensor) -> None:
        """Add what follows the sequence so far, for the next step."""
        self._ids_BT = torch.cat([self._ids_BT, tokens_T[None]], dim=1)
        if self._module.config.is_encoder_decoder:
            return  # the mask is of the prompt
        # transformers has made these ready for one more token; several have come.
        mask_BT, positions_BT = self._inputs.get("attention_mask"), self._inputs.get("position_ids")
        if mask_BT is not None and mask_BT.dim() == 2:
            new = mask_BT.new_ones(1, len(self) - mask_BT.shape[1])
            self._inputs["attention_mask"] = torch.cat([mask_BT, new], dim=1)
        if positions_BT is not None and positions_BT.dim() == 2:
            last = positions_BT[:, -1:]
            new = last + torch.arange(1, 1 + len(self) - positions_BT.shape[1], device=last.device)
            self._inputs["position_ids"] = torch.cat([positions_BT, new], dim=1)

    def step(self, **how: Any) -> Any:
        """Compute the tokens that no step has had yet; returns what the module returns, with all of their logits.

        Args:
            how: for the module.
        """
        return self._compute(how | ({"logits_to_keep": 0} if self._keeps_logits else {}))

    def logits(self, token: torch.Tensor | None = None) -> torch.Tensor:
        """The logits of the next token, float32 [vocabulary], within the rules of the model's generation_config.

        Args:
            token: what follows the sequence so far, [1]; None for the first step.
        """
        if token is not None:
            self.append(token)
        with torch.inference_mode():
            found: torch.Tensor = self.rules(self._ids_BT, self._compute({}).logits[:, -1].float())[0]
        return found

    def _compute(self, more: dict[str, Any]) -> Any:
        how: dict[str, Any] = {}
        if "is_first_iteration" in self._known:
            how["is_first_iteration"] = self._first
        if "next_sequence_length" in self._known and not self._first and self._inputs.get("use_cache"):
            how["next_sequence_length"] = len(self) - self._computed
        self._first = False
        self._computed = len(self)
        with torch.inference_mode():
            prepared = self._module.prepare_inputs_for_generation(self._ids_BT, **how, **self._inputs)
            output = self._module(**{**prepared, **more, "return_dict": True})
            self._inputs = self._module._update_model_kwargs_for_generation(
                output, self._inputs, is_encoder_decoder=self._module.config.is_encoder_decoder
            )
        return output

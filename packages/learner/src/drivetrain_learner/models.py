"""Policies and value functions over transformers models, called with packed batches."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain_learner import _parallel as parallel
from drivetrain_learner.attention import Packing, install_packed_attention
from drivetrain_learner.batch import PackedBatch
from drivetrain_learner.logprobs import TokenOutputs, head_logprobs

# Settings of a model's configuration that change its logits after the head, with the values that change nothing.
_LOGIT_SETTINGS: dict[str, tuple[Any, ...]] = {
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "lm_head_multiplier": (None, 1.0),
}


def load_model(source: str, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Any:
    """A causal language model from a folder or the Hugging Face hub, ready for packed batches.

    Code that comes with a model is never run: `trust_remote_code` is off, and weights are read from safetensors alone.

    Args:
        source: a folder with a transformers model, or the name of one on the hub.
        dtype: of the parameters. Train in fp32 and compute in another dtype with `PolicyModel(..., autocast=...)`.
        device: where the parameters lie.

    Returns:
        a `transformers.PreTrainedModel`. It is in training mode, which with dropout switched off only means that
        activation checkpointing works once its `gradient_checkpointing_enable()` was called.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, trust_remote_code=False, use_safetensors=True)
    _prepare(model)
    return model.to(device).train()


class PolicyModel(nn.Module):
    """log pi of the labels of a packed batch.

    Dropout is switched off: the log-probs of a batch are a function of the weights, whatever the batch is packed with.
    """

    def __init__(self, model: Any, *, autocast: torch.dtype | None = None) -> None:
        """Wraps `model`.

        Args:
            model: a transformers causal language model; it stays reachable as `.model`.
            autocast: the dtype to compute in (`torch.bfloat16` on a GPU), with the parameters kept as they are. None
                computes in the parameters' dtype.

        Raises:
            ValueError: the model transforms its logits in a way that is not computed here.
        """
        super().__init__()
        for name, neutral in _LOGIT_SETTINGS.items():
            if (value := getattr(model.config, name, None)) not in neutral:
                raise ValueError(f"{type(model).__name__} has {name}={value}; only plain linear heads are supported")
        _prepare(model)
        self.model = model
        self.autocast = autocast

    def forward(self, batch: PackedBatch, *, temperature: float = 1.0, entropy: bool = False) -> TokenOutputs:
        """Log-probs, and on request entropies, of `batch.labels` where `batch.loss_mask` is true.

        Args:
            batch: N slots, on the model's device.
            temperature: of the sampling distribution; logits are divided by it.
            entropy: whether to compute the entropies, which costs another pass over the logits.

        Returns:
            fp32 `[N]` each; exactly 0, without gradient, where the mask is false.

        Raises:
            ValueError: `temperature` is not positive.
        """
        if not temperature > 0:
            raise ValueError(f"temperature is {temperature}; log-probs need a positive one (greedy sampling has none)")
        hidden = _hidden_states(self.model.base_model, batch, self.autocast)
        head = self.model.get_output_embeddings()
        # With tensor parallelism a rank has some rows of the head, and the log-probs need them all.
        weight, bias = parallel.full(head.weight), None if head.bias is None else parallel.full(head.bias)
        index = batch.loss_mask.nonzero()[:, 0]
        kept = head_logprobs(
            hidden[index],
            weight,
            bias,
            batch.labels[index],
            temperature=temperature,
            entropy=entropy,
            dtype=self.autocast,
        )
        zeros = torch.zeros(batch.num_tokens, dtype=torch.float32, device=hidden.device)
        logprobs = zeros.index_put((index,), kept.logprobs)
        return TokenOutputs(logprobs, None if kept.entropy is None else zeros.index_put((index,), kept.entropy))


class ValueModel(nn.Module):
    """V of the state that each label of a packed batch was sampled in."""

    def __init__(self, model: Any, *, autocast: torch.dtype | None = None) -> None:
        """Wraps the backbone of `model` and gives it a scalar head, which starts at zero.

        Args:
            model: a transformers model, with or without a language-model head. Its backbone is used, not copied.
            autocast: as for `PolicyModel`.
        """
        super().__init__()
        _prepare(model)
        self.backbone = model.base_model
        parameter = next(self.backbone.parameters())
        width = self.backbone.config.get_text_config().hidden_size
        self.head = nn.Linear(width, 1, device=parameter.device, dtype=parameter.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.autocast = autocast

    @classmethod
    def from_policy(cls, policy: PolicyModel) -> ValueModel:
        """A critic that starts from a copy of the policy's backbone. Make it before the policy is sharded."""
        return cls(copy.deepcopy(policy.model.base_model), autocast=policy.autocast)

    def forward(self, batch: PackedBatch) -> Tensor:
        """Values, fp32 `[N]`: slot t holds the value of the tokens up to `input_ids[t]`, before its label is known."""
        hidden = _hidden_states(self.backbone, batch, self.autocast)
        return hidden.float() @ self.head.weight.float()[0] + self.head.bias.float()


def _prepare(model: Any) -> None:
    install_packed_attention(model)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def _hidden_states(backbone: Any, batch: PackedBatch, autocast: torch.dtype | None) -> Tensor:
    """The backbone's last hidden states, `[N, H]`."""
    if batch.num_tokens == 0:
        # Backbones cannot run on nothing. One token keeps the graph, and a sharded model's collectives, in place.
        token = PackedBatch.pack([[0, 0]], [[False, False]]).to(batch.input_ids.device)
        return _hidden_states(backbone, token, autocast)[:0]
    with torch.autocast(batch.input_ids.device.type, dtype=autocast, enabled=autocast is not None):
        output = backbone(
            input_ids=batch.input_ids[None],
            position_ids=batch.positions[None],
            # A mask of four dimensions is handed on as it is: none is made, and packed attention reads none.
            attention_mask=torch.empty(1, 1, 0, 0, dtype=torch.bool, device=batch.input_ids.device),
            use_cache=False,
            packing=Packing(batch),
        )
    hidden: Tensor = output.last_hidden_state[0]
    return hidden

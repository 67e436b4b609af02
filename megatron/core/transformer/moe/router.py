"""The router: which experts a token goes to, with which weights, and how their load is kept even.

Scores are sigmoids (or a softmax) of FP32 logits. A bias per expert takes part in the *choice* only; weights are the
chosen experts' scores without it (DeepSeek-V3, section 2.1.2). With groups, a group's score is the sum of its two best
choices, and only experts of the best groups can be chosen. Weight, bias, logits and scores are FP32 in any model.

The bias is no parameter: ``update_expert_bias`` moves it by a fixed step against the sign of each expert's overload,
once per optimizer step. The load it needs is counted per microbatch into ``ForwardContext.losses``, where a recomputed
forward writes the same entry again, and added to the router's buffer once, after the block has run.

Shape legend: T rows, E experts, G groups, K experts chosen.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup, all_reduce

from megatron.core.tensor_parallel.initialization import init_method_normal
from megatron.core.tensor_parallel.shards import draw
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class Routing(NamedTuple):
    """Outcome of routing.

    Attributes:
        experts_TK: int64 ids, distinct within a row.
        weights_TK: FP32 factors on the experts' outputs.
        scores_TE: FP32 scores of all experts, without the bias.
    """

    experts_TK: Tensor
    weights_TK: Tensor
    scores_TE: Tensor


class TopKRouter(MegatronModule):
    """Scores every expert for every row and chooses ``moe_router_topk`` of them.

    State: ``weight`` ``[E, hidden]``; with ``moe_router_enable_expert_bias`` the buffer ``expert_bias`` ``[E]``; and
    ``local_tokens_per_expert`` int64 ``[E]``, rows counted since the last bias update (not saved in checkpoints).
    """

    expert_bias: Tensor | None
    local_tokens_per_expert: Tensor

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        assert config.num_moe_experts is not None
        self.num_experts = config.num_moe_experts
        dtype = torch.promote_types(config.params_dtype, torch.float32)
        self.weight = nn.Parameter(torch.empty(self.num_experts, config.hidden_size, dtype=dtype))
        bias = torch.zeros(self.num_experts, dtype=dtype) if config.moe_router_enable_expert_bias else None
        self.register_buffer("expert_bias", bias)
        counts = torch.zeros(self.num_experts, dtype=torch.int64)
        self.register_buffer("local_tokens_per_expert", counts, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight, zero the bias and the counts."""
        with torch.no_grad():
            draw(self.weight, init_method_normal(self.config.init_method_std), self.weight.dtype)
            self.local_tokens_per_expert.zero_()
            if self.expert_bias is not None:
                self.expert_bias.zero_()

    def forward(self, hidden_states: Tensor) -> Routing:
        """``[T, hidden]`` -> where each row goes. All rows are routed: leave padding out of them."""
        if self.weight.dtype.itemsize < 4:
            raise ValueError(
                f"The router's weight is {self.weight.dtype}, but routers are FP32 in every precision: do not cast the "
                "model, build it with bf16=True."
            )
        logits_TE = F.linear(hidden_states.to(self.weight.dtype), self.weight)
        scores_TE = logits_TE.sigmoid() if self.config.moe_router_score_function == "sigmoid" else logits_TE.softmax(-1)
        experts_TK = self._choose(scores_TE.detach())
        weights_TK = scores_TE.gather(1, experts_TK)
        if self.config.norm_topk_prob:
            weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
        if self.config.moe_router_topk_scaling_factor is not None:
            weights_TK = weights_TK * self.config.moe_router_topk_scaling_factor
        return Routing(experts_TK, weights_TK, scores_TE)

    def _choose(self, scores_TE: Tensor) -> Tensor:
        choice_TE = scores_TE if self.expert_bias is None else scores_TE + self.expert_bias
        groups, kept = self.config.moe_router_num_groups, self.config.moe_router_group_topk
        if groups is not None and kept is not None:
            choice_TGE = choice_TE.unflatten(-1, (groups, -1))
            group_score_TG = choice_TGE.topk(2, dim=-1).values.sum(dim=-1)
            dropped_TG = torch.ones_like(group_score_TG, dtype=torch.bool)
            dropped_TG.scatter_(1, group_score_TG.topk(kept, dim=-1).indices, False)
            choice_TE = choice_TGE.masked_fill(dropped_TG[..., None], -torch.inf).flatten(1)
        return choice_TE.topk(self.config.moe_router_topk, dim=-1).indices


def count_experts(experts_TK: Tensor, num_experts: int) -> Tensor:
    """How many rows chose each expert, int64 ``[E]``, without a device synchronization (``bincount`` has one)."""
    chosen = experts_TK.flatten()
    counts = torch.zeros(num_experts, dtype=torch.int64, device=chosen.device)
    return counts.scatter_add_(0, chosen, torch.ones_like(chosen))


@torch.no_grad()
def update_expert_bias(model: nn.Module, group: ProcessGroup | None = None) -> None:
    """Move every router's bias one step towards an even load, and start counting anew.

    Call it after every optimizer step, on every rank.

    Args:
        model: every ``TopKRouter`` inside is updated; those without a bias only lose their counts.
        group: ranks whose rows are counted together; None for one process.

    Experts with less than the mean load gain ``moe_router_bias_update_rate``, those with more lose it.
    """
    routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
    loads = [router.local_tokens_per_expert for router in routers]
    if group is not None and loads:
        message = torch.stack(loads)
        all_reduce(message, group=group)
        loads = list(message.unbind())
    for router, load in zip(routers, loads, strict=True):
        if router.expert_bias is not None:
            # E * load against the total: exact, where a mean of integers would be rounded.
            overload = load * load.numel() - load.sum()
            router.expert_bias -= router.config.moe_router_bias_update_rate * overload.sign().to(
                router.expert_bias.dtype
            )
        router.local_tokens_per_expert.zero_()

"""What a rank of ``test_parallel.py`` does: the same steps as one process, on its own rows and shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import ParallelSizes, build_process_groups
from megatron.core.tensor_parallel.mappings import all_gather_rows, group_rank, group_size
from megatron.core.tensor_parallel.shards import local_part
from megatron.core.transformer.experimental_attention_variant.dsa import Layout, LossTracker, record_topk
from megatron.core.transformer.experimental_attention_variant.dsa.layout import valid_rows
from megatron.core.transformer.moe import TopKRouter
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.training.checkpointing import Checkpoint, Progress, load_checkpoint, save_checkpoint
from megatron.training.config import CheckpointConfig, OptimizerConfig
from megatron.training.data.batch import Batch, Sample, collate
from megatron.training.data.shard import shard_batch, zigzag_source
from megatron.training.optimizer import build_optimizer, optimizer_state
from megatron.training.prepare import build_model
from megatron.training.ranks import flat_tensors, require_equal_replicas
from megatron.training.step import Engine, evaluate, train_step

SAMPLES, LENGTH = 8, 16
CONFIG = MLATransformerConfig(
    num_layers=3,
    hidden_size=32,
    num_attention_heads=4,
    ffn_hidden_size=24,
    vocab_size=50,
    make_vocab_size_divisible_by=32,  # two of four ranks hold padding alone
    gated_linear_unit=True,
    activation_func="silu",
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
    init_method_std=0.2,
    q_lora_rank=20,
    kv_lora_rank=12,
    qk_head_dim=8,
    qk_pos_emb_head_dim=4,
    v_head_dim=6,
    rope_type="rope",
    experimental_attention_variant="dsa",
    dsa_indexer_n_heads=2,
    dsa_indexer_head_dim=8,
    dsa_indexer_topk=5,
    dsa_indexer_topk_freq=[1, 0, 1],
    dsa_indexer_loss_coeff=1.0,
    dsa_indexer_use_sparse_loss=True,
    dsa_indexer_scoring_precision="fp32",
    dsa_indexer_k_norm_fp32=True,
    num_moe_experts=4,
    moe_layer_freq=[0, 1, 1],
    moe_ffn_hidden_size=16,
    moe_shared_expert_intermediate_size=24,
    moe_router_topk=2,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    cp_comm_type="allgather",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes, and how the eight samples of a step are cut: ``packed`` into documents of uneven length."""

    world: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    sp: bool = False
    micro: int = 2
    packed: bool = False
    per_token: bool = False
    recompute: bool = False
    dense: bool = False
    tied: bool = False
    no_dsa: bool = False
    length: int = LENGTH
    unrotated: bool = False

    def __str__(self) -> str:
        sizes = f"w{self.world}-tp{self.tp}{'sp' if self.sp else ''}-cp{self.cp}-ep{self.ep}"
        cut = f"-micro{self.micro}-{'packed' if self.packed else 'plain'}"
        cut += "" if self.length == LENGTH else f"-length{self.length}"
        options = {"pertoken": self.per_token, "recompute": self.recompute, "dense": self.dense, "tied": self.tied}
        options["nodsa"] = self.no_dsa
        options["unrotated"] = self.unrotated
        return sizes + cut + "".join(f"-{name}" for name, on in options.items() if on)

    @property
    def alone(self) -> Case:
        """The same numbers in one process."""
        return dataclasses.replace(self, world=1, tp=1, cp=1, ep=1, sp=False, recompute=False)


def make_engine(case: Case, seed: int = 0, **options: Any) -> Engine:
    config = dataclasses.replace(
        CONFIG,
        tensor_model_parallel_size=case.tp,
        context_parallel_size=case.cp,
        expert_model_parallel_size=case.ep,
        sequence_parallel=case.sp,
        calculate_per_token_loss=case.per_token,
        recompute_granularity="full" if case.recompute else None,
        untie_embeddings_and_output_weights=not case.tied,
        experimental_attention_variant=None if case.no_dsa else "dsa",
        qk_pos_emb_head_dim=0 if case.unrotated else CONFIG.qk_pos_emb_head_dim,
        **{"dsa_indexer_use_sparse_loss": not case.dense} | options,
    )
    groups = build_process_groups(ParallelSizes.of(config, case.world), "cpu")
    torch.manual_seed(seed)
    model, compute = build_model(config, groups, torch.device("cpu"))
    optimizer = OptimizerConfig(lr=1.0, clip_grad=1.0)
    per_token = config.calculate_per_token_loss
    adam = build_optimizer(model, optimizer)
    return Engine(model, compute, adam, torch.device("cpu"), optimizer, per_token, True, groups)


def make_sample(case: Case, number: int) -> Sample:
    generator = np.random.default_rng(number)
    tokens = generator.integers(0, 50, case.length + 1)
    mask = np.ones(case.length, dtype=np.float32)
    mask[: case.length if number == 5 else 2 * number] = 0  # uneven loss tokens; one sample has none
    starts = np.array([0, 3 + number % 3, 11]) if case.packed else None
    return Sample(tokens[:-1], tokens[1:], mask, starts)


def micro_batches(case: Case, engine: Engine) -> list[Batch]:
    """This data-parallel rank's micro-batches, dealt out as the sampler does."""
    dp, own = group_size(engine.groups.dp), group_rank(engine.groups.dp)
    samples = [make_sample(case, number) for number in range(SAMPLES)]
    rounds = range(own * case.micro, SAMPLES, case.micro * dp)
    return [collate(samples[start : start + case.micro]) for start in rounds]


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def selected_keys(case: Case, engine: Engine) -> dict[int, Tensor]:
    """Ids that each layer selects for sample rows in global order, of the first micro-batch of the first dp rank."""
    batch = collate([make_sample(case, number) for number in range(case.micro)])
    cp, tp = engine.groups.cp, engine.groups.tp
    rows = batch.tokens.numel()
    marked = dataclasses.replace(batch, labels=torch.arange(rows).view(batch.tokens.shape))
    part = shard_batch(batch, group_size(cp), group_rank(cp), group_size(tp))
    places = shard_batch(marked, group_size(cp), group_rank(cp), group_size(tp)).labels.flatten()
    with torch.no_grad(), record_topk(engine.model) as record, engine.compute.installed():
        engine.model.eval()(part.tokens, labels=part.labels, packed_seq_params=part.packed_seq_params)
    packed, found = part.packed_seq_params, {}
    place_of_key = torch.arange(rows)
    if packed is not None:
        assert packed.offsets is not None
        place_of_key = zigzag_source(packed.offsets, packed.padded_offsets or packed.offsets, 1, 0)
    for layer, topk in record.items():
        ids, order = all_gather_rows(topk.indices_TK, cp), all_gather_rows(places, cp)
        ids = torch.where(ids >= 0, place_of_key[ids.long().clamp(min=0)], -1)
        by_place = torch.full((rows, ids.shape[1]), -9)
        by_place[order[order >= 0]] = ids[order >= 0]
        found[layer] = by_place
    return found


def logits_of(case: Case, engine: Engine) -> Tensor:
    """Logits of the first micro-batch, this rank's rows put into place."""
    batch = collate([make_sample(case, number) for number in range(case.micro)])
    cp, tp = engine.groups.cp, engine.groups.tp
    places = dataclasses.replace(batch, labels=torch.arange(batch.tokens.numel()).view(batch.tokens.shape))
    part = shard_batch(batch, group_size(cp), group_rank(cp), group_size(tp))
    order = shard_batch(places, group_size(cp), group_rank(cp), group_size(tp)).labels.flatten()
    with torch.no_grad(), engine.compute.installed():
        logits = engine.model.eval()(part.tokens, packed_seq_params=part.packed_seq_params).flatten(0, 1)
    logits, order = all_gather_rows(logits, cp), all_gather_rows(order, cp)
    out = torch.full((batch.tokens.numel(), logits.shape[1]), float("nan"))
    out[order[order >= 0]] = logits[order >= 0]
    return out


def observe(case: Case) -> dict[str, Any]:
    """Everything that should not depend on the number of ranks."""
    engine = make_engine(case)
    batches = micro_batches(case, engine)
    result: dict[str, Any] = {"weights": {n: whole(p) for n, p in engine.model.named_parameters()}}
    result["keys"] = {} if case.no_dsa else selected_keys(case, engine)
    result["logits"] = logits_of(case, engine)
    result["valid_loss"] = evaluate(engine, batches)[0]
    step = train_step(engine, batches, 0.0)
    result["step"] = (step.lm_loss, step.indexer_losses, step.grad_norm)
    parameters = engine.model.named_parameters()
    result["gradients"] = {name: whole(p.grad) for name, p in parameters if p.grad is not None}
    result["bias"] = {name: b.clone() for name, b in engine.model.named_buffers() if "expert_bias" in name}
    return result


def padding_only(case: Case) -> dict[str, float]:
    """A micro-batch without a single real token, between two of one token: what it leaves behind."""
    engine = make_engine(case)
    counts = {}
    for name, offsets in (("one", (0, 1)), ("none", (0, 0))):
        packed = PackedSeqParams.from_offsets(offsets, (0, 8))
        tokens = torch.zeros(1, 8 // case.cp, dtype=torch.int64)
        engine.model.train()
        engine.optimizer.zero_grad()
        losses = LossTracker(normalizer=1.0)
        with engine.compute.installed():
            loss = engine.model(tokens, labels=tokens, packed_seq_params=packed, losses=losses)
            valid = valid_rows(Layout.zigzag(offsets, case.cp, group_rank(engine.groups.cp), (0, 8)), "cpu")
            (loss * valid).sum().backward()
            engine.compute.accumulate()
        engine.compute.finish()
        gradients = [whole(p.grad) for p in engine.model.parameters() if p.grad is not None]
        counts[f"{name} gradients"] = float(sum(g.norm() for g in gradients))
        loads = [module.local_tokens_per_expert for module in engine.model.modules() if isinstance(module, TopKRouter)]
        counts[f"{name} routed"] = float(_summed(torch.stack(loads).sum().float(), engine))
        for load in loads:
            load.zero_()
    return counts


def _summed(value: Tensor, engine: Engine) -> Tensor:
    if engine.groups.world is not None:
        torch.distributed.all_reduce(value, group=engine.groups.world)
    return value


def ten_steps(case: Case) -> list[float]:
    """Train, and hold replicas to every bit afterwards."""
    engine = make_engine(case)
    batches = micro_batches(case, engine)
    losses = [train_step(engine, batches, 1e-2).lm_loss for _ in range(10)]
    state: Mapping[str, Any] = {
        "model": engine.model.state_dict(),
        "optimizer": optimizer_state(engine.model, engine.optimizer),
    }
    require_equal_replicas(dict(flat_tensors(state)), engine.groups)
    return losses


def save_trained(case: Case, root: Path, steps: int) -> dict[str, Tensor]:
    """Train from scratch and save; whole tensors of what was saved."""
    engine = make_engine(case)
    for _ in range(steps):
        train_step(engine, micro_batches(case, engine), 1e-2)
    return save(engine, root, steps)


def load_and_save(case: Case, source: Path, root: Path, step: int) -> dict[str, Tensor]:
    """Load what other sizes saved into a model of other weights, and save it again."""
    engine = make_engine(case, seed=1)
    assert load(engine, source, step) == []
    return save(engine, root, step)


def load(engine: Engine, source: Path, step: int) -> list[str]:
    """Load a checkpoint; returns the trained parameters whose optimizer state starts fresh."""
    checkpoint = Checkpoint(source / f"iter_{step:07d}", Progress(step, step * SAMPLES))
    return load_checkpoint(checkpoint, engine.model, engine.optimizer, CheckpointConfig(load=str(source)))


def save(engine: Engine, root: Path, step: int, record: dict[str, Any] | None = None) -> dict[str, Tensor]:
    """Save a checkpoint; ``record`` are the model's options. Returns whole tensors of what was saved."""
    options = CheckpointConfig(save=str(root))
    what = engine.model, engine.optimizer, options, {"model": record or {}}, engine.groups
    save_checkpoint(root, Progress(step, step * SAMPLES), *what)
    return state_of(engine)


def state_of(engine: Engine) -> dict[str, Tensor]:
    """Whole tensors of the model and the optimizer."""
    state = {"model": engine.model.state_dict(), "optimizer": optimizer_state(engine.model, engine.optimizer)}
    return {name: whole(tensor) for name, tensor in flat_tensors(state)}


def frozen_indexer(case: Case, **options: Any) -> dict[str, Any]:
    """Two steps with the indexer's loss off."""
    engine = make_engine(case, dsa_indexer_loss_coeff=None, dsa_indexer_use_sparse_loss=False, **options)
    before = {name: whole(p) for name, p in engine.model.named_parameters()}
    for _ in range(2):
        train_step(engine, micro_batches(case, engine), 1e-2)
    changed = {name for name, p in engine.model.named_parameters() if not torch.equal(whole(p), before[name])}
    state = optimizer_state(engine.model, engine.optimizer)
    others = {name for name in before if ".indexer." not in name}
    return {
        "trained": sum(".indexer." in name for name in state),
        "changed": sum(".indexer." in name for name in changed),
        "others": others <= changed and others == state.keys(),
    }


def differing_replicas(case: Case) -> dict[str, str]:
    """What is said of a buffer, and of a replicated weight, that one rank changed."""
    said = {}
    for what, name in (("buffer", "mlp.router.expert_bias"), ("weight", "final_layernorm.weight")):
        engine = make_engine(case)
        state = engine.model.state_dict()
        tensor = next(value for key, value in state.items() if key.endswith(name))
        if torch.distributed.get_rank() == 1:
            local_part(tensor).view(-1)[0] += 2**-20
        try:
            require_equal_replicas(state, engine.groups)
        except ValueError as error:
            said[what] = str(error)
    return said


def islands(case: Case) -> dict[str, Any]:
    """A BF16 model: what its modules compute with, and three losses."""
    engine = make_engine(case, bf16=True, dsa_indexer_scoring_precision="bf16")
    seen: dict[str, tuple[torch.dtype, float]] = {}

    def note(name: str) -> Any:
        def hook(module: torch.nn.Module, *_: Any) -> None:
            weight = local_part(module.weight)
            seen.setdefault(name, (weight.dtype, float(weight.detach().flatten()[0])))

        return hook

    wanted = ("indexer.k_norm", "mlp.router", "layers.0.input_layernorm", "layers.1.mlp.experts.linear_fc1")
    for name, module in engine.model.named_modules():
        if name.endswith(wanted):
            module.register_forward_hook(note(name))
            with torch.no_grad():
                if name.endswith("norm"):
                    local_part(module.weight).fill_(1 + 2**-9)  # lost in BF16
    batches = micro_batches(case, engine)
    losses = [train_step(engine, batches, 1e-2).lm_loss for _ in range(3)]
    stored = {p.dtype for p in engine.model.parameters()} | {p.grad.dtype for p in engine.model.parameters()}
    first = make_engine(case, bf16=True).model.state_dict()
    return {"seen": seen, "losses": losses, "stored": stored, "weights": {n: whole(t) for n, t in first.items()}}

"""What Megatron-LM's users type, and what it means here.

Tables. ``ALIASES`` spells Megatron's switches in this package's flags, and ``DIFFERENCES`` says which of them do
something else here; a run that is given one says so. ``ALWAYS`` lists switches that ask for
what is so anyway, and which are accepted and dropped. ``ABSENT`` gives each well-known flag that this package lacks
a sentence of its own; an entry ends with what to use instead. A test holds the tables disjoint from the flags that
exist.
"""

from __future__ import annotations

from collections.abc import Sequence

# Names without the leading dashes, as everywhere in this package's command-line code.
ALIASES: dict[str, tuple[str, ...]] = {
    "swiglu": ("--gated-linear-unit", "--activation-func", "silu"),
    "disable-bias-linear": ("--no-add-bias-linear",),
    "norm-epsilon": ("--layernorm-epsilon",),
    "num-experts": ("--num-moe-experts",),
    "apply-layernorm-1p": ("--layernorm-zero-centered-gamma",),
    "recompute-activations": ("--recompute-granularity", "full"),
}

DIFFERENCES: dict[str, str] = {
    "recompute-activations": "Megatron recomputes attention alone, but this package whole layers, which takes more "
    "time and less memory (--recompute-granularity full)",
}

ALWAYS: dict[str, str] = {
    "use-mcore-models": "models are built from module specs",
    "moe-grouped-gemm": "a layer's experts are stacked and multiplied as one group",
    "attention-softmax-in-fp32": "softmax runs in FP32",
    "use-rotary-position-embeddings": "positions are rotary",
    "no-rope-fusion": "RoPE is plain PyTorch",
    "no-masked-softmax-fusion": "softmax is plain PyTorch",
    "no-bias-swiglu-fusion": "SwiGLU is plain PyTorch",
    "no-bias-gelu-fusion": "SwiGLU is the only MLP",
    "no-bias-dropout-fusion": "there are no biases and no dropout",
    "no-gradient-accumulation-fusion": "gradients accumulate in plain PyTorch",
    "exit-signal-handler": "SIGTERM always saves and stops",
    "log-throughput": "throughput is always reported",
    "accumulate-allreduce-grads-in-fp32": "gradients are FP32",
    "no-async-tensor-model-parallel-allreduce": "communication is not overlapped by hand",
}

_PIPELINE = (
    "this package has no pipeline parallelism: drop the flag, and split a model by --tensor-model-parallel-size or "
    "--expert-model-parallel-size"
)
_VIRTUAL = f"{_PIPELINE}; there are no virtual stages either"
_DISTRIBUTED_OPTIMIZER = (
    "this package has no distributed optimizer: drop the flag; optimizer state is sharded wherever parameters are"
)
_DDP = "this package has no DDP buckets to tune: drop the flag"
_FSDP = "this package has no choice of data-parallel sharding: drop the flag"
_FP8_TRAINING = (
    "this package has no FP8 training: use --bf16; --dsa-indexer-scoring-precision fp8 scores a frozen indexer in FP8"
)
_FP16 = "this package has no FP16 training and no loss scaling: use --bf16"
_TE_GRAPH = "this package captures no CUDA graphs: drop the flag"
_TP_OVERLAP = "this package has no overlap of tensor-parallel communication to tune: drop the flag"
_SAMPLES = "this package counts in steps, not in samples: use the flag of the same name that ends in -iters"
_GQA = "this package has no grouped-query attention: multi-latent attention shares one latent key among all heads"
_VOCAB = "this package reads no GPT-2 or BERT vocabulary files: use --tokenizer-model with a tokenizer.json"
_CAPACITY = "this package never drops tokens, so experts have no capacity: drop the flag"
_OFFLOAD = "this package offloads nothing to the CPU: drop the flag"
_RECOMPUTE = "this package recomputes whole layers only: use --recompute-granularity full alone"
_PROFILE = "this package starts no profiler: run it under nsys or torch.profiler, and drop the flag"
_CKPT = "this package has one checkpoint format, torch.distributed.checkpoint: drop the flag"
_LR = "this package has no schedule of that kind: use --lr-decay-style constant, linear or cosine"
_MTP = "this package has no multi-token prediction layers: drop the flag"

ABSENT: dict[str, str] = {
    "pipeline-model-parallel-size": _PIPELINE,
    "pipeline-model-parallel-layout": _PIPELINE,
    "pipeline-model-parallel-comm-backend": _PIPELINE,
    "decoder-first-pipeline-num-layers": _PIPELINE,
    "decoder-last-pipeline-num-layers": _PIPELINE,
    "account-for-embedding-in-pipeline-split": _PIPELINE,
    "account-for-loss-in-pipeline-split": _PIPELINE,
    "num-layers-per-virtual-pipeline-stage": _VIRTUAL,
    "num-virtual-stages-per-pipeline-rank": _VIRTUAL,
    "microbatch-group-size-per-virtual-pipeline-stage": _VIRTUAL,
    "overlap-p2p-communication": _PIPELINE,
    "no-overlap-p2p-communication": _PIPELINE,
    "use-distributed-optimizer": _DISTRIBUTED_OPTIMIZER,
    "num-distributed-optimizer-instances": _DISTRIBUTED_OPTIMIZER,
    "use-precision-aware-optimizer": _DISTRIBUTED_OPTIMIZER,
    "overlap-grad-reduce": _DDP,
    "overlap-param-gather": _DDP,
    "overlap-param-gather-with-optimizer-step": _DDP,
    "ddp-bucket-size": _DDP,
    "ddp-num-buckets": _DDP,
    "ddp-average-in-collective": _DDP,
    "align-grad-reduce": _DDP,
    "use-megatron-fsdp": _FSDP,
    "use-custom-fsdp": _FSDP,
    "use-torch-fsdp2": _FSDP,
    "data-parallel-sharding-strategy": _FSDP,
    "transformer-impl": "this package has no Transformer Engine layers: drop the flag",
    "fp8-format": _FP8_TRAINING,
    "fp8-recipe": _FP8_TRAINING,
    "fp8-margin": _FP8_TRAINING,
    "fp8-amax-history-len": _FP8_TRAINING,
    "fp8-amax-compute-algo": _FP8_TRAINING,
    "fp8-param-gather": _FP8_TRAINING,
    "fp4-format": "this package has no FP4 training: use --bf16",
    "fp16": _FP16,
    "loss-scale": _FP16,
    "initial-loss-scale": _FP16,
    "min-loss-scale": _FP16,
    "loss-scale-window": _FP16,
    "hysteresis": _FP16,
    "enable-cuda-graph": _TE_GRAPH,
    "external-cuda-graph": _TE_GRAPH,
    "cuda-graph-impl": _TE_GRAPH,
    "cuda-graph-scope": _TE_GRAPH,
    "tp-comm-overlap": _TP_OVERLAP,
    "tp-comm-overlap-cfg": _TP_OVERLAP,
    "attention-backend": "this package has no choice of dense attention kernels: --dsa-kernel-backend picks DSA's",
    "use-flash-attn": "this package has no choice of dense attention kernels: --dsa-kernel-backend picks DSA's",
    "group-query-attention": _GQA,
    "num-query-groups": _GQA,
    "kv-channels": "this package has no plain attention heads: use --qk-head-dim, --qk-pos-emb-head-dim and "
    "--v-head-dim",
    "window-size": "this package has no sliding windows: DSA picks each row's keys, see --dsa-indexer-topk",
    "position-embedding-type": "this package has rotary positions only: drop the flag, and see --rope-type",
    "rotary-percent": "this package rotates --qk-pos-emb-head-dim channels of each head: set that width",
    "use-rope-scaling": "this package scales RoPE by YaRN: use --rope-type yarn",
    "squared-relu": "this package has SwiGLU only: use --swiglu",
    "mtp-num-layers": _MTP,
    "mtp-loss-scaling-factor": _MTP,
    "train-samples": _SAMPLES,
    "lr-decay-samples": _SAMPLES,
    "lr-warmup-samples": _SAMPLES,
    "lr-wsd-decay-style": _LR,
    "lr-wsd-decay-iters": _LR,
    "lr-wsd-decay-samples": _LR,
    "start-weight-decay": "this package keeps weight decay constant: use --weight-decay",
    "end-weight-decay": "this package keeps weight decay constant: use --weight-decay",
    "weight-decay-incr-style": "this package keeps weight decay constant: use --weight-decay",
    "override-opt-param-scheduler": "this package's schedule always follows the flags of the present start: drop "
    "the flag",
    "use-checkpoint-opt-param-scheduler": "this package saves no schedule: repeat the flags of the first start",
    "rampup-batch-size": "this package has no batch-size ramp-up: use a constant --global-batch-size",
    "decoupled-lr": "this package has one learning rate for all parameters: use --lr",
    "optimizer-cpu-offload": _OFFLOAD,
    "cpu-offloading-num-layers": _OFFLOAD,
    "moe-token-dispatcher-type": "this package has one token dispatcher: drop the flag",
    "moe-enable-deepep": "this package has no DeepEP dispatcher: drop the flag",
    "moe-permute-fusion": "this package has no fused permutation: drop the flag",
    "moe-router-fusion": "this package has no fused router: drop the flag",
    "moe-expert-capacity-factor": _CAPACITY,
    "moe-pad-expert-input-to-capacity": _CAPACITY,
    "moe-z-loss-coeff": "this package has no router z-loss: use --moe-router-load-balancing-type seq_aux_loss",
    "moe-layer-recompute": _RECOMPUTE,
    "expert-tensor-parallel-size": "this package does not shard inside an expert: use --expert-model-parallel-size",
    "recompute-method": _RECOMPUTE,
    "recompute-num-layers": _RECOMPUTE,
    "recompute-modules": _RECOMPUTE,
    "distribute-saved-activations": _RECOMPUTE,
    "hierarchical-context-parallel-sizes": "this package has one level of context parallelism: use "
    "--context-parallel-size with --cp-comm-type allgather",
    "async-save": "this package saves synchronously: drop the flag",
    "ckpt-format": _CKPT,
    "dist-ckpt-format": _CKPT,
    "use-dist-ckpt": _CKPT,
    "ckpt-fully-parallel-save": _CKPT,
    "ckpt-fully-parallel-load": _CKPT,
    "auto-detect-ckpt-format": _CKPT,
    "use-checkpoint-args": "this package takes no flags out of a checkpoint: repeat those it was made with, which its "
    "config.json lists",
    "pretrained-checkpoint": "this package has no second checkpoint flag: use --load DIR --finetune",
    "vocab-file": _VOCAB,
    "merge-file": _VOCAB,
    "profile": _PROFILE,
    "profile-step-start": _PROFILE,
    "profile-step-end": _PROFILE,
    "use-pytorch-profiler": _PROFILE,
    "timing-log-level": "this package has no timers: see tokens_per_second and mfu in metrics.jsonl",
    "use-legacy-models": "this package has no legacy models: drop the flag",
    "deprecated-use-mcore-models": "this package has no legacy models: drop the flag",
    "init-model-with-meta-device": "this package initializes weights where they live: drop the flag",
    "use-cpu-initialization": "this package initializes weights where they live: use --device cpu to train on the CPU",
    "hidden-act": "this package spells it --activation-func, and has SwiGLU only: use --swiglu",
    "indexer-loss-coeff": "this package spells it --dsa-indexer-loss-coeff",
}


def differences(arguments: Sequence[str]) -> tuple[str, ...]:
    """A notice for each flag of a command line that means something else here than in Megatron."""
    names = {token[2:].partition("=")[0].replace("_", "-") for token in arguments if token.startswith("--")}
    return tuple(f"--{name}: {DIFFERENCES[name]}." for name in DIFFERENCES if name in names)

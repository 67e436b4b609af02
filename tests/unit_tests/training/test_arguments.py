"""The command line: what Megatron's users type arrives, presets give way to flags, and mistakes get one sentence."""

import dataclasses

import pytest
import torch

from megatron.core.models.gpt.presets import PRESETS, get_preset
from megatron.training import arguments
from megatron.training.arguments import CommandLineError, parse_args
from megatron.training.megatron_flags import ABSENT, ALIASES, ALWAYS, DIFFERENCES

TINY = ["--preset", "tiny-glm5"]


def test_a_megatron_command_line_arrives() -> None:
    config = parse_args(
        "--num-layers 3 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 96 --swiglu --disable-bias-linear "
        "--untie-embeddings-and-output-weights --norm-epsilon 1e-6 --num-experts 8 --moe-router-topk 2 "
        "--moe-layer-freq ([0]*1+[1]*2) --kv-lora-rank 32 --seq-length 128 --micro-batch-size 2 --global-batch-size 8 "
        "--train-iters 100 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 10 --weight-decay 0.1 "
        "--adam-beta1 0.8 --adam-beta2 0.95 --clip-grad 0.5 --bf16 --recompute-granularity full --eval-interval 50 "
        "--eval-iters 5 --save-interval 20 --save out --load out --log-interval 10 --exit-interval 30 "
        "--exit-duration-in-mins 1.5 --tensorboard-dir tb --wandb-project p --seed 7 --split 9,1 "
        "--data-path 0.3 A 0.7 B --use-mcore-models --no-load-optim --dsa-kernel-backend none "
        "--tensor-model-parallel-size 1 --expert-model-parallel-size 1".split()
    )
    model = config.model
    assert (model.num_layers, model.hidden_size, model.layernorm_epsilon) == (3, 64, 1e-6)
    assert (model.gated_linear_unit, model.activation_func, model.add_bias_linear) == (True, "silu", False)
    assert model.untie_embeddings_and_output_weights and model.bf16 and model.params_dtype == torch.bfloat16
    assert (model.num_moe_experts, model.moe_layer_freq, model.recompute_granularity) == (8, [0, 1, 1], "full")
    assert config.data.data_path == ("0.3", "A", "0.7", "B") and config.data.split == "9,1" and config.data.seed == 7
    assert (config.training.train_iters, config.training.exit_duration_in_mins) == (100, 1.5)
    assert (config.optimizer.lr, config.optimizer.adam_beta2, config.optimizer.lr_decay_style) == (1e-3, 0.95, "cosine")
    assert (config.checkpoint.save, config.checkpoint.load_optim, config.checkpoint.load_rng) == ("out", False, True)
    assert (config.logging.wandb_project, config.validation.eval_interval) == ("p", 50)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_alone_is_the_model(name: str) -> None:
    assert parse_args(["--preset", name]).model == get_preset(name)


def test_flags_win_over_the_preset_wherever_they_stand() -> None:
    for line in (["--num-attention-heads", "2", *TINY], [*TINY, "--num-attention-heads", "2"]):
        model = parse_args(line).model
        assert model == dataclasses.replace(get_preset("tiny-glm5"), num_attention_heads=2)
    assert parse_args([*TINY, "--dsa-indexer-loss-coeff", "None", "--no-dsa-indexer-use-sparse-loss"]).model == (
        dataclasses.replace(get_preset("tiny-glm5"), dsa_indexer_loss_coeff=None, dsa_indexer_use_sparse_loss=False)
    )


def test_spellings() -> None:
    assert parse_args([*TINY, "--lr_decay_style=cosine"]).optimizer.lr_decay_style == "cosine"
    assert parse_args([*TINY, "--lr", "1", "--lr", "2"]).optimizer.lr == 2
    assert parse_args([*TINY, "--lr-warmup-init", ".5", "--lr", "1"]).optimizer.lr_warmup_init == 0.5
    assert parse_args([*TINY, "--moe_layer_freq", "1", "1", "1", "0"]).model.moe_layer_freq == [1, 1, 1, 0]
    assert parse_args([*TINY, "--moe-layer-freq", "2"]).model.moe_layer_freq == 2
    assert parse_args([*TINY, "--num-experts=4"]).model.num_moe_experts == 4
    assert parse_args(TINY).data.data_path == ()


def test_integers_of_31_bits_and_seeds_of_32_are_taken() -> None:
    config = parse_args([*TINY, "--train-iters", str(2**31 - 1), "--seed", str(2**32 - 1)])
    assert (config.training.train_iters, config.data.seed) == (2**31 - 1, 2**32 - 1)


def test_two_parses_share_no_state() -> None:
    parse_args(TINY).model.moe_layer_freq[0] = 1
    assert parse_args(TINY).model.moe_layer_freq == [0, 1, 1, 1]


REFUSED = [
    ("--num-layer 3", "--num-layer is no flag of this program: did you mean --num-layers?"),
    ("--dsa-topk 3", "did you mean --dsa-indexer-topk?"),
    ("-x", "-x is no flag of this program"),
    ("---lr 3", "---lr is no flag of this program: did you mean --lr?"),
    ("-lr 3", "-lr is no flag of this program: did you mean --lr?"),
    ("---use-mcore-models", "---use-mcore-models is no flag of this program"),
    ("---num-experts 4", "---num-experts is no flag of this program: did you mean --num-experts?"),
    ("--save=", "--save is empty: give a directory, or drop it."),
    ("--load-hf=", "--load-hf is empty: give a directory, or drop it."),
    ("--wandb-save-dir=", "--wandb-save-dir is empty: give a directory, or drop it."),
    ("--data-path=", "--data-path is empty: give a list (a text each), or drop it."),
    ("--tokenizer-model=", "--tokenizer-model is empty: give a text, or drop it."),
    (f"--train-iters {10**30}", f"--train-iters is {10**30}, but integers go up to 2147483647: lower it."),
    (f"--hidden-size {2**31}", "--hidden-size is 2147483648, but integers go up to 2147483647: lower it."),
    ("--bf16 true", "--bf16 is a switch, but it was followed by 'true'"),
    ("--bf16=true", "--bf16 is a switch, but it was followed by 'true'"),
    ("--lr", "--lr has no value: give a number."),
    ("--lr fast", "--lr takes a number, but 'fast' was given."),
    ("--train-iters 1.5", "--train-iters takes an integer, but '1.5' was given."),
    ("--num-layers 2 3", "--num-layers takes an integer, but 2 values were given: 2 3."),
    ("--recompute-granularity selective", "--recompute-granularity takes one of full, but 'selective' was given."),
    ("--moe-layer-freq [0]*x", "--moe-layer-freq is '[0]*x', which is no list of integers"),
    ("--moe-layer-freq [0]*99999999999999", "which is no list of integers"),
    ("--moe-layer-freq [0.5,1]", "--moe-layer-freq is '[0.5,1]', which is no list of integers"),
    ("--moe-layer-freq 0 one", "--moe-layer-freq takes an integer or a list (an integer each), but '0 one' was given."),
    ("--use-checkpoint-args", "--use-checkpoint-args: this package takes no flags out of a checkpoint: repeat those"),
    ("stray", "'stray' belongs to no flag"),
    ("--preset glm5", "--preset glm5 is unknown: did you mean glm-5?"),
    ("--preset qqqq", "--preset qqqq is unknown: use one of tiny-glm5"),
    ("--preset", "--preset has no value"),
    ("--mock-data --no-mock-data", "--mock-data and --no-mock-data contradict each other"),
    ("--preset tiny-glm5 --dsa-indexer-topk -4", "dsa_indexer_topk is -4"),
]


@pytest.mark.parametrize(("line", "piece"), REFUSED, ids=[line for line, _ in REFUSED])
def test_a_mistake_gets_one_sentence(line: str, piece: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CommandLineError) as refusal:
        parse_args(line.split())
    assert piece in str(refusal.value) and "\n" not in str(refusal.value)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", ABSENT)
def test_flags_that_megatron_has_and_this_package_lacks(name: str) -> None:
    for spelling in (f"--{name}", f"--{name.replace('-', '_')}=1"):
        with pytest.raises(CommandLineError) as refusal:
            parse_args([*TINY, spelling])
        assert str(refusal.value) == f"--{name}: {ABSENT[name]}."


def test_the_tables_name_no_flag_that_exists_and_point_only_to_flags_that_do() -> None:
    known = set(arguments._known())
    assert not known & (set(ABSENT) | set(ALIASES) | set(ALWAYS))
    assert not set(ABSENT) & (set(ALIASES) | set(ALWAYS))
    for sentence in ABSENT.values():
        words = (word.strip(",;:.") for word in sentence.split())
        for flag in (word[2:] for word in words if word.startswith("--")):
            assert flag in known | set(ALIASES), sentence


def test_flags_that_ask_for_what_is_so_are_accepted() -> None:
    assert parse_args([*TINY, *(f"--{name}" for name in ALWAYS)]) == parse_args(TINY)


def test_a_flag_that_means_something_else_here_is_taken_and_said() -> None:
    assert DIFFERENCES.keys() <= ALIASES.keys()
    for spelling in ("--recompute-activations", "--recompute_activations"):
        config = parse_args([*TINY, spelling])
        assert config.model.recompute_granularity == "full"
        (notice,) = config.notices
        assert notice.startswith("--recompute-activations: Megatron recomputes attention alone, but this package whole")
    assert parse_args([*TINY, "--recompute-granularity", "full"]).notices == ()


def test_every_flag_has_a_help_text_that_ends_a_sentence() -> None:
    for cls in arguments._GROUPS.values():
        for flag in arguments._flags(cls).values():
            assert flag.help.endswith("."), flag.name

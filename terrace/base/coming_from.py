"""Words of other trainers, of earlier versions and of other commands, with the words of Terrace that say the same.

The one table of such words: of options, keys, plans and commands. Errors suggest from it (`terrace.base.errors`,
`terrace.base.schema`, `terrace.cli.coming_from`), and `terrace keys` searches it. The last table of
docs/coming-from.md shows it; a test holds both equal.
"""

from collections.abc import Iterable, Iterator, Mapping

RUN = "RUN"  # the first word of commands that look at a run
# Our options -> other names. Of ours, the first one that a command has is suggested. An option that has its value here
# takes none of the other's; {} stands for that value.
OPTIONS: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("--model",): ("--model-name-or-path", "--model-name", "--model-path", "--base-model", "--pretrained-model"),
    ("--data", "--run.prompts_file"): (
        "--data-path",
        "--train-data-path",
        "--train-data",
        "--train-file",
        "--dataset",
        "--dataset-name",
        "--dataset-path",
        "--data-dir",
    ),
    ("--data.tokenizer", "--tokenizer"): (
        "--tokenizer",
        "--tokenizer-name",
        "--tokenizer-path",
        "--tokenizer-name-or-path",
        "--tokenizer-model",
    ),
    ("--data.column",): ("--text-column", "--text-field", "--text-key", "--dataset-text-field"),
    ("--data.split",): ("--dataset-split",),
    ("--data.chat_template",): ("--chat-template", "--chat-template-path"),
    ("--data.documents separate",): ("--packing", "--sample-packing"),
    ("--data.cache",): ("--data-cache-path", "--dataset-cache-dir"),
    ("--train.batch", "--batch", "--run.prompts"): (
        "--batch",
        "--batch-size",
        "--train-batch-size",
        "--global-batch-size",
        "--total-batch-size",
    ),
    ("--train.batch B",): ("--gradient-accumulation-steps", "--grad-accum", "--accumulate-grad-batches"),
    ("--plan.micro_batch",): (
        "--micro-batch-size",
        "--micro-batch",
        "--per-device-train-batch-size",
        "--per-device-batch-size",
        "--device-batch-size",
        "--local-batch-size",
        "--train-micro-batch-size-per-gpu",
    ),
    ("--train.sequence", "--sequence", "--context", "--run.max_prompt"): (
        "--sequence",
        "--seq",
        "--seq-len",
        "--seq-length",
        "--sequence-length",
        "--sequence-len",
        "--max-seq-length",
        "--max-seq-len",
        "--max-length",
        "--max-sequence-length",
        "--block-size",
        "--cutoff-len",
        "--context-length",
    ),
    ("--train.epochs", "--run.steps S"): (
        "--epochs",
        "--num-epochs",
        "--num-train-epochs",
        "--max-epochs",
        "--n-epochs",
        "--total-epochs",
    ),
    ("--train.steps", "--run.steps"): (
        "--steps",
        "--max-steps",
        "--num-steps",
        "--total-steps",
        "--training-steps",
        "--max-train-steps",
        "--num-iterations",
        "--train-iters",
        "--max-iters",
    ),
    ("--train.seed", "--run.seed"): ("--seed", "--random-seed"),
    ("--train.log_every",): ("--logging-steps", "--log-interval", "--log-freq"),
    ("--train.eval_every", "--run.evaluate_every"): ("--eval-steps", "--eval-interval"),
    ("--train.eval_every S", "--run.evaluate_every S"): ("--eval-strategy", "--evaluation-strategy"),
    ("--train.checkpoint_every S", "--run.checkpoint_every S"): ("--save-strategy",),
    ("--train.checkpoint_every", "--run.checkpoint_every"): (
        "--save-interval",
        "--save-steps",
        "--save-freq",
        "--checkpoint-interval",
        "--checkpoint.interval",
    ),
    ("--train.keep_checkpoints", "--run.keep_checkpoints"): ("--save-total-limit",),
    ("--train.compile true",): ("--torch-compile", "--compile", "--compile.enable"),
    ("--train.attention",): ("--attn-implementation", "--attn-impl"),
    ("--train.metrics", "--run.metrics"): ("--report-to", "--logger"),
    ("--train.metrics wandb", "--run.metrics wandb"): ("--wandb", "--use-wandb", "--wandb-project", "--with-wandb"),
    ("--train.metrics tensorboard", "--run.metrics tensorboard"): (
        "--tensorboard",
        "--tensorboard-dir",
        "--enable-tensorboard",
    ),
    ("--optimizer.lr",): ("--lr", "--learning-rate", "--peak-lr", "--max-lr"),
    ("--train.warmup_steps", "--run.warmup_steps"): (
        "--warmup",
        "--warmup-steps",
        "--warmup-iters",
        "--num-warmup-steps",
        "--lr-warmup-steps",
        "--lr-warmup-iters",
    ),
    ("--train.warmup_steps S", "--run.warmup_steps S"): ("--warmup-ratio", "--lr-warmup-fraction"),
    ("--train.final_lr_fraction F",): ("--min-lr", "--min-lr-ratio", "--min-lr-factor"),
    ("--train.schedule",): ("--lr-scheduler-type", "--lr-scheduler", "--lr-decay-style", "--decay-type", "--scheduler"),
    ("--train.mtp_loss_weight",): ("--mtp-loss-scaling-factor",),
    ("--model.num_nextn_predict_layers",): ("--mtp-num-layers",),
    ("--model.num_hidden_layers",): ("--num-layers", "--num-hidden-layers", "--n-layers", "--n-layer"),
    ("--model.hidden_size",): ("--hidden-size", "--d-model", "--n-embd"),
    ("--model.intermediate_size",): ("--ffn-hidden-size", "--intermediate-size", "--d-ff"),
    ("--model.num_attention_heads",): ("--num-attention-heads", "--n-heads", "--n-head"),
    ("--model.num_key_value_heads",): ("--num-query-groups", "--num-key-value-heads", "--n-kv-heads"),
    ("--model.head_dim",): ("--kv-channels", "--head-dim"),
    ("--model.vocab_size",): ("--vocab-size", "--padded-vocab-size"),
    ("--model.max_position_embeddings",): ("--max-position-embeddings",),
    ("--model.rope_theta",): ("--rotary-base", "--rope-theta"),
    ("--model.rms_norm_eps",): ("--norm-epsilon", "--layernorm-epsilon", "--rms-norm-eps"),
    ("--model.initializer_range",): ("--init-method-std", "--initializer-range"),
    ("--model.tie_word_embeddings false",): ("--untie-embeddings-and-output-weights",),
    ("--model.num_experts_per_tok",): ("--moe-router-topk", "--num-experts-per-tok"),
    ("--plan.experts.node.expert",): ("--expert-model-parallel-size", "--expert-parallel-size", "--ep", "--ep-size"),
    ("--optimizer.weight_decay",): ("--weight-decay", "--wd"),
    ("--optimizer.beta1",): ("--adam-beta1",),
    ("--optimizer.beta2",): ("--adam-beta2",),
    ("--optimizer.eps",): ("--adam-epsilon", "--adam-eps"),
    ("--optimizer.clip",): ("--clip-grad", "--grad-clip", "--max-grad-norm", "--gradient-clipping", "--max-norm"),
    ("--optimizer.name",): ("--optim", "--optimizer"),
    ("--lora.rank",): ("--lora-r", "--lora-rank"),
    ("--lora.rank 8",): ("--lora", "--use-lora", "--use-peft", "--peft"),
    ("--lora.alpha",): ("--lora-alpha",),
    ("--lora.targets",): ("--lora-target-modules", "--lora-target"),
    ("--lora.base nf4",): ("--load-in-4bit", "--bnb-4bit-quant-type", "--use-qlora", "--qlora"),
    ("--plan zero1",): ("--use-distributed-optimizer",),
    ("--plan zero{}",): ("--zero", "--zero-stage"),
    ("--plan zero3",): ("--fsdp", "--deepspeed"),
    ("--plan.compute bf16",): ("--bf16",),
    ("--plan.compute fp16",): ("--fp16", "--half"),
    ("--plan.compute", "--compute", "--dtype"): (
        "--dtype",
        "--torch-dtype",
        "--precision",
        "--mixed-precision",
        "--mixed-precision-param",
    ),
    ("--plan.recompute layers.*",): (
        "--gradient-checkpointing",
        "--grad-checkpointing",
        "--activation-checkpointing",
        "--recompute-activations",
        "--recompute-granularity",
        "--activation-checkpoint.mode",
    ),
    ("--plan.sequence_parallel true",): ("--sequence-parallel",),
    ("--plan.mapping.node.tensor",): (
        "--tensor",
        "--tp",
        "--tp-size",
        "--tensor-parallel",
        "--tensor-parallel-size",
        "--tensor-parallel-degree",
        "--tensor-model-parallel-size",
    ),
    ("--plan.mapping.system.pipeline",): (
        "--pipeline",
        "--pp",
        "--pp-size",
        "--pipeline-parallel-size",
        "--pipeline-parallel-degree",
        "--pipeline-model-parallel-size",
    ),
    ("--plan.schedule",): ("--pipeline-parallel-schedule",),
    ("--plan.mapping.system.context.ring",): (
        "--context-parallel",
        "--cp",
        "--cp-size",
        "--context-parallel-size",
        "--context-parallel-degree",
    ),
    ("--ranks", "--cluster.tiers.node.size"): (
        "--gpus",
        "--num-gpus",
        "--n-gpus",
        "--ngpus",
        "--devices",
        "--num-devices",
        "--nproc",
        "--nproc-per-node",
        "--num-processes",
        "--world-size",
        "--n-gpus-per-node",
    ),
    ("--nodes", "--cluster FILE"): ("--nodes", "--num-nodes", "--nnodes", "--num-machines"),
    (RUN, "--folder", "--out", "--picture"): (
        "--run",
        "--folder",
        "--out",
        "--output",
        "--output-dir",
        "--out-dir",
        "--save-dir",
        "--save",
        "--page",
    ),
    ("--resume",): ("--resume-from-checkpoint", "--resume-from", "--load"),
    ("--tokens", "--run.max_response"): (
        "--max-tokens",
        "--max-new-tokens",
        "--max-completion-length",
        "--max-response-length",
        "--response-length",
    ),
    ("--run.responses",): ("--num-generations", "--n-samples-per-prompt", "--group-size", "--rollout-n"),
    ("--run.mini_batch",): ("--mini-batch-size", "--ppo-mini-batch-size"),
    ("--run.epochs",): ("--ppo-epochs", "--num-ppo-epochs"),
    ("--run.max_prompt",): ("--max-prompt-length", "--prompt-length"),
    ("--algorithm.kl_coefficient",): ("--kl-coef", "--init-kl-coef", "--kl-loss-coef"),
    ("--algorithm.name",): ("--adv-estimator", "--advantage-estimator"),
}
PLANS: Mapping[str, tuple[str, ...]] = {
    "ddp": ("zero0", "zero-0", "no_shard"),
    "zero1": ("zero-1", "distributed-optimizer"),
    "zero2": ("zero-2", "shard_grad_op"),
    "zero3": ("zero-3", "fsdp", "fsdp2", "full_shard"),
    "hsdp": ("hybrid_shard",),
    "zero++": ("zeropp",),
}
# Our command lines -> other names of a command.
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "terrace train --model FOLDER --data FILE": ("sft", "finetune", "fine-tune", "pretrain", "fit", "launch", "run"),
    "terrace train --model FOLDER --data FILE --lora.rank 8": ("lora", "qlora", "peft"),
    "terrace train --model FOLDER --data FILE --train.objective dpo": ("dpo", "pairs", "prefer"),
    "terrace train --model FOLDER --data FILE --train.objective reward": ("reward", "rm", "reward-model"),
    "terrace train --model FOLDER --data FILE --teacher.model FOLDER": ("distill", "gkd", "kd"),
    "terrace rl --config FILE": ("grpo", "rlhf", "rlvr", "reinforce"),
    "terrace rl --config FILE --algorithm.name ppo": ("ppo",),
    "terrace rl --config FILE --algorithm.name rloo": ("rloo",),
    "terrace rl --config FILE --algorithm.name dapo": ("dapo",),
    "terrace generate RUN --chat --prompt TEXT": ("chat",),
    "terrace generate RUN --prompt TEXT": ("infer", "inference", "sample", "complete", "predict"),
    "terrace export RUN FOLDER": ("serve", "convert", "merge", "save", "vllm"),
    "terrace eval RUN": ("evaluate", "test", "validate", "perplexity"),
    "terrace data prepare --data FILE": ("tokenize", "tokenise", "preprocess", "prepare", "pack"),
    "terrace doctor": ("env", "check", "info"),
    "terrace simulate": ("estimate", "estimate-memory", "profile"),
    "terrace simulate --view program": ("explain",),
    "terrace plan --scale": ("scale",),
    "terrace plan": ("search", "tune", "autotune", "optimize"),
    "terrace report RUN": ("compare", "dashboard", "plot", "view"),
    "terrace probe": ("bench", "benchmark"),
}


def spelled(name: str) -> str:
    """An option as the table has it; others write - or _."""
    return name if "." in name else name.replace("_", "-")


def options_for(name: str) -> Iterator[str]:
    """Our options for the option `name`, such as "--batch_size" or "--trainer.batch_size", as the table has them.

    A name with a dot is looked up as a whole, too, since a last word such as "interval" alone says too little.
    """
    whole = name.removeprefix("--").replace("_", "-")
    words = {f"--{whole}", f"--{whole.rpartition('.')[2]}"}
    for own, others in OPTIONS.items():
        if words & set(others):
            yield from own


def key_for(section: str, name: str) -> str:
    """Our dotted key for the key `name` of a section, in that section if it is there; "" if there is none."""
    found = [own.removeprefix("--").partition(" ")[0] for own in options_for(name)]
    keys = [own for own in found if "." in own]
    inside = [own for own in keys if own.startswith(f"{section}.")]
    return next(iter(inside + keys), "")


def sections() -> set[str]:
    return {each.removeprefix("--").partition(".")[0] for own in OPTIONS for each in own if "." in each}


def preset_for(name: str, known: Iterable[str]) -> str:
    """The plan among `known` that is called `name` elsewhere, or ""."""
    word = name.lower().replace("zero_", "zero-")
    return next((own for own, others in PLANS.items() if word in others and own in known), "")


def command_for(name: str) -> str:
    """Our command line for the command `name`, or ""."""
    word = name.replace("_", "-")
    return next((own for own, others in COMMANDS.items() if word in others), "")

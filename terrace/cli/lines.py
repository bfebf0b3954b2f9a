"""The command line of every command: its options with types, defaults and help, without what runs it.

`--help`, completion and errors on words need this module alone. `terrace keys`, whose help lists sections, has its own.
"""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any, Literal

from terrace.base import products
from terrace.cli.option import Line, flag, option, word
from terrace.plan.search_limits import FINALISTS, MOST_PLAYED

AUTO = "auto"  # of --resume
SHARD_BYTES = 5_000_000_000  # default file size in transformers
HF, DCP = "hf", "dcp"  # formats of an export
DTYPE = Literal["bf16", "fp16", "fp32", "fp64"]
SOFTWARE = Literal["own", "megatron", "te", "fsdp2", "deepspeed", "nanotron"]
REPORT_NAME, COMPARED_NAME, PORT = "report.html", "compared.html", 7007
DOCTOR_SECONDS = 10.0
VIEW = Literal["step", "program", "stages", "memory", "all"]
CLUSTER_EPILOG = "Any key of the cluster can be set as --cluster.key VALUE, e.g. --cluster.tiers.system.size 4."
OVERRIDES_HELP = (
    "Any key can be set as --section.key VALUE, e.g. --train.steps 500 --cluster.tiers.system.size 4. The config.toml "
    "in a run folder shows the keys of a run."
)
RANKS = option("N", "resize the cluster's tiers to N ranks, innermost first (default: as the cluster says)")
LENGTHS = option(
    "FILE|NAME",
    "predict rows that hold several documents, of these lengths: a file with the tokens of a document on each line, as "
    "terrace data lengths --out writes, or arxiv, github, magiattention, bimodal, one-huge",
)
HEADROOM = option(  # short for --cluster.device.headroom
    "SHARE|BYTES", "memory of a device to leave free, e.g. 10%% or 6GB (default: as the cluster's file says, or 5%%)"
)
AS = option(
    None, "software whose kernels, messages and memory are priced, with its own band (default: own)", "own", name="--as"
)
FOLDER = option("FOLDER", "run folder to make (default: runs/TIME)")
SHARDS = option("N", f"largest file of weights, in bytes (default: {SHARD_BYTES})")
MADE = word("PATH", "folder to make; it must not be there, or be empty")


class RunLine(Line):
    epilog = OVERRIDES_HELP
    config: str | None = option(
        "FILE",
        "TOML file with any of the sections model, cluster, plan, data, train, optimizer, lora, balance, teacher, "
        "prune",
    )
    model: str | None = option(
        "PATH",
        "Hugging Face folder, whose weights and tokenizer are taken too, or a config.json alone (default: a small "
        "Llama-style decoder)",
    )
    cluster: str | None = option(
        "NAME|FILE", "cluster preset, TOML file, or auto: this machine's (default: local; where a GPU is, auto)"
    )
    ranks: int | None = RANKS
    plan: str | None = option("NAME|FILE", "plan preset or TOML file (default: three-level)")
    headroom: str | None = HEADROOM
    data: str | None = option(
        "PATH", "text or JSONL file, or a folder of them (default: stdlib, the source of Python's standard library)"
    )


class Doctor(RunLine):
    run = "terrace.cli.doctor:run"
    description = "Check this machine and, with a model, a cluster or a plan, a run on it."
    epilog = f"The exit code is 1 if something blocks. {OVERRIDES_HELP}"
    network: bool = flag("measure the links of every tier, with all ranks")
    seconds: float | None = option("S", f"seconds for --network, at most 30 (default: {DOCTOR_SECONDS:g})")
    json: bool = flag("print one JSON object instead")


class Plan(Line):
    run = "terrace.cli.plan:run"
    epilog = "Any figure of the cluster can be set as --cluster.key VALUE, e.g. --cluster.tiers.node.size 4."
    model: str | None = option("PATH", "Hugging Face config.json, or its folder")
    cluster: str | None = option("NAME|FILE", "cluster preset or TOML file")
    nodes: int | None = option("N", "members of the outermost tier (default: as the cluster's file says)")
    headroom: str | None = HEADROOM
    batch: int | None = option("B", "sequences a step, over all ranks")
    sequence: int | None = option("S", "tokens a sequence")
    lengths: str | None = LENGTHS
    software: SOFTWARE = AS
    compute: DTYPE | None = option(
        None, "dtype of parameters and messages (default: bf16; where fp32 is faster, fp32, with messages in bf16)"
    )
    full_attention_flops: bool = flag(
        "also show MFU and HFU with attention counted as its full square, as published tables count it"
    )
    scale: bool = flag(
        "predict tokens/s of --plan, by default of the best data-parallel plan, from one member of the outermost tier "
        "to all; search and write no plan"
    )
    picture: Path | None = option("FILE", "write a picture of both curves of --scale, an SVG file")
    axes: str = option("LIST", "axes to search, e.g. data,tensor, or all (default: all)", "all")
    pin: list[str] = option("PIN", "fix a choice: tensor=1, pipeline<=4, params=node", [])
    outer: str | None = option(
        "BOUNDS",
        "synchronise the outermost tier every so many steps, the fewest that hide it: every<=100,delay<=20, or a "
        "preset (default: every step)",
    )
    allow: list[str] = option(
        "CLASS=FORMAT",
        "let messages of a class travel in a format where that shortens the step: sync=int8, "
        "outer.system=int4+feedback; or messages of parameters and activations be coded without loss, packed; or "
        "products be in 8 bits, products=fp8:row; or states be stored in one: "
        "optimizer_states=int8, master=bf16; or states and inputs of layers are kept below: keep=disk; or "
        "tensor messages be cut: tensor_chunks=4, or fused with products: tensor_chunks=fused",
        [],
    )
    allow_rounding: list[str] = option(
        "FORMAT",
        "let messages of every class that can be rounded travel in this format, as --allow for each of them: int8",
        [],
    )
    plan: str | None = option("NAME|FILE", "plan to compare with the best, its keys as --plan.key; or to scale")
    teacher: str | None = option(
        "FOLDER|FILE",
        "teacher of the run, or a run's file with [teacher]: its forward is priced, and plans leave room for it; its "
        "other keys as --teacher.key",
    )
    tokens: str | None = option("N", "tokens to train on, as 300e9: adds time and device-hours")
    price: float | None = option(
        "P", "price of one device for one hour: adds what the tokens cost, or a million of them with --scale"
    )
    recompute: str | None = option(
        "OPERATIONS",
        "recompute these operations where memory asks for it: attention, mlp, norms, joined by commas, or layers "
        "(default: the least of all that fits)",
    )
    robust: bool = flag(
        "take the plan with the least regret if links, kernels, launches or full devices are slower than described"
    )
    best: int = option("N", f"plans to show (default: {FINALISTS})", FINALISTS)
    limit: int = option("N", f"plans to play at most (default: {MOST_PLAYED})", MOST_PLAYED)
    out: Path = option("FILE", "plan to write (default: plan.toml)", Path("plan.toml"))
    force: bool = flag("replace the file if it is there")


class Rent(Line):
    run = "terrace.cli.rent:run"
    takes_keys = False
    description = (
        "Predict what it costs to train a model on machines that can be rented: for each offer and size the step, "
        "days, cost and energy under the plan that terrace plan finds there. Nothing is run."
    )
    offers: Path | None = option("FILE", "TOML file of offers: clusters, sizes, prices, limits of days and money")
    model: str | None = option("PATH", "Hugging Face config.json, or its folder")
    tokens: str | None = option("N", "tokens to train on, as 15e12")
    batch: int | None = option("B", "sequences a step, over all ranks")
    sequence: int | None = option("S", "tokens a sequence")
    axes: str = option("LIST", "axes to search, e.g. data,tensor, or all (default: all)", "all")
    limit: int = option("N", f"plans to play at most for a row (default: {MOST_PLAYED})", MOST_PLAYED)
    page: str | None = option("FILE", "write a self-contained HTML page with a chart of cost against days")
    force: bool = flag("replace the --page file if it is there")


class Simulate(RunLine):
    run = "terrace.cli.simulate:run"
    usage = "terrace simulate [PLAN] [options] [--section.key VALUE ...]"
    description = "PLAN is a plan preset or TOML file, as for --plan."
    view: VIEW = option(
        None,
        "step: where the time goes; program: what runs, in order; stages: a pipeline's blocks and schedule; memory; "
        "all (default: %(default)s)",
        "step",
    )
    software: SOFTWARE = AS
    lengths: str | None = LENGTHS
    lines: int | None = option("N", "lines of the program to print at most (default: all)")
    stage: int = option("N", "pipeline stage whose program is printed (default: 0)", 0)
    page: str | None = option("FILE", "write a self-contained HTML page of the step")
    trace: str | None = option("FILE", "write a trace for Perfetto or chrome://tracing")
    csv: str | None = option("FILE", "write the order of a pipeline's tasks in torch's CSV form")
    force: bool = flag("replace files that are there")


class Train(RunLine):
    run = "terrace.cli.train:run"
    description = "Train a model, in processes of this machine or as one rank of torchrun, srun or mpirun."
    folder: Path | None = FOLDER
    resume: str | None = option(
        f"RUN|{AUTO}",
        "resume this run folder from its newest whole checkpoint, under its own or another --cluster and --plan; "
        "auto: resume --folder if it has a checkpoint, else start there (default: auto with --folder when torchrun or "
        "Slurm restarts the command, else a new run)",
    )
    meet: str | None = option("HOST:PORT", "train as one island of the roster whose terrace meet listens there")
    island: str | None = option("NAME", "name of this island, unlike all others (default: host and process)")
    verbose: bool = flag(
        "begin with the tables of the plan, its memory and its messages, and with the figures behind the predicted "
        "step and MFU"
    )


class Meet(Line):
    run = "terrace.cli.meet:run"
    takes_keys = False
    description = (
        "Run the meeting place of islands, each a run of terrace train --meet: decide who exchanges with whom, and "
        "keep every decision in a log. It may be killed and started again with the same log."
    )
    place: str = word("[HOST:]PORT", "where to listen; without a host, on all interfaces")
    islands: int = option("N", "islands with which the run begins; others may come later (default: 1)", 1)
    log: Path = option("FILE", "log of decisions; resumed if it exists (default: roster.jsonl)", Path("roster.jsonl"))


class Report(Line):
    run = "terrace.cli.report:run"
    takes_keys = False
    description = (
        "Write a run folder as one self-contained HTML page, or several on one page: their curves in the same charts, "
        "final figures side by side, and the settings that differ. A run may be unfinished, or killed."
    )
    folders: list[Path] = word("RUN", "run folder of any command that trains", nargs="+")
    out: Path | None = option(
        "FILE",
        f"page to write (default: {REPORT_NAME} in the run folder; of several runs {COMPARED_NAME} in the first one)",
    )
    force: bool = flag("replace the --out file if it is there")
    watch: bool = flag("write no file: serve the page to browsers of this machine, kept up to date, until Ctrl-C")
    port: int | None = option("N", f"port of --watch; 0 takes any free one (default: {PORT})")


class Replay(Line):
    run = "terrace.cli.replay:run"
    takes_keys = False
    description = (
        "Load the newest whole checkpoint of a run before a step, or its initial values, train on to it with the same "
        "data, and run it: print the loss and the gradient norm of the step, and of each rank, micro-batch and block, "
        "and the first result that is inf or nan. Without a step: repeat a whole run in one process from its log, "
        "that of a roster of islands or of shares dealt anew, and compare losses and checkpoints. Run folders are only "
        "read."
    )
    folder: Path = word("RUN", "run folder; or of a roster a folder with its log and the run folders of its islands")
    step: int | None = option("N", "the step, counted from 1")
    log: Path | None = option("FILE", "log of decisions of terrace meet (default: roster.jsonl in RUN)")


class ModelLine(Line):
    folder: Path = word("FOLDER", "run folder, or Hugging Face folder with config.json and *.safetensors")
    tokenizer: str | None = option("PATH", "tokenizer.json, or 'bytes' (default: the one that belongs to the model)")
    dtype: Literal["fp32", "bf16", "fp64"] = option(
        None, "dtype of weights and activations (default: %(default)s)", "fp32"
    )
    device: str = option("NAME", "cpu, cuda or cuda:N (default: %(default)s)", "cpu")


class Generate(ModelLine):
    run = "terrace.cli.generate:run"
    description = (
        "Continue a text with the newest checkpoint of a run, or with the weights of a Hugging Face folder, token by "
        "token, in one process."
    )
    prompt: list[str] | None = option(
        "TEXT",
        "text to continue, in which special tokens count as such; may be given several times, and all are continued "
        'at once; "" lets the model begin',
    )
    chat: bool = flag(
        "take each prompt as what a user says, and print the answer: with the chat template of the model's tokenizer, "
        "or of its training"
    )
    tokens: int = option("N", "tokens to add at most (default: %(default)s)", 200)
    temperature: float | None = option(
        "T", "how freely tokens are drawn: 0 always takes the likeliest, 1 draws as the model predicts (default: 0.8)"
    )
    top_k: int | None = option("K", "draw from the K likeliest, 0: from all (default: 40)")
    top_p: float | None = option(
        "P",
        "of these, with probabilities scaled to 1, draw from the smallest set of the likeliest that together have at "
        "least probability P (default: 1.0, all)",
    )
    min_p: float | None = option(
        "P", "of these, draw from the tokens with at least P times the probability of the likeliest (default: 0.0, all)"
    )
    stop: list[str] = option("TEXT", "end a continuation before TEXT; may be given several times", [])
    seed: int | None = option("N", "seed of the draws (default: 0)")
    verbose: bool = flag("begin with the pages of memory that keys and values have, on stderr")


class Eval(ModelLine):
    run = "terrace.cli.eval:run"
    takes_keys = False
    description = (
        "Print loss, perplexity and bits per byte of the newest checkpoint of a run, or of the weights of a Hugging "
        "Face folder, on data that it was not trained on, in one process."
    )
    data: str | None = option(
        "PATH",
        "text or JSONL file, or a folder of them, to predict (default: the run's own hold-out and the sources of its "
        "data.eval)",
    )
    format: Literal["text", "chat"] | None = option(
        None,
        "text, or conversations: the loss of the tokens that training on them would train (default: text, or "
        "conversations where the first record is one without a text)",
        name="--data.format",
    )
    chat_template: str | None = option(
        "FILE",
        "the chat template of conversations (default: that of the training, or of the folder)",
        name="--data.chat_template",
    )
    column: str | None = option(
        "NAME", "the key or column of the text in a record (default: text)", name="--data.column"
    )
    split: str | None = option("NAME", "the split of a data set (default: train)", name="--data.split")
    separator: str | None = option(
        "TEXT",
        "what stands between the documents of a text file (default: a file is a document)",
        name="--data.separator",
    )
    context: int | None = option(
        "N",
        "tokens of a window, in which a token sees those before it (default: the sequence that the run was trained "
        "on, or the positions of a Hugging Face model)",
    )
    documents: int | None = option("N", "read the first N documents (default: all)")
    json: bool = flag("print one JSON object instead of lines")


class Export(Line):
    run = "terrace.cli.export:run"
    takes_keys = False
    description = (
        "Write a checkpoint of a run as a folder that transformers loads: safetensors, config.json, and the tokenizer "
        "of the run. With --format dcp, as one that torch.distributed.checkpoint loads, with AdamW's states."
    )
    folder: Path = word("RUN", "run folder of any command that trains")
    path: Path = MADE
    step: int | None = option("N", "the checkpoint after this step (default: the newest)")
    format: Literal["hf", "dcp"] = option(None, "hf: safetensors; dcp: .distcp files and .metadata (default: hf)", HF)
    # As terrace.model.dcp.names, which needs torch.
    names: Literal["hf", "torchtitan"] | None = option(
        None, "with --format dcp: names of parameters (default: hf, those of transformers)"
    )
    weights_only: bool = flag("with --format dcp: leave out the states of the optimizer")
    dtype: DTYPE | None = option(
        None, "dtype of the weights (default: the one that the run computed in; with --format dcp: as they are stored)"
    )
    shard_bytes: int | None = SHARDS
    adapter: bool = flag("write the adapters alone, in fp32, as a folder that peft loads")
    base: str | None = option("NAME", "with --adapter: the base model's name (default: the run's train.weights)")


class Upcycle(Line):
    run = "terrace.cli.upcycle:run"
    takes_keys = False
    description = (
        "Make a mixture of experts from the weights of a dense Hugging Face folder: every expert is a copy of the MLP, "
        "or a part of one, and the mixture computes what the dense model computes until it is trained."
    )
    folder: Path = word("DENSE", "Hugging Face folder of a dense model")
    path: Path = MADE
    experts: int = option("N", "copies of every MLP", required=True)
    per_token: int = option("K", "copies that a token passes (default: %(default)s)", 2)
    parts: int = option(
        "G", "cut each copy into G experts, of which a token passes K times G (default: %(default)s)", 1
    )
    noise: float | None = option(
        "STD",
        "standard deviation of the router's rows, by which copies get different tokens (default: the model's "
        "initializer_range)",
    )
    seed: int = option("N", "seed of the rows (default: %(default)s)", 0)
    dtype: DTYPE | None = option(None, "dtype of the weights (default: that of the dense model)")
    shard_bytes: int | None = SHARDS


class Prune(Line):
    run = "terrace.cli.prune:run"
    takes_keys = False
    description = (
        "Make a smaller model of the layers, heads and inner features of a trained one that are most important in an "
        "evaluation. It is written as a Hugging Face folder, which trains like any other, also with the whole model as "
        "teacher."
    )
    folder: Path = word("FOLDER", "run folder, or Hugging Face folder with config.json and *.safetensors")
    path: Path = MADE
    layers: float = option("SHARE", "share of the layers that stay (default: 1.0, all)", 1.0)
    heads: float = option("SHARE", "share of the key-value heads that stay, with their query heads (default: 1.0)", 1.0)
    intermediate: float = option(
        "SHARE", "share of the inner features of MLPs and experts that stay (default: 1.0)", 1.0
    )
    data: str | None = option(
        "PATH",
        "text or JSONL file, or a folder of them, to measure on (default: the run's own hold-out and the sources of "
        "its data.eval)",
    )
    documents: int | None = option("N", "with --data: read the first N documents (default: all)")
    tokenizer: str | None = option("PATH", "tokenizer.json, or 'bytes' (default: the one that belongs to the model)")
    device: str = option("NAME", "cpu, cuda or cuda:N, to measure on (default: %(default)s)", "cpu")
    dtype: DTYPE | None = option(
        None, "dtype of the weights (default: the one that the run computed in, or that of the folder)"
    )
    shard_bytes: int | None = SHARDS


class Prepare(RunLine):
    run = "terrace.cli.data:run"
    description = (
        "Tokenise and pack the data of a run into its data.cache, where terrace train with the same options finds "
        "them. Nothing is trained, and no device is needed."
    )
    epilog = (
        "Every option is that of terrace train, e.g. --config run.toml, or --data PATH --model FOLDER "
        "--train.sequence 4096."
    )


class Data(Line):
    description = "Look at a corpus before a run, or tokenise it; nothing is trained."

    @classmethod
    def add_to(cls, commands: Any, name: str, **more: Any) -> ArgumentParser:
        parser = super().add_to(commands, name, **more)
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        Prepare.add_to(actions, "prepare", help="tokenise and pack the data of a run")
        for action in products.commands("data").values():
            products.add_parser(action, actions)
        return parser


class Completion(Line):
    run = "terrace.cli.completion:run"
    takes_keys = False
    description = (
        'Print a script that completes commands and options in a shell. For bash: eval "$(terrace completion bash)" in '
        "~/.bashrc; for zsh the same in ~/.zshrc, after compinit; for fish: terrace completion fish | source in "
        "~/.config/fish/config.fish."
    )
    shell: Literal["bash", "zsh", "fish"] = word("SHELL", "bash, zsh, fish")


class Probe(Line):
    run = "terrace.cli.probe:run"
    description = "Measure this machine, or the ranks of torchrun, srun or mpirun, and write a cluster file."
    epilog = CLUSTER_EPILOG
    cluster: str | None = option(
        "NAME|FILE",
        "cluster preset, TOML file or auto, whose names, sizes and peaks to start from (default: local; where a GPU "
        "is, auto)",
    )
    ranks: int | None = RANKS
    out: Path = option("FILE", "cluster file to write, ending in .toml (default: cluster.toml)", Path("cluster.toml"))
    force: bool = flag("replace the --out file if it is there")
    seconds: float = option("S", "seconds for all measurements together (default: 60)", 60.0)


_ALL = (
    Doctor,
    Plan,
    Rent,
    Simulate,
    Train,
    Meet,
    Report,
    Replay,
    Generate,
    Eval,
    Export,
    Upcycle,
    Prune,
    Data,
    Completion,
    Probe,
)
LINES: dict[str, type[Line]] = {line.__name__.lower(): line for line in _ALL}

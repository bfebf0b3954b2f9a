"""What learning from feedback adds to Terrace: the command `rl`, its runs and their keys."""

from terrace.base.products import Command, Product, RunKind

PRODUCT = Product(
    name="rl",
    commands=(
        Command(name="rl", help="train a model by feedback on what it writes", module="terrace.rl.commands.line"),
    ),
    runs=(
        RunKind(
            command="rl",
            sections=("run", "algorithm", "reward", "environment", "cost", "rollout", "pool", "plans", "weights"),
            folder="terrace.rl.folder:run_folder",
            page="terrace.rl.pages.part:rl_part",
        ),
    ),
    keys="terrace.rl.commands.keys:KEYS",
)

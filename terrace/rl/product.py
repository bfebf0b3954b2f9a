"""What learning from feedback adds to Terrace: the command `rl`."""

from terrace.base.products import Command, Product

PRODUCT = Product(
    name="rl",
    commands=(
        Command(
            name="rl",
            help="train a model by feedback on what it writes",
            module="terrace.rl.commands.rl",
        ),
    ),
)

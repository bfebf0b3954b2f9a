"""What the laboratory adds to Terrace: emulated clusters, the cost of balance policies, and paced links."""

from terrace.base.products import Command, Product

PRODUCT = Product(
    name="lab",
    commands=(
        Command(
            name="rehearse",
            help="emulate a cluster on this machine and run a program in it",
            module="terrace.lab.commands.lines:add_rehearse",
            takes_program=True,
        ),
        Command(
            name="data lengths",
            help="lengths of documents, and costs of balance policies",
            module="terrace.lab.commands.lines:add_lengths",
        ),
    ),
    pacer="terrace.lab.pace:Pacer",
    faults="terrace.lab.faults.within:Injected",
)

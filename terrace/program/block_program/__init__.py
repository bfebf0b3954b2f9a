"""A block's own program: the messages among ranks that run the same block, and the compute that hides each message.

Each axis inside a block has a file that creates its steps: `regions` (tensor axis), `attention` (context axis) and
`routed` (experts). `build` joins them.
"""

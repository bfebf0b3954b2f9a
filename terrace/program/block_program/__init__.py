"""A block's own program: the messages among ranks that run the same block, and the computing that hides each message.

Each axis inside a block writes its steps in its own file (`regions` the tensor axis, `attention` the context axis);
`build` joins them.
"""

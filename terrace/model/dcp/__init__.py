"""Folders of `torch.distributed.checkpoint` (DCP): tensors read and written by name."""

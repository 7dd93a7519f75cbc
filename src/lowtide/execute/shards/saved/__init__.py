"""The state of a step on a mesh as files: checkpoints of torch.distributed.checkpoint, with an index in JSON.

From outside: ``checkpoint``.
"""

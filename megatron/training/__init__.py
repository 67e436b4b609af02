"""The training stack: command line, data, optimizer, loop, checkpoints, logging.

Nothing under ``megatron.core`` imports it.
"""

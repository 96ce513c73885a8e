"""The megatron backend: the same engine on megatron-core (tensor, pipeline, expert parallel), no TransformerEngine.

Read model.py (layer spec and one pipeline stage), weights.py (Hugging Face names), backend.py (gradients, optimizer,
checkpoints). Nothing outside this folder imports megatron, and the engine imports the folder only when asked for it.
"""

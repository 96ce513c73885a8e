"""Longspan: exact reinforcement learning on long sequences. Read engine/engine.py first."""

"""Switches of backend="megatron": what megatron-core offers beside the layout. Both are off, and both are refused so far.

Imports nothing of megatron-core: `EngineConfig` holds these whatever the backend.
"""

import importlib
from dataclasses import dataclass

from longspan.errors import UserError
from longspan.typed import typed

__all__ = ["MegatronOptions", "refuse_options"]


@typed
@dataclass(frozen=True, slots=True)
class MegatronOptions:
    """transformer_engine: TransformerEngine's linears and norms in place of the local ones. overlap_experts: one
    micro-step's all-to-all between experts beside another's work (megatron-core's 1F1B overlap)."""

    transformer_engine: bool = False
    overlap_experts: bool = False


def refuse_options(options: MegatronOptions) -> None:
    """UserError for what is asked and cannot be honoured."""
    if options.overlap_experts:
        raise UserError(
            "megatron.overlap_experts=True (1F1B overlap of the experts' all-to-all) is not built: experts are the "
            "project's exact ones, not megatron-core's MoELayer. Set it False"
        )
    if options.transformer_engine:
        try:
            version = importlib.import_module("transformer_engine").__name__
        except ImportError as error:
            raise UserError(
                f"megatron.transformer_engine=True needs the package transformer_engine, whose import failed: {error}. "
                "Set it False: this backend runs without TransformerEngine"
            ) from error
        raise UserError(
            f"megatron.transformer_engine=True: {version} is installed, but its linears and norms are not built into this "
            "backend. Set it False"
        )

"""Everything that this backend takes from megatron-core 0.19.2: the one file that imports it.

Importing megatron.core replaces `torch.storage._load_from_bytes` for the whole process, so that every tensor pickled
afterwards (a rank's result, say) can be read only where megatron-core is installed. Torch's own is put back.
"""

import torch

LOAD_FROM_BYTES = torch.storage._load_from_bytes

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear  # noqa: E402
from megatron.core.transformer.identity_op import IdentityOp  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayer  # noqa: E402

torch.storage._load_from_bytes = LOAD_FROM_BYTES

__all__ = [
    "ColumnParallelLinear",
    "GPTModel",
    "IdentityOp",
    "ModuleSpec",
    "PackedSeqParams",
    "ProcessGroupCollection",
    "RowParallelLinear",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "TransformerLayer",
    "get_gpt_layer_local_spec",
]

"""2. Layout: where each token of a stream lives, on which rank and in which row."""

from longspan.layout.index import inverse, layout_index
from longspan.layout.mesh import CPGroup, Layout, Mesh
from longspan.layout.names import parse_layout, parse_layouts
from longspan.layout.relayout import relayout
from longspan.layout.resolve import resolve
from longspan.layout.seqinfo import Run, SeqInfo, make_seqinfo
from longspan.layout.shard import Shard, shard, split_outputs, unshard

__all__ = [
    "CPGroup",
    "Layout",
    "Mesh",
    "Run",
    "SeqInfo",
    "Shard",
    "inverse",
    "layout_index",
    "make_seqinfo",
    "parse_layout",
    "parse_layouts",
    "relayout",
    "resolve",
    "shard",
    "split_outputs",
    "unshard",
]

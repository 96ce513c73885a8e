"""3. Mixers: what lets tokens meet across ranks. `MIXERS` names them; `make_mixer` makes the one of a layout."""

from longspan.mixers.attention import AttentionCache, Mixer, Prepared, Saved
from longspan.mixers.local import Local, packed_attention
from longspan.mixers.ulysses import Ulysses

__all__ = ["AttentionCache", "Local", "Mixer", "Prepared", "Saved", "Ulysses", "packed_attention"]

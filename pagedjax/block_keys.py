"""Names for what full blocks hold: equal names, equal tokens, and equal tokens all the way before them."""

from array import array
from collections.abc import Hashable, Sequence
from hashlib import blake2b

# Whatever names a block's tokens and all before them; a trace's own ids do as well (see ``traces``).
BlockKey = Hashable


def root_key(salt: str | None = None) -> bytes:
    """The key that a chain begins with. Requests with different salts never share a block."""
    return blake2b(b"" if salt is None else b"salt " + salt.encode(), digest_size=32).digest()


def next_key(parent: BlockKey, tokens: Sequence[int]) -> bytes:
    """The key of the block after ``parent``'s that holds ``tokens``: a cryptographic digest, so that nobody can make
    two prompts whose blocks are taken for each other."""
    assert isinstance(parent, bytes), "a chain of digests goes on from a digest"
    return blake2b(parent + array("i", tokens).tobytes(), digest_size=32).digest()

"""torch tensors in shared memory, which are reduced and synchronised in place.

The import of this package imports torch; `import pccl` does not, nor does any other module of pccl. Inside this package
`import torch` imports torch itself, since all imports are absolute.
"""

from .share import share_
from .shared_tensors import empty, zeros

__all__ = ["empty", "share_", "zeros"]

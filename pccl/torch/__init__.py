"""What needs torch: tensors in shared memory, which are reduced and synchronised in place.

Importing this module imports torch; `import pccl` does not, nor does any other module of ours. Inside this package
`import torch` is the real one, since all imports are absolute.
"""

from .share import share_
from .shared_tensors import empty, zeros

__all__ = ["empty", "share_", "zeros"]

"""Whether this machine can use CUDA tensors.

The import of this module does not import torch, which takes seconds and which most programs do not need.
"""


def is_available() -> bool:
    """Whether CUDA tensors can be hashed here: torch is there and sees a device."""
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())

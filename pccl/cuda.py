"""What this machine can do with CUDA tensors.

Nothing here runs when the module is imported: torch costs seconds, and most
who import pccl never ask.
"""


def is_available() -> bool:
    """Whether CUDA tensors can be hashed here: torch is there and sees a device."""
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())

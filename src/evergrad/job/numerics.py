"""What the bits of a result depend on besides the program: a fingerprint to compare machines by."""

import hashlib

import numba
import numpy as np
import torch

SIZE = 129
DENORMAL = 1e-39


def fingerprint() -> str:
    """Versions, threads, the processor's capability, and a digest of a fixed product, its gradient and a tiny number.

    The tiny number tells whether this process rounds such numbers to zero: a library may have switched that on.
    """
    generator = torch.Generator().manual_seed(2017)
    a, b = (torch.rand(SIZE, SIZE, generator=generator, requires_grad=True) for _ in range(2))
    product = torch.tanh(a @ b).logsumexp(0).sum()
    (gradient,) = torch.autograd.grad(product, [a])
    tiny = torch.full((16,), DENORMAL) * 0.5
    digest = hashlib.blake2b(gradient.numpy().tobytes() + tiny.numpy().tobytes(), digest_size=6).hexdigest()
    versions = f"torch {torch.__version__}, numpy {np.__version__}, numba {numba.__version__}"
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{versions}, {torch.get_num_threads()} threads, {capability}, digest {digest}"

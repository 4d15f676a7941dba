"""
Settings of all tests. Without a GPU, the Triton kernels run on CPU tensors in Triton's interpreter, which must be set
before it is imported. One torch thread: tensors in tests are small, and on a busy machine a second thread makes them
ten times slower, not faster.
"""

import os

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

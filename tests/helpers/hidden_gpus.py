"""Hide the GPUs from all tests but test_gpu.py, which uses those that were visible."""

import os

VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

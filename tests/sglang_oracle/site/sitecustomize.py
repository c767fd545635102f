"""Run at the start of every process of the server, its spawned children too.

PyPI's torchvision is a CUDA build whose operators cannot be loaded beside a CPU torch; importing it needs these two to
be declared, and nothing on a CPU calls them.
"""

import torch

_library = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

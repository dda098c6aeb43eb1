"""When the host waits for a device."""

import torch


def waits_for(device: torch.device) -> bool:
    """Whether reading a value that lies on ``device`` stops the host until all that was launched there before is done."""
    return device.type != "cpu"

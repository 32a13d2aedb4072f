"""What a device can do at best and how much memory a rank uses."""

import resource

import torch

PEAK_TFLOPS = {  # dense bfloat16, without sparsity, from the vendors' data sheets
    "A100": 312.0,
    "A800": 312.0,
    "H800": 989.0,
    "H20": 148.0,
    "H100 NVL": 835.0,
    "L40S": 362.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H200": 989.0,
    "B200": 2250.0,
}


def peak_flops(given_tflops: float | None) -> float | None:
    """FLOP/s of one device, or None where it is not known (a CPU's is not)."""
    if given_tflops:
        return given_tflops * 1e12
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    keys = sorted((key for key in PEAK_TFLOPS if key in name), key=len)  # the longest: an H200 is no H20
    return PEAK_TFLOPS[keys[-1]] * 1e12 if keys else None


def peak_memory_gib() -> float:
    """Most memory held so far: by torch on a GPU, by the process on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

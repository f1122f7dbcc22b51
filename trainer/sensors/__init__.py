"""Sensors of the GPU (NVML) and the host (psutil). Unknown values are recorded as None."""

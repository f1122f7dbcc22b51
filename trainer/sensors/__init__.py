"""Sensors of the GPU (NVML) and the host (psutil). Unknown values are None and end no training."""

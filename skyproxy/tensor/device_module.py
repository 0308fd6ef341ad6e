"""`torch.sky`: what users ask of `torch.cuda`, answered for remote devices."""

from __future__ import annotations
from skyproxy.tensor.devices import DEVICES
import torch
class M:
    def is_available(self): return True
    def is_initialized(self): return True
    def current_device(self): return DEVICES.current
    def _is_in_bad_fork(self): return False
    def device_count(self): return len(DEVICES.existing()) or 1
    def manual_seed_all(self,s): pass
    def get_amp_supported_dtype(self): return [torch.bfloat16, torch.float16]
MODULE = M()

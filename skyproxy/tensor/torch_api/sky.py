"""`torch.sky` as type checkers see it, which do not know what is added to `torch` at run time.

`skyproxy.sky` is this module for them, and `torch.sky` itself in a program. Legacy types and submodules are left out.
"""

from __future__ import annotations

from skyproxy.tensor.core.remote_tensor import RemoteTensor as RemoteTensor
from skyproxy.tensor.programs.compiler import compile_report as compile_report
from skyproxy.tensor.programs.graphed_callables import make_graphed_callables as make_graphed_callables
from skyproxy.tensor.programs.graphs import SkyGraph as SkyGraph
from skyproxy.tensor.programs.graphs import graph as graph
from skyproxy.tensor.programs.graphs import graph_pool_handle as graph_pool_handle
from skyproxy.tensor.programs.graphs import graph_report as graph_report
from skyproxy.tensor.programs.graphs import is_current_stream_capturing as is_current_stream_capturing
from skyproxy.tensor.torch_api.cuda_like_queries import current_allocated_memory as current_allocated_memory
from skyproxy.tensor.torch_api.cuda_like_queries import device_memory_used as device_memory_used
from skyproxy.tensor.torch_api.cuda_like_queries import driver_allocated_memory as driver_allocated_memory
from skyproxy.tensor.torch_api.cuda_like_queries import get_allocator_backend as get_allocator_backend
from skyproxy.tensor.torch_api.cuda_like_queries import get_arch_list as get_arch_list
from skyproxy.tensor.torch_api.cuda_like_queries import get_gencode_flags as get_gencode_flags
from skyproxy.tensor.torch_api.cuda_like_queries import (
    get_per_process_memory_fraction as get_per_process_memory_fraction,
)
from skyproxy.tensor.torch_api.cuda_like_queries import host_memory_stats as host_memory_stats
from skyproxy.tensor.torch_api.cuda_like_queries import (
    host_memory_stats_as_nested_dict as host_memory_stats_as_nested_dict,
)
from skyproxy.tensor.torch_api.cuda_like_queries import max_memory_cached as max_memory_cached
from skyproxy.tensor.torch_api.cuda_like_queries import memory_cached as memory_cached
from skyproxy.tensor.torch_api.cuda_like_queries import recommended_max_memory as recommended_max_memory
from skyproxy.tensor.torch_api.cuda_like_queries import (
    reset_accumulated_host_memory_stats as reset_accumulated_host_memory_stats,
)
from skyproxy.tensor.torch_api.cuda_like_queries import reset_max_memory_cached as reset_max_memory_cached
from skyproxy.tensor.torch_api.cuda_like_queries import reset_peak_host_memory_stats as reset_peak_host_memory_stats
from skyproxy.tensor.torch_api.cuda_like_queries import (
    set_per_process_memory_fraction as set_per_process_memory_fraction,
)
from skyproxy.tensor.torch_api.sky_module import DeviceProperties as DeviceProperties
from skyproxy.tensor.torch_api.sky_module import can_device_access_peer as can_device_access_peer
from skyproxy.tensor.torch_api.sky_module import cancel as cancel
from skyproxy.tensor.torch_api.sky_module import current_device as current_device
from skyproxy.tensor.torch_api.sky_module import device as device
from skyproxy.tensor.torch_api.sky_module import device_count as device_count
from skyproxy.tensor.torch_api.sky_module import device_of as device_of
from skyproxy.tensor.torch_api.sky_module import empty_cache as empty_cache
from skyproxy.tensor.torch_api.sky_module import get_amp_supported_dtype as get_amp_supported_dtype
from skyproxy.tensor.torch_api.sky_module import get_device_capability as get_device_capability
from skyproxy.tensor.torch_api.sky_module import get_device_name as get_device_name
from skyproxy.tensor.torch_api.sky_module import get_device_properties as get_device_properties
from skyproxy.tensor.torch_api.sky_module import get_rng_state as get_rng_state
from skyproxy.tensor.torch_api.sky_module import get_rng_state_all as get_rng_state_all
from skyproxy.tensor.torch_api.sky_module import init as init
from skyproxy.tensor.torch_api.sky_module import initial_seed as initial_seed
from skyproxy.tensor.torch_api.sky_module import ipc_collect as ipc_collect
from skyproxy.tensor.torch_api.sky_module import is_available as is_available
from skyproxy.tensor.torch_api.sky_module import is_bf16_supported as is_bf16_supported
from skyproxy.tensor.torch_api.sky_module import is_initialized as is_initialized
from skyproxy.tensor.torch_api.sky_module import is_tf32_supported as is_tf32_supported
from skyproxy.tensor.torch_api.sky_module import manual_seed as manual_seed
from skyproxy.tensor.torch_api.sky_module import manual_seed_all as manual_seed_all
from skyproxy.tensor.torch_api.sky_module import max_memory_allocated as max_memory_allocated
from skyproxy.tensor.torch_api.sky_module import max_memory_reserved as max_memory_reserved
from skyproxy.tensor.torch_api.sky_module import mem_get_info as mem_get_info
from skyproxy.tensor.torch_api.sky_module import memory_allocated as memory_allocated
from skyproxy.tensor.torch_api.sky_module import memory_reserved as memory_reserved
from skyproxy.tensor.torch_api.sky_module import memory_stats as memory_stats
from skyproxy.tensor.torch_api.sky_module import memory_stats_as_nested_dict as memory_stats_as_nested_dict
from skyproxy.tensor.torch_api.sky_module import memory_summary as memory_summary
from skyproxy.tensor.torch_api.sky_module import modes_in_force as modes_in_force
from skyproxy.tensor.torch_api.sky_module import queue as queue
from skyproxy.tensor.torch_api.sky_module import reset_accumulated_memory_stats as reset_accumulated_memory_stats
from skyproxy.tensor.torch_api.sky_module import reset_max_memory_allocated as reset_max_memory_allocated
from skyproxy.tensor.torch_api.sky_module import reset_peak_memory_stats as reset_peak_memory_stats
from skyproxy.tensor.torch_api.sky_module import seed as seed
from skyproxy.tensor.torch_api.sky_module import seed_all as seed_all
from skyproxy.tensor.torch_api.sky_module import set_device as set_device
from skyproxy.tensor.torch_api.sky_module import set_rng_state as set_rng_state
from skyproxy.tensor.torch_api.sky_module import set_rng_state_all as set_rng_state_all
from skyproxy.tensor.torch_api.sky_module import stats as stats
from skyproxy.tensor.torch_api.sky_module import synchronize as synchronize
from skyproxy.tensor.torch_api.streams import Event as Event
from skyproxy.tensor.torch_api.streams import Stream as Stream
from skyproxy.tensor.torch_api.streams import StreamContext as StreamContext
from skyproxy.tensor.torch_api.streams import current_stream as current_stream
from skyproxy.tensor.torch_api.streams import default_stream as default_stream
from skyproxy.tensor.torch_api.streams import set_stream as set_stream
from skyproxy.tensor.torch_api.streams import stream as stream
from skyproxy.tensor.torch_api.sync_debug import get_sync_debug_mode as get_sync_debug_mode
from skyproxy.tensor.torch_api.sync_debug import set_sync_debug_mode as set_sync_debug_mode

"""jax's settings as this package needs them, whatever the caller's program has set for itself.

Most settings of jax can differ between threads, and what a thread sets for itself goes before what the process has set.
So the values here hold only while code of this package makes arrays, traces, compiles or runs, and the caller's own
values hold again afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

# jax has public context managers for a tenth of its settings. These two modules have all of them.
from jax._src import api as jax_api
from jax._src import config as jax_config
from jax._src import mesh as jax_mesh

# Settings that change numbers or programs, or raise where jax itself would not: jax's own values. What one version of
# jax does not know is left out there. jax_default_device is not among them, because it says where a model is to be:
# loading follows it, and an engine then names the device of its weights.
OWN: dict[str, Any] = {
    # numbers and dtypes
    "jax_enable_x64": False,
    "jax_explicit_x64_dtypes": "warn",
    "jax_numpy_dtype_promotion": "standard",
    "jax_numpy_rank_promotion": "allow",
    "jax_default_matmul_precision": None,
    "jax_allow_f16_reductions": True,
    "jax_softmax_custom_jvp": False,
    "jax_accurate_erf_inv": False,
    "jax_use_hlo_logistic_lowering": None,
    # random numbers
    "jax_default_prng_impl": "threefry2x32",
    "jax_enable_custom_prng": False,
    "jax_legacy_prng_key": "allow",
    "jax_random_seed_offset": 0,
    "jax_threefry_partitionable": True,
    "jax_threefry_gpu_kernel_lowering": False,
    "jax_high_dynamic_range_gumbel": False,
    # where arrays are
    "jax_transfer_guard": None,
    "jax_transfer_guard_host_to_device": "allow",
    "jax_transfer_guard_device_to_device": "allow",
    "jax_transfer_guard_device_to_host": "allow",
    "jax_array_garbage_collection_guard": "allow",
    "jax_disallow_mesh_context_manager": False,
    # checks
    "jax_debug_nans": False,
    "jax_debug_infs": False,
    "jax_debug_key_reuse": False,
    "jax_enable_checks": False,
    "jax_check_tracer_leaks": False,
    "jax_check_static_indices": False,
    "jax_error_checking_behavior_nan": "ignore",
    "jax_error_checking_behavior_divide": "ignore",
    "jax_error_checking_behavior_oob": "ignore",
    "jax_mutable_array_checks": True,
    "jax_disable_bwd_checks": False,
    "jax_disable_vmap_shmap_error": False,
    "jax_raise_on_ppermute_sort_diff": True,
    "check_vma": False,
    "jax_no_collectives": frozenset(),
    # tracing
    "jax_disable_jit": False,
    "jax_no_tracing": False,
    "jax_no_execution": False,
    "eager_constant_folding": False,
    "jax_auto_pcast": True,
    "jax_custom_jvp3": False,
    "jax_custom_vjp3": False,
    "jax_scan3": False,
    "jax_remat3": False,
    "jax_remat_barrier_no_cotangents": False,
    "jax_refs_to_pins": False,
    "jax_remove_size_one_mesh_axis_from_type": False,
    "jax_use_cpp_shard_args": False,
    "jax_use_direct_linearize": True,
    "jax_use_rgv3": True,
    "jax_use_simplified_jaxpr_constants": False,
    "jax_embedded_constants_max_bytes": 32,
    "jax_captured_constants_warn_bytes": 2_000_000_000,
    "jax_captured_constants_report_frames": 0,
    # compiling
    "jax_compiler_enable_remat_pass": True,
    "jax_exec_time_optimization_effort": 0.0,
    "jax_memory_fitting_effort": 0.0,
    "jax_memory_fitting_level": "O2",
    "jax_optimization_level": "UNKNOWN",
    "jax_use_shardy_partitioner": True,
    "jax_use_magma": "auto",
    "jax_bcoo_cusparse_lowering": False,
    "jax_xla_profile_version": 0,
    "jax_enable_pgle": False,
    "jax_compilation_cache_expect_pgle": False,
    "jax_experimental_unsafe_xla_runtime_errors": False,
    "jax_raise_persistent_cache_errors": False,
    # kernels
    "jax_ragged_dot_use_ragged_dot_instruction": True,
    "jax_ragged_dot_use_gpu_pallas_triton_lowering": False,
    "jax_pallas_use_mosaic_gpu": True,
    "jax_pallas_enable_debug_checks": False,
    "jax_pallas_poison_buffers": False,
    "jax_pallas_auto_assign_collective_ids": "no",
    "jax_pallas_auto_assign_collective_ids_limit": 25,
    "jax_use_emit_pipeline_primitive": False,
    "jax_mosaic_allow_hlo": False,
}
# Settings that stay the caller's, by how their names begin: where programs are kept, what is logged and dumped, which
# devices there are, what only other processes or exports read, and names in messages. They change no program.
CALLERS = (
    *("jax_compilation_cache_", "jax_persistent_cache_", "jax_enable_compilation_cache"),
    *("jax_log", "jax_explain", "jax_debug_log_modules", "jax_debug_leaked", "jax_pprint"),
    *("jax_traceback", "jax_include_full_tracebacks", "jax_hlo_source_file", "jax_source_url"),
    *("jax_platforms", "jax_default_device", "jax_num_cpu_devices", "jax_pjrt_client", "jax_cpu_"),
    *("jax_thread_guard", "jax_export_", "jax_serialization", "jax_share_binary", "jax2tf_"),
    *("jax_mtls_", "jax_enable_preemption", "jax_enable_recoverability", "jax_distributed_"),
    *("jax_remove_custom_partitioning", "jax_send_traceback", "jax_mosaic_unzip_debug"),
    "jax_pgle_",
)
# What jax keeps for a `with` block and has no name in `jax.config`: meshes, where to compute, and the like.
BLOCKS = (
    *("mesh_context_manager", "abstract_mesh_context_manager", "device_context"),
    *("compute_on_context_manager", "xla_metadata_context_manager"),
    "pallas_tpu_interpret_mode_context_manager",
)


@contextmanager
def own_settings(**others: Any) -> Iterator[None]:
    """Jax's settings as in `OWN`, in this thread, and no warnings of numpy about floating-point numbers.

    Also a decorator: `@own_settings()`. A thread that runs an engine enters it once and stays inside.

    Args:
        others: more settings, by jax's names.
    """
    states, unset = jax_config.config_states, jax_config.config_ext.unset
    with ExitStack() as stack:
        stack.callback(_restore_checks_of_results)
        for name, value in (OWN | others).items():
            if name in states:
                stack.enter_context(states[name](value))
        for name in BLOCKS:
            block = getattr(jax_config, name, None) or getattr(jax_mesh, name, None)
            if block is not None:
                stack.callback(block.set_local, block.swap_local(unset))
        stack.enter_context(np.errstate(all="ignore"))
        yield


def _restore_checks_of_results() -> None:
    """Has this thread check results for NaN again if the process does.

    The context managers of jax_debug_nans and jax_debug_infs leave the check switched off in a thread that has no value
    of its own.
    """
    unset, states = jax_config.config_ext.unset, jax_config.config_states
    if all(states[name].get_local() is unset for name in ("jax_debug_nans", "jax_debug_infs")):
        jax_api._post_hook_state.set_local(unset)

# SPDX-License-Identifier: Apache-2.0
"""Interfaces of SGLang that kvd uses (kvd/fit.py). Add a name here before you use it."""
from ..fit import Engine

PLUGIN = """
sglang
    __version__
sglang.srt.plugins.hook_registry
    HookRegistry.register(target, hook, hook_type)
    HookRegistry.apply_hooks()
    HookRegistry: _patched
    HookType: AROUND BEFORE
sglang.srt.runtime_context
    get_server_args()
    get_serving()
    get_memory()
sglang.srt.configs.model_config
    ModelConfig.from_server_args(server_args)
    ModelConfig.get_total_num_kv_heads()
    ModelConfig: hf_config hf_text_config dtype quantization context_len
"""

TRANSFER = """
sglang.srt.disaggregation.utils
    TransferBackend
    DisaggregationMode: PREFILL DECODE
    get_kv_class(transfer_backend, class_type)
sglang.srt.server_args
    add_disagg_transfer_backend_choices(choices)
    ServerArgs: model_path revision lora_paths kv_cache_dtype load_format
sglang.srt.environ
    Envs: SGLANG_DISAGG_STAGING_BUFFER SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER
    Envs: SGLANG_RUST_SERVER SGLANG_MOONCAKE_CUSTOM_MEM_POOL
    Envs: SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT
sglang.srt.runtime_context
    get_device()
    get_disagg()
    get_parallel()
    linear_attn_tp_size()
sglang.srt.disaggregation.base.conn
    KVPoll: Failed Bootstrapping WaitingForInput Transferring Success
    KVTransferDestination: DEVICE
    BaseKVBootstrapServer
    KVArgs: engine_rank kv_data_ptrs kv_data_lens kv_item_lens kv_layer_ids kv_cache_dtype_str
    KVArgs: aux_data_ptrs aux_data_lens aux_item_lens state_types state_data_ptrs state_data_lens
    KVArgs: state_item_lens state_layer_ids state_dim_per_tensor state_slice_outer_counts
    KVArgs: state_conv_shard_groups swa_kv_cache_layout ib_device total_kv_head_num page_size
    KVArgs: system_dp_rank pp_rank prefill_start_layer
sglang.srt.disaggregation.prefill
    PrefillBootstrapQueue.release_memory_occupation()
    PrefillBootstrapQueue.resume_memory_occupation()
sglang.srt.disaggregation.decode
    DecodePreallocQueue: _create_receiver_and_enqueue
    DecodePreallocQueue.release_memory_occupation()
    DecodePreallocQueue.resume_memory_occupation()
sglang.srt.disaggregation.common.conn
    CommonKVManager(args, disaggregation_mode, server_args, is_mla_backend)
    CommonKVManager: server_socket bootstrap_timeout waiting_timeout pp_size attn_tp_size
    CommonKVManager: failure_lock failure_records request_status prefill_info_table
    CommonKVManager: is_dummy_cp_rank enable_deferred_decode_kv_release
    CommonKVManager._start_heartbeat_checker_thread()
    CommonKVManager.update_status(bootstrap_room, status)
    CommonKVManager.record_failure(bootstrap_room, failure_reason)
    CommonKVManager.check_status_pp_consensus(bootstrap_room)
    CommonKVManager < _register_topology_row(url, payload)
    CommonKVManager < is_abort_release_safe(bootstrap_room, required_acks)
    CommonKVSender(mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank)
    CommonKVSender: conclude_state trace_ctx _transfer_start_time _transfer_metric
    CommonKVSender: _early_send_wait_event aux_index bootstrap_room kv_mgr
    CommonKVSender._prepare_send_indices(kv_indices, state_indices)
    CommonKVSender._record_transfer_indices(kv_indices, state_indices)
    CommonKVSender < poll()
    CommonKVSender < poll_pp_consensus()
    CommonKVSender < pop_decode_prefix_len()
    CommonKVSender < init(num_kv_indices, aux_index)
    CommonKVSender < send(kv_indices, state_indices, num_kv_tokens, indices_event)
    CommonKVSender < abort()
    CommonKVSender < failure_exception()
    CommonKVSender < clear()
    CommonKVReceiver(mgr, bootstrap_addr, bootstrap_room)
    CommonKVReceiver: conclude_state kv_mgr bootstrap_room bootstrap_addr bootstrap_infos
    CommonKVReceiver: prefill_info required_dst_info_num init_time abort_notified
    CommonKVReceiver.invalidate_cached_bootstrap_infos()
    CommonKVReceiver < _register_kv_args()
    CommonKVReceiver < init(prefill_dp_rank)
    CommonKVReceiver < poll()
    CommonKVReceiver < _poll()
    CommonKVReceiver < send_metadata(kv_indices, aux_index, state_indices, decode_prefix_len, destination, device_kv_indices)
    CommonKVReceiver < ensure_abort_notified(force_arm)
    CommonKVReceiver < abort()
    CommonKVReceiver < failure_exception()
    CommonKVReceiver < _clear()
    CommonKVBootstrapServer(host, port)
    CommonKVBootstrapServer.close()
    CommonKVBootstrapServer < _handle_route_put(request)
    CommonKVBootstrapServer < _handle_route_get(request)
"""

STORE = """
sglang.srt.server_args
    ServerArgs: model_path revision lora_paths enable_lora kv_cache_dtype load_format random_seed
    ServerArgs: quantization_param_path json_model_override_args model_impl
    ServerArgs: speculative_algorithm speculative_draft_model_path
    ServerArgs: speculative_draft_model_revision speculative_draft_model_quantization
sglang.srt.mem_cache.hicache_storage
    HiCacheStorage < register_mem_pool_host(mem_pool_host)
    HiCacheStorage < register_mem_host_pool_v2(host_pool, host_pool_name)
    HiCacheStorage < batch_exists(keys, extra_info)
    HiCacheStorage < batch_get_v1(keys, host_indices, extra_info)
    HiCacheStorage < batch_set_v1(keys, host_indices, extra_info)
    HiCacheStorage < batch_exists_v2(keys, pool_transfers, extra_info)
    HiCacheStorage < batch_get_v2(transfers, extra_info)
    HiCacheStorage < batch_set_v2(transfers, extra_info)
    HiCacheStorageConfig: tp_rank tp_size pp_size attn_cp_size dcp_size should_split_heads
    HiCacheStorageConfig: extra_config enable_storage_metrics dp_rank
    PoolHitPolicy: ALL_PAGES TRAILING_PAGES
    PoolName: KV
    PoolTransfer: name keys host_indices hit_policy
    PoolTransferResult.empty()
sglang.srt.mem_cache.storage.mmap
    alloc_shm(dims, dtype)
sglang.srt.managers.scheduler_components.weight_updater
    SchedulerWeightUpdaterManager: update_weights_from_disk update_weights_from_distributed
    SchedulerWeightUpdaterManager: update_weights_from_tensor update_weights_from_ipc
    SchedulerWeightUpdaterManager: begin_weight_update
sglang.srt.runtime_context
    get_schedule()
sglang.srt.managers.scheduler
    Scheduler: run_batch process_batch_result
sglang.srt.managers.schedule_batch
    ScheduleBatch: extend_num_tokens
sglang.srt.managers.tp_worker
    BaseTpWorker: load_lora_adapter load_lora_adapter_from_tensors
sglang.srt.mem_cache.pool_host.mha
    MHATokenToKVPoolHost: layout size page_size layer_num start_layer dtype head_num head_dim
sglang.srt.mem_cache.pool_host.mla
    MLATokenToKVPoolHost: layout size page_size layer_num start_layer dtype kv_cache_dim
"""

TESTED = ("0.5.23",)  # releases of SGLang that make engines has run
REMEDY = "install SGLang %s, or use SGLang's backend nixl on kvd (docs/engines/nixl.md)" % TESTED[-1]
PARTS = {"transfer": Engine("kvd.sglang", "SGLang", TESTED, PLUGIN + TRANSFER, REMEDY),
         "store": Engine("kvd.sglang.store", "SGLang", TESTED, PLUGIN + STORE, REMEDY)}

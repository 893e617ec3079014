# SPDX-License-Identifier: Apache-2.0
"""Interfaces of vLLM that kvd's connectors use (kvd/fit.py). Add a name here before you use it."""
from ..fit import Engine

CONFIG = """
vllm
    __version__
vllm.config
    VllmConfig: kv_transfer_config parallel_config cache_config model_config speculative_config
    VllmConfig: scheduler_config compilation_config load_config num_prefill_lookahead_tokens
    VllmConfig: use_v2_model_runner kv_events_config
    ParallelConfig: tensor_parallel_size pipeline_parallel_size prefill_context_parallel_size
    ParallelConfig: decode_context_parallel_size nnodes data_parallel_index
    CacheConfig: block_size cache_dtype prefix_caching_hash_algo
    ModelConfig: model revision hf_config hf_text_config hf_overrides hf_config_path dtype
    ModelConfig: quantization max_model_len use_mla runner_type enable_sleep_mode model_weights
    ModelConfig.get_total_num_kv_heads()
    SchedulerConfig: max_num_seqs
    SpeculativeConfig: method
    LoadConfig: load_format
    CompilationConfig: static_forward_context
    KVTransferConfig: kv_connector_extra_config kv_role is_kv_consumer is_kv_producer
    KVTransferConfig: enable_permute_local_kv kv_load_failure_policy
    KVTransferConfig.get_from_extra_config(key, default)
vllm.config.kv_events
    KVEventsConfig: enable_kv_cache_events
vllm.logger
    init_logger(name)
vllm.platforms
    current_platform
vllm.platforms.interface
    Platform.is_rocm()
"""

CACHES = """
vllm.v1.kv_cache_interface
    KVCacheConfig: kv_cache_groups transfer_groups transfer_group_ids num_blocks
    KVCacheConfig: has_mamba_layers needs_kv_cache_zeroing
    KVCacheConfig.select_transfer_block_ids(block_ids)
    KVCacheGroupSpec: kv_cache_spec layer_names host_resident
    KVCacheSpec: block_size prefix_replay_tokens
    FullAttentionSpec: head_size head_size_v kv_quant_mode tokens_per_state
    MLAAttentionSpec: head_size head_size_v kv_quant_mode tokens_per_state cache_role
    SlidingWindowSpec: head_size head_size_v kv_quant_mode tokens_per_state sliding_window
    SlidingWindowMLASpec: head_size kv_quant_mode tokens_per_state sliding_window
    ChunkedLocalAttentionSpec
    MambaSpec: shapes dtypes mamba_type num_speculative_blocks tp_replicated
    UniformTypeKVCacheSpecs: kv_cache_specs
    KVQuantMode: NONE FP8_PER_TENSOR NVFP4
    SparseCacheRole: INDEXER
vllm.model_executor.layers.attention_layer_base
    AttentionLayerBase.get_attn_backend()
vllm.v1.attention.backend
    AttentionBackend.get_name()
vllm.v1.attention.backends.cpu_attn
    _get_attn_isa(dtype, block_size, head_size, kv_cache_dtype)
vllm.model_executor.models.utils
    extract_layer_index(layer_name)
vllm.model_executor.layers.mamba.mamba_utils
    is_conv_state_dim_first()
vllm.distributed.kv_transfer.kv_connector.v1.ssm_conv_transfer_utils
    derive_mamba_conv_split(mamba_spec, local_tp)
    MambaConvSplitInfo: local_proj_dims conv_rows conv_dtype_size ssm_sizes
vllm.distributed
    get_pp_group()
    get_tensor_model_parallel_rank()
"""

CONNECTORS = """
vllm.distributed.kv_transfer.kv_connector.factory
    KVConnectorFactory.register_connector(name, module_path, class_name)
vllm.distributed.kv_transfer.kv_connector.v1.base
    KVConnectorRole: SCHEDULER
    KVConnectorHandshakeMetadata
    KVConnectorMetadata
    KVConnectorWorkerMetadata < aggregate(other)
    KVConnectorTransferResults(finished_sending=, finished_recving=, failed_recving=)
    SupportsHMA < request_finished_all_groups(request, block_ids)
    KVConnectorBase_V1(vllm_config, role, kv_cache_config)
    KVConnectorBase_V1: _kv_cache_config supports_divergent_local_hybrid_hits
    KVConnectorBase_V1: requires_kv_delivery
    KVConnectorBase_V1._get_connector_metadata()
    KVConnectorBase_V1 <? supports_sleep_mode(kv_transfer_config)
    KVConnectorBase_V1 <? unregister_kv_caches()
    KVConnectorBase_V1 <? restore_kv_caches()
    KVConnectorBase_V1 < on_new_request(request)
    KVConnectorBase_V1 < get_num_new_matched_tokens(request, num_computed_tokens)
    KVConnectorBase_V1 < update_state_after_alloc(request, blocks, num_external_tokens)
    KVConnectorBase_V1 < build_connector_meta(scheduler_output)
    KVConnectorBase_V1 < update_connector_output(connector_output)
    KVConnectorBase_V1 < request_finished(request, block_ids)
    KVConnectorBase_V1 < reset_cache()
    KVConnectorBase_V1 < register_kv_caches(kv_caches)
    KVConnectorBase_V1 < get_handshake_metadata()
    KVConnectorBase_V1 < set_xfer_handshake_metadata_pp_aware(metadata)
    KVConnectorBase_V1 <? get_loaded_kv_cache_group_ids(request)
    KVConnectorBase_V1 < bind_gpu_block_pool(gpu_block_pool)
    KVConnectorBase_V1 < requires_piecewise_for_cudagraph(extra_config)
    KVConnectorBase_V1 < handle_preemptions(kv_connector_metadata)
    KVConnectorBase_V1 < start_load_kv(forward_context, **kwargs)
    KVConnectorBase_V1 < wait_for_layer_load(layer_name)
    KVConnectorBase_V1 < save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)
    KVConnectorBase_V1 < wait_for_save()
    KVConnectorBase_V1 < get_finished(finished_req_ids)
    KVConnectorBase_V1 < get_transfer_results(finished_req_ids)
    KVConnectorBase_V1 < get_block_ids_with_load_errors()
    KVConnectorBase_V1 < build_connector_worker_meta()
    KVConnectorBase_V1 <? take_events()
    KVConnectorBase_V1 <? has_pending_push_work()
    KVConnectorBase_V1 < shutdown()
    KVConnectorBase_V1 < get_kv_connector_stats()
    KVConnectorBase_V1 < build_kv_connector_stats(data)
    KVConnectorBase_V1 < build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
vllm.distributed.kv_transfer.kv_connector.v1.metrics
    KVConnectorStats: data
    KVConnectorStats < reset()
    KVConnectorStats < aggregate(other)
    KVConnectorStats < is_empty()
    KVConnectorStats < reduce()
    KVConnectorPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
    KVConnectorPromMetrics: _histogram_cls _counter_cls per_engine_labelvalues
    KVConnectorPromMetrics < observe(transfer_stats_data, engine_idx)
vllm.v1.metrics.utils
    create_metric_per_engine(metric, per_engine_labelvalues)
vllm.utils.hashing
    get_hash_fn_by_name(hash_fn_name)
vllm.v1.core.kv_cache_utils
    generate_block_hash_extra_keys(request, start_token_idx, end_token_idx, start_mm_idx)
    resolve_none_hash_seed(hash_fn)
vllm.v1.request
    RequestStatus: FINISHED_STOPPED FINISHED_LENGTH_CAPPED
    Request: request_id kv_transfer_params num_prompt_tokens prompt_token_ids prompt_embeds
    Request: _all_token_ids all_token_ids max_tokens status num_computed_tokens num_tokens
    Request: num_in_flight_tokens output_token_ids block_hashes skip_reading_prefix_cache
    Request: lora_request
    Request.get_skip_reading_prefix_cache()
vllm.lora.request
    LoRARequest: lora_name lora_path
vllm.v1.core.sched.output
    SchedulerOutput: num_scheduled_tokens preempted_req_ids kv_connector_block_state
    KVConnectorBlockState.get_block_ids(req_id)
vllm.v1.core.kv_cache_manager
    KVCacheBlocks.get_block_ids()
vllm.v1.core.block_pool
    BlockPool: num_gpu_blocks
    BlockPool.get_num_free_blocks()
vllm.v1.outputs
    KVConnectorOutput: kv_connector_worker_meta finished_recving failed_recving invalid_block_ids
    KVConnectorOutput: finished_sending
"""

EVENTS = """
vllm.distributed.kv_events
    MEDIUM_CPU
    MEDIUM_STORAGE
    BlockStored(block_hashes=, parent_block_hash=, token_ids=, block_size=, lora_id=, medium=, lora_name=, extra_keys=, group_idx=, kv_cache_spec_kind=, locality=)
    BlockRemoved(block_hashes=, medium=, group_idx=, locality=)
vllm.distributed.kv_transfer.kv_connector.v1.base
    KVConnectorBase_V1 < take_events()
    KVConnectorBase_V1 < has_pending_push_work()
vllm.v1.kv_cache_interface
    get_kv_cache_spec_kind(kv_cache_spec)
vllm.v1.core.kv_cache_utils
    generate_block_hash_extra_keys(request, start_token_idx, end_token_idx, start_mm_idx)
    maybe_convert_block_hash(hash_bytes)
    to_event_extra_keys(extra_keys)
vllm.v1.core.block_pool
    BlockPool: cached_block_hash_to_block
vllm.v1.request
    Request: lora_request mm_features cache_salt prompt_embeds all_token_ids block_hashes
vllm.lora.request
    LoRARequest: lora_name adapter_id
"""

TIER = """
vllm
    __version__
vllm.logger
    init_logger(name)
vllm.platforms.interface
    Platform: device_name
    Platform.get_device_capability()
vllm.v1.kv_offload.base
    Locality
    LookupResult: HIT MISS RETRY
    Medium: STORAGE
    OffloadingEvent(keys=, medium=, removed=, locality=, removal_expected=)
    RequestOffloadingContext()
    OffloadingSpec: config blocks_per_chunk kv_events_config
    OffloadingKVEventsConfig: enable_kv_cache_events
    get_offload_block_hash(key)
    get_offload_group_idx(key)
    ReqContext: req_id
    ReqContext.get_offload_key_position(key)
vllm.v1.kv_offload.file_mapper
    FileMapper.from_offloading_spec(root_dir, offloading_spec, blocks_per_file, parallel_agnostic)
    FileMapper: fields
vllm.v1.kv_offload.tiering.async_lookup
    AsyncLookupManager(tier_type)
    AsyncLookupManager < batch_lookup(keys, req_context)
    AsyncLookupManager.lookup(key, req_context)
    AsyncLookupManager.flush()
    AsyncLookupManager.mark_miss(keys)
    AsyncLookupManager.cleanup(req_id)
    AsyncLookupManager.shutdown()
vllm.v1.kv_offload.tiering.base
    JobResult(job_id=, success=, transfer_time=, successful_keys=, transfer_bytes=)
    TransferJob: job_id keys chunk_ids is_promotion req_context
    SecondaryTierManager(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
    SecondaryTierManager: medium _block_size_bytes
    SecondaryTierManager < on_new_request(req_context)
    SecondaryTierManager < on_request_finished(req_context)
    SecondaryTierManager < lookup(key, req_context)
    SecondaryTierManager < on_schedule_end(context)
    SecondaryTierManager < submit_store(job_metadata)
    SecondaryTierManager < submit_load(job_metadata)
    SecondaryTierManager < get_finished_jobs()
    SecondaryTierManager < take_events()
    SecondaryTierManager < has_pending_work()
    SecondaryTierManager < drain_jobs()
    SecondaryTierManager < shutdown()
"""

# releases of vLLM that make engines has run, with the connectors, their KV events and the tier
TESTED, EVENTS_TESTED, TIER_TESTED = ("0.31.0", "0.32.0"), ("0.32.0",), ("0.32.0",)
ROUTE_TESTED = ("0.32.0",)
REMEDY = "install vLLM %s, or use vLLM's NixlConnector on kvd (docs/engines/nixl.md)" % TESTED[-1]
ROUTE = """
vllm.config
    SchedulerConfig: scheduler_cls async_scheduling
    ParallelConfig: data_parallel_size
    get_current_vllm_config()
vllm.platforms.interface
    Platform: device_name
    Platform.is_cpu()
vllm.distributed.kv_transfer
    get_kv_transfer_group()
    has_kv_transfer_group()
vllm.distributed.kv_transfer.kv_connector.v1.base
    KVConnectorBase_V1 < bind_kv_cache_manager(kv_cache_manager)
    KVConnectorBase_V1 < has_pending_push_work()
vllm.utils.import_utils
    resolve_obj_by_qualname(qualname)
vllm.v1.attention.backends.registry
    AttentionBackendEnum: CPU_ATTN CPU_MLA AMX_MLA CUSTOM
    register_backend(backend, class_path)
vllm.v1.attention.backend
    AttentionBackend: forward_includes_kv_cache_update supported_dtypes supported_kv_cache_dtypes
    AttentionBackend < get_name()
    AttentionBackend < get_supported_kernel_block_sizes(kv_cache_spec)
    AttentionBackend < get_impl_cls()
    AttentionBackend < get_builder_cls()
    AttentionImpl < forward(layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale)
    AttentionMetadataBuilder(kv_cache_spec, layer_names, vllm_config, device)
    AttentionMetadataBuilder < build(common_prefix_len, common_attn_metadata, fast_build)
    CommonAttentionMetadata: query_start_loc seq_lens num_reqs num_actual_tokens max_query_len
    CommonAttentionMetadata: max_seq_len block_table_tensor slot_mapping
    MultipleOf
vllm.v1.attention.backends.mla.cpu_mla
    CPUMLABackend < get_impl_cls()
    CPUMLABackend < get_builder_cls()
    CPUMLAImpl: kv_lora_rank qk_rope_head_dim num_heads scale
    CPUMLAImpl < forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)
vllm.model_executor.layers.attention.mla_attention
    MLACommonMetadata(num_reqs=, max_query_len=, max_seq_len=, num_actual_tokens=, query_start_loc=, slot_mapping=, num_decodes=, num_decode_tokens=, num_prefills=, decode=)
    MLACommonDecodeMetadata(block_table, seq_lens, dcp_tot_seq_lens)
vllm.v1.core.kv_cache_manager
    KVCacheManager: coordinator block_pool
    KVCacheManager.evict_blocks(block_ids)
    KVCacheManager.get_block_ids(request_id)
vllm.v1.core.kv_cache_coordinator
    KVCacheCoordinator: single_type_managers
vllm.v1.core.single_type_kv_cache_manager
    FullAttentionManager: num_cached_block block_size req_to_blocks _null_block
    FullAttentionManager < get_num_blocks_to_allocate(request_id, num_tokens, new_computed_blocks, total_computed_tokens, num_local_computed_tokens, num_tokens_main_model, apply_admission_cap, prefill_end)
    FullAttentionManager < allocate_external_computed_blocks(request_id, num_local_computed_tokens, num_external_computed_tokens, record_for_zeroing)
vllm.v1.core.sched.scheduler
    Scheduler: requests running connector kv_cache_manager block_size prev_step_scheduled_req_ids
    Scheduler < update_from_output(scheduler_output, model_runner_output)
    Scheduler._preempt_request(request, timestamp, drop_stale_output=)
vllm.v1.core.sched.output
    SchedulerOutput: num_scheduled_tokens
vllm.v1.request
    RequestStatus: RUNNING
vllm.v1.outputs
    ModelRunnerOutput: kv_connector_output
"""

PARTS = {"connectors": Engine("kvd.vllm", "vLLM", TESTED, CONFIG + CACHES + CONNECTORS, REMEDY),
         "events": Engine("kvd.vllm's KV events", "vLLM", EVENTS_TESTED, EVENTS,
                          "install vLLM %s, or drop --kv-events-config" % EVENTS_TESTED[-1]),
         "route": Engine("kvd.vllm's RouteScheduler", "vLLM", ROUTE_TESTED, ROUTE, REMEDY),
         "tier": Engine("kvd.vllm.tier", "vLLM", TIER_TESTED, TIER, REMEDY)}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * verbs over adapters that are not there: what is posted for a plan, accounts that
 * cannot overflow, and which port is taken and why.
 */
#include "tests/lib/verbs_pair.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "daemon/base/err.h"
#include "daemon/transport/verbs/verbs_look.h"
#include "gpu/gpu.h"
#include "gpu/import.h"

/* ---- plans become requests ---- */

static const struct plan_run shapes[] = {
	{.src = 7, .dst = 3, .len = 1, .count = 1},
	{.src = 100, .dst = 200, .len = 8193, .count = 1},
	/* both scattered: pages, heads */
	{.src = 0,
	 .dst = 8192,
	 .len = 32768,
	 .count = 90,
	 .src_stride = 65536,
	 .dst_stride = 40960},
	{.src = 64,
	 .dst = 0,
	 .len = 256,
	 .count = 10000,
	 .src_stride = 512,
	 .dst_stride = 300},
	/* whole at one side */
	{.src = 0,
	 .dst = 0,
	 .len = 512,
	 .count = 9000,
	 .src_stride = 640,
	 .dst_stride = 512},
	{.src = 0,
	 .dst = 0,
	 .len = 512,
	 .count = 9000,
	 .src_stride = 512,
	 .dst_stride = 640},
	{.src = 1, .dst = 2, .len = 5 * VP_MIB + 12345, .count = 1},
	{.src = 0,
	 .dst = 0,
	 .len = 24,
	 .count = 100000,
	 .src_stride = 48,
	 .dst_stride = 56},
};

static void move_shapes(enum xp_kind kind)
{
	struct vp_transfer x;

	for (size_t i = 0; i < ARRAY_LEN(shapes); i++) {
		vp_transfer_init(&x, kind, &shapes[i], 1, 8 * VP_MIB);
		assert_int_equal(vp_post(&x), 0);
		vp_moved(&x);
		vp_transfer_fini(&x);
	}
	assert_int_equal(vp_b.failures, 0);
	assert_int_equal(vp_a.lost + vp_b.lost, 0);
}

static void every_shape_is_written(void **state)
{
	(void)state;
	move_shapes(XP_WRITE);
}

static void every_shape_is_read(void **state)
{
	(void)state;
	move_shapes(XP_READ);
}

/* What one transfer posts, its marks and frames included. */
static struct fake_verbs_count posted(enum xp_kind kind, const struct plan_run *run)
{
	struct fake_verbs_count count;
	struct vp_transfer x;

	vp_transfer_init(&x, kind, run, 1, 8 * VP_MIB);
	memset(fake_verbs_count(), 0, sizeof(count));
	assert_int_equal(vp_post(&x), 0);
	vp_moved(&x);
	count = *fake_verbs_count();
	vp_transfer_fini(&x);
	return count;
}

static void rows_whole_at_remote_side_are_gathered(void **state)
{
	const struct plan_run run = {
		.len = 4096, .count = 600, .src_stride = 8192, .dst_stride = 4096};
	struct fake_verbs_count count = posted(XP_WRITE, &run);

	(void)state;
	assert_int_equal(count.writes, 600 / 30); /* max_sge rows in each */
	assert_int_equal(count.sges_most, 30);
}

static void rows_whole_at_remote_side_are_scattered_by_reads(void **state)
{
	const struct plan_run run = {
		.len = 4096, .count = 600, .src_stride = 4096, .dst_stride = 8192};
	struct fake_verbs_count count = posted(XP_READ, &run);

	(void)state;
	assert_int_equal(count.reads, 600 / 30);
	assert_int_equal(count.sges_most, 30);
}

static void rows_adjacent_on_both_sides_are_one(void **state)
{
	const struct plan_run run = {
		.len = 4096, .count = 256, .src_stride = 4096, .dst_stride = 4096};
	struct fake_verbs_count count = posted(XP_WRITE, &run);

	(void)state;
	assert_int_equal(count.writes, 1);
	assert_int_equal(count.sges_most, 1);
}

static void scattered_rows_share_doorbells(void **state)
{
	const struct plan_run run = {
		.len = 512, .count = 3200, .src_stride = 1024, .dst_stride = 1536};
	struct fake_verbs_count count = posted(XP_WRITE, &run);

	(void)state;
	assert_int_equal(count.writes, 3200);
	assert_true(count.doorbells < 3200 / VERBS_CHAIN_WRS + 16);
}

static void rows_short_are_inline_in_writes_only(void **state)
{
	const struct plan_run run = {
		.len = 64, .count = 100, .src_stride = 128, .dst_stride = 192};
	struct fake_verbs_count count = posted(XP_WRITE, &run);

	(void)state;
	assert_true(count.inlined >= 100);
	count = posted(XP_READ, &run);
	assert_int_equal(count.reads, 100);
	assert_true(count.inlined < 20); /* frames */
}

static void transfer_large_uses_all_queue_pairs_with_marks(void **state)
{
	const struct plan_run run = {
		.len = 8192, .count = 800, .src_stride = 8448, .dst_stride = 8200};
	struct vp_transfer x;

	(void)state;
	fake_verbs_slow(vp_loop, VP_MIB);
	vp_transfer_init(&x, XP_WRITE, &run, 1, 8 * VP_MIB);
	memset(fake_verbs_count(), 0, sizeof(struct fake_verbs_count));
	assert_int_equal(vp_post(&x), 0);
	vp_moved(&x);
	assert_int_equal(vp_peer(&vp_a)->qp_count, 2);
	assert_int_equal(fake_verbs_count()->imms, 1); /* the other mark is a frame */
	fake_verbs_slow(NULL, 0);
	vp_transfer_fini(&x);
}

/* The fake dies of the first request too many, on any queue. */
static void queues_at_their_least_depth_never_overrun(void **state)
{
	struct vp_transfer x[8];

	(void)state;
	vp_begin(state);
	fake_verbs_rules()->max_qp_wr = VERBS_GRANTS;
	fake_verbs_rules()->max_cqe = 2 * VERBS_GRANTS;
	fake_verbs_rules()->max_sge = 2;
	assert_int_equal(vp_open(&vp_a, "mlx5_0"), 0);
	assert_int_equal(vp_open(&vp_b, "mlx5_2"), 0);
	vp_join();
	fake_verbs_slow(vp_loop, 64 * VP_KIB);
	for (size_t i = 0; i < ARRAY_LEN(x); i++) {
		vp_transfer_init(&x[i], i % 2 ? XP_READ : XP_WRITE, &shapes[3 + i % 3], 1,
				 8 * VP_MIB);
		assert_int_equal(vp_post(&x[i]), 0);
		VP_AWAIT(vp_b.requests == i + 1); /* sides are those of the last one */
	}
	fake_verbs_slow(NULL, 0);
	for (size_t i = 0; i < ARRAY_LEN(x); i++) {
		vp_moved(&x[i]);
		vp_transfer_fini(&x[i]);
	}
	vp_end(state);
}

static void queues_too_short_are_refused(void **state)
{
	(void)state;
	vp_begin(state);
	fake_verbs_rules()->max_qp_wr = 16;
	assert_int_equal(vp_open(&vp_a, "mlx5_0"), 0);
	assert_int_equal(vp_open(&vp_b, "mlx5_2"), 0);
	vp_connect(&vp_b, &vp_a, 2, 1);
	vp_connect(&vp_a, &vp_b, 1, 2);
	VP_AWAIT(vp_a.lost);
	assert_non_null(strstr(vp_a.why.text, "too short"));
	assert_int_equal(vp_a.ready + vp_b.ready, 0);
	vp_end(state);
}

/* ---- who gets in ---- */

static void connection_with_wrong_token_is_refused(void **state)
{
	struct verbs_hello hello = {.total = 1, .depth = 64};
	uint8_t data[VERBS_HELLO_BYTES];
	struct verbs_address address;

	(void)state;
	vp_begin(state);
	assert_int_equal(vp_open(&vp_a, "mlx5_0"), 0);
	assert_int_equal(vp_open(&vp_b, "mlx5_2"), 0);
	vp_connect(&vp_b, &vp_a, 2, 1);
	memset(hello.token, 3, sizeof(hello.token));
	verbs_hello_put(&hello, data);
	assert_int_equal(
		verbs_address_get(vp_b.xp->address, vp_b.xp->address_len, &address), 0);
	assert_int_equal(
		fake_verbs_knock(2, ((struct sockaddr_in *)&address.rail[0])->sin_port,
				 data, sizeof(data), vp_turns),
		RDMA_CM_EVENT_REJECTED);
	vp_connect(&vp_a, &vp_b, 1, 2); /* who is expected still gets in */
	VP_AWAIT(vp_a.ready && vp_b.ready);
	vp_end(state);
}

static void private_data_of_any_length_is_harmless(void **state)
{
	struct verbs_address address;
	uint8_t data[56];

	(void)state;
	assert_int_equal(
		verbs_address_get(vp_b.xp->address, vp_b.xp->address_len, &address), 0);
	memset(data, 2, sizeof(data));
	for (uint8_t len = 0; len <= sizeof(data); len++)
		assert_int_equal(
			fake_verbs_knock(
				2, ((struct sockaddr_in *)&address.rail[0])->sin_port,
				data, len, vp_turns),
			RDMA_CM_EVENT_REJECTED);
	assert_int_equal(vp_b.lost, 0);
}

static void token_wrong_in_reply_loses_the_peer(void **state)
{
	(void)state;
	vp_begin(state);
	assert_int_equal(vp_open(&vp_a, "mlx5_0"), 0);
	assert_int_equal(vp_open(&vp_b, "mlx5_2"), 0);
	vp_connect(&vp_b, &vp_a, 2, 9);
	vp_connect(&vp_a, &vp_b, 1, 2);
	VP_AWAIT(vp_a.lost);
	assert_int_equal(vp_a.why.code, ERR_AUTH);
	assert_false(vp_a.ready);
	vp_end(state);
}

/* ---- memory ---- */

static void memory_is_registered_once_a_device_with_relaxed_ordering(void **state)
{
	struct vp_place place;
	const struct fake_verbs_mr *mr;

	(void)state;
	vp_place_init(&place, &vp_a, VP_MIB);
	for (unsigned int i = 0; i < 2; i++) {
		mr = fake_verbs_mr(i);
		assert_string_equal(mr->device, i ? "mlx5_0" : "mlx5_1");
		assert_int_equal(mr->length, VP_MIB);
		assert_true(mr->access & IBV_ACCESS_RELAXED_ORDERING);
		assert_true(mr->access & IBV_ACCESS_REMOTE_WRITE);
	}
	vp_place_fini(&place);
	assert_false(fake_verbs_mr(0)->alive || fake_verbs_mr(1)->alive);
}

static void memory_read_only_gets_no_write_right(void **state)
{
	struct memory *memory;
	struct vp_place place;

	(void)state;
	assert_int_equal(memory_new_linear(VP_MIB, &memory), 0);
	memory->writable = false;
	vp_place_of(&place, &vp_a, memory);
	assert_int_equal(fake_verbs_mr(0)->access,
			 IBV_ACCESS_REMOTE_READ | IBV_ACCESS_RELAXED_ORDERING);
	vp_place_fini(&place);
}

static void memory_truncatable_without_staging_is_refused(void **state)
{
	struct memory guarded = {.kind = MEMORY_GUARDED, .length = 4096, .refs = 1};
	struct memory vm = {.kind = MEMORY_VM, .length = 4096, .refs = 1};
	struct xp_reg *reg;

	vp_begin(state);
	fake_verbs_rules()->reg_errno = ENOMEM; /* not even slots */
	assert_int_equal(vp_open(&vp_a, "mlx5_0"), 0);
	fake_verbs_rules()->reg_errno = 0;
	assert_true(verbs_transport.mem_reg(vp_a.xp, &guarded, &reg) < 0);
	assert_non_null(strstr(err_last()->text, "sealed memfd"));
	assert_true(verbs_transport.mem_reg(vp_a.xp, &vm, &reg) < 0);
	assert_non_null(strstr(err_last()->text, "kvd_adopt"));
	err_clear();
	vp_end(state);
}

static void memlock_limit_is_named(void **state)
{
	struct memory *memory;
	struct xp_reg *reg;

	(void)state;
	assert_int_equal(memory_new_linear(VP_MIB, &memory), 0);
	fake_verbs_rules()->reg_errno = ENOMEM;
	assert_true(verbs_transport.mem_reg(vp_a.xp, memory, &reg) < 0);
	assert_int_equal(err_last()->code, ERR_NOMEM);
	assert_non_null(strstr(err_last()->text, "LimitMEMLOCK"));
	err_clear();
	assert_int_equal(atomic_load(&memory->refs), 1);
	memory_unref(memory);
}

/* Rows over the seams: what crosses one becomes two requests, with two keys. */
static void region_larger_than_a_registration_is_split(void **state)
{
	const struct plan_run run = {.src = VP_MIB - 1000,
				     .dst = 3 * VP_MIB - 3000,
				     .len = 2000,
				     .count = 3,
				     .src_stride = VP_MIB,
				     .dst_stride = VP_MIB};
	struct vp_transfer x;

	vp_begin(state);
	fake_verbs_rules()->max_mr_bytes = VP_MIB;
	assert_int_equal(vp_open(&vp_a, "mlx5_0"), 0);
	assert_int_equal(vp_open(&vp_b, "mlx5_2"), 0);
	vp_join();
	vp_transfer_init(&x, XP_WRITE, &run, 1, 8 * VP_MIB);
	assert_int_equal(fake_verbs_mr(0)->length, VP_MIB);
	assert_int_equal(vp_post(&x), 0);
	vp_moved(&x);
	vp_transfer_fini(&x);
	vp_transfer_init(&x, XP_READ, &run, 1, 8 * VP_MIB);
	assert_int_equal(vp_post(&x), 0);
	vp_moved(&x);
	vp_transfer_fini(&x);
	vp_end(state);
}

static void region_of_too_many_pieces_is_refused(void **state)
{
	struct memory *memory;
	struct xp_reg *reg;

	vp_begin(state);
	fake_verbs_rules()->max_mr_bytes = 4096;
	assert_int_equal(vp_open(&vp_a, "mlx5_0"), 0);
	assert_int_equal(memory_new_linear(VP_MIB, &memory), 0);
	assert_true(verbs_transport.mem_reg(vp_a.xp, memory, &reg) < 0);
	assert_int_equal(err_last()->code, ERR_IMPORT);
	err_clear();
	memory_unref(memory);
	vp_end(state);
}

/* ---- memory of a GPU, which here is a file's ---- */

#define BEFORE 65536u

static struct memory *device_memory(uint64_t bytes, bool mapped)
{
	struct memory *memory;

	assert_int_equal(memory_new_linear(bytes + BEFORE, &memory), 0);
	memory->kind = MEMORY_DEVICE; /* its bytes are at `base`, which nobody looks at */
	memory->length = bytes;
	memory->address = mapped ? (uint64_t)(uintptr_t)memory->base + BEFORE : 0;
	memory->dmabuf_fd = memory->fd;
	memory->dmabuf_offset = BEFORE;
	return memory;
}

static void device_free(struct memory *memory)
{
	memory->kind = MEMORY_LINEAR;
	memory->dmabuf_fd = -1;
	memory_unref(memory);
}

static void device_is_registered_by_its_dmabuf_first(void **state)
{
	struct memory *memory = device_memory(VP_MIB, true);
	struct xp_reg *reg;

	(void)state;
	assert_int_equal(verbs_transport.mem_reg(vp_a.xp, memory, &reg), 0);
	assert_int_equal(fake_verbs_mr(0)->fd, memory->fd);
	assert_int_equal(fake_verbs_mr(0)->offset, BEFORE);
	assert_int_equal(fake_verbs_mr(0)->length, VP_MIB);
	assert_int_equal(fake_verbs_mr(0)->iova, memory->address);
	assert_true(fake_verbs_mr(0)->access & IBV_ACCESS_REMOTE_WRITE);
	verbs_transport.mem_dereg(reg);
	device_free(memory);
}

static void device_without_dmabuf_uses_peermem_or_is_refused(void **state)
{
	struct memory *mapped = device_memory(VP_MIB, true);
	struct memory *unmapped = device_memory(VP_MIB, false);
	struct xp_reg *reg;

	(void)state;
	fake_verbs_rules()->dmabuf_errno = EOPNOTSUPP;
	assert_int_equal(verbs_transport.mem_reg(vp_a.xp, mapped, &reg), 0);
	assert_int_equal(fake_verbs_mr(0)->fd, -1);
	assert_ptr_equal(fake_verbs_mr(0)->address, mapped->base + BEFORE);
	verbs_transport.mem_dereg(reg);
	assert_true(verbs_transport.mem_reg(vp_a.xp, unmapped, &reg) < 0);
	assert_int_equal(err_last()->code, ERR_IMPORT);
	assert_non_null(strstr(err_last()->text, "nvidia_peermem"));
	err_clear();
	device_free(mapped);
	device_free(unmapped);
}

/* `at` becomes a GPU's, between the two calls of one place. */
static void make_device(struct vp_place *place)
{
	place->memory->kind = MEMORY_DEVICE;
	place->memory->address = (uint64_t)(uintptr_t)place->memory->base;
}

static void device_is_a_source_and_never_inline(void **state)
{
	const struct plan_run run = {
		.len = 64, .count = 100, .src_stride = 128, .dst_stride = 192};
	struct vp_transfer x;

	(void)state;
	vp_transfer_init(&x, XP_WRITE, &run, 1, VP_MIB);
	make_device(&x.src);
	memset(fake_verbs_count(), 0, sizeof(struct fake_verbs_count));
	assert_int_equal(vp_post(&x), 0);
	vp_moved(&x);
	assert_true(fake_verbs_count()->inlined < 20); /* frames */
	x.src.memory->kind = MEMORY_LINEAR;
	vp_transfer_fini(&x);
}

/* ---- which port ---- */

static void open_fails(const char *rails, const char *words)
{
	assert_true(vp_open(&vp_a, rails) < 0);
	assert_int_equal(err_last()->code, ERR_REQUIRE);
	if (!strstr(err_last()->text, words))
		fail_msg("'%s', wanted '%s'", err_last()->text, words);
	err_clear();
}

static void rails_are_named_by_device_port_interface_or_address(void **state)
{
	static const char *const names[] = {"mlx5_1", "mlx5_1:1", "eth1", "10.9.1.1"};

	for (size_t i = 0; i < ARRAY_LEN(names); i++) {
		vp_begin(state);
		assert_int_equal(vp_open(&vp_a, names[i]), 0);
		assert_int_equal(vp_transport(&vp_a)->rail_count, 1);
		assert_string_equal(vp_transport(&vp_a)->rails[0].name, "mlx5_1:1");
		vp_end(state);
	}
}

static void rails_default_to_the_address_of_listen_or_to_all(void **state)
{
	vp_begin(state);
	snprintf(vp_config.listen, sizeof(vp_config.listen), "tcp://10.9.1.1:7400");
	assert_int_equal(vp_open(&vp_a, ""), 0);
	assert_int_equal(vp_transport(&vp_a)->rail_count, 1);
	assert_string_equal(vp_transport(&vp_a)->rails[0].name, "mlx5_1:1");
	snprintf(vp_config.listen, sizeof(vp_config.listen), "tcp://0.0.0.0:7400");
	assert_int_equal(vp_open(&vp_b, ""), 0);
	assert_int_equal(vp_transport(&vp_b)->rail_count, 4);
	vp_end(state);
}

static void rail_missing_is_refused(void **state)
{
	vp_begin(state);
	open_fails("mlx5_9", "'mlx5_9' is not an RDMA port");
	snprintf(vp_config.listen, sizeof(vp_config.listen), "tcp://192.168.1.1:7400");
	open_fails("", "name the ports in verbs_rails");
	vp_end(state);
}

static void rail_explains_its_gid_mtu_and_node(void **state)
{
	const char *about;

	vp_begin(state);
	assert_int_equal(vp_open(&vp_a, "mlx5_1"), 0);
	about = vp_a.xp->about;
	assert_non_null(strstr(about, "mlx5_1:1 10.9.1.1"));
	assert_non_null(strstr(about, "gid 1 (RoCE v2)")); /* not 0, version 1 */
	assert_non_null(strstr(about, "mtu 4096"));
	assert_non_null(strstr(about, "node 1"));
	vp_end(state);
}

/* Bytes of it went over the adapters of that node only. */
static void node_takes_its_rail(int node, unsigned int device)
{
	const struct plan_run run = {.len = 8 * VP_MIB, .count = 1};
	struct vp_transfer x;
	uint32_t used = 0;

	fake_verbs_rules()->memory_node = node;
	fake_verbs_hold(true);
	vp_transfer_init(&x, XP_WRITE, &run, 1, 8 * VP_MIB);
	assert_int_equal(vp_post(&x), 0);
	while (!used) {
		fake_verbs_step(1);
		vp_turn();
		if (x.op.impl)
			used = ((struct verbs_xfer *)x.op.impl)->used;
	}
	fake_verbs_hold(false);
	used = ((struct verbs_xfer *)x.op.impl)->used;
	for (uint32_t i = 0; i < vp_peer(&vp_a)->qp_count; i++)
		if (used & 1u << i)
			assert_int_equal(vp_peer(&vp_a)->qps[i].rail->index, device);
	vp_moved(&x);
	vp_transfer_fini(&x);
}

static void memory_of_a_node_uses_its_adapter(void **state)
{
	(void)state;
	assert_int_equal(vp_peer(&vp_a)->qp_count, 4);
	node_takes_its_rail(1, 1);
	node_takes_its_rail(0, 0);
}

static void memory_of_unknown_node_uses_all_adapters(void **state)
{
	struct vp_place place;

	(void)state;
	vp_place_init(&place, &vp_a, VP_MIB);
	assert_int_equal(((struct verbs_reg *)place.reg)->near, 3);
	vp_place_fini(&place);
}

#define SWITCH_A "pci0000:3a/0000:3a:00.0/0000:3b:00.0/"
#define GPU_A "0000:3d:00.0"

static void gpu_is_nearest_to_the_adapter_behind_its_switch(void **state)
{
	const struct verbs_lib *lib;

	vp_begin(state);
	verbs_lib_load(&lib);
	fake_verbs_bus("mlx5_4", SWITCH_A "0000:3b:01.0/0000:3c:00.0", 0);
	fake_verbs_bus("mlx5_5", "pci0000:3a/0000:3a:02.0/0000:5e:00.0", 0);
	fake_verbs_bus("mlx5_6", "pci0000:16/0000:16:00.0/0000:17:00.0", 0);
	fake_verbs_bus("mlx5_7", "pci0000:d7/0000:d7:00.0/0000:d8:00.0", 1);
	fake_verbs_bus(NULL, SWITCH_A "0000:3b:02.0/" GPU_A, 0);
	assert_int_equal(verbs_topo_pci(lib, GPU_A, "mlx5_4"), 0);
	assert_int_equal(verbs_topo_pci(lib, GPU_A, "mlx5_5"), 1);
	assert_int_equal(verbs_topo_pci(lib, GPU_A, "mlx5_6"), 2);
	assert_int_equal(verbs_topo_pci(lib, GPU_A, "mlx5_7"), 3);
	assert_int_equal(verbs_topo_pci(lib, "0000:99:00.0", "mlx5_4"), 3);
	vp_end(state);
}

static void memory_of_gpu_uses_nearest_rail(void **state)
{
	static struct verbs_transport transport;
	struct gpu_device device = {.pci = GPU_A};
	struct gpu_import import = {.device = &device};
	const struct memory memory = {.kind = MEMORY_DEVICE, .gpu = &import};

	vp_begin(state);
	verbs_lib_load(&transport.lib);
	fake_verbs_bus("mlx5_4", "pci0000:16/0000:16:00.0/0000:17:00.0", 1);
	fake_verbs_bus("mlx5_5", SWITCH_A "0000:3b:01.0/0000:3c:00.0", 0);
	fake_verbs_bus(NULL, SWITCH_A "0000:3b:02.0/" GPU_A, 0);
	transport.rail_count = transport.device_count = 2;
	for (uint32_t i = 0; i < 2; i++) {
		snprintf(transport.devices[i].name, sizeof(transport.devices[i].name),
			 "mlx5_%u", 4 + i);
		transport.rails[i].device = &transport.devices[i];
	}
	assert_int_equal(verbs_topo_near(&transport, &memory), 1u << 1);
	vp_end(state);
}

/* ---- what there is, for people ---- */

static void look_is(unsigned int number, bool used, const char *words)
{
	static struct verbs_look look;
	char why[160];

	verbs_look(&look);
	assert_int_equal(look.err.code, ERR_OK);
	assert_int_equal(look.count, 4);
	assert_int_equal(verbs_look_use(&look.ports[number], &vp_config, vp_a.xp, why,
					sizeof(why)),
			 used);
	if (!strstr(why, words))
		fail_msg("'%s', wanted '%s'", why, words);
}

static void probe_reports_use_of_each_port(void **state)
{
	vp_begin(state);
	look_is(0, false, "not open");
	assert_int_equal(vp_open(&vp_a, "mlx5_1"), 0);
	look_is(1, true, "rail 0");
	look_is(0, false, "verbs_rails does not name it");
	fake_verbs_port(2, false);
	look_is(2, false, "the port is down");
	fake_verbs_port(1, false);
	VP_AWAIT(vp_transport(&vp_a)->rails[0].down);
	look_is(1, true, "but the port is down");
	vp_config.verbs_rails[0] = '\0';
	look_is(0, false, "listen = tcp://0.0.0.0:7400");
	vp_end(state);
}

static void probe_reports_gids_and_addresses(void **state)
{
	static struct verbs_look look;

	vp_begin(state);
	verbs_look(&look);
	assert_string_equal(look.ports[3].device, "mlx5_3");
	assert_string_equal(look.ports[3].state, "active");
	assert_string_equal(look.ports[3].link, "Ethernet");
	assert_string_equal(look.ports[3].interface, "eth3");
	assert_string_equal(look.ports[3].address, "10.9.1.2");
	assert_int_equal(look.ports[3].mtu, 4096);
	assert_int_equal(look.ports[3].node, 1);
	assert_int_equal(look.ports[3].gid_count, 2);
	assert_string_equal(look.ports[3].gids[1].gid, "::ffff:10.9.1.2");
	assert_string_equal(look.ports[3].gids[1].type, "RoCE v2");
	vp_end(state);
}

int main(void)
{
#define ALONE(test) cmocka_unit_test(test)
#define PAIR(test) cmocka_unit_test_setup_teardown(test, vp_begin_pair, vp_end)
#define RAILS(test) cmocka_unit_test_setup_teardown(test, vp_begin_two_rails, vp_end)
	const struct CMUnitTest tests[] = {
		PAIR(every_shape_is_written),
		RAILS(every_shape_is_read),
		PAIR(rows_whole_at_remote_side_are_gathered),
		PAIR(rows_whole_at_remote_side_are_scattered_by_reads),
		PAIR(rows_adjacent_on_both_sides_are_one),
		PAIR(scattered_rows_share_doorbells),
		PAIR(rows_short_are_inline_in_writes_only),
		PAIR(transfer_large_uses_all_queue_pairs_with_marks),
		ALONE(queues_at_their_least_depth_never_overrun),
		ALONE(queues_too_short_are_refused),
		ALONE(connection_with_wrong_token_is_refused),
		PAIR(private_data_of_any_length_is_harmless),
		ALONE(token_wrong_in_reply_loses_the_peer),
		RAILS(memory_is_registered_once_a_device_with_relaxed_ordering),
		PAIR(memory_read_only_gets_no_write_right),
		ALONE(memory_truncatable_without_staging_is_refused),
		PAIR(memlock_limit_is_named),
		ALONE(region_larger_than_a_registration_is_split),
		ALONE(region_of_too_many_pieces_is_refused),
		PAIR(device_is_registered_by_its_dmabuf_first),
		PAIR(device_without_dmabuf_uses_peermem_or_is_refused),
		PAIR(device_is_a_source_and_never_inline),
		ALONE(rails_are_named_by_device_port_interface_or_address),
		ALONE(rails_default_to_the_address_of_listen_or_to_all),
		ALONE(rail_missing_is_refused),
		ALONE(rail_explains_its_gid_mtu_and_node),
		RAILS(memory_of_a_node_uses_its_adapter),
		RAILS(memory_of_unknown_node_uses_all_adapters),
		ALONE(gpu_is_nearest_to_the_adapter_behind_its_switch),
		ALONE(memory_of_gpu_uses_nearest_rail),
		ALONE(probe_reports_use_of_each_port),
		ALONE(probe_reports_gids_and_addresses),
	};

	cmocka_set_test_filter(getenv("KVD_TEST_FILTER"));
	return cmocka_run_group_tests_name("verbs", tests, NULL, NULL);
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * verbs with memory of GPUs: registered by a dma-buf or by its address, read and written
 * by adapters, or staged; over the fake driver, whose memory no processor may touch, and
 * fake adapters, whose writes into it land late unless they are read back. So a transfer
 * that says success, or failed, without having read back is seen here.
 */
#include "tests/lib/verbs_pair.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/base/err.h"
#include "gpu/gpu.h"
#include "tests/gpu/fake_cuda.h"
#include "tests/lib/gpu_owner.h"

#define FAKE(symbol) ((__typeof__(symbol) *)gpu_fake_symbol(#symbol))
#define BYTES (4 * VP_MIB)

/* Long rows and short ones, more slices than slots where they are packed. */
static const struct plan_run rows[] = {
	{.src = 64,
	 .dst = 3,
	 .len = 256,
	 .count = 1000,
	 .src_stride = 512,
	 .dst_stride = 320},
	{.src = VP_MIB,
	 .dst = VP_MIB + 1,
	 .len = 70001,
	 .count = 30,
	 .src_stride = 70400,
	 .dst_stride = 70002},
	{.src = 0, .dst = 3 * VP_MIB + 400000, .len = 600000, .count = 1},
};

/* GPU memory as engines hand it over: a handle of CUDA IPC, an fd of cuMemCreate, and a
 * dma-buf of the latter. */
enum kind { KIND_HOST, KIND_IPC, KIND_VMM, KIND_DMABUF, KINDS };

struct spot {
	struct gpu_owner owner;
	struct vp_place place;
};

static const enum xp_kind both[] = {XP_WRITE, XP_READ};

static void spot_make(struct spot *spot, enum kind kind)
{
	int r;

	*spot = (struct spot){.owner.pid = 0};
	if (kind == KIND_HOST) {
		assert_int_equal(memory_new_linear(BYTES, &spot->place.memory), 0);
		spot->place.view = spot->place.memory->base;
		return;
	}
	assert_true(gpu_owner_start(&spot->owner,
				    kind == KIND_IPC ? GPU_HANDLE_IPC : GPU_HANDLE_VMM, 0,
				    BYTES));
	spot->place.view = spot->owner.view;
	if (kind == KIND_DMABUF)
		r = memory_import_dmabuf(spot->owner.file, 0, BYTES, &spot->place.memory);
	else
		r = memory_import_device(vp_gpu, 1, &spot->owner.handle, 0, BYTES, true,
					 &spot->place.memory);
	assert_int_equal(r, 0);
}

static void spot_end(struct spot *spot)
{
	if (spot->owner.pid)
		gpu_owner_end(&spot->owner);
}

struct stage {
	struct spot src, dst;
	struct vp_transfer x;
};

static void stage_make(struct stage *stage, enum xp_kind kind, enum kind src,
		       enum kind dst)
{
	spot_make(&stage->src, src);
	spot_make(&stage->dst, dst);
	vp_transfer_with(&stage->x, kind, rows, ARRAY_LEN(rows), &stage->src.place,
			 &stage->dst.place);
}

static void stage_end(struct stage *stage)
{
	vp_transfer_fini(&stage->x);
	spot_end(&stage->src);
	spot_end(&stage->dst);
}

/* ---- begin and end ---- */

static void gpu_begin(void)
{
	char path[256];

	assert_int_equal(gpu_new(gpu_fake_path("", path), "auto", &vp_gpu), 0);
	assert_int_equal(gpu_tune(vp_gpu, "off", 0, 2), 0);
	assert_int_equal(gpu_start(vp_gpu), 0);
	FAKE(fake_cuda_fail)(NULL, 0, 0);
}

static int begin(void **state, bool rails)
{
	gpu_begin();
	if (rails)
		vp_begin_two_rails(state);
	else
		vp_begin_pair(state);
	fake_verbs_gpu(FAKE(fake_cuda_file));
	return 0;
}

static int begin_pair(void **state)
{
	return begin(state, false);
}

static int begin_rails(void **state)
{
	return begin(state, true);
}

static int end(void **state)
{
	fake_verbs_free_wait(false); /* of a case that failed: it would hang here */
	fake_verbs_stall_loopback(false);
	fake_verbs_land();
	vp_end(state);
	assert_int_equal(FAKE(fake_cuda_live)(), 0);
	gpu_free(vp_gpu);
	vp_gpu = NULL;
	return 0;
}

/* ---- direct ---- */

static const char *pieces_are(const struct vp_place *place)
{
	return ((struct verbs_reg *)place->reg)->pieces ? "direct" : "staged";
}

static void every_pair_is_moved_and_visible_when_reported(void **state)
{
	struct stage stage;

	(void)state;
	fake_verbs_rules()->peermem = true;
	for (unsigned int i = 0; i < 2u * KINDS * KINDS; i++) {
		enum kind src = (enum kind)(i / 2 % KINDS),
			  dst = (enum kind)(i / 2 / KINDS);

		stage_make(&stage, both[i % 2], src, dst);
		assert_string_equal(pieces_are(&stage.x.src), "direct");
		assert_string_equal(pieces_are(&stage.x.dst), "direct");
		assert_int_equal(vp_post(&stage.x), 0);
		vp_moved(&stage.x);
		assert_false(stage.x.op.way.packed);
		assert_int_equal(fake_verbs_land(), 0);
		stage_end(&stage);
	}
	assert_int_equal(vp_a.lost + vp_b.lost, 0);
	assert_int_equal(fake_verbs_count()->unseen, 0);
}

static void memory_is_registered_by_first_working_method(void **state)
{
	static const struct {
		enum kind kind;
		int dmabuf_errno;
		bool peermem;
		const char *fails; /* a call of the driver */
		const char *way;
		bool by_fd;
	} ways[] = {
		{KIND_VMM, 0, false, NULL, "direct", true},
		{KIND_VMM, EOPNOTSUPP, true, NULL, "direct", false},
		{KIND_VMM, EOPNOTSUPP, false, NULL, "staged", false},
		{KIND_VMM, 0, true, "cuMemGetHandleForAddressRange", "direct", false},
		{KIND_VMM, 0, false, "cuMemGetHandleForAddressRange", "staged", false},
		{KIND_VMM, 0, false, "cuDeviceGetAttribute", "staged", false},
		{KIND_IPC, 0, true, NULL, "direct",
		 false}, /* the driver makes no dma-buf */
		{KIND_IPC, 0, false, NULL, "staged", false},
		{KIND_DMABUF, 0, false, NULL, "direct", true},
	};
	struct stage stage;

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(ways); i++) {
		fake_verbs_rules()->dmabuf_errno = ways[i].dmabuf_errno;
		fake_verbs_rules()->peermem = ways[i].peermem;
		if (ways[i].fails)
			FAKE(fake_cuda_fail)(ways[i].fails, 1, CU_ERROR_NOT_SUPPORTED);
		stage_make(&stage, XP_WRITE, KIND_HOST, ways[i].kind);
		assert_string_equal(pieces_are(&stage.x.dst), ways[i].way);
		if (strcmp(ways[i].way, "direct") == 0)
			assert_int_equal(fake_verbs_mr(0)->fd >= 0, ways[i].by_fd);
		assert_int_equal(vp_post(&stage.x), 0);
		vp_moved(&stage.x);
		assert_int_equal(stage.x.op.way.staged,
				 strcmp(ways[i].way, "staged") == 0);
		vp_says(&stage.x, stage.x.op.way.staged, stage.x.op.used.descriptors,
			vp_b.used.descriptors);
		stage_end(&stage);
	}
}

static void dmabuf_without_adapter_is_refused_by_name(void **state)
{
	struct spot spot;
	struct xp_reg *reg;

	(void)state;
	spot_make(&spot, KIND_DMABUF);
	fake_verbs_rules()->dmabuf_errno = EOPNOTSUPP;
	assert_true(verbs_transport.mem_reg(vp_a.xp, spot.place.memory, &reg) < 0);
	assert_int_equal(err_last()->code, ERR_IMPORT);
	assert_non_null(strstr(err_last()->text, "mlx5_0"));
	err_clear();
	memory_unref(spot.place.memory);
	spot_end(&spot);
}

static void memory_large_is_split_and_visible(void **state)
{
	struct stage stage;

	(void)state;
	vp_end(state);
	vp_begin(state);
	fake_verbs_rules()->max_mr_bytes = BYTES / 4;
	assert_int_equal(vp_open(&vp_a, "mlx5_0"), 0);
	assert_int_equal(vp_open(&vp_b, "mlx5_2"), 0);
	vp_join();
	for (size_t i = 0; i < ARRAY_LEN(both); i++) {
		stage_make(&stage, both[i], KIND_VMM, KIND_VMM);
		assert_int_equal(((struct verbs_reg *)stage.x.dst.reg)->pieces, 4);
		assert_int_equal(vp_post(&stage.x), 0);
		vp_moved(&stage.x);
		stage_end(&stage);
	}
}

/* Large enough for all queue pairs. */
static const struct plan_run wide = {
	.len = VP_MIB, .count = 8, .src_stride = VP_MIB, .dst_stride = VP_MIB};

static void wide_make(struct stage *stage, enum xp_kind kind)
{
	const uint64_t bytes = 8 * VP_MIB;

	*stage = (struct stage){.src.owner.pid = 0};
	assert_true(gpu_owner_start(&stage->dst.owner, GPU_HANDLE_VMM, 0, bytes));
	assert_int_equal(memory_import_device(vp_gpu, 1, &stage->dst.owner.handle, 0,
					      bytes, true, &stage->dst.place.memory),
			 0);
	stage->dst.place.view = stage->dst.owner.view;
	assert_int_equal(memory_new_linear(bytes, &stage->src.place.memory), 0);
	stage->src.place.view = stage->src.place.memory->base;
	vp_transfer_with(&stage->x, kind, &wide, 1, &stage->src.place, &stage->dst.place);
}

static void rails_with_writes_are_read_back(void **state)
{
	struct stage stage;

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(both); i++) {
		uint64_t reads = fake_verbs_count()->reads;

		wide_make(&stage, both[i]);
		assert_int_equal(vp_post(&stage.x), 0);
		vp_moved(&stage.x);
		assert_int_equal(fake_verbs_land(), 0);
		if (both[i] == XP_WRITE) /* one on each rail */
			assert_int_equal(fake_verbs_count()->reads - reads, 2);
		stage_end(&stage);
	}
}

/* What it wrote is under way like all else, though the bytes come once more. */
static void rail_lost_meanwhile_is_read_back(void **state)
{
	struct stage stage;

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(both); i++) {
		wide_make(&stage, both[i]);
		fake_verbs_hold(true);
		assert_int_equal(vp_post(&stage.x), 0);
		while (stage.x.op.moved < 2 * VP_MIB) {
			fake_verbs_step(1);
			vp_turn();
		}
		fake_verbs_fail_next(1, IBV_WC_RETRY_EXC_ERR);
		fake_verbs_hold(false);
		vp_moved(&stage.x);
		assert_int_equal(vp_a.lost + vp_b.lost, 0);
		assert_true(vp_peer(&vp_a)->rails_lost);
		assert_int_equal(fake_verbs_land(), 0);
		stage_end(&stage);
		vp_close_peer(&vp_a);
		vp_close_peer(&vp_b);
		vp_join();
	}
}

static void host_memory_is_not_read_back(void **state)
{
	struct stage stage;

	(void)state;
	stage_make(&stage, XP_WRITE, KIND_VMM, KIND_HOST);
	memset(fake_verbs_count(), 0, sizeof(*fake_verbs_count()));
	assert_int_equal(vp_post(&stage.x), 0);
	vp_moved(&stage.x);
	assert_int_equal(fake_verbs_count()->reads, 0);
	stage_end(&stage);
}

static unsigned int queue_pairs(void)
{
	return fake_verbs_qps(0) + fake_verbs_qps(2);
}

static void loopback_is_created_on_first_use_and_kept(void **state)
{
	unsigned int before = queue_pairs();
	struct stage stage;

	(void)state;
	stage_make(&stage, XP_WRITE, KIND_HOST, KIND_VMM);
	assert_int_equal(queue_pairs(), before);
	for (unsigned int i = 0; i < 3; i++) {
		assert_int_equal(vp_post(&stage.x), 0);
		vp_moved(&stage.x);
		assert_int_equal(queue_pairs(), before + 1);
	}
	stage_end(&stage);
}

/* ---- what fails ---- */

/* As at the beginning: no loop-back is there. */
static void begin_again(void **state)
{
	vp_end(state);
	vp_begin_pair(state);
	fake_verbs_gpu(FAKE(fake_cuda_file));
}

static void loopback_call_failed_fails_its_transfer_only(void **state)
{
	struct stage stage;
	unsigned int n;
	bool failed;

	for (size_t i = 0; i < ARRAY_LEN(both); i++) {
		for (n = 1, failed = true; failed; n++) {
			begin_again(state);
			stage_make(&stage, both[i], KIND_HOST, KIND_VMM);
			fake_verbs_strike(n);
			assert_int_equal(vp_post(&stage.x), 0);
			VP_AWAIT(stage.x.done && vp_b.dones == vp_b.requests);
			fake_verbs_strike(0);
			failed = stage.x.op.result != 0;
			if (failed)
				vp_failed(&stage.x, ERR_IO,
					  both[i] == XP_WRITE ? "mlx5_2:1" : "mlx5_0:1");
			assert_true(fake_verbs_land() == 0 || failed);
			assert_int_equal(vp_post(&stage.x), 0); /* it is made again */
			vp_moved(&stage.x);
			stage_end(&stage);
			assert_int_equal(vp_a.lost + vp_b.lost, 0);
		}
		assert_true(n > 11); /* so many there are */
	}
}

static void read_failed_fails_transfer_with_port_name(void **state)
{
	struct stage stage;

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(both); i++) {
		const char *port = both[i] == XP_WRITE ? "mlx5_2:1" : "mlx5_0:1";

		stage_make(&stage, both[i], KIND_HOST, KIND_VMM);
		fake_verbs_fail_loopback(both[i] == XP_WRITE ? 2 : 0, IBV_WC_REM_OP_ERR);
		assert_int_equal(vp_post(&stage.x), 0);
		vp_failed(&stage.x, ERR_IO, "reading back");
		assert_non_null(strstr(stage.x.op.err.text, port));
		VP_AWAIT(vp_b.dones == vp_b.requests);
		assert_int_equal(vp_b.failures, i + 1); /* both sides know */
		assert_int_equal(vp_a.lost + vp_b.lost, 0);
		fake_verbs_land();
		assert_int_equal(vp_post(&stage.x), 0);
		vp_moved(&stage.x);
		stage_end(&stage);
	}
}

static void read_failed_leaves_later_reads_alone(void **state)
{
	struct vp_transfer xs[4];
	unsigned int failed = 0;
	struct stage stage;

	(void)state;
	stage_make(&stage, XP_WRITE, KIND_HOST, KIND_VMM);
	fake_verbs_stall_loopback(true);
	for (size_t i = 0; i < ARRAY_LEN(xs); i++) {
		xs[i] = stage.x;
		xs[i].op.owner = &xs[i];
		assert_int_equal(vp_post(&xs[i]), 0);
	}
	VP_AWAIT(fake_verbs_outstanding() == ARRAY_LEN(xs));
	fake_verbs_fail_loopback(2, IBV_WC_REM_OP_ERR);
	fake_verbs_stall_loopback(false);
	for (size_t i = 0; i < ARRAY_LEN(xs); i++) {
		VP_AWAIT(xs[i].done);
		failed += xs[i].op.result != 0;
	}
	assert_int_equal(failed, 1);
	stage_end(&stage);
}

static void read_without_an_answer_fails_by_the_fence_s_time(void **state)
{
	struct stage stage;

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(both); i++) {
		stage_make(&stage, both[i], KIND_HOST, KIND_VMM);
		fake_verbs_stall_loopback(true);
		assert_int_equal(vp_post(&stage.x), 0);
		vp_failed(&stage.x, ERR_IO, "timed out");
		VP_AWAIT(vp_b.dones == vp_b.requests);
		assert_int_equal(vp_a.lost + vp_b.lost, 0);
		fake_verbs_stall_loopback(false);
		fake_verbs_land();
		assert_int_equal(vp_post(&stage.x), 0);
		vp_moved(&stage.x);
		stage_end(&stage);
	}
}

static void fence_set(uint64_t fence_ns)
{
	vp_transport(&vp_a)->net.fence_ns = vp_transport(&vp_b)->net.fence_ns = fence_ns;
}

static void read_abandoned_counts_until_queue_pair_is_gone(void **state)
{
	const uint64_t fence_ns = vp_transport(&vp_a)->net.fence_ns;
	struct stage stage;

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(both); i++) {
		stage_make(&stage, both[i], KIND_HOST, KIND_VMM);
		assert_int_equal(vp_post(&stage.x), 0);
		vp_moved(&stage.x); /* the queue pair is there: to make it takes time, too
				     */
		fence_set(50 * LOOP_NS_PER_MS);
		fake_verbs_stall_loopback(true);
		fake_verbs_free_wait(true);
		assert_int_equal(vp_post(&stage.x), 0);
		VP_AWAIT(fake_verbs_free_waiting() == 1);
		vp_spin_ms(20);
		assert_false(stage.x.done);
		fake_verbs_free_wait(false);
		vp_failed(&stage.x, ERR_IO, "timed out");
		VP_AWAIT(vp_b.dones == vp_b.requests);
		fake_verbs_stall_loopback(false);
		fake_verbs_land();
		fence_set(fence_ns);
		stage_end(&stage);
	}
}

/* A peer that goes, or a transport, does not leave while a byte may still land. */
static void peer_closing_waits_for_read_back(void **state)
{
	struct stage stage;

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(both); i++) {
		struct vp_node *writer = both[i] == XP_WRITE ? &vp_b : &vp_a;

		stage_make(&stage, both[i], KIND_HOST, KIND_VMM);
		fake_verbs_stall_loopback(true);
		assert_int_equal(vp_post(&stage.x), 0);
		VP_AWAIT(fake_verbs_outstanding() == 1);
		writer->closed = false;
		vp_close_begin(writer);
		vp_spin_ms(50);
		assert_false(writer->closed);
		assert_int_equal(both[i] == XP_WRITE ? vp_b.dones < vp_b.requests
						     : !stage.x.done,
				 1);
		fake_verbs_stall_loopback(false);
		VP_AWAIT(writer->closed);
		assert_int_equal(fake_verbs_land(), 0);
		vp_still(&stage.x);
		VP_AWAIT(stage.x.done);
		stage_end(&stage);
		vp_close_peer(&vp_a);
		vp_close_peer(&vp_b);
		vp_join();
	}
}

/* ---- stopping ---- */

static void abort_after(enum xp_kind kind, enum kind dst, unsigned int steps,
			bool by_answerer)
{
	unsigned int dones = vp_b.dones;
	struct stage stage;
	struct err why;
	bool told = false;

	err_set(&why, ERR_ABORTED, "the user went away");
	stage_make(&stage, kind, KIND_HOST, dst);
	fake_verbs_hold(true);
	assert_int_equal(vp_post(&stage.x), 0);
	for (unsigned int i = 0; i < steps; i++) {
		fake_verbs_step(1);
		vp_turn();
	}
	if (by_answerer && vp_b.in)
		verbs_transport.revoke(vp_b.in, &why);
	else
		verbs_transport.cancel(&stage.x.op, &why);
	while (!told) {
		fake_verbs_step(1);
		vp_turn();
		told = kind == XP_READ ? stage.x.done : vp_b.dones > dones;
		if (kind == XP_WRITE && stage.x.done && vp_b.requests == dones)
			break; /* it was never asked */
	}
	vp_still(&stage.x);
	VP_AWAIT(stage.x.done && vp_b.dones == vp_b.requests);
	if (stage.x.op.result)
		vp_failed(&stage.x, ERR_ABORTED, "the user went away");
	assert_int_equal(vp_a.lost + vp_b.lost, 0);
	stage_end(&stage);
}

static void abort_at_any_step_is_quiesced(void **state)
{
	(void)state;
	vp_transport(&vp_a)->net.fence_ns = vp_transport(&vp_b)->net.fence_ns =
		VP_WAIT_NS;
	for (unsigned int steps = 0; steps < 40; steps++) {
		/* staged, and written by adapters */
		abort_after(both[steps & 1], KIND_IPC, steps, steps & 2);
		abort_after(both[steps & 1], KIND_VMM, steps, steps & 2);
	}
	assert_int_equal(fake_verbs_count()->unseen, 0);
}

static void run_until_half(struct stage *stage, enum xp_kind kind, enum kind src,
			   enum kind dst)
{
	stage_make(stage, kind, src, dst);
	fake_verbs_hold(true);
	assert_int_equal(vp_post(&stage->x), 0);
	while (stage->x.op.moved < VP_MIB) {
		fake_verbs_step(1);
		vp_turn();
	}
}

static void peer_lost_in_the_middle_is_quiesced(void **state)
{
	struct stage stage;

	(void)state;
	for (unsigned int i = 0; i < 4; i++) {
		run_until_half(&stage, both[i & 1], KIND_HOST,
			       i & 2 ? KIND_VMM : KIND_IPC);
		vp_close_begin(&vp_a);
		while (!stage.x.done) {
			fake_verbs_step(1);
			vp_turn();
		}
		assert_int_not_equal(stage.x.op.result, 0);
		if (both[i & 1] == XP_READ)
			vp_still(&stage.x);
		fake_verbs_hold(false);
		VP_AWAIT(vp_b.lost == 1 && vp_a.closed);
		vp_still(&stage.x);
		stage_end(&stage);
		vp_close_peer(&vp_b);
		vp_join();
	}
	assert_int_equal(fake_verbs_count()->unseen, 0);
}

/* ---- staged ---- */

static void staged_pair_of_every_kind_moves(void **state)
{
	struct stage stage;

	(void)state;
	fake_verbs_rules()->dmabuf_errno = EOPNOTSUPP;
	for (unsigned int i = 0; i < 2u * 3 * 3; i++) {
		enum kind src = (enum kind)(i / 2 % 3), dst = (enum kind)(i / 2 / 3);
		bool staged = src != KIND_HOST || dst != KIND_HOST;

		stage_make(&stage, both[i % 2], src, dst);
		assert_int_equal(vp_post(&stage.x), 0);
		vp_moved(&stage.x);
		assert_int_equal(stage.x.op.way.staged, staged);
		assert_int_equal(fake_verbs_land(), 0);
		stage_end(&stage);
	}
	assert_int_equal(vp_a.lost + vp_b.lost, 0);
}

static void driver_call_failed_fails_its_transfer_only(void **state)
{
	static const char *const calls[] = {
		"cuMemcpyAsync",  "cuMemcpy2DAsync_v2",
		"cuEventRecord",  "cuEventSynchronize",
		"execute",	  "cuMemHostRegister_v2",
		"cuMemHostAlloc", "cuStreamCreateWithPriority"};
	struct stage stage;

	(void)state;
	fake_verbs_rules()->dmabuf_errno = EOPNOTSUPP;
	for (size_t i = 0; i < 2 * ARRAY_LEN(calls); i++) {
		stage_make(&stage, both[i & 1], i & 1 ? KIND_HOST : KIND_VMM,
			   i & 1 ? KIND_VMM : KIND_HOST);
		FAKE(fake_cuda_fail)(calls[i / 2], 1, CU_ERROR_OUT_OF_MEMORY);
		assert_int_equal(vp_post(&stage.x), 0);
		VP_AWAIT(stage.x.done && vp_b.dones == vp_b.requests);
		assert_int_equal(vp_a.lost + vp_b.lost, 0);
		if (stage.x.op.result == 0)
			vp_moved(&stage.x); /* it was not called, or there is another way
					     */
		FAKE(fake_cuda_fail)(NULL, 0, 0);
		stage_end(&stage);
	}
}

static void exporter_dead_fails_its_transfers_only(void **state)
{
	struct stage stage;

	(void)state;
	for (unsigned int i = 0; i < 8; i++) {
		bool source = i & 2;
		enum kind kind = i & 4 ? KIND_VMM : KIND_IPC;
		struct gpu_owner *owner;

		run_until_half(&stage, both[i & 1], source ? kind : KIND_HOST,
			       source ? KIND_HOST : kind);
		owner = source ? &stage.src.owner : &stage.dst.owner;
		gpu_owner_kill(owner);
		fake_verbs_hold(false);
		VP_AWAIT(stage.x.done && vp_b.dones == vp_b.requests);
		assert_int_equal(vp_a.lost + vp_b.lost, 0);
		if (stage.x.op.result == 0) /* a mapping may outlive who made it */
			vp_moved(&stage.x);
		stage_end(&stage);
	}
	assert_int_equal(fake_verbs_count()->unseen, 0);
}

#define PAIR(test) cmocka_unit_test_setup_teardown(test, begin_pair, end)
#define RAILS(test) cmocka_unit_test_setup_teardown(test, begin_rails, end)

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		PAIR(every_pair_is_moved_and_visible_when_reported),
		PAIR(memory_is_registered_by_first_working_method),
		PAIR(dmabuf_without_adapter_is_refused_by_name),
		PAIR(memory_large_is_split_and_visible),
		RAILS(rails_with_writes_are_read_back),
		RAILS(rail_lost_meanwhile_is_read_back),
		PAIR(host_memory_is_not_read_back),
		PAIR(loopback_is_created_on_first_use_and_kept),
		PAIR(loopback_call_failed_fails_its_transfer_only),
		PAIR(read_failed_fails_transfer_with_port_name),
		PAIR(read_failed_leaves_later_reads_alone),
		PAIR(read_without_an_answer_fails_by_the_fence_s_time),
		PAIR(read_abandoned_counts_until_queue_pair_is_gone),
		PAIR(peer_closing_waits_for_read_back),
		PAIR(abort_at_any_step_is_quiesced),
		PAIR(peer_lost_in_the_middle_is_quiesced),
		PAIR(staged_pair_of_every_kind_moves),
		PAIR(driver_call_failed_fails_its_transfer_only),
		PAIR(exporter_dead_fails_its_transfers_only),
	};

	gpu_owner_main(argc, argv);
	cmocka_set_test_filter(getenv("KVD_TEST_FILTER"));
	return cmocka_run_group_tests_name("verbs gpu", tests, NULL, NULL);
}

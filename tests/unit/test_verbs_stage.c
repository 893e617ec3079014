/* SPDX-License-Identifier: Apache-2.0 */
/*
 * verbs with memory that no adapter can have (vm, guarded): every pair of kinds, pushed
 * and pulled, through slots; that the record says so; that slots are registered beside
 * the loop; and that slices keep every promise when a transfer stops, an owner dies, or
 * the other side lies. Memory of GPUs is in test_verbs_gpu.
 */
#include "tests/lib/file.h"
#include "tests/lib/gates.h"
#include "tests/lib/verbs_pair.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/base/err.h"
#include "daemon/base/log.h"

#define BYTES (5 * VP_MIB)

/* 3 MiB and something: more slices than there are slots. */
static const struct plan_run rows[] = {
	{.src = 64,
	 .dst = 3,
	 .len = 256,
	 .count = 4000,
	 .src_stride = 512,
	 .dst_stride = 320},
	{.src = 3 * VP_MIB,
	 .dst = 2 * VP_MIB + 1,
	 .len = 70001,
	 .count = 25,
	 .src_stride = 70400,
	 .dst_stride = 70002},
	{.src = 2200000, .dst = 4 * VP_MIB, .len = 700000, .count = 1},
};

enum kind { KIND_DIRECT, KIND_GUARDED, KIND_VM, KINDS };

/* an engine's memory, and the test's view of it */
struct spot {
	struct vp_place place;
	int fd;
};

static void spot_make(struct spot *spot, enum kind kind)
{
	int r;

	spot->fd = memfd_create("spot", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	assert_int_equal(file_fill(spot->fd, BYTES), 0);
	spot->place.view =
		mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, spot->fd, 0);
	assert_ptr_not_equal(spot->place.view, MAP_FAILED);
	if (kind == KIND_VM)
		r = vm_import_pid(getpid(), (uintptr_t)spot->place.view, BYTES,
				  &spot->place.memory);
	else if (kind == KIND_GUARDED)
		r = memory_import_shm_fd(spot->fd, 0, BYTES, true, &spot->place.memory);
	else
		r = memory_import_memfd(spot->fd, 0, BYTES, true, &spot->place.memory);
	assert_int_equal(r, 0);
}

static void spot_end(struct spot *spot)
{
	munmap(spot->place.view, BYTES);
	close(spot->fd);
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

static const enum xp_kind both[] = {XP_WRITE, XP_READ};

/* ---- they move ---- */

static void every_pair_of_kinds_moves_by_push_and_by_pull(void **state)
{
	struct stage stage;

	(void)state;
	for (unsigned int i = 0; i < 2u * KINDS * KINDS; i++) {
		enum kind src = (enum kind)(i / 2 % KINDS),
			  dst = (enum kind)(i / 2 / KINDS);
		bool staged = src != KIND_DIRECT || dst != KIND_DIRECT;

		stage_make(&stage, both[i % 2], src, dst);
		assert_int_equal(vp_post(&stage.x), 0);
		vp_moved(&stage.x);
		assert_int_equal(stage.x.op.way.staged, staged);
		assert_int_equal(stage.x.op.way.packed, staged);
		vp_says(&stage.x, staged, stage.x.op.used.descriptors,
			vp_b.used.descriptors);
		assert_int_equal(vp_b.used.descriptors > 0, staged);
		assert_true(!staged || stage.x.op.way.row_bytes);
		stage_end(&stage);
	}
	assert_int_equal(vp_a.lost + vp_b.lost, 0);
}

static void responder_record_has_staged(void **state)
{
	struct stage stage;

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(both); i++) {
		stage_make(&stage, both[i], KIND_VM, KIND_DIRECT);
		fake_verbs_hold(true);
		assert_int_equal(vp_post(&stage.x), 0);
		while (!vp_b.in || !vp_b.in->way.staged) {
			fake_verbs_step(1);
			vp_turn();
		}
		assert_true(vp_b.in->way.packed && vp_b.in->way.row_bytes);
		fake_verbs_hold(false);
		vp_moved(&stage.x);
		stage_end(&stage);
	}
}

static void key_of_staged_memory_has_no_address(void **state)
{
	struct stage stage;

	(void)state;
	stage_make(&stage, XP_WRITE, KIND_VM, KIND_DIRECT);
	assert_int_equal(((struct verbs_key *)stage.x.src.key)->remote.pieces, 0);
	assert_int_equal(((struct verbs_key *)stage.x.src.key)->remote.address, 0);
	assert_int_equal(((struct verbs_key *)stage.x.src.key)->remote.length, BYTES);
	stage_end(&stage);
}

static void many_at_once_share_the_slots(void **state)
{
	struct vp_transfer xs[6];
	struct stage stage;

	(void)state;
	stage_make(&stage, XP_READ, KIND_VM, KIND_GUARDED);
	for (size_t i = 0; i < ARRAY_LEN(xs); i++) {
		xs[i] = stage.x;
		xs[i].op.owner = &xs[i];
		assert_int_equal(vp_post(&xs[i]), 0);
	}
	for (size_t i = 0; i < ARRAY_LEN(xs); i++)
		vp_moved(&xs[i]);
	stage_end(&stage);
}

/* ---- slots ---- */

static void slots_are_registered_off_the_loop(void **state)
{
	struct stage stage;
	struct vp_transfer direct;
	const struct plan_run run = {.len = 4096, .count = 1};

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(both); i++) {
		stage_make(&stage, both[i], KIND_DIRECT, KIND_VM);
		vp_transfer_init(&direct, XP_WRITE, &run, 1, 8192);
		fake_verbs_reg_wait(true);
		assert_int_equal(vp_post(&stage.x), 0);
		VP_AWAIT(fake_verbs_reg_waiting() == 1);
		/* meanwhile others move */
		VP_AWAIT(vp_b.requests > vp_b.dones);
		assert_int_equal(vp_post(&direct), 0);
		VP_AWAIT(direct.done);
		assert_int_equal(direct.op.result, 0);
		assert_int_equal(stage.x.done, 0);
		fake_verbs_reg_wait(false);
		vp_moved(&stage.x);
		vp_transfer_fini(&direct);
		stage_end(&stage);
		vp_close_peer(&vp_a);
		vp_close_peer(&vp_b);
		vp_join();
	}
}

static void peer_closing_during_slot_setup_leaks_nothing(void **state)
{
	struct stage stage;

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(both); i++) {
		stage_make(&stage, both[i], KIND_DIRECT, KIND_VM);
		fake_verbs_reg_wait(true);
		assert_int_equal(vp_post(&stage.x), 0);
		VP_AWAIT(fake_verbs_reg_waiting() == 1);
		vp_close_peer(&vp_a);
		vp_close_peer(&vp_b);
		assert_int_equal(stage.x.done, 1);
		fake_verbs_reg_wait(false);
		vp_still(&stage.x);
		stage_end(&stage);
		vp_join();
	}
}

static void slots_exhausted_fail_the_transfer_only(void **state)
{
	struct stage stage;

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(both); i++) {
		stage_make(&stage, both[i], KIND_DIRECT, KIND_VM);
		fake_verbs_rules()->reg_errno = ENOMEM;
		assert_int_equal(vp_post(&stage.x), 0);
		vp_failed(&stage.x, ERR_NOMEM, "LimitMEMLOCK");
		VP_AWAIT(vp_b.dones == vp_b.requests);
		fake_verbs_rules()->reg_errno = 0;
		assert_int_equal(vp_post(&stage.x), 0);
		vp_moved(&stage.x);
		stage_end(&stage);
		vp_close_peer(&vp_a);
		vp_close_peer(&vp_b);
		vp_join();
	}
}

static int begin_slotless(void **state)
{
	vp_begin(state);
	assert_int_equal(vp_open(&vp_a, "mlx5_0"), 0);
	fake_verbs_rules()->reg_errno = ENOMEM;
	assert_int_equal(vp_open(&vp_b, "mlx5_2"), 0); /* says that it stages nothing */
	fake_verbs_rules()->reg_errno = 0;
	vp_join();
	return 0;
}

static void peer_without_staging_refuses_by_name(void **state)
{
	struct stage stage;

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(both); i++) {
		bool write = both[i] == XP_WRITE;

		stage_make(&stage, both[i], write ? KIND_VM : KIND_DIRECT,
			   write ? KIND_DIRECT : KIND_VM);
		assert_int_equal(vp_post(&stage.x), 0);
		vp_failed(&stage.x, ERR_REQUIRE, "no staging buffers");
		VP_AWAIT(vp_b.dones == vp_b.requests);
		stage_end(&stage);
	}
	assert_int_equal(vp_a.lost + vp_b.lost, 0);
}

/* ---- stopping ---- */

/* Stopped after so many steps of the wire: what is told last is told of still memory. */
static void abort_after(enum xp_kind kind, unsigned int steps, bool by_answerer)
{
	unsigned int dones = vp_b.dones;
	struct stage stage;
	struct err why;
	bool told = false;

	err_set(&why, ERR_ABORTED, "the user went away");
	stage_make(&stage, kind, KIND_VM, KIND_VM);
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
		/* the destination's side: its memory is somebody else's now */
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

static void abort_at_any_step_is_quiesced_and_returns_slots(void **state)
{
	struct stage stage;

	(void)state;
	vp_transport(&vp_a)->net.fence_ns = vp_transport(&vp_b)->net.fence_ns =
		VP_WAIT_NS;
	for (unsigned int steps = 0; steps < 60; steps++) {
		abort_after(XP_READ, steps, steps & 1);
		abort_after(XP_WRITE, steps, !(steps & 1));
	}
	for (size_t i = 0; i < ARRAY_LEN(both); i++) { /* all slots are there */
		stage_make(&stage, both[i], KIND_VM, KIND_VM);
		assert_int_equal(vp_post(&stage.x), 0);
		vp_moved(&stage.x);
		stage_end(&stage);
	}
}

static void run_until_half(struct stage *stage, enum xp_kind kind)
{
	stage_make(stage, kind, KIND_VM, KIND_VM);
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
	for (size_t i = 0; i < ARRAY_LEN(both); i++) {
		run_until_half(&stage, both[i]);
		vp_close_peer(&vp_a);
		assert_int_equal(stage.x.done, 1);
		assert_int_not_equal(stage.x.op.result, 0);
		if (both[i] == XP_READ)
			vp_still(&stage.x);
		fake_verbs_hold(false);
		VP_AWAIT(vp_b.lost == 1);
		vp_still(&stage.x);
		stage_end(&stage);
		vp_close_peer(&vp_b);
		vp_join();
	}
}

/* An engine of its own whose memory is read or written by its pid. */
static pid_t owner_start(uint8_t **at_p)
{
	uint8_t *at = mmap(NULL, BYTES, PROT_READ | PROT_WRITE,
			   MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	pid_t pid = fork();

	assert_true(at != MAP_FAILED && pid >= 0);
	if (pid == 0) {
		for (;;)
			pause();
	}
	*at_p = at;
	return pid;
}

static void owner_dead_during_transfer_fails_its_transfers_only(void **state)
{
	struct vp_place place = {0};
	struct stage stage;
	pid_t pid;

	(void)state;
	for (unsigned int i = 0; i < 4; i++) {
		bool source = i & 1;

		pid = owner_start(&place.view);
		assert_int_equal(
			vm_import_pid(pid, (uintptr_t)place.view, BYTES, &place.memory),
			0);
		spot_make(&stage.src, KIND_DIRECT);
		vp_transfer_with(&stage.x, both[i / 2], rows, ARRAY_LEN(rows),
				 source ? &place : &stage.src.place,
				 source ? &stage.src.place : &place);
		fake_verbs_hold(true);
		assert_int_equal(vp_post(&stage.x), 0);
		while (stage.x.op.moved < 256 * VP_KIB) {
			fake_verbs_step(1);
			vp_turn();
		}
		kill(pid, SIGKILL);
		waitpid(pid, NULL, 0);
		fake_verbs_hold(false);
		VP_AWAIT(stage.x.done && vp_b.dones == vp_b.requests);
		assert_int_not_equal(stage.x.op.result, 0);
		assert_non_null(strstr(stage.x.op.err.text, "process"));
		assert_int_equal(vp_a.lost + vp_b.lost, 0);
		vp_transfer_fini(&stage.x);
		spot_end(&stage.src);
		munmap(place.view, BYTES);
	}
}

/* ---- liars ---- */

/* In the middle of a pull one side says this: the other ends the connection. */
static void lie(struct verbs_frame frame, struct vp_node *liar, const char *words)
{
	struct vp_node *other = liar == &vp_a ? &vp_b : &vp_a;
	struct stage stage;

	run_until_half(&stage, XP_READ);
	frame.id = ((struct verbs_xfer *)stage.x.op.impl)->net.id;
	verbs_send(vp_peer(liar), verbs_out_new(), &frame, NULL);
	fake_verbs_hold(false);
	VP_AWAIT(other->lost);
	assert_int_equal(other->why.code, ERR_PROTO);
	if (!strstr(other->why.text, words))
		fail_msg("%s", other->why.text);
	VP_AWAIT(stage.x.done && vp_b.dones == vp_b.requests);
	stage_end(&stage);
}

static void slice_of_a_pull_out_of_turn_ends_the_peer(void **state)
{
	(void)state;
	lie(
		(struct verbs_frame){
			.type = VERBS_SLICE, .kind = XP_READ, .bytes = 7, .total = 4},
		&vp_b, "a slice");
}

static void slice_from_the_destination_ends_the_peer(void **state)
{
	(void)state;
	lie((struct verbs_frame){.type = VERBS_SLICE, .kind = XP_WRITE, .total = 4},
	    &vp_a, "a slice");
}

static void slot_of_pull_invalid_ends_the_peer(void **state)
{
	(void)state;
	lie((struct verbs_frame){.type = VERBS_SLOT, .kind = XP_READ, .slot = 8}, &vp_a,
	    "slot 8");
}

static void slot_from_the_source_ends_the_peer(void **state)
{
	(void)state;
	lie((struct verbs_frame){.type = VERBS_SLOT, .kind = XP_WRITE, .slot = 1}, &vp_b,
	    "slot 1");
}

static void fin_before_the_last_slice_ends_the_peer(void **state)
{
	(void)state;
	lie((struct verbs_frame){.type = VERBS_FIN}, &vp_a, "FIN");
}

#define PAIR(test) cmocka_unit_test_setup_teardown(test, vp_begin_pair, vp_end)

int main(void)
{
	const struct CMUnitTest tests[] = {
		PAIR(every_pair_of_kinds_moves_by_push_and_by_pull),
		PAIR(responder_record_has_staged),
		PAIR(key_of_staged_memory_has_no_address),
		PAIR(many_at_once_share_the_slots),
		PAIR(slots_are_registered_off_the_loop),
		PAIR(peer_closing_during_slot_setup_leaks_nothing),
		PAIR(slots_exhausted_fail_the_transfer_only),
		cmocka_unit_test_setup_teardown(peer_without_staging_refuses_by_name,
						begin_slotless, vp_end),
		PAIR(abort_at_any_step_is_quiesced_and_returns_slots),
		PAIR(peer_lost_in_the_middle_is_quiesced),
		PAIR(owner_dead_during_transfer_fails_its_transfers_only),
		PAIR(slice_of_a_pull_out_of_turn_ends_the_peer),
		PAIR(slice_from_the_destination_ends_the_peer),
		PAIR(slot_of_pull_invalid_ends_the_peer),
		PAIR(slot_from_the_source_ends_the_peer),
		PAIR(fin_before_the_last_slice_ends_the_peer),
	};

	cmocka_set_test_filter(getenv("KVD_TEST_FILTER"));
	return cmocka_run_group_tests_name("verbs stage", tests, NULL, NULL);
}

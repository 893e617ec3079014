/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ucx: what it may use, who is let in, and that every shape of plan arrives.
 * The same again with another libucp, where there is one.
 */
#include "tests/lib/ucx_pair.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <ucm/api/ucm.h>
#include <unistd.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/transport/ucx/ucx_lib.h"

/* ---- the library; these come first, while it is not loaded ---- */

static unsigned int hooked;

static void on_hook(ucm_event_type_t type, ucm_event_t *event, void *arg)
{
	(void)type;
	(void)event;
	(void)arg;
	hooked++;
}

/* How often libucm is in the way of four calls, once somebody asks to see them. */
static unsigned int hooks_of(const char *library)
{
	void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
	__typeof__(&ucm_set_event_handler) set;
	__typeof__(&ucm_unset_event_handler) unset;
	const int events = UCM_EVENT_VM_MAPPED | UCM_EVENT_VM_UNMAPPED;
	void *at;

	assert_non_null(handle);
	*(void **)&set = dlsym(handle, "ucm_set_event_handler");
	*(void **)&unset = dlsym(handle, "ucm_unset_event_handler");
	assert_non_null(set);
	assert_non_null(unset);
	hooked = 0;
	set(events, 0, on_hook, NULL);
	at = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	munmap(at, 4096);
	free(malloc(64u << 20)); /* a mapping of its own */
	unset(events, on_hook, NULL);
	return hooked;
}

/* Threads may be in getenv(), which walks what setenv() moves. */
static void library_loaded_leaves_the_old_environment_as_it_is(void **state)
{
	const char *library = getenv("KVD_TEST_UCX_LIBRARY");
	char **before = environ, **copy;
	const struct ucx_lib *lib;
	size_t n = 0;
	int status;
	pid_t pid;

	(void)state;
	pid = fork();
	if (pid == 0) { /* where nobody told libucp to leave its hooks off */
		unsetenv("UCX_MEM_MMAP_HOOK_MODE");
		_exit(hooks_of(library ? library : "libucp.so.0") ? 0 : 1);
	}
	while (before[n])
		n++;
	copy = calloc(n + 1, sizeof(*copy));
	memcpy(copy, before, n * sizeof(*copy));
	assert_int_equal(ucx_lib_load(library, &lib), 0);
	assert_memory_equal(before, copy, (n + 1) * sizeof(*copy));
	free(copy);
	assert_string_equal(getenv("UCX_HANDLE_ERRORS"), "none");
	assert_string_equal(getenv("UCX_RNDV_SCHEME"), "get_zcopy");
	assert_string_equal(getenv("UCX_LOG_LEVEL"), "FATAL"); /* the operator's: main */
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_int_equal(status, 0);
}

static void hooks_of_the_library_are_off(void **state)
{
	const char *library = getenv("KVD_TEST_UCX_LIBRARY");

	(void)state;
	assert_int_equal(hooks_of(library ? library : "libucp.so.0"), 0);
}

/* ---- connection ---- */

static void probe_loopback_is_usable(void **state)
{
	uint32_t caps = 0;

	(void)state;
	assert_int_equal(ucx_transport.probe(&up_config, &caps), 0);
	assert_false(caps & (XP_CAP_SELF | XP_CAP_RDMA));
}

static void probe_beyond_loopback_needs_insecure(void **state)
{
	struct config c = up_config;
	uint32_t caps;

	(void)state;
	setenv("UCX_NET_DEVICES", "no-such-device", 1);
	up_assert_refused(ucx_transport.probe(&c, &caps), ERR_REQUIRE, "insecure = yes");
	c.insecure = true; /* then there is no such device */
	up_assert_refused(ucx_transport.probe(&c, &caps), ERR_REQUIRE, "no-such-device");
	unsetenv("UCX_NET_DEVICES");
	snprintf(c.listen, sizeof(c.listen), "tcp://192.0.2.77:7400");
	up_assert_refused(ucx_transport.probe(&c, &caps), ERR_REQUIRE, "UCX_NET_DEVICES");
}

/* The operator's UCX_ZCOPY_THRESH is 8k here (main): with the old protocols, whose
 * direct sends a dying peer turns into an abort of ours, it must not stay. */
static void old_libucp_copies_its_messages(void **state)
{
	const struct ucx_lib *lib;
	unsigned int major, minor;
	uint32_t caps;

	(void)state;
	assert_int_equal(ucx_transport.probe(&up_config, &caps), 0);
	assert_int_equal(ucx_lib_load(up_config.ucx_library, &lib), 0);
	assert_int_equal(sscanf(lib->version, "%u.%u", &major, &minor), 2);
	assert_string_equal(getenv("UCX_ZCOPY_THRESH"),
			    major == 1 && minor < 16 ? "inf" : "8k");
}

static void probe_shared_memory_transports_are_refused(void **state)
{
	uint32_t caps;

	(void)state;
	setenv("UCX_TLS", "tcp,cma", 1);
	up_assert_refused(ucx_transport.probe(&up_config, &caps), ERR_REQUIRE, "cma");
	setenv("UCX_TLS", "^ud", 1);
	assert_int_equal(ucx_transport.probe(&up_config, &caps), 0);
	unsetenv("UCX_TLS");
}

static void peers_of_one_pair_become_ready(void **state)
{
	(void)state;
	up_join();
	assert_string_equal(((struct xp_peer_base *)up_a.peer)->path, "tcp lo");
	assert_string_equal(((struct xp_peer_base *)up_b.peer)->path, "tcp lo");
}

/* Who dialled is ready and asks no more; his answer did not arrive. */
static void reply_lost_is_requested_again(void **state)
{
	struct ucx_transport *transport =
		container_of(up_b.t, struct ucx_transport, net.base);
	struct ucx_peer *b;

	(void)state;
	up_connect(&up_b, &up_a, 1, 2);
	up_connect(&up_a, &up_b, 2, 1);
	b = (struct ucx_peer *)up_b.peer;
	await(b->ep_number > 0); /* it was asked, and asks */
	ucx_line_deafen(&b->line);
	await(up_a.ready);
	assert_false(up_b.ready);
	await(atomic_load(&transport->frames_dropped) > 0);
	assert_int_equal(ucx_line_listen(&b->line), 0);
	assert_false(up_b.ready);
	await(up_b.ready);
	up_every_shape(XP_WRITE, false, false);
}

/* Who dialled is ready by an answer whose endpoint fails behind it: the other one has
 * made a new one when it hears of us again, and must be followed there. */
static void endpoint_failed_after_reply_is_followed(void **state)
{
	const struct ucx_frame again = {
		.type = UCX_HELLO, .flags = UCX_FLAG_ASK, .id = 1, .offset = 512 * KIB};
	struct ucx_peer *a, *b;

	(void)state;
	up_connect(&up_b, &up_a, 1, 2);
	up_connect(&up_a, &up_b, 2, 1);
	a = (struct ucx_peer *)up_a.peer;
	b = (struct ucx_peer *)up_b.peer;
	while (!up_a.ready) { /* and b has not heard that it is */
		up_b.t->ops->progress(up_b.t, 1);
		up_a.t->ops->progress(up_a.t, 1);
	}
	assert_false(up_b.ready);
	assert_int_equal(a->ep_number, again.id);
	b->failed_number = b->ep_number;
	ucx_peer_hello(b, &again); /* a's second hello, late */
	net_run(b->net.transport); /* before its answer is looked at */
	await(up_b.ready);
	assert_true(b->ep_number > again.id);
	assert_int_equal(a->ep_number, b->ep_number);
	assert_false(up_a.lost || up_b.lost);
	up_every_shape(XP_WRITE, false, false);
	up_every_shape(XP_READ, false, false);
}

/* The same, when something was sent by the endpoint that is no good: it may be lost. */
static void endpoint_failed_after_reply_and_message_ends_peer(void **state)
{
	struct ucx_frame anew = {
		.type = UCX_HELLO, .flags = UCX_FLAG_ASK, .offset = 512 * KIB};
	struct up_op op;

	(void)state;
	up_join();
	up_op_init(&op, XP_WRITE, NULL, NULL, NULL);
	assert_int_equal(up_a.t->ops->post(up_a.peer, &op.op), 0);
	await(op.done);
	anew.id = ((struct ucx_peer *)up_a.peer)->ep_number + 1;
	ucx_peer_hello((struct ucx_peer *)up_a.peer, &anew);
	await(up_a.lost && up_b.lost);
	assert_int_equal(up_a.lost_why.code, ERR_PEER);
	up_rejoin();
}

static void peer_with_a_wrong_token_is_never_ready(void **state)
{
	struct ucx_transport *b = container_of(up_b.t, struct ucx_transport, net.base);

	(void)state;
	up_connect(&up_a, &up_b, 1, 2);
	up_connect(&up_b, &up_a, 9, 1); /* expects 9, gets 2 */
	await(atomic_load(&b->frames_dropped) > 0);
	up_spin_ms(300);
	assert_false(up_a.ready || up_b.ready);
}

static void address_forged_is_refused(void **state)
{
	uint8_t address[64] = {0};
	struct xp_peer_args args = {.address = address, .address_len = 3};
	struct xp_peer *peer;

	(void)state;
	up_assert_refused(up_a.t->ops->peer_open(up_a.t, &args, &peer), ERR_PROTO,
			  "address");
	args.address_len = sizeof(address);
	up_assert_refused(up_a.t->ops->peer_open(up_a.t, &args, &peer), ERR_PROTO,
			  "address");
	memcpy(address, up_b.t->address, 8); /* the length of another */
	up_assert_refused(up_a.t->ops->peer_open(up_a.t, &args, &peer), ERR_PROTO,
			  "announced");
}

static void peer_closed_notifies_the_other(void **state)
{
	(void)state;
	up_close(&up_a);
	await(up_b.lost);
	assert_int_equal(up_b.lost_why.code, ERR_PEER);
	assert_false(up_a.lost);
	/* and a new connection works */
	up_rejoin();
}

/* ---- bytes ---- */

static void write_of_every_shape_lands(void **state)
{
	(void)state;
	up_every_shape(XP_WRITE, false, false);
}

static void read_of_every_shape_lands(void **state)
{
	(void)state;
	up_every_shape(XP_READ, false, false);
}

static void memory_guarded_uses_copy_threads(void **state)
{
	(void)state;
	up_every_shape(XP_WRITE, true, true);
	up_every_shape(XP_READ, true, false);
	up_every_shape(XP_READ, false, true);
}

static void guarded_slices_are_full(struct plan *plan)
{
	struct ucx_peer *peer = (struct ucx_peer *)up_a.peer;
	struct up_place src, dst;
	struct up_op op;

	up_place_init(&src, &up_a, 4 * MIB, true);
	up_place_init(&dst, &up_b, 4 * MIB, false);
	up_op_init(&op, XP_WRITE, plan, &src, &dst);
	up_b.sides = op.op.sides;
	assert_int_equal(up_a.t->ops->post(up_a.peer, &op.op), 0);
	await(peer->sending > 0);
	assert_int_equal(peer->sending_bytes, peer->sending * 512 * KIB);
	await(op.done);
	assert_int_equal(op.op.result, 0);
	up_place_fini(&src, &up_a);
	up_place_fini(&dst, &up_b);
	plan_free(plan);
}

/* With one row in place, as over an adapter: what is packed fills its slices all the
 * same. */
static void memory_guarded_fills_its_slices(void **state)
{
	static const struct plan_run rows = {.len = 16 * KIB,
					     .count = 128,
					     .src_stride = 32 * KIB,
					     .dst_stride = 16 * KIB};

	(void)state;
	((struct ucx_peer *)up_a.peer)->rows_max = 1;
	guarded_slices_are_full(up_plan(&rows, 1));
}

/* Two short rows, a long one, and so on. */
static void memory_guarded_of_mixed_rows_fills_its_slices(void **state)
{
	struct plan_run runs[128];

	(void)state;
	for (uint64_t i = 0; i < ARRAY_LEN(runs); i += 2) {
		runs[i] = (struct plan_run){.len = 8 * KIB,
					    .count = 2,
					    .src = i * 32 * KIB,
					    .dst = i * 16 * KIB,
					    .src_stride = 16 * KIB,
					    .dst_stride = 8 * KIB};
		runs[i + 1] = (struct plan_run){.len = 16 * KIB,
						.count = 1,
						.src = i * 32 * KIB + 32 * KIB,
						.dst = i * 16 * KIB + 16 * KIB};
	}
	guarded_slices_are_full(up_plan(runs, ARRAY_LEN(runs)));
}

static void write_without_bytes_keeps_order(void **state)
{
	static uint64_t headers[UP_INBOUNDS];
	static struct up_op ops[UP_INBOUNDS];

	(void)state;
	for (uint64_t i = 0; i < UP_INBOUNDS; i++) {
		headers[i] = i;
		up_op_init(&ops[i], XP_WRITE, NULL, NULL, NULL);
		ops[i].op.header = &headers[i];
		assert_int_equal(up_a.t->ops->post(up_a.peer, &ops[i].op), 0);
	}
	await(ops[UP_INBOUNDS - 1].done);
	assert_int_equal(up_b.requests, UP_INBOUNDS);
	for (uint64_t i = 0; i < UP_INBOUNDS; i++) {
		assert_int_equal(up_b.order[i], i);
		assert_int_equal(ops[i].done, 1);
		assert_int_equal(ops[i].op.result, 0);
	}
}

static void headers_of_all_sizes_keep_order(void **state)
{
	static const size_t sizes[] = {0, 8, 8191, 8192, 8193, 70000, XP_HEADER_MAX, 9};
	enum { OPS = 64 };
	static struct up_op ops[OPS];
	uint8_t *headers[OPS];

	(void)state;
	for (uint64_t i = 0; i < OPS; i++) {
		size_t len = sizes[i % ARRAY_LEN(sizes)];

		headers[i] = mem_zalloc(len < 8 ? 8 : len);
		memcpy(headers[i], &i, 8);
		up_op_init(&ops[i], XP_WRITE, NULL, NULL, NULL);
		ops[i].op.header = headers[i];
		ops[i].op.header_len = len;
		assert_int_equal(up_a.t->ops->post(up_a.peer, &ops[i].op), 0);
	}
	await(ops[OPS - 1].done);
	for (uint64_t i = 0; i < OPS; i++) {
		assert_int_equal(up_b.order[i], sizes[i % ARRAY_LEN(sizes)] < 8 ? 0 : i);
		assert_int_equal(ops[i].done, 1);
		mem_free(headers[i]);
	}
	up_op_init(&ops[0], XP_WRITE, NULL, NULL, NULL);
	ops[0].op.header_len = XP_HEADER_MAX + 1;
	up_assert_refused(up_a.t->ops->post(up_a.peer, &ops[0].op), ERR_TOOBIG, "header");
}

static void ops_large_do_not_starve_small(void **state)
{
	static const struct plan_run big = {.len = 64 * MIB, .count = 1};
	static const struct plan_run small = {
		.src = 0, .dst = 0, .len = 100000, .count = 1};
	struct plan *big_plan = up_plan(&big, 1), *small_plan = up_plan(&small, 1);
	struct up_op big_op, small_op;
	struct up_place src, dst;

	(void)state;
	up_place_init(&src, &up_a, 64 * MIB, false);
	up_place_init(&dst, &up_b, 64 * MIB, false);
	up_op_init(&big_op, XP_WRITE, big_plan, &src, &dst);
	up_op_init(&small_op, XP_WRITE, small_plan, &src, &dst);
	up_b.sides = big_op.op.sides;
	assert_int_equal(up_a.t->ops->post(up_a.peer, &big_op.op), 0);
	await(big_op.op.moved > 0);
	up_b.sides = small_op.op.sides;
	assert_int_equal(up_a.t->ops->post(up_a.peer, &small_op.op), 0);
	await(small_op.done);
	assert_int_equal(small_op.op.result, 0);
	assert_int_equal(big_op.done, 0);
	await(big_op.done);
	assert_int_equal(big_op.op.result, 0);
	up_place_fini(&src, &up_a);
	up_place_fini(&dst, &up_b);
	plan_free(big_plan);
	plan_free(small_plan);
}

static void allocation_failed_fails_the_transfer(void **state)
{
	struct plan *plan = up_plan(&up_short_rows, 1);
	struct up_place src, dst;
	struct up_op op;
	int r;

	(void)state;
	up_place_init(&src, &up_a, 8 * MIB, false);
	up_place_init(&dst, &up_b, 8 * MIB, false);
	for (uint64_t n = 1; n < 60; n++) {
		up_op_init(&op, n % 2 ? XP_WRITE : XP_READ, plan, &src, &dst);
		if (n % 2 == 0) { /* a READ: the source is b */
			op.op.sides.dst = &src.buffer;
			op.op.sides.src = &dst.buffer;
		}
		up_b.sides = op.op.sides;
		mem_fail_at(n);
		r = up_a.t->ops->post(up_a.peer, &op.op);
		if (r == 0)
			await(op.done);
		mem_fail_at(0);
		if (r == 0 && op.op.result < 0)
			assert_int_equal(op.op.err.code, ERR_NOMEM);
		if (r == 0)
			await(up_b.dones == up_b.requests);
		assert_false(up_a.lost || up_b.lost);
	}
	up_place_fini(&src, &up_a);
	up_place_fini(&dst, &up_b);
	plan_free(plan);
}

int main(void)
{
#define PAIR(test) cmocka_unit_test_setup_teardown(test, up_begin_pair, up_end)
#define WORLD(test) cmocka_unit_test_setup_teardown(test, up_begin, up_end)
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(library_loaded_leaves_the_old_environment_as_it_is),
		WORLD(hooks_of_the_library_are_off),
		WORLD(probe_loopback_is_usable),
		WORLD(probe_beyond_loopback_needs_insecure),
		WORLD(probe_shared_memory_transports_are_refused),
		WORLD(old_libucp_copies_its_messages),
		WORLD(peers_of_one_pair_become_ready),
		WORLD(reply_lost_is_requested_again),
		WORLD(endpoint_failed_after_reply_is_followed),
		WORLD(endpoint_failed_after_reply_and_message_ends_peer),
		WORLD(peer_with_a_wrong_token_is_never_ready),
		WORLD(address_forged_is_refused),
		PAIR(peer_closed_notifies_the_other),
		PAIR(write_of_every_shape_lands),
		PAIR(read_of_every_shape_lands),
		PAIR(memory_guarded_uses_copy_threads),
		PAIR(memory_guarded_fills_its_slices),
		PAIR(memory_guarded_of_mixed_rows_fills_its_slices),
		PAIR(write_without_bytes_keeps_order),
		PAIR(headers_of_all_sizes_keep_order),
		PAIR(ops_large_do_not_starve_small),
		PAIR(allocation_failed_fails_the_transfer),
	};

	setenv("UCX_ZCOPY_THRESH", "8k", 1);
	setenv("UCX_RNDV_SCHEME", "put_zcopy", 1);
	setenv("UCX_LOG_LEVEL", "FATAL", 1);
	return up_run_tests("ucx", tests, ARRAY_LEN(tests));
}

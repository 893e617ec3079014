/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A tap stands in front of a link's on_frame: it records and hands on. A node
 * without peers ("raw") is a tap with nothing behind it. All state is in `net`,
 * so a test can look at anything.
 */
#include "daemon/peer/peer_impl.h"
#include "tests/lib/peernet.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/base/err.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"

#define TAP_MAX 20000

struct peernet net;

/* ---- nodes ---- */

static void note(struct peernet_node *node, struct peer *peer, const char *event)
{
	size_t len = strlen(net.log);

	node->last = peer;
	snprintf(net.log + len, sizeof(net.log) - len, "%d%s ", (int)(node - net.n),
		 event);
	if (node->hook)
		node->hook(node, peer, event);
}

static void on_up(void *owner, struct peer *peer)
{
	struct peernet_node *node = owner;

	assert_int_equal(sm_state(&peer->sm), PEER_UP);
	node->ups++;
	note(node, peer, "up");
}

static void on_down(void *owner, struct peer *peer)
{
	struct peernet_node *node = owner;

	assert_int_equal(sm_state(&peer->sm), PEER_DOWN);
	node->downs++;
	node->why = peer->why;
	node->down_ns = loop_now_ns(net.loop);
	note(node, peer, "down");
}

static void on_refused(void *owner, struct peer *peer)
{
	struct peernet_node *node = owner;

	node->refusals++;
	node->why = peer->why;
	note(node, peer, "refused");
}

static int on_message(void *owner, struct peer *peer, const struct wire_header *h,
		      struct cursor *body)
{
	struct peernet_node *node = owner;
	struct wire_lease m;

	assert_int_equal(h->epoch, peer->epoch);
	if (node->on_other && h->type != WIRE_T_LEASE) {
		node->on_other(node, peer, h, body);
		return 0;
	}
	assert_int_equal(h->type, WIRE_T_LEASE);
	assert_int_equal(wire_lease_get(body, &m), 0);
	if (node->messages < ARRAY_LEN(node->numbers))
		node->numbers[node->messages] = m.room;
	node->messages++;
	node->last = peer;
	if (node->answer < 0)
		return err_raise(ERR_PROTO, "the test wants it so");
	return 0;
}

const char *peernet_endpoint(unsigned int i)
{
	static char text[PEERNET_NODES][32];

	snprintf(text[i], sizeof(text[i]), "tcp://10.0.0.%u:7400", i);
	return text[i];
}

static void tap_free(struct peernet_node *node)
{
	for (unsigned int i = 0; i < node->tap_count; i++)
		free(node->tap[i].data);
	free(node->tap);
	node->tap = NULL;
	node->tap_count = 0;
}

static void tap_frame(void *owner, const struct link_frame *frame)
{
	struct peernet_node *node = owner;
	struct peernet_tapped *t = &node->tap[node->tap_count];

	assert_true(node->tap_count < TAP_MAX);
	node->tap_count++;
	t->data = malloc(frame->len);
	t->len = frame->len;
	memcpy(t->data, frame->data, frame->len);
	memcpy(t->user, frame->user, sizeof(t->user));
	if (node->on_frame)
		node->on_frame(node->owner, frame);
}

void peernet_tap(struct peernet_node *node)
{
	node->tap = calloc(TAP_MAX, sizeof(*node->tap));
	node->on_frame = node->link->on_frame;
	node->owner = node->link->owner;
	node->link->on_frame = tap_frame;
	node->link->owner = node;
}

/* peers must find its owner pointer in the link's callbacks, so undo it first */
static void tap_stop(struct peernet_node *node)
{
	if (!node->tap)
		return;
	node->link->on_frame = node->on_frame;
	node->link->owner = node->owner;
	tap_free(node);
}

void peernet_inject(struct peernet_node *node, const uint8_t *data, size_t len,
		    const char *user)
{
	struct link_frame frame = {.data = data, .len = len};

	snprintf(frame.user, sizeof(frame.user), "%s", user);
	if (node->tap)
		node->on_frame(node->owner, &frame);
	else
		node->link->on_frame(node->link->owner, &frame);
}

static struct account *account_of(void *owner, const struct peer *peer)
{
	const struct peernet_node *node = owner;

	(void)peer;
	return node->account;
}

static bool on_busy(void *owner, const struct peer *peer)
{
	const struct peernet_node *node = owner;

	(void)peer;
	return !node->unused;
}

static const uint8_t boot_id[16] = {1, 2, 3};

void peernet_start(unsigned int i)
{
	static const struct peer_address addresses[] = {
		{.transport = "shm", .data = (uint8_t *)"xyz", .len = 3},
		{.transport = "fake", .data = NULL, .len = 0},
	};
	struct peernet_node *node = &net.n[i];
	struct peers_callbacks callbacks = {.owner = node,
					    .on_up = on_up,
					    .on_down = on_down,
					    .on_refused = on_refused,
					    .account_of = account_of,
					    .busy = on_busy,
					    .on_message = on_message};
	char name[16], user[16];
	struct peers_args args = {.loop = net.loop,
				  .callbacks = &callbacks,
				  .options = &net.options,
				  .name = name,
				  .addresses = addresses,
				  .address_count = 2,
				  .features = PEER_FEATURE_CHUNKS};

	memset(node, 0, sizeof(*node));
	snprintf(name, sizeof(name), "node%u", i);
	snprintf(user, sizeof(user), "user%u", i);
	snprintf(node->endpoint, sizeof(node->endpoint), "%s", peernet_endpoint(i));
	memcpy(args.boot_id, boot_id, sizeof(boot_id));
	args.boot_id[15] = (uint8_t)(i / 2); /* 0 and 1 share a host */
	assert_int_equal(link_mem_new(net.hub, node->endpoint, user, &node->link), 0);
	args.link = node->link;
	assert_int_equal(peers_new(&args, &node->peers), 0);
}

void peernet_stop(unsigned int i)
{
	struct peernet_node *node = &net.n[i];

	if (!node->link)
		return;
	tap_stop(node);
	peers_free(node->peers);
	node->link->ops->free(node->link);
	node->peers = NULL;
	node->link = NULL;
}

void peernet_crash(unsigned int i, enum mem_crash how)
{
	link_mem_crash(net.n[i].link, how);
	peernet_stop(i);
}

void peernet_run(uint64_t ns)
{
	uint64_t end_ns = loop_now_ns(net.loop) + ns;

	while (loop_now_ns(net.loop) < end_ns)
		loop_turn(net.loop, end_ns - loop_now_ns(net.loop));
	for (int i = 0; i < 100 && loop_turn(net.loop, 0); i++)
		;
}

void peernet_open(uint64_t seed, unsigned int nodes)
{
	memset(&net, 0, sizeof(net));
	peers_options_default(&net.options);
	net.options.idle_after_ns = 3600 * LOOP_NS_PER_S;
	assert_int_equal(loop_new_virtual(seed, &net.loop), 0);
	assert_int_equal(mem_hub_new(net.loop, &net.hub), 0);
	mem_hub_set_default(net.hub, &(struct mem_path){.delay_ns = PEERNET_DELAY_NS});
	for (unsigned int i = 0; i < nodes; i++)
		peernet_start(i);
}

int peernet_setup(void **state)
{
	(void)state;
	peernet_open(1, 2);
	return 0;
}

int peernet_teardown(void **state)
{
	(void)state;
	for (unsigned int i = 0; i < PEERNET_NODES; i++)
		peernet_stop(i);
	mem_hub_free(net.hub);
	loop_free(net.loop);
	return 0;
}

struct peer *peernet_dial(unsigned int from, unsigned int to)
{
	struct peer *peer = NULL;

	assert_int_equal(peers_dial(net.n[from].peers, peernet_endpoint(to), NULL, &peer),
			 0);
	return peer;
}

struct peer *peernet_join(void)
{
	struct peer *peer = peernet_dial(0, 1);

	peernet_run(10 * LOOP_NS_PER_MS);
	assert_int_equal(net.n[0].ups, 1);
	assert_int_equal(net.n[1].ups, 1);
	assert_int_equal(sm_state(&peer->sm), PEER_UP);
	return peer;
}

struct peer *peernet_only(unsigned int node)
{
	assert_int_equal(net.n[node].peers->count, 1);
	return list_first(&net.n[node].peers->all, struct peer, link);
}

int peernet_lease(struct peer *peer, uint64_t number, bool reliable)
{
	struct wire_lease m = {.room = number};
	uint8_t buf[64];
	struct cursor c;

	cursor_write(&c, buf, sizeof(buf));
	assert_int_equal(wire_lease_put(&c, &m), 0);
	return reliable ? peer_send_reliable(peer, WIRE_T_LEASE, buf, c.pos)
			: peer_send(peer, WIRE_T_LEASE, buf, c.pos);
}

/* SPDX-License-Identifier: Apache-2.0 */
/* CURVE over real loopback sockets: authentication, the files, and peers on top. */
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>
#include <netinet/in.h>
#include <arpa/inet.h>
#include <zmq.h>

#include "daemon/peer/peer_impl.h"
#include "daemon/base/err.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/link/link_curve.h"
#include "tests/lib/zmqnet.h"

#define MS LOOP_NS_PER_MS
/* the two daemons */
#define a zmqnet_a
#define b zmqnet_b

/* ---- CURVE ---- */

static void curve_allowed_daemons_speak(void **state)
{
	struct link_line *line, *back;
	char endpoint[LINK_ENDPOINT_MAX];

	(void)state;
	zmqnet_allow(true);
	zmqnet_use_curve(&a, 0);
	zmqnet_use_curve(&b, 1);
	zmqnet_listen(&a);
	zmqnet_listen(&b);
	assert_string_equal(strchr(b.link->endpoint, '#') + 1, zmqnet_keys[1][0]);
	line = zmqnet_dial(&a, b.link->endpoint);
	back = zmqnet_dial(&b, a.link->endpoint);
	zmqnet_wait(a.lines_up == 1 && b.lines_up == 1);
	assert_int_equal(zmqnet_send(&a, line, "from a"), 0);
	assert_int_equal(zmqnet_send(&b, back, "from b"), 0);
	zmqnet_wait(a.frames == 1 && b.frames == 1);
	assert_string_equal(b.user, "alice");
	assert_string_equal(a.user, "bob");
	/* without its key, an address that no line names cannot be dialled */
	zmqnet_plain(&b, endpoint);
	a.link->ops->hangup(line);
	assert_true(a.link->ops->dial(a.link, endpoint, &a, &line) < 0);
	assert_int_equal(err_last()->code, ERR_AUTH);
	b.link->ops->hangup(back);
}

static void curve_key_is_found_by_host(void **state)
{
	char text[300], name[LINK_ENDPOINT_MAX];
	struct link_line *line;
	char plain[LINK_ENDPOINT_MAX];

	(void)state;
	zmqnet_allow(true);
	zmqnet_use_curve(&b, 1);
	zmqnet_listen(&b);
	zmqnet_plain(&b, plain);
	snprintf(text, sizeof(text), "alice %s\nbob %s x.example. 127.1:%s [0:0::9]\n",
		 zmqnet_keys[0][0], zmqnet_keys[1][0], strrchr(plain, ':') + 1);
	zmqnet_write("allow", 0600, text);
	zmqnet_use_curve(&a, 0);
	zmqnet_listen(&a);
	line = zmqnet_dial(&a, plain);
	zmqnet_wait(a.lines_up == 1);
	assert_int_equal(zmqnet_send(&a, line, "x"), 0);
	zmqnet_wait(b.frames == 1);
	a.link->ops->hangup(line);
	/* one spelling for all the names of it */
	assert_int_equal(a.link->ops->canonical(a.link, plain, name), 0);
	assert_string_equal(name, b.link->endpoint);
	assert_int_equal(a.link->ops->canonical(a.link, "tcp://X.example:99", name), 0);
	snprintf(text, sizeof(text), "tcp://x.example:99#%s", zmqnet_keys[1][0]);
	assert_string_equal(name, text);
	assert_int_equal(a.link->ops->canonical(a.link, "tcp://[::0:9]:99", name), 0);
	snprintf(text, sizeof(text), "tcp://[::9]:99#%s", zmqnet_keys[1][0]);
	assert_string_equal(name, text);
	zmqnet_plain(&a, plain);
	assert_int_equal(a.link->ops->canonical(a.link, plain, name), 0);
	assert_string_equal(name, a.link->endpoint);
	/* a key that is not allowed, from any source */
	snprintf(text, sizeof(text), "tcp://10.0.0.1:1#%s", zmqnet_keys[2][0]);
	assert_true(a.link->ops->canonical(a.link, text, name) < 0);
	assert_int_equal(err_last()->code, ERR_AUTH);
}

/* ---- keys that the directory may know ---- */

static unsigned int asked_for;

static bool vouch_knows(void *owner, const char *key)
{
	(void)owner;
	(void)key;
	return false;
}

static bool vouch_ask(void *owner, const char *key)
{
	(void)owner;
	(void)key;
	asked_for++;
	return true;
}

/* A client with its own key, from that address of loopback. */
static void *unknown_client(void *context, const char *from)
{
	void *socket = zmq_socket(context, ZMQ_DEALER);
	char public_key[41], secret[41], plain[LINK_ENDPOINT_MAX], text[300];
	int zero = 0;

	zmq_curve_keypair(public_key, secret);
	zmq_setsockopt(socket, ZMQ_LINGER, &zero, sizeof(zero));
	zmq_setsockopt(socket, ZMQ_CURVE_SERVERKEY, zmqnet_keys[1][0], 40);
	zmq_setsockopt(socket, ZMQ_CURVE_PUBLICKEY, public_key, 40);
	zmq_setsockopt(socket, ZMQ_CURVE_SECRETKEY, secret, 40);
	zmqnet_plain(&b, plain);
	snprintf(text, sizeof(text), "tcp://%s:0;%s", from, plain + 6);
	assert_int_equal(zmq_connect(socket, text), 0);
	return socket;
}

/* For any number of keys from one address, those of others are looked up. */
static void unknown_keys_of_one_address_leave_room(void **state)
{
	static const struct link_vouch vouch = {.knows = vouch_knows, .ask = vouch_ask};
	void *context = zmq_ctx_new(), *clients[71];
	unsigned int before;

	(void)state;
	asked_for = 0;
	zmqnet_allow(true);
	zmqnet_use_curve(&b, 1);
	zmqnet_listen(&b);
	link_zmq_vouch(b.link, &vouch);
	for (unsigned int i = 0; i < 70; i++)
		clients[i] = unknown_client(context, "127.0.0.1");
	zmqnet_wait(asked_for >= 16);
	zmqnet_turn(300 * MS); /* the rest of them is received */
	before = asked_for;
	clients[70] = unknown_client(context, "127.0.0.2");
	zmqnet_wait(asked_for > before);
	assert_in_range(before, 16, 63);
	for (unsigned int i = 0; i < ARRAY_LEN(clients); i++)
		zmq_close(clients[i]);
	zmq_ctx_term(context);
}

/* A client that speaks CURVE with mallory's key, or none at all. */
static void *curve_client(void *context, const struct zmqnet_node *node, int key)
{
	void *socket = zmq_socket(context, ZMQ_DEALER);
	char endpoint[LINK_ENDPOINT_MAX];
	int zero = 0, one = 1;

	zmqnet_plain(node, endpoint);
	zmq_setsockopt(socket, ZMQ_LINGER, &zero, sizeof(zero));
	zmq_setsockopt(socket, ZMQ_IMMEDIATE, &one, sizeof(one));
	if (key >= 0) {
		zmq_setsockopt(socket, ZMQ_CURVE_SERVERKEY, zmqnet_keys[1][0], 40);
		zmq_setsockopt(socket, ZMQ_CURVE_PUBLICKEY, zmqnet_keys[key][0], 40);
		zmq_setsockopt(socket, ZMQ_CURVE_SECRETKEY, zmqnet_keys[key][1], 40);
	}
	return socket;
}

static bool monitor_saw(void *monitor, unsigned int wanted)
{
	for (;;) {
		zmq_msg_t msg;
		uint16_t event;

		zmq_msg_init(&msg);
		if (zmq_msg_recv(&msg, monitor, ZMQ_DONTWAIT) < 0)
			return false;
		memcpy(&event, zmq_msg_data(&msg), sizeof(event));
		zmq_msg_close(&msg);
		zmq_msg_init(&msg);
		zmq_msg_recv(&msg, monitor, 0); /* the address */
		zmq_msg_close(&msg);
		if (event & wanted)
			return true;
	}
}

static void curve_peer_not_on_the_list_is_refused(void **state)
{
	static const unsigned int refusals[] = {
		[0] = ZMQ_EVENT_HANDSHAKE_FAILED_AUTH |
		      ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL,
		[1] = ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL |
		      ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL | ZMQ_EVENT_DISCONNECTED,
	};
	void *context = zmq_ctx_new();

	(void)state;
	zmqnet_allow(true);
	zmqnet_use_curve(&b, 1);
	zmqnet_listen(&b);
	for (unsigned int i = 0; i < 2; i++) {
		void *client = curve_client(context, &b, i == 0 ? 2 : -1);
		void *monitor = zmq_socket(context, ZMQ_PAIR);
		char endpoint[LINK_ENDPOINT_MAX], name[32];

		snprintf(name, sizeof(name), "inproc://monitor%u", i);
		assert_int_equal(zmq_socket_monitor(client, name, ZMQ_EVENT_ALL), 0);
		assert_int_equal(zmq_connect(monitor, name), 0);
		zmqnet_plain(&b, endpoint);
		assert_int_equal(zmq_connect(client, endpoint), 0);
		zmqnet_wait(monitor_saw(monitor, refusals[i]));
		assert_int_equal(zmq_send(client, "x", 1, ZMQ_DONTWAIT), -1);
		assert_int_equal(errno, EAGAIN);
		zmq_close(client);
		zmq_close(monitor);
	}
	assert_int_equal(b.frames, 0);
	zmq_ctx_term(context);
}

static void curve_server_with_other_key_is_refused(void **state)
{
	struct link_line *line;
	char endpoint[LINK_ENDPOINT_MAX], lie[LINK_ENDPOINT_MAX + 41];
	char text[300];

	(void)state;
	/* mallory listens where bob should be; she allows everybody */
	snprintf(text, sizeof(text), "alice %s\nbob %s\n", zmqnet_keys[0][0],
		 zmqnet_keys[1][0]);
	zmqnet_write("allow", 0600, text);
	zmqnet_use_curve(&b, 2);
	zmqnet_listen(&b);
	zmqnet_use_curve(&a, 0);
	zmqnet_listen(&a);
	zmqnet_plain(&b, endpoint);
	snprintf(lie, sizeof(lie), "%.80s#%s", endpoint, zmqnet_keys[1][0]);
	line = zmqnet_dial(&a, lie);
	zmqnet_turn(300 * MS);
	assert_int_equal(a.lines_up, 0);
	assert_true(zmqnet_send(&a, line, "secret") < 0);
	a.link->ops->hangup(line);
	assert_int_equal(b.frames, 0);
}

static void curve_reload_admits_and_strikes(void **state)
{
	struct curve_changes keys;
	struct link_line *line;
	char path[CONFIG_PATH_BYTES];

	(void)state;
	zmqnet_allow(true);
	zmqnet_use_curve(&a, 0);
	zmqnet_use_curve(&b, 1);
	zmqnet_listen(&a);
	zmqnet_listen(&b);
	zmqnet_path(path, "allow");
	line = zmqnet_dial(&b, a.link->endpoint);
	zmqnet_wait(b.lines_up == 1);
	assert_int_equal(zmqnet_send(&b, line, "one"), 0);
	zmqnet_wait(a.frames == 1);
	/* a broken file changes nothing */
	zmqnet_write("allow", 0644, "alice what?\n");
	assert_true(link_zmq_reload(a.link, path, true, &keys) < 0);
	assert_int_equal(err_last()->code, ERR_CONFIG);
	assert_non_null(strstr(err_last()->text, "allow:1: expected: NAME"));
	assert_int_equal(zmqnet_send(&b, line, "two"), 0);
	zmqnet_wait(a.frames == 2);
	/* a check changes nothing */
	zmqnet_allow(false);
	assert_int_equal(link_zmq_reload(a.link, path, false, &keys), 0);
	assert_int_equal(keys.removed, 1);
	assert_int_equal(zmqnet_send(&b, line, "still"), 0);
	zmqnet_wait(a.frames == 3);
	/* bob is struck: his next frame is none, and ends his connection */
	assert_int_equal(link_zmq_reload(a.link, path, true, &keys), 0);
	assert_int_equal(keys.removed, 1);
	assert_int_equal(keys.added, 0);
	assert_int_equal(zmqnet_send(&b, line, "three"), 0);
	zmqnet_wait(link_zmq_stats(a.link)->revoked == 1 && b.lines_down == 1);
	assert_int_equal(a.frames, 3);
	zmqnet_allow(true);
	assert_int_equal(link_zmq_reload(a.link, path, true, &keys), 0);
	assert_int_equal(keys.added, 1);
	assert_int_equal(keys.removed, 0);
	zmqnet_wait(b.lines_up == 2);
	assert_int_equal(zmqnet_send(&b, line, "four"), 0);
	zmqnet_wait(a.frames == 4);
	b.link->ops->hangup(line);
}

static void curve_files_are_checked(void **state)
{
	static const struct {
		mode_t mode;
		const char *text, *words;
	} secrets[] = {
		{0600, "", "expected a secret key"},
		{0600, "# only a comment\n", "expected a secret key"},
		{0600, "tooshort\n", "s:1: expected a secret key"},
		{0600, "\n\nBAD KEY\n", "s:3: expected a secret key"},
		{0640, NULL, "mode 0640: the secret key must not"},
		{0604, NULL, "mode 0604: the secret key must not"},
	};
	static const char *const lists[] = {
		"alice\n",
	};
	char path[CONFIG_PATH_BYTES], text[400];
	struct curve_allow *allow;
	struct curve_keys got;

	(void)state;
	zmqnet_path(path, "s");
	for (size_t i = 0; i < ARRAY_LEN(secrets); i++) {
		zmqnet_write("s", secrets[i].mode,
			     secrets[i].text ? secrets[i].text : zmqnet_keys[0][1]);
		assert_true(curve_keys_load(path, &got) < 0);
		assert_int_equal(err_last()->code, ERR_CONFIG);
		assert_non_null(strstr(err_last()->text, secrets[i].words));
	}
	snprintf(text, sizeof(text), "%s\n%s\n", zmqnet_keys[0][1], zmqnet_keys[1][1]);
	zmqnet_write("s", 0600, text);
	assert_true(curve_keys_load(path, &got) < 0);
	assert_non_null(strstr(err_last()->text, "s:2: a second key"));
	assert_true(curve_keys_load("/nonexistent/s", &got) < 0);
	assert_true(curve_keys_load("/dev/zero", &got) < 0);
	snprintf(text, sizeof(text), "# mine\n  %s \r\n", zmqnet_keys[0][1]);
	zmqnet_write("s", 0400, text);
	assert_int_equal(curve_keys_load(path, &got), 0);
	assert_string_equal(got.public_key, zmqnet_keys[0][0]);
	assert_string_equal(got.secret_key, zmqnet_keys[0][1]);

	zmqnet_path(path, "l");
	zmqnet_write("l", 0600, lists[0]);
	assert_true(curve_allow_load(path, &allow) < 0);
	snprintf(text, sizeof(text), "a %s\nb %s\n", zmqnet_keys[0][0],
		 zmqnet_keys[0][0]);
	zmqnet_write("l", 0600, text);
	assert_true(curve_allow_load(path, &allow) < 0);
	assert_non_null(strstr(err_last()->text, "l:2: key "));
	snprintf(text, sizeof(text), "a %s h1\nb %s h2 H1\n", zmqnet_keys[0][0],
		 zmqnet_keys[1][0]);
	zmqnet_write("l", 0600, text);
	assert_true(curve_allow_load(path, &allow) < 0);
	assert_non_null(strstr(err_last()->text, "l:2: host H1 is already listed"));
	/* a host that would match no daemon is invalid */
	snprintf(text, sizeof(text), "a %s ::1:7400\n", zmqnet_keys[0][0]);
	zmqnet_write("l", 0600, text);
	assert_true(curve_allow_load(path, &allow) < 0);
	assert_non_null(strstr(err_last()->text, "l:1: host '::1:7400': must be"));
	snprintf(text, sizeof(text), "a %s\n", zmqnet_keys[0][0]);
	zmqnet_write("l", 0666, text);
	assert_true(curve_allow_load(path, &allow) < 0);
	assert_non_null(strstr(err_last()->text, "writable by others"));
	zmqnet_write("l", 0644, "# nobody\n");
	assert_int_equal(curve_allow_load(path, &allow), 0);
	assert_null(curve_allow_name(allow, zmqnet_keys[0][0]));
	curve_allow_free(allow);
}

/* ---- peers over it ---- */

static void on_up(void *owner, struct peer *peer)
{
	struct zmqnet_node *node = owner;

	(void)peer;
	node->ups++;
}

static void on_down(void *owner, struct peer *peer)
{
	struct zmqnet_node *node = owner;

	node->downs++;
	node->why = peer->why;
}

static int on_message(void *owner, struct peer *peer, const struct wire_header *h,
		      struct cursor *body)
{
	struct zmqnet_node *node = owner;

	(void)peer;
	(void)h;
	(void)body;
	node->frames++;
	return 0;
}

static void node_peers(struct zmqnet_node *node, const char *name)
{
	struct peers_callbacks callbacks = {.owner = node,
					    .on_up = on_up,
					    .on_down = on_down,
					    .on_message = on_message};
	struct peers_args args = {.loop = zmqnet_loop,
				  .config = &node->config,
				  .callbacks = &callbacks,
				  .name = name};

	assert_int_equal(link_zmq_new(zmqnet_loop, &node->config, &node->link), 0);
	args.link = node->link;
	assert_int_equal(peers_new(&args, &node->peers), 0);
}

static void allow_three(void)
{
	char text[300];

	snprintf(text, sizeof(text), "alice %s\nbob %s\nmallory %s\n", zmqnet_keys[0][0],
		 zmqnet_keys[1][0], zmqnet_keys[2][0]);
	zmqnet_write("allow", 0600, text);
}

static void peers_life_over_sockets(void **state)
{
	struct peer *peer, *back;

	(void)state;
	for (unsigned int curve = 0; curve < 2; curve++) {
		zmqnet_defaults(&a);
		zmqnet_defaults(&b);
		if (curve) {
			allow_three();
			zmqnet_use_curve(&a, 0);
			zmqnet_use_curve(&b, 1);
		}
		node_peers(&a, "a");
		node_peers(&b, "b");
		/* both at once */
		assert_int_equal(peers_dial(a.peers, b.link->endpoint, NULL, &peer), 0);
		assert_int_equal(peers_dial(b.peers, a.link->endpoint, NULL, &back), 0);
		zmqnet_wait(a.ups && b.ups);
		assert_int_equal(a.peers->count, 1);
		assert_int_equal(b.peers->count, 1);
		assert_memory_equal(peer->token_in, back->token_out, 16);
		assert_int_equal(peer_send_reliable(peer, WIRE_T_LEASE, "x", 1), 0);
		zmqnet_wait(b.frames == 1);
		zmqnet_wait(peer->rtt_ns > 0);
		/* restart of b on the same port */
		zmqnet_plain(&b, b.config.listen);
		struct config config = b.config;

		zmqnet_stop(&b);
		memset(&b, 0, sizeof(b));
		b.config = config;
		node_peers(&b, "b");
		zmqnet_wait(a.ups == 2 && b.ups == 1);
		assert_int_equal(a.downs, 1);
		assert_int_equal(peer->epoch, 2);
		/* BYE is received, not inferred */
		peers_close(b.peers, ERR_DRAIN, "evening");
		zmqnet_wait(a.downs == 2);
		assert_int_equal(a.why.code, ERR_DRAIN);
		zmqnet_stop(&a);
		zmqnet_stop(&b);
	}
}

/* A new list of `a` while it is a peer of `b`, and the resulting error. */
static const struct {
	const char *format, *words; /* of the keys of a, b, mallory; NULL: it stays up */
} relists[] = {
	{"alice %s\nbob %s 127.0.0.1\n", NULL},
	{"bob %s\nbob %s\n", NULL},
	{"alice %s\n", "its key was removed from curve_allow_file"},
	/* the name alone is not the key */
	{"alice %s\nrobert %s\nbob %s\n", "its key now has the name 'robert'"},
	{"alice %s\nbob %s 10.9.9.9\n", "no longer lists tcp://127.0.0.1:"},
};

static void relist(const char *format)
{
	char path[CONFIG_PATH_BYTES], text[400];
	struct curve_changes keys;

	snprintf(text, sizeof(text), format, zmqnet_keys[0][0], zmqnet_keys[1][0],
		 zmqnet_keys[2][0]);
	zmqnet_write("allow", 0600, text);
	zmqnet_path(path, "allow");
	assert_int_equal(link_zmq_reload(a.link, path, true, &keys), 0);
}

static void peering_ends_with_its_key(void **state)
{
	struct peer *peer;
	uint64_t began_ns;

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(relists); i++) {
		zmqnet_defaults(&a);
		zmqnet_defaults(&b);
		allow_three();
		zmqnet_use_curve(&a, 0);
		zmqnet_use_curve(&b, 1);
		node_peers(&a, "a");
		node_peers(&b, "b");
		assert_int_equal(peers_dial(b.peers, a.link->endpoint, NULL, &peer), 0);
		zmqnet_wait(a.ups && b.ups && peer->rtt_ns);
		relist(relists[i].format);
		began_ns = loop_clock_ns(zmqnet_loop);
		assert_int_equal(peers_recheck(a.peers), relists[i].words ? 1 : 0);
		if (!relists[i].words) {
			assert_int_equal(peer_send_reliable(peer, WIRE_T_LEASE, "x", 1),
					 0);
			zmqnet_wait(a.frames == 1);
			assert_int_equal(a.downs + b.downs, 0);
		} else {
			zmqnet_wait(a.downs && b.downs);
			assert_in_range(loop_clock_ns(zmqnet_loop) - began_ns, 0,
					LOOP_NS_PER_S);
			assert_int_equal(a.why.code, ERR_AUTH);
			assert_non_null(strstr(a.why.text, relists[i].words));
			assert_int_equal(b.why.code, ERR_AUTH);
			assert_non_null(strstr(b.why.text, relists[i].words));
		}
		zmqnet_stop(&a);
		zmqnet_stop(&b);
	}
}

/* It continues to dial, gets the reason, and is admitted when its line is back. */
static void peering_returns_with_its_key(void **state)
{
	struct peer *peer;

	(void)state;
	allow_three();
	zmqnet_use_curve(&a, 0);
	zmqnet_use_curve(&b, 1);
	node_peers(&a, "a");
	node_peers(&b, "b");
	assert_int_equal(peers_dial(b.peers, a.link->endpoint, NULL, &peer), 0);
	zmqnet_wait(a.ups && b.ups);
	relist("alice %s\n");
	assert_int_equal(peers_recheck(a.peers), 1);
	zmqnet_wait(b.downs && strstr(peer->why.text, "refuses this daemon's key"));
	assert_int_equal(a.ups + b.ups, 2);
	relist("alice %s\nbob %s\n");
	assert_int_equal(peers_recheck(a.peers), 0);
	zmqnet_wait(a.ups == 2 && b.ups == 2);
}

static void peer_instance_is_bound_to_its_key(void **state)
{
	void *context = zmq_ctx_new(), *client;
	struct wire_header h = {
		.version = WIRE_VERSION_MAX, .type = WIRE_T_HELLO, .epoch = 99};
	struct wire_hello m = {.version_min = WIRE_VERSION_MIN,
			       .version_max = WIRE_VERSION_MAX,
			       .features = 1};
	uint8_t frame[2048], body[1900];
	char endpoint[LINK_ENDPOINT_MAX];
	struct peer *peer;
	struct cursor c;

	(void)state;
	allow_three();
	zmqnet_use_curve(&a, 0);
	zmqnet_use_curve(&b, 1);
	node_peers(&a, "a");
	node_peers(&b, "b");
	assert_int_equal(peers_dial(a.peers, b.link->endpoint, NULL, &peer), 0);
	zmqnet_wait(a.ups && b.ups);
	/* mallory, allowed too, speaks in alice's name, and has its answers sent to her
	 */
	client = curve_client(context, &b, 2);
	zmqnet_plain(&b, endpoint);
	assert_int_equal(zmq_connect(client, endpoint), 0);
	memcpy(h.sender, peers_instance(a.peers), 16);
	for (unsigned int i = 0; i < 2; i++) {
		if (i == 0)
			strcpy(m.endpoint, a.link->endpoint);
		else
			snprintf(m.endpoint, sizeof(m.endpoint), "tcp://127.0.0.1:1#%s",
				 zmqnet_keys[2][0]);
		cursor_write(&c, body, sizeof(body));
		assert_int_equal(wire_hello_put(&c, &m), 0);
		h.body_len = (uint32_t)c.pos;
		wire_frame_put(frame, &h, body);
		zmqnet_wait(zmq_send(client, frame, WIRE_HEADER_BYTES + c.pos,
				     ZMQ_DONTWAIT) > 0);
	}
	zmqnet_wait(b.peers->stats.foreign_user == 1);
	assert_int_equal(b.peers->stats.hellos_misplaced, 1);
	assert_int_equal(a.downs + b.downs, 0);
	zmq_close(client);
	zmq_ctx_term(context);
}

/* Cut this process' connections to a port, as a network would. */
static unsigned int cut_connections_to(const char *endpoint)
{
	const char *port = strrchr(endpoint, ':');
	unsigned int cut = 0;

	for (int fd = 3; fd < 512; fd++) {
		struct sockaddr_in6 at;
		socklen_t len = sizeof(at);

		/* the port lies in the same place of both families */
		if (getpeername(fd, (struct sockaddr *)&at, &len) == 0 &&
		    (at.sin6_family == AF_INET || at.sin6_family == AF_INET6) &&
		    ntohs(at.sin6_port) == atoi(port + 1))
			cut += shutdown(fd, SHUT_RDWR) == 0;
	}
	return cut;
}

/* Its line was opened for an unauthenticated peer, and is opened again nevertheless. */
static void peer_answered_is_found_again(void **state)
{
	char plain[LINK_ENDPOINT_MAX];
	struct peer *peer, *back;

	(void)state;
	allow_three();
	zmqnet_use_curve(&a, 0);
	zmqnet_use_curve(&b, 1);
	a.config.ping_interval_ns = b.config.ping_interval_ns = 5 * LOOP_NS_PER_S;
	a.config.dead_after_ns = b.config.dead_after_ns = 60 * LOOP_NS_PER_S;
	node_peers(&a, "a");
	node_peers(&b, "b");
	assert_int_equal(peers_dial(a.peers, b.link->endpoint, NULL, &peer), 0);
	zmqnet_wait(a.ups && b.ups && peer->rtt_ns);
	back = list_first(&b.peers->all, struct peer, link);
	assert_true(impl_of(back)->line_once);
	zmqnet_plain(&a, plain);
	assert_int_equal(cut_connections_to(plain), 1);
	zmqnet_wait(!impl_of(back)->line_once && impl_of(back)->line_up);
	assert_int_equal(peer_send_reliable(back, WIRE_T_LEASE, "x", 1), 0);
	zmqnet_wait(a.frames == 1);
	assert_int_equal(a.downs + b.downs, 0);
}

/* ---- silent connections ---- */

static int raw_connect(const struct zmqnet_node *node)
{
	struct sockaddr_in at = {.sin_family = AF_INET,
				 .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	char plain[LINK_ENDPOINT_MAX];
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	zmqnet_plain(node, plain);
	at.sin_port = htons((uint16_t)atoi(strrchr(plain, ':') + 1));
	assert_int_equal(connect(fd, (struct sockaddr *)&at, sizeof(at)), 0);
	return fd;
}

/* The other side has closed it, after its own greeting. */
static bool raw_closed(int fd)
{
	char bytes[256];
	ssize_t n;

	do
		n = recv(fd, bytes, sizeof(bytes), MSG_DONTWAIT);
	while (n > 0);
	return n == 0 || errno != EAGAIN;
}

/* ZMTP's whole handshake without keys: such a connection lives for ever. */
static void raw_handshake(int fd)
{
	static const uint8_t begin[] = {0xff, 0,    0, 0, 0,   0,   0,	 0,
					1,    0x7f, 3, 0, 'N', 'U', 'L', 'L'};
	static const char ready[] = "\4\x1c\5READY\13Socket-Type\0\0\0\6DEALER";
	uint8_t hello[64 + sizeof(ready) - 1] = {0};

	memcpy(hello, begin, sizeof(begin));
	memcpy(hello + 64, ready, sizeof(ready) - 1);
	assert_int_equal(send(fd, hello, sizeof(hello), MSG_NOSIGNAL), sizeof(hello));
}

#define IDLE 600u

static void connections_unproven_are_closed_for_others(void **state)
{
	static int idle[IDLE];
	struct peer *peer;

	(void)state;
	a.config.dead_after_ns = b.config.dead_after_ns = 600 * LOOP_NS_PER_S;
	node_peers(&a, "a");
	node_peers(&b, "b");
	for (unsigned int i = 0; i < IDLE; i++) {
		idle[i] = raw_connect(&b);
		raw_handshake(idle[i]);
		if (i % 100 == 0)
			zmqnet_turn(5 * MS);
	}
	/* the oldest were closed, and a new peer is admitted */
	for (unsigned int i = 0; i < IDLE - 256; i++)
		zmqnet_wait(raw_closed(idle[i]));
	assert_int_equal(peers_dial(a.peers, b.link->endpoint, NULL, &peer), 0);
	zmqnet_wait(a.ups && b.ups && peer->rtt_ns);
	assert_false(raw_closed(idle[IDLE - 1]));
	for (unsigned int i = 0; i < IDLE; i++)
		close(idle[i]);
	zmqnet_wait(!b.link->unproven);
	assert_int_equal(a.downs + b.downs, 0);
}

/* It has an allowed key, and sends nothing. */
static void connection_of_a_known_key_must_speak(void **state)
{
	void *context = zmq_ctx_new(), *client, *monitor;
	char plain[LINK_ENDPOINT_MAX];
	struct peer *peer;

	(void)state;
	allow_three();
	zmqnet_use_curve(&a, 0);
	zmqnet_use_curve(&b, 1);
	a.config.dead_after_ns = b.config.dead_after_ns = LOOP_NS_PER_S;
	node_peers(&a, "a");
	node_peers(&b, "b");
	assert_int_equal(peers_dial(a.peers, b.link->endpoint, NULL, &peer), 0);
	client = curve_client(context, &b, 2);
	assert_int_equal(zmq_socket_monitor(client, "inproc://idle",
					    ZMQ_EVENT_HANDSHAKE_SUCCEEDED |
						    ZMQ_EVENT_DISCONNECTED),
			 0);
	monitor = zmq_socket(context, ZMQ_PAIR);
	assert_int_equal(zmq_connect(monitor, "inproc://idle"), 0);
	zmqnet_plain(&b, plain);
	assert_int_equal(zmq_connect(client, plain), 0);
	zmqnet_wait(monitor_saw(monitor, ZMQ_EVENT_HANDSHAKE_SUCCEEDED));
	zmqnet_wait(monitor_saw(monitor, ZMQ_EVENT_DISCONNECTED));
	/* those of daemons stay */
	assert_int_equal(sm_state(&peer->sm), PEER_UP);
	assert_int_equal(a.downs + b.downs, 0);
	zmq_close(monitor);
	zmq_close(client);
	zmq_ctx_term(context);
}

/* ZMTP 3.0's greeting, then parts of a message that never ends. */
static size_t raw_endless(int fd, const char *mechanism)
{
	static uint8_t part[9 + (64u << 10)] = {0x03, 0, 0, 0, 0, 0, 1, 0, 0};
	uint8_t greeting[64] = {0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 0};
	size_t sent = 0;
	ssize_t n;

	memcpy(greeting + 12, mechanism, strlen(mechanism));
	(void)!send(fd, greeting, sizeof(greeting), MSG_NOSIGNAL);
	for (unsigned int i = 0; i < 4000; i++) {
		n = send(fd, part, sizeof(part), MSG_NOSIGNAL | MSG_DONTWAIT);
		if (n < 0 && errno != EAGAIN)
			break;
		sent += n > 0 ? (size_t)n : 0;
		if (n < 0)
			zmqnet_turn(1 * MS);
	}
	return sent;
}

static void message_endless_of_unproven_peer_is_not_kept(void **state)
{
	static const char *const mechanisms[] = {"NULL", "CURVE", "PLAIN"};
	struct mallinfo2 before, after;

	(void)state;
	allow_three();
	zmqnet_use_curve(&b, 1);
	node_peers(&b, "b");
	before = mallinfo2();
	for (size_t i = 0; i < ARRAY_LEN(mechanisms); i++) {
		int fd = raw_connect(&b);

		/* bytes in the kernel's buffers; plain sockets would accept 256 MB */
		assert_in_range(raw_endless(fd, mechanisms[i]), 0, 32u << 20);
		zmqnet_wait(raw_closed(fd));
		close(fd);
	}
	after = mallinfo2();
	assert_true(after.uordblks < before.uordblks + (1u << 20));
	assert_int_equal(b.peers->stats.frames_in, 0);
	assert_int_equal(link_zmq_stats(b.link)->bad_frames, 0);
}

/* A listener that accepts and closes connections; returns their number. */
static unsigned int closes_what_comes(int fd, uint64_t ns)
{
	uint64_t end_ns = loop_clock_ns(zmqnet_loop) + ns;
	unsigned int came = 0;

	while (loop_clock_ns(zmqnet_loop) < end_ns) {
		int one = accept(fd, NULL, NULL);

		if (one >= 0)
			close(one);
		came += one >= 0;
		loop_turn(zmqnet_loop, 5 * MS);
	}
	return came;
}

/* An endpoint named in HELLO is dialled once a second at most, and only where its line
 * allows it. */
static void peer_hello_dials_once_and_only_its_own_host(void **state)
{
	struct sockaddr_in at = {.sin_family = AF_INET,
				 .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t at_len = sizeof(at);
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	void *context = zmq_ctx_new(), *client;
	struct wire_header h = {
		.version = WIRE_VERSION_MAX, .type = WIRE_T_HELLO, .epoch = 99};
	struct wire_hello m = {.version_min = WIRE_VERSION_MIN,
			       .version_max = WIRE_VERSION_MAX,
			       .features = 1};
	uint8_t frame[2048], body[1900];
	char endpoint[LINK_ENDPOINT_MAX], text[300];
	struct cursor c;

	(void)state;
	assert_int_equal(bind(fd, (struct sockaddr *)&at, sizeof(at)), 0);
	assert_int_equal(listen(fd, 64), 0);
	assert_int_equal(getsockname(fd, (struct sockaddr *)&at, &at_len), 0);
	zmqnet_use_curve(&b, 1);
	for (unsigned int named = 0; named < 2; named++) {
		snprintf(text, sizeof(text), "mallory %s %s\n", zmqnet_keys[2][0],
			 named ? "127.0.0.1" : "10.1.1.1 127.0.0.1:1");
		zmqnet_write("allow", 0600, text);
		node_peers(&b, "b");
		client = curve_client(context, &b, 2);
		zmqnet_plain(&b, endpoint);
		assert_int_equal(zmq_connect(client, endpoint), 0);
		memset(h.sender, 7, 16);
		snprintf(m.endpoint, sizeof(m.endpoint), "tcp://127.0.0.1:%u#%s",
			 ntohs(at.sin_port), zmqnet_keys[2][0]);
		for (unsigned int i = 0; i < 8; i++) {
			m.nonce = i + 1;
			cursor_write(&c, body, sizeof(body));
			assert_int_equal(wire_hello_put(&c, &m), 0);
			h.body_len = (uint32_t)c.pos;
			wire_frame_put(frame, &h, body);
			zmqnet_wait(zmq_send(client, frame, WIRE_HEADER_BYTES + c.pos,
					     ZMQ_DONTWAIT) > 0);
		}
		unsigned int came = closes_what_comes(fd, 700 * MS);

		assert_int_equal(came, named);
		assert_int_equal(b.peers->stats.hellos_misplaced, named ? 0 : 8);
		zmq_close(client);
		zmqnet_stop(&b);
	}
	close(fd);
	zmq_ctx_term(context);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, zmqnet_setup, zmqnet_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(curve_allowed_daemons_speak),
		TEST(curve_key_is_found_by_host),
		TEST(curve_peer_not_on_the_list_is_refused),
		TEST(unknown_keys_of_one_address_leave_room),
		TEST(curve_server_with_other_key_is_refused),
		TEST(curve_reload_admits_and_strikes),
		TEST(curve_files_are_checked),
		TEST(peers_life_over_sockets),
		TEST(peering_ends_with_its_key),
		TEST(peering_returns_with_its_key),
		TEST(peer_instance_is_bound_to_its_key),
		TEST(peer_answered_is_found_again),
		TEST(connections_unproven_are_closed_for_others),
		TEST(connection_of_a_known_key_must_speak),
		TEST(message_endless_of_unproven_peer_is_not_kept),
		TEST(peer_hello_dials_once_and_only_its_own_host),
	};

	log_set_level(LOG_LEVEL_ERROR);
	return cmocka_run_group_tests_name("link_curve", tests, zmqnet_group_setup,
					   zmqnet_group_teardown);
}
